"""Why rows have their probabilities: a contribution of each raw column to the log-odds.

    log-odds of the probability = base + sum over columns of their contributions

A feature made from several columns, such as a cross, gives each of them an equal part. Without a calibration, the
log-odds are the model's logit. A calibration f, which is increasing, changes the base b to f(b) and all contributions
of a row with the logit x by the factor (f(x) - f(b)) / (x - b), so that they add up to f(x); for a line this is exact.

Shapes: B rows; C raw columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.errors import RequestError
from recspec.data.encoding import Encoders, columns_of
from recspec.models import FittedRowModel, Model
from recspec.models.layers import Batch

NAMED = 5
"""Columns that `RowExplanations.because` names."""
LOG_ODDS, BASE, BECAUSE = "log_odds", "base", "because"
NEAR = 1e-6
"""Distance of a logit from the base below which a row's contributions, which add up to it, keep their size."""


@dataclass(frozen=True, eq=False)
class RowExplanations:
    """The explanations of B rows."""

    base: float
    columns: tuple[str, ...]
    contributions: NDArray[np.float64]
    """(B, C)."""

    @property
    def log_odds(self) -> NDArray[np.float64]:
        """(B,) of the probabilities."""
        made: NDArray[np.float64] = self.base + self.contributions.sum(1)
        return made

    def of_row(self, row: int) -> dict[str, float]:
        """The contributions to one row, largest first."""
        own = self.contributions[row]
        return {self.columns[each]: float(own[each]) for each in np.argsort(-np.abs(own), kind="stable")}

    def because(self, row: int) -> str:
        """The largest contributions to one row, as text."""
        named = [(name, value) for name, value in self.of_row(row).items() if value][:NAMED]
        return "; ".join(f"{name} {value:+.3f}" for name, value in named)

    def to_dicts(self) -> list[dict[str, object]]:
        """An object for each row, for JSON."""
        odds = self.log_odds.tolist()
        return [
            {"log_odds": odds[row], "base": self.base, "contributions": self.of_row(row)} for row in range(len(odds))
        ]

    def to_columns(self) -> dict[str, NDArray[np.generic]]:
        """Columns (B,) for a table."""
        made: dict[str, NDArray[np.generic]] = {
            LOG_ODDS: self.log_odds.astype(np.float32),
            BASE: np.full(len(self.contributions), self.base, np.float32),
        }
        for name, each in zip(self.columns, self.contributions.T, strict=True):
            made[f"contribution_{name}"] = each.astype(np.float32)
        return {**made, BECAUSE: np.array([self.because(row) for row in range(len(self.contributions))], object)}


class RowExplainer:
    """Explains the probabilities that one model gives rows."""

    def __init__(self, model: Model, encoders: Encoders | None) -> None:
        """Raises `RequestError` for a model whose logit is no sum of contributions."""
        if not isinstance(model, FittedRowModel):
            raise RequestError(
                f"explain: {model.name} does not tell what each column contributes to a probability; lightgbm and "
                "logistic_regression do: `recspec train lightgbm DATA RUN`"
            )
        self._model = model
        of: Mapping[str, tuple[str, ...]] = {
            name: columns_of({} if encoders is None else encoders.encoders, name) for name in model.features()
        }
        self.columns = tuple(dict.fromkeys(column for name in model.features() for column in of[name]))
        self._shares = torch.zeros(len(of), len(self.columns), dtype=torch.float64, device=model.device)
        for row, name in enumerate(model.features()):
            for column in of[name]:
                self._shares[row, self.columns.index(column)] += 1 / len(of[name])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of `RowExplanations.to_columns`."""
        return (LOG_ODDS, BASE, *(f"contribution_{name}" for name in self.columns), BECAUSE)

    def explain(self, batch: Batch) -> RowExplanations:
        """The explanations of a batch's rows."""
        _, made, base = self._model.contributions(batch)
        made = made @ self._shares
        if (calibration := self._model.calibration) is not None:
            logits, start = made.sum(1), float(calibration(torch.tensor(base)))
            ends = calibration(base + logits).double()
            factor = torch.where(logits.abs() > NEAR, (ends - start) / logits, 1.0)
            made, base = made * factor.unsqueeze(1), start
        return RowExplanations(base, self.columns, made.cpu().numpy())
