"""A stand-in for `training.train` that follows made-up curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from recspec.base.errors import Interrupted
from recspec.feature_spec import FeatureSpec
from recspec.training.run_folder import Event
from recspec.training.settings import TrainSettings


def made_up_training(curve: Callable[[float], Sequence[float]], metric: str = "rows/auc") -> Callable[..., None]:
    """A function that takes the place of `train` in a search.

    Its metric after each epoch is a function of the learning rate. One value alone stands for a model that is fitted
    at once, without epochs.
    """

    def trained(
        _: str,
        __: FeatureSpec,
        run: Path,
        *,
        settings: TrainSettings,
        on_event: Callable[[Event], None],
        stop_requested: Callable[[], bool],
        **___: object,
    ) -> None:
        values, best = curve(settings.learning_rate), -math.inf
        (run / "bundle").mkdir(parents=True)
        (run / "bundle" / "rate").write_text(str(settings.learning_rate))
        for epoch, value in enumerate(values[:-1], start=1):
            best = max(best, value)
            on_event({"event": "epoch", "epoch": epoch, "epochs": 100, "metric": metric, "best": best})
            if stop_requested():
                raise Interrupted("stopped")
        on_event({"event": "done", "metric": metric, "best": max(values)})

    return trained
