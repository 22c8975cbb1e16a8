"""TFRecord files byte for byte, and against Google's own protocol buffers."""

from __future__ import annotations

import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from recspec.base.errors import DataError
from recspec.data.storage import Ragged, masked_crc, open_split, tfrecord
from recspec.data.storage.tfrecord import Index, encode
from recspec.feature_spec import FeatureSpec


def values(rows: list[list[float]], dtype: str = "int64") -> Ragged:
    lists = Ragged.of(rows, dtype)
    return Ragged(lists.values, lists.offsets)


def test_the_checksum_is_masked_crc_32c() -> None:
    """CRC-32C of "123456789" is 0xE3069283 (RFC 3720); masked: rotated right by 15, plus 0xA282EAD8."""
    rotated = (0xE3069283 >> 15) | (0xE3069283 << 17) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == (rotated + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"") == 0xA282EAD8


def frame(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def test_one_record_byte_for_byte() -> None:
    example = bytes.fromhex(
        "0a18"  # Example.features, 24 bytes
        "0a0b 0a0175 12061a04 0a02ac02"  # u: int64 300
        "0a09 0a0176 12041202 0a00"  # v: no float (an empty packed field)
    )
    assert encode({"u": values([[300]]), "v": values([[]], "float32")}) == frame(example)


def test_numbers_of_every_size_come_back(tmp_path: Path) -> None:
    rows: list[list[float]] = [[0, 1, 127, 128, 2**14, 2**31, 2**63 - 1], [], [-1, -(2**63)]]
    floats: list[list[float]] = [[0.5], [-1.5, 2.0], []]
    (tmp_path / "file").write_bytes(encode({"a": values(rows), "b": values(floats, "float32")}))
    index = Index.of(tmp_path / "file")
    found = index.read(0, 3, ["b", "a"])
    assert found["a"].tolist() == rows
    assert found["b"].tolist() == floats
    assert index.read(1, 2, ["b"])["b"].tolist() == floats[1:2]
    assert index.read(1, 1, ["b"])["b"].tolist() == []


def test_many_records_of_many_lengths_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "_BLOCK_RECORDS", 100)
    monkeypatch.setattr(tfrecord, "_BLOCK_BYTES", 20_000)
    random = np.random.default_rng(0)
    rows = [random.integers(-5, 2 ** random.integers(1, 60), random.integers(0, 200)).tolist() for _ in range(500)]
    (tmp_path / "file").write_bytes(encode({"a long name of a feature" * 9: values(rows)}))
    assert Index.of(tmp_path / "file").read(0, 500, ["a long name of a feature" * 9]).popitem()[1].tolist() == rows


@pytest.fixture
def example_pb2() -> ModuleType:
    """`tf.train.Example` as Google's protobuf makes it from its description."""
    pytest.importorskip("google.protobuf", reason="the protobuf library is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {"FloatList": 2, "Int64List": 3}  # the numbers of float and int64 in a description
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for name, number, of in (("float_list", 2, ".t.FloatList"), ("int64_list", 3, ".t.Int64List")):
        feature.field.add(name=name, number=number, label=1, type=11, type_name=of, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".t.Features.FeatureEntry")
    file.message_type.add(name="Example").field.add(
        name="features", number=1, label=1, type=11, type_name=".t.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    module = ModuleType("example_pb2")
    module.Example = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))  # type: ignore[attr-defined]
    return module


