"""Scores of a split's rows, of candidates and of all items, from a model or a baseline.

Shapes: R users or requests; N items; P pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from recspec.base.errors import SpecError, unknown
from recspec.bundle import run_record
from recspec.data.storage import Column, Ragged, open_split
from recspec.evaluation.interactions import ROWS_PER_BLOCK, Rows, blocks
from recspec.evaluation.row_baselines import Scorer
from recspec.evaluation.task import EvaluationTask
from recspec.feature_spec import Feature, FeatureSpec
from recspec.loading import Ranks, item_features
from recspec.models import Ids, ItemModel, Model, Scores, at_once
from recspec.models.layers import Batch, concatenate, num_rows, take, to_device

Progress = Callable[[str, float, float | None], None]  # called with a stage, the amount done and the whole amount

ROWS_PER_FORWARD = 16_384  # rows a model scores at once on a CPU: 64 MB for each layer of 1024
SIDE = 768
"""Rows of the matrices whose product tells the machine's speed: some 50 ms."""
TIMED = 0.5
"""Seconds after which timing ends."""


def silent(stage: str, done: float, total: float | None) -> None:
    """Progress without a display."""


class Ranker(Protocol):
    """Scores of users' items. Only the order of one user's scores has a meaning."""

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) score of each pair."""

    def score_users(self, users: Ids) -> Scores:
        """(R, N) scores of every item for each user, in an array that the caller may change; the caller bounds R."""


class FullRanker(Ranker, Protocol):
    """A ranker of all items that tells how it ranks."""

    def facts(self, ranks: Ranks) -> Mapping[str, object]:
        """Facts on the protocol, on every rank: `stages` in words, and numbers."""


class ModelRanker:
    """A model as a ranker: the request of each user's first positive row, joined with every item's features."""

    def __init__(self, model: Model, task: EvaluationTask) -> None:
        spec, names = task.spec, model.features()
        item_names = tuple(name for name in names if name in spec.role("item"))
        users, requests = _read_requests(task, tuple(name for name in names if name not in item_names))
        splits = (*task.before, task.split)
        items = item_features(spec, splits, [name for name in item_names if name != spec.item_id])
        if spec.item_id in item_names:
            items[spec.item_id] = torch.arange(spec.num_ids(spec.item_id))
        self.model, self.device, self.users = model, model.device, users
        self.requests, self.items = to_device(requests, self.device), to_device(items, self.device)
        self._score = model.scorer(self.items)
        self._row = np.full(spec.num_ids(spec.user_id), -1, dtype=np.int64)
        self._row[users] = np.arange(len(users))

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) logits."""
        parts = []
        step = rows_per_forward(self.device)
        with _scoring(self.model):
            for start in range(0, len(users), step):
                pairs = slice(start, start + step)
                who, which = self._rows_of(users[pairs]), torch.from_numpy(items[pairs].astype(np.int64))
                batch = {**take(self.requests, who), **take(self.items, which.to(self.device))}
                parts.append(self.model(batch).float().cpu())
        return torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.float32)

    def score_users(self, users: Ids) -> Scores:
        """(R, N) logits of every item, reserved ids included."""
        return self.scores(users).cpu().numpy()

    def scores(self, users: Ids) -> Tensor:
        """`score_users` as a tensor on the model's device, which the caller may change."""
        with _scoring(self.model):
            return self._score(self.request_of(users)).float()

    def request_of(self, users: Ids) -> Batch:
        """The features of each user's request."""
        return take(self.requests, self._rows_of(users))

    def _rows_of(self, users: Ids) -> Tensor:
        return torch.from_numpy(self._row[users]).to(self.device)


@dataclass(eq=False)
class SplitScores:
    """The scores that the protocols of a task need, of a model or a baseline; each rank scores its share."""

    task: EvaluationTask
    of_rows: Callable[[], Scores]  # (rows,) of every row of the split, computed once
    ranker: Callable[[], Ranker]  # of all items, for the users with positives in the split
    gives_logits: bool = True
    calibrated: Callable[[Scores], Scores] | None = None  # calibrated logits of logits, if the model is calibrated
    ranks: Ranks = field(default_factory=Ranks)
    progress: Progress = silent
    known_by: str = ""  # the events of users that the scores depend on, in words
    of_all: FullRanker | None = None  # ranks all items in protocol full, where `ranker` does not

    def of_candidates(self) -> Scores:
        """(rows,) scores of the candidates of `sampled`: the split's rows, or else the drawn pairs."""
        if self.task.lists_candidates:
            return self.of_rows()
        return score_pairs(self.ranker(), self.task.candidates, "sampled", self.ranks, self.progress)


