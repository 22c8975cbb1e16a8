"""The server: the Open Inference Protocol and JSON routes over HTTP and gRPC."""

from recspec.serving.background import BackgroundServer
from recspec.serving.batching import Limits
from recspec.serving.foreground import serve
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.server import Addresses, ServeSettings
from recspec.serving.sources import sources_of

__all__ = [
    "Addresses", "BackgroundServer", "Limits", "RepositorySettings", "ServeSettings", "serve", "sources_of",
]  # fmt: skip
