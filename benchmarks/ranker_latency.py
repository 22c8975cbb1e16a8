"""Ranking the candidates of a request with DLRM, DIN and SIM: our exports beside eager torch and ONNX Runtime's int8.

    python benchmarks/ranker_latency.py
    python benchmarks/ranker_latency.py --models dlrm --threads 1 --rounds 10

Weights and requests are made up: weights change no time, and no request is asked twice. DLRM has the published sizes
(26 categorical features of 100,000 ids, width 128, 13 numbers; half of them belong to the item), DIN and SIM those of
sequence_vs_peers.py with a history of 50 events. The clock runs from the ids and numbers of one request and its
candidates to their probabilities. `eager torch` and `ONNX Runtime's int8` score a row for each candidate, as a model
that is taken to ONNX Runtime does by `torch.onnx.export` and `quantize_dynamic` (a step for each column of a weight).

Contenders take turns, each in a process of its own, on equal threads. Prints p50 and p99 by candidates and how far
probabilities are from eager torch's, and writes results/ranker_latency.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from _side_by_side import COLD, SETTLE, Found, where_and_when, write

SIZES = {1: 200, 64: 60, 512: 20, 4096: 5}
"""Candidates of a request -> requests that each contender is asked in a round."""
COMPARED = (64, 40)
"""Candidates and number of the requests on which probabilities are compared."""
EAGER, FOREIGN = "eager torch", "ONNX Runtime's int8"
EXPORTS: Mapping[str, tuple[str, str]] = {"fp32": ("fp32", "ranker"), "int8": ("int8", "ranker")}
"""Precision and form."""
LENGTH, NUM_IDS, NUM_CATEGORIES = 50, 100_000, 1_000
OF_SEQUENCES: Mapping[str, Any] = {
    "embedding_dim": 16,
    "hidden": (512, 256, 128),
    "activation": "relu",
    "attention_hidden": (80, 40),
    "attention_activation": "relu",
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dlrm": {},
    "din": OF_SEQUENCES,
    "sim": {
        **OF_SEQUENCES,
        "search_dim": 64,
        "search_hidden": (512, 256, 128),
        "top_k": 20,
        "short": "din",
        "short_length": 10,
        "heads": 2,
    },
}


def main() -> None:
    """Every model, the table, the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ranker_latency.json")
    asked = parser.parse_args()
    from recspec.base.machine import SPINS

    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # as the command line; torch reads it when it is loaded
    found: Found = {"threads": asked.threads, "rounds": asked.rounds, "models": {}, **where_and_when()}
    for model in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            found["models"][model] = measured(model, Path(folder), asked.threads, asked.rounds)
        show(model, found["models"][model])
        write(found, asked.out)


def measured(name: str, folder: Path, threads: int, rounds: int) -> Found:
    """The contenders of one model: latency by candidates, and the difference of probabilities."""
    import torch

    from recspec.bundle import Card
    from recspec.bundle import folder as bundle
    from recspec.export import ExportSettings, export
    from recspec.models import MODELS

    torch.manual_seed(0)
    settings = MODELS[name].Settings.model_validate(SETTINGS[name])
    model = MODELS[name](spec_of(name, folder), settings).eval()
    bundle.save(folder / "bundle", model, Card(model=name, settings=settings.model_dump(mode="json")))
    trained = bundle.load(folder / "bundle")
    told: Any = {"seconds": 0.0, "batch_sizes": (1,), "threads": threads}
    for title, (precision, form) in {**EXPORTS, "rows": ("fp32", "rows")}.items():
        given: Any = {"precision": precision, "form": form, **told}
        export(trained, folder / title, ExportSettings(allow_drift=True, **given))
    quantise(folder / "rows", folder / FOREIGN)
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for title in (EAGER, FOREIGN, *EXPORTS):
        pipes[title], theirs = context.Pipe()
        context.Process(target=answer, args=(folder, title, threads, theirs), daemon=True).start()

    def ask(title: str, size: int, count: int, seed: int, *, timed: bool) -> Any:
        pipes[title].send((size, count, seed, timed))
        return pipes[title].recv()

    answers = {title: np.concatenate(ask(title, *COMPARED, 0, timed=False)) for title in pipes}
    apart = {title: np.abs(each - answers[EAGER]) for title, each in answers.items()}
    times: dict[str, dict[int, list[float]]] = {title: {size: [] for size in SIZES} for title in pipes}
    for each in range(1, rounds + 1):
        for size, count in SIZES.items():
            for title in pipes:
                time.sleep(SETTLE)
                times[title][size] += ask(title, size, count + COLD, each, timed=True)[COLD:]
    for pipe in pipes.values():
        pipe.send(None)
    return {
        title: {
            "latency": {
                str(size): dict(zip(("p50_ms", "p99_ms"), np.percentile(each, (50, 99)).round(4).tolist(), strict=True))
                for size, each in times[title].items()
            },
            "difference": {"mean": float(apart[title].mean()), "largest": float(apart[title].max())},
        }
        for title in pipes
    }


