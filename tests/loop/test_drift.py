"""How far a journal's events have moved from what a run was trained on: every kind of run, and every message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from recspec import api
from recspec.base.errors import DataError, SettingsError
from recspec.cli import app as cli
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.loop import DriftReference, DriftReport, Event, Exposure, Journal, drift, measure_drift
from recspec.loop.drift import DriftSettings
from recspec.models import MODELS
from tests.loop.test_histories import WITHOUT_ROWS, made, saved
from tests.made_up_events import prepared

SECOND, DAY = 1_000_000, 86_400_000_000
NOW = 1_700_000_000 * SECOND
TYPES = ("view", "cart", "purchase")


def rows(
    count: int, seed: int, *, price: float = 0.0, first: int = 0, types: tuple[float, ...] = (0.8, 0.15, 0.05)
) -> pa.Table:
    """Events of 40 users on 24 items, of which the low numbers are popular; `first` moves the popularity."""
    rng = np.random.default_rng(seed)
    chances = 1 / (1 + np.arange(24))
    items = (rng.choice(24, count, p=chances / chances.sum()) + first) % 24
    return pa.table(
        {
            "user_id": [f"u{u:02d}" for u in rng.integers(0, 40, count)],
            "item_id": [f"i{i:02d}" for i in items],
            "timestamp": 1_600_000_000 + np.arange(count) * 60,
            "type": rng.choice(TYPES, count, p=types).tolist(),
            "kind": ["abc"[i % 3] for i in items],
            "price": rng.normal(price, 1, count),
            "device": rng.choice(["phone", "desk", "tablet"], count, p=[0.6, 0.3, 0.1]).tolist(),
        }
    )


NAMED = {
    "event": "type",
    "event_weights": {"view": 1, "cart": 3, "purchase": 5},
    "split": "none",
    "context_features": ["price", "device"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Interactions with histories, types, and context."""
    return prepared(tmp_path_factory.mktemp("base"), rows(1_500, 0), history=6, train_negatives=1, **NAMED)


def clicks(count: int, seed: int, low: float = 0.1) -> pa.Table:
    """Shown items with a label that the kind of the item decides."""
    table = rows(count, seed)
    rng = np.random.default_rng(seed + 1)
    rate = np.where(np.array(table.column("kind").to_pylist()) == "a", 0.5, low)
    return table.append_column("clicked", pa.array((rng.random(count) < rate).astype(int)))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """Labelled rows."""
    asked: dict[str, Any] = {
        "label": "clicked",
        "split": "none",
        "num_negatives": 100,
        "context_features": ["position"],
    }
    table = clicks(1_500, 0).drop_columns(["type", "price", "device"])
    table = table.append_column("position", pa.array(np.arange(1_500) % 2 + 1))
    return prepared(tmp_path_factory.mktemp("labelled"), table, **asked)


def as_events(table: pa.Table, at: int = NOW, context: tuple[str, ...] = ("price", "device")) -> list[Event]:
    """Rows as a journal holds them, one a second up to a time."""
    start = at - len(table) * SECOND
    return [
        Event(
            f"{at} {place}",
            row["user_id"],
            row["type"],
            row["item_id"],
            None,
            start + place * SECOND,
            start + place * SECOND,
            context=json.dumps({name: row[name] for name in context}),
        )
        for place, row in enumerate(table.to_pylist())
    ]


def answers(count: int, rate: Callable[[str], float], *, seed: int = 5) -> tuple[list[Exposure], list[Event]]:
    """Lists of two items a minute apart up to an hour ago, and clicks on them."""
    rng = np.random.default_rng(seed)
    shown, clicked = list[Exposure](), list[Event]()
    for number in range(count):
        at = NOW - 3_600 * SECOND - (count - number) * 60 * SECOND
        items = [f"i{i:02d}" for i in rng.choice(24, 2, replace=False)]
        user = f"u{rng.integers(0, 40):02d}"
        shown.append(Exposure(f"r{number}", user, at, "run", "0:a", {}, 0, items, 24))
        clicked += [
            Event(f"c{number} {item}", user, "click", item, None, at + SECOND, at + SECOND, request_id=f"r{number}")
            for item in items
            if rng.random() < rate(item)
        ]
    return shown, clicked


def measured(predictor: Predictor, spec: FeatureSpec, journal: Journal, at: int = NOW) -> DriftReport:
    return measure_drift(predictor, DriftReference.of(predictor, spec), journal, at)


def names(report: DriftReport) -> set[str]:
    return {each.name for each in report.shifts}


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    with Journal(url) as opened:
        yield opened


