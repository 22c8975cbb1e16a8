"""What the loop survives: `kill -9` of the server, a worker, the updater and the database, while clients send events.

Clients send events, each until a 200 says that it is stored; an event whose answer was lost is sent again, with the
same id or, without one, the same time. Meanwhile a process is killed: at each step of a write, and at random moments.
At the end the journal is read: no event that got a 200 may be missing, and none may be there twice. After each kill of
an updater the run must name a whole version that answers.

    python benchmarks/stress/journal_kills.py [--only sqlite postgresql database updates] [--quick]

PostgreSQL is a cluster of its own in a temporary folder (initdb must be on the path); root starts it as user postgres.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import itertools
import json
import multiprocessing
import os
import pwd
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Found = dict[str, Any]

JOURNAL, WRITER = "recspec.loop.journal.Journal", "recspec.loop.writer.JournalWriter"
WRITES = {
    "before the transaction": f"{JOURNAL}.store",
    "known ids are to be read": f"{JOURNAL}._known",
    "events are to be inserted": f"{JOURNAL}._insert",
    "answers are to be inserted": f"{JOURNAL}._insert_exposures",
    "before the commit": f"{JOURNAL}._writing end",
    "after the commit": f"{JOURNAL}._writing after",
    "before the answer": f"{WRITER}._resolve",
}
"""Step of a write -> the function whose call kills the server; of a context manager, its end or what follows."""
UPDATES = {
    "the rows are written": "recspec.loop.updates.next_version",
    "the dataset has grown": "recspec.training.updating._make",
    "the bundle is to be put in place": "recspec.base.files.manifest.write",
    "the version is to be judged": "recspec.loop.updates.judge",
    "it is to answer": "recspec.bundle.versions.publish",
    "the journal is to know it": f"{JOURNAL}.advance",
}
PLANS: dict[str, dict[str, int]] = {
    "sqlite": {"each": 8, "at_random": 34, "rounds": 38},
    "postgresql": {"each": 3, "at_random": 5, "rounds": 10},
    "database": {"kills": 24},
    "updates": {"each": 2, "at_random": 30},
}
"""Kills at each step of a write, at random moments, of two workers and their server together, and of the database."""
QUICK = {name: dict.fromkeys(plan, 1) for name, plan in PLANS.items()}
STARTS, STALLS = 120.0, 120.0
"""Seconds until a server that does not start, or a client that gets no answer, is a failure."""
LOADED = ["recspec.cli.app", "recspec.serving.workers", "recspec.inference", "recspec.training", "recspec.loop"]

_copies = multiprocessing.get_context("forkserver")


# --- processes that are killed ----------------------------------------------------------------------------------------


def _become(argv: list[str], said: str, killer: str | None, after: int) -> None:
    """What a copy does: `recspec`, which dies at call number `after` of a function."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["recspec", *argv]
    if killer is not None:
        _plant(killer, after)
    from recspec.cli.app import main

    main()


