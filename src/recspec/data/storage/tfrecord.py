"""Chunks of type `tfrecord`: `tf.train.Example` records, read and written whole columns at a time with numpy.

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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed, nearest
from recspec.data.storage.chunk_file import ColumnPlan, FileReader, FileWriter, Report
from recspec.data.storage.ragged import Column, Columns, Ragged, offsets_of, ragged_range, rows_of

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_BLOCK_RECORDS = 4096  # most records, and
_BLOCK_BYTES = 8 << 20  # bytes of several records, that are taken through each step together

_FRAME = struct.Struct("<QI")
_FRAME_BYTES = _FRAME.size + 4
_VARINT_BYTES = 10  # most bytes of a 64-bit varint
_FEATURES, _ENTRY, _KEY, _VALUE = 0x0A, 0x0A, 0x0A, 0x12  # tags of Example.features, .feature, entry.key, entry.value
_FLOATS, _INTS, _PACKED = 0x12, 0x1A, 0x0A  # tags of Feature.float_list, Feature.int64_list, list.value (packed)


class TfrecordReader(FileReader):
    """Records of one row or, prebatched, of several rows feature by feature: in each as many as in the first."""

    def __init__(self, path: Path, plans: Sequence[ColumnPlan]) -> None:
        self._records = Index.of(path)
        self._rows_per_record = 1
        scalars = [plan.name for plan in plans if not plan.feature.is_list]
        if scalars and len(self._records):
            self._rows_per_record = max(1, len(self._records.read(0, 1, scalars[:1])[scalars[0]].values))
        self.num_rows = len(self._records) * self._rows_per_record

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], report: Report) -> Columns:
        per_record = self._rows_per_record
        first, last = start // per_record, -(-stop // per_record)
        found = self._records.read(first, last, [plan.name for plan in plans])
        self.bytes_read += int(self._records.lengths[first:last].sum())
        columns = {
            plan.name: _from_examples(found[plan.name], plan, per_record, report.of(plan.name, first * per_record))
            for plan in plans
        }
        return rows_of(columns, start - first * per_record, stop - first * per_record)


def _from_examples(lists: Ragged, plan: ColumnPlan, per_record: int, report: Report) -> Column:
    """One feature of consecutive records: `length` values a row; of a list any number if every record is a row."""
    num_rows = len(lists) * per_record
    if plan.feature.is_list and per_record == 1:
        return lists
    expected = per_record * (plan.feature.length or 1)
    bad = np.not_equal(lists.lengths, expected)
    if bad.any():
        held = int(lists.lengths[np.argmax(bad)])
        what = f"its record holds {held} values; expected {expected}"
        report.add_where(np.repeat(bad, per_record), "count", what)
        return plan.zeros(num_rows)
    return lists.values.reshape(num_rows, -1) if plan.feature.is_list else lists.values


class TfrecordWriter(FileWriter):
    """One `tf.train.Example` a row."""

    def _append(self, columns: Columns) -> None:
        values = {}
        for plan in self._plans:
            column = columns[plan.name]
            values[plan.name] = column if isinstance(column, Ragged) else Ragged.of_rectangle(column.reshape(-1, 1))
        self._file.write(encode(values))


@dataclass(frozen=True, eq=False)
class Index:
    """Where the records of a file lie."""

    path: Path
    starts: Ints  # (R,) first byte of each record's data
    lengths: Ints  # (R,) bytes

    @classmethod
    def of(cls, path: Path) -> Index:
        """Walk the frames of a file. Raises `DataError` for a frame that is cut off."""
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
        """Some features of records [first, last). Raises `DataError` for damage and for a feature in no record."""
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
        starts = starts - begin
        _check_crcs(data, starts - _FRAME.size, np.full(len(starts), 8), "length", first)
        _check_crcs(data, starts, lengths, "data", first)
        return _decode(data, starts, lengths, names, first)


def masked_crc(data: bytes) -> int:
    """The CRC-32C of a run of bytes, masked as TFRecord files and TensorFlow's tables mask it."""
    import google_crc32c  # here, so that only TFRecord files need it

    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _masked_crcs(data: Bytes, starts: Ints, lengths: Ints) -> NDArray[np.uint32]:
    """The masked CRC-32C of each record: `lengths` bytes from `starts`."""
    raw = data.tobytes()
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return np.fromiter((masked_crc(raw[start:end]) for start, end in spans), np.uint32, len(starts))


