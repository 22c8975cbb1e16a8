"""CRC-32C checksums, masked as TFRecord masks them, with numpy alone.

A CRC register is linear in the bits of the message and of its initial value. So lanes of 128 bytes go through each step
together, each from a register of 0; then each lane's register passes as many zeros as bytes follow the lane, and the
results are combined by exclusive or. Zeros before a message leave a register of 0 unchanged.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from recspec.data.storage.ragged import ragged_range

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Registers = NDArray[np.uint32]

_LANE = 128  # bytes
_BLOCK_BYTES = 8 << 20  # bytes of one long run taken through each step together
_ONES = np.uint32(0xFFFFFFFF)


def masked_crc(data: Bytes) -> int:
    """The masked CRC-32C of one run of bytes, however long."""
    register = np.array([_ONES])
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        size = np.array([len(block)])
        register = _after_zeros(register, size) ^ _registers(block, np.zeros(1, np.int64), size, initial=0)
    return int(_masked(register)[0])


def masked_crcs(data: Bytes, starts: Ints, lengths: Ints) -> Registers:
    """The masked CRC-32C of each record: `lengths` bytes from `starts`."""
    return _masked(_registers(data, starts, lengths, initial=int(_ONES)))


def _masked(registers: Registers) -> Registers:
    crc = registers ^ _ONES
    masked: Registers = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    return masked


def _registers(data: Bytes, starts: Ints, lengths: Ints, initial: int) -> Registers:
    """The register after each record."""
    num_lanes = -(-lengths // _LANE)
    before = num_lanes * _LANE - lengths  # bytes of the first lane that lie before the record
    position = ragged_range(np.zeros_like(num_lanes), num_lanes)
    padded = np.append(np.zeros(_LANE, np.uint8), data)
    begins = position * _LANE + np.repeat(starts - before + _LANE, num_lanes)
    lanes: Bytes = np.lib.stride_tricks.sliding_window_view(padded, _LANE)[begins]
    filled = lengths > 0
    first = (np.cumsum(num_lanes) - num_lanes)[filled]
    lanes[first] *= np.arange(_LANE) >= before[filled, None]
    lane_registers = _lane_registers(lanes)
    lane_registers[first] ^= _after_up_to_a_lane(initial)[_LANE - before[filled]]
    registers = np.full(len(starts), initial, np.uint32)
    registers[filled] = _joined(lane_registers, np.repeat(num_lanes, num_lanes) - position - 1)
    return registers


def _joined(registers: Registers, following: Ints) -> Registers:
    """One register for each record from those of its lanes: lanes are joined in pairs, these in pairs, and so on."""
    bit = _LANE.bit_length() - 1
    while following.any():
        joins = following % 2 == 1
        left = np.flatnonzero(joins)
        registers[left + 1] ^= _looked_up(_zeros_table(bit), registers[left])
        registers, following = registers[~joins], following[~joins] // 2
        bit += 1
    return registers


def _lane_registers(lanes: Bytes) -> Registers:
    pair = _crc_tables()[1]
    register = np.zeros(len(lanes), np.uint32)
    for both in np.ascontiguousarray(lanes.view("<u2").T):
        register = pair[(register ^ both) & np.uint32(0xFFFF)] ^ (register >> np.uint32(16))
    return register


@cache
def _after_up_to_a_lane(initial: int) -> Registers:
    """A register after 0, 1, ... 128 zeros."""
    return _after_zeros(np.full(_LANE + 1, initial, np.uint32), np.arange(_LANE + 1))


def _after_zeros(registers: Registers, num_bytes: Ints) -> Registers:
    for bit in range(int(num_bytes.max()).bit_length()):
        passes = num_bytes >> bit & 1 == 1
        registers = np.where(passes, _looked_up(_zeros_table(bit), registers), registers)
    return registers


def _looked_up(table: Registers, registers: Registers) -> Registers:
    found: Registers = np.bitwise_xor.reduce(
        [table[byte][(registers >> np.uint32(8 * byte)) & np.uint32(0xFF)] for byte in range(4)]
    )
    return found


@cache
def _zeros_table(bit: int) -> Registers:
    """What each byte of a register becomes after 2^bit zeros, of shape (4, 256)."""
    if bit:
        return _looked_up(_zeros_table(bit - 1), _zeros_table(bit - 1))
    register = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    table: Registers = _crc_tables()[0][register & np.uint32(0xFF)] ^ (register >> np.uint32(8))
    return table


@cache
def _crc_tables() -> tuple[Registers, Registers]:
    """The register after each byte (256,) and each pair of bytes (65536,); reflected polynomial 0x82F63B78."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, (one >> np.uint32(1)) ^ np.uint32(0x82F63B78), one >> np.uint32(1))
    pair = np.arange(65536, dtype=np.uint32)
    for _ in range(2):
        pair = one[pair & np.uint32(0xFF)] ^ (pair >> np.uint32(8))
    return one, pair
