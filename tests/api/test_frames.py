"""Frames of every kind come in as the same table, and go out as the kind that came in."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recspec.api import frames
from recspec.base.errors import DataError, SettingsError

COLUMNS: dict[str, list[Any]] = {
    "user": ["007", "7", "é"],
    "item": [1, 2, 3],
    "price": [0.5, None, 2.0],
    "tags": [["a", "b"], [], ["c"]],
    "at": [datetime.datetime(2024, 1, day) for day in (1, 2, 3)],
}


class Stream:
    """An Arrow stream of a library that nobody knows."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def _polars(lazy: bool) -> Any:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(COLUMNS, schema_overrides={"user": polars.Categorical})
    return frame.lazy() if lazy else frame


MADE: dict[str, Callable[[], Any]] = {
    "dict": lambda: COLUMNS,
    "rows": lambda: pa.table(COLUMNS).to_pylist(),
    "pyarrow": lambda: pa.table(COLUMNS),
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "duckdb": lambda: duckdb.from_arrow(pa.table(COLUMNS)),
    "polars": lambda: _polars(False),
    "polars_lazy": lambda: _polars(True),
}


@pytest.mark.parametrize("kind", frames.KINDS)
def test_a_frame_of_every_kind_comes_in_and_goes_out(kind: frames.Kind) -> None:
    frame = MADE[kind]()
    assert frames.is_frame(frame)
    assert frames.kind_of(frame) == kind
    table = frames.to_table(frame)
    assert table.column_names == list(COLUMNS)
    assert table.to_pydict() == COLUMNS
    again = frames.from_table(table, kind)
    assert frames.kind_of(again) == kind
    assert frames.to_table(again).to_pydict() == COLUMNS


def test_an_unknown_library_comes_in_by_its_arrow_stream_and_gets_pyarrow() -> None:
    frame = Stream(pa.table(COLUMNS))
    assert frames.kind_of(frame) == "pyarrow"
    assert frames.to_table(frame).to_pydict() == COLUMNS
    assert frames.to_table(pa.RecordBatch.from_pydict({"a": [1]})).to_pydict() == {"a": [1]}


def test_categories_views_decimals_and_named_indexes_become_plain_columns() -> None:
    frame = pd.DataFrame({"kind": pd.Categorical(["x", "y", "x"]), "n": np.array([1, 2, 3], np.int8)})
    frame.index = pd.Index(["u", "v", "w"], name="user")
    assert frames.to_table(frame).to_pydict() == {"kind": ["x", "y", "x"], "n": [1, 2, 3], "user": ["u", "v", "w"]}
    unnamed = frame.set_axis(["u", "v", "w"])
    unnamed.index.name = None
    assert frames.to_table(unnamed).column_names == ["kind", "n"]
    views = pa.table(
        {
            "a": pa.array(["x"], pa.string_view()),
            "b": pa.array([Decimal("1.5")]),
            "c": pa.array([["x"]], pa.list_(pa.string_view())),
        }
    )
    large = {"a": np.array([1, 2**63], np.uint64), "b": np.array([1, 2], np.uint64)}
    assert frames.to_table(large).to_pydict() == {"a": ["1", "9223372036854775808"], "b": [1, 2]}
    kinds = frames.to_table(views).schema.types
    assert kinds == [pa.large_string(), pa.float64(), pa.large_list(pa.large_string())]


def test_lists_and_dictionaries_of_any_layout_keep_their_values_and_nulls() -> None:
    lists = [["x", "y"], None, [], ["y"]]
    words = pa.array(["x", "y", None, "x"], pa.string()).dictionary_encode()
    views = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 0], pa.uint32()), pa.array(["x", "y"], pa.string_view())
    )
    vectors = [[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]]
    table = pa.table(
        {
            "words": words,
            "views": views,
            "lists": pa.array(lists, pa.list_(pa.string())),
            "large": pa.array(lists, pa.large_list(pa.string_view())),
            "fixed": pa.array(vectors, pa.list_(pa.float32(), 2)),
            "list_views": pa.array(lists, pa.list_view(pa.string())),
        }
    )
    texts = ["x", "y", None, "x"]
    expected = {"words": texts, "views": texts, "lists": lists, "large": lists, "fixed": vectors, "list_views": lists}
    for shown, rows in ((table, slice(None)), (table.slice(1, 2), slice(1, 3)), (table.slice(0, 0), slice(0, 0))):
        assert frames.to_table(shown).to_pydict() == {name: values[rows] for name, values in expected.items()}


