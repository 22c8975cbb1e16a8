"""Parquet files whose columns are stored as codes of a dictionary."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def open_parquet(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file; a dictionary has codes of 32 bits, whatever type the writer stored beside the file.

    Arrow refuses a file by the stored type if its dictionaries outgrew that type, as those of a merged file do.

    Raises:
        pa.ArrowException, OSError: if it is no Parquet file.
    """
    metadata = metadata or pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    names = [name for name, kind in zip(schema.names, schema.types, strict=True) if "dictionary<" in str(kind)]
    leaves = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    coded = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"
             and any(f"{leaf.path}.".startswith(f"{name}.") for name in names)]  # fmt: skip
    return pq.ParquetFile(path, metadata=metadata, read_dictionary=coded)
