"""Dislikes of your own table: rows of a low rating, or of a type such as hide, which are no interactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.base.errors import SettingsError
from recspec.data.encoding import Vocabulary
from recspec.data.storage import check, open_split, read_seen
from recspec.datasets.table_settings import Settings
from recspec.evaluation import disliked_items, positives
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import prepare_text

RATED = "user_id,item_id,timestamp,stars\n" + "".join(
    f"{user},{item},{1_700_000_000 + day * 86_400},{stars}\n"
    for user, item, day, stars in [
        ("ann", "a", 0, 5),
        ("ann", "b", 1, 2),
        ("ann", "c", 2, 4),
        ("ann", "d", 3, 3),
        ("ann", "e", 4, 5),
        ("ann", "a2", 5, 1),  # known to test alone: valid's row, of day 4, comes before it
        ("ann", "b2", 6, 4),
        ("bob", "a", 0, 4),
        ("bob", "a2", 1, 5),
        ("bob", "b", 2, 5),
        ("bob", "b2", 3, 4),
        ("bob", "d", 4, 4),
        ("bob", "f", -1, 4),  # else ann would have acted on every item
    ]
)
STARS = {"rating": "stars", "min_rating": 4, "dislike_below": 3, "num_negatives": 0}

EVENTS = "user_id,item_id,timestamp,kind\n" + "".join(
    f"{user},{item},{1_700_000_000 + day * 86_400},{kind}\n"
    for user, item, day, kind in [
        ("ann", "a", 0, "view"),
        ("ann", "b", 1, "hide"),
        ("ann", "c", 2, "view"),
        ("ann", "d", 3, "buy"),
        ("ann", "e", 4, "view"),
        ("bob", "b", 0, "buy"),
        ("bob", "e", 0, "hide"),
        ("bob", "e", 1, "view"),  # whom it pleased later
    ]
)


def pairs(spec: FeatureSpec, *splits: str, named: str = "dislikes") -> set[tuple[str, str]]:
    """Raw users and items that splits know of."""
    found = read_seen(spec, splits, named)  # type: ignore[arg-type]
    assert found is not None
    users, items = (
        Vocabulary.load(spec.folder / "vocabularies" / f"{name}.parquet").decode(ids)
        for name, ids in zip(("user_id", "item_id"), found, strict=True)
    )
    return {*zip(users.to_pylist(), items.to_pylist(), strict=True)}


def test_low_ratings_are_dislikes_of_the_split_that_knows_them_first(tmp_path: Path) -> None:
    spec = prepare_text(tmp_path, RATED, **STARS).spec
    check.check(spec)
    assert spec.metadata["dislikes"] == "dislikes.parquet"
    assert pairs(spec, "train") == {("ann", "b")}  # 3 stars are neither
    assert pairs(spec, "valid") == {("ann", "a2")}
    assert pairs(spec, "test") == set()
    assert pairs(spec, "train", named="seen") >= {("ann", "b"), ("ann", "d")}, "they are not recommended again"
    rows = sum(open_split(spec, split, ("item_id",)).num_rows for split in spec.splits)
    assert rows == 10, "dislikes are no interactions"


def test_types_of_events_may_be_dislikes(tmp_path: Path) -> None:
    spec = prepare_text(tmp_path, EVENTS, event="kind", dislikes="hide", num_negatives=0).spec
    assert pairs(spec, "train", "valid", "test") == {("ann", "b"), ("bob", "e")}
    found = disliked_items(spec, spec.splits, positives(spec, spec.splits))
    assert found is not None
    assert found.num_pairs == 1, "bob acted on e later"


def test_dislikes_count_as_seen_whatever_types_do(tmp_path: Path) -> None:
    asked = {"event": "kind", "dislikes": "hide", "seen": "buy", "num_negatives": 0}
    spec = prepare_text(tmp_path, EVENTS, **asked).spec
    assert pairs(spec, *spec.splits, named="seen") == {("ann", "b"), ("ann", "d"), ("bob", "b"), ("bob", "e")}


def test_without_the_settings_nothing_is_kept(tmp_path: Path) -> None:
    spec = prepare_text(tmp_path, RATED, rating="stars", min_rating=4, num_negatives=0).spec
    assert read_seen(spec, named="dislikes") is None
    assert disliked_items(spec, ("train",), positives(spec, ("train",))) is None


def test_rows_of_ratings_without_a_threshold_are_interactions_from_the_dislikes_on(tmp_path: Path) -> None:
    text = RATED.replace(",5\n", ",120\n")  # no scale of ratings
    asked = {"rating": "stars", "dislike_below": 3, "num_negatives": 0}
    spec = prepare_text(tmp_path, text, **asked).spec
    assert sum(open_split(spec, split, ("item_id",)).num_rows for split in spec.splits) == 11


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({**STARS, "dislike_below": 5}, r"dislike_below 5 is above min_rating 4, .* take a lower one"),
        ({"dislikes": ["hide"]}, "dislikes names types of events; name their column with event"),
        ({"rating": None, "dislike_below": 3}, "dislike_below needs the column of the rating"),
        ({"label": "x", "dislikes": ["hide"], "event": "kind"}, "dislikes: of rows without a label"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings.model_validate(settings)


def test_dislikes_that_no_row_is_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no row has 'stars' below 1\.0; name another rating or type"):
        prepare_text(tmp_path, RATED, **{**STARS, "dislike_below": 1})
    with pytest.raises(SettingsError, match="no row has 'skip' in 'kind'; name another rating or type"):
        prepare_text(tmp_path, EVENTS, event="kind", dislikes="skip")
    above = {"rating": "stars", "dislike_below": 4.5, "num_negatives": 0}
    with pytest.raises(SettingsError, match=r"dislike_below': is 4\.5, and 'stars' from 4 on is an interaction"):
        prepare_text(tmp_path, RATED, out="above", **above)
