"""Fields of items, and columns of the catalogue, as pages and forms show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recspec.inference import Predictor, RecommendRequest, requests
from recspec.inference import lookup as fields
from recspec.inference.lookup import ItemFields
from recspec.inference.raw_columns import ColumnFacts


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
    assert unknown == {"item": "nothing", "is_known": False, "title": None, "fields": {}}
    assert (first["item"], first["fields"]["tags"], first["fields"]["in_stock"]) == ("p0", ["new", "eco"], False)
    assert ItemFields(ease).of([]) == []


def test_columns_that_are_too_many_or_too_large_are_not_shown(ease: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: ItemFields(ease)._raw.num_bytes(name) for name in ("image", "in_stock", "item_id")}
    assert sizes["image"] > sizes["in_stock"] > 0
    assert sizes["item_id"] == ItemFields(ease)._raw.num_bytes("nothing") or sizes["item_id"] > 0
    monkeypatch.setattr(fields, "MOST_COLUMNS", 3)
    assert [each.name for each in ItemFields(ease).columns] == ["category", "price", "in_stock"]
    monkeypatch.setattr(fields, "MOST_COLUMNS", 50)
    monkeypatch.setattr(fields, "LARGEST_COLUMN", sizes["image"] - 1)
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