def answer(folder: Path, title: str, threads: int, asked: Any) -> None:
    """In a process of its own: milliseconds, or probabilities, of the requests that are asked for."""
    import torch

    from recspec.bundle import folder as bundle
    from recspec.export.exported_model import EagerModel, open_exported_model
    from recspec.feature_spec import signature_of

    torch.set_num_threads(threads)
    trained = bundle.load(folder / "bundle")
    rows = signature_of(trained.spec, trained.model.features(), "rows")
    program: Any = (
        EagerModel(trained.model, rows) if title == EAGER else open_exported_model(folder / title, threads=threads)
    )
    while (question := asked.recv()) is not None:
        size, count, seed, is_timed = question
        rng = np.random.default_rng((seed, size))
        requests = [inputs(trained.spec, rows, size, rng) for _ in range(count)]
        asked.send([(timed if is_timed else probabilities)(program, *each) for each in requests])


def quantise(exported: Path, to: Path) -> None:
    """An exported program of rows, narrowed by ONNX Runtime's own tool."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from recspec.base.files import manifest
    from recspec.export.exported_model import OnnxModel
    from recspec.feature_spec import EXPORT_FILE

    to.mkdir()
    shutil.copyfile(exported / EXPORT_FILE, to / EXPORT_FILE)
    program = (str(each / OnnxModel.file) for each in (exported, to))
    quantize_dynamic(*program, weight_type=QuantType.QInt8, per_channel=True)
    manifest.write(to)


def inputs(spec: Any, signature: Any, size: int, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Features of one request (1, L) and of its candidates (N, L): ids by a power law, normal numbers."""
    items = set(spec.role("item"))
    request, candidates = dict[str, Any](), dict[str, Any]()
    for port in signature.inputs:
        into, rows = (candidates, size) if port.name in items else (request, 1)
        if port.num_ids:
            drawn = 1 + (port.num_ids - 1) * rng.random((rows, port.width)) ** 3
            into[port.name] = drawn.astype(port.dtype)
        else:
            into[port.name] = rng.normal(size=(rows, port.width)).astype(port.dtype)
    return request, candidates


def probabilities(program: Any, request: Mapping[str, Any], candidates: Mapping[str, Any]) -> Any:
    """The probability of each candidate (N,)."""
    if program.signature.form == "rows":
        rows = len(next(iter(candidates.values())))
        request = {name: np.repeat(each, rows, axis=0) for name, each in request.items()}
    return program.run({**request, **candidates})["probability"][:, 0]


def timed(program: Any, request: Mapping[str, Any], candidates: Mapping[str, Any]) -> float:
    """Milliseconds of an answer."""
    started = time.perf_counter()
    probabilities(program, request, candidates)
    return 1000 * (time.perf_counter() - started)


def spec_of(name: str, folder: Path) -> Any:
    """The features of a model's requests and items."""
    from recspec.feature_spec import FeatureSpec

    if name == "dlrm":
        ids = [f"id_{place}" for place in range(26)]
        numbers = [f"number_{place}" for place in range(13)]
        features = {each: {"dtype": "int32", "cardinality": NUM_IDS} for each in ids}
        features |= {each: {"dtype": "float32"} for each in numbers}
        channels = {"context": [*ids[:13], *numbers[:6]], "item": [*ids[13:], *numbers[6:]]}
    else:
        items = {"item_id": NUM_IDS, "category": NUM_CATEGORIES}
        features = {each: {"dtype": "int32", "cardinality": count} for each, count in items.items()}
        features |= {
            f"history_{each}": {
                "dtype": "int32",
                "cardinality": count,
                "vocabulary": each,
                "length": LENGTH,
                "padding": 0,
            }
            for each, count in items.items()
        }
        features["user_id"] = {"dtype": "int32", "cardinality": 20_000}
        channels = {"user": ["user_id"], "item": [*items], "history": [f"history_{each}" for each in items]}
    features["label"] = {"dtype": "float32"}
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": {**channels, "label": ["label"]}}, folder)


def show(model: str, found: Mapping[str, Any]) -> None:
    """A line a contender: p50 / p99 in ms by candidates, how many times faster than eager torch, |dp|."""
    print(f"\n{f'{model}, p50 / p99 in ms':<26}" + "".join(f"{size:>24,}" for size in SIZES) + f"{'mean |dp|':>11}")
    for title, each in found.items():
        cells = []
        for size in map(str, SIZES):
            here, first = each["latency"][size], found[EAGER]["latency"][size]
            cells.append(f"{here['p50_ms']:.3g} / {here['p99_ms']:.3g} {first['p50_ms'] / here['p50_ms']:.1f}x")
        print(f"{title:<26}" + "".join(f"{cell:>24}" for cell in cells) + f"{each['difference']['mean']:>11.1e}")


if __name__ == "__main__":
    main()
