"""What a model knows: completed names of users and items, and the columns of items."""

from __future__ import annotations

import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recspec
from recspec.base.errors import SettingsError
from recspec.inference import Predictor, RecommendRequest, lookup, requests, update_catalogue
from recspec.inference.lookup import Directory, ItemFields, for_sale
from recspec.inference.raw_columns import ColumnFacts


def held(items: list[tuple[str | int, str | None, int]]) -> Directory:
    """A directory of items: raw id, title, number of users."""
    raw, titles, counts = zip(*items, strict=True)

    class Catalogue:
        first_id = 1

        def __len__(self) -> int:
            return len(items)

        def titles_of(self, ids: Any) -> pa.Array:
            return pa.array(titles, pa.string()).take(pa.array(ids - 1))

    def raw_ids(_: str, ids: Any) -> pa.Array:
        return pa.array(raw).take(pa.array(ids - 1))

    known = SimpleNamespace(of=lambda _: Catalogue(), raw_ids=raw_ids)
    seen = SimpleNamespace(counts=torch.tensor([0, *counts]))
    return Directory(SimpleNamespace(catalogues=known, recommender=SimpleNamespace(seen=seen)), "item")  # type: ignore[arg-type]


def found(items: Directory, query: str, limit: int = 10) -> list[str | int]:
    return [each["item"] for each in items.find(query, limit)]


def test_items_are_found_by_id_title_and_part_whatever_the_case(films: Predictor) -> None:
    items = Directory(films, "item")
    assert len(items) == 30
    assert [each["item"] for each in items.find("107", 5)] == ["107"]
    assert items.find("ITEM, number 11", 3)[0]["title"].startswith("Item, number 11")
    assert {each["item"] for each in items.find("number 11", 30)} == set(map(str, range(110, 120)))
    assert items.find("nothing like it", 5) == []


def test_the_busiest_come_first_where_nothing_is_typed(films: Predictor) -> None:
    users, items = Directory(films, "user").find("", 3), Directory(films, "item").find(" ", 30)
    assert len(users) == 3
    assert all(each["count"] == 11 for each in users)
    counts = [each["count"] for each in items]
    assert counts == sorted(counts, reverse=True)


def test_the_typical_are_those_of_nearest_to_the_median_activity() -> None:
    items = held([("a", None, 1), ("b", None, 9), ("c", None, 4), ("d", None, 0), ("e", None, 5), ("f", None, 4)])
    assert [each["item"] for each in items.find("", 9, are_typical=True)] == ["c", "f", "e", "a", "b"]
    assert [each["item"] for each in items.find("", 2, are_typical=True)] == ["c", "f"]
    assert [each["item"] for each in items.find("b", 2, are_typical=True)] == ["b"], "a text decides alone"
    assert held([("a", None, 0)]).find("", 3, are_typical=True) == []


def test_the_id_itself_comes_before_beginnings_of_others(films: Predictor) -> None:
    users = Directory(films, "user")
    assert [each["user"] for each in users.find("u3", 1)] == ["u3"]
    assert {each["user"] for each in users.find("U3", 99)} == {"u3", *(f"u3{number}" for number in range(10))}


def test_the_order_is_the_id_beginnings_words_parts_all_words() -> None:
    items = held(
        [
            ("a1", "Supermen", 9),
            ("a2", "Men in black", 1),
            ("men", "Alien", 0),
            ("a4", "X men", 2),
            ("MEN", None, 5),
            ("a6", "Omen", 8),
            ("a7", "Black, the men", 3),
        ]
    )
    assert found(items, "men") == ["men", "MEN", "a2", "a7", "a4", "a1", "a6"]
    assert found(items, "black men") == ["a7", "a2"]
    assert found(items, "men black") == ["a7", "a2"]
    assert found(items, "men", 3) == ["men", "MEN", "a2"]
    assert found(items, "men grey") == []


