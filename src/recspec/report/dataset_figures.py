"""Figures of a prepared dataset beyond its card, and leaks that it is suspected of.

Every suspicion is a sentence with its number. What was looked for and not found is listed too. Large splits are judged
by an even sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import SpecError
from recspec.data.storage import LABEL_AUC, label_columns, open_split, scalar
from recspec.feature_spec import FeatureSpec
from recspec.report.page import percent

BLOCK = 1 << 16  # rows read at once
MOST_PAIRS = 1 << 26  # pairs of user and item held to count the distinct ones: 512 MB
MOST_IDS = 1 << 26  # ids of users or items that are counted
MOST_SAMPLED = 1 << 18  # rows of a split that a sample holds
BINS_OF_TIME = 30

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SplitFigures:
    """A split: its rows, and its events, which are the positives of series and all rows of other data."""

    rows: int
    events: int
    label_mean: float | None
    users: int | None
    items: int | None
    first: float | None
    """Unix time of the earliest event."""
    last: float | None
    cold_users: float | None
    """Share of the events whose user has no event in train; None of train itself."""
    cold_items: float | None
    times: tuple[int, ...] = ()
    """Events in each bin of time; see `DatasetFigures.time_edges`."""

    @property
    def positives(self) -> int | None:
        """Rows whose label is 1; None without labels, or with others than 0 and 1."""
        mean = self.label_mean
        return None if mean is None or not 0 <= mean <= 1 else round(mean * self.rows)


@dataclass(frozen=True, eq=False)
class DatasetFigures:
    """What a pass over the ids and times of a dataset counts."""

    splits: dict[str, SplitFigures]
    users: int | None
    """Different users with an event in any split, without the unknown one; None if the rows have no user."""
    items: int | None
    pairs: int | None
    """Different pairs of user and item among the events; None if they were too many to count."""
    per_user: Ids
    """(users,) events of each user."""
    per_item: Ids
    time_edges: tuple[float, ...]
    are_positives: bool
    """Whether events are the positives alone."""

    @property
    def events(self) -> int:
        """Events of all splits."""
        return sum(split.events for split in self.splits.values())

    @property
    def density(self) -> float | None:
        """Share of all pairs of user and item that occur."""
        if self.pairs is None or not self.users or not self.items:
            return None
        return self.pairs / (self.users * self.items)

    @property
    def head_share(self) -> float | None:
        """Share of the events that the tenth of the items with most events holds."""
        if not self.events or not len(self.per_item):
            return None
        ordered = np.sort(self.per_item)[::-1]
        return float(ordered[: -(-len(ordered) // 10)].sum() / ordered.sum())


@dataclass(eq=False)
class _Events:
    """Columns of a split's events."""

    rows: int
    label_mean: float | None
    ids: dict[str, Ids]  # by role
    times: Values | None

    @property
    def count(self) -> int:
        held = [*self.ids.values(), *([] if self.times is None else [self.times])]
        return len(held[0]) if held else self.rows


