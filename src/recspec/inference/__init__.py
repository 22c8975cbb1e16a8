"""A bundle, raw rows in, answers out."""

from recspec.inference import requests
from recspec.inference.answer_files import (
    predict_file,
    predict_split,
    predict_tables,
    read_users,
    recommend_to_parquet,
    recommended,
)
from recspec.inference.catalogue import ROLES
from recspec.inference.column_facts import ColumnFacts, facts_of_encoder
from recspec.inference.directory import Directory
from recspec.inference.item_fields import MOST_SHOWN, ItemFields
from recspec.inference.pipeline_building import Built, build_pipeline
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import Recommendation, RecommendedItem, SimilarItems
from recspec.inference.request_rows import Row, known_columns, table_of
from recspec.inference.row_files import ROWS, read_rows, row_writer
from recspec.inference.users_items import explain, history_of
from recspec.inference.wanted import LARGEST_K, MOST_BOOSTS, MOST_CONTEXT, MOST_EXCLUDED, MOST_ITEMS, Wanted

__all__ = [
    "LARGEST_K", "MOST_BOOSTS", "MOST_CONTEXT", "MOST_EXCLUDED", "MOST_ITEMS", "MOST_SHOWN", "ROLES", "ROWS", "Built",
    "ColumnFacts", "Directory", "ItemFields", "Predictor", "Recommendation", "RecommendedItem", "Row", "SimilarItems",
    "Wanted", "build_pipeline", "explain", "facts_of_encoder", "history_of", "known_columns", "predict_file",
    "predict_split", "predict_tables", "read_rows", "read_users", "recommend_to_parquet", "recommended", "requests",
    "row_writer", "table_of",
]  # fmt: skip
