"""The server: the Open Inference Protocol and JSON routes over HTTP and gRPC."""

from recspec.serving.model_folders import sources_of
from recspec.serving.running import BackgroundServer, serve
from recspec.serving.server import Addresses, ServerOptions
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings

__all__ = [
    "Addresses", "BackgroundServer", "Limits", "RepositorySettings", "ServeSettings", "ServerOptions", "serve",
    "sources_of",
]  # fmt: skip
