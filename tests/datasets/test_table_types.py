"""Your own table with declared types: missing and invalid values, zones, lists, vectors, odd and compressed files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.base.config import build
from recspec.base.errors import DataError, RecspecError, SettingsError
from recspec.base.files import archives
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import open_split
from recspec.datasets import DATASETS
from tests.dataset_cases import bytes_of, prepare_table, prepare_text, raw_pairs

HEAD = "user_id,item_id,timestamp\n"
ROWS = HEAD + "".join(f"u{row % 3},i{row % 5},{1_700_000_000 + row}\n" for row in range(12))


def zstd(data: bytes) -> bytes:
    held = pa.BufferOutputStream()
    with pa.CompressedOutputStream(held, "zstd") as stream:
        stream.write(data)
    return bytes(held.getvalue().to_pybytes())


PACK: dict[str, Callable[[bytes], bytes]] = {".zst": zstd, ".bz2": bz2.compress, ".gz": gzip.compress}


def values(result: Prepared, name: str) -> list[float]:
    found: list[float] = []
    for split in result.spec.splits:
        found += np.asarray(open_split(result.spec, split, [name]).read(0, 10**6)[name]).tolist()
    return found


def noted(result: Prepared, kind: str) -> str:
    return "\n".join(result.summary.get(kind, []))


# --- values ----------------------------------------------------------------------------------------------------------

PRICES = ["1", "2", "x", "4", "n/a", "-1", "1e3", "7", "8"]
PRICED = "user_id,item_id,timestamp,price\n" + "".join(
    f"u,i{row},{1_700_000_000 + row},{price}\n" for row, price in enumerate(PRICES)
)


def test_an_invalid_value_is_refused_dropped_or_missing(tmp_path: Path) -> None:
    asked = {"types": {"price": "number"}, "context_features": ["price"], "num_negatives": 0}
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path, PRICED, out="a", **asked)
    told = "a.csv: column 'price': line 4 is 'x'; declared number; expected a number; invalid_values=drop leaves such "
    assert str(error.value).splitlines()[0].endswith(f"{told}rows out")
    dropped = prepare_text(tmp_path, out="b", **asked, invalid_values="drop")
    assert dropped.summary["interactions"] == 8
    assert "1 row of a.csv, by invalid values: column 'price': line 4 is 'x'" in noted(dropped, "dropped")
    assert "'price': 1 value taken as missing: 'n/a' (the first in line 6)" in noted(dropped, "changed")
    kept = prepare_text(tmp_path, out="c", **asked, invalid_values="missing")
    assert kept.summary["interactions"] == 9
    assert "1 value of a.csv taken as missing: column 'price': line 4 is 'x'" in noted(kept, "changed")
    own = {"price": {"type": "number", "missing": ["x", "-1"], "invalid": "drop"}}
    exact = prepare_text(tmp_path, out="d", **{**asked, "types": own})
    assert "line 6 is 'n/a'" in noted(exact, "dropped")  # only the texts of `missing` mean missing
    assert Encoders.load(tmp_path / "d").encoders["price"].missing_values == ("x", "-1")  # also in rows to predict
    assert Encoders.load(tmp_path / "d").encoders["item_id"].missing_values == ()


def test_rows_without_an_id_or_a_time_are_dropped_if_asked(tmp_path: Path) -> None:
    text = ROWS + ",i1,1700000100\nu1,,1700000101\nu1,i2,yesterday\nu1,i3,\n"
    with pytest.raises(DataError, match="invalid_values=drop"):
        prepare_text(tmp_path, text, out="a")
    result = prepare_text(tmp_path, out="b", invalid_values="drop")
    assert result.summary["interactions"] == 12
    told = noted(result, "dropped")
    assert "column 'user_id' has no value in 1 row, such as line 14" in told
    assert "line 16 is 'yesterday', line 17 is missing" in told
    with pytest.raises(DataError, match="no row is left"):
        prepare_table(
            tmp_path / "c.csv",
            tmp_path / "c",
            "user_id,item_id,n\nu,i,x\n",
            types={"n": "integer"},
            invalid_values="drop",
        )
    with pytest.raises(DataError, match=r"expected a time of ISO 8601|expected a number"):  # a time is never missing
        prepare_text(tmp_path, out="d", invalid_values="missing")


def test_times_are_read_in_their_zone_and_format(tmp_path: Path) -> None:
    text = "user_id,item_id,bought\n" + "".join(f"u,i{day},{day:02d}.07.2024 12:00\n" for day in range(1, 4))
    types = {"bought": {"type": "time", "format": "%d.%m.%Y %H:%M", "zone": "Europe/Berlin"}}
    result = prepare_text(tmp_path, text, out="a", types=types, num_negatives=0)
    assert (result.summary["first"], result.summary["last"]) == ("2024-07-01 10:00:00", "2024-07-03 10:00:00")
    assert "the time is column 'bought', because it is declared time" in noted(result, "inferred")
    mixed = text.replace("01.07.2024 12:00", "2024-07-01T12:00Z").replace(".07.2024", "").replace("02 ", "2024-07-02 ")
    mixed = mixed.replace("03 ", "2024-07-03 ")
    with pytest.raises(DataError, match="declare a zone for those without one"):
        prepare_table(tmp_path / "m.csv", tmp_path / "m", mixed, timestamp="bought")
    both = prepare_table(
        tmp_path / "m.csv", tmp_path / "n", types={"bought": {"type": "time", "zone": "+02:00"}}, num_negatives=0
    )
    assert (both.summary["first"], both.summary["last"]) == ("2024-07-01 12:00:00", "2024-07-03 10:00:00")
    twice = "user_id,item_id,at\nu,a,2024-10-27 02:30\nu,b,2024-10-27 04:00\nu,c,2024-10-27 05:00\n"
    result = prepare_table(
        tmp_path / "t.csv",
        tmp_path / "t",
        twice,
        num_negatives=0,
        types={"at": {"type": "time", "zone": "Europe/Berlin"}},
    )
    assert result.summary["first"] == "2024-10-27 00:30:00"
    assert "'at': 1 times are in an hour that the clocks of Europe/Berlin skip or show twice" in noted(
        result, "changed"
    )


def test_a_declaration_that_does_not_fit_its_column_is_refused(tmp_path: Path) -> None:
    for column, declared, said in (
        ("timestamp", "text", "is the timestamp, and is declared text; declare it time, integer or number"),
        ("timestamp", {"type": "time", "zone": "UTC"}, "holds numbers, which count from 1970 in UTC; leave"),
        ("user_id", "list", "column 'user_id' holds ids, and is declared list; declare it text or integer"),
        ("item_id", {"type": "vector", "length": 2}, "column 'item_id' holds ids, and is declared vector"),
        ("prcie", "number", "no column 'prcie'; found 'user_id', 'item_id', 'timestamp'"),
        ("usr_id", "text", "no column 'usr_id' (did you mean 'user_id'?)"),
    ):
        with pytest.raises(RecspecError) as error:
            prepare_text(tmp_path, ROWS, types={column: declared})
        assert said in str(error.value)
    with pytest.raises(DataError, match="models take no times as features"):
        prepare_table(
            tmp_path / "b.csv",
            tmp_path / "out",
            "user_id,item_id,made\nu,i,2024-01-01\n",
            types={"made": "time"},
            timestamp=None,
            item_features=["made"],
        )


def test_a_declared_time_splits_labelled_rows_by_time_whatever_its_values_look_like(tmp_path: Path) -> None:
    text = "user_id,item_id,seen,click\n" + "".join(f"u{n % 3},i{n % 4},{n if n else 'x'},{n % 2}\n" for n in range(30))
    result = prepare_text(
        tmp_path, text, out="a", invalid_values="drop", types={"seen": {"type": "time", "format": "seconds"}}
    )
    assert result.summary["split"] == "time"
    assert "don't look like times" not in noted(result, "inferred")
    assert "line 2 is 'x'" in noted(result, "dropped")


def test_a_file_of_items_has_types_too(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,price,made\ni0,abc,2024-13-01\ni1,2,2024-12-01\ni2,3,2024-12-02\n")
    asked = {"items": "items.csv", "item_features": ["price"], "types": {"price": "number", "made": "time"}}
    with pytest.raises(DataError) as error:
        prepare_text(tmp_path, ROWS, out="a", **asked)
    assert [each.split(";")[0] for each in error.value.problems] == [
        "column 'made': line 2 is '2024-13-01'",
        "column 'price': line 2 is 'abc'",
    ]
    prepare_text(tmp_path, out="b", **asked, invalid_values="missing")
    held = {row["item_id"]: row for row in pq.read_table(tmp_path / "b" / "items.parquet").to_pylist()}
    assert sorted(str(row["made"]) for row in held.values()) == ["2024-12-01", "2024-12-02", "None", "None", "None"]


@pytest.mark.parametrize("given", [7, [1, 2], None])
def test_types_are_names_and_types_or_a_file(given: object) -> None:
    with pytest.raises(SettingsError, match=r"'types' is .*: expected \{column: type\}, or the name of a file"):
        build(DATASETS["table"].Settings, "--set", {"types": given})


def test_lists_and_vectors_are_declared(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,tags,image\n" + "".join(
        f"u{row % 2},i{row % 3},{row},a;b c|d,{row % 3} 1;2\n" for row in range(8)
    )
    types = {
        "tags": {"type": "list", "separator": ";"},
        "image": {"type": "vector", "length": 3},
        "timestamp": "integer",
    }
    asked = {"types": types, "item_features": ["tags", "image"], "num_negatives": 0}
    prepare_text(tmp_path, text, out="a", **asked)
    encoders = Encoders.load(tmp_path / "a")
    assert encoders.vocabulary_of("tags").values.to_pylist() == ["a", "b c|d"]
    assert encoders.encoders["image"].length == 3
    with pytest.raises(DataError, match=r"line 9 is '1 1'; expected a vector of 3 numbers"):
        prepare_table(tmp_path / "b.csv", tmp_path / "b", text.replace("7,a;b c|d,1 1;2", "7,a;b c|d,1 1"), **asked)


def test_types_are_a_file_beside_the_raw_one_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "columns.yaml").write_text("price: {type: number, missing: [x, n/a, '-1']}\n")
    asked = {"context_features": ["price"], "num_negatives": 0}
    named = prepare_table(tmp_path / "raw" / "a.csv", tmp_path / "a", PRICED, types="columns.yaml", **asked)
    plain = prepare_table(
        tmp_path / "raw" / "a.csv",
        tmp_path / "b",
        **asked,
        types={"price": {"type": "number", "missing": ["x", "n/a", "-1"]}},
    )
    record = json.loads((tmp_path / "a" / "prepare.json").read_text())
    assert record["settings"]["types"] == {"price": {"type": "number", "missing": ["x", "n/a", "-1"]}}
    assert record["settings"] == json.loads((tmp_path / "b" / "prepare.json").read_text())["settings"]
    assert values(named, "price") == values(plain, "price")
    with pytest.raises(SettingsError, match=r"'types': colums\.yaml: no such file"):
        prepare_table(tmp_path / "raw" / "a.csv", tmp_path / "c", types="colums.yaml")


def test_types_are_the_same_from_csv_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = [
        {
            "user_id": f"{n % 3:03d}",
            "item_id": f"i{n % 4}",
            "at": f"2024-01-{n + 1:02d} 10:00",
            "price": n * 1.5,
            "zip": f"0{n}",
            "flag": n % 2 == 0,
        }
        for n in range(9)
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows({**row, "flag": "true" if row["flag"] else "false"} for row in rows)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    types = {"at": {"type": "time", "zone": "Asia/Kolkata"}, "price": "number", "zip": "text", "flag": "text"}
    for ending in ("csv", "jsonl", "parquet"):
        prepare_table(
            tmp_path / f"a.{ending}",
            tmp_path / ending,
            types=types,
            num_negatives=0,
            context_features=["price", "zip", "flag"],
        )
        assert Encoders.load(tmp_path / ending).vocabulary_of("flag").values.to_pylist() == ["false", "true"]
    assert bytes_of(tmp_path / "csv") == bytes_of(tmp_path / "jsonl") == bytes_of(tmp_path / "parquet")


# --- compressed files, encodings, other kinds of files ----------------------------------------------------------------


@pytest.mark.parametrize("ending", [*PACK])
def test_a_compressed_file_is_read_as_the_plain_one(ending: str, tmp_path: Path) -> None:
    plain = prepare_table(tmp_path / "plain.csv", tmp_path / "plain", ROWS, num_negatives=0)
    objects = "".join(
        json.dumps(dict(zip(HEAD.strip().split(","), line.split(","), strict=True))) + "\n"
        for line in ROWS.splitlines()[1:]
    )
    for name, text in (("a.csv", ROWS), ("a.jsonl", objects)):
        (tmp_path / f"{name}{ending}").write_bytes(PACK[ending](text.encode()))
        found = prepare_table(tmp_path / f"{name}{ending}", tmp_path / name, num_negatives=0)
        assert raw_pairs(found.spec, "test") == raw_pairs(plain.spec, "test")
    whole = (tmp_path / f"a.csv{ending}").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no such bytes" * 9):
        (tmp_path / f"b.csv{ending}").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"b\.csv{ending}: the compressed file (was cut short|is no)"):
            prepare_table(tmp_path / f"b.csv{ending}", tmp_path / "b")


@pytest.mark.parametrize("ending", [*PACK])
def test_a_file_that_unpacks_to_too_much_is_refused(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LEAST_CAP", 1000)
    monkeypatch.setattr(archives, "MOST_TIMES", 0)
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / f"{name}{ending}").write_bytes(PACK[ending]((HEAD + "u,i,1\n" * 5000).encode()))
        with pytest.raises(DataError, match="more than 1,000 unpacked"):
            prepare_table(tmp_path / f"{name}{ending}", tmp_path / "out")


def test_wrong_bytes_are_named_by_line_and_character(tmp_path: Path) -> None:
    for text, encoding, said in (
        (HEAD + "ü,é,1\n", None, r"line 2, character 1: is not utf-8 text: byte 0xfc"),
        (HEAD + "u,i,1\r\nab\x81,i,1\r\n", "cp1252", r"line 3, character 3: is not cp1252 text: byte 0x81"),
        ('{"user_id": "é"}\n', None, r"line 1, character 14: is not utf-8 text: byte 0xe9"),
    ):
        path = tmp_path / ("a.jsonl" if text.startswith("{") else "a.csv")
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=said):
            prepare_table(path, tmp_path / "out", **({"encoding": encoding} if encoding else {}))
    for path in (tmp_path / "a.jsonl", tmp_path / "a.csv"):
        text = '{"user_id": "é", "item_id": "ü"}\n' if path.suffix == ".jsonl" else "user_id,item_id\né,ü\n"
        path.write_bytes(text.encode("latin-1"))
        result = prepare_table(path, tmp_path / f"out{path.suffix}", encoding="latin-1", num_negatives=0)
        assert raw_pairs(result.spec, "train") == [("é", "ü")]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"PK\x03\x04", "a zip file, or a spreadsheet; unpack it"),
        (b"PAR1", "name it .parquet"),
        (zstd(b"a,b\n"), "name it .zst"),
        (bz2.compress(b"a"), "name it .bz2"),
        (gzip.compress(b"a", mtime=0), "name it .gz"),
        (b"SQLite format 3\0", "an SQLite database"),
    ],
    ids=["zip", "parquet", "zst", "bz2", "gz", "sqlite"],
)
def test_a_file_of_another_kind_is_told_by_its_first_bytes(start: bytes, said: str, tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(start + b"\n\n")
        with pytest.raises(DataError) as error:
            prepare_table(tmp_path / name, tmp_path / "out")
        assert said in str(error.value)


# --- hostile texts ----------------------------------------------------------------------------------------------------

letters = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
names = letters.filter(lambda name: name.strip() == name and not name.lower().startswith("__"))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(names, min_size=3, max_size=3, unique_by=str.casefold),
    st.lists(letters, min_size=6, max_size=6),
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    st.sampled_from(["", ".gz", ".zst", ".bz2"]),
)
def test_any_names_and_texts_are_kept_letter_for_letter(
    tmp_path_factory: pytest.TempPathFactory,
    head: list[str],
    texts: list[str],
    separator: str,
    end: str,
    encoding: str,
    ending: str,
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    held = io.StringIO(newline="")
    writer = csv.writer(held, delimiter=separator, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([head, *([text, f"{text}!", "1.5"] for text in texts)])
    path = folder / f"a.csv{ending}"
    path.write_bytes(PACK.get(ending, bytes)(held.getvalue().encode(encoding)))
    types = {head[0]: "text", head[1]: {"type": "text", "missing": []}, head[2]: {"type": "number", "missing": "?"}}
    result = prepare_table(
        path,
        folder / "out",
        user=head[0],
        item=head[1],
        timestamp=None,
        types=types,
        separator=separator,
        context_features=[head[2]],
        num_negatives=0,
        label=None,
    )
    encoders = Encoders.load(folder / "out")
    assert {*encoders.vocabulary_of("user_id").values.to_pylist()} == {*texts}
    assert {*encoders.vocabulary_of("item_id").values.to_pylist()} == {f"{text}!" for text in texts}
    assert result.summary["interactions"] == len(texts)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120), st.booleans(), st.sampled_from([".csv", ".jsonl", ".csv.zst", ".tsv.bz2"]))
def test_any_bytes_are_a_table_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, headed: bool, ending: str
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    path = folder / f"a{ending}"
    content = (HEAD.encode() if headed else b"") + data
    path.write_bytes(PACK[path.suffix](content) if path.suffix in PACK else content)
    try:
        prepare_table(path, folder / "out", types={"timestamp": "time"}, invalid_values="drop", num_negatives=0)
    except RecspecError as error:
        assert "a." in str(error) or "setting" in str(error)  # noqa: PT017


# --- files that settings name ----------------------------------------------------------------------------------------

FILES = {
    "users": ("users.csv", "user_id,age\nu,5\n"),
    "items": ("items.csv", "item_id,title\ni0,Hat\ni1,Cap\n"),
    "types": ("columns.yaml", "price: text\n"),
    "splits": ("train.csv", PRICED),
}


@pytest.mark.parametrize("setting", FILES)
def test_a_file_that_a_setting_names_lies_beside_the_raw_files_or_is_a_path(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, text = FILES[setting]
    for folder in ("raw", "other"):
        Path(folder).mkdir()
    Path("raw/a.csv").write_text(PRICED)
    for out, place, named in (
        ("a", "other", f"other/{name}"),
        ("b", "other", str(tmp_path / "other" / name)),
        ("c", "raw", name),
        ("d", "raw", f"raw/{name}"),
    ):
        (Path(place) / name).write_text(text)
        prepare_table(Path("raw/a.csv"), Path(out), **{setting: {"train": named} if setting == "splits" else named})
        record = json.loads((Path(out) / "prepare.json").read_text())
        if setting == "types":
            assert record["settings"]["types"] == {"price": "text"}
        else:
            assert name in {file["name"] for file in record["inputs"]}
    missing = f"no/{name[1:]}"
    with pytest.raises(SettingsError) as error:
        prepare_table(Path("raw/a.csv"), Path("e"), **{setting: {"train": missing} if setting == "splits" else missing})
    assert str(error.value) == (
        f"setting '{setting}': {missing}: no such file; looked for raw/{missing}, beside the raw files, and for "
        f"{tmp_path / missing}, from the working directory"
    )
    with pytest.raises(SettingsError, match=rf"no such file \(did you mean '{name}'\?\)"):
        prepare_table(
            Path("raw/a.csv"), Path("e"), **{setting: {"train": name[1:]} if setting == "splits" else name[1:]}
        )
    url = f"s3://bucket/{name}"
    with pytest.raises(DataError, match="is a URL, and only local paths are supported here"):
        prepare_table(Path("raw/a.csv"), Path("e"), **{setting: {"train": url} if setting == "splits" else url})


def test_a_file_beside_the_raw_files_comes_first_and_holds_no_rows_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    Path("raw/a.csv").write_text(PRICED)
    Path("raw/items.csv").write_text("item_id,title\ni0,Hat\n")
    Path("items.csv").write_text("item_id,title\ni0,Tie\n")
    for out, named in (("a", "items.csv"), ("b", "./items.csv"), ("c", str(tmp_path / "raw" / "items.csv"))):
        result = prepare_table(Path("raw"), Path(out), items=named, num_negatives=0)
        assert "Hat" in pq.read_table(result.spec.folder / "items.parquet").column("title").to_pylist()
        assert result.summary["raw_rows"] == PRICED.count("\n") - 1
