"""The item index, filters over the columns of a catalogue, and the retrievers of a pipeline."""

from recspec.retrieval import index_file, merging
from recspec.retrieval.filter_columns import check_work
from recspec.retrieval.filters import Filter
from recspec.retrieval.highest import highest
from recspec.retrieval.index import IndexSettings, ItemIndex
from recspec.retrieval.pipeline import Asked, Candidates, Pipeline, may_bring, rank
from recspec.retrieval.pipeline_ranker import PipelineRanker
from recspec.retrieval.raw_catalogue import RawCatalogue
from recspec.retrieval.retrievers import can_retrieve, has_vectors, item_vectors, request_vectors

__all__ = [
    "Asked", "Candidates", "Filter", "IndexSettings", "ItemIndex", "Pipeline", "PipelineRanker", "RawCatalogue",
    "can_retrieve", "check_work", "has_vectors", "highest", "index_file", "item_vectors", "may_bring", "merging",
    "rank", "request_vectors",
]  # fmt: skip
