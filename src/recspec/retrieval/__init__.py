"""The item index, filters over a catalogue, and what a request retrieves by them."""

from recspec.retrieval import index_file
from recspec.retrieval.index import IndexSettings, ItemIndex

__all__ = ["IndexSettings", "ItemIndex", "index_file"]