def test_columns_of_numpy_pandas_and_arrow_stand_in_one_dict() -> None:
    mixed = {"a": np.array([1, 2]), "b": pd.Series(["x", None]), "c": pa.array([0.5, 1.5]), "d": (True, False)}
    assert frames.to_table(mixed).to_pydict() == {"a": [1, 2], "b": ["x", None], "c": [0.5, 1.5], "d": [True, False]}


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (7, "found int"),
        ("rows.csv", "found str"),
        ([1, 2], "found list"),
        ({"a": [1, 2], "b": [1]}, "the data frame: can't be read"),
        ({"a": ["x", 1]}, "each column of one type"),
        ({"a": "abc"}, "expected a list of values"),
        (pd.Series([1]), "found Series of pandas"),
        (pa.table([[1], [2]], ["a", "a"]), "more than one column 'a'"),
    ],
)
def test_what_is_no_frame_is_refused_in_one_sentence(frame: object, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        frames.to_table(frame)
    assert len(str(caught.value)) < 700


def test_periods_of_pandas_are_refused_for_their_numbers_are_no_times() -> None:
    frame = pd.DataFrame({"day": pd.period_range("2024-01", periods=3, freq="D")})
    with pytest.raises(DataError, match=r"column 'day' holds periods of pandas \(D\); make them times with"):
        frames.to_table(frame)


def test_an_unknown_kind_gets_the_nearest_known_one() -> None:
    with pytest.raises(SettingsError, match=r"unknown kind of frame 'panda' \(did you mean 'pandas'\?\)"):
        frames.chosen_kind("panda")


def test_ids_come_as_one_a_list_an_array_or_a_column() -> None:
    assert frames.as_ids("u1", "users") == ("u1",)
    assert frames.as_ids(np.array([1, 2]), "users") == (1, 2)
    assert frames.as_ids(pd.Series(["a", "b"]), "users") == ("a", "b")
    assert frames.as_ids(pa.array(["a"]), "users") == ("a",)
    assert frames.as_ids(pd.DataFrame({"user": ["a"]}), "users") == ("a",)
    assert frames.as_ids(None, "users") == ()
    for wrong in (pd.DataFrame({"a": ["x"], "b": ["y"]}), [1.5], [None], True, b"ab", 1.5):
        with pytest.raises(DataError, match="users: "):
            frames.as_ids(wrong, "users")


class _Failing:
    """A frame whose rows can't be computed, as a query that fails only when it is asked."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("midway"), ZeroDivisionError(), KeyError("a", 1), OSError(5, "no")])
def test_a_frame_that_fails_inside_is_one_message(error: Exception) -> None:
    with pytest.raises(DataError, match=r"^the data frame: can't be read: "):
        frames.to_table(_Failing(error))


def test_a_stream_that_fails_midway_shows_no_traceback() -> None:
    table = pa.table({"user": [1]})

    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches()
        raise RuntimeError("connection lost")

    with pytest.raises(DataError, match="connection lost") as caught:
        frames.to_table(pa.RecordBatchReader.from_batches(table.schema, batches()))
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_that_is_no_unicode_is_told_in_a_message_that_can_be_printed() -> None:
    with pytest.raises(DataError, match="surrogates not allowed") as caught:
        frames.to_table({"user": ["\ud800"]})
    assert str(caught.value).encode("utf-8")


def test_names_that_are_no_texts_keep_their_values() -> None:
    assert frames.to_table([{1: "a", "x": "b"}, {1: "c"}]).to_pydict() == {"1": ["a", "c"], "x": ["b", None]}
    assert frames.to_table(pd.DataFrame({"x": ["b"], 1: ["a"]})).to_pydict() == {"x": ["b"], "1": ["a"]}


@pytest.mark.parametrize(
    "frame",
    [
        {1: [1], "1": [2]},
        [{1: 1, "1": 2}],
        pd.DataFrame({1: [1], "1": [2]}),
        pd.DataFrame([[1, 2]], columns=["1", "1"]),
        pa.table([[1], [2]], names=["1", "1"]),
    ],
)
def test_columns_of_one_name_are_refused_in_every_kind(frame: object) -> None:
    with pytest.raises(DataError, match=r"the data frame: has more than one column '?1'?; rename them"):
        frames.to_table(frame)
