"""Raw rows to probabilities, with notes on what was missing, unknown or not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import DataError
from recspec.data.encoding.row_notes import UNKNOWN_ID
from recspec.datasets.adult import LAYOUT
from recspec.feature_spec import FeatureSpec
from recspec.inference import answer_files
from recspec.inference.answer_files import predict_file, predict_split
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests.inference.conftest import ADULT


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_raw_rows_get_what_their_prepared_split_gets_though_values_are_missing_or_have_blanks(
    adult: Predictor, tmp_path: Path, suffix: str
) -> None:
    folder = adult.bundle.folder.parent.parent
    names = (*LAYOUT, "label")
    text = (folder / "raw" / "adult.test").read_text().split("\n", 1)[1]
    rows = [dict(zip(names, line.split(","), strict=True)) for line in text.splitlines()]
    raw = tmp_path / f"raw{suffix}"
    if suffix == ".csv":
        raw.write_text(", ".join(names) + "\n" + text)
    elif suffix == ".jsonl":
        raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), raw)
    predict_file(adult, raw, tmp_path / "raw.out.parquet")
    predict_split(adult, FeatureSpec.load(folder / "data"), "test", tmp_path / "split.parquet")
    found, expected = (
        pq.read_table(tmp_path / name)["probability"].to_pylist() for name in ("raw.out.parquet", "split.parquet")
    )
    assert found == expected
    assert len(set(found)) == 4


def test_an_id_is_found_as_it_was_written_and_as_a_json_number(predictor: Predictor) -> None:
    texts, _ = predictor.predict(pa.table({"user_id": ["u1"], "item_id": ["107"]}))
    numbers, found = predictor.predict(pa.table({"user_id": ["u1"], "item_id": [107]}))
    assert texts.tolist() == numbers.tolist()
    assert not found.missing_values
    _, found = predictor.predict(pa.table({"user_id": ["u1"], "item_id": ["0107"]}))
    assert found.missing_values["item_id"].unknown == 1


def test_unknown_values_are_counted_and_scored_as_unknown(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id\nu1,100\nnobody,100\nnobody,7\n")
    found = predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv")
    assert found.notes() == [
        "of 3 rows 2 have an unknown user_id; 1 has an unknown item_id: they are scored with the id of unknown values"
    ]


def test_missing_values_are_noted_apart_from_unknown_ones(
    adult: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "ROWS", 2)  # counts are of all blocks
    row = dict(zip(LAYOUT, ADULT.splitlines()[0].split(", "), strict=False))
    rows = [row, {**row, "occupation": "?"}, {**row, "occupation": None, "age": ""}, {**row, "occupation": "Astronaut"}]
    pq.write_table(pa.Table.from_pylist([*rows, {**row, "race": "?", "gender": "X"}]), tmp_path / "rows.parquet")
    assert predict_file(adult, tmp_path / "rows.parquet", tmp_path / "out.csv").notes() == [
        "of 5 rows 2 have no occupation; 1 has an unknown occupation, gender; 1 has no race: they are scored with "
        + UNKNOWN_ID,
        "1 of 5 rows has no age; the mean is taken",
        "not read: 'fnlwgt'",
    ]
    pq.write_table(pa.Table.from_pylist([rows[2], row, row]), tmp_path / "rows.parquet")
    assert predict_file(adult, tmp_path / "rows.parquet", tmp_path / "out.csv").notes() == [
        "1 of 3 rows has no occupation; it is scored with the id of unknown values",
        "1 of 3 rows has no age; the mean is taken",
        "not read: 'fnlwgt'",
    ]
    rows = [{**row, "occupation": "?"}, {**row, "occupation": None}, {**row, "occupation": "Astronaut"}]
    _, found = adult.predict(pa.Table.from_pylist(rows))
    assert found.notes() == [
        "2 of 3 rows have no occupation and 1 an unknown one; they are scored with the id of unknown values",
        "not read: 'fnlwgt'",
    ]
    row.pop("fnlwgt")
    _, found = adult.predict(pa.Table.from_pylist([{**row, "race": "?"}]))
    assert found.notes() == ["1 of 1 row has no race; it is scored with the id of unknown values"]


def test_rows_without_a_user_are_an_unknown_users_and_a_name_nearly_right_is_none(
    predictor: Predictor, sequential: Predictor, tmp_path: Path
) -> None:
    for model, empty in (
        (predictor, []),
        (sequential, ["1 of 1 row has a user without a history in the catalogue; an empty history is taken"]),
    ):
        by_null, _ = model.predict(pa.table({"user_id": pa.nulls(1), "item_id": [101]}))
        found, told = model.predict(pa.table({"item_id": [101]}))
        assert found == by_null
        assert told.notes() == ["1 of 1 row has no user_id; it is scored with the id of unknown values", *empty]
        with pytest.raises(
            DataError, match=r"no column 'user_id' \(did you mean 'userid'\?\); found 'userid', 'item_id'"
        ):
            model.predict(pa.table({"userid": ["u1"], "item_id": [101]}))
    (tmp_path / "rows.csv").write_text("item_id\n101\n102\n")
    assert predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv").missing_values["user_id"].missing == 2


def test_columns_that_are_not_read_are_named_beside_those_that_may_have_been_meant(
    sequential: Predictor, predictor: Predictor, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,histroy,when,label,kind\nu1,101,100|104,7,1,a\n")
    assert predict_file(sequential, tmp_path / "rows.csv", tmp_path / "out.csv").notes() == [
        "not read: 'histroy' (did you mean 'history_item_id'?), 'when'",
        "absent: 'history_item_id'; the catalogues' values are taken",
    ]
    rows = {"user_id": ["u1"], "item_id": [101], "kind": ["a"]}
    _, told = predictor.predict(pa.table(rows))  # neumf reads ids alone
    assert told.notes() == ["not read: 'kind'"]
    _, told = predictor.predict(pa.table({**rows, **{f"c{number}": [0] for number in range(12)}}))
    assert told.notes() == ["not read: 'kind', 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', 'c8' and 3 more"]


@pytest.mark.parametrize("sign", [",", ", ", ";", " "])
def test_a_list_that_another_sign_separates_is_told_the_right_one(
    sequential: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    monkeypatch.setattr(answer_files, "ROWS", 2)  # counts are of all blocks
    past = sign.join(["100", "104"])
    (tmp_path / "rows.csv").write_text(
        f'user_id,item_id,history_item_id\nu1,101,"{past}"\nu2,101,100\nu3,101,"{past}"\n'
    )
    first, second = predict_file(sequential, tmp_path / "rows.csv", tmp_path / "out.csv").notes()
    assert first == "2 of 3 rows hold unknown events of history_item_id; such events are left out"
    assert second == (
        f"2 of 3 rows hold '{sign.strip() or ' '}' and no known value in history_item_id; "
        "expected its values between '|', or a list of them"
    )


def test_rows_without_a_probability_are_counted(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "ROWS", 2)  # counts are of all blocks
    answers = iter([np.array([0.5, np.nan], np.float32), np.array([np.inf], np.float32)])
    monkeypatch.setattr(predictor, "predict_batch", lambda *_, **__: {predictor.column: next(answers)})
    (tmp_path / "rows.csv").write_text("user_id,item_id\nu1,100\nu1,101\nu1,102\n")
    why = "the model gives no finite number; a value is too large, or the model is damaged"
    notes = predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv").notes()
    assert notes == [f"2 of 3 rows have no value: {why}"]


def test_no_row_gives_no_probability(predictor: Predictor) -> None:
    probability, found = predictor.predict(
        pa.table({"user_id": pa.array([], "string"), "item_id": pa.array([], "int64")})
    )
    assert len(probability) == 0
    assert found.rows == 0


@pytest.fixture(scope="module", params=["", "padding: 0"])
def with_lists(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Trained on files that recspec did not prepare, with a list of ids: 0 is a real one unless it is padding."""
    folder = tmp_path_factory.mktemp("lists")
    padding = {"padding": 0} if request.param else {}
    filler = 0 if padding else -1
    table = {"u": [0, 1, 2, 3], "i": [0, 1, 2, 0], "tags": [[1, 2], [4, filler], [3, 1], [filler, filler]]}
    pq.write_table(pa.table({**table, "y": [1.0, 0.0, 1.0, 0.0]}), folder / "train.parquet")
    files = [{"type": "parquet", "features": ["u", "i", "tags", "y"], "files": ["train.parquet"]}]
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "u": {"cardinality": 4},
                "i": {"cardinality": 3},
                "tags": {"cardinality": 5, "length": 2, **padding},
                "y": {},
            },
            "source_spec": {"train": files},
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "context": ["tags"], "label_ch": ["y"]},
        },
        folder,
    )
    wide_deep = MODELS["wide_deep"].Settings.model_validate({"hidden": (8,), "dropout": 0.0})
    settings = TrainSettings(epochs=3, batch_size=2, learning_rate=0.1, tensorboard=False)
    train("wide_deep", spec, folder / "run", settings=settings, model_settings=wide_deep)
    return Predictor.open(folder / "run", device="cpu")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_lists_of_ids_are_taken_as_they_are_where_recspec_did_not_prepare(
    with_lists: Predictor, tmp_path: Path, suffix: str
) -> None:
    spec = with_lists.spec
    file = with_lists.bundle.folder.parent.parent / "train.parquet"
    table = pq.read_table(file)
    rows = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, rows)
    else:  # without padding, and a list that is longer than the model reads
        lists = ["[1, 2, 4]", "[4]", "[3, 1]", "[]"]
        rows.write_text(
            "".join(
                f'{{"u": {u}, "i": {i}, "tags": {tags}}}\n'
                for u, i, tags in zip(table["u"], table["i"], lists, strict=True)
            )
        )
    predict_file(with_lists, rows, tmp_path / "out.parquet")
    batch = {name: torch.tensor(table[name].to_pylist()) + spec.shift(name) for name in ("u", "i")}
    shift = spec.shift("tags")
    batch["tags"] = torch.tensor([[1, 2], [4, -shift], [3, 1], [-shift, -shift]]) + shift
    with torch.inference_mode():
        expected = torch.sigmoid(with_lists.model(batch)).numpy()
    np.testing.assert_allclose(pq.read_table(tmp_path / "out.parquet")["probability"], expected, rtol=1e-6)
    assert len(set(expected.tolist())) == 4


def test_lists_and_values_that_can_not_be_are_each_named(with_lists: Predictor) -> None:
    with pytest.raises(DataError) as caught:
        with_lists.predict(pa.table({"u": [0, None], "i": [0, 1], "tags": [[1], [2, 5]]}))
    assert caught.value.problems == (
        "column 'tags': row 2 holds 5; expected an id in [0, 5)",
        "column 'u': row 2 has no value; expected one in every row",
    )
    with pytest.raises(DataError) as caught:
        with_lists.predict(pa.table({"u": [[0]], "i": [0], "tags": ["1|2"]}))
    assert "column 'tags': holds string; expected a list in every row, as JSONL and Parquet" in str(caught.value)
    assert "column 'u': holds lists; expected one value a row" in str(caught.value)
