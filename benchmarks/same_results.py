"""Whether two commits give the same results: prepared bytes, weights, metrics, probabilities, recommendations, answers.

    python benchmarks/same_results.py main HEAD
    python benchmarks/same_results.py main . --only prepare 'train/d*' --expect 'prepare/*:*/settings/gaps=renamed'
    python benchmarks/same_results.py main . --only none --speed

A and B are commits, each checked out for the time being, or folders with a source tree. Both run the same `recspec`
commands on the same made-up raw files: seeded, on one thread, without a GPU. Every check compares what the commands
wrote, value by value:

- `prepare`: every dataset; SHA-256 of every file, and of JSON and YAML files each value
- `files`: a dataset's card, its check, and its rows in every chunk type
- `train`: every model; every tensor of the bundle, and how training ended
- `evaluate`, `predict`, `recommend`: metrics under every protocol that fits, probabilities, items
- `export`: probabilities of ONNX programs on made-up inputs, and the numbers of the sheet beside them
- `serve`: the answers of the JSON routes

Wall times, versions, the machine and the paths of the two trees are left out; notes to the user count by their number,
not by their words. A dataset or model that no check covers is a failure.

`--expect NAME:KEY=REASON` accepts a documented difference; NAME and KEY are patterns, and without KEY any value may
differ. The status is 1 if another value differs or a command fails. `--speed` measures both trees in turns
(`_tree_speed.py`). Writes results/same_results.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from _raw_files import ITEMS
from _side_by_side import where_and_when, write
from _tree_speed import compare_speed
from _trees import CommandError, Tree, commit_of, source_of

Found = dict[str, Any]
"""Values of a check by their names: numbers, text, arrays."""

LEFT_OUT = re.compile(
    r"(.*_)?(milli)?seconds|.*_(per_second|ms)|recspec|torch|python|versions|machine|latency|time|date|size_bytes|sha256s?|http|grpc"
)
"""Names of values that differ from run to run, or with the version alone."""
NOTES = ("notes", "changed", "dropped", "inferred")
"""Lists of messages."""

RAW = "../raw"
"""The folder of all raw files, as both trees name it."""
HISTORY = ("history=10", "negative_history=true", "train_negatives=1")
TABLE = ("user=who", "item=what", "timestamp=when")
CLICKS = ("label=clicked", "item_features=[tags]", "lists=[tags]", "context_features=[price, device]")

DATASETS: Mapping[str, tuple[str, Sequence[str]]] = {
    "synthetic-clicks": ("synthetic none", ("num_rows=4000",)),
    "synthetic-interactions": ("synthetic none", ("kind=interactions", "num_rows=4000", "history=5")),
    "movielens-latest": ("movielens movielens_latest", ("num_negatives=20",)),
    "movielens-1m": ("movielens movielens_1m", ("num_negatives=20", *HISTORY, "negatives=popularity")),
    "movielens-time": ("movielens movielens_1m", ("num_negatives=9", "split=time", "history=3")),
    "ncf": ("ncf ncf", ()),
    "outbrain": ("outbrain outbrain", ()),
    "table-clicks": ("table table/clicks.csv", (*TABLE, *CLICKS)),
    "table-hashed": (
        "table table/clicks.csv",
        (
            *TABLE,
            *CLICKS,
            "buckets={price: 4}",
            "hashed={tags: 9, device: 50}",
            "crosses=[[device, price_bucket], [who, what]]",
            "cross_cardinality=1000",
            "split=group",
        ),
    ),
    "table-interactions": (
        "table table/clicks.csv",
        (*TABLE, "num_negatives=5", "item_features=[price]", "context_features=[device]"),
    ),
    "adult": ("adult adult", ("num_buckets=8", "cross_cardinality=1000")),
    "criteo": ("criteo criteo/train.txt.gz", ("min_count=2", "buckets=true", "scale=true")),
    "criteo-binary": ("criteo criteo/train.txt.gz", ("format=split_binary",)),
    "criteo-days": ("criteo criteo_days", ("min_count=2", "min_counts={C3: 1}")),
    "amazon": ("amazon amazon", ("min_reviews=5", "history=20", "categories=path", "brand=true")),
    "amazon-tfrecord": ("amazon amazon", ("min_reviews=5", "format=tfrecord", "train_files=2", "prebatch=4")),
}
"""Check -> the dataset with its raw files, and its settings."""

CHUNK_TYPES = ("split_binary", "csv", "tfrecord", "parquet")

MODELS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "neumf": ("neumf", "movielens-latest", ("train.metric=full/ndcg@10",)),
    "neumf-popularity": (
        "neumf",
        "synthetic-interactions",
        ("item_bias=true", "settings.l2=0.01", "train.negative_distribution=popularity", "train.reject_positives=true"),
    ),
    "wide_deep": ("wide_deep", "outbrain", ("hidden=[64, 32]",)),
    "wide_deep-ftrl": (
        "wide_deep",
        "table-hashed",
        (
            "hidden=[64, 32]",
            "train.optimizer=adagrad",
            "train.precision=fp32",
            "train.parts={wide: {optimizer: ftrl, learning_rate: 0.05, l1: 0.001}}",
        ),
    ),
    "wide_deep-adult": ("wide_deep", "adult", ("hidden=[32]", "indicators=[education]", "train.schedule=polynomial")),
    "dlrm": (
        "dlrm",
        "criteo",
        (
            "embedding_dim=16",
            "bottom=[32, 16]",
            "top=[64, 32]",
            "train.optimizer=adagrad",
            "train.parts={embeddings: {optimizer: rowwise_adagrad}}",
        ),
    ),
    "dlrm-2 processes": ("dlrm", "criteo-days", ("embedding_dim=16", "bottom=[32, 16]", "top=[32]")),
    "dcnv2": ("dcnv2", "synthetic-clicks", ("embedding_dim=8", "bottom=[16]", "top=[32]", "cross_rank=8")),
    "dcnv2-parallel": (
        "dcnv2",
        "criteo-binary",
        (
            "embedding_dim=8",
            "bottom=[]",
            "top=[32]",
            "cross_rank=0",
            "structure=parallel",
            "dropout=0.2",
            "train.memory_budget=100KB",
            "train.clip_norm=1.0",
            "train.average=0.9",
        ),
    ),
    "din": ("din", "amazon", ("hidden=[32]", "train.accumulate=2")),
    "din-softmax": ("din", "movielens-1m", ("hidden=[32]", "softmax=true", "activation=dice")),
    "dien": ("dien", "amazon", ("hidden=[32]",)),
    "sim": ("sim", "amazon", ("hidden=[32]", "top_k=5")),
    "sim-hard": ("sim", "amazon", ("hidden=[32]", "search=hard", "top_k=5")),
    "two_tower": ("two_tower", "movielens-1m", ("dim=8", "hidden=[16]")),
    "sasrec": ("sasrec", "movielens-1m", ("dim=8", "blocks=1")),
    "mult_vae": ("mult_vae", "movielens-1m", ("hidden=[16]", "latent=8")),
    **{name: (name, "movielens-1m", ()) for name in ("popularity", "item_knn", "ease", "ials", "markov", "gf_cf")},
    "logistic_regression": ("logistic_regression", "table-clicks", ()),
}
"""Check -> the model, what it is trained on, and its settings."""
FITTED = ("popularity", "item_knn", "ease", "ials", "markov", "gf_cf", "logistic_regression")
"""Models that are not trained by steps."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""Starts the training of `dlrm-2 processes`."""

