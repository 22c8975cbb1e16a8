"""NVIDIA's Triton Inference Server and `recspec serve` answer one client with the bundle's probabilities.

    python benchmarks/stress/triton_serves.py
    python benchmarks/stress/triton_serves.py --models wide_deep --rows 20000 --precision int8
    python benchmarks/stress/triton_serves.py --tensorflow $RECSPEC_DATA/tf-wide-deep

From nothing: makes an environment with the server that the nvidia-pytriton wheel contains (2.51, CPU), trains a small
model of each kind on made-up data, exports all of them into one model repository and beside their runs. Starts
`tritonserver` on the repository with explicit model control, and then `recspec serve` on the runs. One client, `ask`,
speaks to both: it has Triton load each model, and asks for every row of the test split with tritonclient over HTTP and
gRPC, in requests of several sizes; then for the raw values that the ensembles take. Prints the largest difference from
the bundle's own probabilities, client-side latency, and how many requests dynamic batching put together, and writes
them to results/triton_serves.json. Exit status 1 where an answer differs by more than 1e-5 (fp32) or the export's
tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from _triton_server import REQUIREMENTS, recspec, triton

if TYPE_CHECKING:
    from recspec.bundle.folder import Bundle
    from recspec.export.exporter import Exported
    from recspec.export.onnx_graph import Precision
    from recspec.feature_spec import FeatureSpec
    from recspec.inference.predictor import Predictor

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "neumf": {"factors": 16, "layers": (32, 16, 8), "dropout": 0.0},
    "wide_deep": {"hidden": (128, 128, 64), "dropout": 0.0},
    "dlrm": {"embedding_dim": 16, "bottom": (64, 16), "top": (128, 64)},
    "dcnv2": {"embedding_dim": 16, "bottom": (64, 16), "cross_rank": 32, "top": (128, 64)},
    "din": {"embedding_dim": 16, "attention_hidden": (32, 16), "hidden": (64, 32)},
    "dien": {"embedding_dim": 8, "attention_hidden": (32, 16), "hidden": (64, 32), "auxiliary": 0.0},
    "sim": {
        "embedding_dim": 8,
        "attention_hidden": (32, 16),
        "hidden": (64, 32),
        "auxiliary": 0.0,
        "top_k": 5,
        "short_length": 4,
    },
}
ASKED = ("neumf", "wide_deep", "dlrm", "dcnv2", "din")
SIZES = (1, 7, 64, 512)
FP32_DIFFERENCE = 1e-5
ROOT = Path(__file__).parents[2]
TENSORFLOW = "tensorflow"
"""What the imported model is called."""
RANKER = "_ranker"
"""How a model is called that takes a request's features once; `recspec serve` ranks in other ways, so Triton alone has
it."""
HISTORY = 12
"""Most events of a made-up history."""

Arrays = dict[str, np.ndarray[Any, Any]]
Found = dict[str, Any]


# --- models and their repository -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What the client asks one model of a server, and what it must hear."""

    model: str
    output: str
    inputs: Arrays
    expected: np.ndarray[Any, Any]
    allowed: float


def questions(names: Sequence[str], folder: Path, *, rows: int, precision: Precision) -> list[Question]:
    """Train, export into `folder/repository`, and say what the bundle answers."""
    made = []
    for name in names:
        print(f"{name}: train and export", file=sys.stderr)
        made += _questions_of(name, folder, rows, precision)
    return made