def figures_of(spec: FeatureSpec) -> DatasetFigures:
    """Read the ids, times and labels of every split once.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    roles = {role: name for role in ("user", "item") if (name := spec.id_of(role)) and num_ids(spec, name) <= MOST_IDS}
    first = {role: int(spec.reserves_unknown(name)) for role, name in roles.items()}  # ids of real users and items
    read = {split: _read(spec, split, roles) for split in spec.splits}
    times = [each.times for each in read.values() if each.times is not None and len(each.times)]
    edges = np.zeros(0)
    if times:
        low, high = min(each.min() for each in times), max(each.max() for each in times)
        edges = np.linspace(low, high if high > low else low + 1, BINS_OF_TIME + 1)
    trained_on = read["train"].ids if "train" in read else {}
    known = {role: _known(spec, roles[role], ids, first[role]) for role, ids in trained_on.items()}
    splits = {}
    for split, found in read.items():
        distinct = {role: int(np.count_nonzero(np.bincount(ids)[first[role] :])) for role, ids in found.ids.items()}
        judged = {role: ids for role, ids in found.ids.items() if split != "train" and role in known and len(ids)}
        cold = {role: float(1 - known[role][ids].mean()) for role, ids in judged.items()}
        has_times = found.times is not None and len(found.times) > 0
        splits[split] = SplitFigures(
            rows=found.rows,
            events=found.count,
            label_mean=found.label_mean,
            users=distinct.get("user"),
            items=distinct.get("item"),
            first=float(found.times.min()) if found.times is not None and has_times else None,
            last=float(found.times.max()) if found.times is not None and has_times else None,
            cold_users=cold.get("user"),
            cold_items=cold.get("item"),
            times=() if found.times is None else tuple(np.histogram(found.times, edges)[0].tolist()),
        )
    per_user, per_item = (
        _counted([each.ids.get(role) for each in read.values()], first.get(role, 0)) for role in ("user", "item")
    )
    return DatasetFigures(
        splits,
        users=len(per_user) if "user" in roles else None,
        items=len(per_item) if "item" in roles else None,
        pairs=_count_pairs([each.ids for each in read.values()], spec, roles, first),
        per_user=per_user,
        per_item=per_item,
        time_edges=tuple(edges.tolist()),
        are_positives=spec.has_series,
    )


def sample(spec: FeatureSpec, split: str, names: Sequence[str], most: int = MOST_SAMPLED) -> Arrays:
    """Columns of single values of an even sample of a split's rows."""
    reader = open_split(spec, split, list(names))
    step = max(1, -(-reader.num_rows // most))
    parts = []
    for start in range(0, reader.num_rows, BLOCK):
        block = reader.read(start, start + BLOCK)
        kept = slice((-start) % step, None, step)
        parts.append({name: scalar(block[name])[kept] for name in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in names} if parts else {}


def time_of(spec: FeatureSpec, split: str) -> str | None:
    """The feature that holds the time of a split's rows, if there is one."""
    named = spec.metadata.get("timestamp")
    return named if isinstance(named, str) and named in spec.columns(split) else None


def num_ids(spec: FeatureSpec, name: str) -> float:
    """How many ids a feature has; infinitely many if its cardinality is auto."""
    try:
        return spec.num_ids(name)
    except SpecError:
        return float("inf")


def _read(spec: FeatureSpec, split: str, roles: Mapping[str, str]) -> _Events:
    held = spec.columns(split)
    time, label = time_of(spec, split), spec.label if spec.label in held else None
    wanted = [name for name in dict.fromkeys((*roles.values(), time, label)) if name is not None and name in held]
    reader = open_split(spec, split, wanted)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in wanted}
    total = 0.0
    for block in reader.batches(BLOCK):
        kept: Any = slice(None)
        if label is not None:
            labels = scalar(block[label])
            total += float(labels.sum(dtype=np.float64))
            kept = labels > 0 if spec.has_series else kept
        for name in wanted:
            parts[name].append(scalar(block[name])[kept])
    joined = {name: np.concatenate(each) if each else np.zeros(0) for name, each in parts.items()}
    ids = {role: joined[name].astype(np.int64) for role, name in roles.items() if name in joined}
    times = None if time is None else joined[time].astype(np.float64)
    mean = total / reader.num_rows if label is not None and reader.num_rows else None
    return _Events(reader.num_rows, mean, ids, None if times is None else times[np.isfinite(times)])


def _known(spec: FeatureSpec, feature: str, ids: Ids, first: int) -> NDArray[np.bool_]:
    """Which ids occur in train."""
    known = np.zeros(spec.num_ids(feature), np.bool_)
    known[ids] = True
    known[:first] = False
    return known


def _counted(ids: Sequence[Ids | None], first: int) -> Ids:
    """Events of each id that has any, from the first real one."""
    held = [each for each in ids if each is not None and len(each)]
    counts = np.bincount(np.concatenate(held))[first:] if held else np.zeros(0, np.int64)
    return counts[counts > 0]


def _count_pairs(
    read: Sequence[Mapping[str, Ids]], spec: FeatureSpec, roles: Mapping[str, str], first: Mapping[str, int]
) -> int | None:
    both = [(ids["user"], ids["item"]) for ids in read if len(ids) == 2]
    if not both:
        return None
    real = [(users >= first["user"]) & (items >= first["item"]) for users, items in both]
    if sum(int(kept.sum()) for kept in real) > MOST_PAIRS:
        return None
    count = spec.num_ids(roles["item"])
    keys = np.concatenate([(users * count + items)[kept] for (users, items), kept in zip(both, real, strict=True)])
    keys.sort()
    return int(np.count_nonzero(np.diff(keys)) + 1) if len(keys) else 0


TARGET_SHARE = 0.5
"""Share of the targets that one column tells alone from which it is suspected to hold them."""
FEWEST_ITEMS = 10  # below which telling an item is no feat
FEWEST_ROWS = 30


@dataclass(frozen=True)
class Leaks:
    """What was found."""

    suspected: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Not wrong by itself, but good to know when metrics are read."""
    clean: list[str] = field(default_factory=list)
    """What was looked for and not found."""


def leaks_of(spec: FeatureSpec) -> Leaks:
    """Look for columns that give the answer, test rows in train, and values of the future."""
    found = Leaks()
    held_out = next((split for split in ("test", "valid") if split in spec.splits), None)
    if "train" not in spec.splits or held_out is None:
        found.remarks.append("There are no two splits to compare, so nothing was looked for.")
        return found
    if not spec.has_series:
        told = [
            f"Column '{name}' alone orders the labels of train with AUC {auc:.4f}. Make sure that its value is "
            "known before the label is."
            for name, auc in label_columns(spec).items()
        ]
        _add(found, told, f"No column alone orders the labels of train as well as AUC {LABEL_AUC}.")
        _rows_in_train(spec, held_out, found)
    if spec.id_of("item"):
        _add(found, list(_targets_told(spec, held_out)), f"No column beside the item tells the items of {held_out}.")
    if spec.id_of("user") and spec.id_of("item"):
        _pairs_in_train(spec, held_out, found)
    if time_of(spec, "train") and time_of(spec, held_out):
        _future(spec, held_out, found)
    else:
        found.remarks.append("The rows have no time, so whether train lies before test could not be checked.")
    return found


def _add(found: Leaks, sentences: list[str], otherwise: str) -> None:
    found.suspected.extend(sentences)
    if not sentences:
        found.clean.append(otherwise)


def _targets_told(spec: FeatureSpec, held_out: str) -> Iterator[str]:
    """Columns of users and contexts whose value names the item of held-out positives."""
    item, own = spec.item_id, spec.vocabulary(spec.item_id)
    described = {*spec.role("item"), *([spec.user_id] if spec.id_of("user") else [])}
    both = {*spec.columns("train")} & {*spec.columns(held_out)}
    names = [name for name in spec.inputs(categorical=True, is_list=False) if name in both and name not in described]
    if not names:
        return
    train, test = (_positive(spec, split, [*names, item]) for split in ("train", held_out))
    items = test[item]
    if not len(train[item]) or len(items) < FEWEST_ROWS or len(np.unique(items)) < FEWEST_ITEMS:
        return
    for name in names:
        if spec.vocabulary(name) == own:
            share = float((test[name] == items).mean())
        else:
            share = float((_commonest(train[name], train[item], test[name]) == items).mean())
        if share >= TARGET_SHARE:
            yield (
                f"Column '{name}' alone tells the item of {percent(share)} of the positives of {held_out}. Make sure "
                "that its value is known before the item is chosen."
            )


def _commonest(values: NDArray[Any], items: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.int64]:
    """The most frequent item of each wanted value in train; -1 for an unknown value."""
    pairs, counts = np.unique(np.stack([values, items]).astype(np.int64), axis=1, return_counts=True)
    order = np.lexsort((counts, pairs[0]))  # the last pair of a value is its most frequent
    last = np.append(np.diff(pairs[0][order]) > 0, True)
    distinct, best = pairs[0][order][last], pairs[1][order][last]
    at = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    return np.where(distinct[at] == wanted, best[at], -1)


def _positive(spec: FeatureSpec, split: str, names: list[str]) -> Arrays:
    """Columns of an even sample of the positives."""
    if spec.label not in spec.columns(split):
        return sample(spec, split, names)
    columns = sample(spec, split, list(dict.fromkeys([*names, spec.label])))
    return {name: of[columns[spec.label] > 0] for name, of in columns.items()}


def _rows_in_train(spec: FeatureSpec, held_out: str, found: Leaks) -> None:
    """Held-out rows that equal a row of train in every column, beside the rate of equal rows within train."""
    names = [
        name for name in spec.columns(held_out) if name in spec.columns("train") and not spec.features[name].is_list
    ]
    if len(names) < 3:
        return
    train, test = (_hashed(sample(spec, split, names)) for split in ("train", held_out))
    if len(test) < FEWEST_ROWS:
        return
    share = float(np.isin(test, train).mean())
    usual = 1 - len(np.unique(train)) / max(1, len(train))
    told = f"{percent(share)} of the rows of {held_out} equal a row of train in every column"
    beside = f"within train, {percent(usual)} equal an earlier row"
    if share > 2 * usual + 0.01:
        found.suspected.append(f"{told}; {beside}. They may be the same events.")
    elif share:
        found.remarks.append(f"{told}; {beside}, so this is what such columns give by chance.")
    else:
        found.clean.append(f"No row of {held_out} equals a row of train.")


def _hashed(columns: Arrays) -> NDArray[np.uint64]:
    """A number for each row; equal rows have equal ones."""
    found = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for column in columns.values():
        values = np.ascontiguousarray(column.astype(np.float64)).view(np.uint64)
        found = (found ^ values) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


def _pairs_in_train(spec: FeatureSpec, held_out: str, found: Leaks) -> None:
    user, item = spec.user_id, spec.item_id
    train, test = (_positive(spec, split, [user, item]) for split in ("train", held_out))
    if not len(test[user]):
        return
    keys = [each[user].astype(np.int64) * spec.num_ids(item) + each[item] for each in (train, test)]
    share = float(np.isin(keys[1], keys[0]).mean())
    if share:
        found.remarks.append(
            f"At least {percent(share)} of the positives of {held_out} are pairs of user and item that train holds "
            "too. `recspec evaluate` leaves such repeats out unless --repeats keep is given."
        )
    else:
        found.clean.append(f"No pair of user and item of {held_out} was found in train.")


def _future(spec: FeatureSpec, held_out: str, found: Leaks) -> None:
    """Whether held-out rows lie after what train knows of the same user, and of everybody."""
    user = spec.user_id if spec.id_of("user") else None
    names = [str(time_of(spec, "train")), *([user] if user else [])]
    read = _positive if spec.has_series else sample
    train, test = read(spec, "train", names), read(spec, held_out, names)
    time = names[0]
    if not len(test[time]) or not len(train[time]):
        return
    if user:
        latest = np.full(spec.num_ids(user), -np.inf)
        np.maximum.at(latest, train[user].astype(np.int64), train[time].astype(np.float64))
        share = float((test[time] < latest[test[user].astype(np.int64)]).mean())
        if share:
            found.suspected.append(
                f"{percent(share)} of the rows of {held_out} lie before a row of the same user in train: train knows "
                "what the user did afterwards."
            )
        else:
            found.clean.append(f"No row of {held_out} lies before a row of the same user in train.")
    earlier = float((test[time] < train[time].max()).mean())
    if earlier > 0:
        found.remarks.append(
            f"{percent(earlier)} of the rows of {held_out} lie before the last row of train, so train knows what other "
            "users did later, such as what becomes popular. Splitting by time (split=time) avoids that."
        )
    else:
        found.clean.append(f"All rows of {held_out} lie after train.")
