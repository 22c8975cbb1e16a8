"""Zips and compressed files of raw data: opened, unpacked within bounds, read line by line."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, AnyStr

from recspec.base.errors import DataError, SettingsError, of_the_machine
from recspec.base.files.paths import special
from recspec.base.machine import parse_bytes

LINE_BYTES = 16 << 20
"""Most bytes of a line of a JSON lines file, so that a file without line breaks does not fill the memory."""
LEAST_CAP, MOST_TIMES = 10**9, 100
"""A packed file may unpack to the larger of 1 GB and 100 times its size; text shrinks to a fifth or a tenth."""
_ZIP_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    OverflowError,
)
"""What zipfile raises for bytes that are no zip, an unknown method and an encrypted member."""
_DAMAGE = (EOFError, zlib.error, OSError)
"""What the unpacking of compressed files raises."""
PACKED = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
"""Suffixes of compressed files."""


# --- zips ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip for reading. Raises DataError if it is not a zip, or is damaged; also while it is read."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _ZIP_DAMAGE as error:
        if of_the_machine(error):
            raise
        said = str(error) or type(error).__name__
        raise DataError(f"{path}: not a zip file, or damaged ({said}); download it again") from None


def extract(archive: zipfile.ZipFile, member: str, target: Path, limit: str | None) -> None:
    """Unpack one file of a zip to `target`, within the bounds of `check_unpacked`."""
    check_unpacked(archive, member, limit)
    with archive.open(member) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)


def check_unpacked(archive: zipfile.ZipFile, member: str, limit: str | None = None) -> None:
    """Refuse a file of a zip that unpacks to more than `limit`, such as `20GB`, because it could fill the disk.

    By default, the limit is 100 times its size in the zip, at least 1 GB. Raises DataError, or SettingsError if the
    limit is not a size. Reading stops at the size that the zip states.
    """
    packed = archive.getinfo(member)
    try:
        most = most_unpacked(packed.compress_size) if limit is None else parse_bytes(limit)
    except ValueError:
        raise SettingsError(f"setting 'max_unpacked': '{limit}' is not an amount; expected such as '20GB'") from None
    if packed.file_size > most:
        sizes = f"{packed.compress_size:,} bytes in the zip and {packed.file_size:,} unpacked"
        raise DataError(
            f"{archive.filename}: '{member}' takes {sizes}, more than {most:,}; if that is right, allow it "
            f"by --set max_unpacked={packed.file_size}"
        )


def most_unpacked(packed_bytes: int) -> int:
    """The most bytes that a packed file of this size may unpack to."""
    return max(LEAST_CAP, MOST_TIMES * packed_bytes)


# --- compressed files ------------------------------------------------------------------------------------------------


def packing(path: Path) -> str | None:
    """How a file is compressed, by its name: one of the values of `PACKED`, or None."""
    return PACKED.get(path.suffix.lower())


def is_gzip(path: Path) -> bool:
    """Whether a file is gzipped, by its name."""
    return packing(path) == "gzip"


def unpacked_name(path: Path) -> str:
    """A file's name in lower case without the suffix of its compression."""
    name = path.name.lower()
    return name.removesuffix(path.suffix.lower()) if packing(path) else name


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if compressed. Raises DataError if it is unreadable, damaged or far too large."""
    if problem := special(path):
        raise DataError(f"{path}: {problem}")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: can't be opened: {error.strerror}") from None
    with stream:
        if (how := packing(path)) is None:
            yield stream
            return
        with _unpacking(stream, how) as unpacked:
            yield io.BufferedReader(_Counted(unpacked, path, how), 1 << 16)


def _unpacking(stream: IO[bytes], how: str) -> Any:
    """A file object of the unpacked bytes."""
    if how == "gzip":
        return gzip.GzipFile(fileobj=stream)
    if how == "zstd":
        import pyarrow as pa  # this file is imported everywhere, and pyarrow takes long to load

        return pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")
    return _Bzip2(stream)


class _Bzip2:
    """The unpacked bytes of one bzip2 stream after another; `bz2.BZ2File` would end in silence at a damaged one."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed, self._stream, self._begun = packed, bz2.BZ2Decompressor(), False

    def __enter__(self) -> _Bzip2:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readinto(self, buffer: Any) -> int:
        while True:
            rest = self._stream.unused_data if self._stream.eof else b""
            if not rest and (self._stream.eof or self._stream.needs_input):
                rest = self._packed.read(1 << 16)
                if not rest:
                    if self._begun and not self._stream.eof:
                        raise EOFError
                    return 0
            if self._stream.eof:
                self._stream = bz2.BZ2Decompressor()
            self._begun = True
            if found := self._stream.decompress(rest, len(buffer)):
                buffer[: len(found)] = found
                return len(found)


class _Counted(io.RawIOBase):
    """The unpacked bytes of a compressed file, up to the most that is allowed."""

    def __init__(self, unpacked: Any, path: Path, how: str) -> None:
        self._unpacked, self._path, self._how = unpacked, path, how
        self._most, self._count = most_unpacked(path.stat().st_size), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._unpacked.readinto(buffer)
        except _DAMAGE as error:
            if of_the_machine(error):
                raise
            cut = isinstance(error, EOFError) or "runcated" in str(error)
            what = "was cut short" if cut else f"is no {self._how} file, or damaged ({error})"
            raise DataError(f"{self._path}: the compressed file {what}; download it again") from None
        self._count += count
        if self._count > self._most:
            raise too_much(self._path)
        return count


def too_much(path: Path) -> DataError:
    """The error for a compressed file that unpacks to more than is allowed."""
    size = path.stat().st_size
    return DataError(
        f"{path}: takes {size:,} bytes packed and more than {most_unpacked(size):,} unpacked; unpack it first"
    )


# --- lines -----------------------------------------------------------------------------------------------------------


class LineError(ValueError):
    """A line that is too long."""


def lines(path: Path, most: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a plain or compressed file. Raises DataError, also for a line longer than `most` bytes."""
    with opened(path) as stream:
        try:
            yield from enumerate(bounded_lines(stream, most), 1)
        except LineError as error:
            raise DataError(f"{path}: {error}") from None


def bounded_lines(stream: IO[AnyStr], most: int) -> Iterator[AnyStr]:
    """The lines of a stream. Raises LineError if a line is longer than `most` characters, or bytes."""
    number = 0
    while line := stream.readline(most + 1):
        number += 1
        if len(line) > most:
            unit = "characters" if isinstance(line, str) else "bytes"
            raise LineError(f"line {number:,}: is longer than {most:,} {unit}; expected line breaks between rows")
        yield line
