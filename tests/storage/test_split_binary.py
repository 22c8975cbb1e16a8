"""Chunks of raw little-endian rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recspec.data.storage import SplitWriter, open_split
from recspec.feature_spec import Feature
from tests.storage.files import problems_of, spec_of, written


def test_memory_mapped_files_are_cut_evenly(tmp_path: Path) -> None:
    spec, _ = written(tmp_path, 100, "split_binary")
    assert open_split(spec, "train").blocks(40).tolist() == [0, 40, 80, 100]


def test_split_binary_is_what_the_published_format_says_byte_for_byte(tmp_path: Path) -> None:
    features = {
        "num_0": Feature(dtype="float16"),
        "num_1": Feature(dtype="float16"),
        "cat_0.bin": Feature(dtype="int8", cardinality=5),
        "cat/1": Feature(dtype="int32", cardinality=70000),
        "label": Feature(dtype="bool"),
    }
    with SplitWriter(tmp_path, "train", features, "split_binary", label="label") as writer:
        writer.write(
            {
                "num_0": np.array([1, 2], np.float16),
                "num_1": np.array([0.5, 0], np.float16),
                "cat_0.bin": np.array([4, 0]),
                "cat/1": np.array([1, 65536]),
                "label": np.array([True, False]),
            }
        )
    assert {(chunk.features, chunk.files) for chunk in writer.chunks} == {
        (("num_0", "num_1"), ("train/numerical.bin",)),
        (("cat_0.bin",), ("train/cat_0.bin",)),
        (("cat/1",), ("train/cat_1.bin",)),
        (("label",), ("train/label.bin",)),
    }
    read = {path.name: path.read_bytes() for path in (tmp_path / "train").iterdir()}
    assert read == {
        "numerical.bin": bytes.fromhex("003c 0038 0040 0000"),
        "cat_0.bin": bytes([4, 0]),
        "cat_1.bin": bytes.fromhex("01000000 00000100"),
        "label.bin": bytes([1, 0]),
    }


def test_a_row_wider_than_numpy_can_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(32))
    sources = {"train": [{"type": "split_binary", "features": ["x", "label"], "files": ["x.bin"]}]}
    spec = spec_of(tmp_path, {"x": {"dtype": "float32", "length": 2**31 - 1}}, sources)
    row = "a row has 8,589,934,592 bytes, 8,589,934,588 of them of 'x'"
    assert problems_of(spec) == [
        f"x.bin: {row}; a row of split_binary has at most 2,147,483,647: give a smaller length"
    ]
