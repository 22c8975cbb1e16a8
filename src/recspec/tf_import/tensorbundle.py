"""TensorFlow's checkpoints read with numpy alone: the variables of a TensorBundle, and the operations of a graph.

A TensorBundle is `PREFIX.index` and `PREFIX.data-00000-of-0000N`. The index is a table in LevelDB's format: blocks of
entries sorted by key, each key without the bytes it shares with the one before; a footer gives the place of the index
of the blocks. A value is a protocol buffer, BundleEntryProto: type, shape, file, offset, size, and the masked CRC-32C
of the bytes. A variable cut into slices has an entry that lists them, and an entry under a binary key for each slice.

Sources of the format: tensorflow/core/protobuf/tensor_bundle.proto, tensorflow/core/util/saved_tensor_slice_util.h,
tensorflow/core/lib/strings/ordered_code.h, LevelDB's doc/table_format.md.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, listed, nearest
from recspec.base.files import PathError, confined, special
from recspec.data.storage import masked_crc

Array: TypeAlias = NDArray[np.generic]
Message: TypeAlias = Mapping[int, Sequence[int | memoryview]]
"""The values of a protocol buffer by field number: integers, and the bytes of texts and messages."""

TYPES: Mapping[int, str] = {
    **dict(enumerate("float32 float64 int32 uint8 int16 int8 string complex64 int64 bool".split(), 1)),
    14: "bfloat16",
    **dict(enumerate("uint16 complex128 float16 resource variant uint32 uint64".split(), 17)),
}
"""Names of TensorFlow's DataType."""
NUMBERS = frozenset(TYPES.values()) - {"string", "resource", "variant"}
MOST_INDEX_BYTES, MOST_GRAPH_BYTES = 1 << 28, 1 << 31
MOST_KEY_BYTES = 1 << 28  # of all keys together: without the bytes they share, they may be far longer than the file
MOST_DIMENSIONS, MOST_ROWS = 8, 1 << 40  # of a variable: more than any disk holds, and within numpy's limits
SHOWN = 20  # models listed in a message
DEEPEST = 3  # folders below the given one in which models are looked for, as in export/best/1700000000
_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAGIC = 0xDB4775248B80FB57
_VARINT_BYTES = 10


@dataclass(frozen=True)
class Slice:
    """A part of a variable: start and length in each dimension; a length of None is all of it."""

    extents: tuple[tuple[int, int | None], ...]

    def within(self, shape: Sequence[int]) -> tuple[slice, ...] | None:
        """The part as an index into an array of this shape; None if it does not fit."""
        if len(self.extents) != len(shape):
            return None
        places = [
            slice(start, size if length is None else start + length)
            for (start, length), size in zip(self.extents, shape, strict=True)
        ]
        fits = all(0 <= place.start <= place.stop <= size for place, size in zip(places, shape, strict=True))
        return tuple(places) if fits else None


@dataclass(frozen=True)
class Entry:
    """A variable or a slice in the index."""

    type: str
    shape: tuple[int, ...]
    shard: int = 0
    offset: int = 0
    size: int = 0  # bytes
    checksum: int | None = None
    slices: tuple[Slice, ...] = ()

    def __str__(self) -> str:
        return f"{self.type} {self.shape}"


