"""Columns on disk: readers and writers of every chunk type."""

from recspec.storage import check, tfrecord
from recspec.storage.check import companion_problems, companions
from recspec.storage.chunk_file import BLOCK_ROWS
from recspec.storage.crc32c import masked_crc
from recspec.storage.formats import feature_to_write
from recspec.storage.label_columns import LABEL_AUC, label_columns, sample_rows, telling
from recspec.storage.ragged import Array, Column, Columns, Ragged, concatenate_column, offsets_of, ragged_range
from recspec.storage.random_data import Distribution, synthesize
from recspec.storage.reader import SplitReader, open_split
from recspec.storage.seen_file import SEEN_FILE, SEEN_SPLITS, read_seen, read_seen_pairs, write_seen_file
from recspec.storage.transcode import PREPARE_FILE, copy_companions, transcode
from recspec.storage.writer import SplitWriter

__all__ = [
    "BLOCK_ROWS", "LABEL_AUC", "PREPARE_FILE", "SEEN_FILE", "SEEN_SPLITS", "Array", "Column", "Columns", "Distribution",
    "Ragged", "SplitReader", "SplitWriter", "check", "companion_problems", "companions", "concatenate_column",
    "copy_companions", "feature_to_write", "label_columns", "masked_crc", "offsets_of", "open_split", "ragged_range",
    "read_seen", "read_seen_pairs", "sample_rows", "synthesize", "telling", "tfrecord", "transcode", "write_seen_file",
]  # fmt: skip
