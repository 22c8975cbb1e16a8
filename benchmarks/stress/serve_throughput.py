"""Answers a second of `recspec serve` and of NVIDIA's Triton, with the same export on the same core.

    python benchmarks/stress/serve_throughput.py
    python benchmarks/stress/serve_throughput.py --models neumf --rows 1,512 --rounds 1

From nothing: makes an environment with the server that the nvidia-pytriton wheel contains (2.51, CPU, Python backend
alone), and a model repository with one ONNX export of each model (random weights, dynamic batching as `recspec export`
writes it). Triton and `recspec serve` open the same folder and run beside each other, both pinned to core 0, each with
one thread for a computation. One client process on core 1 (`_throughput_client.py`) asks them in turns, over HTTP with
binary tensors and over gRPC with raw contents. It uses more and more connections; each asks again as soon as it has its
answer. The answers to the first requests are compared with the bundle's own model.

Prints, for each number of rows per request, the most answers a second of which 99 % came within the goal. Writes all
figures to results/serve_throughput.json: the medians of the rounds, p50 and p99 by connections, the server's CPU time
for an answer, and how busy the client was. Exit status 1 where an answer differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from _triton_server import REQUIREMENTS, recspec, triton
from serve_workers import cpu_seconds, family

if TYPE_CHECKING:
    from recspec.bundle.folder import Bundle

DIFFERENCE = 1e-5
REQUESTS = 8
"""Different requests that the connections send in turns."""
SERVER_CORE, CLIENT_CORE = 0, 1
NAMES = ("triton", "recspec")
PROTOCOLS = ("http", "grpc")

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "neumf": {"factors": 32, "layers": (64, 32, 16)},
    "wide_deep": {"hidden": (256, 128, 64)},
}
COLUMNS = {
    "neumf": {"user_id": 100_000, "item_id": 20_000},
    "wide_deep": {f"number_{place}": 0 for place in range(13)} | {f"category_{place}": 10_000 for place in range(26)},
}
"""Inputs of a model -> number of ids, 0 for a number; those of `wide_deep` are as many as Criteo's."""
ROLES = {"user_id": "user", "item_id": "item"}

Found = dict[str, Any]


def make_model(name: str, folder: Path) -> Bundle:
    """A bundle of random weights."""
    import torch

    from recspec.bundle import folder as bundle
    from recspec.bundle.folder import Card
    from recspec.feature_spec import FeatureSpec
    from recspec.models import MODELS

    columns = COLUMNS[name]
    channels: dict[str, list[str]] = {"label": ["label"]}
    for column in columns:
        channels.setdefault(ROLES.get(column, "context"), []).append(column)
    kinds = {
        column: {"dtype": "torch.int32", "cardinality": ids} if ids else {"dtype": "torch.float32"}
        for column, ids in columns.items()
    }
    spec = FeatureSpec.from_dict(
        {"feature_spec": {**kinds, "label": {"dtype": "torch.float32"}}, "source_spec": {}, "channel_spec": channels}
    )
    settings = MODELS[name].Settings.model_validate(SETTINGS[name])
    torch.manual_seed(0)
    model = MODELS[name](spec, settings)
    saved = bundle.save(folder / f"bundle-{name}", model, Card(model=name, settings=settings.model_dump(mode="json")))
    return bundle.load(saved)


def make_export(name: str, folder: Path, rows: int) -> None:
    """An export in `folder/repository`, and rows with the bundle's own probabilities under the name "" in NAME.npz."""
    from recspec.export.exported_model import EagerModel
    from recspec.export.exporter import ExportSettings, export
    from recspec.feature_spec.signature import signature_of

    made = make_model(name, folder)
    wanted = ExportSettings(format="triton", triton_backend="python", seconds=0.1, threads=1, name=name)
    export(made, folder / "repository", wanted, None)
    signature, numbers = signature_of(made.spec, made.model.features(), "rows"), np.random.default_rng(0)
    inputs = {
        port.name: numbers.standard_normal((rows, port.width), np.float32)
        if port.num_ids is None
        else numbers.integers(0, port.num_ids, (rows, port.width)).astype(port.dtype)
        for port in signature.inputs
    }
    expected = EagerModel(made.model, signature).run(inputs)["probability"][:, 0]
    np.savez(folder / f"{name}.npz", **{"": expected}, **inputs)  # type: ignore[arg-type]


# --- the servers -----------------------------------------------------------------------------------------------------


@contextmanager
def serving(python: Path, models: Sequence[str], folder: Path) -> Iterator[dict[str, tuple[int, dict[str, int]]]]:
    """Both servers with the models loaded, on one core: their process and their ports."""
    pinned, repository = ["taskset", "-c", str(SERVER_CORE)], folder / "repository"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Triton leaves __pycache__ in the export, which the manifest doesn't know.
    command = [*pinned, sys.executable, "-m", "recspec", "serve", *(f"{each}={repository / each}" for each in models)]
    command += ["--threads", "1", "--no-verify"]
    with ExitStack() as running:
        process, theirs = running.enter_context(triton(python, repository, folder, pinned))
        for model in models:
            url = f"http://127.0.0.1:{theirs['http']}/v2/repository/models/{model}/load"
            urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60).close()
        ours, ports = running.enter_context(recspec(command, folder, environ))
        yield {"triton": (process.pid, theirs), "recspec": (ours.pid, ports)}


