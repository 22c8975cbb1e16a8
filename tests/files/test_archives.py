"""Packed and damaged raw files: each is one error that names the file, and fills neither memory nor disk."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, RecspecError
from recspec.base.files import archives
from recspec.base.files.archives import extract, lines, open_zip, opened
from tests.dataset_cases import CASES, Case, run

ADULT = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, United-States, <=50K\n"  # noqa: E501


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": _zstd}


def zip_of(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.name)
    return path


def damaged(data: bytes, seed: int) -> bytes:
    """The bytes cut short, changed, or with some more: near the beginning, the end, or anywhere."""
    rng = random.Random(seed)
    places = (rng.randrange(min(60, len(data))), len(data) - 1 - rng.randrange(60), rng.randrange(len(data)))
    at = rng.choice(places)
    kinds = (data[:at], data[:at] + rng.randbytes(5) + data[at + 5 :], data[:at] + rng.randbytes(9) + data[at:])
    return rng.choice(kinds)


def test_a_damaged_zip_is_one_error_that_names_it(tmp_path: Path) -> None:
    """Any error but a DataError would fail this, as an error of zipfile's that nobody thought of."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").write_bytes(random.Random(1).randbytes(500) + bytes(3000))
    (tmp_path / "a" / "y.csv").write_bytes(b"one,two\n" * 100)
    whole = zip_of(tmp_path / "a", tmp_path / "whole.zip").read_bytes()
    refused = 0
    for seed in range(120):
        path = tmp_path / "a.zip"
        path.write_bytes(damaged(whole, seed))
        try:
            with open_zip(path) as archive:
                for name in ("x.csv", "y.csv"):
                    extract(archive, name, tmp_path / "unpacked", None)
        except DataError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017
    assert refused > 60


def test_the_machines_errors_are_not_said_of_a_zip(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").write_text("one")
    path = zip_of(tmp_path / "a", tmp_path / "a.zip")
    with pytest.raises(IsADirectoryError), open_zip(path) as archive:
        extract(archive, "x.csv", tmp_path, None)


def raw_files(folder: Path) -> Iterator[tuple[str, Case, Path]]:
    """Raw files of every kind that is packed or binary, each with the case that reads it."""
    for name in ("movielens-latest", "movielens-100k", "adult"):
        raw = CASES[name].write(folder / name)
        yield f"{name}.zip", CASES[name], zip_of(raw if raw.is_dir() else raw.parent, folder / f"{name}.zip")
    case = CASES["table-clicks"]
    text = case.write(folder / "table")
    table = pa_csv.read_csv(text)
    objects = "".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist())
    (folder / "a.csv.gz").write_bytes(gzip.compress(text.read_bytes()))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(objects.encode()))
    pq.write_table(table, folder / "a.parquet", compression="none", row_group_size=50)
    for name in ("a.csv.gz", "a.jsonl.gz", "a.parquet"):
        yield name, case, folder / name


def test_damaged_raw_files_are_read_or_refused_by_name(tmp_path: Path) -> None:
    for name, case, path in raw_files(tmp_path / "raw"):
        whole = path.read_bytes()
        for seed in range(2):
            path.write_bytes(damaged(whole, seed))
            try:
                run(case, path, tmp_path / "out", force=True)
            except RecspecError as error:
                assert path.name in str(error) or str(path.parent) in str(error), name  # noqa: PT017


def test_a_parquet_file_whose_rows_are_damaged_is_named(tmp_path: Path) -> None:
    *_, (_, case, path) = raw_files(tmp_path / "raw")
    data = bytearray(path.read_bytes())
    data[4:3000] = bytes(2996)  # the footer is whole, so that only reading the rows finds it
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"a\.parquet: damaged, or not a Parquet file"):
        run(case, path, tmp_path / "out")


# --- what unpacks to too much ----------------------------------------------------------------------------------------


@pytest.fixture
def low_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LEAST_CAP", 1000)
    monkeypatch.setattr(archives, "MOST_TIMES", 0)


