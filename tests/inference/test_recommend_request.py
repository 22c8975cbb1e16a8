"""Filters, baskets, contexts, boosts, variety and explanations of recommendations, and items like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import RequestError
from recspec.inference import filters, ranking, raw_columns
from recspec.inference.answer_files import recommend_to_file
from recspec.inference.filters import Test, TestedColumn
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import Boost, Recommendation, RecommendRequest, note_of_unknown_users
from recspec.inference.requests import rank, recommend
from recspec.models import Traits


def ask(predictor: Predictor, *users: str | int, **named: Any) -> Recommendation:
    (answer,) = predictor.recommend(RecommendRequest(users=users, **named))
    return answer


def items(answer: Recommendation) -> list[Any]:
    return [each.item for each in answer.items]


def kinds(predictor: Predictor) -> dict[str, str]:
    """The kind of each item by raw id."""
    column = predictor.recommender.chooser.raw
    return dict(zip(column.column("item_id").to_pylist(), column.column("kind").to_pylist(), strict=True))


def problems(call: Callable[..., object], *given: Any, **named: Any) -> str:
    with pytest.raises(RequestError) as caught:
        call(*given, **named)
    return str(caught.value)


# --- filters, excluded items, boosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["films", "ease", "knn", "ials", "sequential"])
def test_filters_and_excluded_items_leave_out_the_others_and_keep_the_order(
    name: str, request: pytest.FixtureRequest
) -> None:
    predictor = request.getfixturevalue(name)
    kind = kinds(predictor)
    every = ask(predictor, "u3", k=100)
    chosen = ask(predictor, "u3", k=100, filter="kind == 'a'", exclude=(items(every)[0], "zz", "zz"))
    assert items(chosen) == [item for item in items(every)[1:] if kind[item] == "a"]
    assert chosen.notes[0] == f"only {len(chosen.items)} unseen items are left by filter and exclude"
    assert chosen.notes[1] == "excluded: 2 of 3 items are unknown: 'zz', 'zz'"


def test_a_filter_of_everything_leaves_nothing(films: Predictor) -> None:
    for user in ("u3", "nobody"):
        assert items(ask(films, user, filter="kind == 'none'")) == []
    assert ask(films, "u3", k=3, filter="kind == 'none'").notes == ("no unseen item passes the filter",)
    assert ask(films, "u3", k=3, filter="kind == 'none'", include_seen=True).notes == ("no item passes the filter",)
    assert ask(films, "nobody", k=3, filter="kind == 'none'").notes == ("no unseen item passes the filter",)
    assert films.similar("105", filter="kind == 'none'").notes == ("no item passes the filter",)


def test_masks_of_filters_are_kept_by_their_text(films: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(films, "u3", filter="kind == 'b'")
    monkeypatch.setattr(films.recommender.chooser, "raw", None)
    assert ask(films, "u3", filter="kind == 'b'").items
    assert len(films.recommender.chooser._masks) <= 32


def test_a_boost_adds_spreads_of_the_users_scores(ease: Predictor) -> None:
    kind = kinds(ease)
    plain = {each.item: each.score for each in ask(ease, "u3", k=100).items}
    spread = np.std(list(plain.values()))
    found = ask(ease, "u3", k=100, boosts=("kind == 'a': 1.5", "kind is not missing: -0.5"))
    for each in found.items:
        added = spread * ((kind[str(each.item)] == "a") * 1.5 - 0.5)
        assert each.boost == pytest.approx(added, abs=1e-5)
        assert each.score == pytest.approx(plain[str(each.item)] + added, abs=1e-5)
    assert [each.score for each in found.items] == sorted((each.score for each in found.items), reverse=True)
    assert "boost" not in ask(ease, "u3", k=1).items[0].to_dict()


def test_boosts_are_an_expression_and_a_weight() -> None:
    assert Boost.parse("name == 'a: b' : -1e1") == Boost("name == 'a: b'", -10.0)
    for text in ("", "is_new", "is_new:", ": 1", "is_new: x", "is_new: nan", "is_new: 101"):
        assert "expected EXPRESSION: WEIGHT with a weight from -100 to 100" in problems(Boost.parse, text)


# --- who is answered by what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ease", "knn", "ials", "sequential"])
def test_a_basket_is_answered_like_a_user_with_this_history(name: str, request: pytest.FixtureRequest) -> None:
    predictor = request.getfixturevalue(name)
    answer = ask(predictor, items=("105", "119", "zz"), k=4)
    assert (answer.user, answer.known, answer.answered_by) == (None, False, "basket")
    assert answer.notes == ("basket: 1 of 3 items are unknown: 'zz'",)
    assert not {"105", "119"} & set(items(answer))
    assert {"105", "119"} < set(items(ask(predictor, items=("105", "119"), k=30, include_seen=True)))
    nobody = ask(predictor, "nobody", items=("105", "119"), k=4)
    assert (nobody.items, nobody.answered_by) == (answer.items, "basket")
    assert nobody.notes == ("unknown user: answered by the basket",)


def test_a_basket_of_the_users_own_items_gives_the_users_scores(
    films: Predictor, ease: Predictor, knn: Predictor
) -> None:
    for predictor in (ease, knn):
        rows = [
            line.split(",") for line in (films.bundle.folder.parent.parent / "raw" / "rows.csv").read_text().split()
        ]
        *basket, held_out = (item for _, item, _ in sorted((r for r in rows if r[0] == "u3"), key=lambda r: int(r[2])))
        assert len(basket) == len(predictor.recommender.seen.known_of(int(predictor.catalogues.user_ids(["u3"])[0])))
        assert [(each.item, pytest.approx(each.score, abs=1e-5)) for each in ask(predictor, "u3", k=5).items] == [
            (each.item, each.score) for each in ask(predictor, items=tuple(basket), exclude=(held_out,), k=5).items
        ]


def test_a_basket_is_the_history_of_a_model_that_reads_one(sequential: Predictor) -> None:
    best = ask(sequential, items=("105", "119"), k=3)
    ranked = rank(sequential, {"history_item_id": ["105", "119"]}, items(best))
    assert [each.item for each in ranked.items] == items(best)
    assert [each.score for each in ranked.items] == pytest.approx([each.score for each in best.items], abs=1e-5)
    assert ask(sequential, "u3", items=("105", "119"), k=3).answered_by == "basket"


def test_a_model_without_histories_answers_baskets_by_vectors_and_says_so(films: Predictor) -> None:
    answer = ask(films, items=("105", "119"), k=3)
    assert answer.answered_by == "basket_vectors"
    assert answer.notes == (
        "these are the items nearest to the basket by the model's vectors; score is the mean cosine",
    )
    known = ask(films, "u3", items=("105",), k=3)
    assert known.answered_by == "user"
    assert known.notes == ("basket: the model can't rank by it, so its items are only left out",)


def test_an_unknown_basket_falls_back_to_popularity(ease: Predictor) -> None:
    answer = ask(ease, items=("zz",), k=3)
    assert answer.answered_by == "popularity"
    assert items(answer) == items(ask(ease, "nobody", k=3))
    assert "these are the 3 most popular items; score is the number of users" in answer.notes


def test_a_model_with_context_recommends_once_it_is_given(clicks: Predictor) -> None:
    user = clicks.busiest_user()
    assert problems(ask, clicks, user) == (
        "recommend: context: the model reads 'hour', 'speed', which differ from request to request; "
        "give a value of each"
    )
    found = problems(ask, clicks, user, context={"hour": 3, "sped": 1}, filter="pric < 3")
    assert found.splitlines()[1:] == [
        "  - context: the model reads 'speed', which differ from request to request; give a value of each",
        "  - context: the model reads no 'sped' (did you mean 'speed'?); it reads 'age', 'gender', 'hour', 'speed'",
        f"  - filter: character 1: no column 'pric' (did you mean 'price'?); {columns(clicks)}",
    ]
    answer = ask(clicks, user, context={"hour": 3, "speed": 0.5}, k=4)
    assert (answer.known, answer.answered_by) == (True, "user")
    ranked = rank(clicks, {"user_id": user, "hour": 3, "speed": 0.5}, items(answer))
    assert [each.item for each in ranked.items] == items(answer)
    assert [each.score for each in ranked.items] == pytest.approx([each.score for each in answer.items], abs=1e-5)


def columns(predictor: Predictor) -> str:
    names = ", ".join(f"'{name}'" for name in predictor.recommender.chooser.raw.columns)
    return f"columns of the catalogue: {names}"


def test_an_unknown_user_is_answered_by_the_context(clicks: Predictor) -> None:
    context = {"hour": 3, "speed": 0.5, "age": 30.0}
    answer = ask(clicks, 10**9, context=context, k=4)
    if clicks.users.first_id:
        assert (answer.answered_by, answer.notes[0]) == ("context", "unknown user: answered by the context")
    else:  # 0 is a real user there, so nothing stands for unknown ones
        assert answer.answered_by == "popularity"
    older, user = {**context, "age": 80.0}, clicks.busiest_user()
    assert ask(clicks, user, context=context, k=4).items != ask(clicks, user, context=older, k=4).items


def test_values_of_a_context_that_can_not_be_read_are_refused(clicks: Predictor) -> None:
    found = problems(ask, clicks, 1, context={"hour": {"a": 1}, "speed": 0.5})
    assert found == "recommend: context.hour is an object; expected a text, number, boolean or null"
    assert "is the user's id; name the user instead" in problems(ask, clicks, 1, context={"user_id": 1, "hour": 1})


def test_nothing_to_answer(films: Predictor) -> None:
    assert films.recommend(RecommendRequest()) == []
    assert problems(recommend, films, RecommendRequest()) == "recommend: name a user, a basket of items or a context"


# --- variety ---------------------------------------------------------------------------------------------------------


def test_variety_by_a_column_takes_turns(ease: Predictor) -> None:
    kind = kinds(ease)
    plain, varied = ask(ease, "u3", k=4), ask(ease, "u3", k=4, diversity=0.9, diverse_by="kind")
    assert items(plain)[0] == items(varied)[0]
    assert len({kind[item] for item in items(varied)[:3]}) == 3
    assert ask(ease, "u3", k=4, diversity=0.0).items == plain.items
    assert problems(ask, ease, "u3", diversity=0.5) == (
        "recommend: diversity: the model has no vectors of items; name a column of the catalogue to be diverse by"
    )


def test_more_variety_lowers_the_likeness_of_a_list(ials: Predictor) -> None:
    vectors = ials.recommender.vectors
    assert vectors is not None

    def likeness(diversity: float) -> float:
        ids = torch.from_numpy(ials.catalogues.item_ids(items(ask(ials, "u3", k=5, diversity=diversity))))
        return float((vectors[ids] @ vectors[ids].T).mean())

    assert likeness(0.0) > likeness(0.5) >= likeness(1.0)


@pytest.mark.parametrize("name", ["films", "ease", "ials", "sequential"])
@pytest.mark.parametrize("most", [1, 2])
def test_at_most_some_items_share_a_value_and_the_order_stays(
    name: str, most: int, request: pytest.FixtureRequest
) -> None:
    predictor = request.getfixturevalue(name)
    kind, counts, expected = kinds(predictor), dict[str, int](), []
    for user in ("u3", "nobody"):
        counts.clear()
        expected.clear()
        for item in items(ask(predictor, user, k=100)):
            counts[kind[item]] = counts.get(kind[item], 0) + 1
            if kind[item] is None or counts[kind[item]] <= most:
                expected.append(item)
        assert items(ask(predictor, user, k=100, at_most=f"kind:{most}")) == expected
        assert 0 < len(expected) < len(items(ask(predictor, user, k=100)))
    varied = items(ask(predictor, "u3", k=3, at_most="kind: 1", diversity=0.5, diverse_by="kind"))
    assert len({kind[item] for item in varied}) == len(varied)


def test_a_cap_leaves_items_without_a_value_and_keeps_the_first_of_equal_scores() -> None:
    scores = torch.tensor([[3.0, 5.0, 5.0, 1.0, 4.0, -torch.inf], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    ids = torch.arange(1, 7).expand(2, -1)
    codes = np.array([-1, 0, 0, 0, -1, 1, -1])  # of id 0, which is nobody's, then of ids 1 to 6
    left = ranking._capped(scores, ids, codes, 1).isfinite()
    assert left.tolist() == [[False, True, False, True, True, False], [False, False, True, True, True, True]]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("kind", "at_most is 'kind'; expected COLUMN:N with N from 1 on, as in 'category:2'"),
        ("kind:0", "at_most is 'kind:0'; expected"),
        (":2", "at_most is ':2'; expected"),
        ("kind:-1", "at_most is 'kind:-1'; expected"),
        ("kind:" + "9" * 5000, "expected COLUMN:N"),
        ("knid:2", "at_most: no column 'knid' (did you mean 'kind'?)"),
    ],
)
def test_a_cap_that_can_not_be_read_is_refused(films: Predictor, asked: str, said: str) -> None:
    assert said in problems(ask, films, "u3", at_most=asked)


def test_a_cap_is_of_single_values(clicks: Predictor) -> None:
    said = problems(ask, clicks, clicks.busiest_user(), at_most="tags:2")
    assert "at_most: column 'tags' holds lists; expected one value an item" in said


# --- explanations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ease", "knn"])
def test_shares_of_the_history_sum_to_the_score(name: str, request: pytest.FixtureRequest) -> None:
    predictor = request.getfixturevalue(name)
    for boosts in ((), ("kind == 'a': 2",)):
        for each in ask(predictor, "u3", k=5, explain=True, boosts=boosts).items:
            assert each.because is not None
            assert each.because.kind == "shares"
            assert each.because.rest is not None
            total = sum(event.value for event in each.because.events) + each.because.rest + (each.boost or 0.0)
            assert total == pytest.approx(each.score, abs=2e-6)
            values = [event.value for event in each.because.events]
            assert values == sorted(values, reverse=True)
            assert min(values) > 0


def test_the_share_of_an_event_is_its_weight_for_the_item(knn: Predictor) -> None:
    """The score of a basket of two is the sum of those of the two alone."""
    best = ask(knn, items=("105", "107"), k=1, explain=True).items[0]
    assert best.because is not None
    line = knn.model.line.tolist()  # type: ignore[union-attr]
    for event in (each for each in best.because.events if each.item == "107"):  # the latest
        alone = {each.item: each.score for each in ask(knn, items=(event.item,), k=30, include_seen=True).items}
        assert event.value == pytest.approx(alone[best.item] - line[1], abs=1e-5)
    assert {event.item for event in best.because.events} == {"105", "107"}
    assert best.because.rest == pytest.approx(line[1], abs=1e-5)


@pytest.mark.parametrize("name", ["films", "ials", "sequential"])
def test_other_models_name_the_nearest_events(name: str, request: pytest.FixtureRequest) -> None:
    predictor = request.getfixturevalue(name)
    seen = predictor.recommender.seen.of(int(predictor.catalogues.user_ids(["u3"])[0])).numpy()
    if name == "sequential":  # prepared histories
        seen = predictor.users.lists_of("history_item_id", predictor.catalogues.user_ids(["u3"])).values
    history = set(predictor.catalogues.raw_ids("item", seen.astype(np.int64)).to_pylist())
    for each in ask(predictor, "u3", k=3, explain=True).items:
        assert each.because is not None
        assert (each.because.kind, each.because.rest) == ("nearest", None)
        assert {event.item for event in each.because.events} <= history
        assert all(0 < event.value <= 1.00001 for event in each.because.events)
    nobody = ask(predictor, "nobody", k=1, explain=True)
    assert nobody.items[0].because is None
    assert nobody.notes[1].startswith("no explanation: there is no history")


def test_unknown_users_are_said_to_be_answered_by_what_they_are(
    ease: Predictor, films: Predictor, clicks: Predictor
) -> None:
    for predictor, wanted in (
        (ease, RecommendRequest(k=2)),
        (ease, RecommendRequest(k=2, items=("105",))),
        (films, RecommendRequest(k=2, items=("105",))),
        (clicks, RecommendRequest(k=2, context={"hour": 3, "speed": 0.5})),
    ):
        (answer,) = predictor.recommend(replace(wanted, users=("nobody" if predictor is not clicks else 10**9,)))
        assert predictor.recommender.fallback_for_unknown_users(wanted) == answer.answered_by
    assert note_of_unknown_users(1, "popularity") == "1 of them is unknown, and gets the most popular items"
    assert note_of_unknown_users(2, "context") == "2 of them are unknown, and are answered by the context"
    assert note_of_unknown_users(2, "basket_vectors") == (
        "2 of them are unknown, and get the items nearest to the basket"
    )


# --- items like one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "by"), [("films", "vectors"), ("ials", "vectors"), ("ease", "scores"), ("knn", "scores")]
)
def test_items_like_one(name: str, by: str, request: pytest.FixtureRequest) -> None:
    predictor = request.getfixturevalue(name)
    kind = kinds(predictor)
    every = predictor.similar("105", k=100)
    assert (every.item, every.title, every.by) == ("105", "Item, number 105", by)
    assert len(every.items) == len({each.item for each in every.items}) == 29
    assert "105" not in {each.item for each in every.items}
    scores = [each.score for each in every.items]
    assert scores == sorted(scores, reverse=True)
    chosen = predictor.similar("105", k=2, filter="kind == 'b'", exclude=[every.items[0].item])
    assert [each.item for each in chosen.items] == [
        each.item for each in every.items[1:] if kind[str(each.item)] == "b"
    ][:2]


def test_items_like_one_that_the_model_cannot_tell_apart_are_said_to_be(ease: Predictor) -> None:
    known = ease.similar("105", k=3)
    assert known.notes == ()
    weights = ease.model.weights.weight  # type: ignore[union-attr]
    (item,) = ease.catalogues.item_ids(["105"])
    before = weights.clone()
    try:
        with torch.no_grad():
            weights[item] = 0
        found = ease.similar("105", k=2)
        assert [each.score for each in found.items] == [0.0, 0.0]
        assert found.notes == (
            "the model knows no items like it: it scores all 29 items alike, and these are the first by id",
        )
        with torch.no_grad():
            weights[item, int(ease.catalogues.item_ids([known.items[0].item])[0])] = 1
        found = ease.similar("105", k=3)
        assert found.items[0].item == known.items[0].item
        assert found.notes == ("the last 2 are no more like it than 26 others, and stand here by their ids",)
    finally:
        with torch.no_grad():
            weights.copy_(before)


def test_items_like_one_without_interactions_are_said_to_be_little_known(
    ease: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = ease.recommender.chooser
    scorable = chooser.scorable.copy()
    scorable[ease.catalogues.item_ids(["105"])] = False
    monkeypatch.setattr(chooser, "scorable", scorable)
    assert ease.similar("105", k=3).notes == (
        "item '105' has no interactions that the model was trained on, so the model knows little of what is like it",
    )


def test_an_unknown_item_is_like_none(films: Predictor) -> None:
    assert problems(films.similar, "zz", filter="kin == 1").splitlines() == [
        "similar: 2 problems",
        f"  - filter: character 1: no column 'kin' (did you mean 'kind'?); {columns(films)}",
        "  - no item 'zz' in the catalogue of the model",
    ]


# --- promises of every request ---------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once_and_before_any_work(films: Predictor) -> None:
    found = problems(
        ask, films, "u3", k=0, diversity=2.0, boosts=("a: 1",) * 21, exclude=("x" * 1001,), diverse_by="kind"
    )
    assert found.splitlines() == [
        "recommend: 4 problems",
        "  - boosts holds 21 entries; expected at most 20",
        "  - diversity is 2.0; expected a number from 0 to 1",
        "  - exclude holds a text of more than 1,000 characters",
        "  - k is 0; expected a whole number from 1 to 10,000",
    ]
    for wanted, told in (
        (RecommendRequest(k=20_000), "k is 20000"),
        (RecommendRequest(k=201, diversity=0.5), "k is 201; expected at most 200 with diversity"),
        (RecommendRequest(k=101, explain=True), "k is 101; expected at most 100 with explanations"),
        (RecommendRequest(boosts=("a" * 10_001,)), "boosts hold 10,001 characters; expected at most 10,000 together"),
        (RecommendRequest(items=("a",) * 1001), "items holds 1,001 entries"),
        (RecommendRequest(exclude=("a",) * 10_001), "exclude holds 10,001 entries"),
        (RecommendRequest(context={str(each): 1 for each in range(1001)}), "context holds 1,001 entries"),
        (RecommendRequest(diversity=float("nan")), "diversity is nan"),
        (RecommendRequest(diverse_by="kind"), "diverse_by needs a diversity above 0"),
        (RecommendRequest(filter="a" * 10_001), "the filter has 10,001 characters"),
    ):
        assert told in problems(films.recommend, wanted)
    wrong = {"filter": "kind == 'a' and", "boosts": ("x", "knd: 1"), "context": {"a": 1}, "diverse_by": "tags"}
    found = problems(ask, films, "u3", diversity=0.1, **wrong)
    assert [line[4:].split(":")[0] for line in found.splitlines()[1:]] == [
        "boost 'x'",
        "boost",
        "context",
        "diverse_by",
        "filter, character 16",
    ]


@pytest.mark.parametrize("name", ["films", "bare", "ease", "knn", "ials", "sequential", "past", "clicks"])
def test_promises_of_generated_requests(name: str, request: pytest.FixtureRequest) -> None:
    """No item twice, none excluded, seen, of the basket or against the filter; ordered; as many as there are."""
    predictor: Predictor = request.getfixturevalue(name)
    draw = np.random.default_rng(5)
    first, count = predictor.items.first_id, len(predictor.items)
    every = predictor.raw_ids("item", np.arange(first, first + count)).to_pylist()
    users = predictor.raw_ids(
        "user", np.arange(predictor.users.first_id, predictor.recommender.seen.num_users)
    ).to_pylist()
    acted = {item for item in np.flatnonzero(predictor.recommender.seen.counts.numpy()).tolist() if item >= first}
    context = {"hour": 1, "speed": 0.5} if name == "clicks" else {}
    has_vectors = predictor.recommender.vectors is not None
    for _ in range(25):
        chosen = [users[draw.integers(len(users))], "nobody"][: draw.integers(0, 3)]
        exclude = [*draw.choice(every, draw.integers(0, count)).tolist(), "none such"][: draw.integers(0, count)]
        basket = draw.choice(every, draw.integers(0, 6)).tolist()
        wanted = RecommendRequest(
            users=tuple(chosen),
            items=tuple(basket),
            context=context,
            exclude=tuple(exclude),
            k=int(draw.integers(1, min(100, 2 * count))),
            include_seen=bool(draw.integers(2)),
            filter=f"{predictor.spec.item_id} != '{every[3]}'" if isinstance(every[3], str) else None,
            diversity=float(draw.choice([0.0, 0.3, 1.0])) if has_vectors else 0.0,
            explain=bool(draw.integers(2)),
        )
        answers = predictor.recommend(wanted)
        assert len(answers) == (len(chosen) or int(wanted.is_anonymous))
        for answer in answers:
            found = items(answer)
            assert len(found) == len(set(found))
            left = acted - set(predictor.catalogues.item_ids(exclude).tolist())
            if wanted.filter:
                left.discard(first + 3)
            if not wanted.include_seen:
                left -= set(predictor.catalogues.item_ids(basket).tolist())
                if answer.known:
                    number = int(predictor.catalogues.user_ids([str(answer.user)])[0])
                    left -= set(predictor.recommender.seen.of(number).tolist())
            assert set(predictor.catalogues.item_ids(found).tolist()) <= left
            assert len(found) == min(wanted.k, len(left))
            scores = [each.score for each in answer.items]
            if not wanted.diversity:
                assert scores == sorted(scores, reverse=True)
            assert answer.to_dict()["answered_by"] == answer.answered_by


def test_equal_scores_go_by_id_under_a_filter(films: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.zeros(1, len(films.items))
    scores[0, -1] = -1.0
    monkeypatch.setattr(films.model, "side_scores", lambda *_: scores.clone())
    kind = kinds(films)
    expected = [item for item in sorted(kind) if kind[item] == "b"]
    assert items(ask(films, "u3", k=4, include_seen=True, filter="kind == 'b'")) == expected[:4]
    assert items(ask(films, "u3", k=4, include_seen=True, filter="kind == 'b'", exclude=(expected[1],))) == [
        expected[0],
        *expected[2:5],
    ]


def test_items_that_nobody_acted_on_come_from_models_that_score_them(
    films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = ask(films, "u3", k=1).items[0].item
    seen = films.recommender.seen
    counts = seen.counts.clone()
    counts[int(films.catalogues.item_ids([item])[0])] = 0
    bundle = replace(films.bundle, seen=replace(seen, counts=counts))
    new = Predictor(bundle, films.device)
    assert ask(new, "u3", k=1).items[0].item != item
    short = ask(new, "u3", k=100)
    assert "1 item without interactions is left out, because the model knows nothing of it" in short.notes
    monkeypatch.setattr(type(films.model), "traits", Traits(scores_unseen_items=True))
    assert ask(Predictor(bundle, films.device), "u3", k=1).items[0].item == item


def test_files_hold_what_the_request_asks_for(ease: Predictor, tmp_path: Path) -> None:
    wanted = RecommendRequest(k=3, filter="kind == 'a'", exclude=("101",), boosts=("kind == 'a': 1",))
    recommend_to_file(ease, ["u3", "nobody"], tmp_path / "some.parquet", wanted)
    rows = pq.read_table(tmp_path / "some.parquet").to_pylist()
    answers = ease.recommend(replace(wanted, users=("u3", "nobody")))
    assert [(row["user"], row["item"]) for row in rows] == [
        (answer.user, each.item) for answer in answers for each in answer.items
    ]


# --- work ------------------------------------------------------------------------------------------------------------


def parts(first: int, count: int) -> str:
    return " or ".join(f"title contains '{number}'" for number in range(first, first + count))


def test_tests_times_items_are_bounded_before_any_test_is_made(
    films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    evaluate = raw_columns.evaluate
    monkeypatch.setattr(raw_columns, "evaluate", lambda *asked: [made.append(asked[0].text), evaluate(*asked)][1])
    monkeypatch.setattr(filters, "MOST_TESTED", 40 * 30)
    many = {"filter": parts(100, 20), "boosts": (f"{parts(200, 11)}: 1", f"{parts(300, 10)}: 1")}
    told = problems(ask, films, "u3", **many)
    assert "filter and boosts: 41 tests of 30 items cost 1,230; expected at most 1,200, so about 40 such tests" in told
    assert "join those of equal values as `COLUMN in (VALUE, ...)`, or send fewer" in told
    wanted = RecommendRequest(items=("105",), filter=parts(100, 41))
    assert "41 tests of 30 items cost 1,230; expected at most" in problems(films.similar, wanted)
    assert not made
    ask(films, "u3", filter=parts(100, 20))
    assert len(made) == 1
    ask(films, "u3", **many)  # the first mask is kept, and costs nothing
    assert len(made) == 3
    monkeypatch.setattr(filters, "MOST_TESTED", 0)
    ask(films, "u3", filter=parts(500, 8))  # a few tests are made whatever the number of items


def test_long_texts_and_lists_cost_more_than_their_items() -> None:
    cost = {
        "numbers": TestedColumn(pa.array(range(100))).cost,
        "texts": TestedColumn(pa.array(["a" * 320] * 100)).cost,
        "lists": TestedColumn(pa.array([[*range(80)]] * 100, pa.list_(pa.int32()))).cost,
    }
    assert cost["numbers"] == 100
    assert cost["texts"] == pytest.approx(10 * 100, rel=0.05)
    assert cost["lists"] == pytest.approx(10 * 100, rel=0.05)


def test_no_further_test_is_made_once_the_time_for_the_answer_is_over(
    films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    answer, now = filters._answer, [0.0]

    def slow(test: Test, *rest: object) -> object:
        made.append(test.column)
        now[0] += 1
        return answer(test, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(filters, "_answer", slow)
    monkeypatch.setattr(filters, "time", SimpleNamespace(monotonic=lambda: now[0]))
    late = RecommendRequest(users=("u3",), filter=parts(600, 6), boosts=(f"{parts(700, 2)}: 1",), until=2.5)
    assert "the time for the answer was over before every item was tested" in problems(films.recommend, late)
    assert len(made) == 3
