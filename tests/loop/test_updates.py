"""New versions of a run from a journal: what is read, the gate, roll-back, freezing, and who may update."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from recspec import api
from recspec.base.errors import DataError, RecspecError, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.cli import app as cli
from recspec.data.encoding import Encoders
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, build_pipeline
from recspec.loop import Exposure, Journal, JournalSettings, Updater, read_events, updates
from recspec.loop import journal as tables
from recspec.loop.gate import Judgement
from recspec.loop.upkeep import consumers_of
from recspec.training import Learning
from tests.made_up_events import NEW_ITEM, NEW_USER, prepared, shop_events, written
from tests.processes import Running

SECOND = 1_000_000
LATER = 1_700_000_000 * SECOND


def sent(journal: Journal, rows: Sequence[Mapping[str, object]], received_at: int = LATER) -> None:
    """Events in a journal, all accepted."""
    found = read_events(rows, received_at)
    assert not found.refused
    assert {*journal.store(found.events)} == {"accepted"}


def as_events(table: pa.Table, kind: str = "view") -> list[dict[str, object]]:
    """Rows of `shop_events` as a shop sends them."""
    return [
        {"user": row["user_id"], "item": row["item_id"], "type": kind, "time": row["timestamp"], "kind": row["kind"]}
        for row in table.to_pylist()
    ]


def shop(folder: Path, **settings: object) -> Path:
    """A run of EASE on the shop's known events, all of them for training."""
    asked = {"split": "none", "num_negatives": 0, **settings}
    data = prepared(folder / "shop", shop_events()[0], **asked).folder
    api.train("ease", data, folder / "run", progress=False)
    return folder / "run"


@pytest.fixture
def journal(url: str) -> Journal:
    with Journal(url) as opened:
        yield opened


def updater(run: Path, journal: Journal, **settings: object) -> Updater:
    return Updater(run, journal, JournalSettings(**settings), learning=Learning(build_pipeline=build_pipeline))


def ids(run: Path, name: str) -> list[object]:
    found: list[object] = Encoders.load(bundle.find(run)).vocabularies[name].values.to_pylist()
    return found


def recorded(journal: Journal) -> dict[int, str]:
    own = tables.version.c
    return {each.id: each.state for each in journal.rows(sa.select(own.id, own.state).order_by(own.id))}


def test_events_of_a_journal_become_a_version_that_has_passed_the_gate(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1]))
    made = updater(run, journal).once()
    assert (made.state, made.version, made.trained_to) == ("new version", 1, 72)
    assert made.judgement is not None
    assert made.judgement.metric == "ndcg@10"
    assert made.judgement.users > 5
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert {NEW_ITEM} <= {*ids(run, "item_id")}
    assert {NEW_USER} <= {*ids(run, "user_id")}
    spec = FeatureSpec.load(bundle.find(run))
    assert (spec.trained_to, spec.metadata["journal"]) == (72, journal.digest_of("")[:16])
    assert recorded(journal) == {0: "replaced", 1: "current"}
    assert consumers_of(journal) == {f"update {run.resolve()}": 72}
    again = updater(run, journal, gate=0).once()
    assert (again.version, again.trained_to) == (2, 90), "what judged a version is learned by the next"
    last = updater(run, journal).once()
    assert (last.state, last.version, last.why) == ("waiting", 2, "0 new rows")


def test_a_split_that_keeps_new_events_from_training_is_told(journal: Journal, tmp_path: Path) -> None:
    sent(journal, as_events(shop_events()[1]))
    held = updater(shop(tmp_path / "held", split="time"), journal, gate=0).once()
    told = "split=time of the dataset keeps events for valid and test, which train nothing; prepare it with split=none"
    assert [each for each in held.notes if each.startswith(told)]
    assert not [each for each in updater(shop(tmp_path / "all"), journal, gate=0).once().notes if "split" in each]


