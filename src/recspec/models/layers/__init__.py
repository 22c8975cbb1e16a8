"""Blocks that two or more models use."""

from recspec.models.layers import kernels
from recspec.models.layers.attention import Blocks, BlockSizes, GatedBlock, TransformerBlock, buckets_of
from recspec.models.layers.batch import (
    Batch,
    concatenate,
    drawn_of,
    log_expected_of,
    num_rows,
    repeat_rows,
    take,
    tile_rows,
    to_device,
)
from recspec.models.layers.blocks import drop
from recspec.models.layers.embeddings import (
    Embeddings,
    RowsHeld,
    embedding_widths,
    ids_and_numbers,
    number_widths,
    rows_or_nan,
    side_by_side,
)
from recspec.models.layers.event_networks import (
    AfterFirst,
    AttentionUnit,
    Gru,
    NextEvent,
    attention_to_items,
    floats_at_once,
    floats_in_cache,
    last_states_of_items,
    weighted_sums,
)
from recspec.models.layers.events import Events, Histories, events_of
from recspec.models.layers.gathered_rows import sparse_rows
from recspec.models.layers.hand_written import Dots, may_replace
from recspec.models.layers.history_search import (
    Column,
    History,
    PaddedHistory,
    StoredHistory,
    TableHistory,
    TargetQueries,
    latest_best,
    products_of_rows,
)
from recspec.models.layers.kernels import segments, sum_rows
from recspec.models.layers.losses import CalibrationMap, at_least_fp32, cross_entropy, sampled_softmax, softmax_loss
from recspec.models.layers.mlp import (
    ActivatedMlp,
    Activation,
    BatchNorm,
    Mlp,
    RowStatistics,
    aligned_linear,
    exact_in_answers,
    follow_together,
    runs_on_gpu,
    start_glorot,
    uncompiled,
)
