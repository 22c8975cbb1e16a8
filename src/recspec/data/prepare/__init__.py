"""Building blocks of every dataset, as Ibis expressions."""

from recspec.data.prepare import clicks, interactions, prepared, splits
from recspec.data.prepare.backend import (
    Backend,
    Part,
    PartFiles,
    Share,
    count_rows,
    count_where,
    fetch,
    figure,
    figures,
    gather,
)
from recspec.data.prepare.catalogues import Before, Catalogue, Decay
from recspec.data.prepare.columns import Column, Kind
from recspec.data.prepare.declared import (
    PER_SECOND,
    DeclaredColumn,
    Invalid,
    check_time_format,
    columns_schema,
    declared_columns,
    load_columns,
)
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.prepare.histories import (
    EARLIER,
    HELDOUT_USERS,
    WINDOW,
    HistorySettings,
    Prefixes,
    TimeSplitSettings,
    UnknownTargets,
    check_window,
)
from recspec.data.prepare.interactions import Source
from recspec.data.prepare.names import (
    AS_IN_FILE,
    DESCRIBES,
    EVENT_WEIGHT,
    FILE_SPLIT,
    GROUP,
    IS_TARGET,
    ITEM,
    LABEL,
    ROW,
    SEEN,
    SERIES,
    SPLIT,
    SPLIT_BEFORE,
    SPLIT_WORDS,
    SPLITS,
    TARGET,
    TIMESTAMP,
    USER,
    WEIGHT,
    ColumnRole,
    Notes,
    column_of,
    columns_of,
)
from recspec.data.prepare.negatives import Distribution
from recspec.data.prepare.odd_ids import HOW, alike
from recspec.data.prepare.outcome import (
    days_without_clock,
    doubtful_times,
    label_outcomes,
    named_like,
    returns,
    stand_ins,
    unused_columns,
    unused_splits,
    unused_types,
)
from recspec.data.prepare.prepared import (
    ENGINES,
    PrepareContext,
    Prepared,
    Progress,
    Remark,
    fingerprint,
    limit_bytes,
    silent,
)
from recspec.data.prepare.raw_files import find_raw_files, named_files, nearest_file, splits_by_name, stage
from recspec.data.prepare.raw_rows import (
    LABELS,
    LARGEST,
    RawLayout,
    RawRows,
    Reading,
    RowsBy,
    Weighting,
    is_missing_marker,
    likely_positive,
    number_of,
)
from recspec.data.prepare.raw_table import CODE_NAME, Roles, typed
from recspec.data.prepare.scatter import Scatter, shuffled
from recspec.data.prepare.splits import CUTS, leave_one_out, with_splits
from recspec.data.prepare.tables import (
    SECONDS,
    Cleaned,
    Repeats,
    at_least,
    blocks,
    blocks_of_part,
    clean,
    counts_by,
    first_left_out,
    is_dated,
    keep_earliest,
    left_join,
    time_range,
)
from recspec.data.prepare.text_files import (
    PROBLEMS_SHOWN,
    ROW_BYTES,
    ColumnType,
    JsonFile,
    TextFile,
    lines_of,
    read_header,
)
from recspec.data.prepare.text_layout import check_encoding
from recspec.data.prepare.times import looks_like_time, note_doubtful_time, note_untimed
