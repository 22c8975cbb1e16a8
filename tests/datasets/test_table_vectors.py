"""Vectors in your own table: lists of numbers of one size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base.errors import DataError, SettingsError
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import Prepared
from recspec.data.storage import Ragged, open_split
from recspec.data.storage.check import check
from tests.dataset_cases import Case, prepare_table, prepare_text, run, write_table

ROWS = [
    ("ann", "x", "[0.5, -1]"),
    ("ann", "y", ""),
    ("ann", "z", "[1, 2.5]"),
    ("bob", "x", "[2, 0.5]"),
    ("bob", "y", "[0.1, 0.2]"),
    ("cat", "z", "[3, 4.5]"),
]
TEXT = "user_id,item_id,mood\n" + "".join(f'{user},{item},"{mood}"\n' for user, item, mood in ROWS)
IMAGES = {"x": [3.0, 4.5, 0.0], "y": None, "z": [0.0, 0.0, 1.0]}


def write_items(folder: Path, kind: str) -> str:
    """The items' images as JSON lines, as Parquet, or as CSV."""
    name = f"items.{kind}"
    if kind == "parquet":
        images = pa.array(list(IMAGES.values()), pa.list_(pa.float32(), 3))
        pq.write_table(pa.table({"item_id": list(IMAGES), "image": images}), folder / name)
    elif kind == "jsonl":
        lines = [json.dumps({"item_id": item, "image": image}) + "\n" for item, image in IMAGES.items()]
        (folder / name).write_text("".join(lines))
    else:
        lines = [f'{item},"{image or ""}"\n' for item, image in IMAGES.items()]
        (folder / name).write_text("item_id,image\n" + "".join(lines))
    return name


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_lists_of_one_size_with_fractions_are_vectors_wherever_they_come_from(kind: str, tmp_path: Path) -> None:
    items = write_items(tmp_path, kind)
    given = {"items": items, "item_features": ["image"], "context_features": ["mood"]}
    made = prepare_text(tmp_path, TEXT, **given)
    image, mood = made.spec.features["image"], made.spec.features["mood"]
    assert (image.length, image.vector, mood.length, mood.vector) == (3, True, 2, True)
    notes = made.summary["inferred"]
    assert (
        "'image': vectors of 3 numbers, all scaled by one factor (lists=[image] takes their values as categories)"
        in notes
    )  # type: ignore[operator]
    changed = made.summary["changed"]
    assert "'image': 1 of 3 rows has no vector, such as row 2; zeros are taken" in changed  # type: ignore[operator]
    assert "'mood': 1 of 6 rows has no vector, such as row 2; zeros are taken" in changed  # type: ignore[operator]
    check(made.spec)
    catalogue = pq.read_table(tmp_path / "out" / "items.parquet")
    assert catalogue.column_names == ["item_id", "image"]
    scale = float(f"{(30.25 / 6) ** -0.5:.9g}")  # squares of (3, 4.5, 0) and (0, 0, 1) sum to 30.25 in six numbers
    held = np.array(catalogue.column("image").to_pylist())
    np.testing.assert_allclose(held, np.array([[3, 4.5, 0], [0, 0, 0], [0, 0, 1]]) * scale, rtol=1e-6)
    encoders = Encoders.load(tmp_path / "out")
    assert encoders.encoders["image"].scale == scale  # type: ignore[union-attr]
    train = open_split(made.spec, "train").read(0, 10)
    assert isinstance(train["mood"], Ragged)
    assert set(train["mood"].lengths) == {2}


def test_labelled_rows_bring_vectors_by_themselves_and_unknown_items_have_zeros(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(60, 2)).round(3)
    lines = [f'u{row % 7},{row % 5},"{numbers[row].tolist()}",{row % 2}\n' for row in range(60)]
    text = "user_id,item_id,mood,clicked\n" + "".join(lines)
    made = prepare_text(tmp_path, text)
    assert made.spec.role("context") == ("mood",)
    assert made.spec.features["mood"].is_vector
    train = open_split(made.spec, "train").read(0, 100)["mood"]
    assert isinstance(train, Ragged)
    np.testing.assert_allclose(np.mean(np.square(train.values)), 1.0, rtol=1e-5)  # fitted to train alone
    check(made.spec)


