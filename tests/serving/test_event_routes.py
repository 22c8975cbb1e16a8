"""Events over HTTP: what is stored, counted and refused, by one process and by several."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import recspec
from recspec.feature_spec import FeatureSpec
from recspec.loop import Experiment, Journal
from recspec.serving.settings import Limits, RepositorySettings
from recspec.serving.showing import Showing
from tests.asking import Asked, asking, fits, sources, total
from tests.made_up import interactions
from tests.made_up_models import made_up_bundle

GIVEN = {"user": "ann", "item": 7, "type": "view"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec: FeatureSpec = interactions(tmp_path_factory.mktemp("events") / "data")
    return made_up_bundle(tmp_path_factory.mktemp("events") / "films", spec, "ease")


@pytest.fixture
def shop(folder: Path, url: str) -> Iterator[Asked]:
    limits = Limits(max_events=5)
    with asking(sources(films=folder), limits=limits, settings=RepositorySettings(watch=0, journal=url)) as asked:
        yield asked


def stored(asked: Asked) -> list[dict[str, Any]]:
    assert asked.repository.journal is not None
    return [row for block in asked.repository.journal.events() for row in block.to_pylist()]


def counts(answer: Any) -> tuple[int, ...]:
    fits(answer, "StoredEvents")
    return tuple(answer[name] for name in ("accepted", "duplicate", "refused", "clamped", "late"))


def test_one_event_and_several(shop: Asked) -> None:
    sent = {**GIVEN, "id": "e1", "time": 1_764_320_400, "price": 9.5}
    answer = shop("POST", "/events", sent)
    assert (answer.status, counts(answer.data)) == (200, (1, 0, 0, 0, 1))
    assert counts(shop("POST", "/events", sent).data) == (0, 1, 0, 0, 0)
    ahead = {**GIVEN, "id": "e2", "time": 4_000_000_000}
    answer = shop("POST", "/events", {"events": [ahead, {**GIVEN, "id": 3}, {**sent, "item": 8}, {"user": "bob"}]})
    assert (answer.status, counts(answer.data)) == (200, (2, 0, 2, 1, 0))
    (conflict, missing) = answer.data["refusals"]
    assert conflict == {"index": 2, "reason": "id: another event has it, with other content"}
    assert (missing["index"], missing["reason"].split(":")[0]) == (3, "type")
    rows = stored(shop)
    assert [each["event_id"] for each in rows] == ["e1", "e2", "3"]
    assert json.loads(rows[0]["context"]) == {"price": 9.5}
    assert rows[1]["occurred_at"] == rows[1]["received_at"]
    assert counts(shop("POST", "/events", ahead).data) == (0, 1, 0, 0, 0)  # clamped to another time, and yet the same
    assert counts(shop("POST", "/events", {"events": []}).data) == (0, 0, 0, 0, 0)


def test_a_type_that_no_model_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(f"u{place % 9}", f"i{place % 7}", ("view", "purchase", "hide")[place % 5 // 2]) for place in range(90)]
    table = pa.table(dict(zip(("user_id", "item_id", "kind"), zip(*rows, strict=True), strict=True)))
    named = {"event": "kind", "event_weights": {"view": 1, "purchase": 5, "hide": 0}, "dislikes": ["hide"]}
    data = recspec.prepare(table, tmp_path / "data", progress=False, **named)
    folder = recspec.train("popularity", data, tmp_path / "films", progress=False).path
    settings = RepositorySettings(watch=0, journal=f"sqlite:///{tmp_path / 'journal.db'}")
    told = (
        "type 'purchse' (2 events): no served model reads it (did you mean 'purchase'?); they read 'purchase', 'view'"
    )
    with asking(sources(films=folder), settings=settings) as asked:
        kinds = ("view", "purchse", "purchse", "impression", "hide")
        answer = asked("POST", "/events", {"events": [{**GIVEN, "type": kind} for kind in kinds]}).data
        assert (answer["accepted"], answer["notes"]) == (5, [told])
        assert asked("POST", "/events", GIVEN).data["notes"] == []
    variants = [{"name": name, "share": 0.5, "model": "films"} for name in ("a", "b")]
    metrics = [{"name": "bought", "event": "kauf"}]
    showing = Showing(
        experiments=(
            Experiment.model_validate({"name": "x", "variants": variants, "metrics": metrics, "start": "2026-01-01"}),
        )
    )
    with (
        asking(sources(films=folder), settings=settings, showing=showing),
        caplog.at_level("WARNING", "recspec.serve"),
    ):
        pass
    assert f"the newest events of the journal: {told}" in caplog.messages
    of_metrics = "metrics of the experiments: type 'kauf': no served model reads it; they read 'purchase', 'view'"
    assert of_metrics in caplog.messages


def test_a_request_without_a_single_good_event_is_refused(shop: Asked) -> None:
    answer = shop("POST", "/events", {"user": "ann", "item": 7})
    assert (answer.status, counts(answer.data)) == (400, (0, 0, 1, 0, 0))
    assert answer.data["error"].startswith("type: missing")
    answer = shop("POST", "/events", {"events": [{**GIVEN, "time": "now"}, 5]})
    assert answer.status == 400
    assert answer.data["error"].startswith("no event was stored; events[0]: time: found 'now'; expected seconds")
    assert [each["index"] for each in answer.data["refusals"]] == [0, 1]
    assert stored(shop) == []


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ([GIVEN], 400, "expected a JSON object"),
        ({"events": GIVEN}, 400, "expected one event, or an object with 'events' alone: a list of events"),
        ({"events": [GIVEN], "user": 1}, 400, "expected one event, or an object with 'events' alone"),
        ({"events": [GIVEN] * 6}, 413, "events: 6 in one request; expected at most 5"),
        (b"{", 400, "the body is not JSON"),
    ],
)
def test_other_bodies_are_refused(shop: Asked, body: object, status: int, message: str) -> None:
    answer = shop("POST", "/events", body)
    assert (answer.status, message in answer.data["error"]) == (status, True), answer.data
    assert stored(shop) == []


def test_without_a_journal_there_is_no_such_route(folder: Path) -> None:
    with asking(sources(films=folder)) as asked:
        answer = asked("POST", "/events", GIVEN)
    assert (answer.status, "start it with --journal sqlite:///FILE" in answer.data["error"]) == (404, True)


def test_events_are_counted(shop: Asked) -> None:
    metrics = shop.repository.metrics
    assert total(metrics, "recspec_newest_event_timestamp_seconds") == 0
    shop("POST", "/events", {"events": [{**GIVEN, "id": 1, "time": 5}, {**GIVEN, "id": 2, "time": 4e9}, {}]})
    shop("POST", "/events", {**GIVEN, "id": 1, "time": 5})
    by_outcome = {name: total(metrics, "recspec_events_total", outcome=name) for name in ("accepted", "duplicate")}
    assert by_outcome == {"accepted": 2, "duplicate": 1}
    assert total(metrics, "recspec_events_total", outcome="refused") == 1
    assert total(metrics, "recspec_event_times_total", time="late") == 1
    assert total(metrics, "recspec_event_times_total", time="clamped") == 1
    assert total(metrics, "recspec_journal_group_rows_sum") == 3
    assert total(metrics, "recspec_journal_commit_seconds_count") == 2
    assert total(metrics, "recspec_journal_waiting") == 0
    newest = total(metrics, "recspec_newest_event_timestamp_seconds")
    assert newest == stored(shop)[0]["received_at"] / 1e6


def test_a_journal_that_does_not_answer_in_time_is_a_504(folder: Path, tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'j.db'}"
    settings, limits = RepositorySettings(watch=0, journal=where), Limits(timeout=0.05)
    with asking(sources(films=folder), limits=limits, settings=settings) as asked:
        with Journal(where)._file_turn():  # another writer has its turn
            answer = asked("POST", "/events", {**GIVEN, "id": 1})
        assert (answer.status, "did not store the events within 0.05 s" in answer.data["error"]) == (504, True)
        asked.runner.run(asked.repository.writer.store([]))  # type: ignore[union-attr]
        assert [each["event_id"] for each in stored(asked)] == ["1"]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are tested where /proc shows their memory")
def test_workers_store_events_of_one_journal(folder: Path, url: str) -> None:
    from tests.serving.test_workers import Serving

    opening = RepositorySettings(watch=0, control=True, threads=1, journal=url, drift=0.1)
    served = Serving(folder, opening=opening)
    try:
        for number in range(20):
            sent = {"events": [{**GIVEN, "id": number}, {**GIVEN, "id": 0}]}
            answer = json.loads(served.ask("/events", sent))
            assert (answer["accepted"], answer["duplicate"]) == (1, 1)
        assert "another event has it" in served.refused("/events", {**GIVEN, "id": 0, "item": 8})[1]
        assert served.metric("recspec_events_total", outcome="accepted") == 20
        assert served.metric("recspec_journal_group_rows_sum") == 41
        until = time.monotonic() + 60
        while (measured := served.metric("recspec_drift_events")) < 20:
            assert time.monotonic() < until
        assert measured == 20, "one of the workers measures drift"
    finally:
        served.stop()
    with Journal(url, read_only=True) as journal:
        assert sum(map(len, journal.events())) == 20
