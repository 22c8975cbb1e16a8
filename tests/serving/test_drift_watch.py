"""Drift in a server's metrics: measured in the background, by one process, and never at a scrape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from recspec import api
from recspec.loop import Journal, now_us
from recspec.serving.drift_watch import REFERENCE, DriftWatch
from recspec.serving.repository import Repository
from recspec.serving.settings import RepositorySettings
from tests.asking import Asked, asking, sources, total
from tests.loop.test_drift import NAMED, as_events, rows
from tests.made_up_events import prepared


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    api.train("ease", prepared(folder / "own", rows(1_500, 0), **NAMED).folder, folder / "run", progress=False)
    return folder / "run"


@pytest.fixture
def url(tmp_path: Path) -> str:
    where = f"sqlite:///{tmp_path / 'journal.db'}"
    with Journal(where) as journal:
        journal.store(as_events(rows(500, 1, price=1.0), now_us()))
    return where


@pytest.fixture
def shop(run: Path, url: str) -> Iterator[Asked]:
    with asking(sources(shop=run), settings=RepositorySettings(watch=0, journal=url)) as asked:
        yield asked


def watch(repository: Repository) -> DriftWatch:
    assert repository._drift is not None
    return repository._drift


def test_gauges_say_what_has_drifted(shop: Asked) -> None:
    metrics = shop.repository.metrics
    assert total(metrics, "recspec_drift_events") == 0
    shop.runner.run(watch(shop.repository).measure())
    text = shop("GET", "/metrics").body.decode()
    assert 'recspec_drift_flagged{distribution="price",model="shop"} 1.0' in text
    assert 'recspec_drift_flagged{distribution="device",model="shop"} 0.0' in text
    assert 'recspec_drift_share_ratio{model="shop",share="unknown_users"} 0.0' in text
    assert total(metrics, "recspec_drift_psi", distribution="price") > 0.1
    assert total(metrics, "recspec_drift_ks_distance", distribution="price") > 0.3
    assert total(metrics, "recspec_drift_events") == 500
    assert total(metrics, "recspec_drift_timestamp_seconds") > 1_700_000_000


def test_the_training_data_is_read_once_for_each_model(shop: Asked) -> None:
    shop.runner.run(watch(shop.repository).measure())
    first = shop.repository.endpoint("shop").model.opened.predictor
    assert first is not None
    kept = first.held[REFERENCE]
    shop.runner.run(watch(shop.repository).measure())
    assert first.held[REFERENCE] is kept
    shop.runner.run(shop.repository.load("shop"))
    shop.runner.run(watch(shop.repository).measure())
    second = shop.repository.endpoint("shop").model.opened.predictor
    assert second is not None
    assert second is not first
    assert second.held[REFERENCE] is not kept
    assert total(shop.repository.metrics, "recspec_drift_events") == 500


def test_the_timer_measures_without_being_asked(run: Path, url: str) -> None:
    settings = RepositorySettings(watch=0, journal=url, drift=0.01)
    with asking(sources(shop=run), settings=settings) as asked:

        async def until_measured() -> None:
            async with asyncio.timeout(60):
                while not asked.repository.metrics.drift.reports:
                    await asyncio.sleep(0.01)

        asked.runner.run(until_measured())
        assert total(asked.repository.metrics, "recspec_drift_events") == 500


def test_without_a_journal_or_with_0_nothing_is_measured(run: Path, url: str) -> None:
    for settings in (RepositorySettings(watch=0), RepositorySettings(watch=0, journal=url, drift=0)):
        with asking(sources(shop=run), settings=settings) as asked:
            assert asked.repository._drift is None


def test_a_journal_that_fails_leaves_no_old_figures(
    shop: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop.runner.run(watch(shop.repository).measure())
    assert shop.repository.journal is not None
    shop.repository.journal.close()
    monkeypatch.setattr(Journal, "_reading", _fails)
    with caplog.at_level(logging.WARNING, "recspec.serve"):
        shop.runner.run(watch(shop.repository).measure())
    assert "model 'shop': drift is not measured: " in caplog.text
    assert total(shop.repository.metrics, "recspec_drift_events") == 0
    assert shop("POST", "/recommend", {"user": "u01"}).status == 200


def _fails(_: Journal) -> object:
    import sqlite3

    raise sqlite3.OperationalError("disk I/O error")