def test_items_that_the_file_lacks_have_vectors_of_zeros(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"item_id": "x", "image": [1.5, 2.0]}\n{"item_id": "z", "image": [1, 2]}\n')
    given = {"items": "items.jsonl", "item_features": ["image"], "split": "time", "unknown_targets": "keep"}
    text = "user_id,item_id,timestamp\n" + "".join(f"u{at % 3},{'xyz'[at % 3]},{at}\n" for at in range(18))
    made = prepare_text(tmp_path, text + "u0,new,99\nu1,new,100\n", **given)
    held = pq.read_table(tmp_path / "out" / "items.parquet").column("image").to_pylist()
    assert [any(row) for row in held] == [True, False, True]
    test = open_split(made.spec, "test").read(0, 100)
    assert isinstance(test["image"], Ragged)
    unknown = np.asarray(test["item_id"]) == 0
    assert unknown.any()
    assert not test["image"].values.reshape(-1, 2)[unknown].any()
    check(made.spec)


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("[1, 2, 3.5]", "row 2 holds 3 numbers; expected a vector of 2"),
        ("[1.5, inf]", "row 2 holds an infinite number in its vector; expected 2 finite numbers"),
        ("[1.5, nan]", "row 2 holds a missing value in its vector; expected 2 finite numbers"),
        ("[1.5, red]", "row 2 holds 'red' in its vector; expected a number"),
    ],
)
def test_a_row_with_no_such_vector_is_one_clear_error(cell: str, problem: str, tmp_path: Path) -> None:
    text = TEXT.replace('ann,y,""', f'ann,y,"{cell}"')
    with pytest.raises(DataError) as caught:
        prepare_text(tmp_path, text, context_features=["mood"])
    advice = "correct it, or take the values as categories with lists=[mood]"
    assert str(caught.value) == f"{tmp_path / 'a.csv'}, column 'mood': {problem}; {advice}"


