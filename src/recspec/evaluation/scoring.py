"""Scores of a split's rows, of candidates and of all items, from a model or a baseline.

Shapes: R users or requests; N items; P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.batch import Batch, take, to_device
from recspec.distributed import Ranks
from recspec.errors import SpecError, unknown
from recspec.evaluation.item_baselines import Ranker
from recspec.evaluation.question import EARLIER, Question
from recspec.evaluation.row_baselines import Scorer
from recspec.evaluation.rows import ROWS_PER_BLOCK, Ids, Rows, Scores, blocks
from recspec.loading import item_features
from recspec.models import Model
from recspec.spec import FeatureSpec
from recspec.storage import Column, Ragged, open_split

Progress = Callable[[str, float, float | None], None]
"""Called with a stage's name, the amount done and the whole amount."""

ROWS_PER_FORWARD = 16_384
"""Rows a model scores at once: 64 MB for each layer of 1024."""


class ModelRanker:
    """A model as a ranker: features of requests and features of items, joined into pairs.

    `requests` holds a row for each of `users`; `items` holds a row for each item id from 0.
    """

    def __init__(self, model: Model, requests: Batch, items: Batch, *, users: Ids, num_users: int) -> None:
        self.model = model
        self.device = model.device
        self.requests, self.items = to_device(requests, self.device), to_device(items, self.device)
        self._row = np.full(num_users, -1, dtype=np.int64)
        self._row[users] = np.arange(len(users))

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) logits, `ROWS_PER_FORWARD` at a time."""
        parts = []
        with _scoring(self.model):
            for start in range(0, len(users), ROWS_PER_FORWARD):
                pairs = slice(start, start + ROWS_PER_FORWARD)
                who, which = self._rows_of(users[pairs]), torch.from_numpy(items[pairs].astype(np.int64))
                batch = {**take(self.requests, who), **take(self.items, which.to(self.device))}
                parts.append(self.model(batch).float().cpu())
        return torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.float32)

    def score_users(self, users: Ids) -> Scores:
        """(R, N) logits of every item, reserved ids included."""
        return self.scores(users).cpu().numpy()

    def scores(self, users: Ids) -> Tensor:
        """`score_users` as a tensor on the model's device."""
        with _scoring(self.model):
            return self.model.score_items(take(self.requests, self._rows_of(users)), self.items).float()

    def _rows_of(self, users: Ids) -> Tensor:
        return torch.from_numpy(self._row[users]).to(self.device)


class SplitScores(Protocol):
    """The scores that the protocols need."""

    gives_logits: bool

    def of_rows(self, progress: Progress) -> Scores:
        """(rows,) scores of every row of the split."""

    def of_candidates(self, progress: Progress) -> Scores:
        """(rows,) scores of the candidates of `sampled`."""

    def ranker(self) -> Ranker:
        """A ranker of all items for the users with positives in the split."""


class RankerScores:
    """Scores of a ranker; each rank scores its share."""

    gives_logits = False

    def __init__(self, ranker: Ranker, question: Question, ranks: Ranks) -> None:
        self._ranker, self.question, self.ranks = ranker, question, ranks
        self._rows: Scores | None = None
        question.spec.require(("user", "item"), "a ranker")

    def of_rows(self, progress: Progress) -> Scores:
        """Scores of the rows' pairs, computed once."""
        if self._rows is None:
            self._rows = self._pairs(self.question.rows, "rows", progress)
        return self._rows

    def of_candidates(self, progress: Progress) -> Scores:
        """Scores of the split's rows if they are the candidates, else of the drawn pairs."""
        if self.question.lists_candidates:
            return self.of_rows(progress)
        return self._pairs(self.question.candidates, "sampled", progress)

    def ranker(self) -> Ranker:
        """The ranker."""
        return self._ranker

    def _pairs(self, rows: Rows, stage: str, progress: Progress) -> Scores:
        assert rows.users is not None
        assert rows.items is not None
        cuts = np.append(np.arange(0, len(rows.labels), ROWS_PER_BLOCK), len(rows.labels))
        share = self.ranks.share(len(cuts) - 1)
        pairs = slice(int(cuts[share.start]), int(cuts[share.stop]))
        progress(stage, 0, 1)
        scores = np.asarray(self._ranker.score_pairs(rows.users[pairs], rows.items[pairs]))
        progress(stage, 1, 1)
        return _gather(scores, self.ranks)


class ScorerScores:
    """Logits of a split's rows from a baseline of rows."""

    gives_logits = True

    def __init__(self, scorer: Scorer, question: Question) -> None:
        self._scorer, self.question = scorer, question
        self._rows: Scores | None = None

    def of_rows(self, progress: Progress) -> Scores:  # noqa: ARG002
        """Logits of every row, computed once."""
        if self._rows is None:
            reader = open_split(self.question.spec, self.question.split, self._scorer.features)
            parts = [self._scorer.logits(block) for _, block in blocks(reader)]
            self._rows = np.concatenate([np.zeros(0, dtype=np.float64), *parts])
        return self._rows

    def of_candidates(self, progress: Progress) -> Scores:
        """The same logits; the candidates are always the split's rows."""
        assert self.question.lists_candidates, "a baseline of rows can't score drawn pairs"
        return self.of_rows(progress)

    def ranker(self) -> Ranker:
        """Never called: a baseline of rows has no protocol `full`."""
        raise AssertionError("a baseline of rows can't score all items")


