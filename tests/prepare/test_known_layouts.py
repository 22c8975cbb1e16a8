"""Layouts that this field's data have: each is read, or refused by its name with what helps."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.data.prepare import Roles
from tests.dataset_cases import prepare_table, raw_pairs
from tests.prepare import small_tables
from tests.prepare.small_tables import read

IDS = ("user_id", "item_id")


def written(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    return small_tables.written(folder / name, text, encoding)


# --- text files ------------------------------------------------------------------------------------------------------

ATOMIC = "user_id:token\titem_id:token\ttags:token_seq\trating:float\ttimestamp:float\n"


def test_atomic_files_have_the_types_of_their_header(tmp_path: Path) -> None:
    text = ATOMIC + '007\t1\tThe "A\t4.5\t10\n7\t2\tB C\t3\t20\n'
    rows, notes = read(written(tmp_path, "a.inter", text), Roles(ids=IDS, features=("tags",), numbers={"rating"}))
    assert [row["user_id"] for row in rows] == ["007", "7"]
    assert [(row["tags"], row["rating"]) for row in rows] == [('The "A', 4.5), ("B C", 3.0)]
    assert "a.inter: read as RecBole's atomic file: columns have the types of the header" in str(notes.inferred)
    comma = written(tmp_path, "b.csv", ATOMIC.replace("\t", ",") + "1,2,x,high,5\n")
    with pytest.raises(DataError, match="'rating': line 2 is 'high'; declared number"):
        read(comma, Roles(ids=IDS, numbers={"rating"}))


def test_atomic_files_of_users_and_items_are_joined_by_their_plain_names(tmp_path: Path) -> None:
    written(tmp_path, "a.item", "item_id:token\tclass:token_seq\tyear:float\n1\tWar Drama\t1990\n2\tWar\t1995\n")
    text = ATOMIC + "".join(f"u{row % 3}\t{1 + row % 2}\tx\t5\t{row}\n" for row in range(12))
    result = prepare_table(
        tmp_path / "a.inter", tmp_path / "out", text, items="a.item", item_features=["class", "year"]
    )
    assert result.spec.features["class"].length == 2
    assert not result.spec.features["year"].is_categorical


BEHAVIORS = "1\tU1\t11/15/2019 10:22:32 AM\tN9 N8\tN1-0 N2-1\n2\tU2\t11/15/2019 1:00:00 PM\t\tN-3-1\n"


def test_an_impression_is_a_row_for_each_news(tmp_path: Path) -> None:
    rows, notes = read(written(tmp_path, "behaviors.tsv", BEHAVIORS))
    found = [(row["impression_id"], row["user_id"], row["item_id"], row["clicked"]) for row in rows]
    assert found == [("1", "U1", "N1", "0"), ("1", "U1", "N2", "1"), ("2", "U2", "N-3", "1")]
    assert "the column of the user's earlier clicks" in str(notes.dropped)
    with pytest.raises(DataError, match=r"line 3: is 'N7'; expected a news and its click.*MIND's test set"):
        read(written(tmp_path, "b.tsv", BEHAVIORS + "3\tU1\t11/15/2019 10:22:32 AM\tN9\tN7\n"))
    with pytest.raises(DataError, match=r"line 3: is .*; expected 5 columns separated by tabs, found 2"):
        read(written(tmp_path, "c.tsv", BEHAVIORS + "3\tU1\n"))


def test_impressions_are_the_groups_and_news_describe_the_items(tmp_path: Path) -> None:
    news = "".join(f'N{item}\tsport\tgolf\tThe "best\tA\thttps://x\t[{{"a": 1}}]\t[]\n' for item in range(1, 4))
    written(tmp_path, "news.tsv", news)
    text = "".join(
        f"{row}\tU{row % 4}\t11/{1 + row % 20}/2019 10:22:32 AM\t\tN1-{row % 2} N2-1 N3-0\n" for row in range(40)
    )
    result = prepare_table(tmp_path / "b.tsv", tmp_path / "out", text, items="news.tsv", item_features=["category"])
    assert "group=impression_id, by the layout of the files" in str(result.summary["inferred"])
    titles = pq.read_table(result.spec.folder / "items.parquet").column("title").to_pylist()
    assert titles == ['The "best'] * 3


NETFLIX = "1:\n15,4,2000-11-24\n7,3,2003-12-03\n2:\n15,5,2001-01-01\n"


def test_items_stand_over_their_users(tmp_path: Path) -> None:
    rows, _ = read(written(tmp_path, "a.txt", NETFLIX))
    assert [tuple(row.values()) for row in rows] == [
        ("1", "15", "4", "2000-11-24"),
        ("1", "7", "3", "2003-12-03"),
        ("2", "15", "5", "2001-01-01"),
    ]
    assert [*rows[0]] == ["item_id", "user_id", "rating", "timestamp"]
    assert [*read(written(tmp_path, "b.txt", "1:\n15\n7\n"))[0][0]] == ["item_id", "user_id"]
    with pytest.raises(DataError, match=r"line 6: is '7,3'; expected an item such as 123:, or user_id and rating and"):
        read(written(tmp_path, "c.txt", NETFLIX + "7,3\n"))
    roles = Roles(ids=IDS, numbers={"rating"}, time="timestamp")
    with pytest.raises(DataError, match="'rating': line 5 is 'x'"):  # the line of the file, not the number of the row
        read(written(tmp_path, "d.txt", NETFLIX.replace("15,5", "15,x")), roles)


def test_titles_may_hold_commas(tmp_path: Path) -> None:
    titles = written(tmp_path, "t.csv", "1,2003,Café\n2,NULL,Sick, the sequel\n", "latin-1")
    rows, _ = read(titles, encoding="latin-1", key="movie", layout="rows")
    assert [tuple(row.values()) for row in rows] == [("1", "2003", "Café"), ("2", None, "Sick, the sequel")]
    assert [*rows[0]] == ["movie", "year", "title"]
    with pytest.raises(DataError, match="line 1,003: is 'x'; expected an id, a year and a title"):
        read(written(tmp_path, "u.csv", "1,2003,A\n" * 1002 + "x\n"), layout="rows", key="movie")
    assert [*read(written(tmp_path, "v.csv", "1,2003,4\n2,2004,5\n"))[0][0]] == ["user_id", "item_id", "rating"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "1 3:1 7:1\n-1 2:1 9:1\n",
            [{"label": "1", "field_1": "3", "field_2": "7"}, {"label": "-1", "field_1": "2", "field_2": "9"}],
        ),
        ("+1 3:1 7:1\n0 2:1\n", [{"label": "1", "indices": ["3", "7"]}, {"label": "0", "indices": ["2"]}]),
        (
            "1 3:0.5\n0 2:4 3:1 # note\n",
            [{"label": "1", "feature_2": "0", "feature_3": "0.5"}, {"label": "0", "feature_2": "4", "feature_3": "1"}],
        ),
        (
            "2 qid:8 1:0.5\n0 qid:9 1:2\n",
            [{"label": "2", "qid": "8", "feature_1": "0.5"}, {"label": "0", "qid": "9", "feature_1": "2"}],
        ),
        (
            "1 0:3:1 1:9:0.5\n0 0:4:1 1:9:1\n1 0:4:1\n",
            [
                {"label": "1", "field_0": "3", "field_1": "0.5"},
                {"label": "0", "field_0": "4", "field_1": "1"},
                {"label": "1", "field_0": "4", "field_1": None},
            ],
        ),
        (
            "1 0:3:1 0:5:1 1:9:1\n0 0:4:1 1:8:1\n",
            [{"label": "1", "field_0": ["3", "5"], "field_1": "9"}, {"label": "0", "field_0": ["4"], "field_1": "8"}],
        ),
    ],
)
def test_sparse_rows_become_columns(text: str, rows: list[dict[str, object]], tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.txt", text))[0] == rows


def test_sparse_rows_that_no_columns_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: is '0:4:0.5'; expected the value 1, because field 0 has several"):
        read(written(tmp_path, "a.ffm", "1 0:3:1\n0 0:4:0.5\n"))
    wide = " ".join(f"{index}:0.5" for index in range(1_001))
    with pytest.raises(DataError, match=r"1,002 columns of sparse numbers; expected 1,000 at most;"):
        read(written(tmp_path, "b.svm", f"1 {wide}\n"))
    with pytest.raises(DataError, match=r"line 1,001: is '1 x'; expected a label, then entries such as 7:1"):
        read(written(tmp_path, "c.svm", "1 3:1 4:1\n" * 1_000 + "1 x\n"))


def test_indices_of_sparse_rows_are_categories(tmp_path: Path) -> None:
    text = "".join(f"{row % 2} {10 + row % 5}:1 {20 + row % 7}:1\n" for row in range(60))
    spec = prepare_table(tmp_path / "a.libsvm", tmp_path / "out", text).spec
    assert spec.features["field_1"].cardinality == 6
    assert spec.role("context") == ("field_1", "field_2")


# --- places of columns -----------------------------------------------------------------------------------------------

WHEN = (
    "2024-05-13T16:00:00Z",
    "05/13/2024 16:00",
    "Mon May 13 16:00:00 +0000 2024",
    "20240513",
    "1715616000",
    "1715616000000",
)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_time_is_found_at_any_place(place: int, when: str, tmp_path: Path) -> None:
    separator = (",", "\t", "::", "|")[(place + WHEN.index(when)) % 4]
    rows = [[f"u{row % 5}", f"sku{row % 9}"] for row in range(30)]
    text = "".join(separator.join([*row[:place], when, *row[place:]]) + "\n" for row in rows)
    names = ["user_id", "item_id"]
    names.insert(place, "timestamp")
    assert [*read(written(tmp_path, "a.txt", text))[0][0]] == names


@pytest.mark.parametrize(
    "row",
    [
        lambda row: f"{row % 7},{1_700_000_000 + row},{row % 5}\n",  # an item or a time, then a rating or an item
        lambda row: f"u{row % 7},{1 + row % 5},sku{row % 9}\n",  # a rating in place of the item
        lambda row: f"{row % 2},u{row % 7},sku{row % 9}\n",  # a label in place of the user
    ],
)
def test_columns_whose_values_leave_their_role_open_are_refused(row: object, tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "".join(row(number) for number in range(40)))  # type: ignore[operator]
    with pytest.raises(SettingsError, match=r"has no header, and its values leave open .* --set 'columns=\[user_id"):
        read(path)
    assert len(read(path, columns=("a", "b", "c"))[0]) == 40


def test_a_file_of_items_without_a_header_begins_with_their_ids(tmp_path: Path) -> None:
    rows, _ = read(written(tmp_path, "i.csv", "1,4.5,x\n2,3.5,y\n"), key="sku", layout="rows")
    assert [*rows[0]] == ["sku", "column_2", "column_3"]


# --- JSON and Python -------------------------------------------------------------------------------------------------

OBJECTS = [
    {"user_id": "u1", "item_id": "Dr. 'X' \"Y\"", "n": 3, "ok": True, "none": None},
    {"user_id": "u2", "item_id": "é", "n": 4, "ok": False, "none": "x"},
]
FORMS = {
    "lines": "".join(json.dumps(each) + "\n" for each in OBJECTS),
    "literals": "\n".join(map(repr, OBJECTS)),
    "list": json.dumps(OBJECTS),
    "indented": json.dumps(OBJECTS, indent=2),
    "one by one": "\n".join(json.dumps(each, indent=1) for each in OBJECTS),
}


@pytest.mark.parametrize(
    ("form", "name"), [*((form, "a.txt") for form in FORMS), ("list", "a.json.gz"), ("literals", "a.json.gz")]
)
def test_objects_are_read_in_every_form(form: str, name: str, tmp_path: Path) -> None:
    data = FORMS[form].encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "lines.json").write_text(FORMS["lines"])
    assert read(tmp_path / name)[0] == read(tmp_path / "lines.json")[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'a': __import__('os')}", "line 2: is no Python dictionary"),
        ("{'a': {1, 2}}", "line 2: is no Python"),
        ("{'a': " + "(" * 300 + "}", "line 2: is no Python"),
        ("{'a': b'x'}", "line 2: is no Python"),
        ("{'a': " + "-" * 200_000 + "1}", "line 2: is no Python"),
        ("[1]", "line 2: is no Python"),
        ("{'a': '" + "x" * (2 << 20) + "'}", "line 2: a Python literal is longer than 2,097,152 characters"),
    ],
)
def test_what_is_no_plain_dictionary_is_refused_and_never_run(line: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=expected):
        read(written(tmp_path, "a.json", f"{{'a': 'b'}}\n{line}\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1},\n{"a": x}]', r"object 2: is no JSON \(Expecting value\): '{\"a\": x}\]'"),
        ("[1, 2]", "value 1: is no JSON object: '1'; expected a list of objects"),
        ('{\n"a": ' + "[" * 100_000, "object 1: is no JSON"),
        ('{"user": {"0": 1}, "item": {"0": 2}}', "objects under each of 'user', 'item'.*orient='records'"),
    ],
)
def test_other_json_is_refused_by_its_cause(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=expected):
        read(written(tmp_path, "a.json", text))


NESTED: Mapping[str, object] = {"user": {"id": "u1"}, "items": [{"item_id": "a", "n": 1}, {"item_id": "b", "n": 2}]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_named_key_of_objects_holds_the_ids(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([dict(NESTED)]), path)
    else:
        path.write_text(json.dumps(NESTED) + "\n" + json.dumps({"user": {"id": "u2"}, "items": []}) + "\n")
    with pytest.raises(DataError, match=r"'items' holds lists of objects with 'item_id', 'n'; .*'item=items.item_id'"):
        read(path, item="item_id")
    rows, notes = read(path, item="items.item_id", mentioned=frozenset({"user.id"}))
    assert [(row["user.id"], row["items.item_id"], str(row["items.n"])) for row in rows] == [
        ("u1", "a", "1"),
        ("u1", "b", "2"),
    ]
    assert ("1 row whose 'items.item_id' holds no item" in str(notes.dropped)) == name.endswith("jsonl")


def test_an_object_in_place_of_an_item_is_refused_and_its_key_is_taken(tmp_path: Path) -> None:
    text = "".join(json.dumps({"user_id": row % 3, "item": {"~id/": row % 4}, "ts": row}) + "\n" for row in range(12))
    with pytest.raises(DataError, match=r"column 'item' holds objects with '~id/'; expected ids"):
        prepare_table(tmp_path / "a.jsonl", tmp_path / "out", text)
    result = prepare_table(tmp_path / "a.jsonl", tmp_path / "out", item="item.~id/")
    assert {item for _, item in raw_pairs(result.spec, "train")} <= {"0", "1", "2", "3"}


# --- dialects --------------------------------------------------------------------------------------------------------


def test_a_backslash_before_a_quote_is_read_where_the_file_needs_it(tmp_path: Path) -> None:
    text = '"ISBN";"Title"\n' + '"1";"plain"\n' * 5 + '"2";"Peterson\'s \\"Guide\\"; new"\n'
    rows, notes = read(written(tmp_path, "b.csv", text, "latin-1"), encoding="latin-1")
    assert rows[-1] == {"ISBN": "2", "Title": 'Peterson\'s "Guide"; new'}
    assert "a backslash stands before quotes inside of values" in str(notes.changed)


def test_decimal_commas_are_numbers_if_declared(tmp_path: Path) -> None:
    text = "user_id;item_id;price;word\n1,5;a;1.234,5;x,y\n2;b;-0,25;z\n3;c;;z\n4;d;1.000;z\n"
    path = written(tmp_path, "a.csv", text)
    rows, notes = read(path, Roles(ids=IDS, features=("price", "word")), decimal=",")
    assert [row["price"] for row in rows] == [1234.5, -0.25, None, 1000.0]
    assert [row["user_id"] for row in rows][:2] == ["1,5", "2"]
    assert rows[0]["word"] == "x,y"
    assert "a.csv: numbers with a decimal comma, read with a point: 'price' (2)" in notes.changed
    with pytest.raises(DataError, match=r"'price': line 2 is '1.234,5'.*take commas as decimal marks with --set"):
        read(path, Roles(ids=IDS, features=("price",)))
    mixed = written(tmp_path, "b.csv", text + "5;e;2.5;z\n")
    with pytest.raises(DataError, match=r"'price': line 6 is '2.5'; expected a decimal comma, as the setting decimal"):
        read(mixed, Roles(ids=IDS, features=("price",)), decimal=",")


def test_each_file_has_its_own_encoding_and_name_of_the_key(tmp_path: Path) -> None:
    events = "customer,item_id,timestamp\n" + "".join(f"Jürgen{row % 3},{row % 4},{row}\n" for row in range(12))
    written(tmp_path, "e.csv", events, "cp1252")
    written(tmp_path, "c.csv", "id;land\n" + "".join(f"Jürgen{user};Ö\n" for user in range(3)))
    own: dict[str, object] = {"file": "c.csv", "key": "id", "encoding": "utf-8"}
    told: dict[str, object] = {"user": "customer", "encoding": "cp1252", "user_features": ["land"]}
    result = prepare_table(tmp_path / "e.csv", tmp_path / "out", users=own, **told)
    assert pq.read_table(result.spec.folder / "users.parquet").column("land_text").to_pylist() == ["Ö"] * 3
    for wrong, expected in (
        ({**own, "key": "idd"}, r"setting 'users': the file has no column 'idd' \(did you mean 'id'\?\)"),
        (
            {"file": "c.csv", "encoding": "utf-8"},
            r"no column 'customer' to join by; .*'users=\{file: c.csv, key: COLUMN\}'",
        ),
    ):
        with pytest.raises(SettingsError, match=expected):
            prepare_table(tmp_path / "e.csv", tmp_path / "b", users=wrong, **told)
    for strange in ({"key": "id"}, {**own, "colour": 1}):
        with pytest.raises(ValueError, match=r"expected such as \{file: users.csv, key: id\}; keys: file, key,"):
            prepare_table(tmp_path / "e.csv", tmp_path / "b", users=strange, **told)
    written(tmp_path, "d.csv", "id,customer\nJürgen1,x\n")
    with pytest.raises(SettingsError, match="the file has a column 'customer' beside 'id'"):
        prepare_table(tmp_path / "e.csv", tmp_path / "b", users={**own, "file": "d.csv"}, **told)


def test_ids_equal_as_numbers_are_refused_with_the_setting_that_joins_them(tmp_path: Path) -> None:
    written(tmp_path, "users.csv", "user_id,land\n1,x\n2,y\n3,z\n")
    text = "user_id,item_id\n" + "".join(f"{1 + row % 3}.0,{row % 4}\n" for row in range(12))
    with pytest.raises(DataError, match=r"'1' and '1.0' are equal as numbers; --set 'types=\{user_id: integer\}'"):
        prepare_table(tmp_path / "e.csv", tmp_path / "out", text, users="users.csv")
    assert prepare_table(tmp_path / "e.csv", tmp_path / "out", users="users.csv", types={"user_id": "integer"})
    lines = "".join(f'{{"user_id": "u", "item_id": {item}}}\n' for item in ("3", "3.0", "4"))
    both = written(tmp_path, "a.jsonl", lines)
    with pytest.raises(DataError, match=r"'item_id' holds '3.0' and '3', equal as numbers .*item_id: integer"):
        read(both, Roles(ids=IDS))


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"@relation x\n", "an ARFF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (b"\x80\x04\x95abc", "a pickle"),
        (b"INSERT INTO `a` VALUES (1);", "an SQL dump"),
        (b"%%MatrixMarket matrix\n", "a MatrixMarket file"),
    ],
)
def test_files_of_other_kinds_are_named(start: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(start)
    with pytest.raises(DataError, match=f"its first bytes are those of {what}"):
        read(tmp_path / "a.csv")


def test_a_first_line_that_differs_from_all_others_is_blamed(tmp_path: Path) -> None:
    text = "user_id,item_id\n" + "1,2,3\n" * 20
    with pytest.raises(DataError, match="line 1: has 2 columns, and the 9 lines behind it have 3 separated by ','"):
        read(written(tmp_path, "a.csv", text))
    with pytest.raises(DataError, match="line 1: '# from a shop' looks like a comment; leave such lines out"):
        read(written(tmp_path, "b.csv", "# from a shop\n# in May\nuser_id,item_id\n" + "1,2\n" * 20))


def test_texts_that_may_be_lists_are_told(tmp_path: Path) -> None:
    text = "clk,userid,adgroup_id,seq\n" + "".join(
        f"{row % 2},{row % 5},{row % 7},{row}^{row + 1}\n" for row in range(60)
    )
    result = prepare_table(tmp_path / "train.csv", tmp_path / "out", text, split="share", context_features=["seq"])
    assert "60 values such as '0^1' may be lists; --set 'lists=[seq]' --set 'list_separator=^' reads them" in str(
        result.summary["inferred"]
    )
    told: dict[str, object] = {"split": "share", "context_features": ["seq"], "lists": ["seq"], "list_separator": "^"}
    asked = prepare_table(tmp_path / "train.csv", tmp_path / "b", None, **told)
    assert asked.spec.features["seq"].length == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1 |u uid_3 age:25 |i iid_9\n-1 2.0 |u uid_4\n", "Vowpal Wabbit's format; write its features as columns"),
        ("1 'tag |user a b\n0.5 'tag2 |user a\n", "Vowpal Wabbit's format"),
        ('::1 - u1 [07/Oct/2017:00:00:01 +0000] "GET /item/7 HTTP/1.1" 200 5\n' * 2, "a web server's log"),
        (
            " user_id | item_id \n---------+---------\n       1 |       2\n(1 row)\n",
            "a table that a database's shell drew",
        ),
        ("+---------+---------+\n| user_id | item_id |\n+---------+---------+\n", "export it as CSV"),
    ],
)
def test_layouts_that_are_not_read_are_named(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(what)):
        read(written(tmp_path, "a.txt", text))


def test_pipes_around_numbers_are_separators(tmp_path: Path) -> None:
    rows, _ = read(written(tmp_path, "a.csv", "user_id|item_id\n" + "1 | 2\n" * 3))
    assert [[*row] for row in rows] == [["user_id", "item_id"]] * 3


def test_a_prefix_that_all_columns_share_does_not_hide_their_roles(tmp_path: Path) -> None:
    raw = written(tmp_path, "a.csv", "e.user_id,e.item_id\n" + "".join(f"{n % 7},{n % 5}\n" for n in range(35)))
    made = prepare_table(raw, tmp_path / "out")
    assert (made.summary["users"], made.summary["items"]) == (7, 5)


def test_a_matrix_without_a_header_is_told_how_to_become_rows(tmp_path: Path) -> None:
    lines = [",".join("0105"[(n * k) % 4] for k in range(12)) + "\n" for n in range(30)]
    with pytest.raises(SettingsError, match="each line is a user and each column an item, write user, item and rating"):
        prepare_table(written(tmp_path, "a.csv", "".join(lines)), tmp_path / "out")