def forced(monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    monkeypatch.setattr(updates, "judge", lambda *_: Judgement(passed, "as the test says"))


def test_a_version_that_fails_does_not_answer_and_two_freeze_the_run(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1]))
    forced(monkeypatch, passed=False)
    first = updater(run, journal).once()
    assert (first.state, first.version, first.why) == ("failed", 0, "as the test says")
    assert first.updated is None
    second = updater(run, journal).once()
    assert second.why == "as the test says; 2 new versions in a row failed: --unfreeze lets new versions be made"
    assert bundle.find(run) == run / "bundle"
    assert recorded(journal) == {0: "current", 1: "failed", 2: "failed"}
    third = updater(run, journal).once()
    assert (third.state, third.version) == ("frozen", 0)
    with pytest.raises(DataError, match="run: 2 new versions in a row failed; --unfreeze lets new versions be made"):
        api.update(run, journal=journal.url.render_as_string(hide_password=False), progress=False)
    assert str(api.update(run, unfreeze=True)) == "Update: update 0 (as trained) answers; new versions are made again"
    forced(monkeypatch, passed=True)
    assert updater(run, journal).once().version == 3
    assert recorded(journal) == {0: "replaced", 1: "failed", 2: "failed", 3: "current"}
    own = tables.version.c
    (row,) = journal.rows(sa.select(own.parent, own.trained_to, own.gate).where(own.id == 3))
    assert (row.parent, row.trained_to, json.loads(row.gate)["why"]) == (0, 72, "as the test says")


def test_a_roll_back_takes_the_version_before_and_learns_its_events_again(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    events = as_events(shop_events()[1])
    sent(journal, events[:40])
    updater(run, journal, gate=0).once()
    sent(journal, events[40:])
    updater(run, journal, gate=0).once()
    told = str(api.update(run, roll_back=True))
    assert told == "Update: update 1 answers; update 2 was rolled back: no new version is made until --unfreeze"
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert updater(run, journal).once().state == "frozen"
    assert recorded(journal) == {0: "replaced", 1: "current", 2: "rolled back"}
    api.update(run, unfreeze=True)
    made = updater(run, journal, gate=0).once()
    assert (made.version, made.trained_to) == (3, 90)
    assert made.updated is not None
    assert made.updated.counts["events"] == 50
    assert not (run / "updates" / "0002").exists()


def test_a_roll_back_while_a_version_is_made_wins(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shop(tmp_path)
    events = as_events(shop_events()[1])
    sent(journal, events[:40])
    updater(run, journal, gate=0).once()
    sent(journal, events[40:])

    def judge(*_: object) -> Judgement:
        versions.roll_back(run)
        return Judgement(True, "as the test says")

    monkeypatch.setattr(updates, "judge", judge)
    made = updater(run, journal).once()
    assert (made.state, made.version, made.why) == ("frozen", 0, "update 1 was rolled back")
    assert made.updated is None
    assert bundle.find(run) == run / "bundle"


def test_few_events_wait_until_they_are_old(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1].slice(0, 5)))
    asked = updater(run, journal, min_events=6, max_age="1h", gate=0)
    waits = replace(asked, clock=lambda: LATER + 3_599 * SECOND).once()
    assert (waits.state, waits.why, waits.trained_to) == ("waiting", "5 new rows", 0)
    assert not (run / "updates" / "current.json").exists()
    assert replace(asked, clock=lambda: LATER + 3_600 * SECOND).once().state == "new version"


def test_events_that_bring_nothing_new_are_waited_out(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    known = shop_events()[0].slice(0, 5)
    sent(journal, as_events(known))
    with pytest.raises(DataError, match="holds no new event"):
        updater(run, journal, gate=0).once()
    assert bundle.find(run) == run / "bundle"
    sent(journal, [{**each, "id": f"{number}"} for number, each in enumerate(as_events(shop_events()[1].slice(0, 5)))])
    assert updater(run, journal, gate=0).once().trained_to == 10


def test_a_dataset_takes_events_of_one_journal_and_of_dated_ones(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1].slice(0, 45)))
    updater(run, journal, gate=0).once()
    with Journal(f"sqlite:///{tmp_path / 'other.db'}") as other:
        told = r"data: holds events of another journal than .*other\.db; name that one"
        with pytest.raises(DataError, match=told):
            updater(run, other).once()
    table = shop_events()[0]
    days = pa.array(np.arange(table.num_rows))
    undated = prepared(tmp_path / "days", table.set_column(2, "timestamp", days), split="none", num_negatives=0)
    api.train("popularity", undated.folder, tmp_path / "undated", progress=False)
    with pytest.raises(DataError, match="its times, in column 'timestamp', are no dates"):
        updater(tmp_path / "undated", journal).once()


