"""Files as TensorFlow writes them, made byte by byte: checkpoints, graphs. Written apart from what reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

TYPES = {"float32": 1, "float64": 2, "int32": 3, "string": 7, "int64": 9, "bool": 10, "bfloat16": 14, "float16": 19}
MAGIC = 0xDB4775248B80FB57

Cuts = Mapping[str, Sequence[tuple[tuple[int, int], ...]]]
"""Variable -> its slices, each (start, length) by dimension; a length of -1 is all."""


def masked_crc(data: bytes) -> int:
    """CRC-32C bit by bit, masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    number %= 1 << 64
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def proto(*fields: tuple[int, int | bytes]) -> bytes:
    """A protocol buffer of varints and of what has a length."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def entry(
    kind: str,
    shape: Sequence[int],
    data: bytes = b"",
    *,
    shard: int = 0,
    offset: int = 0,
    slices: Sequence[tuple[tuple[int, int], ...]] = (),
) -> bytes:
    """A BundleEntryProto."""
    fields: list[tuple[int, int | bytes]] = [
        (1, TYPES[kind]),
        (2, proto(*((2, proto((1, size))) for size in shape))),
        (3, shard),
        (4, offset),
        (5, len(data)),
    ]
    checksum = b"" if slices else b"\x35" + struct.pack("<I", masked_crc(data))
    return proto(*fields) + checksum + proto(*((7, slice_proto(extents)) for extents in slices))


def slice_proto(extents: Sequence[tuple[int, int]]) -> bytes:
    return proto(
        *(
            (1, proto(*([(1, start)] if start else []), *([(2, length)] if length >= 0 else [])))
            for start, length in extents
        )
    )


def ordered(number: int) -> bytes:
    """A signed number in ordered code."""
    bits = number if number >= 0 else ~number
    length = bits.bit_length() // 7 + 1
    header = ((1 << length) - 1) << (7 * length)
    coded = (header | bits).to_bytes(length, "big")
    return coded if number >= 0 else bytes(byte ^ 0xFF for byte in coded)


def slice_key(name: str, extents: Sequence[tuple[int, int]]) -> bytes:
    escaped = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    numbers = b"".join(ordered(start) + ordered(length) for start, length in extents)
    return b"\x00" + escaped + b"\x00\x01" + b"\x01" + bytes([len(extents)]) + numbers


def block(entries: Sequence[tuple[bytes, bytes]], *, kind: int = 0) -> bytes:
    """Entries whose keys leave out what they share with the one before, a restart point at every third; a trailer."""
    out, restarts, previous = bytearray(), [], b""
    for place, (key, value) in enumerate(entries):
        if place % 3 == 0:
            restarts.append(len(out))
            previous = b""
        shared = next(
            (n for n, (a, b) in enumerate(zip(key, previous, strict=False)) if a != b), min(len(key), len(previous))
        )
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        previous = key
    restarts = restarts or [0]
    out += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)) + bytes([kind])
    return bytes(out) + struct.pack("<I", masked_crc(bytes(out)))


def table(entries: Mapping[bytes, bytes], *, per_block: int = 4, kind: int = 0) -> bytes:
    """A table in LevelDB's format."""
    out, handles = b"", []
    ordered_entries = sorted(entries.items())
    for start in range(0, len(ordered_entries), per_block):
        part = ordered_entries[start : start + per_block]
        made = block(part, kind=kind)
        handles.append((part[-1][0], varint(len(out)) + varint(len(made) - 5)))
        out += made
    places = []
    for made in (block([]), block(handles)):  # the metaindex, and the index
        places.append(varint(len(out)) + varint(len(made) - 5))
        out += made
    return out + b"".join(places).ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def write_bundle(
    prefix: Path,
    variables: Mapping[str, np.ndarray],
    *,
    cuts: Cuts | None = None,
    shards: int = 1,
    kinds: Mapping[str, str] | None = None,
    more: Mapping[bytes, bytes] | None = None,
) -> Path:
    """A checkpoint's index and data files; `kinds` names the type of variables whose array is of another."""
    files = [bytearray() for _ in range(shards)]
    entries = {b"": proto((1, shards), (3, proto((1, 1))))}

    def put(array: np.ndarray, kind: str) -> bytes:
        shard = len(entries) % shards
        data = array.tobytes()
        offset = len(files[shard])
        files[shard].extend(data)
        return entry(kind, array.shape, data, shard=shard, offset=offset)

    for name, array in variables.items():
        kind = (kinds or {}).get(name, array.dtype.name)
        if name in (cuts or {}):
            assert cuts is not None
            entries[name.encode()] = entry(kind, array.shape, slices=cuts[name])
            for extents in cuts[name]:
                place = tuple(slice(start, None if length < 0 else start + length) for start, length in extents)
                entries[slice_key(name, extents)] = put(np.ascontiguousarray(array[place]), kind)
        else:
            entries[name.encode()] = put(array, kind)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table({**entries, **(more or {})}))
    for shard, data in enumerate(files):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(bytes(data))
    return prefix


def graph(*operations: tuple[str, str, Sequence[str], Mapping[str, int]]) -> bytes:
    """A MetaGraphDef of nodes: name, type, inputs, integer attributes."""
    nodes = [
        proto(
            (1, name.encode()),
            (2, kind.encode()),
            *((3, own.encode()) for own in inputs),
            *((5, proto((1, key.encode()), (2, proto((3, value))))) for key, value in numbers.items()),
        )
        for name, kind, inputs, numbers in operations
    ]
    return proto((1, proto((1, b"serve"))), (2, proto(*((1, node) for node in nodes))))
