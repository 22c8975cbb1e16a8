"""Raw values in, raw values out: probabilities of rows, the best unseen items of users."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest
import torch

from recspec import card, predict
from recspec.datasets import DATASETS
from recspec.datasets.adult import LAYOUT
from recspec.encoding import UNKNOWN_ID
from recspec.errors import BundleError, DataError, SettingsError, SpecError
from recspec.evaluate import evaluate_model
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.predict import (
    Predictor,
    _row_writer,
    predict_file,
    predict_split,
    read_users,
    recommend_to_parquet,
)
from recspec.storage import open_split
from recspec.train import TrainSettings, train
from tests import made_up

SETTINGS = {"factors": 4, "layers": (8, 4), "dropout": 0.0}


def trained(spec: FeatureSpec, run: Path) -> Predictor:
    settings = TrainSettings(epochs=3, batch_size=500, learning_rate=0.01, tensorboard=False)
    train("neumf", spec, run, settings=settings, model_settings=MODELS["neumf"].Settings.model_validate(SETTINGS))
    return Predictor.open(run, device="cpu")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interactions of 40 users, named by text, with 30 items, numbered from 100, that have titles."""
    folder = tmp_path_factory.mktemp("predict") / "raw"
    folder.mkdir()
    made_up.write_films(folder, 40, "Item, number", kinds=True)
    return folder


@pytest.fixture(scope="module")
def predictor(raw: Path) -> Predictor:
    table = DATASETS["table"]
    settings = table.Settings(items="items.csv", item_features=("kind",), num_negatives=10)  # type: ignore[call-arg]
    table.prepare(raw / "rows.csv", raw.parent / "data", settings)
    return trained(FeatureSpec.load(raw.parent / "data"), raw.parent / "run")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Trained on files that recspec did not prepare: ids are themselves, 0 is a real user and a real item."""
    folder = tmp_path_factory.mktemp("bare")
    rows = [(user, (user + step) % 6) for user in range(8) for step in range(3)]
    (folder / "train.csv").write_text("".join(f"{user},{item},1\n" for user, item in rows))
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["u", "i", "y"], "files": ["train.csv"]}]},
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]},
        },
        folder,
    )
    return trained(spec, folder / "run")


def raw_seen(raw: Path, user: str) -> list[int]:
    lines = [line.split(",") for line in (raw / "rows.csv").read_text().splitlines()[1:]]
    return [int(item) for name, item, _ in lines if name == user]


# --- recommend -------------------------------------------------------------------------------------------------------


def test_a_known_user_gets_titled_unseen_items_best_first(predictor: Predictor, raw: Path) -> None:
    (answer,) = predictor.recommend(["u3"], k=5)
    assert (answer.user, answer.known, len(answer.items), answer.notes) == ("u3", True, 5, ())
    seen_in_training = raw_seen(raw, "u3")[:-1]
    assert not {item.item for item in answer.items} & set(seen_in_training)
    assert answer.items[0].title == f"Item, number {answer.items[0].item}"
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)


def test_the_scores_are_the_models_logits(predictor: Predictor) -> None:
    best = predictor.recommend(["u3"], k=1)[0].items[0]
    probability, _ = predictor.predict(pa.table({"user_id": ["u3"], "item_id": [best.item]}))
    assert probability[0] == pytest.approx(1 / (1 + np.exp(-best.score)), abs=1e-5)


def test_the_items_are_those_that_a_search_by_hand_finds(predictor: Predictor, raw: Path) -> None:
    items = list(range(100, 130))
    probability, _ = predictor.predict(pa.table({"user_id": ["u9"] * 30, "item_id": items}))
    unseen = [item for item in items if item not in raw_seen(raw, "u9")[:-1]]
    by_hand = [str(item) for item in sorted(unseen, key=lambda item: -probability[item - 100])[:4]]
    assert [item.item for item in predictor.recommend(["u9"], k=4)[0].items] == by_hand


def test_an_unknown_user_gets_the_most_popular_items_and_is_told(predictor: Predictor) -> None:
    known, answer = predictor.recommend(["u1", "nobody"], k=3)
    assert known.known
    assert (answer.user, answer.known) == ("nobody", False)
    assert answer.notes == ("unknown user: these are the 3 most popular items; score is the number of users",)
    counts = [item.score for item in answer.items]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == max(predictor.seen.counts.tolist())


def test_more_than_there_are_gives_all_that_are_left(predictor: Predictor) -> None:
    (answer,) = predictor.recommend(["u3"], k=1000)
    assert len(answer.items) == 30 - 11
    assert answer.notes == ("only 19 unseen items are left",)
    assert len(predictor.recommend(["u3"], k=1000, include_seen=True)[0].items) == 30


def test_equal_scores_are_ordered_by_id(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor.model, "score_items", lambda _, items: torch.zeros(1, len(items["item_id"])))
    items = [item.item for item in predictor.recommend(["u3"], k=6, include_seen=True)[0].items]
    assert items == ["100", "101", "102", "103", "104", "105"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_finite_numbers_are_told_and_not_left_out(
    value: float, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be finite and the scores not; such items were left out of the answer, all of them maybe."""
    width = len(predictor.items)
    monkeypatch.setattr(predictor.model, "score_items", lambda *_: torch.full((1, width), value))
    with pytest.raises(BundleError, match="the model gives no finite score for some items; train it again"):
        predictor.recommend(["u3"], k=3)


