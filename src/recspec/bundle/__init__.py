"""A trained model's folder, and checkpoints."""

from recspec.bundle import checkpoint, folder, pipeline_card
from recspec.bundle.blend import MOST_MEMBERS, Blend, BlendSettings, Form, Member, as_part, blend_of
from recspec.bundle.checkpoint import Checkpoint
from recspec.bundle.folder import Bundle, Card, Seen, find_export
from recspec.bundle.pipeline_card import PipelineCard, RetrieverCard

__all__ = [
    "MOST_MEMBERS", "Blend", "BlendSettings", "Bundle", "Card", "Checkpoint", "Form", "Member", "PipelineCard",
    "RetrieverCard",
    "Seen", "as_part", "blend_of", "checkpoint", "find_export", "folder", "pipeline_card",
]  # fmt: skip
