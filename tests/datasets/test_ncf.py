"""The NCF paper's files."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from tests.dataset_cases import CASES, raw_pairs, run, write_ncf


def test_the_papers_split_is_kept_and_the_last_of_train_is_valid(tmp_path: Path) -> None:
    result = run(CASES["ncf"], write_ncf(tmp_path / "raw"), tmp_path / "out")
    spec = result.spec
    assert raw_pairs(spec, "train") == [(0, 5), (0, 7), (1, 5)]
    assert raw_pairs(spec, "valid") == [(0, 6)]
    assert raw_pairs(spec, "test") == [(0, 8), (1, 6)]
    assert raw_pairs(spec, "test", label=0) == [(0, 9), (0, 8), (0, 9), (1, 7), (1, 8), (1, 9)]
    assert raw_pairs(spec, "valid", label=0) == [(0, 9), (0, 8), (0, 9)]  # items user 0 never met before test
    assert spec.metadata["test_samples_per_series"] == 4
    assert result.summary["repeats_dropped"] == 1
    assert result.summary["rows_with_positive_among_negatives"] == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("width", [2, 3])
def test_the_papers_files_may_lack_times_and_end_lines_either_way(width: int, end: str, tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    for path in raw.iterdir():
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        cut = lines if path.suffix == ".negative" else [line[:width] for line in lines]
        path.write_bytes("".join("\t".join(line) + end for line in cut).encode())
    result = run(CASES["ncf"], raw, tmp_path / "out", settings={"history": 3})
    assert raw_pairs(result.spec, "train") == [(0, 5), (0, 6), (1, 5)]
    assert raw_pairs(result.spec, "valid") == [(0, 7)]  # the last of the file
    assert raw_pairs(result.spec, "test") == [(0, 8), (1, 6)]
    assert "history_gap" not in result.spec.features
    told = "no times: x.train.rating and x.test.rating without a fourth column, so each user's rows are in the order of"
    assert result.summary["inferred"][0] == f"{told} the file"  # type: ignore[index]


def test_titles_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / "titles.csv").write_text("item_id,title\n8,Eight\n5,Five\n77,Nobody\n")
    run(CASES["ncf"], raw, tmp_path / "out", settings={"titles": "titles.csv"})
    items = pq.read_table(tmp_path / "out" / "items.parquet")
    assert items.column("title").to_pylist() == ["Five", None, None, "Eight", None]
    with pytest.raises(SettingsError, match=r"setting 'titles': .*title\.csv: no such file"):
        run(CASES["ncf"], raw, tmp_path / "b", settings={"titles": "title.csv"})
    (tmp_path / "names.csv").write_text("item_id,title\n8,Huit\n")
    run(CASES["ncf"], raw, tmp_path / "c", settings={"titles": str(tmp_path / "names.csv")})
    assert pq.read_table(tmp_path / "c" / "items.parquet").column("title").to_pylist()[3] == "Huit"
    (raw / "titles.csv").write_text("id,title\n8,Eight\n")
    with pytest.raises(DataError, match="header: no column 'item_id'; found 'id', 'title'"):
        run(CASES["ncf"], raw, tmp_path / "b", settings={"titles": "titles.csv"})


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.train.rating", "0\n", "x.train.rating: line 1: has 1 columns, expected 4 separated by '\\t'"),
        ("x.train.rating", "0\tx\t4\t1\n", "x.train.rating: line 1: column 'item_id' is 'x'; expected a whole number"),
        ("x.test.rating", "0\t8\t5\t50\n0\t6\t5\t2\n", "x.test.rating: line 2: user 0 stands in line 1 too"),
        ("x.test.negative", "(0,8)\t9\n", "x.test.negative: has 1 lines, but the test file has 2"),
        ("x.test.negative", "(0,8)\t9\n(1,7)\t9\n", "line 2: is of (1,7), but line 2 of the test file is of (1,6)"),
        ("x.test.negative", "(0,8)\t9\t8\n(1,6)\t9\n", "line 2: lists 1 negatives; expected 2, as in line 1"),
        ("x.test.negative", "0,8\t9\n(1,6)\t9\n", "line 1: begins with '0,8'; expected `(user,item)`"),
        ("x.test.negative", "(0,8)\t9\n(1,6)\tnine\n", "line 2: negative 'nine' is not an item's number"),
        ("x.test.negative", "", "line 1: lists no negative"),
    ],
)
def test_malformed_lines_of_the_papers_files_are_named(file: str, text: str, message: str, tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / file).write_text(text)
    with pytest.raises(DataError) as caught:
        run(CASES["ncf"], raw, tmp_path / "out")
    assert message in str(caught.value)


def test_missing_and_doubled_files_of_the_paper_are_said(tmp_path: Path) -> None:
    raw = write_ncf(tmp_path / "raw")
    (raw / "y.test.rating").write_text("")
    with pytest.raises(DataError) as caught:
        run(CASES["ncf"], raw, tmp_path / "out")
    assert caught.value.problems == ("y.test.negative is missing", "y.train.rating is missing")
    for suffix in ("train.rating", "test.negative"):
        (raw / f"y.{suffix}").write_text("")
    with pytest.raises(DataError, match="holds files of 'x', 'y'; put each into a folder of its own"):
        run(CASES["ncf"], raw, tmp_path / "out")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        DataError, match=r"holds none of the NCF paper's files; found none, expected PREFIX\.train\.rating"
    ):
        run(CASES["ncf"], tmp_path / "other", tmp_path / "out")
