"""Wide & Deep at Outbrain's sizes, ranking the candidates of a request: TensorFlow's SavedModel beside our exports.

    python benchmarks/outbrain_latency.py
    python benchmarks/outbrain_latency.py --threads 1 --rounds 10

From nothing: makes an environment with TensorFlow 2.15, trains a `DNNLinearCombinedClassifier` there (29 features, 5 x
1024, 91.8 million numbers) on made-up rows, takes it over with `recspec import-tf`, exports it in several precisions as
rows and as a ranker, and measures raw requests of 1, 64, 512 and 4096 candidates: from the request as a dict to the
probabilities of its candidates. TensorFlow's side is measured three times: with the Examples that its SavedModel takes
built from the dict, with the Examples ready, and through a second SavedModel that takes tensors. Contenders take turns
in one run on equal threads, and no request is asked twice. Each program has a process of its own: threads of ONNX
Runtime look for work for a while after a call, and would disturb the program that is asked next. Prints p50, p99 and
how far probabilities are from the bundle's, and writes results/outbrain_latency.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from _side_by_side import COLD, SETTLE

REQUIREMENTS = ("tensorflow-cpu==2.15.1",)

IDS: Mapping[str, tuple[int, int, bool]] = {
    "document_id": (300_000, 128, False),
    "document_id_promo": (100_000, 128, True),
    "platform": (4, 19, False),
    "source_id": (4_000, 64, False),
    "geo_location": (2_500, 64, False),
    "geo_location_country": (300, 64, False),
    "geo_location_state": (2_000, 64, False),
    "publisher_id": (1_000, 64, False),
    "topic_id": (350, 64, False),
    "entity_id": (10_000, 64, False),
    "category_id": (100, 64, False),
    "ad_id": (250_000, 128, True),
    "advertiser_id": (2_500, 64, True),
    "source_id_promo": (4_000, 64, True),
    "publisher_id_promo": (1_000, 64, True),
    "campaign_id": (5_000, 128, True),
}
"""Buckets, embedding width, and whether it is the item's: as published, but one topic, entity and category a row."""
NUMBERS = {f"number_{place}": place >= 5 for place in range(13)}
"""Whether it is the item's."""
HIDDEN = (1024,) * 5
TRAINING_ROWS = 20_000

SIZES = {1: 300, 64: 60, 512: 12, 4096: 4}
"""Candidates of a request -> requests that each contender is asked in a round."""
COMPARED, COMPARED_SIZE = 40, 64
"""Requests on which probabilities are compared, and their candidates."""

TENSORFLOW = ("tensorflow, Examples built", "tensorflow, Examples ready", "tensorflow, tensors")
EXPORTS: Mapping[str, tuple[str, str, str]] = {
    "rows, fp32": ("onnx", "fp32", "rows"),
    "rows, bf16 (pt2)": ("pt2", "bf16", "rows"),
    "rows, int8": ("onnx", "int8", "rows"),
    "ranker, fp32": ("onnx", "fp32", "ranker"),
    "ranker, int8": ("onnx", "int8", "ranker"),
}
"""Format, precision, form."""
EAGER = "eager torch"

Request = dict[str, Any]
Answer = Callable[[Request, list[Request]], Any]


# --- requests --------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, rows: int, *, of_items: bool) -> list[Request]:
    """Raw rows: ids by a power law, of which some were never seen; numbers normal."""
    columns: dict[str, list[Any]] = {
        name: ((rng.pareto(1.1, rows) * 5).astype(np.int64) % (3 * buckets)).tolist()
        for name, (buckets, _, items) in IDS.items()
        if items == of_items
    }
    columns |= {name: rng.normal(size=rows).tolist() for name, items in NUMBERS.items() if items == of_items}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def requests(size: int, count: int, seed: int) -> list[tuple[Request, list[Request]]]:
    """The requests of one size, the same for everybody."""
    rng = np.random.default_rng((seed, size))
    return [(drawn(rng, 1, of_items=False)[0], drawn(rng, size, of_items=True)) for _ in range(count)]


