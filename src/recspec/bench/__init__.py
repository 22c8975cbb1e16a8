"""Measurements: training, inference, load, profiles."""

from recspec.bench.load_test import Server, run_load_test
from recspec.bench.speed import bench_inference, bench_training