def _check_crcs(data: Bytes, starts: Ints, lengths: Ints, what: str, first: int) -> None:
    stored = data[((starts + lengths)[:, None] + np.arange(4)).reshape(-1)].view("<u4")
    bad = stored != _masked_crcs(data, starts, lengths)
    if bad.any():
        number = first + int(np.argmax(bad)) + 1
        raise DataError(f"record {number}: the checksum of its {what} is wrong, the file is damaged")


# --- encoding: a column of bytes is a `Ragged` with the bytes of each record -----------------------------------------


def encode(features: Mapping[str, Ragged]) -> bytes:
    """Framed records of some features; every feature has a value list for each record."""
    num_records = len(next(iter(features.values())))
    return b"".join(
        _encode({name: lists.rows(start, start + _BLOCK_RECORDS) for name, lists in features.items()})
        for start in range(0, num_records, _BLOCK_RECORDS)
    )


def _encode(features: Mapping[str, Ragged]) -> bytes:
    entries = [piece for name, lists in features.items() for piece in _message(_ENTRY, *_entry(name.encode(), lists))]
    records = _joined(_message(_FEATURES, *entries))
    size = _fixed(records.lengths, "<u8")
    return _joined([size, _crcs(size), records, _crcs(records)]).values.tobytes()


def _crcs(pieces: Ragged) -> Ragged:
    return _fixed(_masked_crcs(pieces.values.view(np.uint8), pieces.offsets[:-1], pieces.lengths), "<u4")


def _entry(name: bytes, lists: Ragged) -> list[Ragged]:
    """The bytes of a map entry: a name and its list."""
    if lists.values.dtype.kind == "f":
        tag, payload = _FLOATS, Ragged(np.ascontiguousarray(lists.values, "<f4").view(np.uint8), lists.offsets * 4)
    else:
        numbers = _varints(lists.values.astype(np.int64))
        tag, payload = _INTS, Ragged(numbers.values, numbers.offsets[lists.offsets])
    key = _message(_KEY, _constant(name, len(lists)))
    return [*key, *_message(_VALUE, *_message(tag, *_message(_PACKED, payload)))]


def _message(tag: int, *body: Ragged) -> list[Ragged]:
    """A tag, the length of the body, and the body."""
    lengths = np.diff(np.sum([piece.offsets for piece in body], axis=0))
    return [_constant(bytes([tag]), len(lengths)), _varints(lengths), *body]


def _constant(what: bytes, num_records: int) -> Ragged:
    return Ragged.of_rectangle(np.tile(np.frombuffer(what, np.uint8), (num_records, 1)))


def _fixed(numbers: NDArray[np.integer], dtype: str) -> Ragged:
    data = numbers.astype(dtype)
    return Ragged.of_rectangle(data.view(np.uint8).reshape(len(data), data.itemsize))