def data_of(name: str, folder: Path, rows: int) -> Path:
    """Made-up data of the kind that a model reads: clicks, interactions, or reviews with what their user did before."""
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS
    from recspec.models import MODELS

    needs = MODELS[name].needs
    settings: Mapping[str, object]
    kind = "reviews" if "history" in needs else "interactions" if "user" in needs else "clicks"
    data = folder / f"data-{kind}"
    if data.exists():
        return data
    if kind == "reviews":
        sys.path.insert(0, str(ROOT))  # this file may be run from anywhere
        from tests import made_up_amazon

        raw = made_up_amazon.write(folder / "raw", num_users=rows // 20, num_items=rows // 60, num_reviews=rows)
        dataset, settings = DATASETS["amazon"], {"min_reviews": 5, "history": HISTORY}
    else:
        raw, dataset, settings = Path(), DATASETS["synthetic"], {"kind": kind, "num_rows": rows}
    dataset.prepare(PrepareContext(raw, data), dataset.Settings.model_validate(settings))
    return data


def _questions_of(name: str, folder: Path, rows: int, precision: Precision) -> list[Question]:
    from recspec.bundle import folder as bundle
    from recspec.export.exported_model import EagerModel
    from recspec.export.exporter import TOLERANCE, Check, sample_of
    from recspec.feature_spec import FeatureSpec
    from recspec.feature_spec.signature import Signature
    from recspec.inference.predictor import Predictor
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    spec = FeatureSpec.load(data_of(name, folder, rows))
    settings = TrainSettings(epochs=2, batch_size=512, learning_rate=0.005, tensorboard=False)
    model_settings = MODELS[name].Settings.model_validate(SETTINGS.get(name, {}))
    train(name, spec, folder / f"run-{name}", settings=settings, model_settings=model_settings)

    trained = bundle.load(folder / f"run-{name}")
    exported = exported_twice(trained, name, folder, precision, spec)
    check = Check(trained.model, Signature.from_dict(exported.description["signature"]), sample_of(trained, spec))
    allowed = FP32_DIFFERENCE if precision == "fp32" else 20 * TOLERANCE[precision]
    expected = check.probabilities(EagerModel(trained.model, check.signature))
    output = trained.outputs[0]
    asked = [Question(name, output, check.inputs, expected, allowed)]
    if exported.description["triton"]["raw"] != f"{name}_raw":
        print(f"{name}: no ensemble of raw values: {exported.description['triton']['raw']}", file=sys.stderr)
        return asked

    predictor = Predictor.open(folder / f"run-{name}", device="cpu")
    table = raw_rows(predictor, check.sample.batch)
    asked.append(Question(f"{name}_raw", output, tensors_of(table), sigmoids(predictor, table), allowed))
    if "history" in MODELS[name].needs:
        asked += questions_of_ranker(predictor, f"{name}{RANKER}", folder, spec, precision)
    return asked


def questions_of_ranker(
    predictor: Predictor, name: str, folder: Path, spec: FeatureSpec, precision: Precision
) -> list[Question]:
    """The first row of the sample as a request, and the items of all rows as its candidates; then both as raw values.

    What is expected are the probabilities of the pairs, each a row with a history of its own.
    """
    from recspec.export.exported_model import EagerModel
    from recspec.export.exporter import TOLERANCE, Check, ExportSettings, export, sample_of
    from recspec.export.triton_repository import histories_beside, raw_columns
    from recspec.feature_spec.signature import Signature, signature_of

    model, trained = predictor.model, predictor.bundle
    wanted = ExportSettings(
        format="triton", form="ranker", precision=precision, triton_backend="python", seconds=0.1, threads=1, name=name
    )
    exported = export(trained, folder / "repository", wanted, spec)
    signature = Signature.from_dict(exported.description["signature"])
    check = Check(model, signature, sample_of(trained, spec))
    inputs = check.call(range(check.rows))
    pairs = {key: np.repeat(each, check.rows, 0) if len(each) == 1 else each for key, each in inputs.items()}
    output = trained.outputs[0]
    rows = EagerModel(model, signature_of(predictor.spec, model.features(), "rows", trained.outputs))
    allowed = FP32_DIFFERENCE if precision == "fp32" else 20 * TOLERANCE[precision]
    asked = [Question(name, output, inputs, rows.run(pairs)[output][:, 0], allowed)]

    assert predictor.encoders is not None
    table = raw_rows(predictor, check.sample.batch)
    columns = tensors_of(table)
    beside = histories_beside(predictor.spec, model.features())
    for port in raw_columns(predictor.encoders, signature, beside):
        if port.level == "request":
            place, first = table.column_names.index(port.name), table.column(port.name).to_pylist()[:1]
            table = table.set_column(place, port.name, [first * check.rows])
            columns[port.name] = columns[port.name][:1]
    return [*asked, Question(f"{name}_raw", output, columns, sigmoids(predictor, table), allowed)]


def sigmoids(predictor: Predictor, table: Any) -> Any:
    """The first output of a program for raw rows: probabilities, or the sigmoid of the scores of a model that ranks."""
    values, _ = predictor.predict(table)
    return values if predictor.bundle.gives_probabilities else 1 / (1 + np.exp(-values))


def tensors_of(table: Any) -> Arrays:
    """Raw columns as a client sends them, (B, 1) each: numbers, or texts."""
    columns: Arrays = {}
    for column in table.column_names:
        values = table.column(column).to_pylist()
        numeric = table.schema.field(column).type == "double"
        texts = ["" if value is None else str(value).encode() for value in values]
        columns[column] = np.array(values, np.float64)[:, None] if numeric else np.array(texts, "S")[:, None]
    return columns


def exported_twice(
    trained: Bundle, name: str, folder: Path, precision: Precision, spec: FeatureSpec | None
) -> Exported:
    """A program in Triton's repository, and the same beside the run, where `recspec serve` looks for it."""
    from recspec.export.exporter import ExportSettings, export

    wanted = ExportSettings(
        format="triton", precision=precision, triton_backend="python", seconds=0.1, threads=1, name=name
    )
    beside = replace(wanted, format="onnx", name=None)
    export(trained, folder / f"run-{name}" / "export", beside, spec)
    return export(trained, folder / "repository", wanted, spec)


def question_of_tensorflow(given: Path, folder: Path, precision: Precision) -> Question:
    """A model that TensorFlow trained, and what TensorFlow itself answered to raw rows.

    Args:
        given: holds `checkpoint`, `columns.json`, and raw rows with TensorFlow's probabilities in `golden.npz`.
    """
    from recspec.bundle import folder as bundle
    from recspec.data.encoding.encoders import Encoders
    from recspec.export.exporter import TOLERANCE
    from recspec.export.triton_repository import raw_columns
    from recspec.feature_spec.signature import Signature
    from recspec.tf_import.wide_deep import import_tf

    print(f"{TENSORFLOW}: import and export", file=sys.stderr)
    run = folder / f"run-{TENSORFLOW}"
    import_tf(given / "checkpoint", run, given / "columns.json")
    trained = bundle.load(run)
    exported = exported_twice(trained, TENSORFLOW, folder, precision, None)
    with np.load(given / "golden.npz") as stored:
        golden = {name: stored[name] for name in stored.files}
    columns = {**golden, **{f"n{place}": numbers for place, numbers in enumerate(golden["n"].T)}}
    inputs: Arrays = {}
    for port in raw_columns(Encoders.load(run), Signature.from_dict(exported.description["signature"])):
        values = columns[port.name][:, None]
        inputs[port.name] = values.astype("S" if port.dtype == "string" else np.float64)
    allowed = FP32_DIFFERENCE if precision == "fp32" else 20 * TOLERANCE[precision]
    return Question(f"{TENSORFLOW}_raw", trained.outputs[0], inputs, golden["prob"].ravel(), allowed)


def raw_rows(predictor: Predictor, batch: Mapping[str, Any]) -> Any:
    """Prepared rows as the raw ones that they may have been made from; the first row is of unknown values.

    Of histories the events alone are raw: the item catalogue knows the rest, but for their numbers.
    """
    import pyarrow as pa

    assert predictor.encoders is not None, "the data was prepared by recspec"
    columns = {}
    for name in predictor.model.features():
        encoder = predictor.encoders.encoders.get(name)
        if encoder is not None:
            columns[getattr(encoder, "column", None) or name] = pa.array(raw_values(predictor, name, batch))
    return pa.table(columns)


def raw_values(predictor: Predictor, name: str, batch: Mapping[str, Any]) -> list[str] | list[float]:
    """One raw column: texts, or numbers."""
    from recspec.data.encoding.encoder_kinds import ScaleEncoder, VocabularyEncoder

    assert predictor.encoders is not None
    encoder, values = predictor.encoders.encoders[name], batch[name].numpy()
    if isinstance(encoder, VocabularyEncoder):
        vocabulary = predictor.encoders.vocabularies[encoder.vocabulary]
        if encoder.length is None:
            return ["nobody knows this", *map(str, vocabulary.decode(values).to_pylist()[1:])]
        lists = [map(str, vocabulary.decode(row[row != 0]).to_pylist()) for row in values]
        texts = [(encoder.separator or "|").join(row) for row in lists]
        # Numbers stand beside a history's events, as many.
        return texts if name in predictor.spec.role("history") else ["nobody knows this", *texts[1:]]
    raw: Any = values.astype(np.float64)
    if name in predictor.spec.role("history"):  # ln(1 + days) of each event
        ids = next(each for each in predictor.spec.role("history") if predictor.spec.features[each].is_categorical)
        counts = (batch[ids].numpy() != 0).sum(axis=1)
        return ["|".join(map(str, np.expm1(row[:count]))) for row, count in zip(raw, counts, strict=True)]
    return list(raw * encoder.std + encoder.mean) if isinstance(encoder, ScaleEncoder) else list(raw)


# --- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def ours(names: Sequence[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """`recspec serve` on the runs: its process and its ports."""
    command = [sys.executable, "-m", "recspec", "serve", *(f"{name}={folder / f'run-{name}'}" for name in names)]
    with recspec(command, folder, os.environ) as served:
        yield served


# --- the client, under the server's interpreter ----------------------------------------------------------------------


def ask(model: str, output: str, inputs_file: Path, http: int, grpc: int, *, load: bool, seconds: float) -> Found:
    """Send a model's rows over both protocols in requests of several sizes, and time some of them.

    Triton is told to `load` the model first; `recspec serve` loads its models as it starts.
    """
    with np.load(inputs_file) as stored:
        inputs = {name: stored[name] for name in stored.files}
    found: Found = {"model": model, "answers": {}, "latency": []}
    for protocol, port in (("http", http), ("grpc", grpc)):
        module = importlib.import_module(f"tritonclient.{protocol}")
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            if load:
                client.load_model(model)  # of an ensemble, what it consists of too
            assert client.is_model_ready(model), f"{model} is not ready"
            asking = Asking(module, client, model, output, inputs)
            for size in SIZES:
                found["answers"][f"{protocol}/{size}"] = asking.all_rows(size).tolist()
                found["latency"].append({"protocol": protocol, "rows": size, **asking.timed(size, seconds)})
            if protocol == "grpc":
                found["joined"] = joined(module, port, model, output, inputs)
    return found


class Asking:
    """Requests to one model."""

    def __init__(self, module: Any, client: Any, model: str, output: str, inputs: Arrays) -> None:
        self.module, self.client, self.model, self.output, self.inputs = module, client, model, output, inputs
        self.rows = max(map(len, inputs.values()))

    def one(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """The output of some rows."""
        given = []
        for name, values in self.inputs.items():
            part = values if len(values) == 1 else values[start:stop]  # a ranker's request has one row
            text = part.dtype.kind == "S"
            kinds = {"int32": "INT32", "int64": "INT64", "float32": "FP32", "float64": "FP64"}
            tensor = self.module.InferInput(name, part.shape, "BYTES" if text else kinds[part.dtype.name])
            tensor.set_data_from_numpy(part.astype(object) if text else np.ascontiguousarray(part))
            given.append(tensor)
        answer: np.ndarray[Any, Any] = self.client.infer(self.model, given).as_numpy(self.output)
        assert answer.shape == (stop - start, 1), answer.shape
        return answer[:, 0]

    def all_rows(self, size: int) -> np.ndarray[Any, Any]:
        """The output of every row (of the first 200 where a request has one)."""
        rows = min(self.rows, 200 * size)
        return np.concatenate([self.one(at, min(at + size, rows)) for at in range(0, rows, size)])

    def timed(self, size: int, seconds: float) -> Found:
        """Milliseconds that the client waits; the first five requests are left out."""
        stop = min(size, self.rows)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 25 or time.perf_counter() < end:
            started = time.perf_counter()
            self.one(0, stop)
            times.append(time.perf_counter() - started)
        p50, p99 = np.percentile(times[5:], (50, 99)) * 1000
        return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3), "requests": len(times) - 5}