def test_protobuf_reads_what_is_written(example_pb2: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(
        encode({"ids": values([[1, -2, 300], []]), "price": values([[0.5], [2]], "float32")})
    )
    index, data = Index.of(tmp_path / "file"), (tmp_path / "file").read_bytes()
    found = [example_pb2.Example.FromString(data[a : a + n]) for a, n in zip(index.starts, index.lengths, strict=True)]
    ids = [list(example.features.feature["ids"].int64_list.value) for example in found]
    prices = [list(example.features.feature["price"].float_list.value) for example in found]
    assert (ids, prices) == ([[1, -2, 300], []], [[0.5], [2]])


def test_what_protobuf_writes_is_read_whatever_its_order(example_pb2: ModuleType, tmp_path: Path) -> None:
    records = []
    for row in range(20):
        example = example_pb2.Example()
        names = ["a", "b", "c"] if row % 2 else ["c", "b", "a"]
        for name in names[row % 3 :]:
            feature = example.features.feature[name]
            if name == "c":
                feature.float_list.value.extend([row / 2] * (row % 4))
            else:
                feature.int64_list.value.extend(range(row))
        records.append(frame(example.SerializeToString()))
    (tmp_path / "file").write_bytes(b"".join(records))
    found = Index.of(tmp_path / "file").read(0, 20, ["a", "b", "c"])
    has = [set((["a", "b", "c"] if row % 2 else ["c", "b", "a"])[row % 3 :]) for row in range(20)]
    assert found["a"].tolist() == [list(range(row)) if "a" in has[row] else [] for row in range(20)]
    assert found["c"].tolist() == [[row / 2] * (row % 4) if "c" in has[row] else [] for row in range(20)]


def prebatched(folder: Path, history: list[list[float]]) -> FeatureSpec:
    """Two records of three rows each."""
    item = values([[1, 2, 3], [4, 5, 6]])
    (folder / "f.tfrecord").write_bytes(
        encode({"item": item, "history": values(history), "label": values([[1, 0, 1], [0, 1, 0]])})
    )
    chunk = {"type": "tfrecord", "features": ["item", "history", "label"], "files": ["f.tfrecord"]}
    return FeatureSpec.from_dict(
        {
            "feature_spec": {
                "item": {"cardinality": 9},
                "history": {"cardinality": 9, "length": 2, "padding": 0},
                "label": {"dtype": "bool"},
            },
            "source_spec": {"train": [chunk]},
            "channel_spec": {"item": ["item"], "history": ["history"], "label": ["label"]},
        },
        folder,
    )


def test_prebatched_records_hold_several_rows_each(tmp_path: Path) -> None:
    reader = open_split(prebatched(tmp_path, [[1, 2, 3, 0, 0, 0], [0, 4, 5, 6, 7, 8]]), "train")
    assert reader.num_rows == 6
    columns = reader.read(1, 5)
    assert columns["item"].tolist() == [2, 3, 4, 5]
    assert columns["history"].tolist() == [[3], [], [4], [5, 6]]
    assert columns["label"].tolist() == [False, True, False, True]


def test_a_prebatched_list_of_another_length_is_named(tmp_path: Path) -> None:
    spec = prebatched(tmp_path, [[1, 2, 3, 0, 0, 0], [1, 2, 3]])
    with pytest.raises(DataError, match=r"f\.tfrecord, column 'history', row 4: its record holds 3 values; expected 6"):
        open_split(spec, "train").read(0, 6)


def message(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes([tag, len(body)]) + body


def entry(name: bytes, *lists: bytes) -> bytes:
    """A map entry of a feature, whose lists of integers are the packed bytes."""
    return message(0x0A, message(0x0A, name), message(0x12, *(message(0x1A, message(0x0A, each)) for each in lists)))


def test_damage_is_named(tmp_path: Path) -> None:
    good = encode({"a": values([[1], [2], [3]])})
    file = tmp_path / "file"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        Index.of(file).read(0, 3, ["a"])

    read(good)
    size = len(good) // 3
    with pytest.raises(DataError, match="record 2: the checksum of its data is wrong"):
        read(good[: size + 14] + b"?" + good[size + 15 :])
    with pytest.raises(DataError, match="record 3: the checksum of its length is wrong"):
        read(good[: 2 * size + 8] + b"????" + good[2 * size + 12 :])
    with pytest.raises(DataError, match=r"ends within record 3 \(at byte \d+ of \d+\): it was cut off"):
        read(good[:-1])
    with pytest.raises(DataError, match=r"record 1: is not a tf.train.Example"):
        read(frame(b"something else"))
    with pytest.raises(DataError, match=r"record 1: is not a tf.train.Example"):
        read(frame(message(0x0A, entry(b"a", b"\1")) + message(0x0A, entry(b"a", b"\2"))))
    with pytest.raises(DataError, match=r"has no feature 'a' \(did you mean 'A'\?\); records hold 'A', 'B'"):
        read(encode({"A": values([[1]]), "B": values([[1]])}))
    with pytest.raises(DataError, match="the feature 'a' must hold floats or integers"):
        read(encode({"a": values([[1]])}) + encode({"a": values([[1]], "float32")}))
    file.write_bytes(b"")
    assert len(Index.of(file)) == 0


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ([entry(b"item", b"\1\2\3"), entry(b"label", b"\1\0\1"), entry(b"item", b"\4")], "feature 'item' more than"),
        ([entry(b"item", b"\1\2\3", b"\4"), entry(b"label", b"\1\0\1")], "is not a tf.train.Example"),
    ],
)
def test_what_stands_in_a_record_twice_is_refused_by_its_own_name(
    features: list[bytes], says: str, tmp_path: Path
) -> None:
    spec = prebatched(tmp_path, [[1] * 6] * 2)
    history = entry(b"history", b"\1" * 6)
    (tmp_path / "f.tfrecord").write_bytes(frame(message(0x0A, *features, history)))
    with pytest.raises(DataError, match=f"f.tfrecord: record 1: .*{says}"):
        open_split(spec, "train").read(0, 3)