def scores_of(
    model: Model | Ranker | Scorer, task: EvaluationTask, ranks: Ranks | None = None, progress: Progress = silent
) -> SplitScores:
    """The scores of a model, a ranker (no logits), or a baseline of rows (the split's rows only)."""
    ranks = ranks or Ranks()
    if isinstance(model, Model):
        known_by = _known_by(model, task)
        rows = cache(partial(score_rows, model, task.spec, task.split, ranks, progress))
        ranker = partial(ModelRanker, model, task)
        calibrated = model.calibrated if model.calibration is not None else None
        return SplitScores(task, rows, ranker, model.gives_logits, calibrated, ranks, progress, known_by)
    if isinstance(model, Scorer):
        return SplitScores(task, cache(partial(_logits, model, task)), _no_ranker)
    task.spec.require(("user", "item"), "a ranker")
    rows = cache(lambda: score_pairs(model, task.rows, "rows", ranks))
    return SplitScores(task, rows, lambda: model, gives_logits=False, ranks=ranks)


def _known_by(model: Model, task: EvaluationTask) -> str:
    """The events of users that a model's scores depend on, in words; none if it reads ids of users alone."""
    if isinstance(model, ItemModel):
        return " and ".join(task.known)
    if task.histories:
        return f"the histories of the rows of {task.split}"
    return ""


def _logits(scorer: Scorer, task: EvaluationTask) -> Scores:
    reader = open_split(task.spec, task.split, scorer.features)
    return np.concatenate([np.zeros(0), *(scorer.logits(block) for _, block in blocks(reader))])


def _no_ranker() -> Ranker:
    raise AssertionError("a baseline of rows scores neither drawn pairs nor all items")


def score_pairs(ranker: Ranker, rows: Rows, stage: str, ranks: Ranks, progress: Progress = silent) -> Scores:
    """(rows,) a ranker's scores of rows, on every rank."""
    assert rows.users is not None
    assert rows.items is not None
    cuts = np.append(np.arange(0, len(rows.labels), ROWS_PER_BLOCK), len(rows.labels))
    share = ranks.share(len(cuts) - 1)
    pairs = slice(int(cuts[share.start]), int(cuts[share.stop]))
    progress(stage, 0, 1)
    scores = np.asarray(ranker.score_pairs(rows.users[pairs], rows.items[pairs]))
    progress(stage, 1, 1)
    return ranks.gather(torch.from_numpy(scores)).numpy()


def score_rows(
    model: Model, spec: FeatureSpec, split: str, ranks: Ranks | None = None, progress: Progress = silent
) -> Scores:
    """Logits (rows,) of every row of a split in order, on every rank. Memory holds one block and the logits.

    Ranks share whole blocks, so the rows scored together are the same on any number of ranks.
    """
    ranks = ranks or Ranks()
    reader = open_split(spec, split, model.features())
    cuts = reader.blocks(ROWS_PER_BLOCK).tolist()
    share = ranks.share(len(cuts) - 1)
    first, last = cuts[share.start], cuts[share.stop]
    scores, step = np.empty(last - first, dtype=np.float32), rows_per_forward(model.device)
    with _scoring(model):
        for start, stop in pairwise(cuts[share.start : share.stop + 1]):
            progress("rows", start - first, last - first)
            batch = to_device(as_batch(reader.read(start, stop), spec), model.device)
            for row in range(0, stop - start, step):
                part = slice(row, min(row + step, stop - start))
                scores[start - first :][part] = model(take(batch, part)).float().cpu().numpy()
    progress("rows", last - first, last - first)
    return ranks.gather(torch.from_numpy(scores)).numpy()


