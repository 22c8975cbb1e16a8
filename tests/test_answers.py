"""Questions in raw values: the same answers as the Predictor's, what is unknown flagged, mistakes named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec import answers
from recspec.answers import Directory, can_recommend, predict, rank, recommend, table_of
from recspec.datasets import DATASETS
from recspec.errors import RequestError
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.predict import Predictor
from recspec.train import TrainSettings, train
from tests import made_up

NEUMF = {"factors": 4, "layers": (8, 4), "dropout": 0.0}


def trained(model: str, spec: FeatureSpec, run: Path, settings: dict[str, Any], **others: Any) -> Predictor:
    how = TrainSettings(epochs=1, batch_size=500, learning_rate=0.01, tensorboard=False, **others)
    train(model, spec, run, settings=how, model_settings=MODELS[model].Settings.model_validate(settings))
    return Predictor.open(run, device="cpu")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """40 users, named by text, and 30 items, numbered from 100, with titles and a kind."""
    folder = tmp_path_factory.mktemp("films")
    made_up.write_films(folder, 40, "Item, number", kinds=True)
    table = DATASETS["table"]
    settings = table.Settings(items="items.csv", item_features=("kind",), num_negatives=10)  # type: ignore[call-arg]
    table.prepare(folder / "rows.csv", folder / "data", settings)
    return trained("neumf", FeatureSpec.load(folder / "data"), folder / "run", NEUMF)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of labelled rows with user, item and context features, numbers and lists."""
    folder = tmp_path_factory.mktemp("clicks")
    spec = made_up.clicks(folder / "data", num_rows=1500)
    return trained("wide_deep", spec, folder / "run", {"hidden": (16, 8)})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Trained on files that recspec did not prepare: 0 is a real user and a real item."""
    folder = tmp_path_factory.mktemp("bare")
    rows = [(user, (user + step) % 6) for user in range(8) for step in range(3)]
    (folder / "train.csv").write_text("".join(f"{user},{item},1\n" for user, item in rows))
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["u", "i", "y"], "files": ["train.csv"]}]},
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]},
        },
        folder,
    )
    return trained("neumf", spec, folder / "run", NEUMF)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """DIN, which reads each user's history from the catalogue of users."""
    folder = tmp_path_factory.mktemp("past")
    spec = made_up.sequences(folder / "data", num_rows=200)
    spec = spec.replace(channels={**spec.channels, "context": ()})  # the hour is neither the user's nor the item's
    return trained("din", spec, folder / "run", {"embedding_dim": 4, "hidden": (8,)})


def refused(message: str, call: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(RequestError) as caught:
        call(*given, **named)
    assert message in str(caught.value)
    assert caught.value.status == 400


# --- rank ------------------------------------------------------------------------------------------------------------


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
        assert each.probability == pytest.approx(by_rows[each.index], abs=1e-6)
        assert each.probability == pytest.approx(1 / (1 + np.exp(-each.score)), abs=1e-6)
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
    by_rows = predict(clicks, [{**request, **row} for row in candidates]).probabilities
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
    refused("candidate 1 (candidates[0].item_id) is 18446744073709551615; expected a whole number of 64 bits",
            rank, films, {"user_id": "u1"}, [2**64 - 1])  # fmt: skip


def test_ids_that_files_made_elsewhere_do_not_have_are_refused_by_row(bare: Predictor) -> None:
    assert [each.item for each in rank(bare, {"u": 0}, [5, 0]).items] in ([5, 0], [0, 5])
    assert not rank(bare, {"u": 0}, [0]).unknown_user
    refused("candidates: column 'i': candidate 2 (candidates[1]) is 6; expected an id in [0, 6)",
            rank, bare, {"u": 0}, [5, 6])  # fmt: skip
    refused("rows: column 'i': row 2 (rows[1]) is 6; expected an id in [0, 6)",
            predict, bare, [{"u": 0, "i": 5}, {"u": 0, "i": 6}])  # fmt: skip
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
    assert [each.probability for each in sorted(found.items, key=lambda item: item.index)] == pytest.approx(
        scores.probabilities, abs=1e-6
    )
    assert scores.notes == ("2 of 2 rows have no user_id; they are scored with the id of unknown values",)
    refused("request: no column 'user_id'", rank, past, {}, [1, 2])  # 0 is a real user there


def test_columns_that_are_not_read_are_noted_once_for_request_and_candidates(films: Predictor) -> None:
    found = rank(films, {"user_id": "u1", "why": 1}, [{"item_id": 100, "kinds": "a"}, {"item_id": 101}])
    assert found.notes == ("not read: 'why', 'kinds'",)
    assert rank(films, {"user_id": "u1", "why": 1}, []).notes == ("not read: 'why'",)


# --- recommend -------------------------------------------------------------------------------------------------------


def test_recommendations_are_the_predictors(films: Predictor) -> None:
    (by_hand,) = films.recommend(["u3"], k=4)
    found = recommend(films, "u3", k=4, liked=3)
    assert [(each["rank"], each["item"], each["title"], each["score"]) for each in found["items"]] == [
        (rank, each.item, each.title, each.score) for rank, each in enumerate(by_hand.items, 1)
    ]
    assert not found["unknown_user"]
    assert [each["title"] for each in found["liked"]] == films.liked("u3", k=3)
    assert recommend(films, "u3", k=4)["liked"] == []


def test_seen_items_come_back_on_request(films: Predictor) -> None:
    assert len(recommend(films, "u3", k=100)["items"]) == 30 - 11
    assert len(recommend(films, "u3", k=100, exclude_seen=False)["items"]) == 30


def test_an_unknown_user_gets_the_popular_items_and_a_flag(films: Predictor) -> None:
    found = recommend(films, "nobody", k=3, liked=3)
    assert found["unknown_user"]
    assert found["liked"] == []
    assert [each["item"] for each in found["items"]] == [each.item for each in films.recommend(["?"], k=3)[0].items]
    assert found["notes"] == ["unknown user: these are the 3 most popular items; score is the number of users"]


def test_a_model_that_reads_more_than_users_and_items_can_not_recommend(films: Predictor, clicks: Predictor) -> None:
    assert can_recommend(films)
    assert not can_recommend(clicks)
    refused("this model can't recommend: ", recommend, clicks, 1)


def test_a_model_of_histories_ranks_and_recommends_by_what_it_keeps_of_a_user(past: Predictor) -> None:
    assert can_recommend(past)
    best = recommend(past, 3, k=4)
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


# --- predict ---------------------------------------------------------------------------------------------------------


def test_rows_get_the_predictors_probabilities(films: Predictor) -> None:
    rows = [{"user_id": "u1", "item_id": 100}, {"user_id": "u2", "item_id": "101"}]
    by_hand, _ = films.predict(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 101]}))
    assert predict(films, rows).probabilities == pytest.approx(by_hand.tolist(), rel=1e-5)
    assert predict(films, []).to_dict() == {"probabilities": [], "gaps": {}, "notes": []}


