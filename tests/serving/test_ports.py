"""No port is chosen in one step and lost in the next."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from recspec.base.errors import SettingsError
from recspec.serving.access import TRIES, bind_grpc, listen, shared_port, without_ipv6


class Grpc:
    """Listens as gRPC does, after a neighbour has taken the first ports that it is given."""

    def __init__(self, *, lost: int) -> None:
        self.asked: list[str] = []
        self._lost, self._open = lost, list[socket.socket]()

    def add(self, address: str) -> int:
        """Listen there."""
        self.asked.append(address)
        host, _, port = address.rpartition(":")
        if len(self.asked) <= self._lost:
            self._open.append(socket.create_server((host, int(port))))  # the neighbour
        try:
            own = socket.create_server((host, int(port)))
        except OSError:
            raise RuntimeError("no address added") from None
        self._open.append(own)
        return int(port)

    def close(self) -> None:
        """Let all ports go."""
        for each in self._open:
            each.close()


@pytest.fixture
def grpc(request: pytest.FixtureRequest) -> Iterator[Grpc]:
    made = Grpc(lost=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("grpc", [3], indirect=True)
def test_a_free_port_that_a_neighbour_takes_first_is_replaced(host: str, grpc: Grpc) -> None:
    port = bind_grpc(grpc.add, host, 0, is_shared=False)
    assert grpc.asked[-1] == f"{host}:{port}"
    assert len(set(grpc.asked)) == 4


@pytest.mark.parametrize(("grpc", "port"), [(TRIES, 0)], indirect=["grpc"])
def test_the_tries_for_a_free_port_are_bounded(grpc: Grpc, port: int) -> None:
    with pytest.raises(SettingsError, match=r"^gRPC: can't listen at 127.0.0.1:0; take another --grpc-port$"):
        bind_grpc(grpc.add, "127.0.0.1", port, is_shared=False)
    assert len(grpc.asked) == TRIES


@pytest.mark.parametrize("grpc", [1], indirect=True)
def test_a_named_port_that_a_neighbour_takes_first_is_told(grpc: Grpc) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with pytest.raises(SettingsError, match=f"^gRPC: can't listen at 127.0.0.1:{port}"):
        bind_grpc(grpc.add, "127.0.0.1", port, is_shared=False)


@pytest.mark.parametrize("grpc", [0], indirect=True)
def test_grpc_is_given_the_one_address_of_a_name_where_http_listens(grpc: Grpc) -> None:
    port = bind_grpc(grpc.add, "localhost", 0, is_shared=False)
    assert grpc.asked == [f"127.0.0.1:{port}"]


def test_a_system_without_ipv6_has_no_port_of_it_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refuse)
    with without_ipv6("0.0.0.0", 1):
        pass
    with pytest.raises(OSError, match="of the block"), without_ipv6("0.0.0.0", 1):
        raise OSError("of the block")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_shared_port_is_for_the_own_workers_alone(host: str) -> None:
    with shared_port(host, 0) as port:
        with pytest.raises(SettingsError, match=f"can't listen at {host}:{port}: Address already in use"):
            listen(host, port, "gRPC")
        with pytest.raises(SettingsError, match=f"can't listen at {host}:{port}"), shared_port(host, port):
            pass
        for _ in range(2):  # while the port is held, and again by a worker that was started anew
            with socket.socket() as worker:
                worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                worker.bind((host, port))
                worker.listen()
