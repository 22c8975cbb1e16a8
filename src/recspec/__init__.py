"""recspec: raw interaction and click logs to trained, measured and served recommenders."""

__version__ = "0.1.0"
