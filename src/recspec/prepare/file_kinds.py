"""What a raw file is by its first bytes: its encoding, whether it holds objects, and kinds that are not read."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from recspec.errors import DataError
from recspec.files import opened
from recspec.prepare.notes import Notes

OTHER_KINDS = {
    b"PK\x03\x04": ("a zip file, or a spreadsheet", "unpack it, or save it as CSV"),
    b"\xd0\xcf\x11\xe0": ("an old spreadsheet (.xls)", "save it as CSV"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"\x1f\x8b": ("a gzipped file", "name it .gz"),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", "name it .zst"),
    b"BZh": ("a file compressed by bzip2", "name it .bz2"),
    b"\xfd7zXZ": ("a file compressed by xz", "unpack it"),
    b"SQLite format 3": ("an SQLite database", "export its table as CSV or Parquet"),
    b"%PDF-": ("a PDF file", "export its table as CSV"),
    b"\x89HDF": ("an HDF5 file", "save its table as Parquet, as with pandas.read_hdf(FILE).to_parquet(...)"),
    b"ARROW1": ("an Arrow or Feather file", "save it as Parquet, as with pyarrow.feather.read_table"),
    b"ORC": ("an ORC file", "save it as Parquet, as with pyarrow.orc.read_table"),
    b"Obj\x01": ("an Avro file", "save it as Parquet, as DuckDB's avro extension does"),
    b"\x93NUMPY": ("a NumPy file", "save its columns as Parquet"),
    b"MATLAB ": ("a MATLAB file", "save its table as Parquet, as with scipy.io.loadmat"),
    b"\x80\x04\x95": ("a pickle, which may run any code", "load it where you trust it, and save it as Parquet"),
    b"\x80\x03": ("a pickle, which may run any code", "load it where you trust it, and save it as Parquet"),
    b"version https://": ("a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
    b"<!DOCTYPE": ("a web page", "download the file itself"),
    b"<!doctype": ("a web page", "download the file itself"),
    b"<html": ("a web page", "download the file itself"),
    b"<?xml": ("XML", "save its rows as CSV or JSON lines"),
    b"@relation": ("an ARFF file of Weka", "save it as CSV, as with scipy.io.arff.loadarff"),
    b"@RELATION": ("an ARFF file of Weka", "save it as CSV, as with scipy.io.arff.loadarff"),
    b"-- MySQL dump": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"CREATE TABLE": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"INSERT INTO": ("an SQL dump", "load it into a database, and export its table as CSV"),
    b"%%MatrixMarket": ("a MatrixMarket file", "save its rows, columns and values as CSV"),
}
"""What a file is by its first bytes, where text is expected, and what to do."""


def check_encoding(text: str) -> str:
    """The canonical name of a text encoding. Raises ValueError if Python does not know it."""
    try:
        "".encode(text)  # refuses encodings of bytes, such as base64
        name = codecs.lookup(text).name
    except LookupError:
        raise ValueError(f"encoding '{text}' is not known; expected such as utf-8, utf-16, latin-1 or cp1252") from None
    return {"iso8859-1": "latin-1"}.get(name, name)


def encoding_of(path: Path, given: str | None, notes: Notes) -> str:
    """The encoding of a text file. Raises DataError if its first bytes are those of another kind of file."""
    with opened(path) as file:
        start = file.read(24)
    for mark, (kind, remedy) in OTHER_KINDS.items():
        if start.startswith(mark):
            raise DataError(f"{path}: expected text, and its first bytes are those of {kind}; {remedy}")
    if given is not None:
        return given
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        notes.inferred.append(f"{path.name} is read as utf-16, because it starts with that encoding's byte order mark")
        return "utf-16"
    for kind, zeros, others in (("utf-16-le", start[1:16:2], start[:16:2]), ("utf-16-be", start[:16:2], start[1:16:2])):
        if len(start) >= 4 and not any(zeros) and all(others):  # letters of Latin, without a byte order mark
            notes.inferred.append(f"{path.name} is read as {kind}, because every second of its first bytes is 0")
            return kind
    return "utf-8"


def begins_with_object(path: Path) -> bool:
    """Whether a file begins as JSON objects or Python dictionaries do, whatever its suffix."""
    with opened(path) as file:
        start = file.read(1 << 12).removeprefix(codecs.BOM_UTF8)
    return re.match(rb"[\s\[]*\{\s*(\"[^\"\n]*\"|[uU]?'[^'\n]*')\s*:", start) is not None