def rows_per_forward(device: torch.device) -> int:
    """Rows that a model on a device scores at once."""
    return at_once(ROWS_PER_FORWARD, device, width=1024)


def as_batch(columns: Mapping[str, Column], spec: FeatureSpec) -> Batch:
    """Columns as a model's tensors: ids in int32 or int64, numbers in fp32, lists padded with 0 to their length."""
    batch = {}
    for name, column in columns.items():
        feature = spec.features[name]
        if isinstance(column, Ragged):
            assert feature.length is not None
            column = column.pad(feature.length)
        ids = "int32" if column.dtype == np.int32 else "int64"
        wanted = ids if feature.is_categorical else "float32"
        # torch refuses read-only arrays, and Arrow's are read-only
        batch[name] = torch.from_numpy(np.require(column, wanted, ("C", "W")))
    return batch


def _read_requests(task: EvaluationTask, names: Sequence[str]) -> tuple[Ids, Batch]:
    """The users with positives in the split, and the request features of each user's first positive row."""
    spec, rows, user = task.spec, task.rows, task.spec.user_id
    assert rows.users is not None
    assert rows.items is not None
    chosen = np.flatnonzero(rows.labels & (rows.items >= task.first_item))
    users, first = np.unique(rows.users[chosen], return_index=True)
    if set(names) <= {user}:
        return users, {user: torch.from_numpy(users.astype(np.int64))}
    order = np.argsort(chosen[first])
    wanted = chosen[first][order]  # a row for each user, ascending
    parts: list[Batch] = []
    for start, block in blocks(open_split(spec, task.split, names)):
        batch = as_batch(block, spec)
        here = slice(*np.searchsorted(wanted, (start, start + num_rows(batch))))
        parts.append(take(batch, torch.from_numpy(wanted[here] - start)))
    return users, take(concatenate(parts), torch.from_numpy(np.argsort(order)))


def check_same_features(model: Model, spec: FeatureSpec, bundle: Path | None = None) -> None:
    """Check that the dataset holds the model's features, with the same kinds and numbers of ids.

    Raises:
        SpecError: with every feature that is missing or of another kind, and the dataset that the bundle names.
    """
    absent = [name for name in model.features() if name not in spec.features]
    problems = [unknown("feature", absent, spec.features)] if absent else []
    for name in model.features():
        if name in absent:
            continue
        ours, theirs = model.spec.features[name], spec.features[name]
        if ours.is_categorical != theirs.is_categorical or ours.is_list != theirs.is_list:
            problems.append(f"feature '{name}' is of another kind than the model was trained on")
        elif (ours.is_vector or theirs.is_vector) and (ours.vector, ours.length) != (theirs.vector, theirs.length):
            problems.append(
                f"feature '{name}' holds {_numbers_of(theirs)}; the model was trained on {_numbers_of(ours)}"
            )
        elif ours.is_categorical and model.spec.num_ids(name) != spec.num_ids(name):
            problems.append(
                f"feature '{name}' has {spec.num_ids(name)} ids; the model was trained on {model.spec.num_ids(name)}"
            )
    SpecError.refuse(f"{spec.folder}: not the dataset that the model was trained on{_named(bundle)}", problems)


def _named(bundle: Path | None) -> str:
    """The dataset of a bundle, which for an updated run is not the one that was given to `train`."""
    data = None if bundle is None else run_record.data_of(bundle)
    return "" if data is None else f", which is {data.path}"


def _numbers_of(feature: Feature) -> str:
    return f"{'vectors' if feature.is_vector else 'lists'} of {feature.length} numbers"


@contextmanager
def _scoring(model: Model) -> Iterator[None]:
    """Turn dropout and gradients off for a block."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


# --- what scoring costs ----------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call, the fewest of a few."""
    times: list[float] = []
    while sum(times) < TIMED and len(times) < 5:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def seconds_of_an_operation() -> float:
    """Seconds of one of many fp64 operations on one thread, from the product of two matrices."""
    threads, square = torch.get_num_threads(), torch.ones(SIDE, SIDE, dtype=torch.float64)
    torch.set_num_threads(1)
    try:
        return seconds_of(lambda: square @ square) / (2 * SIDE**3)
    finally:
        torch.set_num_threads(threads)
