"""Training on the workers of a Ray cluster: Ray starts the ranks, and starts all of them anew if one dies."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recspec.base.errors import RecspecError, SettingsError, TrainingError, require_extra

STARTS_ANEW = 3
"""How often Ray starts the ranks anew after one has died, before it gives up."""

LOOKS = 0.2
"""Seconds between looks at the log."""

FOLDER = ".ray"
"""Ray's own files, inside RUN while it trains."""


def train_on_ray(
    work: Callable[[Mapping[str, Any]], None],
    processes: int,
    run: Path,
    device: str,
    given: Mapping[str, Any],
    show: Callable[[Mapping[str, object]], None],
) -> None:
    """Run `work` on the workers of a Ray cluster, which trains within `rank_on_ray`; `show` receives the events.

    `work` gets a table with `given`: the arguments of `train`, with the run and the device.

    Ray is reached at RAY_ADDRESS, and without it a cluster of this machine is started. All workers must see the paths
    of the data and the run.

    Raises:
        MissingExtraError: without Ray.
        SettingsError: if the cluster has too few GPUs or cores.
        TrainingError: if a rank fails, or has died too often.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    ray = require_extra("ray", "ray")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    address = os.environ.get("RAY_ADDRESS")
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=False)
    try:
        uses_gpus = _check(ray.cluster_resources(), processes, device)
        run.mkdir(parents=True, exist_ok=True)
        folder = run.resolve() / FOLDER
        import secrets

        job = secrets.token_hex(8)
        noted = folder / f"problems-{job}"
        config = {
            "given": {**given, "run": str(run.resolve()), "device": "cuda" if uses_gpus else "cpu"},
            "job": job,
            "problems": str(noted),
        }
        trainer = TorchTrainer(
            work,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=processes, use_gpu=uses_gpus),
            torch_config=TorchConfig(backend="nccl" if uses_gpus else "gloo"),
            run_config=RunConfig(
                name=job, storage_path=str(folder), failure_config=FailureConfig(max_failures=STARTS_ANEW)
            ),
        )
        failed: Exception | None = None
        with _followed(run / "log.jsonl", show):
            try:
                trainer.fit()
            except Exception as error:  # Ray has an error class for each of its layers
                failed = error
        problems = sorted(noted.glob("*")) if noted.is_dir() else []
        told = problems[0].read_text(encoding="utf-8") if problems else ""
        shutil.rmtree(folder, ignore_errors=True)
        if told:
            raise TrainingError(told)
        if failed is not None:
            why = str(failed).splitlines()[0]
            raise TrainingError(f"ray: {why}; the same command with --resume continues from the newest checkpoint")
    finally:
        if started:
            ray.shutdown()


def _check(there: Mapping[str, float], processes: int, device: str) -> bool:
    """Whether the ranks run on GPUs; refuses a cluster that lacks devices, on which Ray would wait for ever."""
    if device not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device is '{device}'; with --launcher ray expected auto, cpu or cuda")
    gpus, cores = there.get("GPU", 0), there.get("CPU", 0)
    uses_gpus = device == "cuda" or (device == "auto" and gpus >= processes)
    has, what = (gpus, "GPUs") if uses_gpus else (cores, "cores")
    if has < processes:
        raise SettingsError(f"--processes is {processes}, but the Ray cluster has {has:g} {what}")
    return uses_gpus


@contextmanager
def rank_on_ray(config: Mapping[str, Any]) -> Iterator[None]:
    """Make this worker of Ray a rank that meets the others as under torchrun, and note errors of the user."""
    import torch
    import torch.distributed as dist

    from recspec.loading import RankLost

    # Ray's process group only tells where the ranks meet: recspec's own names the rank that is lost.
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if rank == 0 else None  # type: ignore[attr-defined]
    port = torch.tensor(0 if store is None else store.port, device=device)
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    # torchrun says the same of a job that it may start anew: a run of this job continues, any other one is refused.
    os.environ.update(
        MASTER_PORT=f"{int(port)}",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID=config["job"],
        TORCHELASTIC_RESTART_COUNT="1",
    )
    try:
        yield
    except RankLost:
        raise  # Ray starts all ranks anew
    except RecspecError as error:
        problems = Path(config["problems"])
        problems.mkdir(parents=True, exist_ok=True)
        (problems / f"{rank:06d}").write_text(str(error), encoding="utf-8")


@contextmanager
def _followed(log: Path, show: Callable[[Mapping[str, object]], None]) -> Iterator[None]:
    """Show each event that the first rank writes until the end of the block."""
    over = threading.Event()
    start = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        place, ended = start, False
        while not ended:
            ended = over.wait(LOOKS)
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(place)
                for line in file:
                    if line.endswith(b"\n"):
                        show(json.loads(line))
                        place += len(line)

    thread = threading.Thread(target=follow, name="recspec-follow")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
