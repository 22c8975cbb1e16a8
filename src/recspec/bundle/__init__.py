"""A trained model's folder, and checkpoints."""

from recspec.bundle import cards, checkpoint, folder, run_record, versions
from recspec.bundle.cards import MOST_MEMBERS, Blend, Form, Member, PipelineCard, RetrieverCard, as_part, blend_of
from recspec.bundle.checkpoint import Checkpoint
from recspec.bundle.folder import Bundle, Card, Seen, find_export
from recspec.bundle.run_record import DataRecord, RunRecord, data_digest, meaning_digest
from recspec.bundle.tree_ranker import TreeRanker
