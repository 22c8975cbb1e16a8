"""Histories of many kinds, in all forms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from recspec.models.layers.events import events_on_gpu, jagged_events, padded_events

FORMS = {
    "jagged": jagged_events,
    "even": partial(jagged_events, even=True),
    "padded": padded_events,
    "all rows at every step": events_on_gpu,
    "one wait": partial(events_on_gpu, short=0),
}


PRESENT: dict[str, list[list[int]]] = {
    "some": [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "holes": [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
    "ties": [[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]],
    "one row": [[1, 1, 0]],
    "one empty row": [[0, 0, 0]],
    "all empty": [[0, 0], [0, 0]],
    "no place": [[], []],
    "no row": [],
}


def present_of(name: str) -> Tensor:
    rows = PRESENT[name]
    return torch.tensor(rows, dtype=torch.bool).view(len(rows), len(rows[0]) if rows else 3)
