"""The addresses at which a server listens. gRPC can't take a socket that is bound already: it binds its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

from recspec.base.errors import SettingsError

BACKLOG = 2048
"""Most connections that wait to be accepted."""
TRIES = 20
"""Most ports that gRPC tries if any port will do."""


def listen(host: str, port: int, protocol: str = "HTTP") -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # :: means every address of both families, as in gRPC
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
    except OSError as error:
        option = f"--{protocol.lower()}-port"
        why = str(error.strerror or error).partition(" (while attempting")[0]
        raise SettingsError(f"{protocol}: can't listen at {host}:{port}: {why}; take another {option}") from None


def bind_grpc(add: Callable[[str], int], host: str, port: int, *, is_shared: bool) -> int:
    """Let gRPC's `add` listen at a port, and return it.

    If any port will do, one that another program takes first is replaced.
    """
    written = f"[{host}]" if ":" in host else socket.gethostbyname(host)  # gRPC takes every address of a name
    for _ in range(TRIES if port == 0 else 1):
        chosen = port
        if not is_shared:  # for a taken port, gRPC itself would write to the log before it fails
            with listen(host, port, "gRPC") as free:
                chosen = free.getsockname()[1]
        with without_ipv6(host, chosen), contextlib.suppress(RuntimeError):
            return add(f"{written}:{chosen}")
    raise SettingsError(f"gRPC: can't listen at {written}:{port}; take another --grpc-port")


@contextlib.contextmanager
def without_ipv6(host: str, port: int) -> Iterator[None]:
    """Keep gRPC at IPv4 if the host is 0.0.0.0, which it takes for every address of both families.

    It takes IPv4's alone while IPv6's port is taken.
    """
    with contextlib.ExitStack() as held:
        if host == "0.0.0.0":
            with contextlib.suppress(OSError):  # no IPv6, or its port is taken already
                other = held.enter_context(socket.socket(socket.AF_INET6))
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                other.bind(("::", port))
        yield


@contextlib.contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """A port at which this user's processes may listen for gRPC, while no other server can take it."""
    with contextlib.ExitStack() as held:
        with listen(host, port, "gRPC") as alone:
            port = alone.getsockname()[1]
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound = held.enter_context(socket.socket(alone.family))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind((host, port))  # before the first one closes; it never listens, and so is given no connection
        held.enter_context(without_ipv6(host, port))
        yield port