TRAIN = ("train.epochs=2", "train.batch_size=256", "train.seed=3", "train.tensorboard=false", "train.threads=1")
RECOMMENDS = ("neumf", "neumf-popularity", "din", "din-softmax", "dien", "sim", "two_tower", "sasrec", "ease", "ials")
EXPORTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("neumf", "wide_deep", "dlrm", "dcnv2", "din", "dien", "sim", "sasrec", "ease"), ()),
    "wide_deep-ftrl": ("--precision", "int8"),
    "dcnv2-parallel": ("--precision", "int8"),
    "din-softmax": ("--form", "ranker"),
}
EXPORT_ROWS = 300

ROWS = [
    {"who": "u1", "what": 3, "price": 0.2, "tags": "a|b", "device": "mobile"},
    {"who": "nobody", "what": 999, "price": -1.5},
]
QUESTIONS: Sequence[tuple[str, Mapping[str, Any] | None]] = (
    ("/models", None),
    ("/predict", {"model": "clicks", "rows": ROWS}),
    ("/rank", {"model": "clicks", "request": {"who": "u1", "price": 0.2, "device": "mobile"}, "candidates": [1, 30]}),
    ("/rank", {"model": "films", "user": 7, "candidates": [*range(1, ITEMS)], "top_k": 7}),
    ("/recommend", {"model": "films", "user": 7, "k": 5}),
    ("/recommend", {"model": "films", "user": "nobody", "k": 5}),
    ("/users?model=films&query=1&limit=5", None),
    ("/items?model=films&query=Film&limit=5", None),
)
"""Routes of the server, and what they are asked."""


