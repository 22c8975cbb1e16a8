"""The gate: what two versions are worth to each user, and what passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from recspec import api
from recspec.datasets import DATASETS, RawEvents
from recspec.inference import Predictor
from recspec.loop import gate
from recspec.loop.event_file import Lists
from recspec.loop.gate import Judgement, judge
from tests.made_up_events import prepared

TEXT = pa.string()


def raw(**settings: object) -> RawEvents:
    columns = {"user": "user_id", "item": "item_id", "timestamp": "timestamp", **settings}
    return RawEvents(DATASETS["table"].Settings(**columns), True, {}, Path("nowhere"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Predictor]:
    """Two kinds of users, each with items of their own: EASE tells them apart, popularity does not."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(60), 8)
    items = (users % 2) * 20 + np.concatenate([rng.permutation(20)[:8] for _ in range(60)])
    times = 1_600_000_000 + np.arange(len(users))
    columns = {"user_id": [f"u{u}" for u in users], "item_id": [f"i{i}" for i in items], "timestamp": times}
    folder = tmp_path_factory.mktemp("gate")
    data = prepared(folder / "shop", pa.table(columns), split="none", num_negatives=0, item_features=[]).folder
    for model in ("ease", "popularity"):
        api.train(model, data, folder / model, progress=False)
    return {name: Predictor.open(folder / name, device="cpu") for name in ("ease", "popularity")}


def later(shop: Mapping[str, Predictor]) -> pa.Table:
    """A new item of each user's own kind."""
    rows: list[dict[str, object]] = []
    known = shop["ease"]
    for user in range(60):
        number = int(known.catalogues.user_ids([f"u{user}"])[0])
        ids = known.recommender.seen.of(number).numpy().astype(np.int64)
        seen = {*known.catalogues.raw_ids("item", ids).to_pylist()}
        own = next(f"i{i}" for i in range((user % 2) * 20, (user % 2) * 20 + 20) if f"i{i}" not in seen)
        rows += [{"_seq": user, "user_id": f"u{user}", "item_id": own}]
    return pa.Table.from_pylist(rows)


def test_a_better_model_passes_and_a_worse_one_fails(shop: Mapping[str, Predictor]) -> None:
    rows = later(shop)
    better = judge(shop["popularity"], shop["ease"], rows, raw(), 1.0)
    assert better.passed
    assert better.users == 60
    assert better.low is not None
    assert better.low > 0
    worse = judge(shop["ease"], shop["popularity"], rows, raw(), 1e-9)
    assert not worse.passed
    assert worse.why.endswith("too few users, and below 0 all the same")
    wide = judge(shop["ease"], shop["popularity"], rows, raw(), 2.0)
    assert wide.passed, "not worse by 2"
    assert wide.why.endswith("above -2")
    assert worse.before == better.after
    equal = judge(shop["ease"], shop["ease"], rows, raw(), 1e-3)
    assert equal.passed
    assert (equal.low, equal.high) == (0, 0)


def test_the_value_of_a_list_is_its_ndcg(shop: Mapping[str, Predictor]) -> None:
    (answer,) = shop["ease"].recommend(["u0"], k=10)
    first, third = answer.items[0].item, answer.items[2].item
    wanted = {"u0": {first, third, "nowhere"}}
    own = Lists(shop["ease"], wanted, 10).evaluation([10]).values["full"]["ndcg@10"]
    best = 1 + 1 / math.log2(3) + 1 / 2
    assert own == pytest.approx([(1 + 1 / 2) / best])


def test_seen_items_and_events_that_count_for_nothing_are_no_targets(shop: Mapping[str, Predictor]) -> None:
    known = shop["ease"]
    ids = known.recommender.seen.of(int(known.catalogues.user_ids(["u0"])[0])).numpy().astype(np.int64)
    seen = known.catalogues.raw_ids("item", ids).to_pylist()[0]
    columns = {"_seq": [1, 2, 3], "user_id": ["u0", "u0", "new"], "item_id": [seen, "x", "y"]}
    rows = pa.table(columns)
    assert gate.targets_of(known, rows, raw()) == {"u0": {"x"}, "new": {"y"}}
    weighed = rows.append_column("kind", pa.array(["buy", "view", "buy"]))
    by_type = raw(event="kind", event_weights={"view": 0, "buy": 1})
    assert gate.targets_of(known, weighed, by_type) == {"new": {"y"}}
    predicted = raw(event="kind", target=["view"], event_weights={"view": 1, "buy": 5}, seen=[])
    assert gate.targets_of(known, weighed, predicted) == {"u0": {"x"}}, "purchases are no targets of views"
    stars = rows.append_column("stars", pa.array([5.0, 4.0, None]))
    assert gate.targets_of(known, stars, raw(rating="stars", min_rating=4)) == {"u0": {"x"}}
    labelled = rows.append_column("_label", pa.array([1, 0, 1]))
    assert gate.targets_of(known, labelled, raw(label="clicked")) == {"new": {"y"}}


def test_with_fewer_than_two_users_there_is_no_test(shop: Mapping[str, Predictor]) -> None:
    rows = later(shop).slice(0, 1)
    assert judge(shop["ease"], shop["popularity"], rows, raw(), 0.01) == Judgement(
        True, "passed without a test: 1 user to judge by", "ndcg@10", 1
    )


def test_of_many_users_some_are_drawn(shop: Mapping[str, Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_USERS", 7)
    assert judge(shop["popularity"], shop["ease"], later(shop), raw(), 1.0).users == 7


class Chances:
    """A model of probabilities that are written in a column."""

    class bundle:
        gives_probabilities = True

    def __init__(self, chances: Sequence[float]) -> None:
        self.chances = np.array(chances, np.float32)

    def predict(self, rows: pa.Table) -> tuple[np.ndarray[Any, Any], None]:
        assert rows.column_names == ["user_id", "item_id"]
        return self.chances, None


def test_labelled_rows_are_judged_by_the_mean_log_loss_of_each_user() -> None:
    columns = {"_seq": [1, 2, 3], "_label": [1, 0, 1], "user_id": ["a", "a", "b"], "item_id": ["x", "y", "x"]}
    before, after = (cast(Predictor, Chances(each)) for each in ([0.5, 0.5, 0.5], [0.8, 0.4, 0.0]))
    found = gate._losses(after, pa.table(columns), raw(label="clicked"))
    assert found == pytest.approx([(math.log(0.8) + math.log(0.6)) / 2, math.log(1e-7)], rel=1e-5)
    alone = gate._losses(before, pa.table(columns), raw(label="clicked", user=None))
    assert alone == pytest.approx([math.log(0.5)] * 3)
    judged = judge(before, after, pa.table(columns), raw(label="clicked"), 100.0)
    assert judged.metric == "log_loss"
    assert judged.before == pytest.approx(math.log(2))
    assert judged.after == pytest.approx(-found.mean())
