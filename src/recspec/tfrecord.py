"""TFRecord files of `tf.train.Example` records, read and written whole columns at a time with numpy alone.

A record is framed as length (uint64), masked CRC-32C of the length, the bytes, masked CRC-32C of the bytes, all
little-endian. Its bytes are a protocol buffer: `Example{1: Features{1: map entry{1: name, 2: Feature}}}`, where Feature
is `2: FloatList{1: packed float}` or `3: Int64List{1: packed varint}`. One Python step a record would cost 0.1 ms; here
all records of a block take each step together: record i's cursor is the i-th element of an array.

Shapes: R records.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, listed, nearest

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_BLOCK_RECORDS = 4096  # most records, and
_BLOCK_BYTES = 8 << 20  # bytes of several records, that are taken through each step together

_FRAME = struct.Struct("<QI")
_FRAME_BYTES = _FRAME.size + 4
_CRC_MASK = 0xA282EAD8
_VARINT_BYTES = 10  # most bytes of a 64-bit varint
_ENTRY, _KEY, _VALUE = 0x0A, 0x0A, 0x12  # tags of Features.feature, entry.key, entry.value
_FLOATS, _INTS, _PACKED = 0x12, 0x1A, 0x0A  # tags of Feature.float_list, Feature.int64_list, list.value (packed)


@dataclass(frozen=True, eq=False)
class Values:
    """One feature of R records: record i holds `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[np.generic]
    offsets: Ints


@dataclass(frozen=True, eq=False)
class Index:
    """Where the records of a file lie."""

    path: Path
    starts: Ints  # (R,) first byte of each record's data
    lengths: Ints  # (R,) bytes

    @classmethod
    def of(cls, path: Path) -> Index:
        """Walk the frames of a file.

        Raises:
            DataError: a frame that is cut off, or whose length has another checksum.
        """
        starts: list[int] = []
        lengths: list[int] = []
        size, position = path.stat().st_size, 0
        if size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                while position + _FRAME_BYTES <= size:
                    length, _ = _FRAME.unpack_from(data, position)
                    if position + _FRAME_BYTES + length > size:
                        break
                    starts.append(position + _FRAME.size)
                    lengths.append(length)
                    position += _FRAME_BYTES + length
        if position != size:
            raise DataError(f"ends within record {len(starts) + 1} (at byte {position:,} of {size:,}): it was cut off")
        return cls(path, np.array(starts, np.int64), np.array(lengths, np.int64))

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, first: int, last: int, names: Sequence[str]) -> dict[str, Values]:
        """Some features of records [first, last).

        Raises:
            DataError: a checksum that differs, bytes that are no `tf.train.Example`, a feature that no record has.
        """
        nothing = Values(np.zeros(0, np.int64), np.zeros(1, np.int64))
        blocks = [self._read_block(start, stop, names) for start, stop in self._blocks(first, last)]
        return {name: _concatenate([block[name] for block in blocks] or [nothing]) for name in names}

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        while first < last:
            fitting = int(np.searchsorted(self.starts, self.starts[first] + _BLOCK_BYTES))
            stop = min(max(fitting, first + 1), first + _BLOCK_RECORDS, last)
            yield first, stop
            first = stop

    def _read_block(self, first: int, last: int, names: Sequence[str]) -> dict[str, Values]:
        starts, lengths = self.starts[first:last], self.lengths[first:last]
        begin, end = int(starts[0]) - _FRAME.size, int(starts[-1] + lengths[-1]) + 4
        with self.path.open("rb") as file:
            file.seek(begin)
            data = np.frombuffer(file.read(end - begin), np.uint8)
        _check_sums(data, starts - begin, lengths, first)
        return _decode(data, starts - begin, lengths, names, first)


def _concatenate(parts: Sequence[Values]) -> Values:
    ends = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    return Values(np.concatenate([part.values for part in parts]), np.concatenate([np.zeros(1, np.int64), *offsets]))


def encode(features: Mapping[str, Values]) -> bytes:
    """Framed records of some features; every feature has a value list for each record."""
    num_records = len(next(iter(features.values())).offsets) - 1
    return b"".join(
        _encode({name: _rows(values, start, start + _BLOCK_RECORDS) for name, values in features.items()})
        for start in range(0, num_records, _BLOCK_RECORDS)
    )


def _rows(values: Values, start: int, stop: int) -> Values:
    offsets = values.offsets[start : stop + 1]
    return Values(values.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _encode(features: Mapping[str, Values]) -> bytes:
    num_records = len(next(iter(features.values())).offsets) - 1
    pieces: list[_Piece] = []
    body = np.zeros(num_records, np.int64)
    for name, values in features.items():
        entry = _entry(name.encode(), values)
        length = _total(entry)
        head = [_constant(_ENTRY, num_records), _varints(length)]
        pieces += [*head, *entry]
        body += _total(head) + length
    example = [_constant(0x0A, num_records), _varints(body), *pieces]
    data, starts, lengths = _join(example)
    return _framed(data, starts, lengths)


# --- encoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Piece:
    """A run of bytes in each record: record i's are the next `lengths[i]` of `data`."""

    data: Bytes
    lengths: Ints


def _entry(name: bytes, values: Values) -> list[_Piece]:
    """The bytes of a map entry after its length."""
    num_records = len(values.offsets) - 1
    floating = values.values.dtype.kind == "f"
    payload = _float_piece(values) if floating else _int_piece(values)
    inner = [_constant(_PACKED, num_records), _varints(payload.lengths), payload]
    kind = [_constant(_FLOATS if floating else _INTS, num_records), _varints(_total(inner)), *inner]
    key = bytes([_KEY, *_varint(len(name)), *name, _VALUE])
    return [_constant(key, num_records), _varints(_total(kind)), *kind]


def _float_piece(values: Values) -> _Piece:
    data = np.ascontiguousarray(values.values, "<f4").view(np.uint8)
    return _Piece(data, np.diff(values.offsets) * 4)


def _int_piece(values: Values) -> _Piece:
    encoded = _varints(values.values.astype(np.int64))
    ends = np.zeros(len(encoded.lengths) + 1, np.int64)
    np.cumsum(encoded.lengths, out=ends[1:])
    return _Piece(encoded.data, np.diff(ends[values.offsets]))


def _varints(numbers: Ints) -> _Piece:
    """Each number as a varint; negative ones as their two's complement, in ten bytes."""
    rest = numbers.astype(np.int64).view(np.uint64)
    most = max(1, -(-int(rest.max(initial=0)).bit_length() // 7))
    if most == 1:
        return _Piece(rest.astype(np.uint8), np.ones(len(rest), np.int64))
    groups = np.empty((len(rest), most), np.uint8)
    lengths = np.ones(len(rest), np.int64)
    for position in range(most):
        groups[:, position] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        more = rest > 0
        groups[:, position] |= more.astype(np.uint8) << 7
        lengths += more
    return _Piece(groups[np.arange(most) < lengths[:, None]], lengths)


def _varint(number: int) -> bytes:
    return _varints(np.array([number])).data.tobytes()


def _constant(what: int | bytes, num_records: int) -> _Piece:
    data = np.frombuffer(bytes([what]) if isinstance(what, int) else what, np.uint8)
    return _Piece(np.tile(data, num_records), np.full(num_records, len(data), np.int64))


def _total(pieces: Sequence[_Piece]) -> Ints:
    total: Ints = np.sum([piece.lengths for piece in pieces], axis=0, dtype=np.int64)
    return total


def _join(pieces: Sequence[_Piece]) -> tuple[Bytes, Ints, Ints]:
    """Records whose bytes are those of the pieces in order; where each record starts, and its length."""
    lengths = _total(pieces)
    starts = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    cursor = starts.copy()
    for piece in pieces:
        data[_ragged_range(cursor, piece.lengths)] = piece.data
        cursor += piece.lengths
    return data, starts, lengths


def _ragged_range(starts: Ints, lengths: Ints) -> Ints:
    """`starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...`."""
    before = np.cumsum(lengths) - lengths
    places: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return places


def _framed(data: Bytes, starts: Ints, lengths: Ints) -> bytes:
    num_records = len(lengths)
    heads = lengths.astype("<u8").view(np.uint8).reshape(num_records, 8)
    head_sums = _masked_crc(heads.reshape(-1), np.arange(num_records) * 8, np.full(num_records, 8))
    pieces = [
        _Piece(heads.reshape(-1), np.full(num_records, 8)),
        _Piece(head_sums.astype("<u4").view(np.uint8), np.full(num_records, 4)),
        _Piece(data, lengths),
        _Piece(_masked_crc(data, starts, lengths).astype("<u4").view(np.uint8), np.full(num_records, 4)),
    ]
    return _join(pieces)[0].tobytes()


# --- checksums -------------------------------------------------------------------------------------------------------


_LANE = 128  # bytes


@cache
def _crc_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """CRC-32C (Castagnoli), reflected polynomial 0x82F63B78: the remainder of each byte (256,), of each pair of bytes
    (65536,), and of each byte of a remainder after a lane of zeros (4, 256)."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, (one >> np.uint32(1)) ^ np.uint32(0x82F63B78), one >> np.uint32(1))
    pair = np.arange(65536, dtype=np.uint32)
    for _ in range(2):
        pair = one[pair & np.uint32(0xFF)] ^ (pair >> np.uint32(8))
    after = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    for _ in range(_LANE):
        after = one[after & np.uint32(0xFF)] ^ (after >> np.uint32(8))
    return one, pair, after


def _masked_crc(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.uint32]:
    """Checksum of each record, masked as TFRecord does.

    A remainder is linear in the bits of the message, so lanes of 128 bytes of all records are worked through together
    and then joined: crc(AB) = (crc(A) after as many zeros as B has bytes) ^ crc(B). Zeros before a message change
    nothing when the register starts with 0, and starting with ones means to flip the message's first 32 bits.
    """
    crc = np.zeros(len(starts), np.uint32)
    long = lengths >= 4
    crc[long] = _remainders(data, starts[long], lengths[long])
    one = _crc_tables()[0]
    for record in np.flatnonzero(~long):
        register = np.uint32(0xFFFFFFFF)
        for byte in data[starts[record] : starts[record] + lengths[record]]:
            register = one[(register ^ byte) & np.uint32(0xFF)] ^ (register >> np.uint32(8))
        crc[record] = register
    return _masked(crc)


def _masked(registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Checksums as TensorFlow writes them, of registers at the end of their messages."""
    crc = registers ^ np.uint32(0xFFFFFFFF)
    masked: NDArray[np.uint32] = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_CRC_MASK)
    return masked


def masked_crc(data: Bytes) -> int:
    """The masked CRC-32C of one run of bytes, however long.

    The lanes of a block are joined in pairs, those pairs in pairs, and so on: a step for each doubling of the length
    (0.1 GB/s on one core), not one for each lane.
    """
    if len(data) < 4:
        return int(_masked_crc(data, np.zeros(1, np.int64), np.array([len(data)]))[0])
    register = np.zeros(1, np.uint32)
    after_block = _after_zeros(_BLOCK_LANES)
    first = len(data) % _BLOCK_BYTES
    if first < 4:  # the bytes that are flipped lie in one block
        first += min(len(data) - first, _BLOCK_BYTES)
    for start in (0, *range(first, len(data), _BLOCK_BYTES)):
        block = data[start : first if start == 0 else start + _BLOCK_BYTES]
        lanes = np.zeros((1 << (-(-len(block) // _LANE) - 1).bit_length(), _LANE), np.uint8)
        lanes.reshape(-1)[lanes.size - len(block) :] = block
        if start == 0:
            lanes.reshape(-1)[lanes.size - len(block) :][:4] ^= np.uint8(0xFF)
        register = _shifted(after_block, register) ^ _joined_in_pairs(_lane_remainders(lanes))
    return int(_masked(register)[0])


_BLOCK_LANES = _BLOCK_BYTES // _LANE
assert _BLOCK_LANES & (_BLOCK_LANES - 1) == 0, "lanes of a block are joined in pairs"


def _joined_in_pairs(lanes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The remainder (1,) of a message from those of its lanes; their number is a power of two."""
    width = 1
    while len(lanes) > 1:
        lanes = _shifted(_after_zeros(width), lanes[::2]) ^ lanes[1::2]
        width *= 2
    return lanes


@cache
def _after_zeros(num_lanes: int) -> NDArray[np.uint32]:
    """What becomes of each byte of a remainder (4, 256) after that many lanes of zeros, a power of two."""
    if num_lanes == 1:
        return _crc_tables()[2]
    half = _after_zeros(num_lanes // 2)
    return _shifted(half, half)


def _shifted(after: NDArray[np.uint32], registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    shifted: NDArray[np.uint32] = np.bitwise_xor.reduce(
        [after[byte][(registers >> np.uint32(8 * byte)) & np.uint32(0xFF)] for byte in range(4)]
    )
    return shifted


def _remainders(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.uint32]:
    """The register after each record of at least 4 bytes."""
    flipped = np.append(np.zeros(_LANE, np.uint8), data)
    flipped[((starts + _LANE)[:, None] + np.arange(4)).reshape(-1)] ^= np.uint8(0xFF)
    num_lanes = -(-lengths // _LANE)
    before = num_lanes * _LANE - lengths  # bytes of the first lane that lie before the record
    begins = _ragged_range(np.zeros_like(num_lanes), num_lanes) * _LANE + np.repeat(starts - before + _LANE, num_lanes)
    lanes: Bytes = np.lib.stride_tricks.sliding_window_view(flipped, _LANE)[begins]
    first = np.cumsum(num_lanes) - num_lanes
    lanes[first] *= np.arange(_LANE) >= before[:, None]
    return _joined(_lane_remainders(lanes), first, num_lanes)


def _lane_remainders(lanes: Bytes) -> NDArray[np.uint32]:
    pair = _crc_tables()[1]
    register = np.zeros(len(lanes), np.uint32)
    for both in np.ascontiguousarray(lanes.view("<u2").T):
        register = pair[(register ^ both) & np.uint32(0xFFFF)] ^ (register >> np.uint32(16))
    return register


def _joined(lanes: NDArray[np.uint32], first: Ints, num_lanes: Ints) -> NDArray[np.uint32]:
    """The remainder of each record from those of its lanes."""
    after = _crc_tables()[2]
    order = np.argsort(-num_lanes, kind="stable")  # those that still have lanes come first
    first, left = first[order], num_lanes[order]
    joined = np.zeros(len(first), np.uint32)
    for number in range(int(left[0]) if len(left) else 0):
        count = int(np.searchsorted(-left, -number, side="left"))
        joined[:count] = _shifted(after, joined[:count]) ^ lanes[first[:count] + number]
    register = np.empty_like(joined)
    register[order] = joined
    return register


def _check_sums(data: Bytes, starts: Ints, lengths: Ints, first: int) -> None:
    for begins, sizes, what in (
        (starts - _FRAME.size, np.full(len(starts), 8), "length"),
        (starts, lengths, "data"),
    ):
        stored = data[((begins + sizes)[:, None] + np.arange(4)).reshape(-1)].view("<u4")
        bad = stored != _masked_crc(data, begins, sizes)
        if bad.any():
            raise DataError(
                f"record {first + int(np.argmax(bad)) + 1}: the checksum of its {what} is wrong, the file is damaged"
            )


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(data: Bytes, starts: Ints, lengths: Ints, names: Sequence[str], first: int) -> dict[str, Values]:
    cursors = _Cursors(np.append(data, np.zeros(_VARINT_BYTES, np.uint8)), first)
    entries: dict[bytes, list[_Entries]] = {}
    for name, found in _entries(cursors, starts, starts + lengths):
        entries.setdefault(name, []).append(found)
    known = sorted(name.decode(errors="replace") for name in entries)
    missing = [f"has no feature '{name}'{nearest(name, known)}" for name in names if name.encode() not in entries]
    if missing:
        raise DataError(f"{'; '.join(missing)}; records hold {listed(known)}")
    return {name: _values(cursors, _Entries.of(entries[name.encode()]), len(starts), name) for name in names}


@dataclass(frozen=True, eq=False)
class _Entries:
    """Map entries of one name: whose they are, and where their values start and end."""

    record: Ints
    value: Ints
    end: Ints

    @classmethod
    def of(cls, parts: Sequence[_Entries]) -> _Entries:
        """All parts, by record."""
        if len(parts) == 1:
            return parts[0]
        record = np.concatenate([part.record for part in parts])
        order = np.argsort(record, kind="stable")
        value, end = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("value", "end"))
        return cls(record[order], value, end)

    def where(self, keep: NDArray[np.bool_]) -> _Entries:
        """Only the entries that are marked."""
        return self if keep.all() else _Entries(self.record[keep], self.value[keep], self.end[keep])


class _Cursors:
    """Reads one thing at many places at once."""

    def __init__(self, data: Bytes, first: int) -> None:
        self.data = data
        self.first = first

    def varint(self, at: Ints) -> tuple[Ints, Ints]:
        """The number at each place, and the place after it."""
        byte = self.data[np.minimum(at, len(self.data) - 1)]
        if (byte < 0x80).all():  # as most lengths are
            return byte.astype(np.int64), at + 1
        number, after = np.zeros(len(at), np.uint64), at.copy()
        open_ = np.ones(len(at), np.bool_)
        for position in range(_VARINT_BYTES):
            byte = self.data[np.minimum(after, len(self.data) - 1)]
            number |= np.where(open_, (byte & 0x7F).astype(np.uint64) << np.uint64(7 * position), np.uint64(0))
            after += open_
            open_ &= byte >= 0x80
            if not open_.any():
                break
        return number.view(np.int64), after

    def message(self, at: Ints, tag: int, end: Ints, record: Ints) -> tuple[Ints, Ints]:
        """Where the message with this tag starts and ends."""
        self.check((at < end) & (self.data[np.minimum(at, len(self.data) - 1)] == tag), record)
        length, start = self.varint(at + 1)
        self.check((length >= 0) & (start + length <= end), record)
        return start, start + length

    def check(self, sound: NDArray[np.bool_], record: Ints) -> None:
        if not sound.all():
            number = self.first + int(record[np.argmin(sound)]) + 1
            raise DataError(f"record {number}: is not a tf.train.Example with packed float or int64 lists")


def _entries(cursors: _Cursors, starts: Ints, ends: Ints) -> Iterator[tuple[bytes, _Entries]]:
    """Every map entry with its name. Records mostly agree on the order of their entries: then each step, an entry of
    every record, has one name."""
    record = np.arange(len(starts))
    filled = ends > starts  # an Example without features has no bytes
    record, at, end = record[filled], starts[filled], ends[filled]
    at, end = cursors.message(at, 0x0A, end, record)
    while (more := at < end).any():
        if not more.all():
            record, at, end = record[more], at[more], end[more]
        inside, after = cursors.message(at, _ENTRY, end, record)
        key, key_end = cursors.message(inside, _KEY, after, record)
        value, value_end = cursors.message(key_end, _VALUE, after, record)
        for name, here in _names(cursors.data, key, key_end - key):
            yield name, _Entries(record, value, value_end).where(here)
        at = after


def _names(data: Bytes, key: Ints, length: Ints) -> Iterator[tuple[bytes, NDArray[np.bool_]]]:
    """Each name among the keys, and which keys have it."""
    left = np.ones(len(key), np.bool_)
    while left.any():
        example = int(np.argmax(left))
        name = data[key[example] : key[example] + length[example]]
        here: NDArray[np.bool_] = left & (length == len(name))
        for position, byte in enumerate(name):
            # a shorter key beside the end of the data reads on into the bytes appended there
            here &= data[np.minimum(key + position, len(data) - 1)] == byte
        yield name.tobytes(), here
        left &= ~here


def _values(cursors: _Cursors, found: _Entries, num_records: int, name: str) -> Values:
    """The lists of one feature; a record without it has an empty one."""
    found = found.where(found.value < found.end)
    kinds = np.unique(cursors.data[found.value])
    if len(kinds) > 1 or (len(kinds) and kinds[0] not in (_FLOATS, _INTS)):
        raise DataError(f"the feature '{name}' must hold floats or integers, and the same in every record")
    floating = len(kinds) > 0 and kinds[0] == _FLOATS
    if len(kinds):
        start, end = cursors.message(found.value, int(kinds[0]), found.end, found.record)
        found = _Entries(found.record, start, end).where(start < end)  # an empty list has no packed field
        start, end = cursors.message(found.value, _PACKED, found.end, found.record)
        found = _Entries(found.record, start, end)
    raw = cursors.data[_ragged_range(found.value, found.end - found.value)]
    counts = np.zeros(num_records, np.int64)
    if floating:
        numbers: NDArray[np.generic] = raw.view("<f4")
        counts[found.record] = (found.end - found.value) // 4
    else:
        last = raw < 0x80
        numbers = _decode_varints(raw, last)
        owner = np.repeat(found.record, found.end - found.value)
        counts += np.bincount(owner[last], minlength=num_records)
    offsets = np.zeros(num_records + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return Values(numbers, offsets)


def _decode_varints(raw: Bytes, last: NDArray[np.bool_]) -> Ints:
    """Varints that stand one after another; `last` marks the last byte of each."""
    ends = np.flatnonzero(last)
    if not len(ends):
        return np.zeros(0, np.int64)
    starts = np.append(0, ends[:-1] + 1)
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