@dataclass(frozen=True)
class Check:
    """Something that both trees are asked, under a name GROUP/WHAT."""

    name: str
    ask: Callable[[Tree], Found]


def checks() -> Iterator[Check]:
    """All checks, each after those whose commands it needs."""
    yield Check(
        "prepare/registry", lambda tree: registered(tree, "datasets", {cut[0].split()[0] for cut in DATASETS.values()})
    )
    for name in DATASETS:
        yield Check(f"prepare/{name}", lambda tree, name=name: files_of(prepared(tree, name)))  # type: ignore[misc]
    for name in ("table-clicks", "amazon", "outbrain"):
        yield Check(f"files/describe {name}", lambda tree, name=name: described(tree, name))  # type: ignore[misc]
    for kind in CHUNK_TYPES:
        yield Check(f"files/transcode {kind}", lambda tree, kind=kind: transcoded(tree, kind))  # type: ignore[misc]
    yield Check("files/synthesize", synthesized)
    yield Check("train/registry", lambda tree: registered(tree, "models", {model for model, *_ in MODELS.values()}))
    parts = {"train": trained, "evaluate": evaluated, "predict": predicted}
    for group, ask in parts.items():
        for name in MODELS:
            yield Check(f"{group}/{name}", lambda tree, name=name, ask=ask: ask(tree, name))  # type: ignore[misc]
    yield Check("predict/raw rows", lambda tree: predicted(tree, "wide_deep-ftrl", f"{RAW}/table/clicks.csv"))
    for name in RECOMMENDS:
        yield Check(f"recommend/{name}", lambda tree, name=name: recommended(tree, name))  # type: ignore[misc]
    for name in EXPORTS:
        yield Check(f"export/{name}", lambda tree, name=name: exported(tree, name))  # type: ignore[misc]
    yield Check("serve/json", served)


# --- what a tree is asked --------------------------------------------------------------------------------------------


def registered(tree: Tree, what: str, covered: set[str]) -> Found:
    """Names that `recspec WHAT` lists.

    Raises:
        CommandError: if no check covers one of them.
    """
    names = re.findall(r"^([a-z]\w*)  \S", tree.recspec(what), re.MULTILINE)
    if missing := [name for name in names if name not in covered]:
        raise CommandError(f"{tree.name}: no check covers {', '.join(missing)}, which `recspec {what}` lists")
    return {"names": ", ".join(names)}


def prepared(tree: Tree, name: str) -> Path:
    """The prepared dataset of a case."""
    dataset, raw = DATASETS[name][0].split()
    tree.recspec("prepare", dataset, f"{RAW}/{raw}", f"data/{name}", *sets(DATASETS[name][1]))
    return tree.folder / "data" / name


