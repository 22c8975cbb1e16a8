"""The catalogue of users with their histories, written as blocks of users come."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

USERS_PER_GROUP = 16_384  # in a row group


class UserFile:
    """Writes the catalogue of users in row groups of equal size, so that blocks do not show in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._waiting: pa.Table | None = None

    def write(self, table: pa.Table) -> None:
        self._waiting = table if self._waiting is None else pa.concat_tables([self._waiting, table])
        self._flush(USERS_PER_GROUP)

    def close(self) -> None:
        self._flush(1)
        if self._writer is not None:
            self._writer.close()

    def _flush(self, least: int) -> None:
        """Write row groups while at least `least` users wait."""
        while self._waiting is not None and self._waiting.num_rows >= least:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, self._waiting.schema)
            self._writer.write_table(self._waiting.slice(0, USERS_PER_GROUP).combine_chunks())
            self._waiting = self._waiting.slice(USERS_PER_GROUP)