def test_no_user_gives_no_answer(predictor: Predictor) -> None:
    assert predictor.recommend([]) == []


def test_all_users_go_to_parquet_in_blocks_as_they_do_one_by_one(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "SCORES", 100)  # three users a block
    count, unknown = recommend_to_parquet(predictor, None, tmp_path / "all.parquet", k=3)
    table = pq.read_table(tmp_path / "all.parquet")
    assert (count, unknown) == (40, 0)
    assert table.column_names == ["user", "known", "rank", "item", "title", "score"]
    assert table.num_rows == 120
    for user in ("u0", "u17", "u39"):
        rows = [row for row in table.to_pylist() if row["user"] == user]
        (answer,) = predictor.recommend([user], k=3)
        assert [row["item"] for row in rows] == [item.item for item in answer.items]
        assert [row["title"] for row in rows] == [item.title for item in answer.items]
        assert [row["rank"] for row in rows] == [1, 2, 3]
        np.testing.assert_allclose([row["score"] for row in rows], [i.score for i in answer.items], atol=1e-5)


def test_unknown_users_in_a_file_get_popular_items(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("u1\n\nnobody\n")
    users = read_users(tmp_path / "users.txt")
    assert users == ["u1", "nobody"]
    assert recommend_to_parquet(predictor, users, tmp_path / "some.parquet", k=2) == (2, 1)
    rows = pq.read_table(tmp_path / "some.parquet").to_pylist()
    assert [(row["user"], row["known"]) for row in rows] == [
        ("u1", True), ("u1", True), ("nobody", False), ("nobody", False),
    ]  # fmt: skip
    recommend_to_parquet(predictor, [], tmp_path / "none.parquet", k=2)
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_ids_that_recspec_did_not_make_are_taken_as_they_are(bare: Predictor) -> None:
    (answer,) = bare.recommend([0], k=10)
    assert (answer.user, answer.known) == (0, True)
    assert sorted(item.item for item in answer.items) == [3, 4, 5]
    assert not bare.recommend([8], k=1)[0].known
    assert not bare.recommend(["who"], k=1)[0].known
    assert sorted({item.item for item in bare.recommend([99], k=10)[0].items}) == [0, 1, 2, 3, 4, 5]


def test_liked_items_and_the_busiest_user(predictor: Predictor, raw: Path) -> None:
    titles = predictor.liked("u3", k=4)
    assert len(titles) == 4
    assert {int(title.rsplit(" ", 1)[1]) for title in titles} <= set(raw_seen(raw, "u3"))
    assert str(predictor.busiest_user()).startswith("u")
    assert predictor.liked("nobody") == []


@pytest.mark.parametrize(("role", "lacks"), [("item", "user to recommend to"), ("user", "item to recommend")])
def test_a_model_without_users_or_items_says_to_predict(tmp_path: Path, role: str, lacks: str) -> None:
    (tmp_path / "train.csv").write_text("0,1\n1,0\n2,1\n" * 5)
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"who": {"cardinality": 3}, "y": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["who", "y"], "files": ["train.csv"]}]},
            "channel_spec": {role: ["who"], "label": ["y"]},
        },
        tmp_path,
    )
    wide_deep = MODELS["wide_deep"].Settings.model_validate({"hidden": (4,), "embedding_dim": 2})
    train("wide_deep", spec, tmp_path / "run", settings=TrainSettings(epochs=0), model_settings=wide_deep)
    model = Predictor.open(tmp_path / "run", device="cpu")
    message = rf"run/bundle: this model has no {lacks}; score rows with `recspec predict`$"
    with pytest.raises(BundleError, match=message):
        model.recommend([1])
    for users in (None, [1]):
        with pytest.raises(BundleError, match=message):
            recommend_to_parquet(model, users, tmp_path / "out.parquet")


