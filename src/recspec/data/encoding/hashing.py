"""64-bit fingerprints of text for hashed features, the same on every machine and in every release.

`fingerprint64` is FarmHash's Fingerprint64 (Google, 2014), which TensorFlow's `categorical_column_with_hash_bucket`
uses; `cross` chains fingerprints as its `crossed_column` does. So weights trained there fit ids made here.

An export copies this file into a Triton repository, where there is numpy and no pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


Prints = NDArray[np.uint64]  # fingerprints, or other whole numbers taken modulo 2^64
CROSS_KEY = 0xDECAFCAFFE  # the first value of a chain: TensorFlow's default hash key
FEW = 64  # texts up to which hashing one by one is faster: arrays take at least 60 us, a text of up to 16 bytes 2 us
_K0, _K1, _K2 = (np.uint64(k) for k in (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))
_MUL = np.uint64(0xC6A4A7935BD1E995)
_ONE = np.uint64(1)
_ALL, _WHOLE_K2 = (1 << 64) - 1, int(_K2)


def fingerprint64(texts: pa.Array) -> Prints:
    """Fingerprint of each text's UTF-8 bytes, or of each binary value; a missing one counts as the empty text."""
    return _prints(_Bytes.of(texts))


def fingerprint64_of_bytes(texts: Sequence[bytes]) -> Prints:
    """Fingerprint of each byte string."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    data = np.frombuffer(b"".join(texts) + bytes(8), np.uint8)
    return _prints(_Bytes(data, np.cumsum(lengths) - lengths, lengths))


def fingerprint64_of_one(text: bytes) -> int:
    """Fingerprint of one byte string. Up to 16 bytes take 2 us in Python's whole numbers, against 60 us in arrays."""
    size = len(text)
    if size > 16:
        return int(fingerprint64_of_bytes([text])[0])
    mul = (_WHOLE_K2 + 2 * size) & _ALL
    if size > 7:
        a, b = int.from_bytes(text[:8], "little") + _WHOLE_K2 & _ALL, int.from_bytes(text[-8:], "little")
        c = ((b >> 37 | b << 27) & _ALL) * mul + a & _ALL
        d = (((a >> 25 | a << 39) & _ALL) + b) * mul & _ALL
    elif size > 3:
        c, d = size + (int.from_bytes(text[:4], "little") << 3), int.from_bytes(text[-4:], "little")
    elif size:
        y, z = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
        mixed = (y * _WHOLE_K2 & _ALL) ^ (z * int(_K0) & _ALL)
        return (mixed ^ mixed >> 47) * _WHOLE_K2 & _ALL
    else:
        return _WHOLE_K2
    first = (c ^ d) * mul & _ALL
    second = (d ^ first ^ first >> 47) * mul & _ALL
    return (second ^ second >> 47) * mul & _ALL


def _prints(bytes_: _Bytes) -> Prints:
    prints = np.full(len(bytes_.starts), _K2, np.uint64)
    shorter, lengths = 0, bytes_.lengths
    for longest, hashed in (
        (3, _up_to_3),
        (7, _up_to_7),
        (16, _up_to_16),
        (32, _up_to_32),
        (64, _up_to_64),
        (np.iinfo(np.int64).max, _longer),
    ):
        rows = np.flatnonzero((lengths <= longest) & (lengths > shorter))
        if len(rows):
            prints[rows] = hashed(bytes_.take(rows))
        shorter = longest
    return prints


def concatenate(first: Prints | int, second: Prints) -> Prints:
    """One fingerprint of two, in their order: TensorFlow's FingerprintCat64."""
    result = np.asarray(first, np.uint64) ^ _MUL
    result = result ^ _mix(second * _MUL) * _MUL
    return _mix(_mix(result * _MUL) * _MUL)


def cross(parts: Sequence[Prints]) -> Prints:
    """One fingerprint of several columns' row by row, chained in their order from `CROSS_KEY`."""
    return reduce(concatenate, parts, np.array(CROSS_KEY, np.uint64))