def _varints(numbers: Ints) -> Ragged:
    """Each number as a varint; negative ones as their two's complement, in ten bytes."""
    rest = numbers.view(np.uint64)
    most = max(1, -(-int(rest.max(initial=0)).bit_length() // 7))
    if most == 1:
        return _fixed(rest, "u1")
    groups = np.empty((len(rest), most), np.uint8)
    lengths = np.ones(len(rest), np.int64)
    for position in range(most):
        groups[:, position] = rest & np.uint64(0x7F)
        rest = rest >> np.uint64(7)
        more = rest > 0
        groups[:, position] |= more.astype(np.uint8) << 7
        lengths += more
    return Ragged(groups[np.arange(most) < lengths[:, None]], offsets_of(lengths))


def _joined(pieces: Sequence[Ragged]) -> Ragged:
    """Records whose bytes are those of the pieces in order."""
    offsets = np.sum([piece.offsets for piece in pieces], axis=0)
    data = np.empty(offsets[-1], np.uint8)
    cursor = offsets[:-1].copy()
    for piece in pieces:
        lengths = piece.lengths
        data[ragged_range(cursor, lengths)] = piece.values
        cursor += lengths
    return Ragged(data, offsets)


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(data: Bytes, starts: Ints, lengths: Ints, names: Sequence[str], first: int) -> dict[str, Ragged]:
    padded = np.append(data, np.zeros(_VARINT_BYTES, np.uint8))
    entries: dict[bytes, list[_Spans]] = {}
    for name, found in _entries(_Spans(padded, first, np.arange(len(starts)), starts, starts + lengths)):
        entries.setdefault(name, []).append(found)
    known = sorted(name.decode(errors="replace") for name in entries)
    missing = [f"has no feature '{name}'{nearest(name, known)}" for name in names if name.encode() not in entries]
    if missing:
        raise DataError(f"{'; '.join(missing)}; records hold {listed(known)}")
    return {name: _values(_once(_Spans.of(entries[name.encode()]), name), len(starts), name) for name in names}


@dataclass(frozen=True, eq=False)
class _Spans:
    """Runs of bytes, each within a record; one step reads the same part of all."""

    data: Bytes
    first: int  # the number of the record that `record` counts as 0
    record: Ints
    start: Ints
    end: Ints

    @classmethod
    def of(cls, parts: Sequence[_Spans]) -> _Spans:
        """All parts, by record."""
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([part.record for part in parts]), kind="stable")
        ends = (np.concatenate([getattr(part, name) for part in parts]) for name in ("record", "start", "end"))
        return cls(parts[0].data, parts[0].first, *(each[order] for each in ends))

    def where(self, keep: NDArray[np.bool_]) -> _Spans:
        """Only the spans that are marked."""
        if keep.all():
            return self
        return replace(self, record=self.record[keep], start=self.start[keep], end=self.end[keep])

    def not_empty(self) -> _Spans:
        return self.where(self.start < self.end)

    def only(self, tag: int) -> _Spans:
        """The message with this tag that every span is, with nothing behind it."""
        found, rest = self.message(tag)
        self._check(rest.start == rest.end)
        return found

    def message(self, tag: int) -> tuple[_Spans, _Spans]:
        """The message with this tag that every span begins with, and the rest of every span."""
        self._check((self.start < self.end) & (self.data[np.minimum(self.start, len(self.data) - 1)] == tag))
        length, start = self._varint(self.start + 1)
        end = start + length
        self._check((length >= 0) & (end <= self.end))
        return replace(self, start=start, end=end), replace(self, start=end)

    def _varint(self, at: Ints) -> tuple[Ints, Ints]:
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

    def _check(self, sound: NDArray[np.bool_]) -> None:
        if not sound.all():
            number = self.first + int(self.record[np.argmin(sound)]) + 1
            raise DataError(f"record {number}: is not a tf.train.Example with packed float or int64 lists")


def _entries(records: _Spans) -> Iterator[tuple[bytes, _Spans]]:
    """Every map entry's name and value. Where records agree on the order of their entries, each step finds one name."""
    left = records.not_empty().only(_FEATURES)  # an Example without features has no bytes
    while len((left := left.not_empty()).record):
        entry, left = left.message(_ENTRY)
        key, rest = entry.message(_KEY)
        value = rest.only(_VALUE)
        for name, here in _names(key.data, key.start, key.end - key.start):
            yield name, value.where(here)


def _once(found: _Spans, name: str) -> _Spans:
    twice = np.flatnonzero(found.record[1:] == found.record[:-1])
    if len(twice):
        number = found.first + int(found.record[twice[0]]) + 1
        raise DataError(f"record {number}: holds the feature '{name}' more than once; expected one list of its values")
    return found


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


def _values(found: _Spans, num_records: int, name: str) -> Ragged:
    """The lists of one feature; a record without it has an empty one."""
    found = found.not_empty()
    kinds = np.unique(found.data[found.start])
    if len(kinds) > 1 or (len(kinds) and kinds[0] not in (_FLOATS, _INTS)):
        raise DataError(f"the feature '{name}' must hold floats or integers, and the same in every record")
    if len(kinds):
        found = found.only(int(kinds[0])).not_empty().only(_PACKED)  # an empty list has no packed field
    sizes = found.end - found.start
    raw = found.data[ragged_range(found.start, sizes)]
    counts = np.zeros(num_records, np.int64)
    if len(kinds) and kinds[0] == _FLOATS:
        counts[found.record] = sizes // 4
        return Ragged(raw.view("<f4"), offsets_of(counts))
    last = raw < 0x80
    counts += np.bincount(np.repeat(found.record, sizes)[last], minlength=num_records)
    return Ragged(_decode_varints(raw, last), offsets_of(counts))


def _decode_varints(raw: Bytes, last: NDArray[np.bool_]) -> Ints:
    """Varints that stand one after another; `last` marks the last byte of each."""
    ends = np.flatnonzero(last)
    if not len(ends):
        return np.zeros(0, np.int64)
    starts = np.append(0, ends[:-1] + 1)
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)