def test_accents_and_numbers() -> None:
    items = held([(7, "Amélie", 1), (70, "ÉTÉ à Besançon", 2), (8, "Straße", 3), (9, "日本の映画", 4), (10, None, 0)])
    assert found(items, "amelie") == found(items, "AMÉLIE") == [7]
    assert found(items, "ete a besancon") == [70]
    assert found(items, "straße") == [8]
    assert found(items, "映画") == [9]
    assert found(items, "7") == [7, 70]
    assert found(items, "\u0301") == found(items, "")  # nothing but an accent


def test_signs_of_the_searched_text_are_found_nowhere() -> None:
    items = held([("a", "one\ntwo", 1), ("b\x1fc", "three", 2), ("d", "four\x00five", 3)])
    for query in ("\n", "\x1f", "\x00", " \n "):
        assert len(found(items, query)) == 3  # a blank: the busiest
    assert found(items, "one two") == ["a"]
    assert found(items, "one\ntwo") == ["a"]
    assert found(items, "a\x1fone") == ["a"]  # two words
    assert found(items, "b c") == ["b\x1fc"]


def test_a_long_title_is_searched_at_its_beginning() -> None:
    items = held([("a", "x" * 300 + " needle", 1), ("b", "needle", 0)])
    assert found(items, "needle") == ["b"]
    assert found(items, "x" * 200) == ["a"]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.text("aAé b1\n", max_size=6), st.integers(0, 3)), min_size=1, max_size=12),
    st.text("aAé b1\n", max_size=4),
    st.integers(1, 15),
)
def test_it_finds_what_a_plain_search_finds(titles: list[tuple[str, int]], query: str, limit: int) -> None:
    def plain(text: str) -> str:
        parts = unicodedata.normalize("NFKD", text.replace("\n", " "))
        return "".join(each for each in parts if not unicodedata.combining(each)).lower()

    items = [(f"k{place}", title, count) for place, (title, count) in enumerate(titles)]
    text = plain(query.strip()).strip()
    expected = {raw for raw, title, _ in items if text in plain(title) or text in raw}
    several = text.split()
    if len(several) > 1:
        expected |= {raw for raw, title, _ in items if all(word in f"{raw}\x1f{plain(title)}" for word in several)}
    answer = found(held(items), query, limit)
    assert len(answer) == len(set(answer)) == min(limit, len(expected))
    assert set(answer) <= expected


def test_the_words_of_a_query_cost_a_bounded_number_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_LOOKED_AT", 5)
    items = held([(f"i{place}", "aaaa bb" if place < 5 else "aaaa cc", 100 - place) for place in range(50)])
    assert found(items, "bb aaaa", 3) == ["i0", "i1", "i2"]
    assert found(items, "cc aaaa") == []


def test_a_large_catalogue_is_read_from_its_beginning() -> None:
    count = 20_000
    items = held([(f"i{place}", f"thing {place}", count - place) for place in range(count)])
    assert found(items, "thing", 3) == ["i0", "i1", "i2"]
    assert found(items, "19999") == ["i19999"]
    assert np.all(np.diff(items._starts) > 0)


@pytest.fixture(scope="module")
def ease(shop_runs: dict[str, Path]) -> Predictor:
    return Predictor.open(shop_runs["ease"], device="cpu")


@pytest.fixture(scope="module")
def impressions(shop_runs: dict[str, Path]) -> Predictor:
    return Predictor.open(shop_runs["clicks"], device="cpu")


def test_each_column_is_there_once_without_id_and_title(ease: Predictor) -> None:
    kinds = {each.name: each.kind for each in ItemFields(ease).columns}
    assert kinds == {
        "category": "choice",
        "price": "number",
        "in_stock": "truth",
        "tags": "choices",
        "added": "date",
        "image": "image",
    }


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([("price", "number", ())], None),
        ([("in_stock", "truth", ())], "`in_stock` == true"),
        ([("Discontinued", "truth", ())], "`Discontinued` == false"),
        ([("stock", "number", ())], "`stock` > 0"),
        ([("stock", "choice", (0, 1, 2))], "`stock` > 0"),
        ([("stock", "choice", ("few", "many"))], None),
        ([("stock", "truth", ())], "`stock` == true"),
        ([("in_stock", "text", ())], None),
        (
            [("availability", "choice", ("In stock", "out of stock", "preorder"))],
            "`availability` in ('In stock', 'preorder')",
        ),
        ([("availability", "choice", ("A", "B"))], None),
        ([("is_available", "truth", ()), ("inventory", "number", ())], "`is_available` == true and `inventory` > 0"),
    ],
)
def test_the_column_of_stock_is_found_by_its_name(
    columns: list[tuple[str, str, tuple[object, ...]]], expected: str | None
) -> None:
    assert for_sale([ColumnFacts(name, kind, values) for name, kind, values in columns]) == expected  # type: ignore[arg-type]