# --- every model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """Events and answers from where the training data comes from."""
    made = Journal(f"sqlite:///{tmp_path_factory.mktemp('journal') / 'journal.db'}")
    shown, clicked = answers(200, lambda item: 0.5 if int(item[1:]) % 3 == 0 else 0.1)
    made.store([*as_events(rows(1_500, 1)), *clicked], shown)
    return made


@pytest.mark.parametrize("name", sorted(MODELS))
def test_events_like_those_of_train_are_no_drift_for_any_model(
    name: str, base: FeatureSpec, labelled: FeatureSpec, filled: Journal, tmp_path: Path
) -> None:
    spec = labelled if name in WITHOUT_ROWS else base
    if name in WITHOUT_ROWS:
        settings = {"train.epochs": 1} if name == "multitask" else {}
        api.train(name, spec.folder, tmp_path / "run", settings=settings, progress=False)
        predictor = Predictor.open(tmp_path / "run", device="cpu")
    else:
        predictor = saved(tmp_path / "bundle", made(name, spec), spec)
    report = measured(predictor, spec, filled)
    expected = {"position"} if name in WITHOUT_ROWS else {"type of event", "device", "price"}
    assert {*expected, "kind"} <= names(report)
    # clicks are of items drawn evenly, and not of the popular ones that train's rows are of
    drifted = {each for each in report.flagged if each not in ("items by popularity", "kind", "scores", "calibration")}
    assert drifted == set()
    assert (report.events, report.answers) == (1_500 + filled_clicks(filled), 200)
    shares = {each.name: each.value for each in report.shares}
    assert shares["unknown_users"] == shares["new_shown_items"] == 0


def filled_clicks(journal: Journal) -> int:
    return sum(block.column("type").to_pylist().count("click") for block in journal.events())


# --- what drifts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ease(base: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return saved(tmp_path_factory.mktemp("ease") / "bundle", made("ease", base), base)


@pytest.mark.parametrize(
    ("moved", "drifted"),
    [
        ({"price": 1.0}, ["price"]),
        ({"types": (0.3, 0.3, 0.4)}, ["type of event"]),
        ({"first": 9}, ["items by popularity"]),
        ({}, []),
    ],
)
def test_what_has_moved_is_flagged_and_nothing_else(
    moved: dict[str, Any], drifted: list[str], ease: Predictor, base: FeatureSpec, journal: Journal
) -> None:
    journal.store(as_events(rows(1_500, 1, **moved)))
    report = measured(ease, base, journal)
    assert report.flagged == drifted
    by_name = {each.name: each for each in report.shifts}
    assert (by_name["price"].distance or 0) > (0.3 if "price" in moved else 0)
    assert by_name["device"].distance is None


