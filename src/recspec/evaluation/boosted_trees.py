"""Gradient-boosted trees of labelled rows by LightGBM, as a baseline for a click model.

Shapes: B rows; C columns of the matrix that the trees split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, require_extra
from recspec.data.encoding import CrossEncoder, read_encoders
from recspec.data.storage import Column, Ragged
from recspec.evaluation.labelled_rows import (
    Scorer,
    count_both_classes,
    labels_of,
    num_values,
    numbers_of,
    row_blocks,
    uniform,
)
from recspec.feature_spec import FeatureSpec
from recspec.models import Ids, Scores

MOST_VALUES = 1 << 26  # of the matrix, 4 bytes each: 1.6 million rows of 40 columns

MOST_CATEGORIES = 4000
"""Of a feature: the most frequent ids; the others share one category. On the valid rows of ml-latest-small with labels:
AUC .7805; 1000: .7720; 255: .7382. Criteo's sample has no feature with more than 1000."""

MOST_LISTED = 32  # ids of a list that get a column of counts, the most frequent ones

HELD_OUT = 0.1  # share of the rows that stop the boosting
PATIENCE = 50  # rounds without a lower log loss on them
MOST_ROUNDS = 3000
ROUNDS_UNJUDGED = 100  # LightGBM's default, for rows too few to hold any out

CATEGORIES_APART = (32, 8)
"""Values of `max_cat_threshold` compared: 32 is LightGBM's. Many categorical features overfit with it (AUC on the valid
rows of Criteo's sample: .7622, with 8 .7722); a user and an item alone do not (.7720, with 8 .7681)."""

PARAMETERS: Mapping[str, object] = {
    "objective": "binary",
    "learning_rate": 0.05,
    "num_leaves": 31,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,  # otherwise a timing of both layouts chooses
    "verbosity": -1,
}


def boosted_trees(spec: FeatureSpec, splits: Sequence[str], *, most_values: int = MOST_VALUES) -> Scorer:
    """Trees over the prepared features: ids as categories, numbers as they are, lists as counts.

    Crosses of columns that other features hold are left out: trees cross by themselves, and overfit their many ids.
    Boosting stops by the log loss on a tenth of the rows, which a hash of the row's number picks; the same loss chooses
    among `CATEGORIES_APART`. Rows beyond `most_values` are left out evenly. The same rows and number of threads give
    the same trees.
    """
    num_rows, _ = count_both_classes(spec, splits)
    require_extra("lightgbm", "baselines")
    table = _Table(spec, splits)
    if not table.width:
        raise DataError(f"{spec.folder}: holds no feature that a model may read")
    share = min(1.0, most_values / (num_rows * max(1, table.width)))
    kept, held_out = _read_sample(spec, splits, table, share)
    booster, tried = _fit(kept, held_out, table.categorical)
    best = booster.best_iteration or booster.current_iteration()
    facts: dict[str, object] = {"rows": len(kept[1]) + len(held_out[1]), "of_rows": num_rows, "trees": best}
    facts |= {"log_loss_by_max_cat_threshold": tried} if len(tried) > 1 else {}
    facts |= table.facts

    def logits(columns: Mapping[str, Column]) -> Scores:
        rows = table.encode(columns)
        return np.asarray(booster.predict(rows, raw_score=True, num_iteration=best)) if len(rows) else np.zeros(0)

    return Scorer(table.features, logits, facts)


def _fit(kept: _Rows, held_out: _Rows, categorical: Sequence[int]) -> tuple[Any, dict[str, float]]:
    """The booster with the least log loss on the held-out rows, and the loss of each one tried."""
    lightgbm = require_extra("lightgbm", "baselines")
    matrix, labels = kept if _has_both_classes(kept[1]) else _joined([kept, held_out])
    tried: dict[str, float] = {}
    boosters: list[Any] = []
    judges = _has_both_classes(held_out[1]) and labels is kept[1]
    data = lightgbm.Dataset(matrix, labels, categorical_feature=list(categorical))
    judging = [data.create_valid(*held_out)] if judges else []
    for apart in CATEGORIES_APART if judges and categorical else CATEGORIES_APART[:1]:
        booster = lightgbm.train(
            {**PARAMETERS, "max_cat_threshold": apart},
            data,
            num_boost_round=MOST_ROUNDS if judges else ROUNDS_UNJUDGED,
            valid_sets=judging,
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)] if judges else [],
        )
        boosters.append(booster)
        tried[str(apart)] = float(booster.best_score["valid_0"]["binary_logloss"]) if judges else 0.0
    return boosters[int(np.argmin(list(tried.values())))], tried