def test_other_lists_stay_what_they_were(tmp_path: Path) -> None:
    rows = [{"user_id": "u", "item_id": str(at), "whole": [at, 2], "sizes": [0.5] * (at % 3 + 1)} for at in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prepare_table(tmp_path / "a.jsonl", tmp_path / "out", context_features=["whole", "sizes"])
    assert [made.spec.features[name].is_categorical for name in ("whole", "sizes")] == [True, True]
    made = prepare_table(tmp_path / "a.jsonl", tmp_path / "b", context_features=["whole"], vectors=["whole"])
    assert made.spec.features["whole"].is_vector
    with pytest.raises(DataError, match=r"column 'sizes': row [0-9] holds [0-9] numbers?; expected a vector of"):
        prepare_table(tmp_path / "a.jsonl", tmp_path / "c", context_features=["sizes"], vectors=["sizes"])


def test_texts_may_be_declared_vectors_without_brackets(tmp_path: Path) -> None:
    text = "user_id,item_id,mood\nann,x,1|2\nann,y,3 4\nann,z,5;6\nbob,x,\n"
    made = prepare_text(tmp_path, text, context_features=["mood"], vectors=["mood"])
    assert (made.spec.features["mood"].length, made.spec.features["mood"].vector) == (2, True)


def test_settings_that_do_not_fit_a_vector_are_named(tmp_path: Path) -> None:
    given = {"context_features": ["mood"], "vectors": ["mod"], "buckets": {"mood": 3}}
    with pytest.raises(SettingsError) as caught:
        prepare_text(tmp_path, TEXT, **given)
    assert list(caught.value.problems) == [
        "'mod' is set as numeric, categorical, list or vector, but is no feature (did you mean 'mood'?)",
        "feature 'mood' is a vector, so it can't be cut into buckets; leave it out",
    ]
    with pytest.raises(SettingsError, match="feature 'mood' is set as a vector and as something else; leave one"):
        prepare_text(tmp_path, out="b", context_features=["mood"], vectors=["mood"], lists=["mood"])
    pq.write_table(pa.table({"user_id": ["a"], "item_id": ["x"], "price": [3]}), tmp_path / "n.parquet")
    with pytest.raises(SettingsError, match="feature 'price' holds int64, not lists of numbers"):
        prepare_table(tmp_path / "n.parquet", tmp_path / "c", context_features=["price"], vectors=["price"])


# --- texts -----------------------------------------------------------------------------------------------------------


def prepare_texts(path: Path, out: Path, rows: str, **settings: object) -> Prepared:
    path.write_text(rows)
    return run(Case("table", write_table, {"num_negatives": 1, **settings}), path, out)


def test_texts_of_items_users_or_rows_become_vectors(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text('item_id,title\nx,red chair\ny,\nz,"red table, blue"\n')
    (tmp_path / "users.csv").write_text("user_id,about\nann,likes red\nbob,likes blue\n")
    text = "user_id,item_id,query\nann,x,a chair\nann,y,\nann,z,table\nbob,x,chair\nbob,y,red\ncat,z,a chair\n"
    given = {"items": "items.csv", "users": "users.csv", "text": ["title", "about", "query"], "text_dim": 2}
    made = prepare_texts(tmp_path / "a.csv", tmp_path / "out", text, **given)
    roles = {role: made.spec.role(role) for role in ("user", "item", "context")}  # type: ignore[arg-type]
    assert roles == {
        "user": ("user_id", "about_vector"),
        "item": ("item_id", "title_vector"),
        "context": ("query_vector",),
    }
    assert all(made.spec.features[f"{name}_vector"].is_vector for name in ("title", "about", "query"))
    check(made.spec)
    items = pq.read_table(tmp_path / "out" / "items.parquet")
    assert items.column("title").to_pylist() == ["red chair", None, "red table, blue"]  # still shown to people
    held = np.array(items.column("title_vector").to_pylist())
    assert [row.any() for row in held] == [True, False, True]
    again, _ = Encoders.load(tmp_path / "out").encode_column("title_vector", ["red chair", None, "red table, blue"])
    np.testing.assert_allclose(again.reshape(3, 2), held, atol=1e-6)


def test_a_text_of_labelled_rows_is_fitted_to_train_alone(tmp_path: Path) -> None:
    words = ("red", "blue", "chair", "table", "lamp")
    rows = [
        f"u{at % 7},{at % 5},{words[at % 5]} {words[at * 3 % 4]},{at % 2},{'train' if at < 40 else 'test'}\n"
        for at in range(60)
    ]
    text = "user_id,item_id,query,clicked,split\n" + "".join(rows)
    one = prepare_texts(tmp_path / "a.csv", tmp_path / "one", text, text=["query"], text_dim=3)
    assert "query_vector" in one.spec.features
    assert "query" not in one.spec.features
    spoilt = text.replace("u5,4,lamp red,0,test", "u5,4,zebra zebra,0,test")
    prepare_texts(tmp_path / "b.csv", tmp_path / "two", spoilt, text=["query"], text_dim=3)
    file = Path("vocabularies", "query_vector.parquet")
    assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_columns_that_hold_no_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        prepare_texts(tmp_path / "a.csv", tmp_path / "out", TEXT, text=["tittle", "mood"], lists=["mood"])
    assert list(caught.value.problems) == [
        "feature 'mood' is in `text` and in 'lists'; leave it in one",
        "setting 'text': unknown column 'tittle'; known: 'item_id', 'mood', 'user_id'",
    ]
