"""The best of scored candidates, with boosts and variety.

Shapes: R users; C candidates of a user; P items of a pool; k items of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.inference.choice import Choice
from recspec.inference.diversity import by_values, by_vectors, diversified, pool_size
from recspec.retrieval import highest


@dataclass(frozen=True, eq=False)
class Ranked:
    """The best candidates of R users; -1 and -inf fill short lists."""

    items: NDArray[np.int64]  # (R, k)
    scores: NDArray[np.float32]  # (R, k)
    boosts: NDArray[np.float32]  # (R, k), the part of the scores that boosts added


def ranked(
    scores: Tensor, ids: Tensor, k: int, choice: Choice, *, diversity: float = 0.0, vectors: Tensor | None = None
) -> Ranked:
    """The k best of candidates (R, C), whose ids ascend in each row; -inf leaves one out, equal scores go by id."""
    boosts = torch.zeros(1, 1).expand(scores.shape)
    if choice.boosts is not None:
        boosts = torch.from_numpy(choice.boosts)[ids.clamp(min=0)] * _spread(scores)
        scores = scores + boosts
    best, places = highest(scores, min(pool_size(k) if diversity else k, scores.shape[1]))
    if diversity:
        order = _diverse(best, ids.gather(1, places), k, choice, diversity, vectors)
        best, places = best.gather(1, order), places.gather(1, order)
    items = torch.where(best.isfinite(), ids.gather(1, places), -1)
    more = (0, k - best.shape[1])
    wide = torch.nn.functional.pad
    return Ranked(
        wide(items, more, value=-1).numpy(),
        wide(best, more, value=-np.inf).numpy(),
        wide(boosts.gather(1, places), more).numpy(),
    )


def _diverse(scores: Tensor, ids: Tensor, k: int, choice: Choice, diversity: float, vectors: Tensor | None) -> Tensor:
    """Places (R, at most k) in pools (R, P), best first, of lists with variety; candidates left out come last."""
    made = torch.arange(scores.shape[1] - 1, -1, -1)[:k].repeat(len(scores), 1)
    for row in range(len(scores)):
        held = int(scores[row].isfinite().sum())
        own = ids[row, :held]
        if choice.groups is not None:
            likeness = by_values(choice.groups.take((own - choice.first_id).numpy()))
        else:
            assert vectors is not None, "checked with the request"
            likeness = by_vectors(vectors[own].numpy())
        chosen = diversified(scores[row, :held].numpy(), likeness, k, diversity)
        others = torch.arange(held, scores.shape[1])[: made.shape[1] - len(chosen)]
        made[row] = torch.cat([torch.from_numpy(chosen), others])
    return made


def _spread(scores: Tensor) -> Tensor:
    """(R, 1) standard deviation of the finite scores of each row (R, C); 0 without any."""
    held = scores.isfinite()
    count = held.sum(1, keepdim=True).clamp(min=1)
    values = torch.where(held, scores, 0.0).double()
    mean = values.sum(1, keepdim=True) / count
    return (torch.where(held, values - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt().float()