def described(tree: Tree, name: str) -> Found:
    """The dataset's card; `recspec check` passes."""
    prepared(tree, name)
    tree.recspec("check", f"data/{name}")
    return flat(json.loads(tree.recspec("describe", f"data/{name}", "--json")))


def transcoded(tree: Tree, kind: str) -> Found:
    """The same rows in another chunk type."""
    name = "criteo" if kind == "split_binary" else "amazon"
    prepared(tree, name)
    tree.recspec("transcode", f"data/{name}", f"transcoded/{kind}", "--to", kind)
    return files_of(tree.folder / "transcoded" / kind)


def synthesized(tree: Tree) -> Found:
    """Random data of a dataset's shape."""
    prepared(tree, "amazon")
    out = ("synthesized", "--rows", "500", "--distribution", "power_law", "--seed", "5")
    tree.recspec("synthesize", "data/amazon", *out)
    return files_of(tree.folder / "synthesized")


def run_of(tree: Tree, name: str) -> Path:
    """The folder of a trained run, as commands name it."""
    model, data, settings = MODELS[name]
    prepared(tree, data)
    start = TORCHRUN if name.endswith("processes") else ()
    train = TRAIN[2:] if model in FITTED else TRAIN
    tree.once(*start, "-m", "recspec", "train", model, f"data/{data}", f"runs/{name}", *sets((*train, *settings)))
    return Path("runs", name)


def trained(tree: Tree, name: str) -> Found:
    """The tensors of the bundle, and how training ended."""
    from safetensors.numpy import load_file

    bundle = tree.folder / run_of(tree, name) / "bundle"
    card = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    found = flat({part: card[part] for part in ("settings", "trained", "metrics")})
    for path in sorted(bundle.glob("*.safetensors")):
        found |= {f"{path.stem}/{tensor}": value for tensor, value in sorted(load_file(path).items())}
    return found


def evaluated(tree: Tree, name: str) -> Found:
    """Metrics of test; those of the first model of each kind beside the baselines'."""
    run, data = run_of(tree, name), f"data/{MODELS[name][1]}"
    more = ("--baselines",) if name == MODELS[name][0] else ()
    return flat(json.loads(tree.recspec("evaluate", str(run), data, "--json", *more)))


def predicted(tree: Tree, name: str, rows: str | None = None) -> Found:
    """Probabilities of a prepared split, or of raw rows."""
    run, out = run_of(tree, name), f"predicted-{name}{'-raw' if rows else ''}.parquet"
    tree.recspec("predict", str(run), rows or f"data/{MODELS[name][1]}", "--out", out)
    return table_of(tree.folder / out)


def recommended(tree: Tree, name: str) -> Found:
    """Items for every user, and one user's answer in JSON."""
    run, out = run_of(tree, name), f"recommended-{name}.parquet"
    tree.recspec("recommend", str(run), "--all", "-k", "5", "--out", out)
    users = ("--user", "3", "--user", "nobody")
    return table_of(tree.folder / out) | flat(json.loads(tree.recspec("recommend", str(run), *users, "--json")))


def exported(tree: Tree, name: str) -> Found:
    """What an ONNX program gives for made-up inputs, and the sheet beside it."""
    import onnxruntime

    run, out = run_of(tree, name), tree.folder / "exports" / name
    data = ("--data", f"data/{MODELS[name][1]}", "--batch-sizes", "1", "--threads", "1")
    tree.recspec("export", str(run), f"exports/{name}", *EXPORTS[name], *data)
    sheets = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json")))
    sheet = next(each for each in sheets if "signature" in each)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(out / "model.onnx", options, ["CPUExecutionProvider"])
    rng = np.random.default_rng(7)
    given = {}
    for port in sorted(sheet["signature"]["inputs"], key=lambda port: str(port["name"])):
        shape = (1 if port["level"] == "request" else EXPORT_ROWS, port["width"])
        values = rng.random(shape) if port["num_ids"] is None else rng.integers(0, port["num_ids"], shape)
        given[port["name"]] = values.astype(port["dtype"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True)) | flat(sheet)


