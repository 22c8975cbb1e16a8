"""Features of the time of labelled rows: the same in a prepared dataset, a file, a request and a server."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import recspec
from recspec.base.errors import DataError, SettingsError
from tests.asking import asking, sources

FORMAT = "%d.%m.%Y %H:%M"
BOTH = ["hour", "weekday"]


def times(count: int = 300) -> list[dt.datetime]:
    return [dt.datetime(2024, 3, 1) + dt.timedelta(minutes=97 * place) for place in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> recspec.Model:
    """A model of rows that are clicked in the evening and at weekends."""
    folder = tmp_path_factory.mktemp("clicks")
    rows = [(at.strftime(FORMAT), "ab"[place % 2], at) for place, at in enumerate(times())]
    lines = [f"{text},{kind},{int((at.hour > 17 or at.weekday() > 4) != (at.minute < 6))}" for text, kind, at in rows]
    (folder / "rows.csv").write_text("\n".join(["zeit,kind,click", *lines]) + "\n")
    data = recspec.prepare(
        folder / "rows.csv", folder / "data", label="click", timestamp="zeit", time_features=BOTH, progress=False
    )
    return recspec.train("logistic_regression", data, folder / "run", progress=False)


def test_prepared_rows_have_the_hour_and_the_weekday(made: recspec.Model) -> None:
    assert made.data is not None
    held = [made.data.to_frame(split, kind="rows") for split in made.data.splits]
    found = [(row["zeit_hour"], row["zeit_weekday"]) for rows in held for row in rows]
    assert found == [(1 + at.hour, 1 + at.weekday()) for at in times()]


def test_a_file_a_frame_and_a_server_answer_as_the_prepared_rows_do(made: recspec.Model) -> None:
    prepared = made.predict(made.data, split="test", kind="pyarrow").column("probability").to_numpy()
    last = times()[-len(prepared) :]
    rows = [{"zeit": at.strftime(FORMAT), "kind": "ab"[(300 - len(last) + n) % 2]} for n, at in enumerate(last)]
    by_frame = made.predict(pa.Table.from_pylist(rows)).column("probability").to_numpy()
    np.testing.assert_allclose(by_frame, prepared, atol=1e-6)
    assert len(np.unique(by_frame.round(4))) > 10
    with asking(sources(clicks=made.path)) as ask:
        answer = ask("POST", "/predict", {"rows": rows}).data
        np.testing.assert_allclose(answer["probabilities"], prepared, atol=1e-6)
        assert ask("POST", "/predict", {"rows": [{"kind": "a"}]}).status == 400
    with pytest.raises(DataError, match=r"row 1 is '2024-03-01'; expected a time written as %d.%m.%Y %H:%M"):
        made.predict(pa.table({"zeit": ["2024-03-01"], "kind": ["a"]}))


@pytest.mark.parametrize(
    ("lines", "asked", "message"),
    [
        (["1,1", "2,0"] * 9, {}, "made of the times of 'at': its numbers, from 1 to 2, are no times since 1970"),
        (["Mar 1 2024,1", "Mar 2 2024,0"] * 9, {"time_format": "%b %d %Y"}, "it is written as %b %d %Y; expected ISO"),
        (["2024-03-01 09:00,1"] * 9, {"types": {"at": {"type": "time", "zone": "Europe/Berlin"}}}, "declares a zone"),
    ],
)
def test_times_that_a_request_could_read_otherwise_are_refused(
    lines: list[str], asked: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("\n".join(["at,click", *lines]) + "\n")
    settings = {"label": "click", "timestamp": "at", "time_features": BOTH, **asked}
    with pytest.raises(SettingsError, match=f"setting 'time_features': .*{message}"):
        recspec.prepare(tmp_path / "rows.csv", tmp_path / "data", settings=settings, progress=False)


def test_without_the_setting_a_note_names_it(tmp_path: Path) -> None:
    rows = pa.table({"at": times(60), "kind": ["a", "b"] * 30, "click": [0, 1, 1] * 20})
    made = recspec.prepare(rows, tmp_path / "data", label="click", timestamp="at", progress=False)
    assert "'at' makes no feature; --set 'time_features=[hour, weekday]' makes two" in str(made.prepared["inferred"])
    crossed = {"time_features": ["hour"], "crosses": [["kind", "at_hour"]]}
    with pytest.raises(SettingsError, match="setting 'crosses': 'at_hour' is made of a time, which can't be crossed"):
        recspec.prepare(rows, tmp_path / "no", label="click", timestamp="at", settings=crossed, progress=False)