def test_a_file_of_events_can_come_between(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    events = shop_events()[1]
    sent(journal, as_events(events.slice(0, 30)))
    updater(run, journal, gate=0).once()
    file = written(tmp_path / "more.csv", events.slice(30, 30))
    api.update(run, file, progress=False)
    assert FeatureSpec.load(bundle.find(run)).trained_to == 30
    with pytest.raises(DataError, match="holds the events of this file already"):
        api.update(run, file, progress=False)
    sent(journal, as_events(events.slice(60)))
    made = updater(run, journal, gate=0).once()
    assert (made.version, made.trained_to) == (3, 60)
    record = json.loads((run / "updates" / "0003" / "data" / "prepare.json").read_text())
    assert [each["name"] for each in record["inputs"]] == ["rows.csv", "more.csv"]


def test_a_blend_is_updated_and_judged_as_one(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path, split="leave_one_out", num_negatives=5)
    data = tmp_path / "shop" / "data"
    api.train("popularity", data, tmp_path / "popularity", progress=False)
    api.blend(tmp_path / "blend", [run, tmp_path / "popularity"], data, progress=False)
    sent(journal, as_events(shop_events()[1]))
    made = updater(tmp_path / "blend", journal).once()
    assert made.state == "new version"
    assert made.judgement is not None
    assert made.judgement.users > 5
    assert FeatureSpec.load(bundle.find(tmp_path / "blend")).trained_to == 72


# --- labelled rows ----------------------------------------------------------------------------------------------------


def test_an_answer_of_a_clock_that_was_ahead_keeps_none_waiting() -> None:
    blocks = [pa.record_batch({"served_at": times}) for times in ([5, 900, 6], [7, 20, 8])]
    found = updates.answers_before(iter(blocks), 20, 100)
    assert [each.column("served_at").to_pylist() for each in found] == [[5, 900, 6], [7]]


def test_answers_become_labelled_rows_once_their_windows_are_closed(journal: Journal, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    known = {
        "user_id": [f"u{u}" for u in rng.integers(0, 20, 600)],
        "item_id": [f"i{i}" for i in rng.integers(0, 9, 600)],
        "timestamp": 1_600_000_000 + np.arange(600),
    }
    known["clicked"] = [int(item in ("i1", "i2") or rng.random() < 0.1) for item in known["item_id"]]
    named = {"label": "clicked", "split": "none", "item_features": [], "num_negatives": 100}
    data = prepared(tmp_path / "shop", pa.table(known), **named).folder
    run = tmp_path / "run"
    api.train("wide_deep", data, run, settings={"train.epochs": 2, "train.batch_size": 64}, progress=False)
    answers = [
        Exposure(
            f"r{number}",
            f"u{number % 25}",
            LATER + 60 * SECOND * number,
            "run",
            "0:a",
            {},
            0,
            [f"i{number % 9}", f"i{(number + 4) % 9}"],
            9,
        )
        for number in range(100)
    ]
    clicks: list[dict[str, object]] = [
        {
            "user": each.subject,
            "item": each.items[0],
            "type": "click",
            "request": each.request_id,
            "time": each.served_at / SECOND + 5,
        }
        for each in answers
        if each.items[0] in ("i1", "i2")
    ]
    journal.store((), answers)
    for each in clicks:
        sent(journal, [each], round(float(str(each["time"])) * SECOND))
    closed = LATER + 60 * SECOND * 80  # the windows of the first 50 answers
    asked = replace(updater(run, journal, gate=0.2), clock=lambda: closed)
    made = asked.once()
    assert (made.state, made.version) == ("new version", 1)
    assert made.judgement is not None
    assert (made.judgement.metric, made.judgement.users) == ("log_loss", 10)
    assert made.updated is not None
    assert made.updated.counts["events"] == 80
    spec = FeatureSpec.load(bundle.find(run))
    assert spec.metadata["exposures_to"] == 40
    assert spec.trained_to == sum(each["time"] < LATER / SECOND + 60 * 40 for each in clicks)  # type: ignore[operator]
    (counted,) = [FeatureSpec.load(run / "updates" / "0001" / "data").metadata["summary"]]
    assert counted["positives"] == sum(known["clicked"]) + sum(a.items[0] in ("i1", "i2") for a in answers[:40])
    last = replace(asked, settings=JournalSettings(gate=0), clock=lambda: closed + 20 * 60 * SECOND).once()
    assert last.updated is not None
    assert last.updated.counts["events"] == 60


# --- many updaters, and none ------------------------------------------------------------------------------------------


def test_one_updater_at_a_time(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1]))
    with versions.updating(run), pytest.raises(DataError, match="another process is updating it; wait for it"):
        updater(run, journal).once()
    if not journal.is_sqlite:
        with updater(run, journal)._alone() as holds:
            assert holds()
            with pytest.raises(DataError, match="run: another host is updating it; wait for it"):
                updater(run, journal).once()
    assert updater(run, journal).once().state == "new version"


