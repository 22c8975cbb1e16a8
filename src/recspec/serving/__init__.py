"""The server: the Open Inference Protocol and JSON routes over HTTP and gRPC."""

from recspec.serving.batching import Limits
from recspec.serving.model_folders import sources_of
from recspec.serving.opened_model import RepositorySettings
from recspec.serving.running import BackgroundServer, serve
from recspec.serving.server import Addresses, ServerOptions, ServeSettings

__all__ = [
    "Addresses", "BackgroundServer", "Limits", "RepositorySettings", "ServeSettings", "ServerOptions", "serve",
    "sources_of",
]  # fmt: skip
