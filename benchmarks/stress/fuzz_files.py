"""Files that somebody damaged or forged: what opens them must succeed or say what is wrong, and end, and stay inside.

Made-up datasets, bundles, runs, raw files, archives and recipes are changed at random, by structure (a YAML or JSON
value, a Parquet column, a tensor under a right digest, a record under a right checksum, a member of an archive) or by
bytes, or a file is replaced by a link, a pipe or a device. Then the real code opens them in a child process: check,
transcode, train, resume, predict, recommend, prepare, verify.

    python benchmarks/stress/fuzz_files.py --minutes 30 [--seed 0] [--only bundle resume] [--case 123]

It prints one JSON object and ends with status 1 if anything but success or a `RecspecError` came of a case, a case
took more than --seconds, a file outside the case's folder was touched, or memory grew. A case is made from the seed
and its number alone, so `--case N` shows the traceback of one.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

MEMORY = 12 << 30
"""Bytes of address space that a child may take; torch alone maps several GB."""
GROWTH = 150 << 20
"""Bytes by which a child's memory may grow from its first hundred cases to its last: arenas and caches fill up."""

Tree = dict[str, Any] | list[Any]


# --- what is changed -------------------------------------------------------------------------------------------------


def make_seeds(base: Path) -> None:
    """The files that cases start from."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recspec.data.prepare import PrepareContext
    from recspec.data.storage import transcode
    from recspec.datasets import DATASETS
    from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    synthetic = DATASETS["synthetic"]
    shapes: dict[str, dict[str, Any]] = {
        "interactions": {"num_users": 20, "num_items": 15, "num_rows": 150, "num_negatives": 4},
        "clicks": {"num_users": 20, "num_items": 15, "num_rows": 200},
    }
    for kind, sizes in shapes.items():
        data = base / "data" / kind
        synthetic.prepare(PrepareContext(Path(), data), synthetic.Settings.model_validate({"kind": kind, **sizes}))
        spec = FeatureSpec.load(data)
        for to in CHUNK_TYPES:
            transcode(spec, base / "chunks" / f"{kind}-{to}", cast(ChunkType, to))
        model = {"interactions": "neumf", "clicks": "wide_deep"}[kind]
        settings = {"neumf": {"factors": 4, "layers": (8, 4)}, "wide_deep": {"hidden": (8,)}}[model]
        train(
            model,
            spec,
            base / "runs" / kind,
            settings=TrainSettings(epochs=1, batch_size=256, tensorboard=False, checkpoint_minutes=0),
            model_settings=MODELS[model].Settings.model_validate(settings),
        )
    raw = base / "raw"
    raw.mkdir()
    numbers = np.random.default_rng(0)
    rows = [(f"u{numbers.integers(12)}", f"i{numbers.integers(9)}", n, round(n / 7, 2)) for n in range(120)]
    text = "user,item,time,price\n" + "".join(f"{u},{i},{t},{p}\n" for u, i, t, p in rows)
    (raw / "rows.csv").write_text(text)
    names = ("user", "item", "time", "price")
    columns = {name: pa.array([row[place] for row in rows]) for place, name in enumerate(names)}
    pq.write_table(pa.table(columns), raw / "rows.parquet")
    (raw / "rows.jsonl").write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with zipfile.ZipFile(raw / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        ratings = "".join(f"{n % 12 + 1},{n % 9 + 1},{n % 5 + 1},{n}\n" for n in range(120))
        archive.writestr("ml-latest-small/ratings.csv", "userId,movieId,rating,timestamp\n" + ratings)
        films = "".join(f"{n},Film {n} (1999),Comedy|Drama\n" for n in range(1, 10))
        archive.writestr("ml-latest-small/movies.csv", "movieId,title,genres\n" + films)
    (raw / "recipe.yaml").write_text(
        "model: neumf\nsettings: {factors: 8, layers: [16, 8]}\ntrain: {epochs: 2, learning_rate: 0.01}\n"
    )
    (base / "canary").mkdir()
    (base / "canary" / "secret").write_text("canary")


# --- how it is changed -----------------------------------------------------------------------------------------------

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "auto",
    "..",
    ".",
    "../canary/secret",
    "/dev/zero",
    "/etc/passwd",
    "s3://b/x",
    "a\0b",
    "\ud800",
    "x" * 300,
    "é\u202e",
    "'\";--",
    "int64",
    "float16",
    "label",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    "2020-13-45",
    "!!python/name:os.system",
    b"\xff",
)


def change_tree(tree: Any, dice: random.Random) -> Any:
    """A nested value with one place of it changed."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(tree)
    if not places:
        return dice.choice(HOSTILE)
    holder, key = dice.choice(places)
    match dice.randrange(6):
        case 0 | 1:
            holder[key] = dice.choice(HOSTILE)
        case 2:
            del holder[key]
        case 3:
            other, place = dice.choice(places)
            with suppress(IndexError, KeyError):
                holder[key] = json.loads(json.dumps(other[place], default=str))
        case 4 if isinstance(holder, dict):
            holder[str(dice.choice(HOSTILE))] = holder.pop(key)
        case 4:
            holder.extend([holder[key]] * dice.choice((1, 100)))
        case _:
            for _ in range(dice.choice((1, 60, 3000))):
                holder[key] = [holder[key]]
    return tree


