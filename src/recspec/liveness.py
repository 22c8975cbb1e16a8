"""Whether the other processes of a run are still there: noticed at once, and at no cost to a step.

Every rank keeps one TCP connection to the first rank, which tells the others what it hears. The operating system closes
the connections of a process that dies, however it dies; a machine that dies no longer answers the probes of ours, which
takes `PROBES` to notice. So no rank has to say that it lives, and one that computes, waits for a disk or stands in a
debugger is never taken for dead: its operating system answers for it. Between a first and a last word, nothing is sent.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from recspec.errors import Interrupted, RecspecError, TrainingError

PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine is dead after 5 s of silence and 3 probes in vain, 5 s apart."""

CONNECTING = 20.0
"""Seconds in which all ranks reach the first one, or nobody is watched."""

GRACE = 15.0
"""Seconds that a rank has to end by itself once another is lost; it may be writing a checkpoint that is whole then."""

HELLO = 32 + 8
"""Bytes of a first word: the token, and the rank."""

STRANGERS = 1000
"""Connections that may be open at once while the ranks meet."""

ANSWERING = 5.0
"""Seconds that a rank waits for the first one to say whether to tell an error."""


@dataclass(frozen=True)
class Member:
    """A rank's process, as messages name it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class RankLost(TrainingError):
    """Another rank died, or ended with an error of its own."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


# --- meeting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """Where the first rank takes connections until all are there; it lets in who knows the token."""

    listener: socket.socket
    token: str

    @property
    def port(self) -> int:
        """The port that the system chose."""
        return int(self.listener.getsockname()[1])


def offer(*, one_host: bool) -> Offer:
    """Listen for the other ranks, on this machine alone where all of them run here."""
    if one_host:
        return Offer(socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16))
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    return Offer(listener, secrets.token_hex(16))


def admit(offered: Offer, ranks: Sequence[int]) -> dict[int, socket.socket]:
    """A connection from each of these ranks.

    Raises:
        OSError: if one of them does not come within `CONNECTING`.
    """
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + CONNECTING
    with offered.listener as listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        try:
            while missing := set(ranks) - set(found):
                left = until - time.monotonic()
                if left <= 0:
                    raise OSError(f"ranks {sorted(missing)} did not reach port {offered.port}")
                for key, _ in selector.select(left):
                    if key.data is None:
                        _listen_to(listener, selector)
                    elif _has_said_all(key):
                        selector.unregister(key.fileobj)
                        connection, rank = cast(socket.socket, key.fileobj), _introduced(bytes(key.data), offered.token)
                        if rank in missing and rank not in found:
                            connection.setblocking(True)
                            found[rank] = _kept_alive(connection)
                        else:
                            connection.close()
        except OSError:
            for connection in found.values():
                connection.close()
            raise
        finally:
            for key in [key for key in selector.get_map().values() if key.data is not None]:
                cast(socket.socket, key.fileobj).close()
    return found


def _listen_to(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    """Take a connection in, beside those of whom nothing is known yet."""
    with suppress(OSError):
        connection, _ = listener.accept()
        if len(selector.get_map()) > STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())


def _has_said_all(key: selectors.SelectorKey) -> bool:
    """Read on; whether who is there has said who they are, or has gone."""
    try:
        said = cast(socket.socket, key.fileobj).recv(HELLO - len(key.data))
    except BlockingIOError:
        return False
    except OSError:
        said = b""
    key.data.extend(said)
    return not said or len(key.data) == HELLO


def reach(address: str, port: int, token: str, rank: int) -> socket.socket:
    """A connection to the first rank.

    Raises:
        OSError: if there is none to be had.
    """
    connection = _kept_alive(socket.create_connection((address, port), timeout=CONNECTING))
    connection.sendall(_hello(token, rank))
    connection.settimeout(None)
    return connection


def _hello(token: str, rank: int) -> bytes:
    """What a rank says first: always as many bytes, so that nothing of a stranger's is read beyond them."""
    return f"{token}{rank:8d}".encode()


def _introduced(said: bytes, token: str) -> int:
    """The rank that a connection says it is of; -1 for a stranger."""
    if len(said) != HELLO or not secrets.compare_digest(said[: len(token)], token.encode()):
        return -1
    number = said[len(token) :].strip()
    return int(number) if number.isdigit() else -1


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said).encode() + b"\n"


# --- watching --------------------------------------------------------------------------------------------------------


