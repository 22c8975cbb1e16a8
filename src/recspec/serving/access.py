"""Access to a server: its addresses and ports, its token, host names and certificate.

gRPC can't take a socket that is bound already: it binds its own.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from recspec.base.errors import RequestError, SettingsError

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of the machine itself."""
LINK_SECONDS = 12 * 3600
"""Time for which a signed address admits."""
WILDCARDS = ("0.0.0.0", "::")
"""Addresses that stand for every address of the machine."""

BACKLOG = 2048
"""Most connections that wait to be accepted."""
TRIES = 20
"""Most ports that gRPC tries if any port will do."""

HOST_BYTES = 1024
"""Longest header `Host` that is read; names have at most 253 characters."""

_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Access:
    """The conditions on a request's token and host name."""

    token: str | None = None
    """None means that no token is needed."""
    hosts: tuple[str, ...] = LOCAL
    """Accepted host names: exact names, `*.example.com` for all below a domain, or `*` for any."""
    any_address: bool = False
    """Whether every IP address is accepted as a host name; DNS can't redirect an address."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)
    """Signs addresses; known to this process alone."""

    @classmethod
    def of(cls, address: str, token: str | None = None, more: Sequence[str] = ()) -> Access:
        """Access to a server that listens at an address; `more` are its further names."""
        named = () if address in WILDCARDS else (address,)
        return cls(token, tuple(_plain(name) for name in (*LOCAL, *named, *more)), address in WILDCARDS)

    def signed(self, path: str) -> str:
        """An address that admits to a path without the token, for what a browser opens as a page of its own."""
        if self.token is None:
            return path
        until = str(int(time.time()) + LINK_SECONDS)
        return f"{path}?{urlencode({'until': until, 'key': self._signature(path, until)})}"

    def admits(self, path: str, query: bytes) -> bool:
        """Whether a query holds the signature of its path, and the time is not over."""
        try:
            given = dict(parse_qsl(query.decode("ascii"), max_num_fields=10))
        except ValueError:  # not ASCII, or too many
            return False
        until, key = given.get("until", ""), given.get("key", "")
        if not (until.isascii() and until.isdigit() and len(until) < 15 and key.isascii()):
            return False
        return hmac.compare_digest(key, self._signature(path, until)) and time.time() < int(until)

    def _signature(self, path: str, until: str) -> str:
        return hmac.new(self.key, f"{path}\n{until}".encode("utf-8", "replace"), "sha256").hexdigest()

    def refuse_host(self, headers: Headers, http_version: str) -> None:
        """Refuse a request under another host name, such as a page's own name that DNS points here."""
        given = [value for name, value in headers if name == b"host"]
        if not given and http_version == "1.0":  # has no such header; browsers always send it
            return
        host = _host_of(given[0]) if len(given) == 1 and len(given[0]) <= HOST_BYTES else None
        if host is None:
            shown = ", ".join(repr(value[:80].decode("latin-1")) for value in given[:3]) or "none"
            raise RequestError(f"expected one header 'Host' with a name or address; found {shown}")
        accepted = host in self.hosts or "*" in self.hosts or (self.any_address and _address(host) is not None)
        if not accepted and not any(each.startswith("*.") and host.endswith(each[1:]) for each in self.hosts):
            shown = host[:80]
            message = f"host '{shown}' is not answered; start the server with --allowed-host {shown}"
            raise RequestError(message, status=403)

    def knows(self, authorization: str | bytes) -> bool:
        """Whether a header `Authorization` holds the token; the comparison takes constant time."""
        if self.token is None:
            return True
        given = authorization.encode("utf-8", "replace") if isinstance(authorization, str) else authorization
        scheme, _, token = given.strip().partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.token.encode())


def refuse_other_origins(headers: Headers) -> None:
    """Refuse requests from pages of other origins, because any page that a user opens may post to localhost."""
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not origins:
        return
    host = dict(headers).get(b"host", b"").decode("latin-1").lower()
    if any(_place(origin) != host for origin in origins if origin):
        raise RequestError("requests from pages of other origins are not answered", status=403)


def is_public(address: str) -> bool:
    """Whether other machines can reach an address."""
    found = _address(_plain(address))
    return not found.is_loopback if found is not None else _plain(address) != "localhost"


def check_hosts(names: Sequence[str]) -> None:
    """Refuse names for `--allowed-host` that no client can send."""
    plain = {name: name.removeprefix("*.") for name in names if name != "*"}
    sent = {name: f"[{host}]" if ":" in host else host for name, host in plain.items()}
    wrong = [name for name, host in sent.items() if not _HOST.fullmatch(host.encode())]
    if wrong:
        shown = ", ".join(repr(name) for name in wrong)
        raise SettingsError(f"--allowed-host: found {shown}; expected a name or address without a port, as example.com")


def check_certificate(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """The PEM files of a TLS certificate with its chain and of its key, checked; None if neither is given."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise SettingsError(f"--tls-{'key' if cert is None else 'cert'}: expected --tls-cert and --tls-key together")
    try:
        for file in (cert, key):
            file.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        expected = "expected a certificate and its own key, in PEM, without a password"
        raise SettingsError(f"--tls-cert {cert}, --tls-key {key}: {why}; {expected}") from None
    return cert, key


@lru_cache(maxsize=256)
def _host_of(header: bytes) -> str | None:
    """The name or address in a header `Host`, as `_plain` writes it; None if it is neither.

    Clients send the same one with every request; reading it takes 7 us.
    """
    found = _HOST.fullmatch(header.strip())
    return None if found is None else _plain((found[1] or found[2]).decode())


def _plain(host: str) -> str:
    """A name in the form for comparison: lower case, shortest form of an address, no brackets, no last dot."""
    host = host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
    found = _address(host)
    return host if found is None else str(found)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


# --- addresses to listen at ------------------------------------------------------------------------------------------


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
