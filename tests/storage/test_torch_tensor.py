"""Chunks of tensors, and pickled objects that are never loaded."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch

from recspec.data.storage import SplitWriter, open_split
from recspec.feature_spec import Feature
from tests.storage.files import problems_of, spec_of


def test_torch_tensors_hold_one_dtype_each_as_published(tmp_path: Path) -> None:
    features = {
        "user": Feature(dtype="int64", cardinality=9),
        "item": Feature(dtype="int64", cardinality=9),
        "label": Feature(dtype="float32"),
    }
    with SplitWriter(tmp_path, "test", features, "torch_tensor", label="label") as writer:
        writer.write({"user": np.array([1, 2]), "item": np.array([3, 4]), "label": np.array([1.0, 0.0])})
    ids = torch.load(tmp_path / "test/data_0.pt", weights_only=True)
    labels = torch.load(tmp_path / "test/data_1.pt", weights_only=True)
    assert (ids.dtype, ids.tolist()) == (torch.int64, [[1, 3], [2, 4]])
    assert (labels.dtype, labels.tolist()) == (torch.float32, [[1.0], [0.0]])


def test_old_and_one_dimensional_tensors_are_read(tmp_path: Path) -> None:
    torch.save(torch.tensor([1, 2, 3]), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.bfloat16), tmp_path / "b.pt")
    sources = {
        "train": [
            {"type": "torch_tensor", "features": ["a"], "files": ["a.pt"]},
            {"type": "torch_tensor", "features": ["label"], "files": ["b.pt"]},
        ]
    }
    columns = open_split(spec_of(tmp_path, {"a": {"cardinality": 5}}, sources), "train").read(0, 3)
    assert (columns["a"].tolist(), columns["label"].tolist()) == ([1, 2, 3], [1, 0, 1])


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": Evil()}, tmp_path / "b.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "c.pt")
    torch.save(torch.zeros(2, 3), tmp_path / "d.pt")
    files = ["a.pt", "b.pt", "c.pt", "d.pt"]
    spec = spec_of(tmp_path, {}, {"train": [{"type": "torch_tensor", "features": ["label"], "files": files}]})
    assert problems_of(spec) == [
        "a.pt: holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)",
        "b.pt: holds no plain tensor, and pickled objects are never loaded; use torch.save(tensor)",
        "c.pt: holds a dict; expected one tensor (rows, columns)",
        "d.pt: holds a tensor of shape (2, 3); expected (rows, 1): 'label'",
    ]
    assert not (tmp_path / "ran").exists()
