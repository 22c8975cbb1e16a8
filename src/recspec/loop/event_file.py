"""A run measured on a file of newer events: would its lists have held what users acted on afterwards?

The lists are those that `recommend` gives now, so stock, blocked items, a pipeline's filter and the answers to unknown
users count as they do for a server. Labelled rows are scored as `predict` scores them. Only events after the newest one
of the run's dataset are judged, because the model may have learned from the others.

Shapes: U users; K items of the longest list; N rows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recspec.base.errors import DataError, how_many
from recspec.bundle import DataRecord
from recspec.datasets import RawEvents, read_new_events
from recspec.evaluation import Asked, Evaluation, Groups, Progress, Report, compare, silent
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, RecommendRequest
from recspec.loop.raw_rows import LABEL
from recspec.metrics import measures

SPLIT = "events"
POPULARITY = "popularity"
KS = (10,)
LEAST = 1e-7
"""Probabilities are taken as at least this far from 0 and 1."""
DRAWS = 1_000
"""Bootstrap draws of a comparison."""


def evaluate_events(
    runs: Mapping[str, Predictor],
    datasets: Mapping[str, FeatureSpec],
    file: Path,
    ks: Sequence[int] | None = None,
    *,
    progress: Progress = silent,
) -> dict[str, Report]:
    """Measure runs on events that none of them knows; the first report compares its run with the others.

    Args:
        runs: Name -> opened model.
        datasets: Name -> the dataset that the run was trained on, by whose rules the file is read.
        file: Events as CSV, JSON lines or Parquet, with the columns of the raw files.
        ks: Lengths of lists; by default 10.
        progress: Gets the number of users.

    Raises:
        DataError: if a dataset takes no new events, or the file can't be read or holds no event to judge.
        SettingsError: if runs can't be compared, as one has labels and another none.
    """
    first = next(iter(runs))
    raw, notes = RawEvents.of(datasets[first]), list[str]()
    rows, told = read_new_events(datasets[first], file)
    rows = _newest(rows, file, {name: RawEvents.of(each) for name, each in datasets.items()}, notes)
    found = dict[str, Evaluation]()
    beside = dict[str, dict[str, Evaluation]]()
    if raw.settings.label is not None:
        found = {name: _of_rows(each, rows, raw.settings.label) for name, each in runs.items()}
    else:
        wanted = _targets(runs, rows, raw, file, notes)
        for number, (name, predictor) in enumerate(runs.items()):
            progress("recommend", number, len(runs))
            lists = Lists(predictor, wanted, max(ks or KS))
            found[name], beside[name] = lists.evaluation(ks or KS), {POPULARITY: lists.popular(ks or KS)}
    others = [name for name in runs if name != first]
    asked = Asked(None, {"ks": None if ks is None else list(ks)}, False, tuple(others))
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        name: Report(
            SPLIT,
            found[name],
            beside=beside.get(name, {}),
            against={other: compare(found[name], found[other], DRAWS) for other in others if name == first},
            asked=asked if name == first else replace(asked, against=()),
            data=DataRecord(path=str(file.resolve()), digest=digest, name=SPLIT),
            data_notes=(*told, *notes),
        )
        for name in runs
    }


def _newest(rows: pa.Table, file: Path, datasets: Mapping[str, RawEvents], notes: list[str]) -> pa.Table:
    """The rows after the newest event of every dataset; all of them where there are no times."""
    time = next(iter(datasets.values())).settings.timestamp
    newest = [of for each in datasets.values() if (of := each.newest) is not None]
    if time is None or not newest:
        notes.append("the dataset has no times, so nothing tells whether the model has learned from these events")
        return rows
    kept = rows.filter(pc.fill_null(pc.greater(rows.column(time), max(newest)), False))
    if min(newest) < max(newest):
        notes.append("the runs have learned until different times; the later ones know more of what is measured")
    if left := len(rows) - len(kept):
        notes.append(f"{how_many(left, 'event')} left out, which are not after the newest one of the run's dataset")
    if not len(kept):
        raise DataError(
            f"{file}: holds no event after the newest one of the dataset that the run was trained on; the model may "
            "have learned from these. Name a file of newer events"
        )
    return kept


def _targets(
    runs: Mapping[str, Predictor], rows: pa.Table, raw: RawEvents, file: Path, notes: list[str]
) -> dict[Any, set[Any]]:
    """Items of each user that are new to the user in every run."""
    each_run = [targets_of(predictor, rows, raw) for predictor in runs.values()]
    first, *others = each_run
    both = {user: items.intersection(*(each.get(user, ()) for each in others)) for user, items in first.items()}
    found = {user: items for user, items in both.items() if items}
    if left := sum(map(len, acts_of(rows, raw).values())) - sum(map(len, found.values())):
        notes.append(f"{how_many(left, 'pair')} of user and item left out, as the user has the item already")
    if not found:
        what = "" if raw.settings.target is None else f" of type {' or '.join(raw.settings.target)}"
        raise DataError(
            f"{file}: holds no event{what} on an item that is new to its user, so there is nothing to judge"
        )
    return found


def _of_rows(predictor: Predictor, rows: pa.Table, label: str) -> Evaluation:
    """AUC and log loss of labelled rows."""
    labels, chances, losses = losses_of(predictor, rows, label)
    values: dict[str, NDArray[np.floating[Any]]] = {"auc": measures.auc_of_rows(chances, labels), "log_loss": losses}
    values = {name: each for name, each in values.items() if np.isfinite(each).all()}
    return Evaluation(
        {"rows": {name: float(each.mean()) for name, each in values.items()}},
        protocols={"rows": {"rows": len(labels), "positives": int(labels.sum())}},
        values={"rows": values},
        positive=labels,
    )


def losses_of(
    predictor: Predictor, rows: pa.Table, label: str
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Labels, chances and log losses (N,) of labelled rows."""
    labels = rows.column(label).to_numpy().astype(bool)
    chances = predictor.predict(rows.drop_columns([label]))[0].astype(np.float64).clip(LEAST, 1 - LEAST)
    return labels, chances, -np.log(np.where(labels, chances, 1 - chances))