@dataclass(frozen=True)
class TensorBundle:
    """The variables of a checkpoint, read one by one."""

    prefix: Path
    num_shards: int
    entries: Mapping[str, Entry]  # variables, in order of names
    parts: Mapping[tuple[str, Slice], Entry] = field(repr=False)

    @classmethod
    def open(cls, prefix: Path) -> TensorBundle:
        """Read the index."""
        path = prefix.with_name(f"{prefix.name}.index")
        try:
            header: bytes | None = None
            entries: dict[str, Entry] = {}
            parts: dict[tuple[str, Slice], Entry] = {}
            for key, value in _table(_whole(path, MOST_INDEX_BYTES)):
                if not key:
                    header = value
                elif key[0] == 0:
                    parts[_slice_key(key)] = _entry(value)
                else:
                    entries[key.decode()] = _entry(value)
            if header is None:
                raise _Damaged("it has no header")
            return cls(prefix, _num_shards(header), entries, parts)
        except UnicodeDecodeError:
            raise DataError(f"{path}: damaged: a variable's name is no text") from None
        except _Damaged as error:
            raise DataError(f"{path}: damaged or cut off: {error}") from None

    def read(self, name: str) -> Array:
        """A variable, joined from its slices if it has any; bfloat16 as float32."""
        if name not in self.entries:
            raise DataError(f"{self.prefix}: no variable '{name}'{nearest(name, self.entries)}")
        entry = self.entries[name]
        try:
            return self._joined(name, entry) if entry.slices else self._read(entry)
        except _Damaged as error:
            raise DataError(f"{self.prefix}: variable '{name}' ({entry}): {error}") from None

    def _joined(self, name: str, entry: Entry) -> Array:
        found = []
        for part in entry.slices:
            place, own = part.within(entry.shape), self.parts.get((name, part))
            if place is None or own is None:
                raise _Damaged(f"its slice {part.extents} {'is missing' if place else 'does not fit'}")
            shape = tuple(where.stop - where.start for where in place)
            if (own.type, own.shape) != (entry.type, shape):
                raise _Damaged(f"its slice {part.extents} is {own}; expected {entry.type} {shape}")
            found.append((place, own))
        if sum(math.prod(own.shape) for _, own in found) != math.prod(entry.shape):
            raise _Damaged("its slices are not the whole of it")
        stored = sorted((own.shard, own.offset, own.offset + own.size) for _, own in found)
        if any(one[0] == other[0] and other[1] < one[2] for one, other in pairwise(stored)):
            raise _Damaged("its slices overlap in the file")  # which bounds the memory that is taken
        pieces = [(place, self._read(own)) for place, own in found]
        covered, joined = np.zeros(entry.shape, bool), np.empty(entry.shape, pieces[0][1].dtype)
        for place, array in pieces:
            covered[place], joined[place] = True, array
        if not covered.all():
            raise _Damaged("its slices overlap")
        return joined

    def _read(self, entry: Entry) -> Array:
        if entry.type not in NUMBERS:
            raise _Damaged(f"holds {entry.type}, which is not read; only numbers are")
        stored = np.dtype("u2" if entry.type == "bfloat16" else entry.type).newbyteorder("<")
        if entry.size != math.prod(entry.shape) * stored.itemsize:
            raise _Damaged(f"takes {entry.size:,} bytes; its shape and type ask for another number")
        path = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self.num_shards:05d}")
        if problem := special(path):
            raise _Damaged(f"{path.name} {problem}")
        try:
            with path.open("rb") as file:
                if entry.offset + entry.size > path.stat().st_size:
                    raise _Damaged(f"ends beyond {path.name}: that file was cut off")
                file.seek(entry.offset)
                raw = file.read(entry.size)
        except OSError as error:
            raise _Damaged(f"{path.name} can't be read: {error.strerror}") from None
        if len(raw) != entry.size:
            raise _Damaged(f"ends beyond {path.name}: that file was cut off")
        if entry.checksum is not None and masked_crc(raw) != entry.checksum:
            raise _Damaged(f"the checksum of its bytes in {path.name} is wrong: the file is damaged")
        numbers: Array = np.frombuffer(raw, stored).reshape(entry.shape)
        if entry.type == "bfloat16":
            return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return numbers


class _Damaged(Exception):
    """What is wrong, for a caller that knows the place."""


# --- where a checkpoint lies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The files of a model."""

    prefix: Path  # of the variables' files
    graph: Path | None  # the file with the operations, if it exists: saved_model.pb, or PREFIX.meta


