"""Quotes that are letters are never taken for marks around values in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError
from tests.prepare.small_tables import read, written

HEAD = ["user_id", "item_id", "title"]


def table(titles: list[str], separator: str = "\t", place: int = 2) -> str:
    rows = [[f"u{row % 3}", f"i{row}"] for row in range(len(titles))]
    lines = [[*row[:place], title, *row[place:]] for row, title in zip(rows, titles, strict=True)]
    head = [name for name in HEAD if name != "title"]
    return "".join(separator.join(line) + "\n" for line in [[*head[:place], "title", *head[place:]], *lines])


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_that_a_quote_swallows_are_refused(separator: str, place: int, tmp_path: Path) -> None:
    titles = [f"song {row}" for row in range(40)]
    titles[10], titles[30] = '"Untitled', 'Blue Monday 12"'
    path = written(tmp_path / "a.tsv", table(titles, separator, place))
    with pytest.raises(DataError, match=r"line 12: the value of column 'title' .* so rows may be lost .*quote=null"):
        read(path, separator=separator)
    rows, _ = read(path, separator=separator, quote=None, quote_given=True)
    assert [row["title"] for row in rows] == titles
    swallowed, notes = read(path, separator=separator, quote_given=True)
    assert len(swallowed) == 20
    assert "'title': 1 value of a.tsv span lines, the first from line 12 on" in str(notes.inferred)


@pytest.mark.parametrize(
    ("title", "expected"),
    [('"Heroes" live', "goes on behind its closing quote"), ('"never closed', "a quote is never closed")],
)
def test_quotes_that_no_reading_explains_name_the_setting(title: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{expected}.*--set quote=null"):
        read(written(tmp_path / "a.tsv", table(["a", title, "b"])))


def test_a_value_with_and_without_quotes_is_not_made_one_in_silence(tmp_path: Path) -> None:
    titles = ["Heroes", '"Heroes"', "Low"] * 4
    with pytest.raises(DataError, match=r"'title' holds 'Heroes' with and without quotes, .*--set quote=null"):
        read(written(tmp_path / "a.tsv", table(titles)))
    _, notes = read(written(tmp_path / "a.csv", table(titles, ",")))
    assert "4 values in quotes though others have none, such as 'Heroes' also without" in str(notes.changed)
    assert read(tmp_path / "a.tsv", quote=None, quote_given=True)[0][1]["title"] == '"Heroes"'


def test_values_over_several_lines_are_read_and_told(tmp_path: Path) -> None:
    titles = ['"a, b\nc ""d""\n\ne"', '"f"', '"g"']
    rows, notes = read(written(tmp_path / "a.csv", table(titles, ",")))
    assert [row["title"] for row in rows] == ['a, b\nc "d"\n\ne', "f", "g"]
    assert "'title': 1 value of a.csv span lines" in str(notes.inferred)
    assert notes.changed == []


def test_another_mark_around_values_may_be_set(tmp_path: Path) -> None:
    rows, _ = read(written(tmp_path / "a.csv", table(["'a, b'", "'say \"c\"'"], ",")), quote="'", quote_given=True)
    assert [row["title"] for row in rows] == ["a, b", 'say "c"']


TITLE = st.text(st.sampled_from('ab", '), min_size=1, max_size=6).filter(lambda text: text.strip() == text)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TITLE, min_size=2, max_size=30))
def test_no_row_of_unquoted_tabs_is_lost_in_silence(
    tmp_path_factory: pytest.TempPathFactory, titles: list[str]
) -> None:
    path = written(tmp_path_factory.mktemp("quotes") / "a.tsv", table(titles))
    assert [row["title"] for row in read(path, quote=None, quote_given=True)[0]] == titles
    try:
        rows, notes = read(path)
    except DataError as error:
        assert "quote=null" in str(error)  # noqa: PT017
    else:
        assert len(rows) == len(titles)
        assert [row["title"] for row in rows] == titles or notes.changed
