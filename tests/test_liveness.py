"""Who died is known to all, at once, by name; who only waits is left alone; an error is told once a machine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from recspec import liveness
from recspec.errors import Interrupted, RecspecError, SettingsError
from recspec.liveness import Member, RankLost, Watch

PATIENCE = 600.0  # seconds until a test fails; what is waited for takes none


@contextmanager
def watches(
    count: int, hosts: Sequence[str] = ("here", "here", "here"), *, victim: int | None = None
) -> Iterator[list[Watch]]:
    """Ranks that watch each other, all in this process; the victim dies at once, as a process that is killed would."""
    members = [Member(rank, hosts[rank], 1000 + rank) for rank in range(count)]
    offered = liveness.offer(one_host=True)
    others = {
        rank: liveness.reach("127.0.0.1", offered.port, offered.token, rank) for rank in reversed(range(1, count))
    }
    connections = [liveness.admit(offered, range(1, count)), *({0: others[rank]} for rank in range(1, count))]
    with ExitStack() as stack:
        met = []
        for rank in range(count):
            if rank == victim:
                for connection in connections[rank].values():
                    connection.close()
            else:
                met.append(Watch(members, rank, connections[rank]))
                stack.callback(met[-1].close)
        yield met


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_others_hear_who_died(victim: int) -> None:
    with watches(3, victim=victim) as met:
        assert [watch.rank for watch in met] == [rank for rank in range(3) if rank != victim]
        for watch in met:
            lost = watch.lost(PATIENCE)
            assert lost is not None
            assert lost.rank == victim
            assert str(lost) == (
                f"rank {victim} (process {1000 + victim} on here) is gone: it was killed, it crashed, or its "
                "machine is down; start the command again"
            )


def test_a_message_says_what_to_do_at_that_moment() -> None:
    with watches(2, victim=1) as (first,):
        assert first.lost(PATIENCE) is not None
        with first.advising(lambda: "go on from step 7"):
            assert str(first.lost()).endswith("; go on from step 7")
        assert str(first.lost()).endswith("; start the command again")


def test_who_leaves_is_not_lost() -> None:
    with watches(3) as (first, second, third):
        second.close()
        first.close()
        assert first.lost() is None
        third.fail(SettingsError("the first one is gone, and nobody answers"))
        assert third.lost() is None


def test_an_error_of_all_ranks_is_told_by_one_on_each_machine() -> None:
    with watches(3, ("here", "here", "there")) as met:
        assert [watch.fail(SettingsError("no such setting")) for watch in met] == [True, False, True]


def test_an_error_is_told_once_though_the_first_rank_has_ended() -> None:
    with watches(3) as (first, second, third):
        assert first.fail(SettingsError("no such setting"))
        first.close()
        assert not second.fail(SettingsError("no such setting"))
        assert third.fail(SettingsError("another one"))


@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_of_a_rank_that_fails_end_too_and_leave_the_telling_to_it(failing: int) -> None:
    with watches(3, ("here", "here", "there")) as met:
        assert met[failing].fail(ValueError("no number"))
        told = []
        for rank, watch in enumerate(met):
            if rank != failing:
                lost = watch.lost(PATIENCE)
                assert str(lost).startswith(f"rank {failing} (process {1000 + failing} on here) ended: ValueError: no")
                assert lost is not None
                told.append(watch.fail(lost))
        assert told == [False, True], "on the other machine nobody has told it"


def test_a_death_is_told_once_a_machine() -> None:
    with watches(3, victim=2) as (first, second):
        assert first.lost(PATIENCE) is not None
        tellers = [watch.fail(lost) for watch in (second, first) if (lost := watch.lost(PATIENCE)) is not None]
        assert sorted(tellers) == [False, True]


def test_a_run_that_was_asked_to_stop_loses_nobody() -> None:
    with watches(2) as (first, second):
        assert second.fail(Interrupted("stopped at step 5 as asked"))
        second.close()
        assert not first.fail(Interrupted("stopped at step 5 as asked"))
        assert first.lost() is None


def test_who_does_not_end_by_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "GRACE", 0.0)
    ended: list[RecspecError] = []
    has_ended = threading.Event()

    def end(error: RecspecError) -> None:
        ended.append(error)
        has_ended.set()

    here, there = socket.socketpair()
    watch = Watch([Member(0, "here", 1), Member(1, "here", 2)], 0, {1: here}, end)
    there.close()
    assert has_ended.wait(PATIENCE)
    assert isinstance(ended[0], RankLost)
    watch.close()
    assert len(ended) == 1


def test_strangers_are_not_let_in() -> None:
    offered = liveness.offer(one_host=True)
    strangers = []
    for said in ({"token": "guessed", "rank": 1}, {"rank": 1}, [1], {"token": offered.token, "rank": 7}):
        stranger = socket.create_connection(("127.0.0.1", offered.port))
        stranger.sendall(json.dumps(said).encode() + b"\n")
        strangers.append(stranger)
    member = liveness.reach("127.0.0.1", offered.port, offered.token, 1)
    found = liveness.admit(offered, [1])
    assert list(found) == [1]
    assert found[1].getpeername() == member.getsockname()
    assert found[1].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for connection in (*strangers, member, *found.values()):
        connection.close()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CONNECTING", 0.0)
    with pytest.raises(OSError, match=r"ranks \[1, 2\] did not reach port"):
        liveness.admit(liveness.offer(one_host=True), [1, 2])
