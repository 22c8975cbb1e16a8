"""What a prepared dataset holds."""

from recspec.report import dataset_summary

__all__ = ["dataset_summary"]