def served(tree: Tree) -> Found:
    """Answers of the server's JSON routes."""
    models = [f"clicks={run_of(tree, 'wide_deep-ftrl')}", f"films={run_of(tree, 'neumf')}"]
    with tree.serving(*models) as server:
        answers = [server.ask(route, json.dumps(body) if body else None) for route, body in QUESTIONS]
    return flat(
        {f"{place} {route}": answer for place, ((route, _), answer) in enumerate(zip(QUESTIONS, answers, strict=True))}
    )


def make_raw(tree: Tree, folder: Path) -> None:
    """Raw files of every dataset, by the writers of this tree's tests."""
    tree.python(str(Path(__file__).with_name("_raw_files.py")), str(folder), paths=(tree.source,))


def sets(settings: Sequence[str]) -> list[str]:
    """Options of the command line that set these."""
    return [part for setting in settings for part in ("--set", setting)]


# --- what is compared ------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> Found:
    """SHA-256 of every file of a folder; JSON and YAML value by value, since some values differ from run to run."""
    found: Found = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        if path.suffix in (".json", ".yaml"):
            found |= flat(yaml.safe_load(content) if path.suffix == ".yaml" else json.loads(content), name)
        if path.suffix != ".json":
            found[f"{name} sha256"] = hashlib.sha256(content).hexdigest()
    return found


def table_of(path: Path) -> Found:
    """The columns of a Parquet file."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return {
        name: np.asarray(values) if values and isinstance(values[0], float) else json.dumps(values)
        for name, values in ((name, table.column(name).to_pylist()) for name in table.column_names)
    }


def flat(value: Any, name: str = "") -> Found:
    """Every value of nested mappings and lists under its path, without those that differ from run to run."""
    if not isinstance(value, Mapping | list):
        return {name: value}
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    found: Found = {f"{name} count": len(value)} if isinstance(value, list) else {}
    if name.rpartition("/")[2] in NOTES:
        return found
    for key, each in pairs:
        if not LEFT_OUT.fullmatch(str(key)):
            found |= flat(each, f"{name}/{key}" if name else str(key))
    return found


def differences(a: Found, b: Found) -> Iterator[tuple[str, str]]:
    """Every value that differs: its name, and how."""
    for key in (*a, *(key for key in b if key not in a)):
        if key not in a or key not in b:
            yield key, f"only {'A' if key in a else 'B'} has it"
            continue
        left, right = a[key], b[key]
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            if left.shape != right.shape or left.dtype != right.dtype:
                yield key, f"{left.dtype}{left.shape} / {right.dtype}{right.shape}"
            elif left.tobytes() != right.tobytes():
                apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
                yield key, f"{np.count_nonzero(apart):,} of {left.size:,} values, by up to {np.max(apart):.2g}"
        elif type(left) is not type(right) or left != right:
            yield key, f"{str(left)[:60]} / {str(right)[:60]}"


def digest(found: Found) -> str:
    """SHA-256 of all values of a check."""
    hashed = hashlib.sha256()
    for key, value in found.items():
        hashed.update(key.encode())
        hashed.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return hashed.hexdigest()


@dataclass(frozen=True)
class Expected:
    """A documented difference."""

    check: str
    key: str
    reason: str

    @classmethod
    def parse(cls, text: str) -> Expected:
        """`NAME=REASON` or `NAME:KEY=REASON`."""
        pattern, equals, reason = text.partition("=")
        check, _, key = pattern.partition(":")
        if not (check and equals and reason):
            raise argparse.ArgumentTypeError(f"'{text}': expected NAME=REASON or NAME:KEY=REASON")
        return cls(check, key or "*", reason)

    def covers(self, check: str, key: str) -> bool:
        """Whether this value of this check may differ."""
        return fnmatch(check, self.check) and fnmatch(key, self.key)


def compare(check: Check, trees: Sequence[Tree], expected: Sequence[Expected]) -> dict[str, Any]:
    """Both trees' values of a check, side by side: a line of the report."""
    started = time.perf_counter()
    line: dict[str, Any] = {"check": check.name}
    try:
        with ThreadPoolExecutor(len(trees)) as pool:
            a, b = pool.map(check.ask, trees)
    except CommandError as error:
        return {**line, "outcome": "failed", "first": str(error), "seconds": round(time.perf_counter() - started, 1)}
    reasons: dict[str, None] = {}
    unexpected = []
    for key, how in differences(a, b):
        reason = next((each.reason for each in expected if each.covers(check.name, key)), None)
        if reason is None:
            unexpected.append(f"{key}: {how}")
        else:
            reasons[reason] = None
    return {
        **line,
        "outcome": "differs" if unexpected else "expected" if reasons else "same",
        "values": len(a),
        "first": unexpected[0] if unexpected else "",
        "differing": len(unexpected),
        "reasons": list(reasons),
        "sha256": [digest(a), digest(b)],
        "seconds": round(time.perf_counter() - started, 1),
    }


