"""Declared types of columns: as plain values, as a file, and the schema of that file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from recspec.base.errors import SettingsError
from recspec.data.prepare import DeclaredColumn, columns_schema, declared_columns, load_columns

WHOLE = """\
# types of my shop
customer: text
amount: {type: integer, missing: ["-1", 007], invalid: drop}
price:
  type: number
  missing: [NULL, no, n/a]
bought: {type: time, format: "%d.%m.%Y %H:%M", zone: Europe/Berlin}
tags: {type: list, separator: ;}
image: {type: vector, length: 64}
yes: string
2: float64
"""


def written(folder: Path, text: str) -> Path:
    (folder / "columns.yaml").write_text(text, encoding="utf-8")
    return folder / "columns.yaml"


def test_a_file_of_types_is_read_letter_for_letter(tmp_path: Path) -> None:
    found = load_columns(written(tmp_path, WHOLE))
    assert {name: each.type for name, each in found.items()} == {
        "customer": "text",
        "amount": "integer",
        "price": "number",
        "bought": "time",
        "tags": "list",
        "image": "vector",
        "yes": "text",
        "2": "number",
    }
    assert found["amount"].missing == ("-1", "007")
    assert found["price"].missing == ("NULL", "no", "n/a")
    assert (found["tags"].separator, found["image"].length, found["bought"].zone) == (";", 64, "Europe/Berlin")


def test_what_is_declared_is_written_shortly_and_read_back(tmp_path: Path) -> None:
    found = load_columns(written(tmp_path, WHOLE))
    plain = TypeAdapter(dict[str, DeclaredColumn]).dump_python(found, mode="json")
    assert plain["customer"] == "text"
    assert plain["tags"] == {"type": "list", "separator": ";"}
    assert declared_columns(plain) == found
    assert load_columns(written(tmp_path, yaml.safe_dump(plain))) == found


def test_all_problems_of_a_file_are_named_with_their_lines(tmp_path: Path) -> None:
    text = (
        "price: nmber\ntags:\n  type: list\n  seperator: ';'\ntags: text\nat: {type: time, zone: Europe/Berln}\n"
        "x: [1]\n? [a]\n: 3\nn: {type: number, type: text}\nv: {type: vector, length: 0}\nt: {type: text, zone: UTC}\n"
        "l: {type: list, invalid: drop}\nm: {missing: []}\n"
    )
    with pytest.raises(SettingsError) as error:
        load_columns(written(tmp_path, text))
    assert [*error.value.problems] == [
        (
            "line 1: column 'price': type is 'nmber' (did you mean 'number'?); expected text, integer, number, time, "
            "list, vector"
        ),
        (
            "line 4: column 'tags': unknown key 'seperator' (did you mean 'separator'?); known: 'type', 'missing', "
            "'invalid', 'format', 'zone', 'separator', 'length'"
        ),
        "line 5: column 'tags' stands twice, first in line 2; remove one",
        (
            "line 6: column 'at': zone 'Europe/Berln' is not known on this machine (did you mean 'Europe/Berlin'?); "
            "expected such as Europe/Berlin, UTC or +02:00"
        ),
        (
            "line 7: column 'x' holds a list or table; expected a type (text, integer, number, time, list, vector), or "
            "{type: ..., ...}"
        ),
        "line 8: the name of a column must be text",
        "line 10: column 'n': type stands twice, first in line 10; remove one",
        "line 11: column 'v': length is '0'; expected a whole number from 1 on",
        "line 12: column 't': zone is for type time, not for text; leave it out",
        "line 13: column 'l': any value is a list, so none is invalid; leave invalid out",
        "line 14: column 'm': has no type; add one: text, integer, number, time, list, vector",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; expected a line such as `price: number`"),
        ("- a\n", "holds no columns"),
        ("a: &x {type: text}\nb: *x\n", "line 2: write out what *x stands for"),
        ("a: [\n", "not valid YAML"),
        ("a: " + "[" * 5000, "line 1: nested too deeply"),
    ],
)
def test_a_file_that_holds_no_types_says_what_is_expected(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load_columns(written(tmp_path, text))
    assert "columns.yaml: " in str(error.value)
    assert said in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))))
def test_any_bytes_are_types_or_one_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "columns.yaml"
    path.write_bytes(data)
    try:
        load_columns(path)
    except SettingsError as error:
        assert "columns.yaml" in str(error) or "types" in str(error)  # noqa: PT017


def test_the_schema_accepts_what_the_file_may_hold_and_nothing_else() -> None:
    schema, jsonschema = columns_schema(), pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = yaml.safe_load(
        WHOLE.replace("yes:", "'yes':").replace("2: float64", "'2': float64").replace("NULL, no", "'NULL', 'no'")
    )
    assert not [*validator.iter_errors(good)]
    for bad in ({"a": "nmber"}, {"a": {"type": "number", "zoen": "UTC"}}, {"a": {}}, {"a": 3}):
        assert [*validator.iter_errors(bad)], bad