def test_a_version_of_an_updater_that_lost_its_lock_does_not_count(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if journal.is_sqlite:
        pytest.skip("SQLite's lock is a file's")
    run = shop(tmp_path)
    sent(journal, as_events(shop_events()[1]))

    of_this = updater(run, journal)
    key = int.from_bytes(hashlib.sha256(f"update {of_this._name}".encode()).digest()[:8], "big", signed=True)

    def judge(*_: object) -> Judgement:
        ours = sa.text(  # other tests hold locks of their own
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 "
            "AND ((classid::bigint << 32) | objid::bigint) = :key"
        )
        with journal._readers.connect() as connection:
            assert connection.execute(ours, {"key": key}).all()
        return Judgement(True, "as the test says")

    monkeypatch.setattr(updates, "judge", judge)
    with pytest.raises(DataError, match="was lost while a version was made, which does not count"):
        of_this.once()
    assert bundle.find(run) == run / "bundle"


def test_the_loop_tells_what_it_did_goes_on_after_errors_and_ends_when_asked(journal: Journal, tmp_path: Path) -> None:
    run = shop(tmp_path)
    lines, stop = list[str](), threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            (run / "updates").mkdir(exist_ok=True)
            (run / "updates" / "current.json").write_text("[")
        elif len(lines) == 2:
            (run / "updates" / "current.json").unlink()
            sent(journal, as_events(shop_events()[1]))
        else:
            stop.set()

    last = updater(run, journal, every="0.001s").keep_on(tell, stop)
    assert last is not None
    assert last.state == "new version"
    assert lines[0].startswith("waiting; update 0 (as trained) answers: 0 new rows (")
    assert "current.json" in lines[1]
    assert lines[2].startswith("new version; update 1 answers: ndcg@10 of ")
    assert updater(run, journal).keep_on(tell, stop) is None, "asked before it began"


@pytest.mark.parametrize("passed", [True, False])
def test_what_judged_a_version_waits_for_newer_events(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    run, events = shop(tmp_path), as_events(shop_events()[1])
    sent(journal, events[:80])
    forced(monkeypatch, passed=passed)
    lines, stop = list[str](), threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            sent(journal, events[80:])
        if len(lines) == 3:
            stop.set()

    last = updater(run, journal, every="0.001s", max_age="9999d").keep_on(tell, stop)
    assert last is not None
    state, waiting = ("new version", 16) if passed else ("failed", 80)
    assert [line.partition(";")[0] for line in lines] == [state, "waiting", state]
    assert f"0 new rows, and {waiting} that judged before" in lines[1]


def test_no_journal_is_made_for_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecspecError, match="none: no such folder"):
        api.update(tmp_path / "none", journal=f"sqlite:///{tmp_path / 'journal.db'}", progress=False)
    assert not [*tmp_path.iterdir()]


def test_a_signal_ends_the_loop_cleanly(tmp_path: Path) -> None:
    run = shop(tmp_path)
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    with Journal(url) as journal:
        sent(journal, as_events(shop_events()[1]))
    lines = []

    def tell(line: str) -> None:
        lines.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    made = api.update(run, journal=url, every="1h", progress=False, tell=tell)
    assert made.path == run / "updates" / "0001"
    (line,) = lines
    assert line.startswith("new version; update 1 answers")


STEPS = {
    "the rows are written": ("recspec.loop.updates.next_version", 0),
    "the dataset has grown": ("recspec.training.updating._make", 0),
    "the bundle is to be put in place": ("recspec.base.files.manifest.write", 0),
    "the version is there": ("recspec.loop.updates.judge", 0),
    "it is to answer": ("recspec.bundle.versions.publish", 0),
    "older ones are to be removed": ("recspec.bundle.versions._folders", 1),
    "it answers": ("recspec.loop.updates.Journal.advance", 1),
}
"""Step -> the function that kills the process, and the version that answers afterwards."""


@pytest.mark.slow
def test_a_killed_updater_leaves_the_version_before_and_takes_no_event_twice(tmp_path: Path) -> None:
    """An update is killed at each step in turn; at last one goes through."""
    run = shop(tmp_path)
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    events = as_events(shop_events()[1])
    sent_so_far = 0
    answers = 0
    for step, (killer, number) in STEPS.items():
        with Journal(url) as journal:
            sent(journal, events[sent_so_far : sent_so_far + 12])
        sent_so_far += 12
        place, _, name = killer.rpartition(".")
        code = f"""
import importlib, os, signal, sys
from pathlib import Path
from recspec.loop import Journal, JournalSettings, Updater, updates
from recspec.bundle import versions
place, name = {place!r}, {name!r}
try:
    owner = importlib.import_module(place)
except ModuleNotFoundError:
    module, _, kind = place.rpartition(".")
    owner = getattr(importlib.import_module(module), kind)
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if name == "_folders":
    write = versions._write
    versions._write = lambda run, now: (write(run, now), setattr(owner, name, kill) if now.version else None)[0]
else:
    setattr(owner, name, kill)
with Journal(sys.argv[2]) as journal:
    Updater(Path(sys.argv[1]), journal, JournalSettings(gate=0.2, keep=2)).once()
"""
        ended = Running(code, str(run), url).ended()
        assert ended.returncode == -signal.SIGKILL, (step, ended.stderr)
        answers += number
        assert Predictor.open(run, device="cpu").recommend(["user00"], k=1)[0].known, step
        assert versions.state(run).version == answers, step
    with Journal(url) as journal:
        last = updater(run, journal, gate=0, keep=2).once()
        assert (last.state, last.version, last.trained_to) == ("new version", answers + 1, 84)
        assert recorded(journal) == {**dict.fromkeys(range(answers + 1), "replaced"), last.version: "current"}
        assert consumers_of(journal) == {f"update {run.resolve()}": 84}
    held = pa.parquet.read_table(run / "updates" / f"{last.version:04d}" / "data" / "raw" / "events.parquet")
    assert held.num_rows == shop_events()[0].num_rows + 84, "each event once"
    assert sorted(each.name for each in (run / "updates").glob("[0-9]*")) == ["0001", "0002", "0003"]
    assert not (run / "updates" / "events.parquet").exists()


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "give a file of events, journal .* or unfreeze: one of them"),
        ({"new_events": "a.csv", "journal": "sqlite:///j.db"}, "one of them"),
        ({"roll_back": True, "unfreeze": True}, "one of them"),
        ({"every": "15m", "new_events": "a.csv"}, "every .* goes with a journal, in which new events come"),
        ({"every": "soon", "journal": "sqlite:///j.db"}, "setting 'every' is 'soon': expected a time such as 90d"),
        ({"window": "soon", "journal": "sqlite:///j.db"}, "setting 'window' is 'soon': expected a time such as 90d"),
        ({"margin": 0, "journal": "sqlite:///j.db"}, "margin"),
        ({"margin": 0.1, "new_events": "a.csv"}, "unknown setting 'margin'"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        api.update(tmp_path / "run", **asked)  # type: ignore[arg-type]


def test_the_verb_shows_what_came_of_it(tmp_path: Path) -> None:
    run = shop(tmp_path)
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    nothing = api.update(run, journal=url, progress=False)
    assert str(nothing).startswith("Update: waiting; update 0 (as trained) answers: 0 new rows (")
    with pytest.raises(DataError, match=r"update: there is no new version: waiting; update 0 \(as trained\) answers"):
        nothing.__fspath__()
    with Journal(url) as journal:
        sent(journal, as_events(shop_events()[1]))
    made = api.update(run, journal=url, gate=0.5, types=["view", "buy"], progress=False)
    assert made.path == run / "updates" / "0001"
    assert made.to_dict()["trained_to"] == 45
    assert "new version; update 1 answers: ndcg@10 of" in str(made)


def test_the_command_prints_what_came_of_it(tmp_path: Path) -> None:
    run = shop(tmp_path)
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    with Journal(url) as journal:
        sent(journal, as_events(shop_events()[1]))
    told = CliRunner().invoke(cli.app, ["update", str(run), "--journal", url, "--set", "gate=0", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert (found["state"], found["version"], found["trained_to"]) == ("new version", 1, 90)
    assert "90 new events, 2 new users, 1 new item" in told.stderr
    back = CliRunner().invoke(cli.app, ["update", str(run), "--roll-back"])
    told = "update 0 (as trained) answers; update 1 was rolled back: no new version is made until --unfreeze"
    assert told in back.stderr