def acts_of(rows: pa.Table, raw: RawEvents) -> dict[Any, set[Any]]:
    """User -> items of the rows that count, of `target` where one is set, by raw ids."""
    settings, items = raw.settings, defaultdict[Any, set[Any]](set)
    assert settings.user is not None
    assert settings.item is not None
    counts = np.ones(len(rows), bool)
    if LABEL in rows.column_names:
        counts &= rows.column(LABEL).to_numpy().astype(bool)
    if settings.rating is not None and settings.min_rating is not None and LABEL not in rows.column_names:
        counts &= np.nan_to_num(rows.column(settings.rating).to_numpy(), nan=-np.inf) >= settings.min_rating
    if settings.target is not None:
        counts &= pc.is_in(rows.column(str(settings.event)), pa.array(settings.target)).to_numpy()
    elif settings.event is not None and settings.event_weights:
        weights = [settings.event_weights.get(each, 0) for each in rows.column(settings.event).to_pylist()]
        counts &= np.array(weights, float) > 0
    kept = rows.filter(pa.array(counts))
    for user, item in zip(*(kept.column(name).to_pylist() for name in (settings.user, settings.item)), strict=True):
        items[user].add(item)
    return items


def targets_of(after: Predictor, rows: pa.Table, raw: RawEvents) -> dict[Any, set[Any]]:
    """`acts_of` without the items that a user has; seen ones are in no list."""
    items, seen, known, found = acts_of(rows, raw), after.recommender.seen, after.catalogues, {}
    for user, number in zip(items, known.user_ids([*items]).tolist(), strict=True):
        own = known.raw_ids("item", seen.of(number).numpy().astype(np.int64)).to_pylist() if number > 0 else ()
        if new := items[user].difference(own):
            found[user] = new
    return found