def joined(module: Any, port: int, model: str, output: str, inputs: Arrays, clients: int = 8, each: int = 50) -> Found:
    """Rows a request and rows a computation when several clients ask for one row at a time."""

    def counts(client: Any) -> tuple[int, int]:
        answer = client.get_inference_statistics(model.removesuffix("_raw"), as_json=True)
        stats = answer["model_stats"][0]
        return int(stats["inference_count"]), int(stats["execution_count"])

    def work() -> None:
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            asking = Asking(module, client, model, output, inputs)
            for row in range(each):
                asking.one(row % asking.rows, row % asking.rows + 1)

    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        before = counts(client)
        threads = [threading.Thread(target=work) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = counts(client)
    rows, computations = (late - early for early, late in zip(before, after, strict=True))
    return {"clients": clients, "rows": rows, "computations": computations}


# --- both sides ------------------------------------------------------------------------------------------------------


def compare(
    server: str, asked: Sequence[Question], python: Path, ports: Mapping[str, int], folder: Path, seconds: float
) -> list[Found]:
    """What a server answered beside what the bundle does."""
    results = []
    for question in asked:
        file = folder / f"{question.model}.npz"
        np.savez(file, **question.inputs)  # type: ignore[arg-type]
        command = [
            str(python),
            __file__,
            "--ask",
            question.model,
            question.output,
            str(file),
            str(ports["http"]),
            str(ports["grpc"]),
        ]
        if server == "triton":
            command.append("--load")
        done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False)
        if done.returncode:
            log = (folder / f"{server}.log").read_text()[-2000:]
            raise SystemExit(f"{server}: {question.model}: {done.stderr[-2000:]}\n{log}")
        found = json.loads(done.stdout)
        differences = {
            key: float(np.abs(np.array(answer) - question.expected[: len(answer)]).max())
            for key, answer in found.pop("answers").items()
        }
        worst = {
            protocol: max(value for key, value in differences.items() if key.startswith(protocol))
            for protocol in ("http", "grpc")
        }
        rows = len(question.expected)
        told = {"rows": rows, "largest_difference": worst, "allowed": question.allowed}
        results.append({"server": server, **found, **told})
    return results