def _plant(killer: str, after: int) -> None:
    """Kill this process at a call of a function."""
    target, _, where = killer.partition(" ")
    place, _, name = target.rpartition(".")
    try:
        owner: Any = importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, kind = place.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    real, calls = getattr(owner, name), itertools.count(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def call(*given: Any, **named: Any) -> Any:
        if next(calls) == after:
            die()
        return real(*given, **named)

    @contextmanager
    def block(*given: Any) -> Iterator[Any]:
        due = next(calls) == after
        with real(*given) as value:
            yield value
            if due and where == "end":
                die()
        if due:
            die()

    setattr(owner, name, block if where else call)


@dataclass
class Process:
    """A `recspec` process."""

    argv: Sequence[str]
    said: Path
    killer: str | None = None
    after: int = 1

    def __post_init__(self) -> None:
        given = ([*map(str, self.argv)], os.fspath(self.said), self.killer, self.after)
        self.process = _copies.Process(target=_become, args=given)
        self.process.start()

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None

    def kill(self) -> bool:
        """Kill it; whether it still ran."""
        ran = self.runs
        self.process.kill()
        self.process.join()
        return ran and self.process.exitcode == -signal.SIGKILL

    def text(self, stream: str) -> str:
        file = Path(f"{self.said}.{stream}")
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


class Server(Process):
    """A server, whose address is known once it answers."""

    numbers = itertools.count()

    @classmethod
    def of(
        cls, run: Path, url: str, scratch: Path, *, workers: int = 1, killer: str | None = None, after: int = 1
    ) -> Server:
        argv = [
            "serve",
            str(run),
            "--journal",
            url,
            "--http-port",
            "0",
            "--no-grpc",
            "--json",
            "--workers",
            str(workers),
        ]
        return cls([*argv, "--watch", "0", "--drift", "0"], scratch / f"server-{next(cls.numbers)}", killer, after)

    def wait(self) -> int | None:
        """The port, once it answers; None if it was killed before."""
        until = time.monotonic() + STARTS
        while time.monotonic() < until:
            with suppress(ValueError):
                return int(json.loads(self.text("out"))["http"].rpartition(":")[2])
            if not self.runs:
                assert self.process.exitcode == -signal.SIGKILL, self.text("err")
                return None
            time.sleep(0.005)
        raise TimeoutError(f"the server does not start: {self.text('err')[-2000:]}")


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                own = int(stat.parent.name)
                found += [own, *children(own)]
    return found


# --- clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Clients:
    """Threads that send events, each until it is stored, and ask for lists."""

    number: int = 6
    port: int | None = None
    acknowledged: dict[tuple[str, int, str], str] = field(default_factory=dict)
    """User, time in microseconds, and item of events that got a 200 -> `accepted` or `duplicate`."""
    retries: int = 0
    refused: list[str] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in range(self.number)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let each client end the event that it sends."""
        self._stop.set()
        for each in self._threads:
            each.join(STALLS)
        assert not any(each.is_alive() for each in self._threads), "a client gets no answer"

    def wait_for(self, more: int) -> None:
        """Wait until so many further events are stored."""
        wanted, until = len(self.acknowledged) + more, time.monotonic() + STALLS
        while len(self.acknowledged) < wanted:
            assert time.monotonic() < until, "no event is stored any more"
            time.sleep(0.002)

    def _run(self, number: int) -> None:
        draw, base = random.Random(number), (int(time.time()) - 3_600) * 1_000_000
        for count in itertools.count():
            if self._stop.is_set():
                return
            user, item = f"c{number}", f"i{draw.randrange(100):02d}"
            key = user, base + count * 1_000, item
            sent = {"user": user, "item": item, "type": "view", "time": key[1] / 1_000_000}
            if count % 2:  # the others are known by their content
                sent["id"] = f"{number}-{count}"
            for attempt in itertools.count():
                outcome = self._post("/events", sent)
                if outcome is not None:
                    with self._lock:
                        self.acknowledged[key] = outcome
                        self.retries += bool(attempt)
                    break
            if draw.random() < 0.2:
                self._post("/recommend", {"user": f"u{draw.randrange(200):03d}", "k": 5})

    def _post(self, path: str, body: Found) -> str | None:
        """What became of an event; None if nobody said that it is stored."""
        port = self.port
        if port is None:
            time.sleep(0.002)
            return None
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            data = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            time.sleep(0.005)
            return None
        finally:
            connection.close()
        if answer.status == 200:
            return "accepted" if data.get("accepted") else "duplicate"
        if answer.status not in (503, 504):
            self.refused.append(f"{answer.status} {data}")
        time.sleep(0.01)
        return None


def counted(url: str, clients: Clients) -> Found:
    """What the journal holds of what clients were told that it holds."""
    from recspec.loop import Journal, verify_journal

    with Journal(url, read_only=True) as journal:
        held = Counter[tuple[str, int, str]]()
        for block in journal.events():
            columns = (block.column(name).to_pylist() for name in ("subject", "occurred_at", "item"))
            held.update(zip(*columns, strict=True))
        checked = verify_journal(journal)
    return {
        "acknowledged": len(clients.acknowledged),
        "sent again": clients.retries,
        "stored already when sent again": sum(each == "duplicate" for each in clients.acknowledged.values()),
        "lost": len(clients.acknowledged.keys() - held.keys()),
        "doubled": sum(count - 1 for count in held.values()),
        "stored and not acknowledged": len(held.keys() - clients.acknowledged.keys()),
        "answers logged": checked.exposures,
        "refused": clients.refused[:5],
    }


# --- what is killed ---------------------------------------------------------------------------------------------------


def kill_servers(
    run: Path,
    url: str,
    scratch: Path,
    clients: Clients,
    draw: random.Random,
    *,
    steps: Sequence[str] = tuple(WRITES),
    each: int,
    at_random: int,
) -> Counter[str]:
    """Kill a server of one process, at each of `steps` of a write and at random moments."""
    kills = Counter[str]()
    plans = [(step, WRITES[step]) for step in steps for _ in range(each)] + [("at random", None)] * at_random
    for step, killer in plans:
        server = Server.of(run, url, scratch, killer=killer, after=draw.randint(2, 25))
        clients.port = server.wait()
        if killer is None:
            clients.wait_for(1)
            time.sleep(draw.uniform(0, 0.15))
            kills[step] += server.kill()
        else:
            server.process.join(STALLS)
            assert server.process.exitcode == -signal.SIGKILL, f"{step}: was never reached"
            kills[step] += 1
        clients.port = None
    return kills


def kill_workers(
    run: Path, url: str, scratch: Path, clients: Clients, draw: random.Random, *, rounds: int
) -> Counter[str]:
    """Kill both workers of a server one after the other, then the process that starts them."""
    kills = Counter[str]()
    for _ in range(rounds):
        server = Server.of(run, url, scratch, workers=2)
        clients.port = server.wait()
        for _ in range(2):
            clients.wait_for(1)
            time.sleep(draw.uniform(0, 0.1))
            workers = [pid for pid in worker_pids(server) if alive(pid)]
            with suppress(ProcessLookupError):
                os.kill(draw.choice(workers), signal.SIGKILL)
                kills["worker"] += 1
        clients.wait_for(1)
        kills["server of workers"] += server.kill()
        clients.port = None
    return kills


def worker_pids(server: Server) -> list[int]:
    """The workers of a server: processes of the fork server that hold the server's listening socket."""
    assert server.process.pid is not None
    own = _sockets(server.process.pid)
    others = (int(each.name) for each in Path("/proc").glob("[0-9]*"))
    return [pid for pid in others if pid != server.process.pid and own & _sockets(pid)]


def _sockets(pid: int) -> set[str]:
    """The listening sockets of a process."""
    listening = set[str]()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    found = set[str]()
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(str(each.readlink()))
    return found & listening


def alive(pid: int) -> bool:
    """Whether a process runs."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Cluster:
    """A PostgreSQL of its own, reached by a socket file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        folder.mkdir()
        if self.as_user:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync")
        self.start()
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.as_user, *command], check=True, capture_output=True, text=True, cwd="/")

    def start(self) -> float:
        """Start it, as often as processes of the last one still hold its memory; the seconds."""
        began = time.monotonic()
        while True:
            options = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c max_connections=60"
            try:
                log = str(self.folder / "log")
                self._run("pg_ctl", "-D", str(self.data), "-w", "-l", log, "-o", options, "start")
                return time.monotonic() - began
            except subprocess.CalledProcessError:
                assert time.monotonic() < began + STARTS, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        """The postmaster."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def kill(self, *, whole: bool) -> None:
        """Kill the postmaster, or with it every process of the cluster."""
        pid = self.pid
        others = children(pid) if whole else []
        for each in (pid, *others):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop")


def kill_database(cluster: Cluster, clients: Clients, draw: random.Random, *, kills: int) -> Counter[str]:
    """Kill the database under a server that goes on."""
    found = Counter[str]()
    for number in range(kills):
        clients.wait_for(5)
        time.sleep(draw.uniform(0, 0.1))
        cluster.kill(whole=number % 2 == 0)
        found["every process" if number % 2 == 0 else "postmaster"] += 1
        cluster.start()
    clients.wait_for(5)
    return found


def kill_updates(run: Path, scratch: Path, draw: random.Random, *, each: int, at_random: int) -> Found:
    """Kill updaters at each step and at random moments; the run must name a whole version each time."""
    from recspec.bundle import folder as bundle
    from recspec.bundle import versions
    from recspec.datasets import EVENTS
    from recspec.feature_spec import FeatureSpec
    from recspec.inference import Predictor
    from recspec.loop import Event, Journal

    url, kills, sent = f"sqlite:///{scratch / 'updates.db'}", Counter[str](), 0
    argv = ["update", str(run), "--journal", url, "--set", "keep=2"]

    def send(count: int) -> None:
        nonlocal sent
        now = time.time_ns() // 1_000
        with Journal(url) as journal:
            events = [
                Event(
                    f"e{sent + n}",
                    f"u{draw.randrange(200):03d}",
                    "view",
                    f"i{draw.randrange(100):02d}",
                    None,
                    now + n,
                    now + n,
                )
                for n in range(count)
            ]
            assert {*journal.store(events)} == {"accepted"}
        sent += count

    send(50)
    first = Process(argv, scratch / "update-0")
    began = time.monotonic()
    first.process.join(STALLS)
    seconds = time.monotonic() - began
    assert first.process.exitcode == 0, first.text("err")
    known = pa.parquet.read_table(run.parent / "data" / EVENTS).num_rows
    plans = [(step, killer) for step, killer in UPDATES.items() for _ in range(each)] + [
        ("at random", None)
    ] * at_random
    broken = list[str]()
    for number, (step, killer) in enumerate(plans, 1):
        send(20)
        process = Process(argv, scratch / f"update-{number}", killer)
        if killer is None:
            time.sleep(draw.uniform(0, seconds))
            kills[step] += process.kill()
        else:
            process.process.join(STALLS)
            assert process.process.exitcode == -signal.SIGKILL, f"{step}: {process.text('err')}"
            kills[step] += 1
        try:
            answers = Predictor.open(bundle.find(run), device="cpu", verify=True)
            assert answers.recommend(["u000"], k=1)[0].known
            assert versions.state(run).version == versions.number_of(bundle.find(run))
        except Exception as error:  # what is counted
            broken.append(f"{step}: {error}")
    send(20)
    last = Process([*argv, "--set", "gate=0"], scratch / "update-last")
    last.process.join(STALLS)
    assert last.process.exitcode == 0, last.text("err")
    home = bundle.find(run).parent
    held = pa.parquet.read_table(home / "data" / EVENTS).num_rows
    return {
        "kills": dict(kills),
        "seconds of an update": round(seconds, 2),
        "not whole": broken,
        "events sent": sent,
        "learned in the end": held - known,
        "trained to": FeatureSpec.load(home / "data").trained_to,
        "left over": [str(each.relative_to(run)) for each in run.rglob("*.tmp")],
    }


# --- all of it --------------------------------------------------------------------------------------------------------


def made_run(folder: Path) -> Path:
    """A run of EASE on 5,000 made-up events of 200 users and 100 items."""
    from recspec import api

    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user_id": [f"u{u:03d}" for u in rng.integers(0, 200, 5_000)],
            "item_id": [f"i{i:02d}" for i in rng.integers(0, 100, 5_000)],
            "timestamp": 1_600_000_000 + np.arange(5_000) * 60,
        }
    )
    api.prepare(
        table, user="user_id", item="item_id", timestamp="timestamp", split="none", out=folder / "data", progress=False
    )
    api.train("ease", folder / "data", folder / "run", settings={"settings.l2": 50.0}, progress=False)
    return folder / "run"


def servers(
    run: Path, url: str, scratch: Path, draw: random.Random, *, each: int, at_random: int, rounds: int
) -> Found:
    """Kill servers and workers on a journal."""
    with Clients() as clients:
        kills = kill_servers(run, url, scratch, clients, draw, each=each, at_random=at_random)
        kills += kill_workers(run, url, scratch, clients, draw, rounds=rounds)
        last = Server.of(run, url, scratch)
        clients.port = last.wait()
        clients.wait_for(20)
        clients.__exit__()
        last.kill()
    return {"kills": dict(kills), **counted(url, clients)}


def database(run: Path, cluster: Cluster, scratch: Path, draw: random.Random, *, kills: int) -> Found:
    """Kill PostgreSQL under a server and two workers."""
    with Clients() as clients:
        server = Server.of(run, cluster.url, scratch)
        clients.port = server.wait()
        found = kill_database(cluster, clients, draw, kills=kills)
        clients.__exit__()
        server.kill()
    return {"kills": dict(found), **counted(cluster.url, clients)}


def main() -> None:
    """All of it, and the report."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _side_by_side import where_and_when, write

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ("sqlite", "postgresql", "database", "updates")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--quick", action="store_true", help="a few kills of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "journal_kills.json")
    asked = parser.parse_args()
    _copies.set_forkserver_preload(LOADED)
    known = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    plans = QUICK if asked.quick else PLANS
    for name in asked.only:
        draw, began = random.Random(asked.seed), time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            scratch = Path(folder)
            scratch.chmod(0o755)  # PostgreSQL runs as another user
            run = made_run(scratch)
            if name == "updates":
                found = kill_updates(run, scratch, draw, **plans[name])
            elif name == "sqlite":
                found = servers(run, f"sqlite:///{scratch / 'journal.db'}", scratch, draw, **plans[name])
            else:
                with closing(Cluster(scratch / "postgresql")) as cluster:
                    if name == "database":
                        found = database(run, cluster, scratch, draw, **plans[name])
                    else:
                        found = servers(run, cluster.url, scratch, draw, **plans[name])
        known[name] = {**found, "seed": asked.seed, "seconds": round(time.monotonic() - began, 1), **where_and_when()}
        print(json.dumps({name: known[name]}, indent=1))
        write(known, asked.out)
    if any(each.get("lost") or each.get("doubled") or each.get("not whole") for each in known.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
