"""The highest scores of each row.

Shapes: R rows; N scores of a row; k of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 64
"""Neighbouring scores whose best one is found first."""


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values (R, k) and places (R, k) of the k highest of each row (R, N), best first, equal ones by place.

    Of long rows, the best of each run of neighbours is found first, in one pass at the speed of memory. The k runs with
    the highest best scores, equal ones by place, hold the k highest scores.
    """
    runs = scores.shape[1] // RUN
    if runs < 4 * k or not k:
        return _top(scores, k)
    whole = scores[:, : runs * RUN].view(len(scores), runs, RUN)
    chosen = _top(whole.amax(2), k)[1].sort(dim=1).values
    places = torch.cat(
        [
            (chosen.unsqueeze(2) * RUN + torch.arange(RUN, device=scores.device)).flatten(1),
            torch.arange(runs * RUN, scores.shape[1], device=scores.device).expand(len(scores), -1),
        ],
        dim=1,
    )
    best, found = _top(scores.gather(1, places), k)
    return best, places.gather(1, found)


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `highest`; rows where torch.topk keeps any of the equal scores at the list's end are sorted."""
    best, places = torch.topk(scores, k, dim=1)
    if k:
        last = best[:, -1:]
        cut = ((scores >= last).sum(dim=1) > k) & torch.isfinite(last[:, 0])
        places[cut] = torch.argsort(scores[cut], dim=1, descending=True, stable=True)[:, :k]
    places = places.sort(dim=1).values
    best = scores.gather(1, places)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)
