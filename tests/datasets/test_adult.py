"""UCI Adult."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from recspec.base.errors import DataError
from recspec.data.encoding.encoder_kinds import ScaleEncoder
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.hashing import cross, fingerprint64
from recspec.data.prepare import prepared
from recspec.data.storage import open_split
from recspec.data.storage.check import check
from recspec.datasets import DATASETS
from tests.dataset_cases import ADULT, Case, bytes_of, run, write_adult


def prepare_adult(raw: Path, out: Path, **settings: object) -> prepared.Prepared:
    return run(Case("adult", write_adult, settings), raw, out)


def test_adult_is_cut_into_train_and_valid_and_its_test_is_the_published_one(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "adult.zip", "w") as archive:
        for path in raw.iterdir():
            archive.write(path, path.name)
    result = prepare_adult(tmp_path / "adult.zip", tmp_path / "out", valid=0.25)
    prepare_adult(raw, tmp_path / "of folder", valid=0.25)
    assert bytes_of(tmp_path / "of folder") == bytes_of(tmp_path / "out")
    rows = result.summary["rows"]
    assert rows["train"] + rows["valid"] == 80  # type: ignore[index]
    assert 10 <= rows["valid"] <= 30  # type: ignore[index]
    assert rows["test"] == 4  # type: ignore[index]
    assert result.summary["positives"] == 42
    columns = open_split(result.spec, "test").read(0, 10**9)
    assert np.asarray(columns["label"]).tolist() == [0, 1, 1, 0]


def test_adult_features_are_those_worked_by_hand(tmp_path: Path) -> None:
    result = prepare_adult(write_adult(tmp_path / "raw"), tmp_path / "out", crosses=[["education", "age_bucket"]])
    columns = {name: np.asarray(column) for name, column in open_split(result.spec, "test").read(0, 10**9).items()}
    assert columns["occupation"].tolist() == [1, 2, 0, 3]  # Adm-clerical, Exec-managerial, missing, Sales
    assert columns["native_country"].tolist() == [1, 1, 0, 2]  # Canada, Canada, missing, Cuba
    assert columns["age_bucket"].tolist() == [5, 8, 4, 1]  # cut at 18, 25, 30, 35, 40, 45, 50, 55, 60 and 65
    assert columns["capital_gain_bucket"].tolist() == [2, 1, 3, 1]  # zero keeps a bucket to itself
    encoders = Encoders.load(tmp_path / "out")
    gain = encoders.encoders["capital_gain"]
    assert isinstance(gain, ScaleEncoder)
    expected = (np.log1p([2174, 0, 14084, 0]) - gain.mean) / gain.std
    assert columns["capital_gain"].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    parts = [fingerprint64(pa.array(["Bachelors", "HS-grad", "Masters", "11th"])), np.array([4, 7, 3, 0], np.uint64)]
    assert columns["education_x_age_bucket"].tolist() == (1 + cross(parts) % np.uint64(9_999)).tolist()
    raw = pa.table({"age": ["39", "52", "31", "17"], "education": ["Bachelors", "HS-grad", "Masters", "11th"]})
    served = encoders.encode(raw, ["education_x_age_bucket", "age_bucket", "age", "education"])
    assert {name: np.asarray(column).tolist() for name, column in served.items()} == {
        name: columns[name].tolist() for name in served
    }


def test_adult_is_fitted_on_train_alone(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    before = prepare_adult(raw, tmp_path / "a").spec
    with (raw / "adult.test").open("a") as file:
        file.write(ADULT[0].replace("State-gov", "Astronaut").replace("39,", "90,") + ".\n")
    after = prepare_adult(raw, tmp_path / "b").spec
    assert before.features == after.features
    assert np.asarray(open_split(after, "test", ["workclass"]).read(4, 5)["workclass"]).tolist() == [0]
    assert (tmp_path / "a" / "encoders.json").read_bytes() == (tmp_path / "b" / "encoders.json").read_bytes()


def test_adult_lines_that_are_malformed_are_named_all_at_once(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    bad = [ADULT[0].replace("39,", "thirty,"), "1, 2", ADULT[1].replace(">50K", "rich")]
    (raw / "adult.test").write_text("|1x3\n" + "\n".join([*bad, ADULT[2]]) + "\n")
    with pytest.raises(DataError) as caught:
        prepare_adult(raw, tmp_path / "out")
    assert caught.value.problems == (
        "adult.test: line 2 has age 'thirty'; expected a whole number",
        "adult.test: line 3 has 2 values; expected 15, between commas",
        "adult.test: line 4 has the label 'rich'; expected <=50K or >50K",
    )
    (raw / "adult.test").write_text("1, 2\n" * 50)
    with pytest.raises(DataError) as caught:
        prepare_adult(raw, tmp_path / "out")
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1] == "and perhaps more"


def test_adult_files_that_are_missing_are_named(tmp_path: Path) -> None:
    raw = write_adult(tmp_path / "raw")
    (raw / "adult.test").unlink()
    with pytest.raises(
        DataError, match=r"no 'adult\.test'; expected UCI's 'adult.data', 'adult.test', found 'adult.data'"
    ):
        prepare_adult(raw, tmp_path / "out")
    (tmp_path / "adult.zip").write_text("no zip")
    with pytest.raises(DataError, match=r"adult\.zip: not a zip file, or damaged .*; download it again"):
        prepare_adult(tmp_path / "adult.zip", tmp_path / "out")


@pytest.mark.parametrize(
    ("crosses", "message"),
    [
        ([["education", "ocupation"]], r"unknown feature to cross 'ocupation' \(did you mean 'occupation'\?\)"),
        ([["education", "education"]], r"the cross \['education', 'education'\] must be of two different features"),
        ([["education"]], r"the cross \['education'\] must be of two different features or more"),
        ([["race", "gender"], ["race", "gender"]], r"the cross \['race', 'gender'\] is named twice"),
    ],
)
def test_adult_crosses_that_can_not_be_are_explained(crosses: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DATASETS["adult"].Settings.model_validate({"crosses": crosses})


def test_the_whole_of_adult_is_prepared(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    result = prepare_adult(real_data("adult"), tmp_path / "out")
    assert result.summary["rows"] == {"train": 29_234, "valid": 3_327, "test": 16_281}
    assert result.summary["positives"] == 7_841 + 3_846
    check(result.spec)
