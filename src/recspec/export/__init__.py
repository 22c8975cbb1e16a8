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

__all__ = [
    "TYPES", "Arrays", "EagerModel", "ExportSettings", "ExportedModel", "as_model_batch", "columns_of", "export",
    "histories_beside", "open_exported_model", "raw_columns", "read_description",
]  # fmt: skip
