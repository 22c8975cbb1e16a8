"""Calibration error and the maps that calibrate, by hand and by what they promise."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from recspec.base.errors import DataError
from recspec.metrics import calibration as of_calibration
from recspec.metrics.calibration import Calibration, Method, calibration_error, fit
from recspec.metrics.measures import log_loss
from recspec.models.layers import CalibrationMap

LN3 = math.log(3)  # the logit of 3/4


def rows(num_rows: int, scale: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `scale` times those that labels are drawn from."""
    rng = np.random.default_rng(seed)
    true = rng.normal(-1, 1.5, num_rows)
    return true * scale, rng.random(num_rows) < 1 / (1 + np.exp(-true))


# --- the error ---


def test_calibration_error_by_hand() -> None:
    """Two rows at 1/4, none positive; two at 3/4, one positive: (2/4) |1/4 - 0| + (2/4) |3/4 - 1/2|."""
    found = calibration_error([-LN3, LN3, -LN3, LN3], [0, 1, 0, 0], num_bins=2)
    assert found.value == pytest.approx(0.25)
    # the share of each bin is off by sqrt(2 / pi) times sqrt(2 (1/4) (3/4)) / 2 on average
    std = math.sqrt(2 * 3 / 16) / 2
    assert found.by_chance == pytest.approx(math.sqrt(2 / math.pi) * std)
    assert found.chance_std == pytest.approx(math.sqrt(2 * 0.25 * std**2 * (1 - 2 / math.pi)))
    assert not found.is_beyond_chance
    assert found.lean == "too high"  # by 1/4 on the whole
    assert [(each.rows, each.true) for each in found.bins] == [(2, 0.0), (2, 0.5)]
    assert [each.expected for each in found.bins] == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(
    ("logits", "labels", "lean"),
    [
        ([-5.0, -5.0, 5.0, 5.0], [0, 1, 1, 0], "overconfident"),
        ([-0.1, -0.1, 0.1, 0.1], [0, 0, 1, 1], "underconfident"),
        ([2.0, 2.0, 2.0, 2.0], [0, 0, 1, 0], "too high"),
        ([-2.0, -2.0, -2.0, -2.0], [1, 1, 1, 0], "too low"),
    ],
)
def test_which_way_probabilities_err(logits: list[float], labels: list[int], lean: str) -> None:
    assert calibration_error(logits, labels, num_bins=2).lean == lean


def test_no_row_one_row_and_saturated_logits() -> None:
    assert math.isnan(calibration_error([], []).value)
    assert not calibration_error([], []).is_beyond_chance
    assert calibration_error([0.0], [1]).value == 0.5
    assert calibration_error([1000.0, -np.inf], [1, 0]).value == 0.0
    assert calibration_error([-1000.0, np.inf], [1, 0]).value == 1.0
    constant = calibration_error(np.full(100, 0.5), np.arange(100) % 2 == 0)  # equal scores share a bin
    assert constant.value == pytest.approx(1 / (1 + math.exp(-0.5)) - 0.5)


@pytest.mark.parametrize("num_rows", [20, 300, 5000])
def test_perfect_probabilities_err_as_chance_says(num_rows: int) -> None:
    found = [calibration_error(*rows(num_rows, seed=seed)) for seed in range(60)]
    mean, expected = np.mean([each.value for each in found]), np.mean([each.by_chance for each in found])
    assert mean == pytest.approx(expected, rel=0.12)
    assert sum(each.is_beyond_chance for each in found) <= 3
    assert all(calibration_error(*rows(5000, 3.0, seed=seed)).is_beyond_chance for seed in range(5))


def test_many_rows_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_calibration, "MOST_ROWS", 100)
    logits, labels = rows(250, 2.0)
    assert calibration_error(logits, labels) == calibration_error(logits[::3], labels[::3])
    assert fit(logits, labels, "temperature") == fit(logits[::3], labels[::3], "temperature")


# --- the maps ---


def test_a_temperature_by_hand() -> None:
    """Logits -1 and 1 with rates 1/4 and 3/4 by Platt's targets: slope ln 3, intercept 0."""
    num = 20_000  # so that (P + 1) / (P + 2) is 1 but for 1e-4
    logits = np.repeat([-1.0, 1.0], num)
    labels = np.concatenate([np.arange(num) % 4 == 0, np.arange(num) % 4 != 0])
    np.testing.assert_allclose(fit(logits, labels, "temperature")([-1.0, 0.0, 1.0]), [-LN3, 0.0, LN3], atol=1e-3)


