"""The item index, and filters over the columns of a catalogue."""

from recspec.retrieval import index_file
from recspec.retrieval.filters import Filter
from recspec.retrieval.index import IndexSettings, ItemIndex
from recspec.retrieval.raw_catalogue import RawCatalogue

__all__ = ["Filter", "IndexSettings", "ItemIndex", "RawCatalogue", "index_file"]
