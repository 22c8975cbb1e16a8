"""Which events of the journal a dataset lacks, how they count, and what is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recspec.base.errors import BundleError, DataError
from recspec.bundle import Card
from recspec.bundle import folder as bundle
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.datasets.table_rows import event_rules
from recspec.feature_spec import FeatureSpec
from recspec.inference import LiveEvents, Predictor
from recspec.loop import Event, Histories, Journal
from recspec.loop.histories import EventRules
from recspec.models import MODELS, FittedItemModel
from recspec.training.result import inform, seen_of

START = 1_700_000_000
ROWS = [
    ("ann", "i1", 0, "view", 5),
    ("ann", "i2", 10, "cart", 4),
    ("bob", "i2", 20, "purchase", 5),
    ("bob", "i3", 30, "view", 2),
    ("cid", "i1", 40, "cart", 3),
    ("cid", "i4", 50, "purchase", 5),
    ("cid", "i5", 60, "view", 4),
    ("bob", "i5", 61, "view", 4),
]
"""User, item, seconds from `START`, type and rating; the newest event is at 61."""


def opened(
    folder: Path, *, start: int = START, metadata: dict[str, object] | None = None, **settings: Any
) -> Predictor:
    """Item-kNN on `ROWS`."""
    folder.mkdir(exist_ok=True)
    lines = [f"{user},{item},{start + time},{kind},{stars}" for user, item, time, kind, stars in ROWS]
    (folder / "rows.csv").write_text("\n".join(["user_id,item_id,timestamp,type,stars", *lines]) + "\n")
    table = DATASETS["table"]
    given = {"split": "none", "rating": None, **settings}
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data", threads=1), table.Settings.model_validate(given))
    spec = FeatureSpec.load(folder / "data")
    spec = spec.replace(metadata={**spec.metadata, **(metadata or {})})
    model = MODELS["item_knn"](spec, MODELS["item_knn"].Settings.model_validate({"k": 2}))
    assert isinstance(model, FittedItemModel)
    known = inform(model, spec)
    assert known is not None
    model.fit(known)
    card = Card(model="item_knn", settings=model.settings.model_dump(mode="json"))
    where = bundle.save(folder / "bundle", model.eval(), card, seen=seen_of(spec, known), events=known.order)
    return Predictor.open(where, device="cpu")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return opened(tmp_path_factory.mktemp("shop"))


def event(user: str, item: str | None, time: float, kind: str = "view", value: float | None = None) -> Event:
    at = int((START + time) * 1_000_000)
    return Event(f"{user} {item} {time} {kind} {value}", user, kind, item, value, at, at)


def journal_of(url: str, *events: Event) -> Journal:
    made = Journal(url)
    made.store(events)
    return made


def lists(predictor: Predictor, live: LiveEvents, row: int = 0) -> tuple[list[str], list[str]]:
    """Raw ids of what a model reads of a user, and of what counts as seen."""
    own = live.of(np.array([row]))
    read, seen = (predictor.raw_ids("item", each.items.astype(np.int64)).to_pylist() for each in (own.events, own.seen))
    return read, seen


def test_only_events_after_the_datasets_newest_second_are_new_to_known_users(shop: Predictor, url: str) -> None:
    own = [event("ann", item, time) for item, time in (("i4", 62), ("i3", 61), ("i5", 61.5), ("i1", 61.999999))]
    with journal_of(url, *own, event("new", "i3", -1000)) as journal:
        live = Histories(journal, shop).of(["ann", "new", "nobody"])
    assert lists(shop, live, 0) == (["i4"], ["i4"])
    assert lists(shop, live, 1) == (["i3"], ["i3"])  # of whom the dataset holds nothing
    assert lists(shop, live, 2) == ([], [])
    assert live.events.times is not None
    assert live.events.times.tolist() == [START + 62, START - 1000]
    assert live.newest == 5


def test_after_an_update_those_that_arrived_later_are_new(tmp_path: Path, url: str) -> None:
    own = [event("ann", "i4", 500), event("ann", "i3", -7), event("new", "i3", 1), event("ann", "i5", 100)]
    with journal_of(url, *own) as journal:
        predictor = opened(tmp_path, metadata={"trained_to": 1})
        live = Histories(journal, predictor).of(["ann", "new", "bob"])
    assert lists(predictor, live, 0) == (["i3", "i5"], ["i3", "i5"])  # by time, the late one first
    assert lists(predictor, live, 1) == (["i3"], ["i3"])
    assert live.newest == 4


def test_an_update_from_another_journal_says_nothing_of_this_one(tmp_path: Path, url: str) -> None:
    own = [event("ann", "i4", 500), event("ann", "i3", -7), event("ann", "i5", 100)]
    with journal_of(url, *own) as journal:
        of_other, of_this = (
            opened(tmp_path / name, metadata={"trained_to": 1, "journal": each})
            for name, each in (("other", "another"), ("this", journal.id))
        )
        assert lists(of_other, Histories(journal, of_other).of(["ann"]))[0] == ["i5", "i4"]
        assert lists(of_this, Histories(journal, of_this).of(["ann"]))[0] == ["i3", "i5"]


def test_without_dates_items_that_a_user_has_in_the_dataset_are_not_new(tmp_path: Path, url: str) -> None:
    predictor = opened(tmp_path, start=5)
    own = [event("ann", "i2", 62), event("ann", "i4", 63), event("ann", "i4", 64)]
    with journal_of(url, *own) as journal:
        live = Histories(journal, predictor).of(["ann"])
    assert lists(predictor, live) == (["i4", "i4"], ["i4", "i4"])
    assert live.events.times is None


def test_impressions_and_unknown_items_are_no_acts(shop: Predictor, url: str) -> None:
    own = [event("ann", "i4", 70, "impression"), event("ann", None, 71, "impression"), event("ann", "i99", 72)]
    with journal_of(url, *own) as journal:
        live = Histories(journal, shop).of(["ann"])
    assert lists(shop, live) == ([], [])
    assert live.newest == 3


def test_events_of_one_time_are_in_the_order_of_arrival_and_late_ones_in_their_place(shop: Predictor, url: str) -> None:
    own = [event("ann", "i4", 70), event("ann", "i3", 70), event("ann", "i5", 69)]
    with journal_of(url, *own) as journal:
        live = Histories(journal, shop).of(["ann"])
    assert lists(shop, live)[0] == ["i5", "i4", "i3"]


def test_a_history_as_of_an_earlier_event_is_what_an_answer_then_saw(shop: Predictor, url: str) -> None:
    with journal_of(url, event("ann", "i4", 80)) as journal:
        histories = Histories(journal, shop)
        then = histories.of(["ann"])
        journal.store([event("ann", "i3", 70), event("bob", "i1", 90)])
        now = histories.of(["ann"])
        again = histories.as_of(then.newest).of(["ann"])
    assert (lists(shop, then)[0], lists(shop, now)[0]) == (["i4"], ["i3", "i4"])
    assert lists(shop, again) == lists(shop, then)
    assert (then.newest, now.newest, again.newest) == (1, 2, 1)


def test_the_newest_events_of_a_user_are_known_and_no_more(shop: Predictor, url: str) -> None:
    many = [event("ann", f"i{1 + each % 5}", 100 + each) for each in range(12)]
    with journal_of(url, *many) as journal:
        live = replace(Histories(journal, shop), most=3).of(["ann"])
        assert lists(shop, live)[0] == [each.item for each in many[-3:]]
        assert len(Histories(journal, shop).of(["ann"]).events.items) == 12


BY_TYPE = {"event": "type", "event_weights": {"view": 1, "cart": 2, "purchase": 4}}
BOUGHT = {"event": "type", "event_weights": {"view": 0, "cart": 1, "purchase": 1}, "seen": ["purchase"]}
RULES: Mapping[str, tuple[dict[str, Any], list[float], list[str]]] = {
    "types": (BY_TYPE, [1.0, 2.0], ["i3", "i4", "i5"]),
    "seen": (BOUGHT, [1.0], []),
    "target": ({**BY_TYPE, "target": ["cart"], "split": "none"}, [1.0, 2.0], ["i4"]),
    "rating": ({"rating": "stars", "min_rating": 4.0}, [1.0, 1.0], ["i4", "i5"]),
    "weight": ({"weight": "stars"}, [2.5, 1.0, 4.0], ["i3", "i4", "i5"]),
    "none": ({}, [1.0, 1.0, 1.0], ["i3", "i4", "i5"]),
}
"""Settings of the dataset, the weights of the events that are read, and the seen items."""


@pytest.mark.parametrize("name", [*RULES])
def test_types_and_values_count_as_in_the_dataset(name: str, tmp_path: Path) -> None:
    settings, weights, seen = RULES[name]
    predictor = opened(tmp_path, **settings)
    own = [
        event("ann", "i3", 70, "view", 2.5),
        event("ann", "i4", 71, "cart"),
        event("ann", "i5", 72, "share", 4.0),
    ]
    with journal_of(f"sqlite:///{tmp_path / 'journal.db'}", *own) as journal:
        live = Histories(journal, predictor).of(["ann"])
    assert live.events.weights is not None
    assert live.events.weights.tolist() == weights
    assert lists(predictor, live)[1] == seen


def test_labelled_rows_name_the_types_that_are_read(tmp_path: Path) -> None:
    spec = opened(tmp_path, label="type", positive=["cart", "purchase"], item_features=[]).spec
    rules = EventRules.of(spec)
    assert [rules.weight(kind, None) for kind in ("view", "cart", "purchase")] == [0.0, 1.0, 1.0]
    assert rules.is_seen("view")


def test_the_words_of_another_label_name_no_types() -> None:
    settings = DATASETS["table"].Settings.model_validate({"label": "liked", "positive": ["ja"], "event": "type"})
    assert event_rules(settings, None, None) == {}  # else each event of a journal would weigh nothing


def test_a_weight_halves_with_age(tmp_path: Path) -> None:
    predictor = opened(tmp_path, event="type", event_weights={"view": 1, "cart": 2, "purchase": 4}, half_life="10s")
    rules = EventRules.of(predictor.spec)
    assert rules.decay is not None
    assert rules.decay.end == START + 61  # the newest of train
    weights = rules.decayed(np.array([1.0, 4.0, 1.0]), START + np.array([61.0, 51.0, 81.0]))
    assert weights.tolist() == [1.0, 2.0, 4.0]


def test_damaged_rules_are_refused(tmp_path: Path, url: str) -> None:
    predictor = opened(tmp_path, metadata={"event_rules": {"weights": {"view": "much"}}})
    with journal_of(url, event("ann", "i4", 70)) as journal, pytest.raises(BundleError) as caught:
        Histories(journal, predictor).of(["ann"])
    assert "metadata.event_rules: damaged: weights.view" in str(caught.value)


def test_ids_of_whole_numbers_are_found_by_text(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "numbers"
    (folder).mkdir()
    rows = [f"{user},{item},{START + item}" for user in range(1, 5) for item in range(1, 4)]
    (folder / "rows.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    table = DATASETS["table"]
    given = table.Settings.model_validate({"split": "none", "types": {"user_id": "integer", "item_id": "integer"}})
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data", threads=1), given)
    spec = FeatureSpec.load(folder / "data")
    model = MODELS["popularity"](spec, MODELS["popularity"].Settings())
    assert isinstance(model, FittedItemModel)
    known = inform(model, spec)
    assert known is not None
    model.fit(known)
    where = bundle.save(folder / "bundle", model, Card(model="popularity", settings={}), seen=seen_of(spec, known))
    predictor = Predictor.open(where, device="cpu")
    own = [event("2", "3", 70), event("2", "x", 71), event("2", "99999999999999999999", 72), event("2", "1", 73)]
    with journal_of(url, *own) as journal:
        live = Histories(journal, predictor).of([2])
        assert predictor.raw_ids("item", live.events.items.astype(np.int64)).to_pylist() == [3, 1]
        assert Histories(journal, predictor).of(["2"]).events.items.tolist() == live.events.items.tolist()


def test_a_journal_that_fails_says_so(tmp_path: Path) -> None:
    with journal_of(f"sqlite:///{tmp_path / 'journal.db'}", event("ann", "i4", 70)) as journal:
        with journal._writing() as connection:
            connection.exec_driver_sql("DROP TABLE event")
        with pytest.raises(DataError) as caught:
            journal.history("ann", most=5)
    assert str(caught.value).endswith("journal.db: the journal failed: no such table: event")


def test_the_journal_gives_the_newest_acts_oldest_first(url: str) -> None:
    own = [event("ann", f"i{each}", each) for each in range(5)]
    others = [event("bob", "i1", 1), event("ann", "i9", 3, "impression")]
    with journal_of(url, *own, *others) as journal:
        rows = journal.history("ann", most=10)
        assert [(row[1], row[2], row[4] // 1_000_000 - START) for row in rows] == [
            ("view", f"i{at}", at) for at in range(5)
        ]
        assert [row[2] for row in journal.history("ann", most=2)] == ["i3", "i4"]
        assert [row[2] for row in journal.history("ann", most=9, after=rows[1][0], until=rows[3][0])] == ["i2", "i3"]
        assert [row[2] for row in journal.history("ann", most=9, since=rows[3][4])] == ["i4"]
        assert journal.history("nobody", most=9) == []