def test_isotonic_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bin a row, each with one more row at 1/2: rates 1/4, 3/4, 1/4, 3/4. The middle two pool to 1/2 at 1.5."""
    monkeypatch.setattr(of_calibration, "ROWS_PER_KNOT", 1)
    made = fit([0.0, 1.0, 2.0, 3.0], [0, 1, 0, 1], "isotonic")
    assert made.logits[1:-1] == pytest.approx((0.0, 1.5, 3.0))
    assert made.calibrated[1:-1] == pytest.approx((-LN3, 0.0, LN3))
    assert made([0.75]) == pytest.approx([-LN3 / 2])
    slope = made.slopes[0]
    assert made([-10.0]) == pytest.approx([-LN3 - 10 * slope])  # as between the last two knots


def test_isotonic_follows_a_bend_that_no_line_follows() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, 40_000)
    true = np.where(logits > 0, 0.2 * logits, 2 * logits)
    labels = rng.random(len(true)) < 1 / (1 + np.exp(-true))
    losses = {method: log_loss(fit(logits, labels, method)(logits), labels) for method in of_calibration.METHODS}
    assert losses["isotonic"] < losses["temperature"] - 0.002
    assert losses["isotonic"] == pytest.approx(log_loss(true, labels), abs=0.001)


@pytest.mark.parametrize("method", of_calibration.METHODS)
class TestAnyMethod:
    @pytest.mark.parametrize("shape", ["overconfident", "reversed", "separable", "equal", "two values", "huge"])
    def test_the_order_of_scores_stays_and_the_numbers_travel(self, method: of_calibration.Method, shape: str) -> None:
        logits, labels = rows(3000, 4.0)
        given = {
            "overconfident": logits,
            "reversed": -logits,
            "separable": np.where(labels, 50.0, -50.0) + logits,
            "equal": np.full(3000, 7.0),
            "two values": np.where(logits > 0, 1.0, -1.0),
            "huge": logits * 1e6,
        }[shape]
        made = fit(given, labels, method)
        assert Calibration.model_validate_json(made.model_dump_json()) == made
        found = made(np.sort(given))
        assert np.isfinite(found).all()
        assert (np.diff(found) >= 0).all()
        assert len(np.unique(made(given))) == len(np.unique(given))
        before, after = log_loss(given, labels), log_loss(found, labels[np.argsort(given, kind="stable")])
        assert after <= before + 0.006  # perfect scores lose a little to Platt's targets

    def test_the_module_computes_the_same_in_any_shape(self, method: of_calibration.Method) -> None:
        made = fit(*rows(5000, 3.0), method)
        x = np.linspace(-60, 60, 4001).astype(np.float32)
        found = CalibrationMap(made)(torch.from_numpy(x))
        np.testing.assert_allclose(found.numpy(), made(x), rtol=2e-6, atol=1e-5)
        assert bool((found.diff() > 0).all())
        assert CalibrationMap(made)(torch.zeros(2, 3)).shape == (2, 3)
        assert CalibrationMap(made)(torch.zeros(0)).shape == (0,)
        assert CalibrationMap(made).state_dict() == {}  # a bundle keeps the numbers on its card

    def test_a_well_calibrated_model_stays_as_it_is(self, method: of_calibration.Method) -> None:
        logits, labels = rows(50_000)
        assert np.abs(fit(logits, labels, method)(logits) - logits).mean() < 0.1

    @pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1, 1], []])
    def test_rows_of_one_class_are_refused(self, method: of_calibration.Method, labels: list[int]) -> None:
        message = f"of {len(labels)} rows to calibrate on {sum(labels)} are positive; both classes are needed"
        with pytest.raises(DataError, match=message):
            fit([0.0] * len(labels), labels, method)

    def test_infinite_logits_are_refused(self, method: of_calibration.Method) -> None:
        with pytest.raises(DataError, match="1 of 2 logits to calibrate are infinite"):
            fit([np.inf, 0.0], [1, 0], method)
        assert np.isfinite(fit([0.0, 1.0], [0, 1], method)([-1e4, 0.5, 1e4])).all(), "two rows are enough"


@pytest.mark.parametrize(
    ("knots", "message"),
    [
        ({"logits": [0, 1, 1], "calibrated": [0, 1, 2]}, "do not increase"),
        ({"logits": [0, 1], "calibrated": [1, 0]}, "slopes from -1 to -1; expected 1e-12 to 1e\\+12: an"),
        ({"logits": [0, 1], "calibrated": [0, 1, 2]}, "2 logits and 3 calibrated"),
        ({"logits": [0], "calibrated": [0]}, "at least 2 items"),
        ({"logits": list(range(99)), "calibrated": list(range(99))}, "at most 66 items"),
        ({"logits": [0, math.nan], "calibrated": [0, 1]}, "finite number"),
        ({"logits": [0, 1e12], "calibrated": [0, 1]}, "less than or equal to"),
        ({"logits": [0, 1], "calibrated": [0, 1], "more": 1}, "Extra inputs"),
    ],
)
def test_a_damaged_map_is_refused(knots: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Calibration.model_validate({"method": "isotonic", **knots})


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_diverged_logits_are_a_message(method: Method) -> None:
    logits = np.random.default_rng(0).normal(size=10) * 1e9
    with pytest.raises(DataError, match=r"no calibration fits logits that reach .*: the model has diverged"):
        fit(logits, np.arange(10) % 2, method)
