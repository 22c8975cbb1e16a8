"""Events that a dataset lacks: rows of a request, bundles that hold events, and explanations that name new ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import BundleError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors, write_tensors
from recspec.inference import LiveEvents, Predictor, RecommendRequest, build_pipeline
from recspec.models import UserEvents
from tests.film_runs import film_runs

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ease": {"l2": 5.0},
    "ials": {"factors": 4, "l2": 0.01},
    "wide_deep": {"hidden": (8,), "dropout": 0.0},
    "mult_vae": {"hidden": (8,), "latent": 4},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return film_runs(tmp_path_factory.mktemp("live"), SETTINGS)


def live(*lists: list[int], seen: tuple[list[int], ...] | None = None) -> LiveEvents:
    def events(given: tuple[list[int], ...]) -> UserEvents:
        return UserEvents(np.cumsum([0, *map(len, given)]), np.array([each for own in given for each in own], np.int32))

    return LiveEvents(events(lists), events(lists if seen is None else seen), 7)


def test_rows_of_a_request() -> None:
    whole = live([3, 4], [], [5], seen=([3], [6], []))
    assert whole.has.tolist() == [True, False, True]
    some = whole.of(np.array([2, 0]))
    assert (some.events.items.tolist(), some.seen_by(0).tolist(), some.seen_by(1).tolist()) == ([5, 3, 4], [], [3])
    assert some.newest == 7
    assert whole.of(np.arange(3)) is whole
    nothing = LiveEvents.none(2).of(np.array([1]))
    assert (nothing.has.tolist(), nothing.newest) == ([False], 0)


def test_what_is_seen_is_left_out_though_no_model_reads_it(runs: Mapping[str, Path]) -> None:
    predictor = Predictor.open(runs["ease"], device="cpu")
    (before,) = predictor.recommend(["u3"], k=30)
    best = predictor.catalogues.item_ids([before.items[0].item])
    (after,) = predictor.recommend(["u3"], k=30, live=live([], seen=([int(best[0])],)))
    assert after.items == before.items[1:]
    wanted = RecommendRequest(users=("u3",), k=30, include_seen=True)
    (kept,) = predictor.recommend(wanted, live=live([], seen=([int(best[0])],)))
    assert before.items[0].item in {each.item for each in kept.items}


def test_a_basket_stands_in_place_of_new_events(runs: Mapping[str, Path]) -> None:
    predictor = Predictor.open(runs["ease"], device="cpu")
    asked = RecommendRequest(users=("u3", "nobody"), items=(104,), k=30)
    with_events, without = (predictor.recommend(asked, live=each) for each in (live([9], [9], seen=([], [])), None))
    assert with_events == without
    assert with_events[1].answered_by == "basket"


def test_explanations_name_new_events(runs: Mapping[str, Path]) -> None:
    predictor = Predictor.open(runs["ease"], device="cpu")
    asked = RecommendRequest(users=("nobody",), k=3, explain=True)
    (answer,) = predictor.recommend(asked, live=live([5, 6]))
    named = {reason.item for each in answer.items if each.because is not None for reason in each.because.events}
    assert named
    assert named <= {str(each) for each in predictor.raw_ids("item", np.array([5, 6])).to_pylist()}


def test_models_that_read_an_order_keep_the_events_of_users(runs: Mapping[str, Path]) -> None:
    assert {name: bundle.load(runs[name]).events is not None for name in SETTINGS} == {
        "ease": True,
        "ials": True,
        "wide_deep": False,
        "mult_vae": False,
    }
    found = bundle.load(runs["ials"])
    assert found.events is not None
    assert found.seen is not None
    assert found.events.times is not None
    for user in range(found.seen.num_users):
        own = found.events.of(np.array([user]))
        assert sorted(own.items.tolist()) == found.seen.known_of(user).tolist()
        assert own.times is not None
        assert (np.diff(own.times) >= 0).all()


def test_a_pipeline_keeps_them_once(runs: Mapping[str, Path], tmp_path: Path) -> None:
    build_pipeline(tmp_path / "both", [str(runs["ease"]), str(runs["ials"])], runs["wide_deep"], candidates=8)
    assert [each.parent.name for each in (tmp_path / "both").rglob(bundle.EVENTS)] == ["bundle"]
    ours, theirs = bundle.load(tmp_path / "both").events, bundle.load(runs["ease"]).events
    assert ours is not None
    assert theirs is not None
    np.testing.assert_array_equal(ours.items, theirs.items)


DAMAGE: Mapping[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "without items": ({"items": None}, "lacks 'items'"),
    "another type": (
        {"times": torch.zeros(1, dtype=torch.int8)},
        "'times' is torch.int8 of shape (1,); expected torch.float64",
    ),
    "a strange tensor": ({"more": torch.zeros(2)}, "'more' is torch.float32 of shape (2,); expected no such tensor"),
    "too few users": (
        {"offsets": torch.zeros(2, dtype=torch.int64)},
        "'offsets' holds 2 numbers; expected 42, one more than users",
    ),
    "an unknown item": (
        {"items": torch.full((440,), 99, dtype=torch.int32)},
        "'items' holds ids from 99 to 99; expected 0 to 30",
    ),
    "too few times": (
        {"times": torch.zeros(3, dtype=torch.float64)},
        "'times' holds 3 numbers; expected 440, one for each of 'items'",
    ),
    "no number": (
        {"times": torch.full((440,), torch.nan, dtype=torch.float64)},
        "'times' holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("what", [*DAMAGE])
def test_damaged_events_are_refused(what: str, runs: Mapping[str, Path], tmp_path: Path) -> None:
    changed, message = DAMAGE[what]
    trained = bundle.load(runs["ials"])
    where = bundle.save(tmp_path / "made", trained.model, trained.card, seen=trained.seen, events=trained.events)
    file = where / bundle.EVENTS
    tensors = {**read_tensors(file)[0], **changed}
    write_tensors(file, {name: each for name, each in tensors.items() if each is not None}, {"format": 1})
    manifest.write(where)
    with pytest.raises(BundleError) as caught:
        _ = bundle.load(where).events
    assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize("model", SETTINGS)
def test_a_model_that_is_closed_leaves_memory_without_a_collection(runs: Mapping[str, Path], model: str) -> None:
    """A server freezes its heap, so cycles of references would keep each replaced version."""
    predictor = Predictor.open(runs[model], device="cpu")
    predictor.recommend(["u3"], k=3)
    kept = weakref.ref(predictor.model)
    gc.disable()
    try:
        del predictor
        assert kept() is None
    finally:
        gc.enable()