def find(path: Path) -> Saved:
    """The SavedModel or checkpoint at a path: a folder, whose latest checkpoint counts, a prefix, or a file of it."""
    if path.is_dir():
        return _in_folder(path)
    if path.name == "saved_model.pb":
        return _in_folder(path.parent)
    prefix = path.with_name(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", path.name))
    if not _has_index(prefix):
        known = [found.name.removesuffix(".index") for found in path.parent.iterdir()] if path.parent.is_dir() else []
        what = "no index (PREFIX.index) beside it" if path.exists() else "no such folder or checkpoint"
        raise DataError(f"{path}: {what}{nearest(path.name, known)}")
    return _saved(prefix, prefix.with_name(f"{prefix.name}.meta"))


def _saved(prefix: Path, graph: Path) -> Saved:
    return Saved(prefix, graph if graph.is_file() else None)


def _in_folder(folder: Path) -> Saved:
    variables = folder / "variables" / "variables"
    if _has_index(variables):
        return _saved(variables, folder / "saved_model.pb")
    latest = _latest(folder) if (folder / "checkpoint").is_file() else None
    found = [latest] if latest is not None else _models_in(folder)
    if len(found) == 1 and (latest or found[0].parent == folder) and _has_index(found[0]):
        return _saved(found[0], found[0].with_name(f"{found[0].name}.meta"))
    if found:
        number = f"{len(found)} models" if len(found) > 1 else "a model further in"
        lines = "".join(f"\n  {path}" for path in found[:SHOWN])
        more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise DataError(f"{folder}: holds {number}; name the one to import:{lines}{more}")
    raise DataError(
        f"{folder}: neither a SavedModel (variables/variables.index) nor a folder of checkpoints (checkpoint, *.index)"
    )


def _models_in(folder: Path) -> list[Path]:
    """Prefixes of checkpoints in a folder, and SavedModels and folders of checkpoints up to `DEEPEST` below it."""
    found = {file.with_suffix("") for file in folder.glob("*.index")}
    for depth in range(1, DEEPEST + 1):
        below = "*/" * depth
        found |= {file.parent for name in ("saved_model.pb", "checkpoint") for file in folder.glob(below + name)}
        found |= {file.parent for file in folder.glob(f"{below}*.index") if file.parent.name != "variables"}
    return sorted(found)


def _latest(folder: Path) -> Path:
    """The prefix in the text file `checkpoint`; if its folder was moved, the prefix of that name in this folder."""
    file = folder / "checkpoint"
    text = _whole(file, 1 << 20).decode(errors="replace")
    found = re.search(r'^[ \t]*model_checkpoint_path:\s*"((?:[^"\\]|\\.)*)"', text, re.MULTILINE)
    if found is None:
        raise DataError(f"{file}: names no model_checkpoint_path")
    named = Path(re.sub(r"\\(.)", r"\1", found[1]))
    for prefix in (str(named), named.name):
        with suppress(PathError):
            if _has_index(folder / prefix) and confined(folder, f"{prefix}.index"):
                return folder / prefix
    known = [index.stem for index in folder.glob("*.index")]
    raise DataError(f"{file}: the latest checkpoint is '{named}', which is not in this folder; found {listed(known)}")


def _has_index(prefix: Path) -> bool:
    return prefix.name != "" and prefix.with_name(f"{prefix.name}.index").is_file()


def _whole(path: Path, most: int) -> bytes:
    if problem := special(path):
        raise DataError(f"{path}: {problem}")
    try:
        size = path.stat().st_size
        if size > most:
            raise DataError(f"{path}: has {size:,} bytes; at most {most:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from None


# --- the table -------------------------------------------------------------------------------------------------------


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a table, in order."""
    if len(data) < _FOOTER_BYTES or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise _Damaged("it does not end as an index of TensorFlow does")
    _, at = _handle(data, len(data) - _FOOTER_BYTES)
    place, _ = _handle(data, at)
    previous, key_bytes, block_bytes = None, 0, 0
    for _, handle in _entries(_block(data, *place)):
        where, _ = _handle(handle, 0)
        block_bytes += where[1]
        if block_bytes > len(data):
            raise _Damaged("its blocks overlap")
        for key, value in _entries(_block(data, *where)):
            key_bytes += len(key)
            if previous is not None and key <= previous:
                raise _Damaged("its keys do not rise")
            if key_bytes > MOST_KEY_BYTES:
                raise _Damaged(f"its keys take more than {MOST_KEY_BYTES:,} bytes")
            previous = key
            yield key, value


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the place after them."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(data: bytes, offset: int, size: int) -> bytes:
    """The entries of a block, without its restart points, which serve searches only."""
    end = offset + size + _TRAILER_BYTES
    if end > len(data) - _FOOTER_BYTES or size < 4:
        raise _Damaged("a block lies beyond its end")
    kind, checksum = struct.unpack_from("<BI", data, offset + size)
    if masked_crc(data[offset : end - 4]) != checksum:
        raise _Damaged("the checksum of a block is wrong")
    if kind:
        how = "with snappy" if kind == 1 else f"in a way numbered {kind}"
        raise _Damaged(f"a block is compressed {how}, which is not read; save the model again without")
    (restarts,) = struct.unpack_from("<I", data, offset + size - 4)
    if 4 * (restarts + 1) > size:
        raise _Damaged("a block has more restart points than bytes")
    return data[offset : offset + size - 4 * (restarts + 1)]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    at, key, key_bytes = 0, b"", 0
    while at < len(block):
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + own + length > len(block):
            raise _Damaged("an entry reaches beyond its block")
        key = key[:shared] + block[at : at + own]
        key_bytes += len(key)
        if key_bytes > MOST_KEY_BYTES:
            raise _Damaged(f"its keys take more than {MOST_KEY_BYTES:,} bytes")
        yield key, block[at + own : at + own + length]
        at += own + length


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """A number, and the place after it."""
    number = 0
    for position, byte in enumerate(data[at : at + _VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number, at + position + 1
    raise _Damaged("a number does not end")


# --- protocol buffers ------------------------------------------------------------------------------------------------


def _message(data: bytes | memoryview) -> Message:
    view, at = memoryview(data), 0
    found: dict[int, list[int | memoryview]] = {}
    while at < len(view):
        tag, at = _varint(view, at)
        wire = tag & 7
        value: int | memoryview
        if wire == 0:
            value, at = _varint(view, at)
        elif wire in (1, 2, 5):
            length, at = _varint(view, at) if wire == 2 else (8 if wire == 1 else 4, at)
            if at + length > len(view):
                raise _Damaged("a protocol buffer is cut off")
            content = view[at : at + length]
            value, at = content if wire == 2 else int.from_bytes(content, "little"), at + length
        else:
            raise _Damaged(f"a protocol buffer has a field of wire type {wire}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _integers(message: Message, number: int) -> list[int]:
    found = [value for value in message.get(number, ()) if isinstance(value, int)]
    if len(found) < len(message.get(number, ())):
        raise _Damaged("a protocol buffer has a message where a number should be")
    return found


def _integer(message: Message, number: int) -> int:
    return [0, *_integers(message, number)][-1]


def _signed(message: Message, number: int) -> int:
    """An int64, stored as its two's complement."""
    value = _integer(message, number)
    return value - (1 << 64) if value >= 1 << 63 else value


def _parts(message: Message, number: int) -> list[memoryview]:
    found = [value for value in message.get(number, ()) if isinstance(value, memoryview)]
    if len(found) < len(message.get(number, ())):
        raise _Damaged("a protocol buffer has a number where a message should be")
    return found


def _texts(message: Message, number: int) -> list[str]:
    return [bytes(part).decode() for part in _parts(message, number)]


def _num_shards(header: bytes) -> int:
    message = _message(header)
    if any(_integers(message, 2)):
        raise _Damaged("its numbers are big-endian, which is not read")
    return _integer(message, 1)


def _entry(data: bytes) -> Entry:
    """A BundleEntryProto."""
    message = _message(data)
    kind, shard, offset, size = (_integer(message, number) for number in (1, 3, 4, 5))
    shapes = [_shape(_message(part)) for part in _parts(message, 2)]
    checksum = _integer(message, 6) if 6 in message else None
    slices = tuple(_slice(_message(part)) for part in _parts(message, 7))
    return Entry(TYPES.get(kind, f"type number {kind}"), [(), *shapes][-1], shard, offset, size, checksum, slices)


def _shape(message: Message) -> tuple[int, ...]:
    """A TensorShapeProto."""
    sizes = tuple(_signed(_message(part), 1) for part in _parts(message, 2))
    if any(size < 0 for size in sizes):
        raise _Damaged("a variable has a dimension of unknown size")
    if len(sizes) > MOST_DIMENSIONS or max(sizes, default=0) > MOST_ROWS:
        raise _Damaged("a variable has more dimensions, or a longer one, than any model's")
    return sizes


def _slice(message: Message) -> Slice:
    """A TensorSliceProto."""
    extents = [_message(part) for part in _parts(message, 1)]
    return Slice(tuple((_signed(each, 1), _signed(each, 2) if 2 in each else None) for each in extents))


# --- keys of slices --------------------------------------------------------------------------------------------------


def _slice_key(key: bytes) -> tuple[str, Slice]:
    """The variable and its slice of a key in ordered code: 0, the name, the number of dimensions, starts and lengths.

    A name ends with 00 01, and has 00 FF for 00 and FF 00 for FF. A length of -1 is all of the dimension.
    """
    end = key.find(b"\x00\x01", 1)
    if end < 0:
        raise _Damaged("the key of a slice does not end")
    name = key[1:end].replace(b"\x00\xff", b"\x00").replace(b"\xff\x00", b"\xff").decode()
    at = end + 2
    width = key[at] if at < len(key) else 0
    dims, at = int.from_bytes(key[at + 1 : at + 1 + width], "big"), at + 1 + width
    extents: list[tuple[int, int | None]] = []
    for _ in range(min(dims, len(key))):
        start, at = _ordered(key, at)
        length, at = _ordered(key, at)
        extents.append((start, None if length == -1 else length))
    if at != len(key) or len(extents) != dims:
        raise _Damaged("the key of a slice is not what it should be")
    return name, Slice(tuple(extents))


def _ordered(key: bytes, at: int) -> tuple[int, int]:
    """A signed number in ordered code, and the place after it.

    As many leading ones as it has bytes, then a 0, then the number; a negative one has all its bits flipped.
    """
    head = key[at : at + 2]
    if not head:
        raise _Damaged("the key of a slice is cut off")
    flip = 0xFF if head[0] < 0x80 else 0
    ones = f"{int.from_bytes(bytes(byte ^ flip for byte in head.ljust(2, bytes([flip]))), 'big'):016b}".find("0")
    if not 1 <= ones <= _VARINT_BYTES or at + ones > len(key):
        raise _Damaged("the key of a slice is cut off")
    bits = int.from_bytes(bytes(byte ^ flip for byte in key[at : at + ones]), "big")
    number = bits & ((1 << (7 * ones)) - 1)
    return (~number if flip else number), at + ones


# --- graphs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One node of a graph."""

    name: str
    type: str
    inputs: tuple[str, ...]
    numbers: Mapping[str, int]  # integer attributes


def operations(graph: Path) -> list[Operation]:
    """The operations of saved_model.pb (of its first graph) or of a .meta file, without those inside functions."""
    data: bytes | memoryview = _whole(graph, MOST_GRAPH_BYTES)
    try:
        if graph.suffix == ".pb":
            data = [*_parts(_message(data), 2), memoryview(b"")][0]
        graphs = [_message(part) for part in _parts(_message(data), 2)]
        return [_operation(_message(node)) for own in graphs for node in _parts(own, 1)]
    except (_Damaged, UnicodeDecodeError) as error:
        raise DataError(f"{graph}: damaged or cut off: {error}") from None


def _operation(node: Message) -> Operation:
    """A NodeDef."""
    numbers: dict[str, int] = {}
    for attribute in map(_message, _parts(node, 5)):
        for value in map(_message, _parts(attribute, 2)):
            numbers |= dict.fromkeys(_texts(attribute, 1), _signed(value, 3)) if 3 in value else {}
    name, kind = (["", *_texts(node, number)][-1] for number in (1, 2))
    return Operation(name, kind, tuple(_texts(node, 3)), numbers)
