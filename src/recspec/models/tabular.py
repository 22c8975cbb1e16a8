"""What DLRM and DCNv2 share: embeddings beside an MLP over the numbers.

Shapes: B rows; X width of x_0; R requests; N items to score.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models import base
from recspec.models.base import Model, at_once, list_problems
from recspec.models.layers import (
    Batch,
    Embeddings,
    Mlp,
    RowsHeld,
    ids_and_numbers,
    num_rows,
    number_widths,
    side_by_side,
)

Part = tuple[Tensor, Sequence[int]]
"""Some columns of a tensor, (..., n), and their places in it."""


class Tabular(Model):
    """A model of x_0 (B, X): the bottom MLP's output, or the numbers unchanged, then the embeddings; lists are pooled.

    The numbers are those of scalar features and of vectors, side by side. Without numbers there is no bottom MLP.
    """

    pair_floats: int
    """Floats of a pair's widest layer."""

    def __init__(self, spec: FeatureSpec, settings: config.Settings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.ids, self.numbers = ids_and_numbers(spec, spec.inputs())
        self.number_widths = number_widths(spec, self.numbers)
        SettingsError.refuse(self.name, self.problems())

    def problems(self) -> list[str]:
        """Why the specification and the settings make no model, a sentence each."""
        found = list_problems(self.spec, self.numbers, self.name)
        if not self.ids and not self.numbers:
            found.append("there is no feature to read in the roles user, item and context")
        return found

    def make_inputs(
        self,
        widths: Mapping[str, int],
        bottom: Sequence[int],
        *,
        combiner: Literal["sum", "mean"],
        std: float | None,
        max_rows: int | None,
        table_rows: RowsHeld | None,
    ) -> None:
        """Make the embeddings, of these widths, and the bottom MLP."""
        if self.ids:
            self.embeddings = Embeddings(
                self.spec, widths, combiner=combiner, start="uniform", std=std, max_rows=max_rows, table_rows=table_rows
            )
        self.dense_dim, self.has_bottom = sum(self.number_widths.values()), bool(self.numbers and bottom)
        if self.has_bottom:
            self.bottom, self.dense_dim = Mlp((self.dense_dim, *bottom)), bottom[-1]
        self.width = self.dense_dim + sum(widths.values())

    def inputs(self, batch: Batch) -> list[Tensor]:
        """The parts of x_0: that of the numbers, and the embeddings."""
        parts: list[Tensor] = []
        if self.numbers:
            numbers = side_by_side([batch[name] for name in self.numbers])
            parts.append(self.bottom(numbers) if self.has_bottom else numbers)
        if self.ids:
            parts.append(self.embeddings(batch))
        return parts

    @abstractmethod
    def logits_of(self, parts: Sequence[Part]) -> Tensor:
        """Logits (R, N) from the parts of x_0, each (R or 1, N or 1, n): requests', items', then a part of both."""

    def item_parts(self, items: Batch) -> tuple[list[Part], int]:
        """The parts of x_0 from the items' features, and the number of items."""
        return self.columns_of(items), num_rows(items)

    def side_scores(self, request: Batch, items: tuple[list[Part], int]) -> Tensor:
        """`Model.score_items`, with embeddings, and products that concern one side, computed once for it.

        If one side holds all numbers, the bottom MLP runs once for it; otherwise its first layer runs once for each
        side.
        """
        ours, (theirs, count) = self.columns_of(request), items
        if torch.compiler.is_compiling():
            return self._pairs(ours, theirs)
        wide = max(1, at_once(base.SCORE_FLOATS, self.device) // self.pair_floats)  # items of a block
        step = max(1, wide // count)  # requests of a block
        return torch.cat(
            [
                torch.cat(
                    [self._pairs(_rows(ours, at, step), _rows(theirs, to, wide)) for to in range(0, count, wide)], 1
                )
                for at in range(0, num_rows(request), step)
            ]
        )

    def columns_of(self, batch: Batch) -> list[Part]:
        """The parts of x_0 from a batch's features, (rows, n), with their columns in x_0.

        If a bottom MLP also reads numbers of the other side, these numbers are unchanged, with columns from the end: -1
        is the first number.
        """
        parts: list[Part] = []
        if numbers := [name for name in self.numbers if name in batch]:
            stacked = side_by_side([batch[name] for name in numbers])
            owners = [name for name, width in self.number_widths.items() for _ in range(width)]
            places = [place for place, name in enumerate(owners) if name in batch]
            if not self.has_bottom:
                parts.append((stacked, places))
            elif len(numbers) == len(self.numbers):
                parts.append((self.bottom(stacked), range(self.dense_dim)))
            else:
                parts.append((stacked, [-1 - place for place in places]))
        if self.ids and (names := [name for name in self.embeddings.order() if name in batch]):
            columns, start = list[int](), self.dense_dim
            for name in self.embeddings.order():
                stop = start + self.embeddings.widths[name]
                columns += range(start, stop) if name in batch else ()
                start = stop
            parts.append((self.embeddings(batch, names), columns))
        return parts

    def _pairs(self, ours: Sequence[Part], theirs: Sequence[Part]) -> Tensor:
        """Logits (R, N)."""
        return self.logits_of(self.parts_of_pairs(ours, theirs))

    def parts_of_pairs(self, ours: Sequence[Part], theirs: Sequence[Part]) -> list[Part]:
        """What `logits_of` reads, from the requests' and the items' parts, (rows, n) each."""
        laid = [(x.unsqueeze(1), columns) for x, columns in ours] + [(x.unsqueeze(0), columns) for x, columns in theirs]
        parts = [part for part in laid if part[1][0] >= 0]
        if halves := [(x, [-1 - place for place in columns]) for x, columns in laid if columns[0] < 0]:
            dense = self.bottom.after_first(linear_of_parts(self.bottom.first, halves))
            parts.append((dense, range(self.dense_dim)))
        return parts


def _rows(parts: Sequence[Part], start: int, count: int) -> list[Part]:
    """Some rows of parts."""
    return [(x[start : start + count], columns) for x, columns in parts]


def linear_of_parts(layer: nn.Linear, parts: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """A linear layer's output from broadcasting parts of its input, each (..., n) with the layer's n columns for it.

    So a request's part is multiplied once a request, and an item's part once an item.
    """
    total: Tensor | None = None
    for x, columns in parts:
        product = F.linear(x, layer.weight[:, torch.tensor(columns, device=x.device)])
        total = product if total is None else total + product
    assert total is not None, "a layer without input"
    return total if layer.bias is None else total + layer.bias