def test_gaps_are_counted_and_noted(films: Predictor) -> None:
    found = predict(films, [{"user_id": "u1", "item_id": 7}, {"user_id": "u2"}, {"item_id": 100, "user_id": "u2"}])
    assert found.to_dict()["gaps"] == {"item_id": {"missing": 1, "unknown": 1}}
    note = "1 of 3 rows has no item_id and 1 an unknown one; they are scored with the id of unknown values"
    assert found.notes == (note,)


def test_a_column_that_nothing_reads_is_noted(films: Predictor) -> None:
    row = {"user_id": "u1", "item_id": 100, "kinds": "a", "label": 1}
    assert predict(films, [row]).notes == ("not read: 'kinds'",)
    refused("rows: no column 'item_id' (did you mean 'item_ids'?)",
            predict, films, [{"user_id": "u1", "item_ids": 100}])  # fmt: skip


# --- rows as a table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2], [1, None, 2]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, 3], [1, 3]),
        (["a", 1, 2.0, 2.5, False, None], ["a", "1", "2", "2.5", "0", None]),
        ([[1, 2], None, []], [[1, 2], [], []]),
        ([["a"], [1]], [["a"], ["1"]]),
        ([None, None], [None, None]),
        ([2**63 - 1, 0.5], [2.0**63, 0.5]),
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
        ([2**63], "row 1 (rows[0].x) is 9223372036854775808; expected a whole number of 64 bits"),
        ([[-(2**63) - 1]], "row 1 (rows[0].x) holds what is -9223372036854775809; expected a whole number of 64 bits"),
    ],
)
def test_values_that_no_column_holds_are_named(values: list[Any], message: str) -> None:
    refused(message, table_of, [{"x": value} for value in values], "rows")


# --- finding ---------------------------------------------------------------------------------------------------------


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


def test_the_id_itself_comes_before_beginnings_of_others(films: Predictor) -> None:
    users = Directory(films, "user")
    assert [each["user"] for each in users.find("u3", 1)] == ["u3"]
    assert {each["user"] for each in users.find("U3", 99)} == {"u3", *(f"u3{number}" for number in range(10))}


def test_usual_requests_are_encoded_value_by_value_with_the_same_answer(
    clicks: Predictor, films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And requests with a gap, a column too many or too few, or rows that differ, are not."""
    request, full = {"user_id": "u3"}, [{"item_id": 100 + item} for item in range(5)]
    assert answers._quickly(films, request, full) is not None
    assert answers._quickly(clicks, request, full) is None, "it reads lists"
    quick = rank(films, request, full, top_k=3)
    with monkeypatch.context() as patched:
        patched.setattr(answers, "_quickly", lambda *_: None)
        slow = rank(films, request, full, top_k=3)
    assert [item.index for item in quick.items] == [item.index for item in slow.items]
    np.testing.assert_allclose([item.score for item in quick.items], [item.score for item in slow.items], rtol=1e-6)
    assert (quick.unknown_user, quick.unknown_items, quick.notes) == (False, (), ()) == (
        slow.unknown_user, slow.unknown_items, slow.notes)  # fmt: skip
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
        assert answers._quickly(films, *unusual) is None