def print_table(results: Sequence[Found]) -> None:
    """One line a model and server."""
    print(f"{'model':<16}{'server':<9}{'rows':>7}{'|dp| http':>11}{'|dp| grpc':>11}", end="")
    print(
        "".join(f"{f'http {size}':>10}" for size in SIZES),
        "".join(f"{f'grpc {size}':>10}" for size in SIZES),
        " joined",
    )
    for found in results:
        times = {(each["protocol"], each["rows"]): each["p50_ms"] for each in found["latency"]}
        worst = found["largest_difference"]
        print(
            f"{found['model']:<16}{found['server']:<9}{found['rows']:>7}{worst['http']:>11.1e}{worst['grpc']:>11.1e}",
            end="",
        )
        print("".join(f"{times['http', size]:>10.2f}" for size in SIZES), end=" ")
        print("".join(f"{times['grpc', size]:>10.2f}" for size in SIZES), end="  ")
        print(f"{found['joined']['rows']} rows in {found['joined']['computations']} computations")
    print("http N, grpc N: p50 in ms that the client waits for a request of N rows")


def main() -> None:
    """Compare, or in a process of its own, ask."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--models", nargs="*", help=f"of {', '.join(ASKED)}; all that there are by default")
    given.add_argument("--rows", type=int, default=20_000, help="made-up rows before they are split")
    given.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16", "int8"))
    given.add_argument("--seconds", type=float, default=1.0, help="of timing, for each protocol and size")
    given.add_argument("--tensorflow", type=Path, help="folder of a TensorFlow model with golden rows, to ask too")
    given.add_argument("--environment", type=Path, help="folder of the server's environment")
    given.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "triton_serves.json")
    given.add_argument("--ask", nargs=5, metavar="X", help=argparse.SUPPRESS)
    given.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    arguments = given.parse_args()
    if arguments.ask:
        model, output, file, http, grpc = arguments.ask
        found = ask(model, output, Path(file), int(http), int(grpc), load=arguments.load, seconds=arguments.seconds)
        print(json.dumps(found))
        return

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _side_by_side import environments, made_python, where_and_when, write
    from recspec.models import MODELS

    names = arguments.models or [name for name in ASKED if name in MODELS]
    python = made_python("the server", arguments.environment or environments().with_name("triton"), REQUIREMENTS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        asked = questions(names, folder, rows=arguments.rows, precision=arguments.precision)
        if arguments.tensorflow:
            asked.append(question_of_tensorflow(arguments.tensorflow, folder, arguments.precision))
            names = [*names, TENSORFLOW]
        results = []
        for server, running in (
            ("triton", triton(python, folder / "repository", folder)),
            ("recspec", ours(names, folder)),
        ):
            theirs = [question for question in asked if server == "triton" or RANKER not in question.model]
            with running as (_, ports):
                results += compare(server, theirs, python, ports, folder, arguments.seconds)
    results.sort(key=lambda found: [question.model for question in asked].index(found["model"]))
    print_table(results)
    write(
        {"precision": arguments.precision, "requirements": REQUIREMENTS, "models": results, **where_and_when()},
        arguments.out,
    )
    if any(max(found["largest_difference"].values()) > found["allowed"] for found in results):
        raise SystemExit("an answer differs by more than is allowed")


if __name__ == "__main__":
    main()
