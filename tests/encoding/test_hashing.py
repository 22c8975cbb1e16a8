"""Hashing: FarmHash's published function, at every length where it takes another road, and TensorFlow's crosses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recspec.data.encoding.hashing import (
    concatenate,
    cross,
    fingerprint64,
    fingerprint64_of_bytes,
    fingerprint64_of_one,
)

TEXT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 4

FARMHASH = {  # bytes of TEXT -> Fingerprint64, by pyfarmhash 0.5.1
    0: 11160318154034397263,
    1: 12917804110809363939,
    3: 2640714258260161385,
    4: 1897425971756105985,
    7: 4341691227789030229,
    8: 18368443631171807497,
    16: 6080716761534418621,
    17: 11394395984755135400,
    32: 15661455719738831035,
    33: 3015657683306494555,
    64: 16339457623008465533,
    65: 9705950292242339081,
    128: 10477166089704766089,
    129: 9467551969061954535,
    200: 12333324952012343273,
}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_of_all_lengths_are_hashed_side_by_side(kind: pa.DataType) -> None:
    lengths = [200, *FARMHASH, 65, 0, 3]
    texts = pa.array([TEXT[:length].encode() for length in lengths], pa.binary()).cast(kind)
    assert fingerprint64(texts).tolist() == [FARMHASH[length] for length in lengths]
    assert fingerprint64(texts.slice(3, 9)).tolist() == [FARMHASH[length] for length in lengths[3:12]]


def test_one_text_has_the_fingerprint_that_a_column_gives_it() -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 256, length, np.uint8).tobytes() for length in range(70) for _ in range(20)]
    assert [fingerprint64_of_one(text) for text in texts] == fingerprint64_of_bytes(texts).tolist()


def test_nothing_to_hash_has_no_fingerprints_and_a_missing_text_that_of_the_empty_one() -> None:
    assert fingerprint64(pa.array([], pa.string())).tolist() == []
    assert fingerprint64(pa.array([None, "a", None], pa.string())).tolist() == [FARMHASH[0], FARMHASH[1], FARMHASH[0]]
    hidden = pa.array(["a", "abc"]).filter(pa.array([True, True]))
    masked = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x02"), *hidden.buffers()[1:]])
    assert fingerprint64(masked).tolist() == [FARMHASH[0], FARMHASH[3]]


def test_a_cross_depends_on_the_order_of_its_parts() -> None:
    first, second = (fingerprint64(pa.array([text])) for text in ("a", "b"))
    assert cross([first, second]) != cross([second, first])
    assert cross([first, second]).tolist() == concatenate(cross([first]), second).tolist()


def test_two_fingerprints_are_one_by_hand() -> None:
    mul, modulus = 0xC6A4A7935BD1E995, 2**64

    def mixed(value: int) -> int:
        return value ^ (value >> 47)

    result = 1 ^ mul
    result ^= mixed(2 * mul % modulus) * mul % modulus
    result = mixed(mixed(result * mul % modulus) * mul % modulus)
    assert concatenate(1, np.array([2], np.uint64)).tolist() == [result]


def test_hashed_and_crossed_columns_have_the_ids_that_tensorflow_gave_them(real_data: Callable[[str], Path]) -> None:
    with np.load(real_data("tf-wide-deep") / "golden.npz", allow_pickle=False) as golden:
        columns = {name: golden[name] for name in golden}
    names, colours, numbers = (
        fingerprint64(pa.array([str(value) for value in columns[name].tolist()]))
        for name in ("c_hash", "c_vocab", "c_ihash")
    )
    assert len(names) == 2000
    assert (names % np.uint64(100)).tolist() == columns["ids_c_hash"].tolist()
    assert (numbers % np.uint64(200)).tolist() == columns["ids_c_ihash"].tolist()
    assert (cross([names, colours]) % np.uint64(300)).tolist() == columns["ids_cross"].tolist()