class ModelScores:
    """Logits of a model, for a split's rows and for pairs of users and items."""

    gives_logits = True

    def __init__(self, model: Model, question: Question, ranks: Ranks) -> None:
        self.model, self.question, self.ranks = model, question, ranks
        self._rows: Scores | None = None

    def of_rows(self, progress: Progress) -> Scores:
        """Logits of every row, computed once."""
        if self._rows is None:
            question = self.question
            self._rows = score_rows(self.model, question.spec, question.split, self.ranks, progress)
        return self._rows

    def of_candidates(self, progress: Progress) -> Scores:
        """Logits of the split's rows if they are the candidates, else of the drawn pairs."""
        if self.question.lists_candidates:
            return self.of_rows(progress)
        return RankerScores(self.ranker(), self.question, self.ranks).of_candidates(progress)

    def ranker(self) -> Ranker:
        """The model with one request for each user: the features of the user's first positive row."""
        spec, split, names = self.question.spec, self.question.split, self.model.features()
        item_names = tuple(name for name in names if name in spec.role("item"))
        request_names = tuple(name for name in names if name not in item_names)
        users, requests = _read_requests(self.question, request_names)
        splits = [name for name in (*EARLIER.get(split, ("train",)), split) if name in spec.splits]
        items = item_features(spec, splits, [name for name in item_names if name != spec.item_id])
        if spec.item_id in item_names:
            items[spec.item_id] = torch.arange(spec.num_ids(spec.item_id))
        return ModelRanker(self.model, requests, items, users=users, num_users=spec.num_ids(spec.user_id))


def score_rows(
    model: Model,
    spec: FeatureSpec,
    split: str,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Logits (rows,) of every row of a split in order, on every rank. Memory holds one block and the logits.

    Ranks share whole blocks, so the rows scored together are the same on any number of ranks.
    """
    ranks, progress = ranks or Ranks(), progress or silent
    reader = open_split(spec, split, model.features())
    cuts = reader.blocks(ROWS_PER_BLOCK).tolist()
    share = ranks.share(len(cuts) - 1)
    first, last = cuts[share.start], cuts[share.stop]
    scores = np.empty(last - first, dtype=np.float32)
    with _scoring(model):
        for start, stop in pairwise(cuts[share.start : share.stop + 1]):
            progress("rows", start - first, last - first)
            batch = to_device(as_batch(reader.read(start, stop), spec), model.device)
            for row in range(0, stop - start, ROWS_PER_FORWARD):
                part = slice(row, min(row + ROWS_PER_FORWARD, stop - start))
                scores[start - first :][part] = model(take(batch, part)).float().cpu().numpy()
    progress("rows", last - first, last - first)
    return _gather(scores, ranks)


def as_batch(columns: Mapping[str, Column], spec: FeatureSpec) -> Batch:
    """Columns as a model's tensors: ids in int32 or int64, numbers in fp32, lists padded with 0 to their length."""
    batch = {}
    for name, column in columns.items():
        feature = spec.features[name]
        if isinstance(column, Ragged):
            assert feature.length is not None
            column = column.pad(feature.length)
        wanted = np.float32
        if feature.is_categorical:
            wanted = np.int32 if column.dtype == np.int32 else np.int64  # type: ignore[assignment]
        # torch refuses read-only arrays, and Arrow's are read-only
        batch[name] = torch.from_numpy(np.require(column, wanted, ("C", "W")))
    return batch


def _read_requests(question: Question, names: Sequence[str]) -> tuple[Ids, Batch]:
    """The users with positives in the split, and the request features of each user's first positive row."""
    spec, rows, user = question.spec, question.rows, question.spec.user_id
    assert rows.users is not None
    assert rows.items is not None
    chosen = np.flatnonzero(rows.labels & (rows.items >= question.first_item))
    users, first = np.unique(rows.users[chosen], return_index=True)
    if set(names) <= {user}:
        return users, {user: torch.from_numpy(users.astype(np.int64))}
    wanted = chosen[first]  # a row for each user, in the users' order
    order = np.argsort(wanted)
    parts: list[Batch] = []
    reader = open_split(spec, question.split, names)
    for start, block in blocks(reader):
        batch = as_batch(block, spec)
        stop = start + len(next(iter(batch.values())))
        here = wanted[order[np.searchsorted(wanted[order], start) : np.searchsorted(wanted[order], stop)]]
        parts.append(take(batch, torch.from_numpy(here - start)))
    back = torch.from_numpy(np.argsort(order))
    return users, {name: torch.cat([part[name] for part in parts]).index_select(0, back) for name in names}


def check_same_features(model: Model, spec: FeatureSpec) -> None:
    """Check that the dataset holds the model's features, with the same kinds and numbers of ids.

    Raises:
        SpecError: with every feature that is missing or of another kind.
    """
    absent = [name for name in model.features() if name not in spec.features]
    problems = [unknown("feature", absent, spec.features)] if absent else []
    for name in model.features():
        if name in absent:
            continue
        ours, theirs = model.spec.features[name], spec.features[name]
        if ours.is_categorical != theirs.is_categorical or ours.is_list != theirs.is_list:
            problems.append(f"feature '{name}' is of another kind than the model was trained on")
        elif ours.is_categorical and model.spec.num_ids(name) != spec.num_ids(name):
            problems.append(
                f"feature '{name}' has {spec.num_ids(name)} ids; the model was trained on {model.spec.num_ids(name)}"
            )
    if problems:
        raise SpecError.of(f"{spec.folder}: not the dataset that the model was trained on", problems)


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


def silent(stage: str, done: float, total: float | None) -> None:
    """Progress without a display."""


def _gather(rows: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    return ranks.gather(torch.from_numpy(rows)).numpy() if ranks.world_size > 1 else rows