class Watch:
    """What one rank knows of the others. A thread listens, asleep until something is said or a connection ends.

    Args:
        members: all ranks, this one among them.
        rank: this one.
        connections: to every other rank on the first one, to the first rank on the others.
        end: ends this process with an error, called by the thread where a rank is lost and this process has not ended
            by itself in `GRACE`: it may wait in a call that does not come back.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        connections: Mapping[int, socket.socket],
        end: Callable[[RecspecError], None] | None = None,
    ) -> None:
        self.members, self.rank, self._end = members, rank, end
        self._connections = dict(connections)
        self._changed = threading.Condition()
        self._lost: tuple[int, str | None] | None = None
        self._lost_at = 0.0
        self._left: set[int] = set()
        self._told: set[tuple[str, str]] = set()
        self._answer: bool | None = None
        self._advice: Callable[[], str] = lambda: "start the command again"
        self._heard = dict.fromkeys(connections, b"")
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="liveness", daemon=True)
        self._thread.start()

    @contextmanager
    def advising(self, advice: Callable[[], str]) -> Iterator[None]:
        """In this block a message says this of what to do after a rank was lost."""
        before, self._advice = self._advice, advice
        try:
            yield
        finally:
            self._advice = before

    def lost(self, patience: float = 0.0) -> RankLost | None:
        """What is to be said if a rank was lost, or is within `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, patience)
            return self._message() if self._lost is not None else None

    def fail(self, error: BaseException) -> bool:
        """Say that this rank ends with an error; whether it is the one of its machine that tells it."""
        text = str(error) if isinstance(error, RecspecError) else f"{type(error).__name__}: {error}"
        about = f"lost {error.rank}" if isinstance(error, RankLost) else text
        said = {"failed": text, "about": about, "as asked": isinstance(error, Interrupted)}
        self._left.add(self.rank)
        if self.rank == 0:
            return self._failed(0, said)
        with self._changed:
            self._say(0, said)
            self._changed.wait_for(lambda: self._answer is not None or 0 not in self._connections, ANSWERING)
            here = self.members[self.rank].host
            return self._answer if self._answer is not None else (here, about) not in self._told

    def close(self) -> None:
        """Leave: the others are told that this rank ends well, unless it has said otherwise."""
        if self.rank not in self._left:
            for other in list(self._connections):
                self._say(other, {"bye": True})
        with suppress(OSError):
            self._wake.send(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    # --- the thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            ending = self._end
            while True:
                left = None if self._lost is None or ending is None else self._lost_at + GRACE - time.monotonic()
                if left is not None and left <= 0 and ending is not None:
                    ending(self._message())
                    ending = None
                    continue
                for key, _ in selector.select(left):
                    if key.data is None:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, rank: int) -> bool:
        """Take in what a rank says; False once its connection has ended."""
        try:
            data = self._connections[rank].recv(65536)
        except OSError:  # reset, or no answer to the probes
            data = b""
        if not data:
            with self._changed:
                self._connections.pop(rank).close()
                self._changed.notify_all()
            if rank not in self._left:
                self._note(rank, None)
            return False
        *lines, self._heard[rank] = (self._heard[rank] + data).split(b"\n")
        for line in lines:
            self._take(rank, json.loads(line))
        return True

    def _take(self, rank: int, said: Mapping[str, object]) -> None:
        if "bye" in said:
            self._left.add(rank)
        elif "failed" in said:
            self._left.add(rank)
            self._say(rank, {"tell": self._failed(rank, said)})
        elif "tell" in said:
            with self._changed:
                self._answer = bool(said["tell"])
                self._changed.notify_all()
        elif "told" in said:
            self._told.add((self.members[self.rank].host, str(said["told"])))
        elif "lost" in said:
            lost, error = cast(int, said["lost"]), said["error"]
            self._left.add(lost)
            self._note(lost, None if error is None else str(error))

    def _failed(self, rank: int, said: Mapping[str, object]) -> bool:
        """On the first rank: one ends with an error, and the others hear of it; whether it tells it on its machine."""
        host, abouts = self.members[rank].host, (str(said["about"]), f"lost {rank}")
        with self._changed:
            tells = (host, abouts[0]) not in self._told
            self._told |= {(host, about) for about in abouts}
        for other in list(self._connections):
            if other != rank and self.members[other].host == host:
                for about in abouts:
                    self._say(other, {"told": about})
        if not said["as asked"]:
            self._note(rank, str(said["failed"]))
        return tells

    def _note(self, rank: int, error: str | None) -> None:
        """A rank is lost, and on the first one the others hear of it; what is lost later follows from that."""
        with self._changed:
            if self._lost is not None:
                return
            if rank != self.rank:
                self._lost, self._lost_at = (rank, error), time.monotonic()
            self._changed.notify_all()
        if self.rank == 0:
            for other in list(self._connections):
                if other != rank:
                    self._say(other, {"lost": rank, "error": error})

    def _say(self, rank: int, said: Mapping[str, object]) -> None:
        with self._changed, suppress(OSError, KeyError):
            self._connections[rank].sendall(_line(said))

    def _message(self) -> RankLost:
        assert self._lost is not None
        rank, error = self._lost
        how = "is gone: it was killed, it crashed, or its machine is down" if error is None else f"ended: {error}"
        return RankLost(f"{self.members[rank]} {how}; {self._advice()}", rank)


def this_member(rank: int) -> Member:
    """This process."""
    return Member(rank, socket.gethostname(), os.getpid())
