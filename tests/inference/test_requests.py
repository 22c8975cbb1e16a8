"""Requests in raw values: the Predictor's answers, unknown values flagged, mistakes named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec.base.errors import RequestError
from recspec.data.encoding import CrossEncoder
from recspec.inference import requests as answers
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.inference.request_features import RowEncoder, table_of
from recspec.inference.requests import can_recommend, predict, rank, recommend
from tests import made_up
from tests.inference.conftest import trained


def refused(message: str, call: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(RequestError) as caught:
        call(*given, **named)
    assert message in str(caught.value)
    assert caught.value.status == 400


def test_no_candidate_gives_an_empty_answer(films: Predictor) -> None:
    assert rank(films, {"user_id": "u3"}, []) == answers.Ranking(())
    assert rank(films, {"user_id": "nobody"}, []).unknown_user


def test_candidates_are_ordered_by_the_probability_of_their_rows(films: Predictor) -> None:
    items = [105, 119, 100, 129]
    by_rows, _ = films.predict(pa.table({"user_id": ["u9"] * 4, "item_id": items}))
    found = rank(films, {"user_id": "u9"}, items)
    assert [each.index for each in found.items] == np.argsort(-by_rows, kind="stable").tolist()
    assert [each.item for each in found.items] == [items[each.index] for each in found.items]
    assert [each.rank for each in found.items] == [1, 2, 3, 4]
    assert [each.title for each in found.items] == [f"Item, number {each.item}" for each in found.items]
    for each in found.items:
        assert each.score == pytest.approx(by_rows[each.index], abs=1e-5)
        assert each.probability is None
    assert not found.unknown_user
    assert found.unknown_items == ()


def test_top_k_gives_the_beginning_and_equal_candidates_keep_their_order(films: Predictor) -> None:
    found = rank(films, {"user_id": "u9"}, [105, 105, 119, 105], top_k=3)
    assert len(found.items) == 3
    equal = [each.index for each in rank(films, {"user_id": "u9"}, [105, 105, 105]).items]
    assert equal == [0, 1, 2]


def test_unknown_users_and_items_are_scored_and_flagged(films: Predictor) -> None:
    found = rank(films, {"user_id": "nobody"}, [105, 7, "x", 7])
    assert found.unknown_user
    assert found.unknown_items == (7, "x")
    titles = {each.item: each.title for each in found.items}
    assert titles == {105: "Item, number 105", 7: None, "x": None}
    assert "1 of 1 row has an unknown user_id; it is scored with the id of unknown values" in found.notes
    assert "3 of 4 rows have an unknown item_id; they are scored with the id of unknown values" in found.notes


def test_candidates_may_be_rows_of_the_items_own_columns(clicks: Predictor) -> None:
    request_names = [name for name in clicks.model.features() if name not in clicks.spec.role("item")]
    rows = raw_rows(clicks, 6)
    request = {name: value for name, value in rows[0].items() if name in columns_of(clicks, request_names)}
    candidates = [{name: value for name, value in row.items() if name not in request} for row in rows]
    by_rows = predict(clicks, [{**request, **row} for row in candidates]).values
    found = rank(clicks, request, candidates)
    assert {each.index: each.probability for each in found.items} == pytest.approx(dict(enumerate(by_rows)), abs=1e-6)


def columns_of(predictor: Predictor, names: list[str]) -> set[str]:
    """Raw columns that features are made from."""
    if predictor.encoders is None:
        return set(names)
    columns: set[str] = set()
    for name in names:
        encoder = predictor.encoders.encoders[name]
        columns |= set(encoder.columns) if hasattr(encoder, "columns") else {encoder.column or name}
    return columns


def raw_rows(predictor: Predictor, count: int) -> list[dict[str, Any]]:
    """Rows with a value for every raw column: small numbers, known to every kind of encoder or unknown to it."""
    names = sorted(columns_of(predictor, list(predictor.model.features())))
    lists = {name for name in predictor.model.features() if predictor.spec.features[name].is_list}
    return [{name: [row + 1, 2] if name in lists else row + 1 for name in names} for row in range(count)]


def test_a_model_without_item_features_says_so(tmp_path: Path) -> None:
    spec = made_up.clicks(tmp_path / "data", num_rows=600)
    channels = {role: names for role, names in spec.channels.items() if role != "item"}
    channels["context"] = (*channels.get("context", ()), *spec.channels["item"])
    metadata = {name: value for name, value in spec.metadata.items() if name != "item_id"}
    contexts = spec.replace(channels=channels, metadata=metadata)
    predictor = trained("wide_deep", contexts, tmp_path / "run", {"hidden": (8,)})
    refused("reads no feature of an item", rank, predictor, {}, [{}])
    assert not can_recommend(predictor)


def test_the_request_and_the_candidates_are_named_in_what_is_refused(films: Predictor) -> None:
    refused("request: no column 'user_id' (did you mean 'user'?)", rank, films, {"user": "u1"}, [105])
    refused("request.user_id is an object", rank, films, {"user_id": {}}, [105])
    refused("candidate 2 (candidates[1].item_id) is an object", rank, films, {"user_id": "u1"}, [105, {"item_id": {}}])
    refused(
        "candidate 1 (candidates[0].item_id) is a whole number of 129 bits; expected at most 128",
        rank,
        films,
        {"user_id": "u1"},
        [2**128],
    )


def test_ids_that_files_made_elsewhere_do_not_have_are_refused_by_row(bare: Predictor) -> None:
    assert [each.item for each in rank(bare, {"u": 0}, [5, 0]).items] in ([5, 0], [0, 5])
    assert not rank(bare, {"u": 0}, [0]).unknown_user
    refused(
        "candidates: column 'i': candidate 2 (candidates[1]) is 6; expected an id in [0, 6)",
        rank,
        bare,
        {"u": 0},
        [5, 6],
    )
    refused(
        "rows: column 'i': row 2 (rows[1]) is 6; expected an id in [0, 6)",
        predict,
        bare,
        [{"u": 0, "i": 5}, {"u": 0, "i": 6}],
    )
    refused("request: column 'u': its value is 8; expected an id in [0, 8)", rank, bare, {"u": 8}, [5])
    refused("request: no column 'u'", rank, bare, {}, [5])


def test_an_anonymous_visitor_is_an_unknown_user(films: Predictor, past: Predictor) -> None:
    by_null = rank(films, {"user_id": None}, [105, 119])
    found = rank(films, {}, [105, 119])
    assert found == by_null
    assert found.unknown_user
    assert found.notes == ("1 of 1 row has no user_id; it is scored with the id of unknown values",)
    assert rank(films, {}, []).unknown_user
    scores = predict(films, [{"item_id": 105}, {"item_id": 119}])
    assert [each.score for each in sorted(found.items, key=lambda item: item.index)] == pytest.approx(
        scores.values, abs=1e-5
    )
    assert scores.notes == ("2 of 2 rows have no user_id; they are scored with the id of unknown values",)
    refused("request: no column 'user_id'", rank, past, {}, [1, 2])  # 0 is a real user there


def test_columns_that_are_not_read_are_noted_once_for_request_and_candidates(films: Predictor) -> None:
    found = rank(films, {"user_id": "u1", "why": 1}, [{"item_id": 100, "kinds": "a"}, {"item_id": 101}])
    assert found.notes == ("not read: 'why', 'kinds'",)
    assert rank(films, {"user_id": "u1", "why": 1}, []).notes == ("not read: 'why'",)


def test_recommendations_are_the_predictors(films: Predictor) -> None:
    (by_hand,) = films.recommend(["u3"], k=4)
    found = recommend(films, RecommendRequest(users=("u3",), k=4), liked=3)
    assert [(each["rank"], each["item"], each["title"], each["score"]) for each in found["items"]] == [
        (rank, each.item, each.title, each.score) for rank, each in enumerate(by_hand.items, 1)
    ]
    assert not found["unknown_user"]
    assert [each["title"] for each in found["liked"]] == films.liked("u3", k=3)
    assert recommend(films, RecommendRequest(users=("u3",), k=4))["liked"] == []


def test_an_unknown_user_gets_the_popular_items_and_a_flag(films: Predictor) -> None:
    found = recommend(films, RecommendRequest(users=("nobody",), k=3), liked=3)
    assert found["unknown_user"]
    assert found["liked"] == []
    assert [each["item"] for each in found["items"]] == [each.item for each in films.recommend(["?"], k=3)[0].items]
    assert found["notes"] == ["unknown user: these are the 3 most popular items; score is the number of users"]


def test_a_model_of_histories_ranks_and_recommends_by_what_it_keeps_of_a_user(past: Predictor) -> None:
    assert can_recommend(past)
    best = recommend(past, RecommendRequest(users=(3,), k=4))
    assert not best["unknown_user"]
    items = [each["item"] for each in best["items"]]
    kept = {
        name: past.users.lists_of(name, np.array([3])).tolist()[0] for name in ("history_item_id", "history_category")
    }
    assert kept["history_item_id"]
    for request in ({"user_id": 3}, {"user_id": 3, **kept}):
        found = rank(past, request, items[::-1])
        assert [each.item for each in found.items] == items
        assert [each.score for each in found.items] == pytest.approx(
            [each["score"] for each in best["items"]], abs=1e-5
        )
    without = rank(past, {"user_id": 3, "history_item_id": [], "history_category": []}, items)
    scores = {each.item: each.score for each in without.items}
    assert all(abs(scores[each["item"]] - each["score"]) > 1e-4 for each in best["items"])


def test_rows_get_the_predictors_values(films: Predictor) -> None:
    rows = [{"user_id": "u1", "item_id": 100}, {"user_id": "u2", "item_id": "101"}]
    by_hand, _ = films.predict(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 101]}))
    assert predict(films, rows).values == pytest.approx(by_hand.tolist(), rel=1e-5)
    assert predict(films, []).to_dict() == {"scores": [], "gaps": {}, "notes": []}


def test_gaps_are_counted_and_noted(films: Predictor) -> None:
    found = predict(films, [{"user_id": "u1", "item_id": 7}, {"user_id": "u2"}, {"item_id": 100, "user_id": "u2"}])
    assert found.to_dict()["gaps"] == {"item_id": {"missing": 1, "unknown": 1}}
    note = "1 of 3 rows has no item_id and 1 an unknown one; they are scored with the id of unknown values"
    assert found.notes == (note,)


def test_a_column_that_nothing_reads_is_noted(films: Predictor) -> None:
    row = {"user_id": "u1", "item_id": 100, "kinds": "a", "label": 1}
    assert predict(films, [row]).notes == ("not read: 'kinds'",)
    refused(
        "rows: no column 'item_id' (did you mean 'item_ids'?)", predict, films, [{"user_id": "u1", "item_ids": 100}]
    )


def test_usual_requests_are_encoded_value_by_value_with_the_same_answer(
    clicks: Predictor, films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And requests with a gap, a column too many or too few, or rows that differ, are not."""
    request, full = {"user_id": "u3"}, [{"item_id": 100 + item} for item in range(5)]
    assert answers._encode_clean(films, request, full) is not None
    assert answers._encode_clean(clicks, request, full) is None, "it reads lists"
    quick = rank(films, request, full, top_k=3)
    with monkeypatch.context() as patched:
        patched.setattr(answers, "_encode_clean", lambda *_: None)
        slow = rank(films, request, full, top_k=3)
    assert [item.index for item in quick.items] == [item.index for item in slow.items]
    np.testing.assert_allclose([item.score for item in quick.items], [item.score for item in slow.items], rtol=1e-6)
    assert (
        (quick.unknown_user, quick.unknown_items, quick.notes)
        == (False, (), ())
        == (slow.unknown_user, slow.unknown_items, slow.notes)
    )
    for unusual in (
        ({"user_id": "nobody"}, full),
        ({"user_id": None}, full),
        ({}, full),
        ({"user_id": "u3", "more": 1}, full),
        (request, [*full, {"item_id": 999}]),
        (request, [*full, {}]),
        (request, [*full, {"item_id": 101, "kind": "b"}]),
        (request, [{**full[0], "more": 1}]),
        (request, [{"item_id": "101"}, {"item_id": 101}]),
    ):
        assert answers._encode_clean(films, *unusual) is None


