"""Histories of raw rows: from their own columns, from the user catalogue, or prepared already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError
from recspec.feature_spec import FeatureSpec
from recspec.inference.answer_files import predict_split
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up


def raw_seen(raw: Path, user: str) -> list[int]:
    lines = [line.split(",") for line in (raw / "rows.csv").read_text().splitlines()[1:]]
    return [int(item) for name, item, _ in lines if name == user]


def past_of(raw: Path, user: str, length: int) -> list[int]:
    return raw_seen(raw, user)[:length]


def test_a_raw_history_is_scored_as_the_prepared_one(sequential: Predictor, raw: Path, tmp_path: Path) -> None:
    predict_split(sequential, FeatureSpec.load(raw.parent / "past"), "test", tmp_path / "split.parquet")
    prepared = pq.read_table(tmp_path / "split.parquet").to_pylist()[:22]  # of the users u0 and u1
    users, items = [row["user_id"] for row in prepared], [row["item_id"] for row in prepared]
    assert users == ["u0"] * 11 + ["u1"] * 11
    lists = [past_of(raw, user, 11) for user in users]
    gaps = [list(range(11, 0, -1))] * 22
    rows = pa.table({"user_id": users, "item_id": items, "history_item_id": lists, "history_gap": gaps})
    found, told = sequential.predict(rows)
    np.testing.assert_allclose(found, [row["score"] for row in prepared], atol=1e-6)
    assert told.notes() == ["not read: 'history_gap'"]  # DIN reads no gaps
    text = pa.array(["|".join(map(str, items)) for items in lists])
    as_text, _ = sequential.predict(rows.set_column(2, "history_item_id", text).drop_columns("history_gap"))
    np.testing.assert_allclose(as_text, found, atol=1e-6)


def test_without_the_column_a_users_history_is_the_catalogues(sequential: Predictor, raw: Path) -> None:
    given, _ = sequential.predict(
        pa.table({"user_id": ["u3"], "item_id": [101], "history_item_id": [past_of(raw, "u3", 12)]})
    )
    known, told = sequential.predict(pa.table({"user_id": ["u3"], "item_id": [101]}))
    assert known == pytest.approx(given, abs=1e-6)
    assert told.notes() == []
    _, told = sequential.predict(pa.table({"user_id": ["u3", "nobody"], "item_id": [101, 102]}))
    assert told.notes() == [
        "1 of 2 rows has an unknown user_id; it is scored with the id of unknown values",
        "1 of 2 rows has a user without a history in the catalogue; an empty history is taken",
    ]


def test_a_user_is_recommended_what_the_model_makes_of_the_history(sequential: Predictor) -> None:
    best = sequential.recommend(["u3"], k=1)[0].items[0]
    scores, _ = sequential.predict(pa.table({"user_id": ["u3"], "item_id": [best.item]}))
    assert scores[0] == pytest.approx(best.score, abs=1e-5)
    assert len({answer.items for answer in sequential.recommend(["u1", "u2", "u3"], k=3)}) == 3


def test_unknown_events_are_left_out_and_an_empty_history_is_one(sequential: Predictor) -> None:
    rows = {"user_id": ["u1"] * 4, "item_id": [101] * 4}
    histories = [[100, 7, 104], [100, 104], [], None]
    found, told = sequential.predict(pa.table({**rows, "history_item_id": histories}))
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[2] == pytest.approx(found[3], abs=1e-6)
    assert found[0] != pytest.approx(found[2], abs=1e-6)
    assert told.notes() == [
        "2 of 4 rows have no history_item_id; an empty history is taken",
        "1 of 4 rows holds unknown events of history_item_id; such events are left out",
    ]


def test_prepared_histories_are_read_from_files_made_elsewhere(tmp_path: Path) -> None:
    spec = made_up.sequences(tmp_path / "data", num_rows=200)
    din = MODELS["din"].Settings.model_validate({"embedding_dim": 4, "hidden": (8,)})
    train("din", spec, tmp_path / "run", settings=TrainSettings(epochs=1, tensorboard=False), model_settings=din)
    model = Predictor.open(tmp_path / "run", device="cpu")
    predict_split(model, spec, "test", tmp_path / "split.parquet")
    rows = pq.read_table(spec.path(spec.sources["test"][0].files[0]))
    found, _ = model.predict(rows)
    np.testing.assert_allclose(found, pq.read_table(tmp_path / "split.parquet")["probability"].to_numpy(), atol=1e-6)
    without = [name for name in rows.column_names if "history" in name]
    by_user, _ = model.predict(rows.drop_columns(without))
    assert len(by_user) == 50
    wrong = rows.set_column(rows.column_names.index("history_category"), "history_category", [[[1, 2, 3]] * 50])
    with pytest.raises(DataError, match=r"row 1 holds \d+ in 'history_item_id' and 3 in 'history_category'; expected"):
        model.predict(wrong)
