"""The server: the Open Inference Protocol and JSON routes over HTTP and gRPC."""

from recspec.serving.model_folders import sources_of
from recspec.serving.running import BackgroundServer, serve
from recspec.serving.server import Addresses, ServerOptions
from recspec.serving.settings import Limits, RepositorySettings, ServeSettings
from recspec.serving.showing import Showing
