"""Metrics as plain functions."""

from recspec.metrics import measures
from recspec.metrics.calibration import Calibration, CalibrationError, Method, calibration_error, fit
from recspec.metrics.measures import AT_K, FEWEST_USERS, Ranking, Values, auc, blur_of