@pytest.mark.parametrize("suffix", list(PACK))
def test_nothing_after_the_first_stream_of_a_compressed_file_is_lost_in_silence(suffix: str, tmp_path: Path) -> None:
    file, pack = tmp_path / f"a.csv{suffix}", PACK[suffix]
    first, second = pack(b"a\n" * 200), pack(b"b\n" * 200)
    file.write_bytes(first + second)
    assert [sum(line == each for _, line in lines(file)) for each in (b"a\n", b"b\n")] == [200, 200]
    for rest in (second[:-5], second[:3], b"\0\1" + second, b"some text"):
        file.write_bytes(first + rest)
        with pytest.raises(DataError, match=f"a.csv{suffix}: the compressed file .*; download it again"):
            list(lines(file))


@pytest.mark.parametrize("suffix", list(PACK))
def test_an_empty_compressed_file_holds_no_lines(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"")
    (tmp_path / f"b{suffix}").write_bytes(PACK[suffix](b""))
    assert not [*lines(tmp_path / f"a{suffix}"), *lines(tmp_path / f"b{suffix}")]


@pytest.mark.usefixtures("low_cap")
def test_a_gzipped_file_is_counted_while_it_is_read(tmp_path: Path) -> None:
    for size, fits in ((1000, True), (1001, False)):
        (tmp_path / "a.gz").write_bytes(gzip.compress(b"z" * size))
        if fits:
            with opened(tmp_path / "a.gz") as stream:
                assert len(stream.read()) == 1000
            continue
        with (
            pytest.raises(DataError, match=r"a\.gz: takes [0-9]+ bytes packed and more than 1,000 unpacked.*unpack it"),
            opened(tmp_path / "a.gz") as stream,
        ):
            stream.read()


@pytest.mark.usefixtures("low_cap")
@pytest.mark.parametrize(
    ("dataset", "packed"),
    [
        ("table-clicks", "*.csv"),
        ("table-clicks", "*.jsonl"),
        ("amazon", "reviews_*"),
        ("amazon", "meta_*"),
        ("criteo-days", "day_*"),
    ],
)
def test_a_gzipped_file_that_unpacks_to_too_much_is_refused(dataset: str, packed: str, tmp_path: Path) -> None:
    raw = CASES[dataset].write(tmp_path / "raw")
    folder = raw if raw.is_dir() else raw.parent
    if packed == "*.jsonl":
        objects = pa_csv.read_csv(raw).to_pylist()
        raw.unlink()
        raw.with_suffix(".jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in objects))
    for path in list(folder.glob(packed)):
        data = path.read_bytes()
        path.unlink()
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(data + b"\n" * 2000 * (packed == "meta_*")))
    with pytest.raises(DataError, match=r"\.gz: takes [0-9,]+ bytes packed and more than 1,000 unpacked"):
        run(CASES[dataset], folder, tmp_path / "out")


# --- lines -----------------------------------------------------------------------------------------------------------


def test_lines_are_bounded_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"zzzz\n\nzzz\n")
    assert list(lines(path, 5)) == [(1, b"zzzz\n"), (2, b"\n"), (3, b"zzz\n")]
    path.write_bytes(b"\n" + b"z" * 6)
    with pytest.raises(DataError, match=r"a\.txt: line 2: is longer than 5 bytes; expected line breaks between rows"):
        list(lines(path, 5))


@pytest.mark.parametrize(
    ("dataset", "file"),
    [("adult", "adult.data"), ("adult", "zip"), ("ncf", "test.negative"), ("criteo-days", "day_0")],
)
def test_a_line_without_an_end_is_refused_by_every_reader_of_lines(dataset: str, file: str, tmp_path: Path) -> None:
    raw = CASES[dataset].write(tmp_path / "raw")
    raw = raw if raw.is_dir() else raw.parent
    (path,) = (
        (each for each in raw.iterdir() if file == "zip" or each.name.startswith(file) or each.name.endswith(file))
        if file != "zip"
        else (raw / "adult.test",)
    )
    path.write_bytes(path.read_bytes() + b"7" * (3 << 20))
    given = zip_of(raw, tmp_path / "adult.zip") if file == "zip" else raw
    with pytest.raises(DataError, match="longer than 2,097,152"):
        run(CASES[dataset], given, tmp_path / "out")
