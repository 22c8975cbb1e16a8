"""A bundle, raw rows in, answers out."""

from recspec.inference import merging, requests
from recspec.inference.answer_files import (
    ReadLive,
    marks_of,
    predict_file,
    predict_split,
    predict_tables,
    read_rows,
    read_users,
    recommend_to_file,
    recommended,
    row_writer,
    separator_of,
)
from recspec.inference.batch_jobs import Counts, How, predict_shards, recommend_shards
from recspec.inference.batch_shards import SHARD_SIZE
from recspec.inference.catalogue import ROLES
from recspec.inference.catalogue_updates import CatalogueUpdate, update_catalogue
from recspec.inference.exact_search import highest
from recspec.inference.filters import Filter
from recspec.inference.index import IndexSettings, ItemIndex
from recspec.inference.item_changes import ItemChanges, place_of
from recspec.inference.live_events import LiveEvents
from recspec.inference.lookup import MOST_SHOWN, Directory, ItemFields, catalogue_columns, explain, history_of
from recspec.inference.pipeline import Candidates, Pipeline, PipelineRanker, has_vectors, item_vectors
from recspec.inference.pipeline_building import Built, build_pipeline
from recspec.inference.predictor import ROWS, Predictor, note_of_scores
from recspec.inference.raw_columns import RawCatalogue, facts_of_encoder
from recspec.inference.recommendation import (
    LARGEST_K,
    MOST_BOOSTS,
    MOST_CONTEXT,
    MOST_EXCLUDED,
    MOST_ITEMS,
    Recommendation,
    RecommendedItem,
    RecommendRequest,
    note_of_unknown_users,
)
from recspec.inference.request_features import Row, known_columns, table_of