def print_line(line: Mapping[str, Any]) -> None:
    """One line of the table."""
    more = line["first"] or "; ".join(line.get("reasons", ()))
    if line.get("differing", 0) > 1:
        more += f" (and {line['differing'] - 1} more)"
    print(
        f"{line['check']:34}{line['outcome']:10}{line.get('values', 0):8,} values{line['seconds']:8.1f} s  {more}",
        flush=True,
    )


def wanted(check: str, only: Sequence[str] | None) -> bool:
    """Whether a check, or its group, is among those asked for."""
    return only is None or any(fnmatch(check, each) or check.partition("/")[0] == each for each in only)


def main() -> int:
    """Compare, print a line a check, write JSON."""
    arguments = _options().parse_args()
    report: dict[str, Any] = {"what": "results of two source trees, by the command line alone", "checks": []}
    if arguments.scratch:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as made, ExitStack() as stack:
        scratch, trees = Path(made).resolve(), []
        for name, given in (("A", arguments.a), ("B", arguments.b)):
            source = stack.enter_context(source_of(given, scratch / f"source-{name}"))
            trees.append(Tree(name, source, scratch / name))
            report[name] = {"given": given, "commit": commit_of(source)}
            trees[-1].check()
        make_raw(trees[0], scratch / "raw")
        for check in checks():
            if wanted(check.name, arguments.only):
                report["checks"].append(compare(check, trees, arguments.expect))
                print_line(report["checks"][-1])
        if arguments.speed:
            report["speed"] = compare_speed(trees, arguments.rounds, arguments.models)
    outcomes = [line["outcome"] for line in report["checks"]]
    print(", ".join(f"{outcomes.count(each)} {each}" for each in ("same", "expected", "differs", "failed")))
    write({**report, **where_and_when()}, arguments.out)
    return int(any(outcome in ("differs", "failed") for outcome in outcomes))


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("a", help="commit, or folder with a source tree")
    options.add_argument("b", help="commit or folder to compare with it")
    options.add_argument("--only", nargs="+", help="groups or patterns of checks; all by default")
    options.add_argument(
        "--expect",
        action="append",
        type=Expected.parse,
        default=[],
        metavar="NAME[:KEY]=REASON",
        help="documented difference; may be repeated",
    )
    options.add_argument("--speed", action="store_true", help="measure training and single requests in turns, too")
    options.add_argument("--models", nargs="+", help="models whose training --speed measures; all by default")
    options.add_argument("--rounds", type=int, default=3, help="turns of --speed")
    options.add_argument("--scratch", type=Path, help="folder for everything that is made on the way")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "same_results.json")
    return options


if __name__ == "__main__":
    sys.exit(main())
