"""Recommending and full ranking beside the bare product of a model: CPU milliseconds a user, in turns.

    python benchmarks/score_items.py [--items 200000] [--users 512] [--threads 1] [--models two_tower,ials] [--out FILE]

Weights are drawn at random, because they change no time. Each user acted on 20 items. The bare product is the model's
own: vectors of users times vectors of items in fp32, for NeuMF, whose score is no product, the products of its layers
after the first, and for EASE the rows of weights of a user's items, added up. Nothing is masked, selected or written
there. `recommend` finds the 10 best items of each user without those seen, by prepared id, as `Predictor.recommend` and
`recspec recommend --all` do; `full` counts the items above each user's positive, as `recspec evaluate` does.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recspec.feature_spec import FeatureSpec
    from recspec.models import Model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "two_tower": ("two_tower", {"dim": 64, "hidden": (128,)}),
    "ials": ("ials", {"factors": 64}),
    "sasrec": ("sasrec", {"dim": 64, "blocks": 2, "length": 50}),
    "gmf": ("neumf", {"factors": 64, "use_mlp": False, "item_bias": True}),
    "neumf 8": ("neumf", {"factors": 8, "layers": (64, 32, 16, 8), "dropout": 0.0}),
    "neumf 64": ("neumf", {"factors": 64, "layers": (256, 256, 128, 64), "dropout": 0.0}),
    "mult_vae": ("mult_vae", {}),
    "ease": ("ease", {}),
}
EVENTS = 20  # of a user


def main() -> None:
    """Prints one line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--users", type=int, default=512, help="users of a measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "ease"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    asked = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(asked.threads)

    from recspec.base import machine

    machine.limit_openmp_spin()  # before torch is loaded, as the command line does

    import torch

    torch.set_num_threads(asked.threads)
    machine.keep_freed_memory()
    lines = []
    for name in asked.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(measured(Path(folder), name, asked))
        print(json.dumps(lines[-1]), flush=True)
    if asked.out is not None:
        told = {"machine": machine.describe(), "arguments": {**vars(asked), "out": None}, "lines": lines}
        asked.out.write_text(json.dumps(told, indent=2) + "\n")


def measured(folder: Path, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The figures of a model."""
    import numpy as np
    import torch

    from recspec.inference import Predictor, RecommendRequest

    kind, settings = MODELS[name]
    spec = made_up_spec(folder, asked.users, asked.items)
    made_up_run(folder / "run", spec, kind, settings)
    predictor = Predictor.open(folder / "run", device="cpu", verify=False)
    recommender, ids = predictor.recommender, np.arange(1, asked.users + 1)
    wanted = recommender.check(RecommendRequest(users=("1",), k=10))

    def recommend() -> None:
        for block in recommender.blocks(len(ids)):
            recommender.top_items(ids[block], wanted)

    def full() -> None:
        ranked_fully(predictor.model, spec)

    with torch.inference_mode():
        product = bare_product(predictor.model, asked.items, asked.users)
        ways: dict[str, Callable[[], None]] = {"product": product, "recommend": recommend, "full": full}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(asked.turns + 1):
            for way, run in ways.items():
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                if turn:  # the first one warms up
                    took = time.process_time() - cpu, time.perf_counter() - wall
                    times[way].append((1e3 * took[0] / asked.users, 1e3 * took[1] / asked.users))
    line: dict[str, Any] = {"model": name, "settings": settings, "items": asked.items}
    for way, spent in times.items():
        line[way] = {
            "cpu_ms": round(median(cpu for cpu, _ in spent), 3),
            "wall_ms": round(median(wall for _, wall in spent), 3),
        }
    for way in ("recommend", "full"):
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(times[way], times["product"], strict=True)]
        line[f"{way} / product"] = round(median(ratios), 2)
    return line


def made_up_spec(folder: Path, users: int, items: int) -> FeatureSpec:
    """Ids of users and items without names; `test` holds one positive of each user."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recspec.feature_spec import FeatureSpec

    rng = np.random.default_rng(1)
    columns = {
        "user": np.arange(1, users + 1),
        "item": np.resize(rng.permutation(items), users) + 1,
        "label": np.ones(users),
    }
    for split in ("train", "test"):
        columns["item"] = columns["item"] % items + 1
        types = {"user": np.int32, "item": np.int32, "label": np.float32}
        table = pa.table({name: values.astype(types[name]) for name, values in columns.items()})
        pq.write_table(table, folder / f"{split}.parquet")
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "user": {"dtype": "int32", "cardinality": users + 1},
                "item": {"dtype": "int32", "cardinality": items + 1},
                "label": {"dtype": "float32"},
            },
            "source_spec": {
                split: [{"type": "parquet", "features": ["user", "item", "label"], "files": [f"{split}.parquet"]}]
                for split in ("train", "test")
            },
            "channel_spec": {"user": ["user"], "item": ["item"], "label": ["label"]},
        },
        folder,
    )


