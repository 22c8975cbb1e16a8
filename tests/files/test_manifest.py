"""A bundle whose files are not as they were written is refused, and one whose files contradict each other as well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from recspec import api
from recspec.base.errors import BundleError, RecspecError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors, write_tensors
from recspec.bundle.folder import Card, Seen
from recspec.evaluation import positives
from recspec.feature_spec import FILE_NAME
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from tests import made_up


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with encoders, vocabularies, catalogues and what users acted on."""
    data = made_up.interactions(tmp_path_factory.mktemp("manifest") / "data", num_rows=800)
    model = MODELS["neumf"](data, MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)}))
    known = positives(data, ["train"])
    seen = Seen.from_interactions(known, known)
    card = Card(model="neumf", settings=model.settings.model_dump(mode="json"))
    return bundle.save(data.folder.parent / "made", model, card, seen=seen)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_manifest_lists_every_other_file(made: Path) -> None:
    listed = json.loads((made / "manifest.json").read_text())
    assert listed["format"] == 1
    assert sorted(listed["files"]) == [name for name in files_of(made) if name != "manifest.json"]
    assert {"vocabularies/user_id.parquet", "items.parquet", "encoders.json", FILE_NAME} <= set(listed["files"])
    assert manifest.check(made) == manifest.write(made), "writing it again gives the same digest"


def test_one_bit_of_any_file_is_noticed_and_named(made: Path, copied: Path) -> None:
    for name in files_of(made):
        if name == "manifest.json":
            continue
        whole = (copied / name).read_bytes()
        (copied / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(BundleError, match=f"'{name}' was changed: its SHA-256 is not the one in manifest.json"):
            Predictor.open(copied)
        (copied / name).write_bytes(whole)
    Predictor.open(copied)


def test_what_is_missing_or_added_is_named_all_at_once(copied: Path) -> None:
    (copied / "items.parquet").unlink()
    (copied / "vocabularies" / "more.parquet").write_text("")
    (copied / "bundle.json").write_text("{}")
    (copied / ".hidden").write_text("left by a file manager, read by nobody")
    with pytest.raises(BundleError) as caught:
        bundle.load(copied)
    assert caught.value.problems == (
        "'bundle.json' was changed: its SHA-256 is not the one in manifest.json",
        "'items.parquet' is missing",
        "'vocabularies/more.parquet' is not in manifest.json",
    )
    assert "or pass --no-verify if you changed them" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "manifest.json: damaged"),
        ("[]", "damaged: expected {'format': 1"),
        ('{"format": 2, "files": {}}', "manifest format 2; this recspec reads 1"),
        ('{"format": 1, "files": {"a": 1}}', "damaged: expected {'format': 1"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "list", "format", "number", "deep"],
)
def test_a_manifest_that_is_none_is_refused(copied: Path, text: str, told: str) -> None:
    (copied / "manifest.json").write_text(text)
    with pytest.raises(BundleError) as caught:
        bundle.load(copied)
    assert told in str(caught.value)
    assert bundle.load(copied, verify=False).card.model == "neumf"


def test_a_bundle_without_its_manifest_opens_only_unchecked(copied: Path) -> None:
    (copied / "manifest.json").unlink()
    told = r"has no manifest\.json to check its files by; write it again, or pass --no-verify"
    with pytest.raises(BundleError, match=told):
        Predictor.open(copied)
    with pytest.raises(BundleError, match=told):
        api.verify(copied)
    assert bundle.load(copied, verify=False).card.model == "neumf"


# --- files that contradict each other, manifest or not ---------------------------------------------------------------


