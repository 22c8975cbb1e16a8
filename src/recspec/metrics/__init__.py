"""Metrics as plain functions."""

from recspec.metrics import measures
from recspec.metrics.calibration import Calibration, CalibrationError, Method, calibration_error, fit
from recspec.metrics.measures import AT_K, FEWEST_USERS, Ranking, Values, auc, blur_of

__all__ = [
    "AT_K", "FEWEST_USERS", "Calibration", "CalibrationError", "Method", "Ranking", "Values", "auc", "blur_of",
    "calibration_error", "fit", "measures",
]  # fmt: skip