def test_a_setting_names_the_column_of_stock_whatever_it_is_called(tmp_path: Path) -> None:
    rows = pa.table({"user_id": [f"u{n % 9}" for n in range(60)], "item_id": [f"i{n % 8}" for n in range(60)]})
    items = pa.table(
        {
            "item_id": [f"i{n}" for n in range(8)],
            "bestand": [0, 3, 0, 1, 12, 0, 7, 9],
            "lage": ["weg", "da", "weg", "bald", "da", "weg", "da", "da"],
        }
    )

    def prepared(name: str, **asked: Any) -> recspec.Data:
        return recspec.prepare(rows, tmp_path / name, items=items, num_negatives=2, progress=False, **asked)

    plain = prepared("plain")
    assert "'bestand' of the items' file holds whole numbers from 0, 0 in 38% of the items" in str(plain.prepared)
    sold: dict[str, object] = {"pieces": "bestand", "words": {"lage": ["da", "bald"]}}
    for name, stock in sold.items():
        data = prepared(name, stock=stock)
        assert "if they are pieces in stock" not in str(data.prepared)
        run = recspec.train("popularity", data, tmp_path / f"run-{name}", progress=False).path

        def on_sale(run: Path = run) -> list[bool]:
            fields = ItemFields(Predictor.open(run, device="cpu"))
            return [each["is_for_sale"] for each in fields.of([f"i{item}" for item in range(8)])]

        assert on_sale() == [False, True, False, True, True, False, True, True]
    (tmp_path / "new.csv").write_text("item_id,bestand\ni0,5\ni1,0\n")
    update_catalogue(tmp_path / "run-pieces", tmp_path / "new.csv")
    assert on_sale(tmp_path / "run-pieces") == [True, False, False, True, True, False, True, True]
    for wrong, message in (
        (
            "lage",
            r"column 'lage' of the items' file holds texts; --set 'stock=\{lage: \[TEXT\]\}' names those of items",
        ),
        ({"bestand": ["ja"]}, "column 'bestand' of the items' file holds no texts; --set stock=bestand is enough"),
        ("bestadn", r"setting 'stock': no column 'bestadn' \(did you mean 'bestand'\?\) in the items' file"),
        ({"a": ["x"], "b": ["y"]}, "names 2 columns; expected one, such as"),
    ):
        with pytest.raises(SettingsError, match=message):
            prepared("wrong", stock=wrong)


def test_what_is_blocked_withdrawn_or_out_of_stock_is_not_for_sale(shop_runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(shop_runs["ease"], tmp_path / "run"))

    def sold() -> list[str]:
        fields = ItemFields(Predictor.open(run, device="cpu"))
        return [
            each["item"] for each in fields.of([f"p{item}" for item in range(6)] + ["nothing"]) if each["is_for_sale"]
        ]

    assert sold() == ["p1", "p2", "p3", "p4"], "p0 and p5 are out of stock"
    update_catalogue(run, block=["p2"])
    assert sold() == ["p1", "p3", "p4"]
    (tmp_path / "stock.csv").write_text(
        "sku,in_stock\np0,true\np1,false\n" + "".join(f"p{item},true\n" for item in (2, 3))
    )
    update_catalogue(run, tmp_path / "stock.csv", whole=True, most_withdrawn=1)
    assert sold() == ["p0", "p3"], "p2 is blocked still, and p4 and p5 are withdrawn"


