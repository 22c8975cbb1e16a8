"""What a user reads when something is wrong."""

from __future__ import annotations

import sys

import pytest

from recspec.base import errors
from recspec.base.errors import (
    DataError,
    MissingExtraError,
    RecspecError,
    SpecError,
    listed,
    missing_library,
    nearest,
    quoted,
    require_extra,
    unknown,
)


def test_one_problem_stands_on_one_line() -> None:
    error = SpecError.of("spec.yaml", ["no label"])
    assert str(error) == "spec.yaml: no label"
    assert error.problems == ("no label",)


def test_several_problems_are_listed_in_natural_order_each_once() -> None:
    error = DataError.of("data", ["line 10: b", "line 9: a", "line 10: b", "line 9: A", "no line"])
    assert str(error) == "data: 4 problems\n  - line 9: A\n  - line 9: a\n  - line 10: b\n  - no line"
    assert error.problems == ("line 9: A", "line 9: a", "line 10: b", "no line")


@pytest.mark.parametrize("text", ["2²3", "x²", "٣", "9" * 5000, "", "line 1: 2 > 10"])
def test_any_text_can_be_sorted(text: str) -> None:
    assert set(DataError.of("data", [text, "line 1"]).problems) == {text, "line 1"}


def test_a_plain_message_is_its_own_problem() -> None:
    assert DataError("something").problems == ("something",)


def test_every_error_is_in_one_tree_and_says_what_it_is_for() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) == 11
    for kind in found:
        assert issubclass(kind, RecspecError)
        assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("itme", " (did you mean 'item'?)"),
        ("ITEM", " (did you mean 'item'?)"),
        ("lable", " (did you mean 'Label'?)"),
        ("lr", " (did you mean 'learning_rate'?)"),
        ("zzz", ""),
        ("i" * 1000, ""),
        ("", ""),
        ("item", ""),  # the name itself is no hint
    ],
)
def test_the_nearest_name_is_told_where_one_is_near(name: str, hint: str) -> None:
    assert nearest(name, ["user", "item", "Label", "layers", "learning_rate"]) == hint


def test_a_hint_costs_no_seconds_whatever_the_names() -> None:
    assert nearest("item", ["x" * 10**6, "items"]) == " (did you mean 'items'?)"
    assert nearest("item", [f"item{number}" for number in range(10**5)]) == ""


def test_any_value_can_be_quoted() -> None:
    deep: list[object] = []
    for _ in range(2_000):
        deep = [deep]
    assert quoted(None) == "'None'"
    assert quoted("x" * 500) == f"'{'x' * 200}...'"
    assert quoted(deep) == "a list that is too deep or too long to show"
    assert quoted({"a": deep}) == "a dict that is too deep or too long to show"
    assert quoted(10**5_000) == "an int that is too deep or too long to show"


def test_nothing_is_near_where_nothing_is_known() -> None:
    assert nearest("item", []) == ""


def test_names_are_listed_as_they_stand_in_a_message() -> None:
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed([]) == "none"


def test_a_million_names_or_characters_fill_no_screen() -> None:
    assert listed(str(number) for number in range(10**6)).endswith(", '38', '39' and 999,960 more")
    assert listed(["x" * 10**6, "y"]) == f"'{'x' * 200}...', 'y'"
    assert len(listed("x" * 150 + str(number) for number in range(100))) < 2_400
    assert len(unknown("key", "k" * 10**6, (f"{number:0100}" for number in range(1000)))) < 4_000
    assert unknown("split", "tset", ["train", "test"]) == (
        "unknown split 'tset' (did you mean 'test'?); known: 'train', 'test'"
    )
    assert unknown("split", "x", []) == "unknown split 'x'; known: none"
    assert unknown("split", ["tset", "x"], ["train", "test"]) == (
        "unknown splits 'tset' (did you mean 'test'?), 'x'; known: 'train', 'test'"
    )


def test_a_library_that_is_not_there_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "implicit_of_nobody", None)
    with pytest.raises(MissingExtraError) as caught:
        require_extra("implicit_of_nobody.als", "baselines")
    assert str(caught.value) == (
        "this needs the library 'implicit_of_nobody', which is not installed: pip install 'recspec[baselines]'"
    )
    assert caught.value.__suppress_context__


def test_a_dependency_that_is_not_there_is_named_with_its_remedy() -> None:
    told = "this needs the library 'ibis', which is not installed: pip install recspec"
    assert missing_library(ModuleNotFoundError("No module named 'ibis.expr'", name="ibis.expr")) == told
    for ours in (ModuleNotFoundError("x", name="recspec.no_such"), ModuleNotFoundError("x"), ImportError("x")):
        assert missing_library(ours) is None


def test_a_library_that_is_there_is_given() -> None:
    assert require_extra("json.decoder", "baselines").__name__ == "json.decoder"


def test_a_library_that_lacks_a_part_of_its_own_is_not_blamed_on_the_extra(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken_library.py").write_text("import something_else_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_else_that_is_missing"):
        require_extra("broken_library", "baselines")