# --- features of columns from both sides ------------------------------------------------------------------------------


def test_a_cross_of_both_sides_gives_the_probabilities_of_whole_rows(crossed: Predictor) -> None:
    request = {"user_id": "u1", "device": "d2", "tags": ["t1", "t0"]}
    items = ["i3", "i0", "i4"]
    by_rows = predict(crossed, [{**request, "item_id": item} for item in items]).values
    assert len(set(by_rows)) == 3
    found = rank(crossed, request, items)
    assert {each.index: each.probability for each in found.items} == pytest.approx(dict(enumerate(by_rows)), abs=1e-6)
    assert not found.notes
    assert rank(crossed, {**request, "user_id": "nobody"}, items).unknown_user


def test_columns_on_the_other_side_are_read_where_a_cross_joins_both(crossed: Predictor) -> None:
    rows = [{"item_id": item, "user_id": user, "tags": ["t1"]} for item, user in (("i3", "u2"), ("i0", "u5"))]
    by_rows = predict(crossed, [{**row, "device": "d2"} for row in rows]).values
    found = rank(crossed, {"device": "d2"}, rows)
    assert {each.index: each.probability for each in found.items} == pytest.approx(dict(enumerate(by_rows)), abs=1e-6)


def test_values_of_the_request_are_read_once_however_many_candidates_there_are(
    crossed: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the request for every candidate made 77 KB of JSON into a gigabyte."""
    sizes: list[int] = []
    original = CrossEncoder.printed

    def printed(self: CrossEncoder, name: str, values: Any) -> Any:
        sizes.append(len(values))
        return original(self, name, values)

    monkeypatch.setattr(CrossEncoder, "printed", printed)
    tables: list[pa.Table] = []
    encode = RowEncoder.encode
    monkeypatch.setattr(
        RowEncoder, "encode", lambda self, rows, *given: tables.append(rows) or encode(self, rows, *given)
    )
    rank(crossed, {"user_id": "u1", "device": "d1" * 500, "tags": ["t1"] * 400}, ["i1"] * 300)
    assert sorted(sizes) == [1, 300]
    values = {name: table.column(name) for table in tables for name in ("device", "tags") if name in table.column_names}
    assert {name: len(column) for name, column in values.items()} == {"device": 1, "tags": 1}


def test_problems_with_a_cross_name_the_side_they_are_on(crossed: Predictor) -> None:
    refused(
        "request: column 'device': holds lists; expected one value a row",
        rank,
        crossed,
        {"user_id": "u1", "device": ["d1"], "tags": ["t1"]},
        ["i1", "i2"],
    )
    refused(
        "candidates: column 'item_id': holds lists; expected one value a row",
        rank,
        crossed,
        {"user_id": "u1", "device": "d1", "tags": ["t1"]},
        [{"item_id": ["i1"]}],
    )


# --- rows of JSON as columns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2], [1, None, 2]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, 3], ["1", "3"]),
        (["a", 1, 2.0, 2.5, False, None], ["a", "1", "2", "2.5", "0", None]),
        ([[1, 2], None, []], [[1, 2], [], []]),
        ([["a"], [1]], [["a"], ["1"]]),
        ([None, None], [None, None]),
        ([2**63 - 1, 0.5], ["9223372036854775807", "0.5"]),
        ([2**63, 3.0, None], ["9223372036854775808", "3", None]),
        ([[2**127], [1]], [["170141183460469231731687303715884105728"], ["1"]]),
    ],
)
def test_values_of_json_become_one_type(values: list[Any], expected: list[Any]) -> None:
    table = table_of([{"x": value} for value in values], "rows")
    assert table.column("x").to_pylist() == expected


def test_a_column_that_some_rows_lack_is_null_there() -> None:
    table = table_of([{"a": 1}, {"b": "x"}], "rows")
    assert table.to_pydict() == {"a": [1, None], "b": [None, "x"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, {}], "row 2 (rows[1].x) is an object; expected a text, number, boolean or null"),
        ([[[1]]], "row 1 (rows[0].x) holds what is a list; expected a text, number, boolean or null"),
        ([[1], 2], "row 2 (rows[1].x) is a single value, where another row has a list; expected one or the other"),
        ([10**9999], "row 1 (rows[0].x) is a whole number of 33,216 bits; expected at most 128"),
        ([[-(2**128)]], "row 1 (rows[0].x) holds what is a whole number of 129 bits; expected at most 128"),
    ],
)
def test_values_that_no_column_holds_are_named(values: list[Any], message: str) -> None:
    refused(message, table_of, [{"x": value} for value in values], "rows")