class _Table:
    """The columns of the matrix: numbers, one category an id feature, counts of a list's ids and its length."""

    def __init__(self, spec: FeatureSpec, splits: Sequence[str]) -> None:
        self.spec, self.numbers, self.crosses = spec, spec.inputs(categorical=False), _crosses(spec)
        ids = tuple(name for name in spec.inputs(categorical=True) if name not in self.crosses)
        self.lists = tuple(name for name in ids if spec.features[name].is_list)
        self.ids = tuple(name for name in ids if name not in self.lists)
        self.features = (*self.numbers, *self.ids, *self.lists)
        counts = _id_counts(spec, splits, ids)
        self.codes = {name: _codes(counts[name], MOST_CATEGORIES) for name in self.ids}
        self.listed = {name: _codes(counts[name], MOST_LISTED) for name in self.lists}
        most = dict.fromkeys(self.ids, MOST_CATEGORIES) | dict.fromkeys(self.lists, MOST_LISTED)
        self.cut = [name for name in ids if np.count_nonzero(counts[name]) > most[name]]
        num_numbers = num_values(spec, categorical=False)
        self.categorical = [num_numbers + place for place in range(len(self.ids))]
        self.width = num_numbers + len(self.ids) + sum(_num_codes(each) for each in self.listed.values())

    @property
    def facts(self) -> dict[str, object]:
        """The features whose rarer ids share a category or are not counted, and those left out, for a report."""
        found = {"rare_ids_together": self.cut, "crosses_left_out": list(self.crosses)}
        return {what: names for what, names in found.items() if names}

    def encode(self, columns: Mapping[str, Column]) -> NDArray[np.float32]:
        """(B, C) matrix of rows."""
        num_rows = len(next(iter(columns.values()))) if columns else 0
        made = np.empty((num_rows, self.width), dtype=np.float32)
        if self.numbers:
            numbers = numbers_of(self.spec, columns, self.numbers)
            made[:, : numbers.shape[1]] = numbers
        for place, name in zip(self.categorical, self.ids, strict=True):
            column = columns[name]
            assert not isinstance(column, Ragged)
            made[:, place] = self.codes[name][column]
        at = self.width - sum(_num_codes(each) for each in self.listed.values())
        for name, codes in self.listed.items():
            wide, column = _num_codes(codes), columns[name]
            assert isinstance(column, Ragged)
            made[:, at : at + wide] = _counts_of_lists(column.truncate(self.spec.features[name].length or 0), codes)
            at += wide
        return made


def _crosses(spec: FeatureSpec) -> tuple[str, ...]:
    """Features that cross raw columns, each of which another feature holds."""
    if not spec.metadata.get("encoders"):
        return ()
    encoders = {name: each for name, each in read_encoders(spec.folder).items() if name in spec.inputs()}
    alone = {each.column or name for name, each in encoders.items() if not isinstance(each, CrossEncoder)}
    return tuple(n for n, each in encoders.items() if isinstance(each, CrossEncoder) and alone.issuperset(each.columns))


def _id_counts(spec: FeatureSpec, splits: Sequence[str], names: Sequence[str]) -> dict[str, Ids]:
    """The count of each id of each feature in the rows to fit."""
    counts: dict[str, Ids] = {name: np.zeros(spec.num_ids(name), dtype=np.int64) for name in names}
    for _, block in row_blocks(spec, splits, names) if names else ():
        for name in names:
            column = block[name]
            ids = column.values if isinstance(column, Ragged) else column
            counts[name] += np.bincount(ids.astype(np.int64), minlength=len(counts[name]))
    return counts


def _codes(counts: Ids, most: int) -> NDArray[np.int32]:
    """The code of each id: from 1 for the most frequent; 0 for those beyond `most`, and those that no row has."""
    frequent = np.argsort(-counts, kind="stable")[:most]
    frequent = frequent[counts[frequent] > 0]
    codes = np.zeros(len(counts), dtype=np.int32)
    codes[frequent] = np.arange(1, len(frequent) + 1)
    return codes


def _num_codes(codes: NDArray[np.int32]) -> int:
    """Codes in use, 0 included."""
    return int(codes.max(initial=0)) + 1


def _counts_of_lists(column: Ragged, codes: NDArray[np.int32]) -> NDArray[np.float32]:
    """(B, codes) the length of each row's list without padding, then the count of each code from 1."""
    kept = column.where(column.values != 0)
    rows = np.repeat(np.arange(len(kept)), kept.lengths)
    wide = _num_codes(codes)
    places = rows * wide + codes[kept.values.astype(np.int64)]
    made = np.bincount(places, minlength=len(kept) * wide).reshape(-1, wide).astype(np.float32)
    made[:, 0] = kept.lengths
    return made


_Rows = tuple[NDArray[np.float32], NDArray[np.bool_]]  # a matrix, and labels


def _read_sample(spec: FeatureSpec, splits: Sequence[str], table: _Table, share: float) -> tuple[_Rows, _Rows]:
    """An even share of the rows, and those of it that are held out; a hash of the row's number picks both."""
    empty = np.zeros((0, table.width), dtype=np.float32)
    kept: list[_Rows] = [(empty, np.zeros(0, dtype=bool))]
    held_out: list[_Rows] = [(empty, np.zeros(0, dtype=bool))]
    for first, block in row_blocks(spec, splits, (*table.features, spec.label)):
        labels = labels_of(block, spec)
        numbers = np.arange(first, first + len(labels), dtype=np.uint64)
        matrix = table.encode({name: block[name] for name in table.features})
        chosen, judging = uniform(numbers, 1) < share, uniform(numbers, 2) < HELD_OUT
        kept.append((matrix[chosen & ~judging], labels[chosen & ~judging]))
        held_out.append((matrix[chosen & judging], labels[chosen & judging]))
    return _joined(kept), _joined(held_out)


def _joined(parts: Sequence[_Rows]) -> _Rows:
    matrices, labels = zip(*parts, strict=True)
    return np.concatenate(matrices), np.concatenate(labels)


def _has_both_classes(labels: NDArray[Any]) -> bool:
    return bool(labels.any() and not labels.all())
