"""HTTP responses in JSON."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

from recspec.errors import RecspecError, RequestError


def json_response(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response in JSON; numpy arrays become lists."""
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, status, dict(headers or {}), media_type="application/json")


def error_response(error: RecspecError) -> Response:
    """The response `{"error": message}` to a refused request, with its status."""
    status, headers = 400, {}
    if isinstance(error, RequestError):
        status = error.status
        if error.retry_after is not None:
            headers["retry-after"] = str(error.retry_after)
        if status == 401:
            headers["www-authenticate"] = "Bearer"
    return json_response({"error": str(error).encode("utf-8", "replace").decode()}, status, headers)
