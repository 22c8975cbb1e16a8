"""FTRL, RMSprop and Adagrad against TensorFlow's, over the same random gradients.

TensorFlow runs in an environment of its own: the Python of `$RECSPEC_TENSORFLOW`, or one that the test makes (a minute,
1.2 GB, a package registry).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings

REQUIREMENTS = ("tensorflow-cpu==2.15.1", "numpy==1.26.4", "protobuf==4.25.9")

CASES: dict[str, tuple[str, dict[str, float], dict[str, object]]] = {
    "ftrl": ("Ftrl", {"learning_rate": 0.02}, {"optimizer": "ftrl", "learning_rate": 0.02}),
    "ftrl, l1 and l2": (
        "Ftrl",
        {
            "learning_rate": 0.2,
            "initial_accumulator_value": 0.3,
            "l1_regularization_strength": 0.5,
            "l2_regularization_strength": 0.25,
        },
        {"optimizer": "ftrl", "learning_rate": 0.2, "initial_accumulator": 0.3, "l1": 0.5, "l2": 0.25},
    ),
    "rmsprop": ("RMSprop", {"learning_rate": 0.001}, {"optimizer": "rmsprop", "learning_rate": 0.001}),
    "rmsprop, rho 0.5": (
        "RMSprop",
        {"learning_rate": 0.00012, "rho": 0.5},
        {"optimizer": "rmsprop", "learning_rate": 0.00012, "rho": 0.5},
    ),
    "adagrad": (
        "Adagrad",
        {"learning_rate": 0.05, "initial_accumulator_value": 0.1, "epsilon": 1e-7},
        {"optimizer": "adagrad", "learning_rate": 0.05, "initial_accumulator": 0.1, "eps": 1e-7},
    ),
}
"""Class of tf.keras.optimizers.legacy and what it is given; what is the same here."""

STEPS, ROWS, DIM = 20, 12, 3

SCRIPT = """
import json, sys
import numpy as np
import tensorflow as tf

folder, cases = sys.argv[1], json.loads(sys.argv[2])
gradients = np.load(f"{folder}/gradients.npy")
ids = np.load(f"{folder}/ids.npy")
found = {}
for name, (kind, values, _) in cases.items():
    for sparse in (False, True):
        optimizer = getattr(tf.keras.optimizers.legacy, kind)(**values)
        weight = tf.Variable(np.load(f"{folder}/start.npy") if kind != "Ftrl" else np.zeros_like(gradients[0]))
        seen = []
        for rows, gradient in zip(ids, gradients):
            if sparse:
                gradient = tf.IndexedSlices(gradient[: len(rows)], tf.constant(rows), weight.shape)
            optimizer.apply_gradients([(tf.convert_to_tensor(gradient) if not sparse else gradient, weight)])
            seen.append(weight.numpy())
        found[f"{name}/{sparse}"] = np.stack(seen)
np.savez(f"{folder}/found.npz", **found)
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has TensorFlow."""
    given = os.environ.get("RECSPEC_TENSORFLOW")
    if given:
        return given
    folder = tmp_path_factory.mktemp("tensorflow")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    return str(python)


@pytest.fixture(scope="module")
def theirs(interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of gradients, ids and TensorFlow's weights after each step."""
    folder = tmp_path_factory.mktemp("gradients")
    generator = np.random.default_rng(0)
    np.save(folder / "start.npy", generator.normal(size=(ROWS, DIM)).astype(np.float32))
    np.save(folder / "gradients.npy", generator.normal(size=(STEPS, ROWS, DIM)).astype(np.float32))
    np.save(folder / "ids.npy", generator.integers(0, ROWS, size=(STEPS, 5)))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run(
        [interpreter, "-c", SCRIPT, str(folder), json.dumps(CASES)], check=True, env=environment, capture_output=True
    )
    return folder


def ours(folder: Path, given: dict[str, object], by_rows: bool) -> np.ndarray:
    start = np.load(folder / "start.npy")
    weight = nn.Parameter(torch.from_numpy(start if given["optimizer"] != "ftrl" else np.zeros_like(start)))
    optimizers = Optimizers([("weight", weight)], OptimizerSettings.model_validate(given))
    seen = []
    for ids, gradient in zip(np.load(folder / "ids.npy"), np.load(folder / "gradients.npy"), strict=True):
        weight.grad = torch.from_numpy(gradient)
        if by_rows:
            places, values = torch.from_numpy(ids)[None], torch.from_numpy(gradient[: len(ids)])
            weight.grad = torch.sparse_coo_tensor(places, values, weight.shape, check_invariants=True)
        optimizers.step()
        seen.append(weight.detach().numpy().copy())
    return np.stack(seen)


@pytest.mark.slow
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_tensorflows(name: str, by_rows: bool, theirs: Path) -> None:
    _, _, given = CASES[name]
    expected = np.load(theirs / "found.npz")[f"{name}/{by_rows}"]
    found = ours(theirs, given, by_rows=by_rows)
    assert np.abs(found[-1] - found[0]).max() > 1e-4
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
