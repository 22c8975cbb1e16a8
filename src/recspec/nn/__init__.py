"""Blocks that two or more models use."""

from recspec.nn import kernels
from recspec.nn.all_items import (
    AfterFirst,
    attention_to_items,
    floats_at_once,
    floats_in_cache,
    last_states_of_items,
    weighted_sums,
)
from recspec.nn.at_once import at_once
from recspec.nn.attention import Blocks, GatedBlock, TransformerBlock, buckets_of
from recspec.nn.calibration_map import CalibrationMap
from recspec.nn.dropout import drop
from recspec.nn.embeddings import (
    Embeddings,
    RowsHeld,
    embedding_widths,
    ids_and_numbers,
    number_widths,
    rows_or_nan,
    side_by_side,
)
from recspec.nn.event_networks import AttentionUnit, NextEvent
from recspec.nn.events import Events, events_of
from recspec.nn.hand_written import may_replace
from recspec.nn.histories import Histories
from recspec.nn.history_search import History, PaddedHistory, StoredHistory, TableHistory, TargetQueries, latest_best
from recspec.nn.interactions import CrossNetwork, dot_interaction, linear_of_parts
from recspec.nn.kernels import segments, sum_rows
from recspec.nn.losses import at_least_fp32, cross_entropy, sampled_softmax, softmax_loss
from recspec.nn.meta import without_memory
from recspec.nn.mlp import (
    ActivatedMlp,
    Activation,
    Dice,
    Mlp,
    aligned_linear,
    exact_in_answers,
    follow_together,
    runs_on_gpu,
    start_glorot,
)
from recspec.nn.recurrent import Gru
from recspec.nn.sparse_rows import sparse_rows
from recspec.nn.stored_rows import Column
from recspec.nn.uncompiled import uncompiled

__all__ = [
    "ActivatedMlp", "Activation", "AfterFirst", "AttentionUnit", "Blocks", "CalibrationMap", "Column", "CrossNetwork",
    "Dice", "Embeddings", "Events", "GatedBlock", "Gru", "Histories", "History", "Mlp", "NextEvent", "PaddedHistory",
    "RowsHeld", "StoredHistory", "TableHistory", "TargetQueries", "TransformerBlock", "aligned_linear",
    "at_least_fp32", "at_once", "attention_to_items", "buckets_of", "cross_entropy", "dot_interaction", "drop",
    "embedding_widths", "events_of", "exact_in_answers", "floats_at_once", "floats_in_cache", "follow_together",
    "ids_and_numbers", "kernels", "last_states_of_items", "latest_best", "linear_of_parts", "may_replace",
    "number_widths", "rows_or_nan", "runs_on_gpu", "sampled_softmax", "segments", "side_by_side", "softmax_loss",
    "sparse_rows", "start_glorot", "sum_rows", "uncompiled", "weighted_sums", "without_memory",
]  # fmt: skip