def change_bytes(data: bytes, dice: random.Random) -> bytes:
    """Some bytes changed, added, lost or said twice."""
    at = dice.randrange(len(data) + 1)
    length = dice.choice((1, 4, 8, 64, 1000))
    match dice.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + dice.randbytes(length) + data[at:]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + data[at : at + length] * dice.choice((2, 500)) + data[at + length :]
        case 4:
            return data[:at] + dice.choice((b"\0", b"\xff", b"\x7f")) * length + data[at + length :]
        case 5:
            return b""
        case 6:
            return dice.randbytes(dice.choice((1, 100, 10_000)))
        case _:
            changed = bytearray(data)
            for _ in range(dice.choice((1, 3, 30))):
                if changed:
                    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
            return bytes(changed)


def change_text(data: bytes, dice: random.Random) -> bytes:
    """Lines and cells of a text changed."""
    lines = data.splitlines(keepends=True) or [b"\n"]
    at = dice.randrange(len(lines))
    match dice.randrange(8):
        case 0:
            lines[at] = lines[at] * dice.choice((2, 50))
        case 1:
            lines[at] = lines[at].replace(b",", dice.choice((b";", b",,", b"\t", b"", b'","', b"|")))
        case 2:
            lines[at] = dice.choice((b'"', b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"'", b"#")) + lines[at]
        case 3:
            cells = lines[at].rstrip(b"\n").split(b",")
            words = ("", "nan", "1e400", "-1", "9" * 30, "x" * 100_000, '"', "a\nb", "1.5", "\u0661", "NULL", "=1+1")
            cells[dice.randrange(len(cells))] = dice.choice(words).encode()
            lines[at] = b",".join(cells) + b"\n"
        case 4:
            dice.shuffle(lines)
        case 5:
            lines = [line.replace(b"\n", b"\r\n") for line in lines]
        case 6:
            lines = lines[: dice.choice((0, 1, 2))]
        case _:
            return change_bytes(data, dice)
    return b"".join(lines)


