"""New versions of a run from the events of a journal: what is read, the gate, roll-back, freezing, and who may update."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa

from recspec import api
from recspec.base.errors import DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.data.encoding import Encoders
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, build_pipeline
from recspec.loop import Exposure, Journal, JournalSettings, Updater, read_events, updates
from recspec.loop import journal as tables
from recspec.loop.gate import Judgement
from recspec.training import Learning
from tests.made_up_events import COLUMNS, NEW_ITEM, NEW_USER, prepared, shop_events
from tests.processes import Running

SECOND = 1_000_000
LATER = 1_700_000_000 * SECOND


def sent(journal: Journal, rows: Sequence[Mapping[str, object]], received_at: int = LATER) -> None:
    """Events in a journal, all accepted."""
    found = read_events(rows, received_at)
    assert not found.refused
    assert {*journal.append(found.events)} == {"accepted"}


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
    assert journal.position_of(f"update {run.resolve()}") == 72
    again = updater(run, journal, gate=0).once()
    assert (again.version, again.trained_to) == (2, 90), "what judged a version is learned by the next"
    last = updater(run, journal).once()
    assert (last.state, last.version, last.why) == ("waiting", 2, "0 new rows")