def ask(
    server: tuple[int, Mapping[str, int]], protocol: str, model: str, rows: int, folder: Path, pace: Mapping[str, Any]
) -> Found:
    """What one run of the client finds, with the server's CPU time for an answer."""
    pid, ports = server
    told = json.dumps({**pace, "rows": rows, "requests": REQUESTS})
    client = Path(__file__).with_name("_throughput_client.py")
    command = [
        "taskset",
        "-c",
        str(CLIENT_CORE),
        sys.executable,
        str(client),
        protocol,
        "127.0.0.1",
        str(ports[protocol]),
        model,
        str(folder / f"{model}.npz"),
        told,
    ]
    before = cpu_seconds(list(family(pid)))
    found: Found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    spent = cpu_seconds(list(family(pid))) - before
    found["cpu_ms"] = round(1000 * spent / found.pop("asked"), 3)
    return found


# --- figures ---------------------------------------------------------------------------------------------------------


def best(found: Found, goal_ms: float) -> Found:
    """The line with the most answers a second within the goal."""
    within = [line for line in found["load"] if line["p99_ms"] < goal_ms]
    return max(within, key=lambda line: line["per_second"], default={"per_second": 0.0, "clients": 0, "p99_ms": None})


def summary(rounds: Sequence[Found], goal_ms: float) -> Found:
    """The median of the rounds' best figures, and all that was found."""
    lines = [best(found, goal_ms) for found in rounds]
    speeds = [line["per_second"] for line in lines]
    typical = min(lines, key=lambda line: abs(line["per_second"] - statistics.median(speeds)))
    return {
        "per_second": round(statistics.median(speeds), 1),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "clients": typical["clients"],
        "p99_ms": typical["p99_ms"],
        "cpu_ms": statistics.median(found["cpu_ms"] for found in rounds),
        "difference": max(found["difference"] for found in rounds),
        "rounds": [found["load"] for found in rounds],
    }


def print_table(lines: Sequence[Found], goal_ms: float) -> None:
    """One line for each model, protocol and size of a request."""
    print(f"answers/s at p99 < {goal_ms:g} ms (connections)")
    print(f"{'model':<12}{'protocol':<10}{'rows':>5}{'triton':>16}{'recspec':>16}{'ratio':>7}", end="")
    print(f"{'CPU ms':>9}{'CPU ms':>9}")
    for line in lines:
        theirs, ours = line["triton"], line["recspec"]
        ratio = ours["per_second"] / theirs["per_second"] if theirs["per_second"] else float("inf")
        cells = [f"{each['per_second']:,.0f} ({each['clients']})" for each in (theirs, ours)]
        print(
            f"{line['model']:<12}{line['protocol']:<10}{line['rows']:>5}{cells[0]:>16}{cells[1]:>16}{ratio:>7.2f}"
            f"{theirs['cpu_ms']:>9.3f}{ours['cpu_ms']:>9.3f}"
        )


def main() -> None:
    """Make models and servers, ask in turns, print and write."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--models", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    given.add_argument("--rows", default="1,8,64,512", help="rows a request")
    given.add_argument("--clients", default="1,2,4,8,16,32,64", help="connections; two that miss the goal end the rest")
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--seconds", type=float, default=1.0, help="of each number of connections")
    given.add_argument("--warmup", type=float, default=0.25, help="seconds before that")
    given.add_argument("--goal-ms", type=float, default=10.0, help="p99")
    given.add_argument("--environment", type=Path, help="folder of the server's environment")
    given.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve_throughput.json")
    arguments = given.parse_args()

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _side_by_side import environments, made_python, where_and_when, write

    python = made_python("the server", arguments.environment or environments().with_name("triton"), REQUIREMENTS)
    sizes = [int(each) for each in arguments.rows.split(",")]
    pace = {name: getattr(arguments, name) for name in ("seconds", "warmup", "goal_ms")}
    pace["clients"] = [int(each) for each in arguments.clients.split(",")]
    keys = [(model, protocol, size) for model in arguments.models for protocol in PROTOCOLS for size in sizes]
    found: dict[tuple[str, str, int], dict[str, list[Found]]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for model in arguments.models:
            make_export(model, folder, max(sizes) * REQUESTS)
        with serving(python, arguments.models, folder) as servers:
            for turn in range(arguments.rounds):
                for key in keys:
                    model, protocol, size = key
                    for name in NAMES:
                        one = ask(servers[name], protocol, model, size, folder, pace)
                        found.setdefault(key, {}).setdefault(name, []).append(one)
                        fastest = best(one, arguments.goal_ms)
                        print(f"round {turn + 1}: {name} {key}: {fastest['per_second']} answers/s", file=sys.stderr)
    lines: list[Found] = [
        {"model": model, "protocol": protocol, "rows": size}
        | {name: summary(rounds, arguments.goal_ms) for name, rounds in servers_found.items()}
        for (model, protocol, size), servers_found in found.items()
    ]
    print_table(lines, arguments.goal_ms)
    about = {"requirements": REQUIREMENTS, "rounds": arguments.rounds, **pace}
    write({**about, "lines": lines, **where_and_when()}, arguments.out)
    if any(line[name]["difference"] > DIFFERENCE for line in lines for name in NAMES):
        raise SystemExit(f"an answer differs by more than {DIFFERENCE}")


if __name__ == "__main__":
    main()