@dataclass(frozen=True)
class _Bytes:
    """Texts that lie one after the other, with each one's start and length."""

    data: NDArray[np.uint8]  # with 8 more bytes at the end, so that a word can be read from any byte
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, texts: pa.Array) -> _Bytes:
        import pyarrow as pa

        texts = texts.cast(pa.large_binary())
        _, ends, data = texts.buffers()
        offsets = np.zeros(len(texts) + 1, np.int64)
        if ends is not None and len(texts):
            offsets = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        used = np.zeros(offsets[-1] - offsets[0] + 8, np.uint8)
        if data is not None:
            used[:-8] = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
        lengths = np.diff(offsets)
        if texts.null_count:  # a missing text may have bytes of its own
            lengths = np.where(texts.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
        return cls(used, offsets[:-1] - offsets[0], lengths)

    def take(self, rows: NDArray[np.int64]) -> _Bytes:
        return _Bytes(self.data, self.starts[rows], self.lengths[rows])

    @property
    def size(self) -> Prints:
        return self.lengths.astype(np.uint64)

    @property
    def mul(self) -> Prints:
        return _K2 + self.size * np.uint64(2)

    def byte(self, at: NDArray[np.int64] | int) -> Prints:
        found: Prints = self.data[self.starts + at].astype(np.uint64)
        return found

    def word(self, at: int, kind: str = "<u8") -> Prints:
        """The 8 bytes (4 with `<u4`) from a place in each text; a place below 0 counts from its end."""
        view = np.ndarray((len(self.data) - 7,), np.dtype(kind), self.data, strides=(1,))
        words: Prints = view[self.starts + at if at >= 0 else self.starts + self.lengths + at].astype(np.uint64)
        return words


# --- FarmHash, by length of text -------------------------------------------------------------------------------------
# Letters are those of FarmHash's description; all arithmetic is modulo 2^64.


def _rotate(value: Prints, bits: int) -> Prints:
    turned: Prints = (value >> np.uint64(bits)) | (value << np.uint64(64 - bits))
    return turned


def _mix(value: Prints) -> Prints:
    return value ^ (value >> np.uint64(47))


def _pair(u: Prints, v: Prints, mul: Prints) -> Prints:
    a = _mix((u ^ v) * mul)
    return _mix((v ^ a) * mul) * mul


def _up_to_3(text: _Bytes) -> Prints:
    y = text.byte(0) + (text.byte(text.lengths >> 1) << np.uint64(8))
    z = text.size + (text.byte(text.lengths - 1) << np.uint64(2))
    return _mix(y * _K2 ^ z * _K0) * _K2


def _up_to_7(text: _Bytes) -> Prints:
    return _pair(text.size + (text.word(0, "<u4") << np.uint64(3)), text.word(-4, "<u4"), text.mul)


def _up_to_16(text: _Bytes) -> Prints:
    a, b = text.word(0) + _K2, text.word(-8)
    c = _rotate(b, 37) * text.mul + a
    d = (_rotate(a, 25) + b) * text.mul
    return _pair(c, d, text.mul)


def _up_to_32(text: _Bytes) -> Prints:
    a, b = text.word(0) * _K1, text.word(8)
    c, d = text.word(-8) * text.mul, text.word(-16) * _K2
    return _pair(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, text.mul)


def _up_to_64(text: _Bytes) -> Prints:
    mul = text.mul
    a, b = text.word(0) * _K2, text.word(8)
    c, d = text.word(-8) * mul, text.word(-16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _pair(y, a + _rotate(b + _K2, 18) + c, mul)
    e, f = text.word(16) * mul, text.word(24)
    g, h = (y + text.word(-32)) * mul, (z + text.word(-24)) * mul
    return _pair(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _longer(text: _Bytes) -> Prints:
    """Texts over 64 bytes: all blocks of 64 but the last, then the last 64 bytes once more."""
    x = np.full(len(text.starts), 81, np.uint64)
    y = x * _K1 + np.uint64(113)
    z = _mix(y * _K2 + np.uint64(113)) * _K2
    nothing = np.zeros_like(x)
    state = np.stack([x * _K2 + text.word(0), y, z, *[nothing] * 4])
    blocks = (text.lengths - 1) // 64
    for block in range(int(blocks.max())):
        rows = np.flatnonzero(blocks > block)
        state[:, rows] = _eat(state[:, rows], text.take(rows), 64 * block)
    x, y, z, v1, v2, w1, w2 = state
    mul = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w1 = w1 + ((text.size - np.uint64(1)) & np.uint64(63))
    v1 = v1 + w1
    w1 = w1 + v1
    x, y, z, v1, v2, w1, w2 = _eat(np.stack([x, y, z, v1, v2, w1, w2]), text, -64, mul, np.uint64(9))
    return _pair(_pair(v1, w1, mul) + _mix(y) * _K0 + z, _pair(v2, w2, mul) + x, mul)


def _eat(state: Prints, text: _Bytes, at: int, mul: Prints | np.uint64 = _K1, weight: np.uint64 = _ONE) -> Prints:
    """The state (7, N) after 64 bytes more."""
    x, y, z, v1, v2, w1, w2 = state
    words = [text.word(at + 8 * place) for place in range(8)]
    x = _rotate(x + y + v1 + words[1], 37) * mul
    y = _rotate(y + v2 + words[6], 42) * mul
    x = x ^ w2 * weight
    y = y + v1 * weight + words[5]
    z = _rotate(z + w1, 33) * mul
    v1, v2 = _weak(words[:4], v2 * mul, x + w1)
    w1, w2 = _weak(words[4:], z + w2, y + words[2])
    return np.stack([z, y, x, v1, v2, w1, w2])


def _weak(words: Sequence[Prints], a: Prints, b: Prints) -> tuple[Prints, Prints]:
    first, second, third, fourth = words
    a = a + first
    b = _rotate(b + a + fourth, 21)
    middle = a + second + third
    return middle + fourth, b + _rotate(middle, 44) + a


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
