"""Columns on disk: readers and writers of every chunk type."""

from recspec.data.storage import check, tfrecord
from recspec.data.storage.check import check_sidecar_files, companion_problems
from recspec.data.storage.chunk_file import BLOCK_ROWS
from recspec.data.storage.label_columns import LABEL_AUC, label_columns, sample_rows, telling
from recspec.data.storage.ragged import Array, Column, Columns, Ragged, offsets_of, ragged_range, scalar
from recspec.data.storage.seen_file import (
    DISLIKES_FILE,
    SEEN_FILE,
    SEEN_SPLITS,
    UNTIL,
    read_seen,
    read_seen_pairs,
    write_seen_file,
)
from recspec.data.storage.splits import SplitReader, SplitWriter, open_split, write_dataset
from recspec.data.storage.tfrecord import masked_crc
from recspec.data.storage.transcode import (
    PREPARE_FILE,
    Distribution,
    copy_companions,
    feature_to_write,
    preparation,
    synthesize,
    transcode,
)
