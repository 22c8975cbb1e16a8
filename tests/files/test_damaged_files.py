"""Files whose damage makes a library raise what it does not document: one message that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import CheckpointError, DataError
from recspec.base.files.paths import PathError, parse_json, read_json
from recspec.bundle.checkpoint import read_tensors, write_tensors
from recspec.data.prepare import PrepareContext
from recspec.data.storage.check import check
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec

Change = Callable[[dict[str, object]], object]

ROWS = {"user": ["anna", "bert", "anna"], "item": ["kilo", "kilo", "lima"], "note": ["mike", "nero", "otto"]}


def prepare(raw: Path, tmp_path: Path) -> None:
    table = DATASETS["table"]
    settings = table.Settings(user="user", item="item", timestamp=None)
    table.prepare(PrepareContext(raw, tmp_path / "out"), settings)


def other_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("old", "told"),
    [(b"note", "rows.parquet: not a Parquet file: 'utf-8'"), (b"kilo", "rows.parquet: damaged: Invalid Input Error")],
)
def test_parquet_with_text_that_is_no_utf8(old: bytes, told: str, tmp_path: Path) -> None:
    raw = tmp_path / "rows.parquet"
    pq.write_table(pa.table(ROWS), raw, compression="none", use_dictionary=False, write_statistics=False)
    other_bytes(raw, old, b"\xff" + old[1:])
    with pytest.raises(DataError, match=told):
        prepare(raw, tmp_path)


def test_a_column_of_parquet_without_a_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({**ROWS, "": [1, 2, 3]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: column 4 has an empty name; name it"):
        prepare(tmp_path / "rows.parquet", tmp_path)


def test_a_column_of_csv_without_a_name_is_called_by_its_place(tmp_path: Path) -> None:
    """pandas writes its index so."""
    (tmp_path / "rows.csv").write_text(",user,item\n" + "".join(f"{n},u{n % 4},i{n % 7}\n" for n in range(40)))
    table = DATASETS["table"]
    settings = table.Settings(user="user", item="item", timestamp=None, context_features=("column_1",), num_negatives=1)
    spec = table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "out"), settings).spec
    assert {"user_id", "item_id", "column_1"} <= set(spec.features)


def test_a_catalogue_whose_column_has_no_name_in_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,item\n" + "".join(f"u{n % 4},i{n % 7}\n" for n in range(40)))
    prepare(tmp_path / "rows.csv", tmp_path)
    other_bytes(tmp_path / "out" / "items.parquet", b"item_id", b"\xfftem_id")
    with pytest.raises(DataError, match=r"items\.parquet"):
        check(FeatureSpec.load(tmp_path / "out"))


def mutated(content: bytes, seed: int) -> bytes:
    """With a few bytes exchanged."""
    dice = np.random.default_rng(seed)
    changed = bytearray(content)
    for place in dice.integers(0, len(content), 4):
        changed[place] = dice.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tensor_of_any_bytes_is_read_or_named(legacy: bool, tmp_path: Path) -> None:
    torch.save(torch.arange(6).reshape(3, 2), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    content = (tmp_path / "a.pt").read_bytes()
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"u": {"cardinality": 9}, "i": {"cardinality": 9}, "label": {}},
            "source_spec": {
                "train": [
                    {"type": "torch_tensor", "features": ["u", "i"], "files": ["a.pt"]},
                    {"type": "csv", "features": ["label"], "files": ["b.csv"]},
                ]
            },
            "channel_spec": {"user": ["u"], "item": ["i"], "label": ["label"]},
        },
        tmp_path,
    )
    (tmp_path / "b.csv").write_text("1\n0\n1\n")
    check(spec)
    said = []
    for seed in range(30):
        (tmp_path / "a.pt").write_bytes(mutated(content, seed))
        try:
            check(spec)
        except DataError as error:
            said.append(str(error))
    assert len(said) > 3
    assert all("a.pt" in text for text in said)


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"a": ["\\uDFff"]}', '{"\\ud83d": 1}', "[" * 100_000, "{", "nul"], ids=lambda text: text[:12]
)
def test_json_that_no_file_can_hold_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(PathError, match=r"a\.json: damaged: "):
        read_json(tmp_path / "a.json")


def test_json_with_whole_pairs_is_read() -> None:
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "\U0001f600 \\ud800"


@pytest.mark.parametrize("change", [lambda header: header.update(more="\ud800"), lambda header: header.pop("digest")])
def test_a_header_of_tensors_that_no_file_can_hold(
    change: Callable[[dict[str, object]], object], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.zeros(2)}, {"format": 1})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    header = json.loads(entries["__metadata__"]["recspec"])
    change(header)
    entries["__metadata__"]["recspec"] = json.dumps(header)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: not written by recspec, or damaged"):
        read_tensors(path)