def columns_file() -> dict[str, Any]:
    """What `recspec import-tf` must be told."""
    role = {True: "item", False: "context"}
    ids = [
        {
            "name": name,
            "kind": "hash",
            "dtype": "int64",
            "num_buckets": buckets,
            "wide": True,
            "embedding_dim": width,
            "role": role[items],
        }
        for name, (buckets, width, items) in IDS.items()
    ]
    numbers = [
        {"name": name, "kind": "numeric", "wide": True, "deep": True, "role": role[items]}
        for name, items in NUMBERS.items()
    ]
    return {"label": "clicked", "columns": [*ids, *numbers]}


# --- TensorFlow's side, under its own interpreter --------------------------------------------------------------------


def make_tensorflow(folder: Path) -> None:
    """Train the estimator on made-up clicks and write it as two SavedModels."""
    import tensorflow as tf  # type: ignore[import-not-found,import-untyped,unused-ignore]

    columns = tf.feature_column
    ids = [columns.categorical_column_with_hash_bucket(name, buckets, tf.int64) for name, (buckets, *_) in IDS.items()]
    numbers = [columns.numeric_column(name) for name in NUMBERS]
    vectors = [columns.embedding_column(column, IDS[column.key][1]) for column in ids]
    estimator = tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=[*ids, *numbers],
        dnn_feature_columns=[*vectors, *numbers],
        dnn_hidden_units=HIDDEN,
        linear_optimizer=tf.keras.optimizers.legacy.Ftrl(0.02),
        dnn_optimizer=tf.keras.optimizers.legacy.Adagrad(0.02),
        config=tf.estimator.RunConfig(
            model_dir=str(folder / "checkpoints"), tf_random_seed=3, save_checkpoints_secs=3600
        ),
    )
    rng = np.random.default_rng(0)
    sides = (drawn(rng, TRAINING_ROWS, of_items=items) for items in (False, True))
    rows = [{**context, **item} for context, item in zip(*sides, strict=True)]
    given: dict[str, Any] = {
        name: np.array([row[name] for row in rows], np.int64 if name in IDS else np.float32) for name in rows[0]
    }
    logit = given["number_0"] + 0.8 * given["number_5"] + 0.4 * (given["ad_id"] % 7 - 3) - 1.2
    label = (rng.random(TRAINING_ROWS) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    estimator.train(
        lambda: tf.data.Dataset.from_tensor_slices((given, label)).shuffle(TRAINING_ROWS, seed=1).repeat(2).batch(256)
    )
    export = tf.estimator.export
    kinds = {name: tf.io.FixedLenFeature([1], tf.int64 if name in IDS else tf.float32) for name in given}
    estimator.export_saved_model(str(folder / "examples"), export.build_parsing_serving_input_receiver_fn(kinds))

    def receiver() -> Any:
        made = {name: tf.compat.v1.placeholder(kind.dtype, [None, 1], name) for name, kind in kinds.items()}
        return export.ServingInputReceiver(made, made)

    estimator.export_saved_model(str(folder / "tensors"), receiver)


def tensorflow_answers(folder: Path, threads: int) -> dict[str, Callable[[Request, list[Request]], Answer]]:
    """What makes, for a request, a call that answers it."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    loaded = [tf.saved_model.load(str(next((folder / name).iterdir()))) for name in ("examples", "tensors")]
    by_examples, by_tensors = (model.signatures["predict"] for model in loaded)
    train = tf.train

    def feature(name: str, value: Any) -> Any:
        if name in IDS:
            return train.Feature(int64_list=train.Int64List(value=[value]))
        return train.Feature(float_list=train.FloatList(value=[value]))

    def examples(request: Request, items: list[Request]) -> list[bytes]:
        shared = {name: feature(name, value) for name, value in request.items()}
        made = ({**shared, **{name: feature(name, value) for name, value in item.items()}} for item in items)
        return [train.Example(features=train.Features(feature=each)).SerializeToString() for each in made]

    def probabilities(answer: Any) -> Any:
        return answer["probabilities"].numpy()[:, 1]

    def built(request: Request, items: list[Request]) -> Any:
        return probabilities(by_examples(examples=tf.constant(examples(request, items))))

    def ready(request: Request, items: list[Request]) -> Any:
        given = tf.constant(examples(request, items))
        return lambda *_: probabilities(by_examples(examples=given))

    def tensors(request: Request, items: list[Request]) -> Any:
        given = {
            name: np.full((len(items), 1), value, np.int64 if name in IDS else np.float32)
            for name, value in request.items()
        }
        for name in items[0]:
            values = [item[name] for item in items]
            given[name] = np.array(values, np.int64 if name in IDS else np.float32)[:, None]
        return probabilities(by_tensors(**{name: tf.constant(value) for name, value in given.items()}))

    found = (lambda *_: built, ready, lambda *_: tensors)
    return dict(zip(TENSORFLOW, found, strict=True))


# --- recspec's side --------------------------------------------------------------------------------------------------


def recspec_answers(name: str, folder: Path, threads: int) -> dict[str, Callable[[Request, list[Request]], Answer]]:
    """Likewise for one of our programs: raw requests through `ExportedRanker`, and the program alone."""
    import torch

    from recspec.base.machine import limit_openmp_spin
    from recspec.export.exported_model import EagerModel, ExportedModel, open_exported_model
    from recspec.export.exported_ranker import ExportedRanker
    from recspec.feature_spec.signature import signature_of
    from recspec.inference.predictor import Predictor

    limit_openmp_spin()
    torch.set_num_threads(threads)
    predictor = Predictor.open(folder / "bundle", device="cpu")
    rows = signature_of(predictor.spec, predictor.model.features(), "rows")
    program: ExportedModel = (
        EagerModel(predictor.model, rows) if name == EAGER else open_exported_model(folder / name, threads=threads)
    )
    ranker = ExportedRanker(predictor, program)

    def alone(request: Request, items: list[Request]) -> Answer:
        given = ranker.inputs(request, items)
        return lambda *_: program.run(given)["probability"][:, 0]

    return {name: lambda *_: ranker.probabilities, f"{name}, program alone": alone}


def answer_questions(make: Callable[[], dict[str, Callable[[Request, list[Request]], Answer]]], seed: int) -> None:
    """Read what to measure from standard input, a line each, and write milliseconds (or probabilities) as a line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    answers = make()
    print(json.dumps(sorted(answers)), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prepare = answers[asked["contender"]]
        drawn_requests = requests(asked["size"], asked["count"], seed + asked["round"])
        if asked["round"] == 0:  # probabilities, not times; also the warm-up
            found = [prepare(*each)(*each).astype(np.float64).tolist() for each in drawn_requests]
        else:
            found = [_timed(prepare(*each), *each) for each in drawn_requests]
        print(json.dumps(found), file=out, flush=True)


def _timed(call: Answer, request: Request, items: list[Request]) -> float:
    started = time.perf_counter()
    call(request, items)
    return 1000 * (time.perf_counter() - started)


class Worker:
    """A process with one side's contenders."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: PT018
        self.into: IO[str] = self.process.stdin
        self.out: IO[str] = self.process.stdout
        self.contenders: list[str] = self._read()

    def ask(self, **asked: Any) -> list[Any]:
        """Times in ms of every request, or their probabilities in round 0."""
        print(json.dumps(asked), file=self.into, flush=True)
        found: list[Any] = self._read()
        return found

    def close(self) -> None:
        """End the process."""
        self.into.close()
        self.process.wait(60)

    def _read(self) -> Any:
        line = self.out.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}: {self.process.args!r}")
        return json.loads(line)


# --- both ------------------------------------------------------------------------------------------------------------


def prepare(folder: Path, python: Path, threads: int) -> dict[str, Any]:
    """Train, take over and export, where that is not done; what the exports' descriptions say of drift."""
    from recspec.bundle import folder as bundle
    from recspec.export.exporter import ExportSettings, export
    from recspec.tf_import.wide_deep import import_tf

    if not (folder / "tensors").is_dir():
        print("training in TensorFlow", file=sys.stderr)
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run([str(python), __file__, "--make", str(folder)], check=True, env=environ, stdout=2)
    if not (folder / "bundle").is_dir():
        print("taking the model over", file=sys.stderr)
        (folder / "columns.json").write_text(json.dumps(columns_file()), encoding="utf-8")
        import_tf(next((folder / "examples").iterdir()), folder / "bundle", folder / "columns.json")
    trained = bundle.load(folder / "bundle")
    for name, (form, precision, shape) in EXPORTS.items():
        if not (folder / name).is_dir():
            print(f"exporting {name}", file=sys.stderr)
            told: Any = {"format": form, "precision": precision, "form": shape}
            export(trained, folder / name, ExportSettings(**told, seconds=0.0, batch_sizes=(1,), threads=threads))
    numbers = sum(parameter.numel() for parameter in trained.model.parameters())
    exports = {name: json.loads((folder / name / "export.json").read_text(encoding="utf-8")) for name in EXPORTS}
    return {
        "numbers": numbers,
        "bytes": {name: each["size_bytes"] for name, each in exports.items()},
    }


def measure(workers: Sequence[Worker], rounds: int) -> tuple[dict[str, Any], dict[str, dict[int, list[float]]]]:
    """Probabilities' differences, and the milliseconds of each contender by size."""
    where = {name: worker for worker in workers for name in worker.contenders}
    answers = {
        name: np.concatenate(worker.ask(contender=name, size=COMPARED_SIZE, count=COMPARED, round=0))
        for name, worker in where.items()
    }
    apart = {name: np.abs(found - answers[EAGER]) for name, found in answers.items()}
    differences = {name: {"mean": float(each.mean()), "largest": float(each.max())} for name, each in apart.items()}
    times: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in where}
    for each in range(1, rounds + 1):
        for size, count in SIZES.items():
            for name, worker in where.items():
                time.sleep(SETTLE)
                found = worker.ask(contender=name, size=size, count=count + COLD, round=each)
                times[name][size] += found[COLD:]
            print(f"round {each}, {size} candidates", file=sys.stderr)
    return differences, times


def print_table(results: Mapping[str, Any]) -> None:
    """A line a contender: p50 / p99 in ms by candidates, times faster than TensorFlow from raw requests, |dp|."""
    first = results[TENSORFLOW[0]]["latency"]
    print(f"{'p50 / p99, ms':<30}" + "".join(f"{f'{size} candidates':>22}" for size in SIZES) + f"{'mean |dp|':>11}")
    for name, found in results.items():
        cells = []
        for size in map(str, SIZES):
            here = found["latency"][size]
            ratio = f" {first[size]['p50_ms'] / here['p50_ms']:.1f}x" if not name.startswith("tensorflow") else ""
            cells.append(f"{here['p50_ms']:.3g} / {here['p99_ms']:.3g}{ratio}")
        print(f"{name:<30}" + "".join(f"{cell:>22}" for cell in cells) + f"{found['difference']['mean']:>11.1e}")
    print(f"times faster than '{TENSORFLOW[0]}', by p50; |dp|: from the bundle's probabilities in {EAGER}")


def main() -> None:
    """Measure; or in a process of its own, train or answer."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--threads", type=int, default=2)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--folder", type=Path, help="keeps the models for the next run; a temporary one by default")
    given.add_argument("--environment", type=Path, help="folder of TensorFlow's environment")
    given.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "outbrain_latency.json")
    given.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    arguments = given.parse_args()
    if arguments.make:
        make_tensorflow(arguments.make)
        return
    if arguments.answer:
        who, where = arguments.answer[0], Path(arguments.answer[1])
        make = tensorflow_answers if who == "tensorflow" else partial(recspec_answers, who)
        answer_questions(lambda: make(where, arguments.threads), arguments.seed)
        return

    from _side_by_side import environments, made_python, where_and_when, write

    python = made_python("TensorFlow", arguments.environment or environments().with_name("tensorflow"), REQUIREMENTS)
    with tempfile.TemporaryDirectory() as made:
        folder = (arguments.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        about = prepare(folder, python, arguments.threads)
        told = ("--threads", str(arguments.threads), "--seed", str(arguments.seed))
        workers = [
            Worker([interpreter, __file__, "--answer", who, str(folder), *told])
            for who, interpreter in (
                ("tensorflow", str(python)),
                *((name, sys.executable) for name in (EAGER, *EXPORTS)),
            )
        ]
        differences, times = measure(workers, arguments.rounds)
        for worker in workers:
            worker.close()
    results = {
        name: {
            "difference": differences[name],
            "latency": {
                str(size): {
                    **dict(zip(("p50_ms", "p99_ms"), np.percentile(found, (50, 99)).round(4).tolist(), strict=True)),
                    "requests": len(found),
                }
                for size, found in by_size.items()
            },
        }
        for name, by_size in times.items()
    }
    print_table(results)
    here = where_and_when()
    arithmetic = {name: precision for name, (_, precision, _) in EXPORTS.items()}
    write(
        {"threads": arguments.threads, "precision": arithmetic, **about, "contenders": results, **here}, arguments.out
    )


if __name__ == "__main__":
    main()