@dataclass
class Lists:
    """The lists of a model for the users of some events, and which of their items the users acted on."""

    predictor: Predictor
    wanted: Mapping[Any, set[Any]]
    """User -> items, by raw ids."""
    k: int

    def __post_init__(self) -> None:
        catalogues, users = self.predictor.catalogues, [*self.wanted]
        self._users = np.asarray(catalogues.user_ids(users))
        self._sizes = np.array([len(items) for items in self.wanted.values()])
        ids = np.asarray(catalogues.item_ids([item for items in self.wanted.values() for item in items]))
        owners = np.repeat(np.arange(len(users)), self._sizes)
        known = ids >= catalogues.items.first_id
        self._num_new = int(np.count_nonzero(~known))
        self._keys = owners[known] * self._num_ids + ids[known]
        self._checked = self.predictor.recommender.check(RecommendRequest(users=tuple(users), k=self.k))

    @property
    def _num_ids(self) -> int:
        """More than any id of an item, new ones included."""
        catalogues = self.predictor.catalogues
        return catalogues.items.first_id + len(catalogues.items)

    def evaluation(self, ks: Sequence[int]) -> Evaluation:
        """The metrics of the lists that `recommend` gives."""
        recommender = self.predictor.recommender
        items = np.full((len(self._users), self.k), -1)
        for block in recommender.blocks(len(self._users)):
            found = recommender.top_items(self._users[block], self._checked).items
            items[block, : found.shape[1]] = found
        return self._measured(items, ks)

    def popular(self, ks: Sequence[int]) -> Evaluation:
        """The metrics of lists of the most popular items that a user has not acted on."""
        recommender, first = self.predictor.recommender, self.predictor.catalogues.items.first_id
        seen, allowed = recommender.seen, self._checked.choice.allowed
        counts = seen.counts.numpy().copy()
        counts[~allowed[: len(counts)]] = 0
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        items = np.full((len(self._users), self.k), -1)
        for row, user in enumerate(self._users.tolist()):
            own = seen.of(user).numpy() if user >= self.predictor.users.first_id else ()
            best = order[: self.k + len(own)]
            best = best[~np.isin(best, own) & (best >= first)][: self.k]
            items[row, : len(best)] = best
        return self._measured(items, ks)

    def _measured(self, items: NDArray[np.int64], ks: Sequence[int]) -> Evaluation:
        """Hit rate, NDCG and recall of lists (U, K)."""
        hits = np.isin(np.arange(len(items))[:, None] * self._num_ids + items, self._keys) & (items >= 0)
        gains = 1 / np.log2(np.arange(self.k) + 2)
        values = dict[str, NDArray[np.floating[Any]]]()
        for k in sorted(ks):
            best = np.cumsum(gains)[np.minimum(self._sizes, k) - 1]
            values[f"hit_rate@{k}"] = np.asarray(hits[:, :k].any(1), np.float64)
            values[f"ndcg@{k}"] = (hits[:, :k] * gains[:k]).sum(1) / best
            values[f"recall@{k}"] = np.asarray(hits[:, :k].sum(1) / self._sizes)
        strangers = int(np.count_nonzero(self._users < self.predictor.users.first_id))
        described = (
            f"the lists of {how_many(len(items), 'user')}, who acted on {how_many(int(self._sizes.sum()), 'item')}"
        )
        described += f"; {how_many(strangers, 'user')} unknown to the model" if strangers else ""
        described += (
            f"; {how_many(self._num_new, 'item')} unknown to it, which no list can hold" if self._num_new else ""
        )
        return Evaluation(
            {"full": {name: float(each.mean()) for name, each in values.items()}},
            protocols={"full": {"groups": len(items), "described": described, "unknown_users": strangers}},
            values={"full": values},
            groups={"full": Groups(self.predictor.spec.user_id, np.maximum(self._users, 0))},
        )
