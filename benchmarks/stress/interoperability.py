"""Other software reads recspec's files, runs its programs and asks its server; the matrix of interoperability.md.

    pip install openvino tract polars ranx pytrec-eval-terrier tinygrad        # what is absent is skipped, and said
    npm install --prefix npm onnxruntime-node hyparquet hyparquet-compressors @duckdb/node-api \\
        @grpc/grpc-js @grpc/proto-loader
    python benchmarks/stress/interoperability.py --npm npm --mlserver OTHER_VENV/bin/mlserver

Trains NeuMF and Wide & Deep on made-up data, exports both, and compares every peer's answer with ONNX Runtime's or with
pyarrow's. MLServer has pins of its own, so it runs from an environment of its own, which also needs onnxruntime. Prints
a line for each peer: what it did, its version, the largest difference. Exit status 1 if one differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

ALLOWED = 1e-6
"""Largest difference of a probability, logit, value or metric in float32."""
ROWS = 7
MODELS = ("wide_deep", "neumf")
Arrays = dict[str, np.ndarray[Any, Any]]

MLSERVER_MODEL = """
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Program(MLModel):
    async def load(self):
        self.session = onnxruntime.InferenceSession(self.settings.parameters.uri)
        return True

    async def predict(self, asked):
        made = self.session.run(None, {each.name: NumpyCodec.decode_input(each) for each in asked.inputs})
        ports = self.session.get_outputs()
        outputs = [NumpyCodec.encode_output(port.name, values) for port, values in zip(ports, made)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
"""

NODE_PROGRAM = """
const ort = require("onnxruntime-node"), fs = require("fs");
(async () => {
  const session = await ort.InferenceSession.create(process.argv[2]), given = {};
  for (const [name, [kind, values]] of Object.entries(JSON.parse(fs.readFileSync(process.argv[3]))))
    given[name] = new ort.Tensor(kind, (kind == "int32" ? Int32Array : Float32Array).from(values), [values.length, 1]);
  const made = Object.entries(await session.run(given)).map(([name, tensor]) => [name, Array.from(tensor.data)]);
  console.log(JSON.stringify(Object.fromEntries(made)));
})();
"""

NODE_CLIENT = """
const grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader"), fs = require("fs");
const types = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(process.argv[4]), {keepCase: true});
const service = grpc.loadPackageDefinition(types).inference.GRPCInferenceService;
const client = new service(process.argv[5], grpc.credentials.createInsecure());
const inputs = Object.entries(JSON.parse(fs.readFileSync(process.argv[3]))).map(([name, [kind, values]]) => (
  {name, datatype: kind == "int32" ? "INT32" : "FP32", shape: [values.length, 1],
   contents: kind == "int32" ? {int_contents: values} : {fp32_contents: values}}));
client.ModelInfer({model_name: process.argv[2], inputs}, (error, answer) => {
  if (error) throw error;
  console.log(JSON.stringify(Object.fromEntries(answer.outputs.map((output, place) => {
    const raw = answer.raw_output_contents[place];
    return [output.name, Array.from(new Float32Array(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length)))];
  }))));
  process.exit(0);
});
"""

NODE_FILES = """
const {parquetReadObjects, asyncBufferFromFile} = await import("hyparquet");
const {compressors} = await import("hyparquet-compressors");
const {DuckDBInstance} = await import("@duckdb/node-api");
const path = process.argv[2], file = await asyncBufferFromFile(path);
const rows = await parquetReadObjects({file, compressors});
const database = await (await DuckDBInstance.create()).connect();
const other = (await database.runAndReadAll(`SELECT "user", item, score FROM '${path}'`)).getRows();
console.log(JSON.stringify([rows.map(row => [row.user, row.item, row.score]), other]));
"""


class Absent(Exception):
    """A peer that is not installed here."""


def peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Absent(f"{name} is not installed") from None


def difference(found: Mapping[str, Any], expected: Arrays) -> float:
    """The largest difference of the same outputs, of (B, 1) or (B,)."""
    return max(float(np.abs(np.ravel(found[name]) - values.ravel()).max()) for name, values in expected.items())


# --- what recspec makes ----------------------------------------------------------------------------------------------


def made_runs(folder: Path) -> None:
    """Clicks and views in files, two runs, their exports, and lists for every user."""
    rng, count = np.random.default_rng(0), 4_000
    users, items = rng.integers(0, 100, count), rng.zipf(1.3, count) % 150
    table = pd.DataFrame({"user": [f"u{user}" for user in users], "item": 2**53 + 1 + items})
    table["timestamp"] = pd.date_range("2024-01-01", periods=count, freq="7min")
    table.drop_duplicates(["user", "item"]).to_csv(folder / "views.csv", index=False)
    labels = ((users % 5 == items % 5) | (rng.random(count) < 0.2)).astype(int)
    table.assign(price=np.round(items * 1.37 % 50, 2), clicked=labels).to_csv(folder / "clicks.csv", index=False)
    recspec(folder, "prepare", "table", "clicks.csv", "clicks", "--set", "label=clicked")
    recspec(folder, "prepare", "table", "views.csv", "views")
    for model, data in (("wide_deep", "clicks"), ("neumf", "views")):
        recspec(folder, "train", model, data, model, "--set", "epochs=1")
        recspec(folder, "export", model, f"{model}-onnx")
    recspec(folder, "recommend", "neumf", "--all", "--out", "lists.parquet")


def recspec(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "recspec", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"recspec {' '.join(words)}: {done.stderr[-2_000:]}")


def asked_of(program: Path) -> tuple[Arrays, Arrays]:
    """Inputs of a few rows, and ONNX Runtime's answer."""
    session, rng = onnxruntime.InferenceSession(program), np.random.default_rng(1)
    given: Arrays = {}
    for port in session.get_inputs():
        is_id = "int" in port.type
        values = rng.integers(0, 20, (ROWS, 1)) if is_id else rng.normal(size=(ROWS, 1))
        given[port.name] = values.astype(np.int32 if is_id else np.float32)
    names = [port.name for port in session.get_outputs()]
    return given, dict(zip(names, session.run(None, given), strict=True))


