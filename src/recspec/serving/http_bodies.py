"""HTTP bodies: those of requests, read within limits, unpacked and parsed; those of answers, in JSON.

A body never takes more memory than the limit, compressed or not, whatever its headers claim.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from recspec.base.errors import RecspecError, RequestError, listed, quoted
from recspec.serving.settings import Limits

JSON = "application/json"
BINARY = "application/octet-stream"
ZEROS = bytes.maketrans(b"123456789", b"000000000")
LONG = b"0" * 19
"""Digits, all written as 0, of a whole number that may have more than 64 bits."""
LARGE = 1 << 20
"""A body of this many bytes or more is parsed in a thread, so that other requests are answered meanwhile."""
PACKED: Mapping[str, int] = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Supported content encodings -> zlib's window bits."""

T = TypeVar("T")


class BodyReader:
    """Reads the bodies of requests; `held` is the number of their bytes in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.held = limits, 0
        self._answering = 0
        self._parsing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as being answered until the block ends; 503 if there are too many."""
        most, wait = self.limits.max_requests, self.limits.retry_seconds
        if self._answering >= most:
            message = f"{most} requests are being answered; try again in {wait} s"
            raise RequestError(message, status=503, retry_after=wait)
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    async def parsed(self, parse: Callable[[], T], size: int) -> T:
        """A parsed body of `size` bytes. It takes up to 20 times the memory, so large ones are parsed one at a time."""
        if size < LARGE:
            return parse()
        async with self._parsing:
            return await asyncio.to_thread(parse)

    @contextmanager
    def holding(self, size: int, *, may_refuse: bool = True) -> Iterator[None]:
        """Count further bytes as held until the block ends; 503 if there is no room, here or for later requests."""
        try:
            self._hold(size, size if may_refuse else math.inf)
            yield
        finally:
            self._release(size)

    @asynccontextmanager
    async def reading(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Wait in turn for room for `size` bytes, else 503; the yielded function corrects that to the actual size."""
        if self._waiting or not self._fits(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                async with asyncio.timeout(self.limits.timeout):
                    await turn
            except (TimeoutError, asyncio.CancelledError) as error:
                if turn.done() and not turn.cancelled():  # its turn came at the same moment
                    self._release(size)
                if isinstance(error, TimeoutError):
                    raise self._no_room() from None
                raise
        else:
            self.held += size

        def shrink(to: int) -> None:
            nonlocal size
            self._release(size - to)
            size = to

        try:
            yield shrink
        finally:
            self._release(size)

    def _fits(self, size: int) -> bool:
        return not self.held or self.held + size <= self.limits.max_held_bytes

    def _release(self, size: int) -> None:
        self.held -= size
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            size, turn = self._waiting.popleft()
            if not turn.done():  # it was not given up meanwhile
                self.held += size
                turn.set_result(None)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The unpacked body, which counts as held until the request is answered.

        Raises:
            RequestError: 413 (too large), 415 (unsupported content type or encoding), 408 (too slow), 503 (no room).
        """
        headers = dict(reversed(request.scope["headers"]))  # the first of each name
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind and kind not in (JSON, BINARY) and not kind.endswith("+json"):
            raise RequestError(f"content-type {kind[:60]!r} is not read; send {JSON}", status=415)
        coding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if coding not in (*PACKED, "identity"):
            message = f"content-encoding {coding[:40]!r} is not read; known: {listed(PACKED)} or none"
            raise RequestError(message, status=415)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > self.limits.max_body_bytes):
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.timeout):
                more = True
                while more:
                    came = await request.receive()
                    if came["type"] == "http.disconnect":
                        raise RequestError("the client went away before the body was whole")
                    part, more = came.get("body", b""), came.get("more_body", False)
                    size += len(part)
                    self._hold(len(part), size)
                    if size > self.limits.max_body_bytes:
                        raise self._too_large()
                    parts.append(part)
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if coding in PACKED:
                body = self._unpacked(body, coding)
                size += len(body)
                self._hold(len(body), size)
            yield body
        except TimeoutError:
            raise RequestError(f"the body did not come within {self.limits.timeout:g} s", status=408) from None
        finally:
            self._release(size)

    def _hold(self, more: int, own: float) -> None:
        """Count `more` bytes of a request that now holds `own`. A single request always finds room."""
        self.held += more
        if self.held > self.limits.max_held_bytes and self.held > own:
            raise self._no_room()

    def _no_room(self) -> RequestError:
        message = "the bodies of other requests fill the memory set aside for them; try again"
        return RequestError(message, status=503, retry_after=self.limits.retry_seconds)

    def _unpacked(self, body: bytes, coding: str) -> bytes:
        unpacker = zlib.decompressobj(PACKED[coding])
        try:
            plain = unpacker.decompress(body, self.limits.max_body_bytes + 1)
        except zlib.error as error:
            raise RequestError(f"the body is not {coding}: {error}") from None
        if len(plain) > self.limits.max_body_bytes:
            raise self._too_large()
        if not unpacker.eof or unpacker.unused_data:
            raise RequestError(f"the body is not one whole {coding} stream")
        return plain

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than the {self.limits.max_body_bytes} bytes taken", status=413)


def parse_object(text: bytes | memoryview, what: str = "the body") -> dict[str, Any]:
    """A JSON object."""
    try:
        data = orjson.loads(text)
        if LONG in bytes(text).translate(ZEROS):  # orjson makes floats of whole numbers beyond 64 bits
            data = json.loads(bytes(text), parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"{what} is {quoted(data)}; expected a JSON object")
    return data


def _whole(digits: str) -> int | str:
    """A whole number of 64 bits; a larger one as its digits, by which encoders find it."""
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits


def json_response(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response in JSON; numpy arrays become lists."""
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, status, headers, media_type=JSON)


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
