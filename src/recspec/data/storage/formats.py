"""The chunk types: how each is read, written and named on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recspec.data.storage.chunk_file import FileReader, FileWriter
from recspec.data.storage.csv_chunks import CsvReader, CsvWriter
from recspec.data.storage.fixed_rows import BinaryReader, BinaryWriter, TensorReader, TensorWriter
from recspec.data.storage.parquet import ParquetReader, ParquetWriter
from recspec.data.storage.tfrecord import TfrecordReader, TfrecordWriter
from recspec.feature_spec import ChunkType, Feature


@dataclass(frozen=True)
class Format:
    """One chunk type."""

    suffix: str
    reader: type[FileReader]
    writer: type[FileWriter]
    fixed_length: bool = False  # whether a list takes its whole length in every row


FORMATS: Mapping[ChunkType, Format] = {
    "csv": Format(".csv", CsvReader, CsvWriter),
    "parquet": Format(".parquet", ParquetReader, ParquetWriter),
    "split_binary": Format(".bin", BinaryReader, BinaryWriter, fixed_length=True),
    "torch_tensor": Format(".pt", TensorReader, TensorWriter, fixed_length=True),
    "tfrecord": Format(".tfrecord", TfrecordReader, TfrecordWriter),
}


def feature_to_write(feature: Feature, cardinality: int | None, to: ChunkType) -> Feature:
    """The feature with a cardinality, and a dtype that the chunk type `to` can hold."""
    dtype = feature.dtype or _narrowest(cardinality, to)
    if to == "tfrecord" and dtype == "float64":
        dtype = "float32"
    return Feature.model_validate({**feature.model_dump(), "cardinality": cardinality, "dtype": dtype})


def _narrowest(cardinality: int | None, to: ChunkType) -> str:
    if cardinality is None:
        return "float32"
    if to == "torch_tensor":
        return "int64"
    return next(name for name in ("int8", "int16", "int32", "int64") if cardinality - 1 <= np.iinfo(name).max)
