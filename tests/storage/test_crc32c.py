"""Masked CRC-32C checksums, of one long run of bytes and of many records."""

from __future__ import annotations

import numpy as np
import pytest

from recspec.data.storage import crc32c
from recspec.data.storage.crc32c import masked_crc, masked_crcs


def crc(data: bytes) -> int:
    """The checksum of one record."""
    array = np.frombuffer(data, np.uint8)
    return int(masked_crcs(array, np.array([0]), np.array([len(data)]))[0])


def test_the_checksum_is_masked_crc_32c() -> None:
    """CRC-32C of "123456789" is 0xE3069283 (RFC 3720); masked: rotated right by 15, plus 0xA282EAD8."""
    rotated = (0xE3069283 >> 15) | (0xE3069283 << 17) & 0xFFFFFFFF
    assert crc(b"123456789") == (rotated + 0xA282EAD8) & 0xFFFFFFFF
    assert crc(b"") == 0xA282EAD8


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 127, 128, 129, 1000, 4095, 4096, 4097, 4099, 4100, 8193, 100_001])
def test_the_checksum_of_one_long_run_is_that_of_a_record(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc32c, "_BLOCK_BYTES", 4096)
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = data.copy()
    assert masked_crc(data) == crc(data.tobytes())
    assert np.array_equal(data, before)


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 5], [127, 128, 129, 0, 1000], [100_000, 3], [8] * 100, []])
def test_checksums_of_records_of_any_length_are_those_of_one_byte_after_another(sizes: list[int]) -> None:
    data = np.random.default_rng(0).integers(0, 256, sum(sizes) + 7, dtype=np.uint8)
    lengths = np.array(sizes, np.int64)
    starts = np.cumsum(lengths) - lengths + 5

    def plain(message: bytes) -> int:
        register = 0xFFFFFFFF
        for byte in message:
            register ^= byte
            for _ in range(8):
                register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
        register ^= 0xFFFFFFFF
        return ((register >> 15 | register << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF

    found = masked_crcs(data, starts, lengths)
    assert found.tolist() == [plain(data[a : a + n].tobytes()) for a, n in zip(starts, lengths, strict=True)]
