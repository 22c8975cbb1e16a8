"""A pipeline over a large catalogue: raw request -> candidates -> filter -> ranker -> titles, in milliseconds.

    python benchmarks/pipeline.py [--items 1000000] [--candidates 500] [--threads 2] [--out FILE]

From nothing: prepares made-up interactions in which every item occurs, with a category and a price of each, makes a
two-tower model as retriever, and a Wide & Deep (and with --history a SIM) as ranker, joins them by `pipeline build`,
and asks for the 10 best items of one user after another: from the raw user id to raw item ids and titles. No user is
asked twice. Weights are drawn at random, because they change no time. Filters are expressions of the request. Prints
p50 and p99 of each kind of request, CPU milliseconds, and the time of each stage.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = {"wide_deep": {"hidden": (256, 128), "embedding_dim": 16}}
"""Sizes that `recspec train` proposes for some million samples, where they are not the class's own."""
FILTERS = {"none": None, "30 % of the items": "price < 30", "10 % of the items": "category in ('c1', 'c2')"}


def main() -> None:
    """Prints one line for each ranker and filter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=300, help="requests of each kind")
    parser.add_argument("--history", type=int, default=0, help="events of a history, for SIM; 0 leaves SIM out")
    parser.add_argument("--folder", type=Path, help="folder in which files are kept, and found again")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    asked = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(asked.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            line
            for ranker in ("wide_deep", *(["sim"] if asked.history else []))
            for line in measured(folder, ranker, asked)
        ]
    if asked.out is not None:
        told = {"arguments": {**vars(asked), "folder": None, "out": None}, "lines": lines}
        asked.out.write_text(json.dumps(told, indent=2) + "\n")


def measured(folder: Path, ranker: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a ranker."""
    import torch

    from recspec.inference import Predictor, RecommendRequest, build_pipeline
    from recspec.inference import requests as answers

    torch.set_num_threads(asked.threads)
    spec = prepared(folder, asked.items, asked.history)
    for name in ("two_tower", ranker):
        if not (folder / name).exists():
            made_up(folder / name, spec, name)
    target = folder / f"{ranker}_pipeline"
    if not target.exists():
        began = time.perf_counter()
        built = build_pipeline(target, [str(folder / "two_tower")], folder / ranker, candidates=asked.candidates)
        print(f"{ranker}: built in {time.perf_counter() - began:.1f} s: {built.retrievers[0].search}", flush=True)
    began = time.perf_counter()
    predictor = Predictor.open(target, device="cpu", verify=False)
    users = iter(predictor.raw_ids("user", torch.randperm(len(predictor.users)).numpy() + 1).to_pylist())
    answers.recommend(predictor, RecommendRequest(users=(next(users),)))
    print(f"{ranker}: opened and first answer in {time.perf_counter() - began:.1f} s", flush=True)
    lines = []
    for name, text in FILTERS.items():

        def ask(text: str | None = text) -> None:
            found = answers.recommend(predictor, RecommendRequest(users=(next(users),), filter=text))
            assert len(found["items"]) == 10
            assert all(item["title"] for item in found["items"])

        with stages() as spent:
            line = {"ranker": ranker, "filter": name, **times(ask, asked.requests)}
            line["stages_ms"] = {
                stage: round(1000 * sum(each[20:]) / max(1, len(each) - 20), 3) for stage, each in spent.items()
            }
        lines.append(line)
        print(json.dumps(line), flush=True)
    return lines


def times(ask: Callable[[], None], count: int) -> dict[str, float]:
    """Milliseconds of calls, after 20 that are not counted."""
    import numpy as np

    for _ in range(20):
        ask()
    found = []
    cpu = time.process_time()
    for _ in range(count):
        began = time.perf_counter()
        ask()
        found.append(1000 * (time.perf_counter() - began))
    spent = 1000 * (time.process_time() - cpu) / count
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return {"p50_ms": round(p50, 2), "p90_ms": round(p90, 2), "p99_ms": round(p99, 2), "cpu_ms": round(spent, 2)}


@contextmanager
def stages() -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of the stages."""
    from recspec.inference import ItemIndex, Pipeline, recommender

    spent: dict[str, list[float]] = {"search": [], "candidates": [], "rank": []}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = function(*given, **named)
            spent[name].append(time.perf_counter() - began)
            return found

        return call

    places: list[tuple[str, Any, str]] = [
        ("search", ItemIndex, "search"),
        ("candidates", Pipeline, "candidates"),
        ("rank", recommender, "rank"),
    ]
    kept = [getattr(owner, name) for _, owner, name in places]
    for (stage, owner, name), function in zip(places, kept, strict=True):
        setattr(owner, name, timed(stage, function))
    try:
        yield spent
    finally:
        for (_, owner, name), function in zip(places, kept, strict=True):
            setattr(owner, name, function)


def prepared(folder: Path, items: int, history: int) -> Any:
    """Interactions of a fifth as many users, in which every item occurs, and a catalogue."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS
    from recspec.feature_spec import FeatureSpec

    target = folder / f"data_{history}"
    if not target.exists():
        rng = np.random.default_rng(0)
        raw = folder / "raw"
        raw.mkdir(exist_ok=True)
        who = rng.integers(0, max(1, items // 5), items)
        rows = {"user_id": who, "item_id": rng.permutation(items), "timestamp": np.arange(items)}
        pq.write_table(pa.table(rows), raw / "rows.parquet")
        numbers = rng.permutation(items)
        about = {
            "item_id": numbers,
            "title": [f"Item {number}" for number in numbers],
            "category": [f"c{number}" for number in rng.integers(0, 20, items)],
            "price": rng.integers(0, 10_000, items) / 100,
        }
        pq.write_table(pa.table(about), raw / "items.parquet")
        table = DATASETS["table"]
        wanted = {"items": "items.parquet", "item_features": ("category", "price"), "num_negatives": 10}
        wanted |= {"history": history} if history else {}
        table.prepare(PrepareContext(raw / "rows.parquet", target), table.Settings.model_validate(wanted))
    return FeatureSpec.load(target)


def made_up(folder: Path, spec: Any, name: str) -> None:
    """A run of a model with random weights."""
    import torch

    from recspec.bundle import Card, Seen
    from recspec.bundle import folder as bundle
    from recspec.evaluation import positives
    from recspec.models import MODELS

    torch.manual_seed(0)
    settings = MODELS[name].Settings.model_validate(SETTINGS.get(name, {}))
    model = MODELS[name](spec, settings)
    with torch.no_grad():  # as trained weights do, random ones of this size tell items apart
        for parameter in model.parameters():
            parameter.normal_(std=1 / (parameter.shape[-1] if parameter.dim() > 1 else 10) ** 0.5)
    known = positives(spec, ["train"])
    seen = Seen.from_interactions(known, known)
    card = Card(model=name, settings=settings.model_dump(mode="json"))
    bundle.save(folder / "bundle", model, card, seen=seen)


if __name__ == "__main__":
    main()