def change_parquet(file: Path, dice: random.Random) -> None:
    """One column cast, renamed, dropped, emptied, doubled, or with an odd value."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(file, partitioning=None)
    place = dice.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place)
    kinds = (
        pa.string(),
        pa.float64(),
        pa.int64(),
        pa.uint8(),
        pa.bool_(),
        pa.timestamp("us"),
        pa.large_string(),
        pa.binary(),
        pa.decimal128(10, 2),
        pa.list_(pa.int64()),
        pa.dictionary(pa.int32(), pa.string()),
    )
    match dice.randrange(8):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.rename_columns(
                [str(dice.choice(HOSTILE)) if n == place else each for n, each in enumerate(table.column_names)]
            )
        case 2:
            with suppress(pa.ArrowException):
                table = table.set_column(place, name, column.cast(dice.choice(kinds), safe=False))
        case 3:
            table = table.set_column(place, name, pa.nulls(len(table), dice.choice((column.type, pa.null()))))
        case 4:
            table = table.slice(0, dice.choice((0, 1, len(table) - 1)))
        case 5:
            table = pa.concat_tables([table, table])
        case 6:
            values = column.to_pylist()
            if values:
                values[dice.randrange(len(values))] = dice.choice((None, -1, 2**31 - 1, 0, float("nan"), 1e300))
            with suppress(pa.ArrowException, TypeError, OverflowError):
                table = table.set_column(place, name, pa.array(values, column.type))
        case _:
            with suppress(pa.ArrowException):
                table = table.set_column(place, name, pa.array([[value] for value in column.to_pylist()]))
                table = table.set_column(place, name, pc.list_flatten(table.column(place)))
    with suppress(pa.ArrowException, UnicodeEncodeError, TypeError, NotImplementedError):
        changed = io.BytesIO()
        pq.write_table(table, changed)
        file.write_bytes(changed.getvalue())


def change_tensors(file: Path, dice: random.Random) -> None:
    """A tensor changed under a digest that is right, as a forger would; or the header's JSON."""
    import torch

    from recspec.bundle.checkpoint import read_tensors, write_tensors

    tensors, header = read_tensors(file)
    if dice.random() < 0.4:
        header = change_tree(header, dice)
    else:
        name = dice.choice(sorted(tensors))
        tensor = tensors[name]
        match dice.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[str(dice.choice(HOSTILE))] = tensors.pop(name)
            case 2:
                tensors[name] = tensor.to(dice.choice((torch.float16, torch.int64, torch.uint8, torch.bool)))
            case 3:
                tensors[name] = (
                    tensor[None] if dice.random() < 0.5 else tensor.reshape(-1)[: tensor.numel() // 2].clone()
                )
            case 4 if tensor.numel():
                values = (-1, 0, 127) if not tensor.is_floating_point() else (float("nan"), float("inf"), -1e30)
                tensor.view(-1)[dice.randrange(tensor.numel())] = dice.choice(values)
            case _:
                tensors[name] = torch.zeros(0, dtype=tensor.dtype)
    with suppress(Exception):  # a header that is no mapping can't be written
        write_tensors(file, tensors, header)


def change_records(file: Path, dice: random.Random) -> None:
    """A record of a TFRecord file changed, its checksums made right."""
    from recspec.data.storage import masked_crc

    data, at, records = file.read_bytes(), 0, []
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        records.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    if not records:
        return
    place = dice.randrange(len(records))
    records[place] = change_bytes(records[place], dice)

    def framed(record: bytes) -> bytes:
        size = struct.pack("<Q", len(record))
        sums = [struct.pack("<I", masked_crc(each)) for each in (size, record)]
        return size + sums[0] + record + sums[1]

    file.write_bytes(b"".join(map(framed, records)))


def change_archive(file: Path, dice: random.Random) -> None:
    """Members changed, renamed, said twice, or blown up."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = dice.choice(sorted(members))
    names = {each: each for each in members}
    match dice.randrange(5):
        case 0 | 1:
            members[name] = change_text(members[name], dice)
        case 2:
            names[name] = dice.choice(
                ("../canary/secret", "/tmp/recspec-fuzzed", "..\\x", "a" * 300, "x/", name.upper())
            )
        case 3:
            members[name] += b"0" * (32 << 20)
        case _:
            del members[name]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in members.items():
            archive.writestr(names[each], data)
        if dice.random() < 0.2:
            link = zipfile.ZipInfo("ml-latest-small/links.csv")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "/etc/passwd")
    if dice.random() < 0.3:
        file.write_bytes(change_bytes(file.read_bytes(), dice))


def change_markup(file: Path, dice: random.Random) -> None:
    """One value of a YAML or JSON file."""
    import yaml

    text = file.read_text()
    is_json = file.suffix == ".json"
    tree = change_tree(json.loads(text) if is_json else yaml.safe_load(text), dice)
    with suppress(Exception):  # a value that can't be written so
        written = json.dumps(tree, default=str) if is_json else yaml.safe_dump(tree, sort_keys=False)
        file.write_bytes(written.encode(errors="surrogateescape" if is_json else "strict"))


def replace_file(file: Path, dice: random.Random, canary: Path) -> None:
    """A link, a pipe, a folder or nothing in the place of a file."""
    file.unlink()
    match dice.randrange(6):
        case 0:
            file.symlink_to(canary)
        case 1:
            file.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(file)
        case 3:
            file.mkdir()
        case 4:
            file.symlink_to(file.name)


STRUCTURED: dict[str, Callable[[Path, random.Random], None]] = {
    ".yaml": change_markup,
    ".json": change_markup,
    ".parquet": change_parquet,
    ".safetensors": change_tensors,
    ".tfrecord": change_records,
    ".zip": change_archive,
}


def change_file(file: Path, dice: random.Random, canary: Path, *, inside: bool) -> str:
    """Change a file, and say how; `inside` says that it is one of a folder's, so that it may become a link."""
    chance = dice.random()
    if inside and chance < 0.08:
        replace_file(file, dice, canary)
        return "replaced"
    change = STRUCTURED.get(file.suffix)
    if change is not None and chance < 0.7:
        change(file, dice)
        return "structure"
    if file.suffix in (".csv", ".jsonl", ".yaml", ".json") and chance < 0.9:
        file.write_bytes(change_text(file.read_bytes(), dice))
        return "text"
    file.write_bytes(change_bytes(file.read_bytes(), dice))
    return "bytes"


# --- what opens it ---------------------------------------------------------------------------------------------------


class Case:
    """One case: a folder of its own with changed files, and what is done with them."""

    def __init__(self, base: Path, folder: Path, seed: int, number: int, only: list[str]) -> None:
        self.base, self.folder = base, folder
        self.dice = random.Random(f"{seed}-{number}")
        self.target = self.dice.choice(only or sorted(TARGETS))
        self.changed: list[str] = []

    def run(self) -> None:
        """Make the files, and open them."""
        TARGETS[self.target](self)

    def taken(self, source: Path, *, times: int = 0, only: str = "*") -> Path:
        """A copy of a file or folder with one to three of its files changed."""
        target = self.folder / source.name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        for _ in range(times or self.dice.choice((1, 1, 1, 2, 3))):
            files = [target] if target.is_file() else sorted(filter(_is_changeable, target.rglob(only)))
            if not files:
                break
            file = self.dice.choice(files)
            with suppress(Exception):  # what can't be read any more was changed enough
                how = change_file(file, self.dice, self.base / "canary" / "secret", inside=target.is_dir())
                self.changed.append(f"{file.relative_to(self.folder)}: {how}")
        return target

    def kind(self) -> str:
        return self.dice.choice(("interactions", "clicks"))


def _is_changeable(file: Path) -> bool:
    """Whether it is still a file of the case's own: a link that was put in its place leads elsewhere."""
    return file.is_file() and not file.is_symlink()


def open_dataset(case: Case) -> None:
    from recspec.data.storage import check as dataset_check
    from recspec.data.storage import transcode
    from recspec.feature_spec import CHUNK_TYPES, ChunkType, FeatureSpec
    from recspec.report import dataset_summary as card

    source = case.dice.choice(sorted((case.base / "chunks").iterdir()))
    spec = FeatureSpec.load(case.taken(source))
    match case.dice.randrange(3):
        case 0:
            dataset_check.check(spec)
        case 1:
            card.describe(spec).to_dict()
        case _:
            transcode(spec, case.folder / "out", cast(ChunkType, case.dice.choice(CHUNK_TYPES)))


def start_training(case: Case) -> None:
    from recspec.feature_spec import FeatureSpec
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    kind = case.kind()
    spec = FeatureSpec.load(case.taken(case.base / "data" / kind))
    model = case.dice.choice(("neumf",) if kind == "interactions" else ("wide_deep", "dlrm", "dcnv2"))
    small = {
        "neumf": {"factors": 4, "layers": (8, 4)},
        "wide_deep": {"hidden": (8,)},
        "dcnv2": {},
        "dlrm": {},
    }[model]
    train(
        model,
        spec,
        case.folder / "run",
        settings=TrainSettings(epochs=1, batch_size=512, tensorboard=False),
        model_settings=MODELS[model].Settings.model_validate(small),
    )


def resume_training(case: Case) -> None:
    from recspec.base.config import build
    from recspec.bundle import folder as bundle
    from recspec.feature_spec import FeatureSpec
    from recspec.models import MODELS
    from recspec.training.loop import train
    from recspec.training.settings import TrainSettings

    kind = case.kind()
    card = bundle.read_card(case.base / "runs" / kind / "bundle")
    run = case.taken(case.base / "runs" / kind, only="step-*")
    train(
        card.model,
        FeatureSpec.load(case.base / "data" / kind),
        run,
        settings=build(TrainSettings, "fuzz", card.train, {"epochs": 2}),
        model_settings=build(MODELS[card.model].Settings, "fuzz", card.settings),
        resume=True,
    )


def open_bundle(case: Case) -> None:
    import pyarrow as pa

    from recspec.base.files import manifest
    from recspec.inference.predictor import Predictor

    kind = case.kind()
    folder = case.taken(case.base / "runs" / kind / "bundle")
    verify = case.dice.random() < 0.5
    if verify and case.dice.random() < 0.7:
        with suppress(Exception):
            manifest.write(folder)
    predictor = Predictor.open(folder, device="cpu", verify=verify)
    if predictor.encoders is not None:
        names = {name: pa.array(["1", "zz", None]) for name in ("user_id", "item_id")}
        with suppress(KeyError):
            predictor.predict(pa.table(names))
    if kind == "interactions":
        predictor.recommend(["1", "nobody"], k=3)


def predict_rows(case: Case) -> None:
    from recspec.inference import Predictor, predict_file

    predictor = Predictor.open(case.base / "runs" / "interactions", device="cpu")
    rows = case.taken(case.base / "raw" / case.dice.choice(("rows.csv", "rows.parquet", "rows.jsonl")))
    predict_file(predictor, rows, case.folder / f"out{case.dice.choice(('.csv', '.parquet', '.jsonl'))}")


def predict_prepared(case: Case) -> None:
    from recspec.feature_spec import FeatureSpec
    from recspec.inference import Predictor, predict_split

    kind = case.kind()
    predictor = Predictor.open(case.base / "runs" / kind, device="cpu")
    spec = FeatureSpec.load(case.taken(case.base / "data" / kind))
    predict_split(predictor, spec, "test", case.folder / "out.csv")


def prepare_table(case: Case) -> None:
    from recspec.base.config import build
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS

    table = DATASETS["table"]
    raw = case.taken(case.base / "raw" / case.dice.choice(("rows.csv", "rows.parquet")))
    settings = build(table.Settings, "fuzz", {"user": "user", "item": "item"})
    table.prepare(PrepareContext(raw, case.folder / "out", memory_limit="1GB"), settings)


def prepare_archive(case: Case) -> None:
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS

    movielens = DATASETS["movielens"]
    raw = case.taken(case.base / "raw" / "ml.zip")
    movielens.prepare(PrepareContext(raw, case.folder / "out", memory_limit="1GB"), movielens.Settings())


def prepare_again(case: Case) -> None:
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS

    synthetic = DATASETS["synthetic"]
    out = case.taken(case.base / "data" / "clicks", only="prepare.json")
    settings = synthetic.Settings.model_validate({"kind": "clicks", "num_users": 20, "num_items": 15, "num_rows": 200})
    synthetic.prepare(PrepareContext(Path(), out, force=case.dice.random() < 0.3), settings)


def read_recipe(case: Case) -> None:
    from recspec.base.config import build, load_recipe
    from recspec.models import MODELS
    from recspec.training.settings import TrainSettings

    recipe = load_recipe(case.taken(case.base / "raw" / "recipe.yaml"))
    build(TrainSettings, "recipe", recipe.train)
    if recipe.model in MODELS:
        build(MODELS[recipe.model].Settings, "recipe", recipe.settings)


def read_export(case: Case) -> None:
    from recspec.export.exported_model import open_exported_model

    folder = case.folder / "export"
    folder.mkdir()
    port = {"name": "a", "dtype": "int32", "width": 1, "level": "row", "num_ids": 3, "is_list": False}
    description = {"signature": {"form": "rows", "inputs": [port]}, "difference": {"allowed_largest": 1e-3}}
    (folder / "export.json").write_text(json.dumps(description))
    (folder / "model.onnx").write_bytes(case.dice.randbytes(100))
    change_file(folder / "export.json", case.dice, case.base / "canary" / "secret", inside=True)
    open_exported_model(folder, verify=False)


TARGETS: dict[str, Callable[[Case], None]] = {
    "dataset": open_dataset,
    "train": start_training,
    "resume": resume_training,
    "bundle": open_bundle,
    "rows": predict_rows,
    "split": predict_prepared,
    "table": prepare_table,
    "archive": prepare_archive,
    "again": prepare_again,
    "recipe": read_recipe,
    "export": read_export,
}


# --- the child -------------------------------------------------------------------------------------------------------


class Watch:
    """Notes paths that Python code opens, makes, renames or removes outside a folder."""

    def __init__(self, base: Path) -> None:
        self.inside = ""
        self.touched: list[str] = []
        read_only = (
            base,
            sys.prefix,
            sys.base_prefix,
            Path(__file__).parents[2],
            "/usr",
            "/etc",
            "/proc",
            "/sys",
            "/lib",
            importlib.import_module("recspec").__path__[0],
        )
        self.readable = tuple(os.path.realpath(each) for each in read_only)
        self.canary = os.path.realpath(base / "canary")
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.inside or event not in (
            "open",
            "os.rename",
            "os.remove",
            "os.mkdir",
            "os.rmdir",
            "os.symlink",
            "os.truncate",
        ):
            return
        writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        paths = arguments[:2] if event == "os.rename" else arguments[1:2] if event == "os.symlink" else arguments[:1]
        folder = arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
        for path in paths:
            if not isinstance(path, (str, bytes, os.PathLike)):
                continue
            with suppress(ValueError, OSError):
                below = Path(f"/proc/self/fd/{folder}" if isinstance(folder, int) and folder >= 0 else "")
                named = below / os.fsdecode(path)
                # What is removed or renamed is the name itself, whatever it links to.
                place = os.path.realpath(named if event == "open" else named.parent)
                place = place if event == "open" else f"{place}/{named.name}"
                if place.startswith(self.inside) or place in ("/dev/null", "/dev/urandom"):
                    continue
                if writes or place.startswith(self.canary) or not place.startswith(self.readable):
                    self.touched.append(f"{event} {place}")


def child(base: Path, seed: int, start: int, only: list[str]) -> None:
    """Cases from `start` on, a line of JSON before and after each, until the parent ends it."""
    import torch

    from recspec.base.errors import RecspecError, of_the_machine

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for module in (
        "recspec.training.loop",
        "recspec.inference",
        "recspec.data.storage",
        "recspec.report.dataset_summary",
        "recspec.datasets",
    ):
        importlib.import_module(module)
    watch, number = Watch(base), start
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while True:
        folder = base / "cases" / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tempfile.tempdir = str(folder)
        case = Case(base, folder, seed, number, only)
        print(json.dumps({"begins": number, "target": case.target}), file=answers, flush=True)
        watch.touched, watch.inside = [], os.path.realpath(folder)
        outcome, told = "opened", ""
        try:
            case.run()
        except RecspecError as error:
            outcome, told = "told", str(error)
        except MemoryError:
            outcome, told = "crashed", traceback.format_exc()
        except Exception as error:
            if of_the_machine(error) is not None and isinstance(error, OSError):
                outcome, told = "told", str(error)
            else:
                outcome, told = "crashed", traceback.format_exc()
        finally:
            watch.inside = ""
        beside = [each.name for each in (base / "cases").iterdir() if each.name != str(number)]
        touched = [*watch.touched, *(f"beside {name}" for name in beside)]
        if outcome == "told" and not told.strip():
            outcome, told = "crashed", "an error without a message"
        shutil.rmtree(folder, ignore_errors=True)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        answer = {
            "case": number,
            "target": case.target,
            "outcome": outcome,
            "told": told[-3000:],
            "changed": case.changed,
            "touched": touched,
            "bytes": pages * resource.getpagesize(),
        }
        print(json.dumps(answer), file=answers, flush=True)
        number += 1


# --- the parent ------------------------------------------------------------------------------------------------------


class Findings:
    """What came of all cases."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.targets: Counter[str] = Counter()
        self.crashes: dict[str, dict[str, Any]] = {}
        self.hangs: list[dict[str, Any]] = []
        self.touched: list[dict[str, Any]] = []
        self.grown = 0
        self._memory: list[int] = []

    def add(self, answer: dict[str, Any]) -> None:
        """Count a case that ended."""
        self.outcomes[answer["outcome"]] += 1
        self.targets[answer["target"]] += 1
        self._memory.append(answer["bytes"])
        if answer["outcome"] == "crashed":
            key = "\n".join(answer["told"].strip().splitlines()[-4:])
            self.crashes.setdefault(key, {**answer, "times": 0})["times"] += 1
        if answer["touched"]:
            self.touched.append(answer)

    def end_child(self) -> None:
        """A child ended: how much it had grown since its first hundred cases."""
        if len(self._memory) > 400:
            quarter = len(self._memory) // 4
            last = sorted(self._memory[-quarter:])[quarter // 2]
            self.grown = max(self.grown, last - max(self._memory[:200]))
        self._memory = []

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cases": self.outcomes.total(),
            "outcomes": dict(self.outcomes),
            "targets": dict(sorted(self.targets.items())),
            "crashes": list(self.crashes.values()),
            "hangs": self.hangs,
            "touched_outside": self.touched,
            "memory_grew_by_bytes": max(0, self.grown),
        }

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not (self.crashes or self.hangs or self.touched) and self.grown <= GROWTH


def fuzz(base: Path, minutes: float, seed: int, seconds: float, only: list[str]) -> Findings:
    """Cases until the time is over, a child after another where one dies or hangs."""
    found, number, end = Findings(), 0, time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        command = [sys.executable, __file__, "--child", str(base), "--seed", str(seed), "--start", str(number)]
        errors = base / "stderr"
        with errors.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--only", *only] if only else command, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        assert process.stdout is not None
        begun: dict[str, Any] = {}
        buffered = b""
        limit = 120.0  # until the first case: libraries are loaded
        while time.monotonic() < end:
            ready, _, _ = select.select([process.stdout], [], [], limit)
            data = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
            if not data:
                what = f"no answer in {limit:.0f} s" if not ready else f"the process died with {process.wait()}"
                last = errors.read_text(errors="replace")[-2000:]
                found.hangs.append({**begun, "told": what, "stderr": last})
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "begins" in answer:
                    begun, number, limit = answer, answer["begins"] + 1, seconds
                else:
                    found.add(answer)
        process.kill()
        process.wait()
        process.stdout.close()
        found.end_child()
    return found


def main() -> int:
    """Run from the command line; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="most that a case may take")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(TARGETS), help="what to open")
    parser.add_argument("--case", type=int, help="run this case alone, in this process")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        child(asked.child, asked.seed, asked.start, asked.only)
    with tempfile.TemporaryDirectory(prefix="recspec-fuzz-") as name:
        base = Path(name)
        make_seeds(base)
        if asked.case is not None:
            folder = base / "cases" / str(asked.case)
            folder.mkdir(parents=True)
            case = Case(base, folder, asked.seed, asked.case, asked.only)
            print(case.target)
            try:
                case.run()
            finally:
                print(*case.changed, sep="\n")
            return 0
        found = fuzz(base, asked.minutes, asked.seed, asked.seconds, asked.only)
    print(json.dumps({"minutes": asked.minutes, "seed": asked.seed, **found.report()}, indent=1))
    return 0 if found.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
