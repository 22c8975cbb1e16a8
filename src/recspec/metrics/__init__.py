"""Metrics as plain functions."""

from recspec.metrics import measures
from recspec.metrics.calibration import Calibration, CalibrationError, Method, calibration_error, fit
from recspec.metrics.measures import AT_K, Ranking, Values, auc