def seen_with(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Rewrites what users acted on, digest and all, as a forger would."""

    def rewrite(folder: Path) -> None:
        tensors = dict(read_tensors(folder / "seen.safetensors")[0])
        change(tensors)
        write_tensors(folder / "seen.safetensors", tensors, {"format": 1})

    return rewrite


def at(name: str, place: int, value: int) -> Callable[[Path], None]:
    return seen_with(lambda tensors: tensors[name].__setitem__(place, value))


def weights_with(value: float) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = dict(read_tensors(folder / "weights.safetensors")[0])
        tensors["out.bias"][0] = value
        write_tensors(folder / "weights.safetensors", tensors, {"format": 1})

    return rewrite


def fewer_rows(name: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        pq.write_table(pq.read_table(folder / name).slice(1), folder / name)

    return rewrite


def reversed_rows(name: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        table = pq.read_table(folder / name)
        pq.write_table(table.take(np.arange(len(table))[::-1]), folder / name)

    return rewrite


def twice(name: str, column: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        table = pq.read_table(folder / name)
        pq.write_table(table.append_column(column, table.column(column)), folder / name)

    return rewrite


def not_utf8(name: str, column: str) -> Callable[[Path], None]:
    """Bytes that are no UTF-8 in a column that says it holds texts."""

    def rewrite(folder: Path) -> None:
        table = pq.read_table(folder / name)
        texts = pa.array([b"\xff\xfe%d" % row for row in range(len(table))]).view(pa.string())
        held = {**dict(zip(table.column_names, table.columns, strict=True)), column: texts}
        pq.write_table(pa.table(held), folder / name)

    return rewrite


def encoders_with(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        data = json.loads((folder / "encoders.json").read_text())
        change(data)
        (folder / "encoders.json").write_text(json.dumps(data))

    return rewrite


def text_of(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def foreign_tensors(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "seen.safetensors")


def catalogue_with(column: str, values: object) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        spec = yaml.safe_load((folder / FILE_NAME).read_text())
        spec["feature_spec"][column] = {"dtype": "float32"} if column == "price" else {"cardinality": 5}
        spec["channel_spec"]["item"].append(column)
        (folder / FILE_NAME).write_text(yaml.safe_dump(spec))
        table = pq.read_table(folder / "items.parquet")
        filled = pa.array(np.resize(np.array(values), len(table)))
        pq.write_table(table.append_column(column, filled), folder / "items.parquet")

    return rewrite


def replaced(column: str, value: object, kind: pa.DataType) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        table = pq.read_table(folder / "items.parquet")
        place = table.column_names.index(column)
        pq.write_table(table.set_column(place, column, pa.array([value] * len(table), kind)), folder / "items.parquet")

    return rewrite


IDS = {
    "empty lists": ([], pa.list_(pa.int32())),
    "untyped nulls": (None, pa.null()),
    "numbers": (1.0, pa.float64()),
}

CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "negative offset": (at("offsets", 3, -5), "'offsets' does not rise from 0 to"),
    "falling offsets": (at("offsets", 3, 10**6), "'offsets' does not rise from 0 to"),
    "last offset": (at("offsets", -1, 7), "'offsets' does not rise from 0 to"),
    "item out of range": (at("items", 0, 10**6), "'items' holds ids from .* to 1000000; expected 0 to 60"),
    "negative count": (at("counts", 0, -1), "'counts' holds 61 numbers; expected 61, one for each item, 0 or more"),
    "too few counts": (seen_with(lambda t: t.update(counts=t["counts"][:-1].clone())), "'counts' holds 60 numbers"),
    "too few flags": (seen_with(lambda t: t.update(is_seen=t["is_seen"][:-1].clone())), "'is_seen' holds 559 numbers"),
    "floats": (seen_with(lambda t: t.update(items=t["items"].float())), "'items' is torch.float32"),
    "foreign file": (foreign_tensors, "seen.safetensors: not written by recspec, or damaged"),
    "NaN weight": (weights_with(float("nan")), "weight 'out.bias' holds 1 numbers that are not finite"),
    "weights of another type": (
        lambda folder: write_tensors(
            folder / "weights.safetensors",
            {name: each.half() for name, each in read_tensors(folder / "weights.safetensors")[0].items()},
            {"format": 1},
        ),
        "weight 'out.bias' is torch.float16; the model expects torch.float32",
    ),
    "short vocabulary": (
        fewer_rows("vocabularies/item_id.parquet"),
        "encoders.json: 'item_id' is encoded as 60 ids; its cardinality is 61",
    ),
    "short catalogue": (fewer_rows("items.parquet"), "items.parquet: has 59 rows; expected 60"),
    "encoder of numbers": (
        encoders_with(lambda data: data.update(item_id={"kind": "number"})),
        "'item_id' is encoded as a number; the specification has ids for it",
    ),
    "encoder of other ids": (
        encoders_with(lambda data: data.update(item_id={"kind": "hash", "cardinality": 1000})),
        "'item_id' is encoded as 1000 ids; its cardinality is 61",
    ),
    "encoder without a vocabulary": (
        encoders_with(lambda data: data["item_id"].update(vocabulary="gone")),
        "gone.parquet: can't be read as Parquet",
    ),
    "catalogue reversed": (
        reversed_rows("items.parquet"),
        "items.parquet: row 1 is of 'item_id' 60; expected 1, because rows are in the order of ids",
    ),
    **{
        f"catalogue whose ids are {what}": (
            replaced("item_id", *held),
            r"items.parquet: column 'item_id' holds [\w<>: ]+; expected its ids",
        )
        for what, held in IDS.items()
    },
    "catalogue with a column twice": (
        twice("items.parquet", "item_id"),
        "items.parquet: has more than one column 'item_id'; rename them",
    ),
    "vocabulary of bytes": (
        not_utf8("vocabularies/item_id.parquet", "value"),
        "item_id.parquet: not a vocabulary .*Invalid UTF8",
    ),
    "users reversed": (reversed_rows("users.parquet"), "users.parquet: row 1 is of 'user_id' 120; expected 1"),
    "catalogue's ids": (catalogue_with("kind", [7]), "column 'kind' holds ids 7 to 7; expected 0 to 4"),
    "catalogue's numbers": (catalogue_with("price", [1.5, np.inf]), "column 'price' holds numbers that are not finite"),
    "deep card": (text_of("bundle.json", "[" * 100_000), "bundle.json: damaged: .* are nested too deeply"),
    "card of bytes": (lambda folder: (folder / "bundle.json").write_bytes(b"\xff\xfe"), "can't be read as text"),
    "deep specification": (text_of(FILE_NAME, "a: " + "[" * 1500), "nested too deeply"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_content_that_contradicts_itself_is_refused_without_the_manifest_too(copied: Path, case: str) -> None:
    change, told = CONTRADICTIONS[case]
    change(copied)
    with pytest.raises(RecspecError, match=told):
        _opened(copied)


def _opened(folder: Path) -> object:
    predictor = Predictor.open(folder, device="cpu", verify=False)
    return predictor.items, predictor.users


def test_a_text_file_without_end_is_refused_by_its_size(copied: Path) -> None:
    with (copied / "bundle.json").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is taken
    with pytest.raises(BundleError, match="holds more than 67,108,864 bytes, the most that are read of such a file"):
        bundle.load(copied, verify=False)


def test_the_tensors_digest_still_stands_behind_the_manifest(copied: Path) -> None:
    tensors = load_file(copied / "weights.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, copied / "weights.safetensors")
    manifest.write(copied)
    with pytest.raises(BundleError, match="not written by recspec, or damaged"):
        bundle.load(copied)
