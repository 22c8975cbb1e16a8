"""Files of rows: read, written, and scored into files, as are prepared splits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest

import recspec
from recspec.base.errors import DataError, SettingsError, SpecError
from recspec.data.storage import check as dataset_check
from recspec.data.storage import open_split
from recspec.datasets.adult import LAYOUT
from recspec.evaluation.evaluations import evaluate_model
from recspec.feature_spec import FeatureSpec
from recspec.inference import answer_files
from recspec.inference.answer_files import (
    predict_file,
    predict_split,
    read_rows,
    read_users,
    recommend_to_file,
    row_writer,
)
from recspec.inference.batch_jobs import How, recommend_shards
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.report import dataset_summary as card
from tests.inference.conftest import ADULT, trained_neumf


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_of_every_format_come_back_with_a_score(predictor: Predictor, tmp_path: Path, suffix: str) -> None:
    rows, out = tmp_path / f"rows{suffix}", tmp_path / f"scored{suffix}"
    with row_writer(rows) as write:
        write(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 129], "why": ["a", "b"]}))
    found = predict_file(predictor, rows, out)
    assert (found.rows, found.missing_values) == (2, {})
    (scored,) = read_rows(out)
    assert scored.column_names == ["user_id", "item_id", "why", "score"]
    expected, _ = predictor.predict(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 129]}))
    np.testing.assert_allclose(scored["score"].cast(pa.float64()), expected, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([rows.name, out.name])


@pytest.mark.parametrize("name", ["user_id=u1", "a[1]*?", "{b} -dash %20", "back\\slash\nnew line"])
def test_the_names_of_files_mean_nothing(predictor: Predictor, name: str, tmp_path: Path) -> None:
    rows = pa.table({"user_id": ["u1", "u2"], "item_id": ["100", "0100"]})
    for suffix in (".csv", ".jsonl", ".parquet"):
        folder = tmp_path / suffix / name
        folder.mkdir(parents=True)
        with row_writer(folder / f"{name}{suffix}") as write:
            write(rows)
        predict_file(predictor, folder / f"{name}{suffix}", folder / f"{name} out{suffix}")
        (scored,) = read_rows(folder / f"{name} out{suffix}")
        assert scored.select(["user_id", "item_id"]).to_pylist() == rows.to_pylist()
        assert sorted(path.name for path in folder.iterdir()) == sorted([f"{name}{suffix}", f"{name} out{suffix}"])


def test_rows_of_a_file_are_counted_through_its_blocks(
    adult: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dict(zip(LAYOUT, ADULT.splitlines()[0].split(", "), strict=False))
    pq.write_table(pa.Table.from_pylist([row, row, row, row, {**row, "age": "old"}]), tmp_path / "rows.parquet")
    for size in (2, 5):
        monkeypatch.setattr(answer_files, "ROWS", size)
        with pytest.raises(DataError, match=r"^raw rows: column 'age': row 5 is 'old'; expected a number$"):
            predict_file(adult, tmp_path / "rows.parquet", tmp_path / "out.csv")


def test_files_that_are_not_there_or_of_another_kind_are_refused(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id\nu1,100\n")
    with pytest.raises(DataError, match=r"row.csv: no such file \(did you mean 'rows.csv'\?\)"):
        predict_file(predictor, tmp_path / "row.csv", None)
    (tmp_path / "rows.xls").write_text("")
    with pytest.raises(DataError, match=r"rows are read from .csv, .jsonl, .parquet; found '.xls'"):
        predict_file(predictor, tmp_path / "rows.xls", None)
    with pytest.raises(SettingsError, match=r"expected a name that ends in .csv, .jsonl, .parquet"):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.txt")
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="can't be read as parquet"):
        predict_file(predictor, tmp_path / "broken.parquet", None)
    with pytest.raises(DataError, match="can't be read as a list of users"):
        read_users(predictor, tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("name", "text", "found", "said"),
    [
        ("users.txt", "u1\n\n u2 \n", ["u1", "u2"], ""),
        ("users.csv", "user_id,name\nu1,Ann\nu2,Bob\n", ["u1", "u2"], ""),
        ("users.csv", "name;user_id\nAnn;u1\n", ["u1"], ""),
        ("users.csv", "user_id\nu1\nnobody\n", ["u1", "nobody"], ""),
        ("users.csv", "u1\nu2\n", ["u1", "u2"], ""),
        ("users.csv", "kunde\nu1\n", ["u1"], "the first line, 'kunde', is no user but the name of the column"),
        ("users.jsonl", '{"user_id": "u1", "age": 3}\n', ["u1"], ""),
    ],
)
def test_users_are_lines_or_the_column_of_their_ids(
    predictor: Predictor, tmp_path: Path, name: str, text: str, found: list[str], said: str
) -> None:
    (tmp_path / name).write_text(text)
    notes: list[str] = []
    assert read_users(predictor, tmp_path / name, notes.append) == found
    assert [note.removeprefix(f"{tmp_path / name}: ") for note in notes] == ([said] if said else [])


def test_a_table_without_the_users_column_is_refused(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("name,mail\nAnn,a@b\n")
    with pytest.raises(DataError, match="no column 'user_id', the users' ids; found 'name', 'mail'"):
        read_users(predictor, tmp_path / "users.csv")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_lists_are_written_by_the_ending_of_the_file(predictor: Predictor, tmp_path: Path, suffix: str) -> None:
    out, wanted = tmp_path / f"lists{suffix}", RecommendRequest(k=2)
    assert recommend_to_file(predictor, ["u1", "nobody"], out, wanted, columns=("title", "item_id")) == (2, 1)
    table = pa.concat_tables([*read_rows(out)])
    assert table.column_names == ["user", "known", "rank", "item", "title", "score", "item_id"]
    assert table.column("user").to_pylist() == ["u1", "u1", "nobody", "nobody"]
    (answer,) = predictor.recommend(["u1"], k=2)
    assert [str(each) for each in table.column("item").to_pylist()[:2]] == [str(each.item) for each in answer.items]
    assert table.column("item_id").to_pylist() == table.column("item").to_pylist()


def test_users_of_whom_none_is_known_get_no_file(predictor: Predictor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"knows none of the users, such as 'zz'; expected ids .* such as 'u0'"):
        recommend_to_file(predictor, ["zz", "yy"], tmp_path / "lists.csv", RecommendRequest(k=2))
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "users.txt").write_text("zz\nyy\n")
    with pytest.raises(DataError, match="knows none of the users, such as 'zz'"):
        recommend_shards(predictor, tmp_path / "users.txt", tmp_path / "lists", RecommendRequest(k=2), How())
    assert [each.name for each in tmp_path.iterdir()] == ["users.txt"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_of_columns_alone_gives_its_columns_and_the_probability(
    predictor: Predictor, tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id\n")
    out = tmp_path / f"scored{suffix}"
    assert predict_file(predictor, tmp_path / "rows.csv", out).rows == 0
    if suffix == ".csv":
        assert out.read_text() == '"user_id","item_id","score"\n'
    else:
        assert pq.read_table(out).schema.names == ["user_id", "item_id", "score"]
    (tmp_path / "rows.csv").write_text("user_id,why\n")
    with pytest.raises(DataError, match="no column 'item_id'"):
        predict_file(predictor, tmp_path / "rows.csv", out)


def test_rows_that_were_scored_already_are_refused(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,score\nu1,100,0.5\n")
    with pytest.raises(DataError, match="has a column 'score' already; rename it, or name"):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv")


def test_of_raw_rows_the_columns_asked_for_are_written(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("why,user_id,item_id\na,u1,100\nb,u2,129\n")
    predict_file(predictor, tmp_path / "rows.csv", tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    for columns in (["item_id", "why"], ["why", "score", "why"], []):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "some.parquet", columns=columns)
        expected = [*dict.fromkeys(name for name in columns if name != "score"), "score"]
        assert pq.read_table(tmp_path / "some.parquet").equals(whole.select(expected))
    (tmp_path / "rows.csv").write_text("why, user_id, item_id\na,u1,100\nb,u2,129\n")
    predict_file(predictor, tmp_path / "rows.csv", tmp_path / "some.parquet", columns=["item_id"])
    assert pq.read_table(tmp_path / "some.parquet").equals(whole.select(["item_id", "score"]))
    message = (
        r"--columns: .*rows.csv: unknown columns 'user' \(did you mean 'user_id'\?\), 'x'; "
        r"known: 'why', 'user_id', 'item_id'$"
    )
    with pytest.raises(SettingsError, match=message):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "none.csv", columns=["user", "x", "why"])
    assert not (tmp_path / "none.csv").exists()


def test_a_failed_file_leaves_the_old_one(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,itemid\nu1,100\n")
    (tmp_path / "out.csv").write_text("from before")
    with pytest.raises(DataError):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "from before"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_split_comes_back_with_raw_ids_its_labels_and_the_probability_of_its_raw_rows(
    predictor: Predictor, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(answer_files, "ROWS", 7)  # in blocks
    spec = FeatureSpec.load(raw.parent / "data")
    stages: list[tuple[str, float, float | None]] = []
    out = tmp_path / f"scored{suffix}"
    done = predict_split(predictor, spec, "test", out, progress=lambda *step: stages.append(step))
    table = read(out)
    assert table.column_names == ["user_id", "item_id", "label", "score"]
    assert done.rows == table.num_rows == open_split(spec, "test").num_rows
    assert stages[-1] == ("predict", done.rows, done.rows)
    held = open_split(spec, "test", ["user_id", "item_id", "label"]).read(0, 2**62)
    assert table.column("user_id").to_pylist() == predictor.raw_ids("user", held["user_id"]).to_pylist()
    found = [str(item) for item in table.column("item_id").to_pylist()]  # a CSV file has no types
    assert found == predictor.raw_ids("item", held["item_id"]).to_pylist()
    np.testing.assert_array_equal(table.column("label").to_numpy(), held["label"])
    again, _ = predictor.predict(table.select(["user_id", "item_id"]))
    np.testing.assert_allclose(table.column("score").to_numpy(), again, rtol=1e-5)


def read(file: Path) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return pa_csv.read_csv(file) if file.suffix == ".csv" else pa_json.read_json(file)


def made_elsewhere(
    folder: Path, columns: dict[str, list[str]], text: str, **features: dict[str, object]
) -> FeatureSpec:
    """A dataset of CSV files that hold the same text, by split the names of its columns."""
    for split in columns:
        (folder / f"{split}.csv").write_text(text)
    chunks = {
        split: [{"type": "csv", "features": names, "files": [f"{split}.csv"]}] for split, names in columns.items()
    }
    channels = {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]}
    if "group" in features:
        channels["group"] = ["group"]
    ids = {"u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}}
    return FeatureSpec.from_dict(
        {"feature_spec": {**ids, **features}, "source_spec": chunks, "channel_spec": channels}, folder
    )


def test_a_split_without_labels_is_predicted_and_not_evaluated(bare: Predictor, tmp_path: Path) -> None:
    columns = {"train": ["u", "i", "y"], "valid": ["u", "i", "y"], "later": ["u", "i", "shown"]}
    spec = made_elsewhere(tmp_path, columns, "0,0,1\n7,5,0\n3,2,1\n", shown={"dtype": "int64"})
    predict_split(bare, spec, "later", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["u", "i", "probability"]
    assert table.column("u").to_pylist() == [0, 7, 3]
    splits = card.describe(spec).splits
    assert (splits["later"].label_mean, splits["train"].label_mean) == (None, pytest.approx(2 / 3))
    dataset_check.check(spec)
    with pytest.raises(SpecError, match=r"split 'later' does not hold the label 'y', so it has no metrics; `recspec p"):
        evaluate_model(bare.model, spec, "later")
    says = r"source_spec\.valid: no chunk holds the feature 'y' of the channel 'label_ch'"
    with pytest.raises(SpecError, match=says):
        made_elsewhere(tmp_path, {**columns, "valid": columns["later"]}, "0,0,1\n", shown={"dtype": "int64"})


def test_the_group_of_a_split_is_written(tmp_path: Path) -> None:
    columns = {"train": ["group", "u", "i", "y"]}
    spec = made_elsewhere(tmp_path, columns, "70,0,0,1\n70,1,1,0\n900,2,3,1\n", group={"dtype": "int64"})
    predict_split(trained_neumf(spec, tmp_path / "run"), spec, "train", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["group", "u", "i", "y", "probability"]
    assert table.column("group").to_pylist() == [70, 70, 900]


def test_a_feature_called_as_the_predictions_are_is_not_overwritten(tmp_path: Path) -> None:
    columns = {"train": ["u", "i", "probability", "y"]}
    spec = made_elsewhere(tmp_path, columns, "0,0,.5,1\n7,5,.25,0\n", probability={})
    model = trained_neumf(spec, tmp_path / "run")
    with pytest.raises(SettingsError, match="split 'train': holds a column 'probability', which is"):
        predict_split(model, spec, "train", tmp_path / "out.csv", columns=["u", "probability"])
    predict_split(model, spec, "train", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").column_names == ["u", "i", "y", "probability"]


def test_of_a_split_the_features_asked_for_are_written(predictor: Predictor, raw: Path, tmp_path: Path) -> None:
    spec = FeatureSpec.load(raw.parent / "data")
    predict_split(predictor, spec, "test", tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    predict_split(predictor, spec, "test", tmp_path / "some.parquet", columns=["kind", "user_id"])
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column_names == ["kind", "user_id", "score"]
    assert table.select(["user_id", "score"]).equals(whole.select(["user_id", "score"]))
    assert set(table.column("kind").to_pylist()) <= set("abc")
    with pytest.raises(SettingsError, match=r"--columns: .*, split 'test': unknown column 'title'; known: 'user_id', "):
        predict_split(predictor, spec, "test", tmp_path / "none.csv", columns=["title"])


def test_raw_rows_beside_the_splits_are_pointed_to(predictor: Predictor, raw: Path, tmp_path: Path) -> None:
    spec = FeatureSpec.load(raw.parent / "data")
    file = spec.folder / "clicks_test.parquet"
    pq.write_table(pa.table({"user_id": ["u1"], "item_id": [100]}), file)
    message = (
        rf"unknown split 'clicks_test'; known: .*; {file} is there: if it holds raw rows, `recspec predict RUN {file}`$"
    )
    try:
        with pytest.raises(SpecError, match=message):
            predict_split(predictor, spec, "clicks_test", tmp_path / "out.csv")
    finally:
        file.unlink()


def test_another_dataset_or_split_is_refused(predictor: Predictor, bare: Predictor, raw: Path, tmp_path: Path) -> None:
    spec = FeatureSpec.load(raw.parent / "data")
    with pytest.raises(SpecError, match="not the dataset that the model was trained on"):
        predict_split(bare, spec, "test", tmp_path / "out.csv")
    with pytest.raises(SpecError, match="unknown split 'tst'"):
        predict_split(predictor, spec, "tst", tmp_path / "out.csv")
    with pytest.raises(SettingsError, match=r"--out .*out.txt: expected a name that ends in .csv, .jsonl, .parquet"):
        predict_split(predictor, spec, "test", tmp_path / "out.txt")
    assert not list(tmp_path.iterdir())


# --- files of rows ----------------------------------------------------------------------------------------------------


def test_values_of_a_csv_file_are_text_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("n,x,flag,time,day,land\n007,.5,true,12:30,2020-01-02,NA\n8,1,false,13:00,,NA\n")
    (rows,) = read_rows(tmp_path / "rows.csv")
    assert rows.to_pylist() == [
        {"n": "007", "x": ".5", "flag": "true", "time": "12:30", "day": "2020-01-02", "land": "NA"},
        {"n": "8", "x": "1", "flag": "false", "time": "13:00", "day": None, "land": "NA"},
    ]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_name_of_two_columns_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        path.write_text("user,item,user\na,b,c\n")
    else:
        pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["user", "item", "user"]), path)
    with pytest.raises(DataError) as error:
        list(read_rows(path))
    assert str(error.value) == f"{path}: has more than one column 'user'; rename them"


def test_a_parquet_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": pa.array([b"\xff"]).view(pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: can't be read as parquet: .*Invalid UTF8"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_values_of_json_lines_keep_their_types_and_dates_stay_text(tmp_path: Path) -> None:
    text = '{"id": "007", "day": "2020-01-02", "x": 1}\n\n{"id": 7, "x": 0.5, "late": [1]}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    (rows,) = read_rows(tmp_path / "rows.jsonl")
    assert rows.to_pylist() == [
        {"id": "007", "day": "2020-01-02", "x": 1.0, "late": None},
        {"id": "7", "day": None, "x": 0.5, "late": [1]},
    ]


VALUES = [1, 2**53 + 1, 2**63, 0.5, "7", None, True, [1], ["a", 2], [], {"a": 1}, {"b": "t"}, [[1]], "absent"]


@pytest.mark.parametrize("first", VALUES)
def test_json_lines_have_the_columns_and_types_of_the_whole_file(
    first: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in VALUES:
        rows = [{"n": 0, **({} if value == "absent" else {"x": value})} for value in (first, first, second)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (whole,) = read_rows(tmp_path / "rows.jsonl")
        with monkeypatch.context() as patch:
            patch.setattr(answer_files, "ROWS", 1)
            blocks = list(read_rows(tmp_path / "rows.jsonl"))
        assert len(blocks) == 3
        assert pa.concat_tables(blocks).equals(whole), (first, second)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "line 2: is no JSON object"),
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2: is no JSON object"),
        ("rows.jsonl", b'{"a": "' + b"z" * (17 << 20), "line 1: is longer than 16,777,216 bytes"),
        ("rows.csv", b"a,b\n1,2\n3,4,5\n", "can't be read as csv"),
        ("rows.csv", b"a,b\n1," + b"z" * (4 << 20) + b"\n", "can't be read as csv"),
    ],
)
def test_rows_that_can_not_be_read_are_said(name: str, text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_columns_stand_between_the_marks_that_prepare_reads(mark: str, tmp_path: Path) -> None:
    rows = [["käufer", "preis"], ["1", "07" if mark == "," else "3.175,81"], ["2", "a b"]]
    (tmp_path / "rows.csv").write_text("".join(f"{mark.join(row)}\n" for row in rows), encoding="utf-8")
    (table,) = read_rows(tmp_path / "rows.csv")
    assert [table.column_names, *map(list, zip(*table.to_pydict().values(), strict=True))] == rows


def test_bytes_that_are_not_utf_8_are_said_with_what_to_do(tmp_path: Path) -> None:
    for text in ("käufer;n\na;1\n", "name;n\nkäufer;1\n"):
        (tmp_path / "rows.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"rows\.csv: can't be read as csv: .*; expected utf-8: convert the file"):
            list(read_rows(tmp_path / "rows.csv"))


def test_lists_are_one_text_in_csv(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "history": [["a", "b"], []], "number": [[1, 2], None]})
    with row_writer(tmp_path / "out.csv") as write:
        write(table)
    assert (tmp_path / "out.csv").read_text() == '"id","history","number"\n1,"a|b","1|2"\n2,"",\n'


def test_rows_with_decimal_commas_are_read_and_their_predictions_written_so(tmp_path: Path) -> None:
    rows = [(f"{place % 7},5", f"{place * 3 % 11}", place * 5 % 13 > 7) for place in range(80)]
    text = "preis;menge;kauf\n" + "".join(f"{price};{amount};{int(label)}\n" for price, amount, label in rows)
    (tmp_path / "rows.csv").write_text(text)
    made = recspec.prepare(tmp_path / "rows.csv", tmp_path / "data", label="kauf", decimal="comma", progress=False)
    assert made.prepared["changed"] == ["rows.csv: numbers with a decimal comma, read with a point: 'preis' (80)"]
    model = recspec.train("logistic_regression", made, tmp_path / "run", progress=False)
    new = "\n".join(line.rpartition(";")[0] for line in text.splitlines()) + "\n"
    (tmp_path / "rows.csv").write_text(new)
    model.predict(tmp_path / "rows.csv", out=tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == '"preis";"menge";"probability"'
    assert lines[1].startswith('"0,5";"0";"0,')
    numbers = [float(line.split(";")[-1].strip('"').replace(",", ".")) for line in lines[1:]]
    own = model.predict(pa.table({"preis": [p % 7 + 0.5 for p in range(80)], "menge": [p * 3 % 11 for p in range(80)]}))
    np.testing.assert_allclose(numbers, own["probability"], atol=1e-6)
    (tmp_path / "rows.csv").write_text("preis;menge\n1.5;2\n")
    with pytest.raises(DataError, match=r"column 'preis': row 1 is '1.5'; expected a decimal comma, as prepared"):
        model.predict(tmp_path / "rows.csv", out=tmp_path / "out.csv")


def test_objects_are_json_in_csv(tmp_path: Path) -> None:
    values = {"id": [1, 2], "where": [{"land": "é", "at": [1, 2]}, None], "seen": [[{"a": 1}], []]}
    with row_writer(tmp_path / "out.csv") as write:
        write(pa.table(values))
    (held,) = read_rows(tmp_path / "out.csv")
    assert [text and json.loads(text) for text in held.column("where").to_pylist()] == values["where"]
    assert [json.loads(text) for text in held.column("seen").to_pylist()] == values["seen"]


def test_a_header_that_is_not_utf_8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"us\x9d,item_id\nu,1\n")
    with pytest.raises(DataError, match=r"rows\.csv: can't be read as csv: 'utf-8' codec can't decode byte 0x9d"):
        list(read_rows(path))


def test_a_column_of_ever_new_kinds_of_values_is_refused(tmp_path: Path) -> None:
    """Each kind is a column of its own in the joined type, so their number needs a limit."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"a": {f"k{n}": 1}}) for n in range(200)))
    with pytest.raises(DataError, match=r"rows.jsonl: 'a' holds more than 100 kinds of values; give it one type"):
        list(read_rows(tmp_path / "rows.jsonl"))
