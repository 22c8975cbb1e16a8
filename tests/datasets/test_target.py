"""What is predicted of several types of events: the others are inputs, and only the target is held out and judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import recspec
from recspec.base.errors import DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders
from recspec.data.prepare.prepared import Prepared
from recspec.data.storage import Ragged, check, open_split, read_seen
from recspec.datasets import append_events
from recspec.datasets.table_settings import Settings
from recspec.evaluation import EvaluateSettings, EvaluationTask
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import prepare_table, raw_pairs

DAY = 86_400
HEAD = "user_id,item_id,timestamp,kind\n"
Event = tuple[str, str, float, str]
SHOP: list[Event] = [
    ("ann", "a", 0, "view"),
    ("ann", "b", 1, "view"),
    ("ann", "b", 2, "purchase"),
    ("ann", "c", 3, "view"),
    ("ann", "c", 4, "purchase"),  # the last but one
    ("ann", "d", 5, "view"),
    ("ann", "e", 6, "cart"),
    ("ann", "d", 7, "purchase"),  # the last
    ("ann", "f", 8, "view"),
    ("bob", "a", 1, "purchase"),  # nothing is known before
    ("bob", "b", 9, "view"),
    ("zoe", "c", 2, "view"),
    ("zoe", "c", 3, "purchase"),
    ("zoe", "a", 4, "view"),
]


def written(events: list[Event]) -> str:
    return HEAD + "".join(f"{u},{i},{1_700_000_000 + day * DAY:.0f},{kind}\n" for u, i, day, kind in events)


def shop(folder: Path, events: list[Event] | str = SHOP, **settings: object) -> Prepared:
    folder.mkdir(exist_ok=True)
    text = events if isinstance(events, str) else written(events)
    given: dict[str, object] = {"event": "kind", "target": ["purchase"], "split": "leave_one_out", **settings}
    return prepare_table(folder / "rows.csv", folder / "out", text, **{"num_negatives": 2, **given})


def seen_pairs(spec: FeatureSpec) -> dict[str, set[tuple[str, str]]]:
    """User and item of the seen file by the split that knows of them first."""
    encoders, found = Encoders.load(spec.folder), {}
    for split in ("train", "valid", "test"):
        pairs = read_seen(spec, [split])
        assert pairs is not None
        names = (
            encoders.vocabularies[name].decode(ids).to_pylist()
            for name, ids in zip(("user_id", "item_id"), pairs, strict=True)
        )
        found[split] = set(zip(*names, strict=True))
    return found


def histories(spec: FeatureSpec, split: str) -> list[list[str]]:
    """The history of each positive, as raw items."""
    columns = open_split(spec, split).read(0, 10**6)
    lists = columns["history_item_id"]
    assert isinstance(lists, Ragged)
    items = Encoders.load(spec.folder).vocabularies["item_id"]
    kept = np.flatnonzero(np.asarray(columns["label"]) > 0).tolist()
    return [items.decode(np.array(lists.tolist()[row], np.int64)).to_pylist() for row in kept]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_the_last_purchases_are_held_out_and_views_after_them_are_not_of_train(tmp_path: Path) -> None:
    made = shop(tmp_path)
    spec = made.spec
    check.check(spec)
    assert raw_pairs(spec, "train") == [
        *(("ann", item) for item in "abbc"),
        *(("bob", item) for item in "ab"),
        ("zoe", "c"),
    ]
    assert raw_pairs(spec, "valid") == [("ann", "c")]
    assert raw_pairs(spec, "test") == [("ann", "d"), ("zoe", "c")]
    assert raw_pairs(spec, "valid_signals") == [("ann", "d"), ("ann", "e")]
    assert raw_pairs(spec, "test_signals") == [("ann", "f"), ("zoe", "a")]
    assert seen_pairs(spec) == {
        "train": {("ann", "b"), ("bob", "a")},
        "valid": {("ann", "c")},
        "test": {("ann", "d"), ("zoe", "c")},
    }
    assert (spec.metadata["target"], spec.metadata["seen_types"]) == (["purchase"], ["purchase"])
    told = "events of 'kind' that are predicted: purchase (5 rows); inputs alone: view (8 rows), cart (1 row)"
    assert told in made.summary["inferred"]
    assert made.summary["rows"] == {"train": 7, "valid": 3, "test": 6}


def test_with_times_the_latest_purchases_are_held_out_by_default(tmp_path: Path) -> None:
    made = shop(tmp_path, split=None, valid=0.25, test=0.2, history=3)
    spec = made.spec
    assert raw_pairs(spec, "train") == [
        *(("ann", item) for item in "abbc"),
        ("bob", "a"),
        *(("zoe", item) for item in "cc"),
    ]
    assert raw_pairs(spec, "valid") == [("ann", "c")]  # on day 4, as is zoe's view
    assert raw_pairs(spec, "valid_signals") == [("zoe", "a")]
    assert raw_pairs(spec, "test_signals") == [("bob", "b")]  # d, e and f have no train row
    told = (
        "the latest events of 'purchase' by 'timestamp' are valid and test, by target (split=leave_one_out takes each "
    )
    assert f"{told}user's last ones)" in made.summary["inferred"]
    assert histories(spec, "valid") == [["b", "b", "c"]]
    users = pq.read_table(spec.folder / "users.parquet").column("history_item_id").to_pylist()
    assert users == [[2, 3, 3], [1, 2], [3, 3, 1]]  # requests know every event


def test_histories_hold_events_of_all_types_before_the_purchase(tmp_path: Path) -> None:
    spec = shop(tmp_path, history=4).spec
    assert histories(spec, "valid") == [["a", "b", "b", "c"]]
    assert histories(spec, "test") == [["c", "c", "d", "e"], ["c"]]


def test_untimed_events_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    spec = shop(tmp_path, timestamp=None, split=None).spec
    assert spec.metadata["split"] == "leave_one_out"
    assert raw_pairs(spec, "valid_signals") == [("ann", "d"), ("ann", "e")]


def test_no_event_is_held_out_for_the_final_model(tmp_path: Path) -> None:
    spec = shop(tmp_path, split="none").spec
    assert spec.splits == ("train",)
    assert len(raw_pairs(spec, "train")) == len(SHOP)


def test_ready_made_splits_judge_purchases_alone_and_a_valid_made_of_train_takes_later_views(tmp_path: Path) -> None:
    parts = ["train"] * 9 + ["test", "test", *["train"] * 3]
    rows = [f"{line},part" for line in [HEAD.strip()]]
    known: list[Event] = [(user, item.replace("f", "a"), day, kind) for user, item, day, kind in SHOP]
    rows += [f"{line},{part}" for line, part in zip(written(known).splitlines()[1:], parts, strict=True)]
    spec = shop(tmp_path, "\n".join(rows) + "\n", splits="part", split=None, unknown_targets="keep").spec
    assert raw_pairs(spec, "train") == [*(("ann", item) for item in "abbccde"), *(("zoe", item) for item in "cca")]
    assert raw_pairs(spec, "valid") == [("ann", "d")]
    assert raw_pairs(spec, "valid_signals") == [("ann", "a")]
    assert [item for _, item in raw_pairs(spec, "test")] == ["a"]
    assert "test_signals" not in spec.splits  # bob has no train row, and so no id
    own = shop(tmp_path / "own", "\n".join(rows).replace("train", "valid", 1) + "\n", splits="part", split=None).spec
    assert raw_pairs(own, "valid_signals") == [("ann", "a")] * 2  # that of the file, too, though it holds no purchase
    assert raw_pairs(own, "valid") == [("ann", "d")]


def test_repeats_are_of_purchases_and_of_other_events_apart(tmp_path: Path) -> None:
    spec = shop(tmp_path, repeats="first").spec
    assert raw_pairs(spec, "train")[:4] == [("ann", item) for item in "abbc"]
    summed = shop(tmp_path / "sum", repeats="sum", event_weights={"view": 1, "cart": 3, "purchase": 5}).spec
    weights = np.asarray(open_split(summed, "test", ["event_weight"]).read(0, 99)["event_weight"])
    assert weights.tolist() == [5] * 6


# --- what is judged ---------------------------------------------------------------------------------------------------


def random_shop(seed: int) -> list[Event]:
    """Purchases that mostly follow a view of the item; some are bought again."""
    rng = np.random.default_rng(seed)
    events: list[Event] = []
    for user in range(12):
        day = float(rng.integers(0, 9))
        for _ in range(rng.integers(2, 9)):
            item, day = f"i{rng.integers(8)}", day + 1 + round(float(rng.random()), 3)
            kinds = [["view"], ["view", "purchase"], ["view", "cart", "purchase"], ["purchase"]][rng.integers(4)]
            events += [(f"u{user}", item, day + place / 100, kind) for place, kind in enumerate(kinds)]
    return [events[place] for place in rng.permutation(len(events))]


@pytest.mark.parametrize("split", ["leave_one_out", "time"])
@pytest.mark.parametrize("seed", range(4))
def test_a_purchase_is_left_out_only_if_the_item_was_bought_before(split: str, seed: int, tmp_path: Path) -> None:
    events = random_shop(seed)
    spec = shop(tmp_path, events, split=split, event_weights={"view": 1, "cart": 2, "purchase": 5}).spec
    bought = {(user, item) for user, item, _, kind in events if kind == "purchase"}
    held = {name: set(raw_pairs(spec, name)) for name in ("valid", "test")}
    assert held["valid"] | held["test"] <= bought
    known = seen_pairs(spec)
    for name, before in (("valid", known["train"]), ("test", known["train"] | known["valid"])):
        task = EvaluationTask(spec, name, ["full"], EvaluateSettings())
        of_users = {pair for pair in held[name] if pair[0] is not None}
        assert task.truth.num_pairs == len(of_users - before)
        assert task.num_repeats == len(of_users & before)


def test_items_that_were_viewed_are_candidates_beside_the_purchase(tmp_path: Path) -> None:
    """Negatives without them would give away the purchase, which is mostly of a viewed item."""
    spec = shop(tmp_path, random_shop(1), num_negatives=6, reject_seen=True).spec
    negatives, known = set(raw_pairs(spec, "test", label=0)), seen_pairs(spec)
    viewed = {pair for split in ("train", "valid_signals") for pair in raw_pairs(spec, split)}
    assert negatives & (viewed - set().union(*known.values()))
    assert not negatives & set().union(*known.values())


def test_seen_says_what_is_left_out(tmp_path: Path) -> None:
    task = EvaluationTask(shop(tmp_path).spec, "test", ["full"], EvaluateSettings())
    assert task.truth.num_pairs == 2
    viewed = shop(tmp_path / "viewed", seen=["view", "purchase"]).spec
    assert EvaluationTask(viewed, "test", ["full"], EvaluateSettings()).truth.num_pairs == 0  # d and c were viewed
    again: list[Event] = [*SHOP, ("ann", "b", 10, "purchase")]
    bought = EvaluationTask(shop(tmp_path / "again", again).spec, "test", ["full"], EvaluateSettings())
    assert (bought.truth.num_pairs, bought.num_repeats) == (1, 1)
    kept = EvaluationTask(shop(tmp_path / "kept", again, seen=[]).spec, "test", ["full"], EvaluateSettings())
    assert (kept.truth.num_pairs, kept.num_repeats) == (2, 0)
    groceries = "user_id,item_id,timestamp\n" + "".join(f"ann,{item},{day}\n" for day, item in enumerate("abcab"))
    plain = prepare_table(tmp_path / "g.csv", tmp_path / "g", groceries, seen=[]).spec
    assert EvaluationTask(plain, "test", ["full"], EvaluateSettings()).truth.num_pairs == 1


# --- leaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["leave_one_out", "time"])
def test_views_after_a_held_out_purchase_show_in_nothing_before_it(split: str, tmp_path: Path) -> None:
    events = random_shop(5)
    given: dict[str, object] = {"split": split, "history": 5, "train_negatives": 1}
    one = shop(tmp_path / "one", events, **given).spec
    begins: dict[object, float] = {}  # of valid or test, by user
    users = Encoders.load(one.folder).vocabularies["user_id"]
    for name in ("valid", "test"):
        columns = open_split(one, name, ["user_id", "timestamp"]).read(0, 10**6)
        owners = users.decode(np.asarray(columns["user_id"])).to_pylist()
        for user, time in zip(owners, np.asarray(columns["timestamp"]).tolist(), strict=True):
            begins[user] = min(begins.get(user, np.inf), time)
    first = min(begins.values())

    def is_later(user: str, day: float) -> bool:
        return round(1_700_000_000 + day * DAY) > (first if split == "time" else begins.get(user, np.inf))

    moved = [
        (u, f"i{(int(i[1:]) + 1) % 8}" if kind != "purchase" and is_later(u, day) else i, day, kind)
        for u, i, day, kind in events
    ]
    assert moved != events
    other = shop(tmp_path / "other", moved, **given).spec
    for name in ("train", "valid"):
        here, there = (open_split(spec, name).read(0, 10**6) for spec in (one, other))
        for feature in here:
            if name == "train" or not feature.startswith("history"):
                left, right = (
                    each.tolist() if isinstance(each, Ragged) else np.asarray(each).tolist()
                    for each in (here[feature], there[feature])
                )
                assert left == right, (name, feature)
    assert seen_pairs(one) == seen_pairs(other)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_bundle_knows_every_signal_and_leaves_out_what_was_bought(tmp_path: Path) -> None:
    shop(tmp_path)
    model = recspec.train("item_knn", tmp_path / "out", tmp_path / "run", progress=False)
    trained = bundle.load(tmp_path / "run")
    assert trained.seen is not None
    items, user = Encoders.load(tmp_path / "out").vocabularies["item_id"], 1
    assert items.decode(trained.seen.of(user).numpy()).to_pylist() == ["b", "c", "d"]
    assert items.decode(trained.seen.known_of(user).numpy()).to_pylist() == [*"abcdef"]
    listed = model.recommend(["ann"], k=3).to_pydict()["item"]
    assert sorted(listed) == ["a", "e", "f"]
    described = recspec.evaluate(tmp_path / "run", tmp_path / "out", protocol="full", progress=False).to_dict()
    told = described["protocols"]["full"]["candidates"]
    assert told == "all items without the user's seen ones of train and valid and valid_signals"


def test_a_model_trained_again_for_use_takes_the_signals_of_valid_too(tmp_path: Path) -> None:
    shop(tmp_path, random_shop(3))
    recspec.auto(tmp_path / "out", tmp_path / "auto", minutes=0.3, models=["popularity"], progress=False)
    cards = [bundle.read_card(path.parent) for path in sorted((tmp_path / "auto").rglob("bundle.json"))]
    assert ["train", "valid", "valid_signals"] in [card.train.get("train_splits") for card in cards]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_types_that_no_row_has_and_rows_without_a_type_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        shop(tmp_path, written(SHOP) + "cy,a,1700000000,\n", target=["purchas", "purchase"], seen=["vieuw"])
    assert [*error.value.problems] == [
        (
            "column 'kind', the type of the event: line 16 is missing; expected a type in every row; "
            "invalid_values=drop leaves such rows out"
        ),
        (
            "setting 'seen': no row has the type 'vieuw' in column 'kind' (did you mean 'view'?); found view (8 rows), "
            "purchase (5 rows), cart (1 row)"
        ),
        (
            "setting 'target': no row has the type 'purchas' in column 'kind' (did you mean 'purchase'?); found view "
            "(8 rows), purchase (5 rows), cart (1 row)"
        ),
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": ["purchase"]}, "target names types of events; name their column with event"),
        ({"seen": ["purchase"]}, "seen names types of events; name their column with event"),
        ({"event": "kind", "target": []}, "target names types of events, one at least; leave it out to predict every"),
        (
            {"event": "kind", "target": ["buy"], "event_weights": {"buy": 0, "view": 1}},
            "target 'buy' has weight 0, which leaves its events out; give it a weight",
        ),
        ({"event": "kind", "target": ["buy"], "label": "clicked"}, "target: of rows without a label"),
        ({"event": "kind", "target": ["buy"], "split": "users"}, "split users holds out events whatever their time"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings.model_validate(settings)


def test_a_target_of_which_no_event_is_left_is_refused(tmp_path: Path) -> None:
    text = HEAD.strip() + ",n\nann,a,1,view,1\nann,b,2,purchase,0\n"
    with pytest.raises(DataError, match="setting 'target': no event of 'purchase' is left to predict"):
        shop(tmp_path, text, weight="n")
    with pytest.raises(SettingsError, match="no column 'sort'"):
        shop(tmp_path / "b", event="sort")


# --- updates ----------------------------------------------------------------------------------------------------------


def test_an_update_takes_events_of_all_types_and_tells_new_ones(tmp_path: Path) -> None:
    base = shop(tmp_path).spec
    new: list[Event] = [("ann", "g", 9, "view"), ("ann", "g", 10, "purchase"), ("bob", "c", 11, "wish")]
    (tmp_path / "new.csv").write_text(written(new))
    grown = append_events(base, tmp_path / "new.csv", tmp_path / "grown")
    assert grown.notes == ("types of 'kind' that no known event has: wish (1 event); they are inputs alone",)
    assert grown.counts == {"events": 3, "users": 0, "items": 1, "left_out": 0}
    assert raw_pairs(grown.spec, "train")[:7] == raw_pairs(base, "train")
    assert raw_pairs(grown.spec, "train")[7:] == [("ann", "c"), ("ann", "d"), ("ann", "e"), ("bob", "c")]
    assert raw_pairs(grown.spec, "valid") == [("ann", "d")]
    assert raw_pairs(grown.spec, "test") == [("zoe", "c"), ("ann", "g")]
    assert raw_pairs(grown.spec, "valid_signals") == [("ann", "f"), ("ann", "g")]
    assert ("bob", "c") not in seen_pairs(grown.spec)["train"]
    (tmp_path / "bad.csv").write_text("user_id,item_id,timestamp\nann,a,1700000000\n")
    with pytest.raises(DataError, match="no column 'kind', the type of the event"):
        append_events(base, tmp_path / "bad.csv", tmp_path / "bad")
