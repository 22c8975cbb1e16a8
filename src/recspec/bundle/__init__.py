"""A trained model's folder, and checkpoints."""

from recspec.bundle import checkpoint, folder
from recspec.bundle.checkpoint import Checkpoint
from recspec.bundle.folder import Bundle, Card, Seen, find_export

__all__ = ["Bundle", "Card", "Checkpoint", "Seen", "checkpoint", "find_export", "folder"]
