"""A trained model's folder, and checkpoints."""

from recspec.bundle import checkpoint, delta, folder, pipeline_card, run_record, versions
from recspec.bundle.blend import MOST_MEMBERS, Blend, BlendSettings, Form, Member, as_part, blend_of
from recspec.bundle.checkpoint import Checkpoint
from recspec.bundle.folder import Bundle, Card, Seen, find_export
from recspec.bundle.pipeline_card import PipelineCard, RetrieverCard
from recspec.bundle.run_record import DataRecord, RunRecord
from recspec.bundle.same_data import data_digest, meaning_digest

__all__ = [
    "MOST_MEMBERS", "Blend", "BlendSettings", "Bundle", "Card", "Checkpoint", "DataRecord", "Form", "Member",
    "PipelineCard", "RetrieverCard", "RunRecord", "Seen", "as_part", "blend_of", "checkpoint", "data_digest", "delta",
    "find_export", "folder", "meaning_digest", "pipeline_card", "run_record", "versions",
]  # fmt: skip