def test_unknown_values_users_and_items_are_shares(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    table = rows(400, 1)
    events = as_events(table)
    for place in range(0, 400, 4):
        events[place] = changed(events[place], subject="zoe", item="i99")
    for place in range(1, 400, 8):
        events[place] = changed(events[place], context=json.dumps({"price": 0.0, "device": "watch"}))
    journal.store(events)
    journal.store((), [Exposure("r", "u01", NOW - SECOND, "run", "0:a", {}, 0, ["i01", "i98", "i99", "i02"], 24)])
    report = measured(ease, base, journal)
    assert [(each.name, each.count, each.of) for each in report.shares] == [
        ("unknown_users", 100, 400),
        ("new_items", 100, 400),
        ("new_shown_items", 2, 4),
    ]
    device = next(each for each in report.shifts if each.name == "device")
    assert (device.unknown, device.unknown_before) == (50 / 400, 0.0)
    assert device.now == 350, "unknown values are no part of the distribution"
    kind = next(each for each in report.shifts if each.name == "kind")
    assert (kind.now, kind.unknown) == (300, None), "the catalogue knows nothing of new items"


def changed(event: Event, **values: Any) -> Event:
    return Event(**{**{name: getattr(event, name) for name in Event.__slots__}, **values})


def test_impressions_are_no_events_and_a_new_type_is_unknown(
    ease: Predictor, base: FeatureSpec, journal: Journal
) -> None:
    events = as_events(rows(300, 1))
    journal.store([*events[:200], *(changed(each, type="impression") for each in events[200:])])
    report = measured(ease, base, journal)
    assert report.events == 200
    journal.store([changed(each, event_id=f"w{each.event_id}", type="wish") for each in events[:50]])
    report = measured(ease, base, journal)
    assert "events of types that event_weights do not name: 50 left out" in report.untold


def test_the_window_is_of_the_time_of_events(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    old = [changed(each, received_at=NOW) for each in as_events(rows(300, 1), NOW - 30 * DAY)]  # imported today
    journal.store(old)
    journal.store(as_events(rows(200, 2)))
    assert measured(ease, base, journal).events == 200
    whole = measure_drift(ease, DriftReference.of(ease, base), journal, NOW, DriftSettings(window="31d"))
    assert whole.events == 500
    assert measured(ease, base, journal, NOW - 20 * DAY).events == 0


def test_a_clock_that_was_set_back_hides_no_event(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    since = NOW - 7 * DAY
    journal.store(as_events(rows(300, 1), since + DAY))
    journal.store(as_events(rows(100, 2), since - DAY // 2))
    assert measured(ease, base, journal).events == 300


def test_a_large_window_is_read_in_blocks_drawn_by_chance(
    ease: Predictor, base: FeatureSpec, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = DriftReference.of(ease, base)
    monkeypatch.setattr(drift, "MOST_EVENTS", 400)
    monkeypatch.setattr(drift, "EVENTS_OF_BLOCK", 20)
    monkeypatch.setattr(drift, "MOST_ROWS", 250)
    journal.store(as_events(rows(1_500, 1)))
    report = measure_drift(ease, reference, journal, NOW)
    assert report.events == 400
    assert {each.now for each in report.shifts if each.name == "price"} == {250}
    assert report.flagged == []


# --- labelled rows ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clicked_run(labelled: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("clicked") / "run"
    api.train("logistic_regression", labelled.folder, run, progress=False)
    return run


def test_chances_are_compared_with_what_happened(clicked_run: Path, journal: Journal) -> None:
    def usual(item: str) -> float:
        return 0.5 if int(item[1:]) % 3 == 0 else 0.1

    shown, clicked = answers(400, usual)
    journal.store(clicked, shown)
    predictor = Predictor.open(clicked_run, device="cpu")
    reference = DriftReference.of(predictor)
    report = measure_drift(predictor, reference, journal, NOW)
    assert report.calibration is not None
    assert report.calibration.rows == 800
    assert report.calibration.low < 1 < report.calibration.high
    assert report.calibration.observed == len(clicked) / 800
    assert {"scores", "kind", "position"} <= names(report)
    assert "calibration" not in report.flagged


def test_chances_that_have_become_too_high_are_flagged(clicked_run: Path, journal: Journal) -> None:
    shown, clicked = answers(400, lambda item: 0.25 if int(item[1:]) % 3 == 0 else 0.05)
    journal.store(clicked, shown)
    found = api.drift(clicked_run, journal=journal.url.render_as_string(hide_password=False), at=moment())
    assert found.flagged[-1:] == ["calibration"]
    assert found.report.calibration is not None
    assert found.report.calibration.ratio == pytest.approx(2, abs=0.5)


def moment() -> str:
    return "2023-11-14T22:13:20Z"  # NOW


def test_open_windows_and_learned_answers_are_left_out(clicked_run: Path, journal: Journal) -> None:
    shown, clicked = answers(400, lambda _: 0.3)
    journal.store(clicked, shown)
    predictor = Predictor.open(clicked_run, device="cpu")
    reference = DriftReference.of(predictor)
    reference.learned = 300
    closing = (
        NOW - 3_600 * SECOND - 60 * SECOND * 20
    )  # 20 minutes before the last answer, 10 before the last closed one
    report = measure_drift(predictor, reference, journal, closing, DriftSettings(label_window="10m"))
    assert report.calibration is not None
    assert report.calibration.rows == 2 * (400 - 300 - 29)
    reference.learned = 400
    report = measure_drift(predictor, reference, journal, NOW)
    assert report.calibration is None
    assert any("0 shown items with a closed window that the model has not learned" in each for each in report.untold)


def test_answers_without_an_impression_were_not_shown(clicked_run: Path, journal: Journal) -> None:
    shown, clicked = answers(400, lambda _: 0.3)
    seen = [
        Event(
            f"s{each.request_id}",
            str(each.subject),
            "impression",
            None,
            None,
            each.served_at,
            each.served_at,
            request_id=each.request_id,
        )
        for each in shown[:150]
    ]
    journal.store([*clicked, *seen], shown)
    predictor = Predictor.open(clicked_run, device="cpu")
    report = measure_drift(predictor, DriftReference.of(predictor), journal, NOW)
    assert report.calibration is not None
    assert report.calibration.rows == 300
    assert "items that were not shown: 500 left out" in report.untold


# --- what can't be said -----------------------------------------------------------------------------------------------


def test_an_empty_journal_and_an_empty_window_are_named(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    report = measured(ease, base, journal)
    assert "events: the journal holds no event" in report.untold
    assert "answers: the journal holds no answer" in report.untold
    assert "features: the window gives 0 rows; 100 are needed" in report.untold
    journal.store(as_events(rows(300, 1), NOW - 30 * DAY))
    told = measured(ease, base, journal).untold
    assert "events: the window holds no event; the newest one is of 2023-10-15T22:13:19Z" in told


def test_a_run_without_its_dataset_tells_what_the_bundle_knows(
    base: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    predictor = saved(tmp_path / "bundle", made("ease", base), base)
    journal.store(as_events(rows(300, 1)))
    report = measure_drift(predictor, DriftReference.of(predictor), journal, NOW)
    assert report.shifts == []
    assert [each.count for each in report.shares] == [0, 0]
    (why,) = [each for each in report.untold if each.startswith("features")]
    assert "no reference" in why
    assert "does not say which dataset it was trained on" in why


def test_what_events_do_not_carry_is_named(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    journal.store(as_events(rows(300, 1), context=("device",)))
    report = measured(ease, base, journal)
    assert "price: the journal's rows do not give it" in report.untold
    assert "price" not in names(report)


def test_scores_that_are_no_chances_are_named(ease: Predictor, base: FeatureSpec, journal: Journal) -> None:
    journal.store(as_events(rows(300, 1)))
    told = "\n".join(measured(ease, base, journal).untold)
    assert "calibration: the data has no label, so scores are no chances of one" in told
    assert "scores: no reference: only chances of labelled rows" in told


# --- kinds of runs, and the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one dataset, a blend, a pipeline, and a journal of moved prices."""
    folder = tmp_path_factory.mktemp("shop")
    data = prepared(folder / "own", rows(1_500, 0), **{**NAMED, "split": "leave_one_out"}).folder
    for name in ("ease", "popularity"):
        api.train(name, data, folder / name, progress=False)
    api.train("neumf", data, folder / "neumf", settings={"train.epochs": 1}, progress=False)
    api.blend(folder / "blend", [folder / "ease", folder / "popularity"], data, progress=False)
    api.pipeline(folder / "pipeline", retriever=folder / "ease", ranker=folder / "neumf")
    with Journal(f"sqlite:///{folder / 'journal.db'}") as journal:
        journal.store(as_events(rows(1_000, 1, price=1.0)))
    return folder


@pytest.mark.parametrize("run", ["ease", "blend", "pipeline"])
def test_the_verb_measures_runs_blends_and_pipelines(run: str, shop: Path) -> None:
    found = api.drift(shop / run, journal=f"sqlite:///{shop / 'journal.db'}", at=moment())
    assert found.flagged == ["price"]
    frame = found.to_frame("pyarrow")
    assert frame.column("name").to_pylist() == [each.name for each in found.report.shifts]
    assert frame.column("flagged").to_pylist().count(True) == 1


def test_the_command_prints_tables_json_and_a_status(shop: Path) -> None:
    asked = ["drift", str(shop / "ease"), "--journal", f"sqlite:///{shop / 'journal.db'}", "--at", moment()]
    shown = CliRunner().invoke(cli.app, asked)
    assert shown.exit_code == 0
    assert "drifted: price; 1,000 events and 0 answers of 2023-11-07T22:13:20+00:00" in " ".join(shown.output.split())
    printed = CliRunner().invoke(cli.app, [*asked, "--json", "--fail", "--out", str(shop / "drift.json")])
    assert printed.exit_code == 3
    kept = json.loads((shop / "drift.json").read_text())
    assert kept == json.loads(printed.stdout)
    assert kept["flagged"] == ["price"]
    assert {each["name"] for each in kept["shifts"]} >= {"price", "device", "kind", "type of event"}
    calm = CliRunner().invoke(cli.app, [*asked, "--window", "1s", "--fail"])
    assert calm.exit_code == 0
    assert "nothing can be compared" in calm.output


def test_wrong_settings_are_refused(shop: Path) -> None:
    url = f"sqlite:///{shop / 'journal.db'}"
    with pytest.raises(SettingsError, match="window"):
        api.drift(shop / "ease", journal=url, window="often")
    with pytest.raises(SettingsError, match="expected ISO 8601"):
        api.drift(shop / "ease", journal=url, at="yesterday")
    with pytest.raises(DataError, match="there is no such journal"):
        api.drift(shop / "ease", journal=f"sqlite:///{shop / 'none.db'}")
