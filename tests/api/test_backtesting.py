"""Windows of time from `prepare`, and a model trained and measured on each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recspec import api
from recspec.base.errors import DataError, SettingsError
from recspec.evaluation import saved
from tests.api.test_commands import Typed, typed  # noqa: F401

DAY = 86_400
START = 1_700_000_000


def events(days: int = 60, users: int = 25) -> pd.DataFrame:
    """Each user takes an item a day, of those that are up to 20 days old: items come as time goes on."""
    rng = np.random.default_rng(0)
    rows = [
        (f"u{user}", f"i{max(0, day - int(rng.integers(20)))}", START + day * DAY + user, 1 + 4 * (rng.random() < 0.9))
        for day in range(days)
        for user in range(users)
    ]
    return pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp", "stars"])


def rows_of(data: api.Data, split: str) -> pd.DataFrame:
    """Positives of a split."""
    rows = data.to_frame(split, kind="pandas")
    return rows[rows["label"] > 0]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("windows") / "data"
    asked = {"rating": "stars", "min_rating": 4, "repeats": "first", "num_negatives": 2}
    made = api.prepare(events(), out, windows=3, split="time", window="7d", progress=False, **asked)
    assert made.path == out / "window-3"
    return out


def test_no_row_of_a_window_is_newer_than_those_that_it_is_tested_on(windows: Path) -> None:
    last = START + 59 * DAY + 24
    tested = set()
    for number in (1, 2, 3):
        data = api.open_data(windows / f"window-{number}")
        end = last - (3 - number) * 7 * DAY
        times = {split: rows_of(data, split)["timestamp"] for split in data.splits}
        assert times["train"].max() <= end - 14 * DAY < times["valid"].min()
        assert times["valid"].max() <= end - 7 * DAY < times["test"].min()
        assert times["test"].max() <= end
        tested |= {*times["test"]}
        seen = pd.read_parquet(data.path / "seen.parquet")
        raw = events()[lambda rows, end=end: rows["timestamp"] <= end]
        assert len(seen) <= len(raw.drop_duplicates(["user_id", "item_id"]))  # low ratings count, later rows do not
        items = data.spec.num_ids("item_id") - 1
        assert items == raw[(raw["stars"] >= 4) & (raw["timestamp"] <= end - 14 * DAY)]["item_id"].nunique()
        told = data.prepared["dropped"]
        later = (f"{175 * (3 - number):,} rows after the window of test (earlier={3 - number})",)
        assert (later[0] in told) == (number < 3)
    assert min(tested) > last - 21 * DAY


def test_rows_with_a_label_are_split_by_windows_too(tmp_path: Path) -> None:
    rows = events().assign(label=lambda rows: (rows["stars"] > 3).astype(int)).drop(columns="stars")
    data = api.prepare(rows, tmp_path / "data", label="label", split="time", window="7d", earlier=1, progress=False)
    counts = {split: len(data.to_frame(split, kind="pandas")) for split in data.splits}
    assert counts == {"train": 25 * (60 - 21), "valid": 25 * 7, "test": 25 * 7}


def test_the_mean_and_its_error_are_those_of_the_windows(windows: Path, tmp_path: Path, typed: Typed) -> None:  # noqa: F811
    said: list[str] = []
    asked = {"protocol": "full", "k": 3, "cold": "drop"}
    result = api.backtest(
        "ease", windows, tmp_path / "runs", settings={"settings.l2": 5}, progress=False, tell=said.append, **asked
    )
    values = []
    for number in (1, 2, 3):
        run, data = (folder / f"window-{number}" for folder in (tmp_path / "runs", windows))
        values.append(api.evaluate(run, data, progress=False, **asked).metrics["full"]["ndcg@3"])
    mean, error = result.metrics["full"]["ndcg@3"]
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
    assert said == [f"window-{number}: trained and measured" for number in (1, 2, 3)]
    frame = result.to_frame("pandas")
    assert frame[frame["metric"] == "ndcg@3"]["value"].tolist() == pytest.approx(values)
    assert f"{mean:.4f}" in str(result)
    options = ("--protocol", "full", "-k", "3", "--cold", "drop", "--set", "settings.l2=5", "--json")
    printed = json.loads(typed("backtest", "ease", windows, tmp_path / "typed", *options))
    assert printed == json.loads(json.dumps(result.to_dict()))


def test_two_backtests_are_compared_by_one_test_in_which_a_user_counts_once(windows: Path, tmp_path: Path) -> None:
    asked = {"protocol": "full", "progress": False}
    api.backtest("popularity", windows, tmp_path / "popularity", **asked)
    result = api.backtest("ease", windows, tmp_path / "ease", against=tmp_path / "popularity", **asked)
    found = result.pooled["full"]["ndcg@10"]
    sums, count = dict[str, float](), 0
    for number in (1, 2, 3):
        names = [f"{run}/window-{number}" for run in ("popularity", "ease")]
        theirs, ours = (saved(tmp_path / name)[0].table("full").to_pandas() for name in names)
        for user, difference in zip(ours["id"], theirs["ndcg@10"] - ours["ndcg@10"], strict=True):
            sums[user] = sums.get(user, 0.0) + difference
        count += len(ours)
    assert count > len(sums), "users of several windows"
    values = np.array([*sums.values()]) * len(sums) / count
    assert found.difference == pytest.approx(values.mean(), abs=1e-6)
    assert found.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), rel=1e-4)
    assert f"full: the model against {tmp_path / 'popularity'}, all datasets" in str(result)
    assert result.to_dict()["against"]["full"]["ndcg@10"]["p_value"] == found.p_value  # type: ignore[index]
    with pytest.raises(DataError, match=r"--against: no run .*window-1.*; expected one a dataset"):
        api.backtest("ease", windows, tmp_path / "other", against=tmp_path / "nothing", **asked)


def test_one_dataset_has_no_error_and_a_folder_without_any_is_refused(windows: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "window-3").symlink_to(windows / "window-3")
    result = api.backtest("popularity", tmp_path / "one", tmp_path / "runs", protocol="full", progress=False)
    assert all(math.isnan(error) for _, error in result.metrics["full"].values())
    assert json.loads(json.dumps(result.to_dict()))["metrics"]["full"]["mrr"]["standard_error"] is None
    with pytest.raises(DataError, match=r"runs: holds no prepared dataset; expected folders such as .*window-1"):
        api.backtest("popularity", tmp_path / "runs", tmp_path / "other", progress=False)


@pytest.mark.parametrize(
    ("windows", "settings", "message"),
    [
        (2, {}, r"--windows 2: set split=time and window to the length of each, such as --set window=7d"),
        (2, {"split": "time", "window": "7d", "earlier": 1}, "leave out earlier, which counts them"),
        (0, {}, "--windows is 0; expected 1 to 1,000"),
        (1, {"split": "time", "window": "30d"}, "no row is older than the two windows of 30d for valid and test; take"),
        (9, {"split": "time", "window": "7d"}, "valid and test, which end 8 of them before the last row; take a short"),
        (1, {"window": "7d"}, "window is for split time; set split=time too"),
        (1, {"split": "time", "window": "7d", "valid": 0.2}, "window is the length of valid and test; leave out valid"),
        (1, {"split": "time", "earlier": 1}, "earlier counts windows; set window to their length, such as 7d"),
        (1, {"split": "time", "window": "soon"}, "expected a time such as 90d, 12h or 2w"),
    ],
)
def test_windows_that_mean_nothing_are_refused(
    windows: int, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        api.prepare(events(), tmp_path / "out", windows=windows, rating=None, progress=False, **settings)
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


def test_a_length_in_days_needs_dates(tmp_path: Path) -> None:
    rows = events().assign(timestamp=lambda rows: rows["timestamp"] - START)
    with pytest.raises(SettingsError, match="setting 'window': is 7d, but the times of the rows are no dates; give a"):
        api.prepare(rows, tmp_path / "out", split="time", window="7d", rating=None, progress=False)
    data = api.prepare(rows, tmp_path / "out", split="time", window=7 * DAY, rating=None, progress=False)
    assert rows_of(data, "test")["timestamp"].min() > (59 - 7) * DAY
