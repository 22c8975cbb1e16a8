"""Interactions of users with items, read from the rows of a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.storage import Column, Ragged, SplitReader, offsets_of, open_split, ragged_range, read_seen, scalar
from recspec.feature_spec import FeatureSpec
from recspec.models import Ids, Interactions, ItemModel, UserEvents

ROWS_PER_BLOCK = 65_536  # rows read at once
KEYS_HELD = 1 << 25  # pairs of user and item held before repeated ones are dropped: 256 MB, or twice the distinct pairs


def positives(spec: FeatureSpec, splits: Sequence[str]) -> Interactions:
    """The (user, item) pairs with a positive label in some splits, and the pairs in the histories of their rows.

    A user's first events, and events before the rows that were kept, occur in histories alone. Events of unknown users
    and items are left out: strangers share one id, and so would be taken for one user who knows what any of them did.
    """
    user, item, history = spec.user_id, spec.item_id, history_of_items(spec)
    num_items = spec.num_ids(item)
    keys, most = [np.zeros(0, dtype=np.int64)], KEYS_HELD
    for split in splits:
        held = [history] if history is not None and history in spec.columns(split) else []
        for _, block in blocks(open_split(spec, split, (user, item, spec.label, *held))):
            positive = scalar(block[spec.label]).astype(np.float32) > 0
            firsts = scalar(block[user]).astype(np.int64) * num_items
            keys.append(firsts[positive] + scalar(block[item])[positive].astype(np.int64))
            if held and isinstance(lists := block[held[0]], Ragged):
                keys.append(np.unique(np.repeat(firsts, lists.lengths) + lists.values.astype(np.int64)))
            if sum(map(len, keys)) > most:  # the same event occurs in the histories of many rows
                keys = [np.unique(np.concatenate(keys))]
                most = max(most, 2 * len(keys[0]))
    users, items = np.divmod(np.concatenate(keys), num_items)
    kept = _of_somebody(spec, users, items)
    if not kept.all():
        users, items = users[kept], items[kept]
    return Interactions.from_pairs(users, items, num_users=spec.num_ids(user), num_items=num_items)


def seen_items(spec: FeatureSpec, splits: Sequence[str]) -> Interactions:
    """The items that each user acted on, as some splits know, whatever the rating or weight of the event.

    Of a dataset that keeps no such file, those that `positives` finds.

    Raises:
        DataError: if the file is damaged.
    """
    pairs = read_seen(spec, splits)
    if pairs is None:
        return positives(spec, splits)
    return Interactions.from_pairs(*pairs, num_users=spec.num_ids(spec.user_id), num_items=spec.num_ids(spec.item_id))


def disliked_items(spec: FeatureSpec, splits: Sequence[str], positive: Interactions) -> Interactions | None:
    """The items that each user disliked, as some splits know, without those that are `positive`.

    None of a dataset that keeps no such file.

    Raises:
        DataError: if the file is damaged.
    """
    pairs = read_seen(spec, splits, "dislikes")
    if pairs is None:
        return None
    found = Interactions.from_pairs(*pairs, num_users=positive.num_users, num_items=positive.num_items)
    return found.without(positive)


def interactions_of(kind: type[ItemModel] | ItemModel, spec: FeatureSpec, splits: Sequence[str]) -> Interactions:
    """The positives of some splits, with dislikes and the events in order of time for a model that reads them."""
    found = positives(spec, splits)
    if kind.reads_dislikes:
        found = replace(found, dislikes=disliked_items(spec, splits, found))
    return replace(found, order=read_events(spec, splits)) if kind.reads_order else found


def read_events(spec: FeatureSpec, splits: Sequence[str]) -> UserEvents:
    """The events of each user in some splits, oldest first: by time, then by the order of the splits and their rows.

    They are the history of the user's earliest row, if rows hold histories, and the items of all positive rows.
    Times and weights come from the features that `metadata.timestamp` and `metadata.event_weight` name; without times,
    events are in the order of the rows. Events of a history have the time of its row and the weight 1. As in
    `positives`, unknown users and items have no events.
    """
    user, item, history = spec.user_id, spec.item_id, history_of_items(spec)
    named = {of: str(spec.metadata.get(of, "")) for of in ("timestamp", "event_weight")}
    extra = {of: name for of, name in named.items() if all(name in spec.columns(split) for split in splits)}
    parts: list[dict[str, NDArray[Any]]] = []
    earlier: list[dict[str, NDArray[Any]]] = []
    met = np.zeros(spec.num_ids(user), dtype=bool)
    for split in splits:
        held = [history] if history is not None and history in spec.columns(split) else []
        opening: list[tuple[dict[str, NDArray[Any]], Ragged]] = []  # the earliest row of each user of a block
        for _, block in blocks(open_split(spec, split, (user, item, spec.label, *extra.values(), *held))):
            columns: dict[str, NDArray[Any]] = {
                of: scalar(block[name]).astype(np.float64) for of, name in extra.items()
            }
            columns |= {"user": scalar(block[user]).astype(np.int64), "item": scalar(block[item]).astype(np.int32)}
            if held and isinstance(lists := block[held[0]], Ragged):
                first = _earliest(columns)
                first = first[~met[columns["user"][first]]]
                opening.append(({name: values[first] for name, values in columns.items()}, _rows(lists, first)))
            positive = scalar(block[spec.label]).astype(np.float32) > 0
            parts.append({name: values[positive] for name, values in columns.items()})
        if opening:
            columns = {name: np.concatenate([each[name] for each, _ in opening]) for name in opening[0][0]}
            first = _earliest(columns)
            met[columns["user"]] = True
            earlier.append(_events_before(columns, Ragged.concatenate([lists for _, lists in opening]), first))
    joined = {
        name: np.concatenate([np.zeros(0, np.int64), *(part[name] for part in (*earlier, *parts))])
        for name in ("user", "item", *extra)
    }
    kept = _of_somebody(spec, joined["user"], joined["item"])
    if not kept.all():
        joined = {name: values[kept] for name, values in joined.items()}
    if "timestamp" in joined:
        order = np.argsort(joined["timestamp"], kind="stable")
        joined = {name: values[order] for name, values in joined.items()}
    weights = joined["event_weight"].astype(np.float32) if "event_weight" in extra else None
    return UserEvents.from_rows(joined["user"], joined["item"], len(met), joined.get("timestamp"), weights)


def tells_order(spec: FeatureSpec) -> bool:
    """Whether the order of a user's events means something: by times, histories, or the order of a file of events.

    With ready-made splits or drawn rows and without times, a file's order does not say which events are recent.
    """
    by_file = spec.metadata.get("split") == "leave_one_out" and spec.metadata.get("ordered") is not False
    return by_file or "timestamp" in spec.metadata or history_of_items(spec) is not None


def _earliest(columns: Mapping[str, NDArray[Any]]) -> Ids:
    """The row of each user that stands first in time; the first of all without times."""
    users: Ids = columns["user"]
    order: Ids = np.lexsort((columns.get("timestamp", np.zeros(len(users))), users))
    kept: Ids = order[np.diff(users[order], prepend=-1) != 0]
    return kept


def _rows(lists: Ragged, rows: Ids) -> Ragged:
    places = ragged_range(lists.offsets[rows], lists.lengths[rows])
    return Ragged(lists.values[places], offsets_of(lists.lengths[rows]))


def _events_before(columns: Mapping[str, NDArray[Any]], lists: Ragged, rows: Ids) -> dict[str, NDArray[Any]]:
    """The events in the histories of some rows, as rows of their own."""
    held = _rows(lists, rows)
    found = {name: np.repeat(values[rows], held.lengths) for name, values in columns.items()}
    found["item"] = held.values.astype(np.int32)
    return found | ({"event_weight": np.ones(len(found["item"]))} if "event_weight" in found else {})


def _of_somebody(spec: FeatureSpec, users: Ids, items: Ids) -> NDArray[np.bool_]:
    """Which pairs are of a known user and a known item: id 0 may mean unknown."""
    first_user, first_item = spec.reserves_unknown(spec.user_id), spec.reserves_unknown(spec.item_id)
    return np.asarray((users >= first_user) & (items >= first_item))


def history_of_items(spec: FeatureSpec) -> str | None:
    """The history feature of item ids, if there is one."""
    item = spec.id_of("item")
    lists = [n for n in spec.role("history") if spec.features[n].is_list and spec.features[n].is_categorical]
    if item is None or not lists:
        return None
    sharing = [name for name in lists if spec.vocabulary(name) == spec.vocabulary(item)]
    if sharing:
        return sharing[0]
    described = [n for n in spec.role("item") if spec.features[n].is_categorical and not spec.features[n].is_list]
    return lists[described.index(item)] if len(lists) == len(described) else None


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Labels and ids of a split's rows, or of candidates drawn for it."""

    labels: NDArray[np.bool_]  # (rows,)
    groups: Ids | None
    users: Ids | None
    items: Ids | None
    leak: NDArray[np.bool_] | None = None  # (rows,) the flag that gives a label away, if the dataset has one

    @property
    def has_both_classes(self) -> bool:
        """Whether there are positives and negatives."""
        return bool(self.labels.any() and not self.labels.all())

    def take(self, kept: NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        groups, users, items = (None if each is None else each[kept] for each in (self.groups, self.users, self.items))
        return Rows(self.labels[kept], groups, users, items, None if self.leak is None else self.leak[kept])


def read_rows(spec: FeatureSpec, split: str) -> Rows:
    """Labels and ids of every row of a split."""
    leak = spec.metadata.get("leak")  # names the feature that flags rows whose labels are known from elsewhere
    wanted = (spec.label, group_of(spec, split), spec.id_of("user"), spec.id_of("item"), leak)
    held = spec.columns(split)
    names = tuple(dict.fromkeys(name for name in wanted if isinstance(name, str) and name in held))
    reader = open_split(spec, split, names)
    columns: dict[str, NDArray[Any]] = {spec.label: np.zeros(0, dtype=bool)}
    for start, block in blocks(reader):
        for name in names:
            values = scalar(block[name])
            if name in (spec.label, leak):
                values = _as_flags(values, start, spec, split, name)
            if not start:
                columns[name] = np.empty(reader.num_rows, dtype=values.dtype)
            columns[name][start : start + len(values)] = values
    return Rows(columns[spec.label], *(columns.get(name) if isinstance(name, str) else None for name in wanted[1:]))


def group_of(spec: FeatureSpec, split: str) -> str | None:
    """The feature that groups a split's rows, if the split holds one."""
    group = spec.group if spec.group is not None else spec.id_of("user")
    return group if group in spec.columns(split) else None


def _as_flags(values: NDArray[np.generic], start: int, spec: FeatureSpec, split: str, name: str) -> NDArray[np.bool_]:
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "a label" if name == spec.label else "metadata.leak"
        where = f"{spec.folder}, split '{split}', feature '{name}': row {start + row + 1}"
        raise DataError(f"{where} is {values[row]}; {what} is 0 or 1")
    return values.astype(bool)


def blocks(reader: SplitReader) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Every row in order: the number of a block's first row, and the block."""
    for start, stop in pairwise(reader.blocks(ROWS_PER_BLOCK).tolist()):
        yield start, reader.read(start, stop)
