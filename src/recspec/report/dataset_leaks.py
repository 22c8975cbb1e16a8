"""Leaks that a dataset is suspected of: what would make a test look better than the future will.

Every suspicion is a sentence with its number. What was looked for and not found is listed too. Large splits are judged
by an even sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.errors import SpecError
from recspec.report.dataset_figures import sample, time_of
from recspec.report.numbers import percent
from recspec.spec import FeatureSpec
from recspec.storage import LABEL_AUC, label_columns

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
        told = [f"Column '{name}' alone orders the labels of train with AUC {auc:.4f}. Make sure that its value is "
                "known before the label is." for name, auc in label_columns(spec).items()]  # fmt: skip
        _add(found, told, f"No column alone orders the labels of train as well as AUC {LABEL_AUC}.")
        _rows_in_train(spec, held_out, found)
    if _has(spec, "item"):
        _add(found, list(_targets_told(spec, held_out)), f"No column beside the item tells the items of {held_out}.")
    if _has(spec, "user") and _has(spec, "item"):
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


def _has(spec: FeatureSpec, role: str) -> bool:
    try:
        return bool(spec.user_id if role == "user" else spec.item_id)
    except SpecError:
        return False


def _alone(spec: FeatureSpec, split: str) -> list[str]:
    """Columns of single values that a model may read."""
    names = spec.inputs(is_list=False)
    return [name for name in names if name in spec.columns("train") and name in spec.columns(split)]


def _targets_told(spec: FeatureSpec, held_out: str) -> Iterator[str]:
    """Columns of users and contexts whose value names the item of held-out positives."""
    item, own = spec.item_id, spec.vocabulary(spec.item_id)
    described = {*spec.role("item"), *([spec.user_id] if _has(spec, "user") else [])}
    names = [name for name in _alone(spec, held_out) if name not in described and spec.features[name].is_categorical]
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


def _positive(spec: FeatureSpec, split: str, names: list[str]) -> dict[str, NDArray[Any]]:
    held = spec.label in spec.columns(split)
    read = sample(spec, split, list(dict.fromkeys([*names, *([spec.label] if held else [])])))
    columns: dict[str, NDArray[Any]] = {name: np.asarray(of) for name, of in read.items()}
    kept = columns[spec.label] > 0 if held else np.ones(len(columns[names[0]]), np.bool_)
    return {name: of[kept] for name, of in columns.items()}


def _rows_in_train(spec: FeatureSpec, held_out: str, found: Leaks) -> None:
    """Held-out rows that equal a row of train in every column, beside the rate of equal rows within train."""
    names = [
        name for name in spec.columns(held_out) if name in spec.columns("train") and not spec.features[name].is_list
    ]
    if len(names) < 3:
        return
    train, test = (_hashed(sample(spec, split, names), names) for split in ("train", held_out))
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


def _hashed(columns: Any, names: list[str]) -> NDArray[np.uint64]:
    """A number for each row; equal rows have equal ones."""
    found = np.zeros(len(columns[names[0]]), np.uint64)
    for name in names:
        values = np.ascontiguousarray(np.asarray(columns[name]).astype(np.float64)).view(np.uint64)
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
    user = spec.user_id if _has(spec, "user") else None
    names = [str(time_of(spec, "train")), *([user] if user else [])]
    train = _positive(spec, "train", names) if spec.has_series else _all(spec, "train", names)
    test = _positive(spec, held_out, names) if spec.has_series else _all(spec, held_out, names)
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


def _all(spec: FeatureSpec, split: str, names: list[str]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(of) for name, of in sample(spec, split, names).items()}
