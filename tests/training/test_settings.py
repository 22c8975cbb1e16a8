"""The settings of training: what they refuse."""

from __future__ import annotations

import pytest

from recspec.training.settings import TrainSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"l2": 0.1}, r"l2 is 0\.1, which 'ftrl' read; the optimizer is 'adam'"),
        ({"parts": {"wide": {"momentum": 0.5}}}, r"parts\.wide\.momentum is 0\.5, which 'rmsprop', 'sgd' read"),
        ({"negative_distribution": "popular"}, "Input should be 'uniform' or 'popularity'"),
        ({"metric": "auc"}, "metric is 'auc'; expected PROTOCOL/METRIC with one of the protocols 'rows', 'sampled'"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.model_validate(values)
    TrainSettings.model_validate({"l2": 0.1, "parts": {"wide": {"optimizer": "ftrl"}}})
