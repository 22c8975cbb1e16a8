"""Building blocks of every dataset, as Ibis expressions."""

from recspec.prepare import clicks, interactions, prepared, splits
from recspec.prepare.backend import Backend
from recspec.prepare.columns import Catalogue, Column, Kind
from recspec.prepare.context import ENGINES, PrepareContext, Progress, Remark, limit_bytes
from recspec.prepare.histories import HistorySettings, Prefixes, TimeSplitSettings, UnknownTargets
from recspec.prepare.interaction_columns import Source
from recspec.prepare.names import GROUP, ITEM, LABEL, ROW, SERIES, SPLIT, SPLITS, TIMESTAMP, USER
from recspec.prepare.negatives import Distribution
from recspec.prepare.notes import Notes
from recspec.prepare.prepared import Prepared
from recspec.prepare.raw_files import RawLayout, RawType, Reading, check_encoding, find_raw_files
from recspec.prepare.raw_table import Roles, read_raw_files
from recspec.prepare.scatter import Scatter, shuffled
from recspec.prepare.splits import by_share, by_time, leave_one_out
from recspec.prepare.tables import (
    Repeats,
    at_least,
    blocks,
    clean,
    count_rows,
    counts_by,
    fetch,
    first_left_out,
    keep_earliest,
    left_join,
)
from recspec.prepare.text_files import PROBLEMS_SHOWN, ROW_BYTES, ColumnType, JsonFile, TextFile, lines_of, read_header
from recspec.prepare.times import check_time_format, note_doubtful_time, note_untimed

__all__ = [
    "ENGINES", "GROUP", "ITEM", "LABEL", "PROBLEMS_SHOWN", "ROW", "ROW_BYTES", "SERIES", "SPLIT", "SPLITS",
    "TIMESTAMP", "USER", "Backend", "Catalogue", "Column", "ColumnType", "Distribution", "HistorySettings",
    "JsonFile", "Kind", "Notes", "Prefixes", "PrepareContext", "Prepared", "Progress", "RawLayout", "RawType",
    "Reading", "Remark", "Repeats", "Roles", "Scatter", "Source", "TextFile", "TimeSplitSettings", "UnknownTargets",
    "at_least", "blocks", "by_share", "by_time", "check_encoding", "check_time_format", "clean", "clicks",
    "count_rows", "counts_by", "fetch", "find_raw_files", "first_left_out", "interactions", "keep_earliest",
    "leave_one_out", "left_join", "limit_bytes", "lines_of", "note_doubtful_time", "note_untimed", "prepared",
    "read_header", "read_raw_files", "shuffled", "splits",
]  # fmt: skip