def test_items_are_shown_with_their_fields_in_the_order_of_the_request(ease: Predictor) -> None:
    last, unknown, first = ItemFields(ease).of(["p23", "nothing", "p0"])
    assert last["title"] == "<img src=x onerror=document.title=1> 23"
    assert last["fields"] == {
        "category": "c",
        "price": 23.5,
        "in_stock": True,
        "tags": None,
        "added": "2026-01-24",
        "image": "https://pictures.example/23.png",
    }
    assert unknown == {"item": "nothing", "is_known": False, "is_for_sale": False, "title": None, "fields": {}}
    assert (first["item"], first["fields"]["tags"], first["fields"]["in_stock"]) == ("p0", ["new", "eco"], False)
    assert ItemFields(ease).of([]) == []


def test_columns_that_are_too_many_or_too_large_are_not_shown(ease: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: ItemFields(ease)._raw.num_bytes(name) for name in ("image", "in_stock", "item_id")}
    assert sizes["image"] > sizes["in_stock"] > 0
    assert sizes["item_id"] == ItemFields(ease)._raw.num_bytes("nothing") or sizes["item_id"] > 0
    monkeypatch.setattr(lookup, "MOST_COLUMNS", 3)
    assert [each.name for each in ItemFields(ease).columns] == ["category", "price", "in_stock"]
    monkeypatch.setattr(lookup, "MOST_COLUMNS", 50)
    monkeypatch.setattr(lookup, "LARGEST_COLUMN", sizes["image"] - 1)
    assert "image" not in [each.name for each in ItemFields(ease).columns]


def test_every_column_that_is_shown_can_be_filtered_by(ease: Predictor) -> None:
    tests = {
        "choice": "{} in ('a', 'b')",
        "number": "{} >= 3 and {} <= 9",
        "truth": "{} == true",
        "choices": "{} contains 'eco'",
        "date": "{} >= '2026-01-03'",
    }
    for column in ItemFields(ease).columns:
        if column.kind in tests:
            found = ease.recommend(
                RecommendRequest(users=("c1",), filter=tests[column.kind].replace("{}", column.name))
            )
            assert found[0].items, column.name


def test_a_context_is_asked_for_by_the_columns_that_the_model_reads(ease: Predictor, impressions: Predictor) -> None:
    assert requests.context_columns(ease) == []
    device, hour = requests.context_columns(impressions)
    assert device == ColumnFacts("device", "choice", ("laptop", "phone"), is_required=True, example="laptop")
    assert (hour.kind, hour.low, hour.high, hour.is_required) == ("number", 0.0, 9.0, True)
    assert (requests.can_recommend(impressions), requests.can_recommend_in_context(impressions)) == (False, True)
    assert (requests.can_recommend(ease), requests.can_recommend_in_context(ease)) == (True, True)


def test_probabilities_are_given_by_models_of_labels_alone(ease: Predictor, impressions: Predictor) -> None:
    assert not ease.bundle.gives_probabilities
    assert "probability" not in requests.recommend(ease, RecommendRequest(users=("c1",)))["items"][0]
    wanted = RecommendRequest(users=("c1",), context={"device": "phone", "hour": 3}, boosts=("price > 5: 2",), k=24)
    items = requests.recommend(impressions, wanted)["items"]
    rows = [{"user_id": "c1", "item_id": each["item"], "device": "phone", "hour": 3} for each in items]
    by_hand = requests.predict(impressions, rows).values
    assert [each["probability"] for each in items] == pytest.approx(list(by_hand), abs=1e-5)
    bundle = impressions.bundle
    drawn = bundle.card.model_copy(update={"train": {**bundle.card.train, "negatives": 4}})
    assert (bundle.outputs, replace(bundle, card=drawn).outputs) == (("probability", "logit"), ("sigmoid", "logit"))
    stranger = RecommendRequest(users=("nobody",), k=3)
    assert "probability" not in requests.recommend(ease, stranger)["items"][0]
