"""The interface of models that are fitted to labelled rows, and whose logits can be explained."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from recspec.models.item_model import FittedModel
from recspec.models.layers import Batch


class FittedRowModel(FittedModel):
    """A fitted model of labelled rows, whose logit is a base and a contribution of each feature."""

    reads: ClassVar[tuple[str, ...]] = (*FittedModel.reads, "calibration")
    metric = "rows/log_loss"

    @abstractmethod
    def contributions(self, batch: Batch) -> tuple[list[str], Tensor, float]:
        """Names of `features` (F,), their contributions (B, F) to the logits of B rows, and the base: the rest of each.

        A calibration is not counted.
        """

    @abstractmethod
    def size(self) -> str:
        """How large the fitted model is, in words."""
