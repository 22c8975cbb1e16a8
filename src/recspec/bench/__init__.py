"""Measurements: training, inference, load, profiles."""

from recspec.bench.load_test import Server, run_load_test
from recspec.bench.speed import bench_inference, bench_training

__all__ = [
    "Server", "bench_inference", "bench_training", "run_load_test",
]  # fmt: skip