# --- programs --------------------------------------------------------------------------------------------------------


def by_reference(program: Path, given: Arrays) -> Any:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(program))
    return dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))


def by_openvino(program: Path, given: Arrays) -> Any:
    core = peer("openvino").Core()
    # Without the hint, CPUs with AMX or AVX-512 BF16 compute in bf16.
    compiled = core.compile_model(core.read_model(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled([given[port.get_any_name()] for port in compiled.inputs])
    names = [port.name for port in onnx.load(program).graph.output]  # OpenVINO may call a port by an inner name
    return {name: found[port] for name, port in zip(names, compiled.outputs, strict=True)}


def by_tract(program: Path, given: Arrays) -> Any:
    model = peer("tract").onnx().load(str(program)).into_model().into_runnable()
    graph = onnx.load(program).graph
    made = model.run([given[port.name] for port in graph.input])
    return {port.name: values.to_numpy() for port, values in zip(graph.output, made, strict=True)}


# --- servers and clients ---------------------------------------------------------------------------------------------


@contextmanager
def running(command: list[str], folder: Path, ready: str) -> Iterator[None]:
    """A server until the end of the block. Raises RuntimeError if it isn't ready in a minute."""
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        for _ in range(240):
            try:
                with urlopen(ready, timeout=5):
                    break
            except OSError:
                time.sleep(0.25)
        else:
            raise RuntimeError(f"{command[0]} is not ready: {(folder / 'server.log').read_text()[-1_000:]}")
        yield
    finally:
        server.terminate()
        server.wait()


def by_triton_client(kind: str, address: str, model: str, given: Arrays, binary: bool = True) -> Any:
    client_of = peer(f"tritonclient.{kind}")
    options = {"binary_data": binary} if kind == "http" else {}
    inputs = []
    for name, values in given.items():
        port = client_of.InferInput(name, values.shape, "INT32" if values.dtype == np.int32 else "FP32")
        port.set_data_from_numpy(values, **options)
        inputs.append(port)
    client = client_of.InferenceServerClient(address)
    names = [each["name"] for each in read_metadata(client, kind, model)] or ["logit"]
    outputs = [client_of.InferRequestedOutput(name, **options) for name in names]
    answer = client.infer(model, inputs, outputs=outputs)
    return {name: answer.as_numpy(name) for name in names}


def read_metadata(client: Any, kind: str, model: str) -> Any:
    options = {} if kind == "http" else {"as_json": True}
    return client.get_model_metadata(model, **options).get("outputs", [])


def descriptors(folder: Path) -> Path:
    """The protocol's types as tritonclient ships them, for clients that have none."""
    from google.protobuf import descriptor_pb2

    held, seen = descriptor_pb2.FileDescriptorSet(), set[str]()

    def add(file: Any) -> None:
        if file.name not in seen:
            seen.add(file.name)
            for needed in file.dependencies:
                add(needed)
            file.CopyToProto(held.file.add())

    add(peer("tritonclient.grpc.service_pb2").DESCRIPTOR)
    path = folder / "protocol.bin"
    path.write_bytes(held.SerializeToString())
    return path


def node(npm: Path | None, folder: Path, code: str, *words: str) -> Any:
    if npm is None or not (npm / "node_modules").is_dir():
        raise Absent("needs --npm with the packages above")
    script = npm.resolve() / ("files.mjs" if "await import" in code else "asks.cjs")
    script.write_text(code)
    done = subprocess.run(["node", script, *words], cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout)


# --- files -----------------------------------------------------------------------------------------------------------


def columns_of(lists: pa.Table) -> list[list[Any]]:
    return [lists.column(name).to_pylist() for name in ("user", "item", "score")]


def same_lists(found: list[list[Any]], path: Path) -> float:
    expected = columns_of(pq.read_table(path))
    if found[:2] != expected[:2]:
        raise RuntimeError("users or items differ")
    return float(np.abs(np.array(found[2]) - np.array(expected[2])).max())


def by_spark(path: Path) -> list[list[Any]]:
    session = peer("pyspark.sql").SparkSession.builder.master("local[1]").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    rows = session.read.parquet(str(path)).select("user", "item", "score").collect()
    session.stop()
    return [list(column) for column in zip(*rows, strict=True)]


def by_duckdb(path: Path) -> list[list[Any]]:
    rows = peer("duckdb").sql(f"SELECT \"user\", item, score FROM '{path}'").fetchall()
    return [list(column) for column in zip(*rows, strict=True)]


def by_node(npm: Path | None, path: Path) -> float:
    both = node(npm, path.parent, NODE_FILES, str(path))
    return max(same_lists([list(column) for column in zip(*rows, strict=True)], path) for rows in both)


def by_tinygrad(path: Path) -> float:
    from safetensors.numpy import load_file

    peer("tinygrad")
    held = importlib.import_module("tinygrad.nn.state").safe_load(str(path))
    expected = load_file(path)
    if set(held) != set(expected):
        raise RuntimeError("names differ")
    return max(float(np.abs(held[name].numpy() - values).max()) for name, values in expected.items() if values.size)


def measured_again(path: Path, library: str) -> float:
    """NDCG@10 of the lists against made-up relevant items, by recspec and by a library; ranks stand for scores."""
    from recspec.metrics.measures import Ranking, ndcg

    rows, rng = pq.read_table(path, columns=["user", "rank", "item"]).to_pandas(), np.random.default_rng(2)
    items = sorted(set(rows.item.astype(str)))
    relevant, run, places = dict[str, dict[str, int]](), dict[str, dict[str, float]](), []
    for number, (user, group) in enumerate(rows.sort_values("rank").groupby("user")):
        shown = group.item.astype(str).tolist()
        wanted = [str(item) for item in rng.choice(items, 12, replace=False)]
        relevant[user], run[user] = dict.fromkeys(wanted, 1), {item: 1 / (1 + at) for at, item in enumerate(shown)}
        # An item that the list lacks is anywhere beyond its end.
        places += [(number, shown.index(item) if item in shown else 1_000 + at) for at, item in enumerate(wanted)]
    groups, higher = np.array(places).T
    own = ndcg(Ranking.of_positives(groups, higher, np.ones_like(higher), np.full(len(run), 2_000)), 10)
    if library == "ranx":
        ranx = peer("ranx")
        other = ranx.evaluate(ranx.Qrels(relevant), ranx.Run(run), "ndcg@10")
    else:
        evaluator = peer("pytrec_eval").RelevanceEvaluator(relevant, {"ndcg_cut.10"})
        other = np.mean([each["ndcg_cut_10"] for each in evaluator.evaluate(run).values()])
    return float(abs(own - other))


# --- the matrix ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--npm", type=Path, help="folder with the npm packages")
    parser.add_argument("--mlserver", help="mlserver's program, in an environment with onnxruntime")
    asked = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made_runs(folder)
        for what, name, check in checks(folder, asked.npm, asked.mlserver):
            try:
                largest = check()
                fine, said = largest <= ALLOWED, f"{largest:.1g}"
            except Absent as error:
                fine, said = True, f"skipped: {error}"
            except Exception as error:  # a peer may raise anything
                fine, said = False, f"{type(error).__name__}: {str(error).strip()[:300]}"
            failed = failed or not fine
            print(f"{'   ' if fine else 'NOT'} {what}: {name}: {said}", flush=True)
    raise SystemExit(failed)


def checks(folder: Path, npm: Path | None, mlserver: str | None) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """What is checked, by whom, and a function that gives the largest difference."""
    runtimes = {"onnx": by_reference, "openvino": by_openvino, "tract": by_tract}
    for model in MODELS:
        program = folder / f"{model}-onnx/model.onnx"
        given, expected = asked_of(program)
        feed = folder / f"{model}.json"
        feed.write_text(json.dumps({name: [each.dtype.name, each.ravel().tolist()] for name, each in given.items()}))
        for name, run in runtimes.items():
            yield (
                f"runs {model}",
                named(name),
                lambda run=run, program=program, given=given, expected=expected: (  # type: ignore[misc]
                    difference(run(program, given), expected)
                ),
            )
        yield (
            f"runs {model}",
            "onnxruntime-node",
            lambda program=program, feed=feed, expected=expected: (  # type: ignore[misc]
                difference(node(npm, folder, NODE_PROGRAM, str(program), str(feed)), expected)
            ),
        )
    given, expected = asked_of(folder / "neumf-onnx/model.onnx")
    feed = folder / "neumf.json"
    http, grpc = 18_590, 18_591
    own = [sys.executable, "-m", "recspec", "serve", "neumf=neumf-onnx"]
    own += ["--http-port", str(http), "--grpc-port", str(grpc)]
    with running(own, folder, f"http://127.0.0.1:{http}/v2/health/ready"):
        yield from clients("recspec serve", http, grpc, given, expected, (True, False))
        yield (
            "recspec serve asked by",
            "@grpc/grpc-js",
            lambda: difference(
                node(npm, folder, NODE_CLIENT, "neumf", str(feed), str(descriptors(folder)), f"127.0.0.1:{grpc}"),
                expected,
            ),
        )
    yield from by_mlserver(folder, mlserver, given, expected)
    lists = folder / "lists.parquet"
    readers: dict[str, Callable[[Path], list[list[Any]]]] = {
        "duckdb": by_duckdb,
        "pyspark": by_spark,
        "polars": lambda path: [
            list(each) for each in peer("polars").read_parquet(path).select("user", "item", "score")
        ],
        "pandas": lambda path: [pd.read_parquet(path)[name].tolist() for name in ("user", "item", "score")],
    }
    for name, read in readers.items():
        yield "reads lists", named(name), lambda read=read: same_lists(read(lists), lists)  # type: ignore[misc]
    yield "reads lists", "hyparquet, @duckdb/node-api", lambda: by_node(npm, lists)
    yield "reads weights", named("tinygrad"), lambda: by_tinygrad(folder / "neumf/bundle/weights.safetensors")
    for name in ("ranx", "pytrec-eval-terrier"):
        yield "measures lists", named(name), lambda name=name: measured_again(lists, name)  # type: ignore[misc]


def clients(
    server: str, http: int, grpc: int, given: Arrays, expected: Arrays, ways: tuple[bool, ...]
) -> Iterator[tuple[str, str, Callable[[], float]]]:
    what, name = f"{server} asked by", named("tritonclient")
    for binary in ways:
        yield (
            what,
            f"{name}, HTTP, {'binary' if binary else 'JSON'}",
            lambda binary=binary: difference(  # type: ignore[misc]
                by_triton_client("http", f"127.0.0.1:{http}", "neumf", given, binary), expected
            ),
        )
    yield (
        what,
        f"{name}, gRPC",
        lambda: difference(by_triton_client("grpc", f"127.0.0.1:{grpc}", "neumf", given), expected),
    )


def by_mlserver(
    folder: Path, mlserver: str | None, given: Arrays, expected: Arrays
) -> Iterator[tuple[str, str, Callable[[], float]]]:
    if mlserver is None:
        yield "serves an export", "MLServer", lambda: skipped("needs --mlserver")
        return
    http, grpc, home = 18_690, 18_691, folder / "mlserver"
    (home / "neumf").mkdir(parents=True)
    (home / "recspec_program.py").write_text(MLSERVER_MODEL)
    parameters = {"uri": str(folder / "neumf-onnx/model.onnx")}
    inputs = [{"name": name, "datatype": "INT32", "shape": [-1, 1]} for name in given]
    outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in expected]
    model = {"name": "neumf", "implementation": "recspec_program.Program", "parameters": parameters}
    (home / "neumf/model-settings.json").write_text(json.dumps({**model, "inputs": inputs, "outputs": outputs}))
    ports = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": 18_692, "parallel_workers": 0}
    (home / "settings.json").write_text(json.dumps(ports))
    with running([mlserver, "start", "."], home, f"http://127.0.0.1:{http}/v2/models/neumf/ready"):
        # MLServer takes no binary tensors over HTTP.
        yield from clients("MLServer serves an export,", http, grpc, given, expected, (False,))


def skipped(why: str) -> float:
    raise Absent(why)


def named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


if __name__ == "__main__":
    main()
