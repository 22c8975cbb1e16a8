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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.errors import DataError, listed, nearest
from recspec.storage.crc32c import masked_crcs
from recspec.storage.ragged import Ragged, offsets_of, ragged_range

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_BLOCK_RECORDS = 4096  # most records, and
_BLOCK_BYTES = 8 << 20  # bytes of several records, that are taken through each step together

_FRAME = struct.Struct("<QI")
_FRAME_BYTES = _FRAME.size + 4
_VARINT_BYTES = 10  # most bytes of a 64-bit varint
_ENTRY, _KEY, _VALUE = 0x0A, 0x0A, 0x12  # tags of Features.feature, entry.key, entry.value
_FLOATS, _INTS, _PACKED = 0x12, 0x1A, 0x0A  # tags of Feature.float_list, Feature.int64_list, list.value (packed)


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

    def read(self, first: int, last: int, names: Sequence[str]) -> dict[str, Ragged]:
        """Some features of records [first, last).

        Raises:
            DataError: a checksum that differs, bytes that are no `tf.train.Example`, a feature that no record has.
        """
        nothing = Ragged(np.zeros(0, np.int64), np.zeros(1, np.int64))
        blocks = [self._read_block(start, stop, names) for start, stop in self._blocks(first, last)]
        return {name: Ragged.concatenate([block[name] for block in blocks] or [nothing]) for name in names}

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        while first < last:
            fitting = int(np.searchsorted(self.starts, self.starts[first] + _BLOCK_BYTES))
            stop = min(max(fitting, first + 1), first + _BLOCK_RECORDS, last)
            yield first, stop
            first = stop

    def _read_block(self, first: int, last: int, names: Sequence[str]) -> dict[str, Ragged]:
        starts, lengths = self.starts[first:last], self.lengths[first:last]
        begin, end = int(starts[0]) - _FRAME.size, int(starts[-1] + lengths[-1]) + 4
        with self.path.open("rb") as file:
            file.seek(begin)
            data = np.frombuffer(file.read(end - begin), np.uint8)
        _check_sums(data, starts - begin, lengths, first)
        return _decode(data, starts - begin, lengths, names, first)


def encode(features: Mapping[str, Ragged]) -> bytes:
    """Framed records of some features; every feature has a value list for each record."""
    num_records = len(next(iter(features.values())))
    return b"".join(
        _encode({name: lists.rows(start, start + _BLOCK_RECORDS) for name, lists in features.items()})
        for start in range(0, num_records, _BLOCK_RECORDS)
    )


def _encode(features: Mapping[str, Ragged]) -> bytes:
    num_records = len(next(iter(features.values())))
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


def _entry(name: bytes, values: Ragged) -> list[_Piece]:
    """The bytes of a map entry after its length."""
    num_records = len(values)
    floating = values.values.dtype.kind == "f"
    payload = _float_piece(values) if floating else _int_piece(values)
    inner = [_constant(_PACKED, num_records), _varints(payload.lengths), payload]
    kind = [_constant(_FLOATS if floating else _INTS, num_records), _varints(_total(inner)), *inner]
    key = bytes([_KEY, *_varint(len(name)), *name, _VALUE])
    return [_constant(key, num_records), _varints(_total(kind)), *kind]


def _float_piece(values: Ragged) -> _Piece:
    data = np.ascontiguousarray(values.values, "<f4").view(np.uint8)
    return _Piece(data, values.lengths * 4)


def _int_piece(values: Ragged) -> _Piece:
    encoded = _varints(values.values.astype(np.int64))
    return _Piece(encoded.data, np.diff(offsets_of(encoded.lengths)[values.offsets]))


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
        data[ragged_range(cursor, piece.lengths)] = piece.data
        cursor += piece.lengths
    return data, starts, lengths


def _framed(data: Bytes, starts: Ints, lengths: Ints) -> bytes:
    num_records = len(lengths)
    heads = lengths.astype("<u8").view(np.uint8).reshape(num_records, 8)
    head_sums = masked_crcs(heads.reshape(-1), np.arange(num_records) * 8, np.full(num_records, 8))
    pieces = [
        _Piece(heads.reshape(-1), np.full(num_records, 8)),
        _Piece(head_sums.astype("<u4").view(np.uint8), np.full(num_records, 4)),
        _Piece(data, lengths),
        _Piece(masked_crcs(data, starts, lengths).astype("<u4").view(np.uint8), np.full(num_records, 4)),
    ]
    return _join(pieces)[0].tobytes()


def _check_sums(data: Bytes, starts: Ints, lengths: Ints, first: int) -> None:
    for begins, sizes, what in (
        (starts - _FRAME.size, np.full(len(starts), 8), "length"),
        (starts, lengths, "data"),
    ):
        stored = data[((begins + sizes)[:, None] + np.arange(4)).reshape(-1)].view("<u4")
        bad = stored != masked_crcs(data, begins, sizes)
        if bad.any():
            raise DataError(
                f"record {first + int(np.argmax(bad)) + 1}: the checksum of its {what} is wrong, the file is damaged"
            )


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(data: Bytes, starts: Ints, lengths: Ints, names: Sequence[str], first: int) -> dict[str, Ragged]:
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


def _values(cursors: _Cursors, found: _Entries, num_records: int, name: str) -> Ragged:
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
    raw = cursors.data[ragged_range(found.value, found.end - found.value)]
    counts = np.zeros(num_records, np.int64)
    if floating:
        numbers: NDArray[np.generic] = raw.view("<f4")
        counts[found.record] = (found.end - found.value) // 4
    else:
        last = raw < 0x80
        numbers = _decode_varints(raw, last)
        owner = np.repeat(found.record, found.end - found.value)
        counts += np.bincount(owner[last], minlength=num_records)
    return Ragged(numbers, offsets_of(counts))


def _decode_varints(raw: Bytes, last: NDArray[np.bool_]) -> Ints:
    """Varints that stand one after another; `last` marks the last byte of each."""
    ends = np.flatnonzero(last)
    if not len(ends):
        return np.zeros(0, np.int64)
    starts = np.append(0, ends[:-1] + 1)
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
