"""Zips and gzipped files of raw data: opened, unpacked within bounds, read line by line.

A damaged file, one that was cut short, and one that unpacks to far more than its size are each one error that names it.
"""

from __future__ import annotations

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

from recspec.errors import DataError, SettingsError, of_the_machine
from recspec.files.paths import special
from recspec.machine import parse_bytes

LINE_BYTES = 16 << 20
"""Of a file of JSON lines: beyond this a line is an error, so that a file without line breaks fills no memory."""

LEAST_CAP, MOST_TIMES = 10**9, 100
"""A packed file may unpack to the larger of 1 GB and 100 times its size; text shrinks to a fifth or a tenth."""

_ZIP_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, LookupError,
    RuntimeError, OverflowError,
)  # fmt: skip
"""What zipfile raises of bytes that are no zip, of a method that it does not know, and of an encrypted member."""
_GZIP_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)


# --- zips ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip to read from.

    Raises:
        DataError: if it is no zip, or damaged; also if that shows only while it is read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _ZIP_DAMAGE as error:
        if of_the_machine(error):
            raise
        raise DataError(f"{path}: not a zip file, or damaged ({_said(error)}); download it again") from None


def extract(archive: zipfile.ZipFile, member: str, target: Path, limit: str | None) -> None:
    """Unpack one file of a zip to `target`, within the bounds of `check_unpacked`."""
    check_unpacked(archive, member, limit)
    with archive.open(member) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)


def check_unpacked(archive: zipfile.ZipFile, member: str, limit: str | None = None) -> None:
    """Refuse a file of a zip that takes far more space than the zip: a small one can be made to fill any disk.

    Args:
        limit: The most bytes it may hold, such as `20GB`; without, 100 times what it takes in the zip, at least 1 GB.

    Raises:
        DataError: if it holds more. No more is read than the zip says, so that can be believed.
        SettingsError: if the limit is no size.
    """
    packed = archive.getinfo(member)
    try:
        most = most_unpacked(packed.compress_size) if limit is None else parse_bytes(limit)
    except ValueError:
        raise SettingsError(f"setting 'max_unpacked': '{limit}' is not an amount; expected such as '20GB'") from None
    if packed.file_size > most:
        raise DataError(
            f"{archive.filename}: '{member}' takes {packed.compress_size:,} bytes in the zip and {packed.file_size:,} "
            f"unpacked, more than {most:,}; if that is right, allow it by --set max_unpacked={packed.file_size}"
        )


def most_unpacked(packed_bytes: int) -> int:
    """The most bytes that so many packed ones may become."""
    return max(LEAST_CAP, MOST_TIMES * packed_bytes)


# --- gzipped files ---------------------------------------------------------------------------------------------------


def is_gzip(path: Path) -> bool:
    """Whether a file's name says that it is gzipped."""
    return path.suffix.lower() == ".gz"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if its name ends in `.gz`.

    Raises:
        DataError: if it can't be opened, is damaged, was cut short or unpacks to too much; also while it is read.
    """
    if problem := special(path):
        raise DataError(f"{path}: {problem}")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: can't be opened: {error.strerror}") from None
    with stream:
        if not is_gzip(path):
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield io.BufferedReader(_Counted(unpacked, path), 1 << 16)
        except _GZIP_DAMAGE as error:
            what = "was cut short" if isinstance(error, EOFError) else f"is no gzip file, or damaged ({error})"
            raise DataError(f"{path}: the compressed file {what}; download it again") from None


class _Counted(io.RawIOBase):
    """What a gzipped file unpacks to, up to the most that is allowed."""

    def __init__(self, unpacked: gzip.GzipFile, path: Path) -> None:
        self._unpacked, self._path = unpacked, path
        self._most, self._count = most_unpacked(path.stat().st_size), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._unpacked.readinto(buffer)
        self._count += count
        if self._count > self._most:
            raise too_much(self._path)
        return count


def too_much(path: Path) -> DataError:
    """The error for a gzipped file that unpacks to more than is allowed."""
    size = path.stat().st_size
    return DataError(
        f"{path}: takes {size:,} bytes packed and more than {most_unpacked(size):,} unpacked; if that is right, unpack "
        "it yourself (gunzip) and name the unpacked file"
    )


# --- lines -----------------------------------------------------------------------------------------------------------


class LineError(ValueError):
    """A line that can't be taken in: it has no end in sight."""


def lines(path: Path, most: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a plain or gzipped file with their numbers from 1, each of at most so many bytes.

    Raises:
        DataError: as `opened`, and for a longer line.
    """
    with opened(path) as stream:
        try:
            yield from enumerate(bounded_lines(stream, most), 1)
        except LineError as error:
            raise DataError(f"{path}: {error}") from None


def bounded_lines(stream: IO[AnyStr], most: int) -> Iterator[AnyStr]:
    """The lines of a stream, each of at most so many characters, or bytes.

    Raises:
        LineError: for a longer one.
    """
    number = 0
    while line := stream.readline(most + 1):
        number += 1
        if len(line) > most:
            unit = "characters" if isinstance(line, str) else "bytes"
            raise LineError(f"line {number:,}: is longer than {most:,} {unit}; expected line breaks between rows")
        yield line


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
