"""A bundle, raw rows in, answers out."""

from recspec.inference import requests
from recspec.inference.answer_files import predict_file, predict_split, read_users, recommend_to_parquet
from recspec.inference.catalogue import ROLES
from recspec.inference.directory import Directory
from recspec.inference.pipeline_building import Built, build_pipeline
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import Recommendation
from recspec.inference.request_rows import Row, known_columns, table_of
from recspec.inference.wanted import Wanted

__all__ = [
    "ROLES", "Built", "Directory", "Predictor", "Recommendation", "Row", "Wanted", "build_pipeline", "known_columns",
    "predict_file", "predict_split", "read_users", "recommend_to_parquet", "requests", "table_of",
]  # fmt: skip