# --- predict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_of_every_format_come_back_with_a_probability(predictor: Predictor, tmp_path: Path, suffix: str) -> None:
    rows = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        rows.write_text("user_id,item_id,why\nu1,100,a\nu2,129,b\n")
    elif suffix == ".jsonl":
        rows.write_text(
            '{"user_id": "u1", "item_id": 100, "why": "a"}\n{"user_id": "u2", "item_id": 129, "why": "b"}\n'
        )
    else:
        pq.write_table(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 129], "why": ["a", "b"]}), rows)
    out = tmp_path / f"scored{suffix}"
    found = predict_file(predictor, rows, out)
    assert (found.rows, found.gaps) == (2, {})
    if suffix == ".csv":
        header, first, second = out.read_text().splitlines()
        assert header == '"user_id","item_id","why","probability"'
        scored = [float(first.rsplit(",", 1)[1]), float(second.rsplit(",", 1)[1])]
    elif suffix == ".jsonl":
        scored = [json.loads(line)["probability"] for line in out.read_text().splitlines()]
    else:
        scored = pq.read_table(out)["probability"].to_pylist()
    expected, _ = predictor.predict(pa.table({"user_id": ["u1", "u2"], "item_id": [100, 129]}))
    np.testing.assert_allclose(scored, expected, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([rows.name, out.name])


ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Canada, <=50K
52, Private, 209642, HS-grad, 9, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 45, Canada, >50K
31, ?, 45781, Masters, 14, Never-married, ?, Not-in-family, White, Female, 14084, 0, 50, ?, >50K
?, Private, 338409, 11th, 7, Never-married, Sales, Own-child, Black, Female, 0, 1902, 20, Cuba, <=50K
"""


@pytest.fixture(scope="module")
def adult(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A census whose publisher marks missing values by ? and puts a blank after every comma."""
    folder = tmp_path_factory.mktemp("adult")
    (folder / "raw").mkdir()
    (folder / "raw" / "adult.data").write_text(ADULT * 20)
    (folder / "raw" / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.replace("K\n", "K.\n"))
    DATASETS["adult"].prepare(folder / "raw", folder / "data", DATASETS["adult"].Settings())
    wide_deep = MODELS["wide_deep"].Settings.model_validate({"hidden": (8,), "dropout": 0.0})
    settings = TrainSettings(epochs=2, batch_size=16, learning_rate=0.05, tensorboard=False)
    train("wide_deep", FeatureSpec.load(folder / "data"), folder / "run", settings=settings, model_settings=wide_deep)
    return Predictor.open(folder / "run", device="cpu")


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
    found, expected = (pq.read_table(tmp_path / name)["probability"].to_pylist()
                       for name in ("raw.out.parquet", "split.parquet"))  # fmt: skip
    assert found == expected
    assert len(set(found)) == 4


def test_values_of_a_csv_file_are_text_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("n,x,flag,time,day,land\n007,.5,true,12:30,2020-01-02,NA\n8,1,false,13:00,,NA\n")
    (rows,) = predict._read_rows(tmp_path / "rows.csv")
    assert rows.to_pylist() == [
        {"n": "007", "x": ".5", "flag": "true", "time": "12:30", "day": "2020-01-02", "land": "NA"},
        {"n": "8", "x": "1", "flag": "false", "time": "13:00", "day": None, "land": "NA"},
    ]


def test_values_of_json_lines_keep_their_types_and_dates_stay_text(tmp_path: Path) -> None:
    text = '{"id": "007", "day": "2020-01-02", "x": 1}\n\n{"id": 7, "x": 0.5, "late": [1]}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    (rows,) = predict._read_rows(tmp_path / "rows.jsonl")
    assert rows.to_pylist() == [
        {"id": "007", "day": "2020-01-02", "x": 1.0, "late": None}, {"id": "7", "day": None, "x": 0.5, "late": [1]}
    ]  # fmt: skip


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
        list(predict._read_rows(tmp_path / name))


@pytest.mark.parametrize("name", ["user_id=u1", "a[1]*?", "{b}", "it's", "-dash", "%20", "back\\slash", "new\nline"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_names_of_files_mean_nothing(predictor: Predictor, name: str, suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    rows = pa.table({"user_id": ["u1", "u2"], "item_id": ["100", "0100"]})
    with predict._row_writer(folder / f"{name}{suffix}") as write:
        write(rows)
    predict_file(predictor, folder / f"{name}{suffix}", folder / f"{name} out{suffix}")
    (scored,) = predict._read_rows(folder / f"{name} out{suffix}")
    assert scored.select(["user_id", "item_id"]).to_pylist() == rows.to_pylist()
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{name}{suffix}", f"{name} out{suffix}"])


def test_an_id_is_found_as_it_was_written_and_as_a_json_number(predictor: Predictor) -> None:
    texts, _ = predictor.predict(pa.table({"user_id": ["u1"], "item_id": ["107"]}))
    numbers, found = predictor.predict(pa.table({"user_id": ["u1"], "item_id": [107]}))
    assert texts.tolist() == numbers.tolist()
    assert not found.gaps
    _, found = predictor.predict(pa.table({"user_id": ["u1"], "item_id": ["0107"]}))
    assert found.gaps["item_id"].unknown == 1


def test_unknown_values_are_counted_and_scored_as_unknown(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id\nu1,100\nnobody,100\nnobody,7\n")
    found = predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv")
    assert found.notes() == [
        "of 3 rows 2 have an unknown user_id; 1 has an unknown item_id: they are scored with the id of unknown values"
    ]


def test_missing_values_are_noted_apart_from_unknown_ones(
    adult: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "ROWS", 2)  # counts are of all blocks
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


# --- histories -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequential(raw: Path) -> Predictor:
    """DIN on the same interactions, each row with the last five events before it."""
    table = DATASETS["table"]
    asked = {"items": "items.csv", "item_features": ("kind",), "num_negatives": 10, "history": 5,
             "negative_history": True}  # fmt: skip
    table.prepare(raw / "rows.csv", raw.parent / "past", table.Settings.model_validate(asked))
    settings = TrainSettings(epochs=1, batch_size=500, tensorboard=False)
    din = MODELS["din"].Settings.model_validate({"embedding_dim": 4, "hidden": (8,)})
    spec = FeatureSpec.load(raw.parent / "past")
    train("din", spec, raw.parent / "din", settings=settings, model_settings=din)
    return Predictor.open(raw.parent / "din", device="cpu")


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
    np.testing.assert_allclose(found, [row["probability"] for row in prepared], atol=1e-6)
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
        "1 of 2 rows has no history_item_id; an empty history is taken",
    ]


def test_a_user_is_recommended_what_the_model_makes_of_the_history(sequential: Predictor) -> None:
    best = sequential.recommend(["u3"], k=1)[0].items[0]
    probability, _ = sequential.predict(pa.table({"user_id": ["u3"], "item_id": [best.item]}))
    assert probability[0] == pytest.approx(1 / (1 + np.exp(-best.score)), abs=1e-5)
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


def test_rows_without_a_user_are_an_unknown_users_and_a_name_nearly_right_is_none(
    predictor: Predictor, sequential: Predictor, tmp_path: Path
) -> None:
    for model, empty in (
        (predictor, []),
        (sequential, ["1 of 1 row has no history_item_id; an empty history is taken"]),
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
    assert predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv").gaps["user_id"].missing == 2


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
    monkeypatch.setattr(predict, "ROWS", 2)  # counts are of all blocks
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


def test_rows_of_a_file_are_counted_through_its_blocks(
    adult: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dict(zip(LAYOUT, ADULT.splitlines()[0].split(", "), strict=False))
    pq.write_table(pa.Table.from_pylist([row, row, row, row, {**row, "age": "old"}]), tmp_path / "rows.parquet")
    for size in (2, 5):
        monkeypatch.setattr(predict, "ROWS", size)
        with pytest.raises(DataError, match=r"^raw rows: column 'age': row 5 is 'old'; expected a number$"):
            predict_file(adult, tmp_path / "rows.parquet", tmp_path / "out.csv")


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


def test_a_missing_column_is_named_with_the_nearest(predictor: Predictor) -> None:
    with pytest.raises(DataError, match=r"no column 'item_id' \(did you mean 'itemid'\?\)"):
        predictor.predict(pa.table({"user_id": ["u1"], "itemid": [100]}))


def test_no_row_gives_no_probability(predictor: Predictor) -> None:
    probability, found = predictor.predict(
        pa.table({"user_id": pa.array([], "string"), "item_id": pa.array([], "int64")})
    )
    assert len(probability) == 0
    assert found.rows == 0


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
        read_users(tmp_path / "none.txt")


def test_rows_that_were_scored_already_are_refused(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user_id,item_id,probability\nu1,100,0.5\n")
    with pytest.raises(DataError, match="has a column 'probability' already; rename or remove it"):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv")


def test_of_raw_rows_the_columns_asked_for_are_written(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("why,user_id,item_id\na,u1,100\nb,u2,129\n")
    predict_file(predictor, tmp_path / "rows.csv", tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    for columns in (["item_id", "why"], ["why", "probability", "why"], []):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "some.parquet", columns=columns)
        expected = [*dict.fromkeys(name for name in columns if name != "probability"), "probability"]
        assert pq.read_table(tmp_path / "some.parquet").equals(whole.select(expected))
    (tmp_path / "rows.csv").write_text("why, user_id, item_id\na,u1,100\nb,u2,129\n")
    predict_file(predictor, tmp_path / "rows.csv", tmp_path / "some.parquet", columns=["item_id"])
    assert pq.read_table(tmp_path / "some.parquet").equals(whole.select(["item_id", "probability"]))
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


def test_ids_out_of_range_are_named_where_ids_are_themselves(bare: Predictor) -> None:
    with pytest.raises(DataError) as caught:
        bare.predict(pa.table({"u": [0, 8], "i": [6, 1]}))
    assert "column 'u': row 2 is 8; expected an id in [0, 8)" in str(caught.value)
    assert "column 'i': row 1 is 6; expected an id in [0, 6)" in str(caught.value)


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
            "".join(f'{{"u": {u}, "i": {i}, "tags": {tags}}}\n'
                    for u, i, tags in zip(table["u"], table["i"], lists, strict=True))
        )  # fmt: skip
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


# --- a split of a prepared dataset ---


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_split_comes_back_with_raw_ids_its_labels_and_the_probability_of_its_raw_rows(
    predictor: Predictor, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(predict, "ROWS", 7)  # in blocks
    spec = FeatureSpec.load(raw.parent / "data")
    stages: list[tuple[str, float, float | None]] = []
    out = tmp_path / f"scored{suffix}"
    done = predict_split(predictor, spec, "test", out, progress=lambda *step: stages.append(step))
    table = read(out)
    assert table.column_names == ["user_id", "item_id", "label", "probability"]
    assert done.rows == table.num_rows == open_split(spec, "test").num_rows
    assert stages[-1] == ("predict", done.rows, done.rows)
    held = open_split(spec, "test", ["user_id", "item_id", "label"]).read(0, 2**62)
    assert table.column("user_id").to_pylist() == predictor.raw_ids("user", held["user_id"]).to_pylist()
    found = [str(item) for item in table.column("item_id").to_pylist()]  # a CSV file has no types
    assert found == predictor.raw_ids("item", held["item_id"]).to_pylist()
    np.testing.assert_array_equal(table.column("label").to_numpy(), held["label"])
    again, _ = predictor.predict(table.select(["user_id", "item_id"]))
    np.testing.assert_allclose(table.column("probability").to_numpy(), again, rtol=1e-5)


def read(file: Path) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return pa_csv.read_csv(file) if file.suffix == ".csv" else pa_json.read_json(file)


def test_a_split_without_labels_is_predicted_and_not_evaluated(bare: Predictor, tmp_path: Path) -> None:
    rows = {"train": ["u", "i", "y"], "valid": ["u", "i", "y"], "later": ["u", "i", "shown"]}
    for split in rows:
        (tmp_path / f"{split}.csv").write_text("0,0,1\n7,5,0\n3,2,1\n")
    given = {
        "feature_spec": {"u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}, "shown": {"dtype": "int64"}},
        "source_spec": {
            split: [{"type": "csv", "features": names, "files": [f"{split}.csv"]}] for split, names in rows.items()
        },
        "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]},
    }
    spec = FeatureSpec.from_dict(given, tmp_path)
    predict_split(bare, spec, "later", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["u", "i", "probability"]
    assert table.column("u").to_pylist() == [0, 7, 3]
    assert (card.describe(spec).splits["later"].label_mean, card.describe(spec).splits["train"].label_mean) == (
        None,
        pytest.approx(2 / 3),
    )
    card.check(spec)
    with pytest.raises(SpecError, match=r"split 'later' does not hold the label 'y', so it has no metrics; `recspec p"):
        evaluate_model(bare.model, spec, "later")
    given["source_spec"] |= {"valid": given["source_spec"]["later"]}
    with pytest.raises(
        SpecError, match=r"source_spec\.valid: no chunk holds the feature 'y' of the channel 'label_ch'"
    ):
        FeatureSpec.from_dict(given, tmp_path)


def test_the_group_of_a_split_is_written(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("70,0,0,1\n70,1,1,0\n900,2,3,1\n")
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"shown": {"dtype": "int64"}, "u": {"cardinality": 8}, "i": {"cardinality": 6}, "y": {}},
            "source_spec": {
                "train": [{"type": "csv", "features": ["shown", "u", "i", "y"], "files": ["train.csv"]}],
            },
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"], "group": ["shown"]},
        },
        tmp_path,
    )
    predict_split(trained(spec, tmp_path / "run"), spec, "train", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["shown", "u", "i", "y", "probability"]
    assert table.column("shown").to_pylist() == [70, 70, 900]


def test_of_a_split_the_features_asked_for_are_written(predictor: Predictor, raw: Path, tmp_path: Path) -> None:
    spec = FeatureSpec.load(raw.parent / "data")
    predict_split(predictor, spec, "test", tmp_path / "whole.parquet")
    whole = pq.read_table(tmp_path / "whole.parquet")
    predict_split(predictor, spec, "test", tmp_path / "some.parquet", columns=["kind", "user_id"])
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column_names == ["kind", "user_id", "probability"]
    assert table.select(["user_id", "probability"]).equals(whole.select(["user_id", "probability"]))
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


def test_lists_are_one_text_in_csv(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "history": [["a", "b"], []], "number": [[1, 2], None]})
    with _row_writer(tmp_path / "out.csv") as write:
        write(table)
    assert (tmp_path / "out.csv").read_text() == '"id","history","number"\n1,"a|b","1|2"\n2,"",\n'


def test_a_header_that_is_not_utf_8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"us\x9d,item_id\nu,1\n")
    with pytest.raises(DataError, match=r"rows\.csv: can't be read as csv: 'utf-8' codec can't decode byte 0x9d"):
        list(predict._read_rows(path))
