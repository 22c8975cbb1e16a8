"""TFRecord files of `tf.train.Example` records, read and written whole columns at a time with numpy alone.

A record is framed as length (uint64), masked CRC-32C of the length, the bytes, masked CRC-32C of the bytes, all
little-endian. Its bytes are a protocol buffer: `Example{1: Features{1: map entry{1: name, 2: Feature}}}`, where Feature
is `2: FloatList{1: packed float}` or `3: Int64List{1: packed varint}`. One Python step a record would cost 0.1 ms; here
all records of a block take each step together: record i's cursor is the i-th element of an array.

Shapes: R records; E map entries of all records.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, listed, nearest

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

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
        starts, lengths = self.starts[first:last], self.lengths[first:last]
        if not len(starts):
            return {name: Values(np.zeros(0, np.int64), np.zeros(1, np.int64)) for name in names}
        begin, end = int(starts[0]) - _FRAME.size, int(starts[-1] + lengths[-1]) + 4
        with self.path.open("rb") as file:
            file.seek(begin)
            data = np.frombuffer(file.read(end - begin), np.uint8)
        _check_sums(data, starts - begin, lengths, first)
        return _decode(data, starts - begin, lengths, names, first)


def encode(features: Mapping[str, Values]) -> bytes:
    """Framed records of some features; every feature has a value list for each record."""
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
    groups = np.empty((len(rest), _VARINT_BYTES), np.uint8)
    lengths = np.ones(len(rest), np.int64)
    for position in range(_VARINT_BYTES):
        groups[:, position] = (rest & np.uint64(0x7F)).astype(np.uint8)
        rest = rest >> np.uint64(7)
        lengths += rest > 0
    used = np.arange(_VARINT_BYTES) < lengths[:, None]
    groups |= np.where(np.arange(_VARINT_BYTES) < lengths[:, None] - 1, 0x80, 0).astype(np.uint8)
    return _Piece(groups[used], lengths)


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


@cache
def _crc_table() -> NDArray[np.uint32]:
    """CRC-32C (Castagnoli), reflected polynomial 0x82F63B78: the remainder of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(0x82F63B78), table >> np.uint32(1))
    return table


def _masked_crc(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.uint32]:
    """Checksum of each record, masked as TFRecord does; all records take their next byte together."""
    order = np.argsort(-lengths, kind="stable")
    cursor, longest_first = starts[order], lengths[order]
    crc = np.full(len(starts), 0xFFFFFFFF, np.uint32)
    table = _crc_table()
    # how many records are longer than each position
    remaining = np.searchsorted(-longest_first, -np.arange(int(longest_first[0]) if len(lengths) else 0), side="left")
    for position, count in enumerate(remaining.tolist()):
        part = crc[:count]
        crc[:count] = table[(part ^ data[cursor[:count] + position]) & np.uint32(0xFF)] ^ (part >> np.uint32(8))
    crc ^= np.uint32(0xFFFFFFFF)
    masked = np.empty_like(crc)
    masked[order] = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_CRC_MASK)
    return masked


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
    record, key, key_length, value, value_length = _entries(cursors, starts, starts + lengths)
    found = {}
    for name in names:
        here = _named(cursors.data, key, key_length, name.encode())
        if not here.any() and len(starts):
            known = {
                cursors.data[k : k + n].tobytes().decode(errors="replace")
                for k, n in zip(key[:99], key_length[:99], strict=False)
            }
            raise DataError(f"has no feature '{name}'{nearest(name, known)}; records hold {listed(sorted(known))}")
        found[name] = _values(cursors, record[here], value[here], value_length[here], len(starts), name)
    return found


class _Cursors:
    """Reads one thing at many places at once."""

    def __init__(self, data: Bytes, first: int) -> None:
        self.data = data
        self.first = first

    def varint(self, at: Ints) -> tuple[Ints, Ints]:
        """The number at each place, and the place after it."""
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


def _entries(cursors: _Cursors, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Every map entry: its record, where its key starts and how long it is, the same of its value."""
    record = np.arange(len(starts))
    filled = ends > starts  # an Example without features has no bytes
    record, at, end = record[filled], starts[filled], ends[filled]
    at, end = cursors.message(at, 0x0A, end, record)
    columns: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    while (more := at < end).any():
        record, at, end = record[more], at[more], end[more]
        inside, after = cursors.message(at, _ENTRY, end, record)
        key, key_end = cursors.message(inside, _KEY, after, record)
        value, value_end = cursors.message(key_end, _VALUE, after, record)
        columns.append((record, key, key_end - key, value, value_end - value))
        at = after
    if not columns:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, nothing, nothing
    record, key, key_length, value, value_length = (np.concatenate(part) for part in zip(*columns, strict=True))
    return record, key, key_length, value, value_length


def _named(data: Bytes, key: Ints, key_length: Ints, name: bytes) -> NDArray[np.bool_]:
    """Which entries have this name."""
    here: NDArray[np.bool_] = key_length == len(name)
    for position, byte in enumerate(name):
        candidates = np.flatnonzero(here)
        here[candidates] = data[key[candidates] + position] == byte
    return here


def _values(cursors: _Cursors, record: Ints, value: Ints, length: Ints, num_records: int, name: str) -> Values:
    """The lists of one feature; a record without it has an empty one."""
    order = np.argsort(record, kind="stable")
    record, value, length = record[order], value[order], length[order]
    filled = length > 0
    record, value, length = record[filled], value[filled], length[filled]
    kinds = np.unique(cursors.data[value])
    if len(kinds) > 1 or (len(kinds) and kinds[0] not in (_FLOATS, _INTS)):
        raise DataError(f"the feature '{name}' must hold floats or integers, and the same in every record")
    counts = np.zeros(num_records, np.int64)
    payload, payload_end = value, value
    if len(value):
        payload, payload_end = cursors.message(value, int(kinds[0]), value + length, record)
        listed_ = payload < payload_end  # an empty list has no packed field
        record, payload, payload_end = record[listed_], payload[listed_], payload_end[listed_]
        payload, payload_end = cursors.message(payload, _PACKED, payload_end, record)
    raw = cursors.data[_ragged_range(payload, payload_end - payload)]
    if len(kinds) and kinds[0] == _FLOATS:
        numbers: NDArray[np.generic] = raw.view("<f4")
        np.add.at(counts, record, (payload_end - payload) // 4)
    else:
        last = raw < 0x80
        numbers = _decode_varints(raw, last)
        owner = np.repeat(record, payload_end - payload)
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
