"""Exported models: ONNX, AOTInductor, Triton repositories."""

from recspec.export.exported_model import (
    Arrays,
    EagerModel,
    ExportedModel,
    as_model_batch,
    open_exported_model,
    read_description,
)
from recspec.export.exporter import ExportSettings, export
from recspec.export.triton_repository import TYPES, columns_of, histories_beside, raw_columns