def made_up_run(folder: Path, spec: FeatureSpec, kind: str, settings: dict[str, Any]) -> None:
    """A bundle of random weights, whose users acted on `EVENTS` items each."""
    import numpy as np
    import torch

    from recspec.bundle import Card, Seen
    from recspec.bundle import folder as bundle
    from recspec.models import MODELS, ItemModel, UserEvents

    rng = np.random.default_rng(2)
    users, items = spec.num_ids(spec.user_id), spec.num_ids(spec.item_id)
    events = np.sort(rng.integers(1, items, (users, EVENTS), dtype=np.int32), axis=1)
    chosen = MODELS[kind].Settings.model_validate(settings)
    model = MODELS[kind](spec, chosen)
    if isinstance(model, ItemModel):
        offsets = np.arange(users + 1, dtype=np.int64) * EVENTS
        model.know(UserEvents(offsets, events.ravel()).interactions(items))
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_known = name.startswith("known.") or name in ("line",) or ".known" in name
            if tensor.is_floating_point() and not is_known:
                tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.1)
    flags = torch.ones(events.size, dtype=torch.bool)
    seen = Seen(
        torch.arange(users + 1) * EVENTS,
        torch.from_numpy(events.ravel().astype(np.int32)),
        flags,
        flags,
        torch.from_numpy(np.bincount(events.ravel(), minlength=items) + 1),
    )
    bundle.save(folder, model, Card(model=kind, settings=chosen.model_dump(mode="json")), seen=seen)


def bare_product(model: Model, items: int, users: int) -> Callable[[], None]:
    """The products that the model's scores of all items can't do without."""
    import torch

    from recspec.models.neumf import NeuMFSettings

    own = model.settings
    numbers = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers) * 0.1

    width = {"ials": "factors", "neumf": "factors", "two_tower": "dim", "sasrec": "dim"}.get(model.name)
    wide = int(getattr(own, width)) if width else 600
    ours, theirs, block = drawn(users, wide), drawn(items, wide), 32
    out = torch.empty(block, items)

    def product() -> None:
        for rows in torch.split(ours, block):
            torch.mm(rows, theirs.T, out=out[: len(rows)])

    if not (isinstance(own, NeuMFSettings) and own.use_mlp):
        return product
    widths, rows = own.layers[1:], 4096
    layers = [drawn(x, y) for x, y in zip(widths, [*widths[1:], 1], strict=True)]
    first = drawn(rows, widths[0])

    def with_layers() -> None:
        product()
        for _ in range(users * items // rows):
            x = first
            for layer in layers[:-1]:
                x = x @ layer
            x @ layers[-1][:, 0]

    return with_layers


def ranked_fully(model: Model, spec: FeatureSpec) -> None:
    """The positions of the users' positives among all items."""
    from recspec.evaluation.rankings import rank_full
    from recspec.evaluation.scoring import scores_of
    from recspec.evaluation.task import EvaluateSettings, EvaluationTask

    rank_full(scores_of(model, EvaluationTask(spec, "test", ["full"], EvaluateSettings())))


if __name__ == "__main__":
    main()
