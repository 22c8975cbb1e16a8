"""The encoders that travel in a Triton repository give what `recspec.data.encoding` does, value by value."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from recspec.base.errors import DataError, ExportError
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    ClockEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VectorEncoder,
    VocabularyEncoder,
)
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.raw_values import MISSING_NUMBERS
from recspec.data.encoding.text_vectors import fit_projection
from recspec.data.encoding.vocabulary import Vocabulary
from recspec.data.prepare import PrepareContext
from recspec.datasets import amazon
from recspec.export.triton_model import Encoding
from recspec.export.triton_repository import Batching, Beside, Staged, histories_beside, raw_columns
from recspec.feature_spec.signature import Port, Signature, signature_of
from recspec.inference.predictor import Predictor
from recspec.serving.model_folders import copy_version
from recspec.serving.opened_model import open_version
from recspec.serving.settings import RepositorySettings
from tests import made_up_amazon
from tests.closeness import assert_close
from tests.made_up_models import made_up_bundle
from tests.tf_import.test_wide_deep import IDS, ROWS, imported

TEXTS = ["red", "", " red ", "blue", "?", "x" * 70, "Ärger", "1", "none", "green"]
WHOLE = ["1", "2", " 42 ", "42.0", "4.5", "", "-7", "99999999999999999999", "x", "2"]
LISTS = ["a|b", "", "b||a|zz", "a", "zz", "a|a|a|b", "b", "|", "a|b|c", "c"]
NUMBERS = [1.5, np.nan, -3.0, 0.0, 100.0, 2.0, 7.0, 1e6, -0.5, 3.0]

ENCODERS: dict[str, Encoder] = {
    "colour": VocabularyEncoder(vocabulary="colour"),
    "stripped": VocabularyEncoder(vocabulary="colour", column="raw colour", strip=True, missing_values=("?",)),
    "whole": VocabularyEncoder(vocabulary="whole"),
    "hashed": HashEncoder(cardinality=50, column="colour"),
    "stripped hash": HashEncoder(cardinality=7, column="raw colour", strip=True, missing_values=("?", "none")),
    "tags": VocabularyEncoder(vocabulary="tags", separator="|", length=2),
    "latest tags": VocabularyEncoder(vocabulary="tags", column="tags", separator="|", length=2, keep="last"),
    "some colour": VocabularyEncoder(vocabulary="colour", column="colour", missing="red"),
    "hashed tags": HashEncoder(cardinality=20, column="tags", separator="|", length=3),
    "number": NumberEncoder(missing=2.0, log1p=True),
    "scaled": ScaleEncoder(mean=1.0, std=2.0, column="number", low=-1.0, high=50.0, outside=3.0),
    "logarithm": ScaleEncoder(mean=0.5, std=2.0, column="number", log_plus=1.0),
    "bucket": BucketEncoder(boundaries=(0.0, 2.0, 10.0), column="number"),
    "cross": CrossEncoder(columns=("colour", "number"), cardinality=100, boundaries={"number": (0.0, 2.0)}),
    "image": VectorEncoder(length=2, scale=0.5),
    "title": TextEncoder(projection="title", length=2, column="words", missing_values=("none",)).holding(
        fit_projection(["red chair", "blue chair", "Ärger im Büro"], 2)
    ),
}
IMAGES = [[at / 3, -at] if at != 4 else [np.nan, np.nan] for at in range(10)]
LENGTHS = {"tags": 2, "latest tags": 2, "hashed tags": 3, "image": 2, "title": 2}
WORDS = ["red chair", "", "none", "a chair", "BLUE", "büro ärger", "x", "12", "chairs", "red  red"]


@pytest.fixture(scope="module")
def encoders() -> Encoders:
    vocabularies = {
        "colour": Vocabulary.of(["red", "blue", "Ärger", "1"]),
        "whole": Vocabulary.of([1, 2, 42, -7]),
        "tags": Vocabulary.of(["a", "b", "c"]),
    }
    return Encoders(ENCODERS, vocabularies)


@pytest.fixture(scope="module")
def signature() -> Signature:
    def port(name: str) -> Port:
        numeric = isinstance(ENCODERS[name], (NumberEncoder, ScaleEncoder, VectorEncoder, TextEncoder))
        return Port(name, "float32" if numeric else "int64", LENGTHS.get(name, 1), "row", None, name in LENGTHS)

    return Signature("rows", tuple(port(name) for name in ENCODERS))


def test_every_encoder_gives_the_ids_and_numbers_that_prepare_gives(
    encoders: Encoders, signature: Signature, tmp_path: Path
) -> None:
    Staged(tmp_path, 1).write_raw("model", signature, encoders, Batching())
    encoding = Encoding.load(tmp_path / "model_encode" / "1")
    columns = {
        "colour": np.array([[text.encode()] for text in TEXTS], object),
        "raw colour": np.array([[text.encode()] for text in TEXTS], object),
        "whole": np.array([[text.encode()] for text in WHOLE], object),
        "tags": np.array([[text.encode()] for text in LISTS], object),
        "number": np.array(NUMBERS)[:, None],
        "image": np.array(IMAGES),
        "words": np.array([[text.encode()] for text in WORDS], object),
    }
    assert {each["name"] for each in encoding.columns} == set(columns)
    found = encoding.outputs(columns)
    table = pa.table(
        {
            "colour": [text or None for text in TEXTS],
            "raw colour": TEXTS,
            "whole": WHOLE,
            "tags": LISTS,
            "number": [None if np.isnan(number) else number for number in NUMBERS],
            "image": IMAGES,
            "words": WORDS,
        }
    )
    expected = encoders.encode(table)
    for name, column in expected.items():
        if isinstance(column, tuple):
            values, offsets = column
            if name in ("image", "title"):
                assert_close(found[name].ravel(), values, name)
                continue
            rows = [list(values[start:stop]) for start, stop in pairwise(offsets)]
            assert [[each for each in row if each] for row in found[name].tolist()] == rows, name
        else:
            assert_close(found[name][:, 0], column, name)


def test_the_files_of_the_repository_need_numpy_alone(encoders: Encoders, signature: Signature, tmp_path: Path) -> None:
    Staged(tmp_path, 1).write_raw("model", signature, encoders, Batching())
    folder = tmp_path / "model_encode" / "1"
    code = """
import sys
for name in ("pyarrow", "pydantic", "torch", "recspec"):
    sys.modules[name] = None
import model, numpy, pathlib
made = model.Encoding.load(pathlib.Path(".")).outputs({
    **{name: numpy.array([[b"red"]], object) for name in ("colour", "raw colour", "whole", "tags")},
    "number": numpy.array([[1.0]]), "image": numpy.array([[1.0, 2.0]]),
    "words": numpy.array([[b"red"]], object),
})
print(made["colour"][0, 0], made["hashed"][0, 0])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = encoders.encode(pa.table({"colour": ["red"]}), ["colour", "hashed"])
    assert done.stdout.split() == [str(int(expected[name][0])) for name in ("colour", "hashed")]


ODD = (
    "1;+1; .5 ;5.;1E5;-0;;1_000;１２;0x10;1e400;1e-400;nan;-NaN;inf;1e;.;--1;1,5;true;FALSE ;yes;N/A;\\N;\u20037;7\x00"
)


@pytest.mark.parametrize("text", [*ODD.split(";"), *MISSING_NUMBERS])
def test_a_text_is_the_same_number_here_as_where_prepare_reads_it_or_refused_in_both(text: str) -> None:
    number, whole = NumberEncoder(missing=-5.0), Vocabulary.of([0, 1, 7])
    encoders = Encoders({"number": number, "whole": VocabularyEncoder(vocabulary="whole")}, {"whole": whole})
    features = [
        {
            "name": name,
            "columns": [name],
            "width": 1,
            "dtype": "float64",
            "is_list": False,
            "encoder": encoder.model_dump(mode="json"),
        }
        for name, encoder in encoders.encoders.items()
    ]
    encoding = Encoding({"columns": [], "features": features}, {"whole": [0, 1, 7]})
    given = {"number": np.array([[0.0]]), "whole": np.array([[text.encode()]], object)}
    assert encoding.outputs(given)["whole"][0, 0] == whole.encode([text])[0]
    given = {"number": np.array([[text.encode()]], object), "whole": given["whole"]}
    try:
        ours = encoders.encode(pa.table({"number": [text]}), ["number"])["number"]
    except DataError as error:
        assert "row 1 is " in str(error)  # noqa: PT017
        with pytest.raises(ValueError, match=r"is no number; expected such as 1\.5|is infinite"):
            encoding.outputs(given)
        return
    assert encoding.outputs(given)["number"][0, 0] == ours[0]


def test_a_column_may_be_called_as_a_tensor_inside_the_ensemble_but_not_as_an_answer(tmp_path: Path) -> None:
    def written(column: str) -> str:
        encoders = Encoders({"colour": HashEncoder(cardinality=9, column=column)}, {})
        signature = Signature("rows", (Port("colour", "int64", 1, "row"),))
        Staged(tmp_path / column, 1).write_raw("model", signature, encoders, Batching())
        return (tmp_path / column / "model_raw" / "config.pbtxt").read_text()

    assert '{ key: "colour" value: "_feature.colour" }' in written("feature.colour")
    assert '{ key: "colour" value: "__feature.colour" }' in written("_feature.colour")
    for name in ("probability", "logit"):
        with pytest.raises(ExportError, match=f"^a column is called '{name}', as an answer of the ensemble; rename it"):
            written(name)
        assert not (tmp_path / name).exists()


def test_columns_are_texts_unless_every_reader_takes_numbers(encoders: Encoders, signature: Signature) -> None:
    found = {port.name: port.dtype for port in raw_columns(encoders, signature)}
    texts = dict.fromkeys(("colour", "raw colour", "whole", "tags", "words"), "string")
    assert found == {**texts, "number": "float64", "image": "float64"}


OF_TENSORFLOW: dict[str, Encoder] = {
    "whole hash": HashEncoder(cardinality=50, column="whole", whole=True, missing_values=("-7",)),
    "spare": VocabularyEncoder(vocabulary="colour", column="colour", buckets=3),
    "other": VocabularyEncoder(vocabulary="colour", column="colour", otherwise=3),
    "spare numbers": VocabularyEncoder(vocabulary="whole", column="whole", buckets=5),
    "cross": CrossEncoder(columns=("colour", "whole"), cardinality=100, whole=("whole",), needs_all=True),
    "buckets crossed": CrossEncoder(
        columns=("number", "colour"), cardinality=60, boundaries={"number": (0.0, 2.0)}, needs_all=True
    ),
    "no minus three": NumberEncoder(column="number", missing_values=("-3",), missing=9.0),
    "hour": ClockEncoder(column="at", part="hour"),
    "weekday": ClockEncoder(column="at", part="weekday"),
}
TIMES = ("2024-11-25 09:00", "1732525200", "", "2024-11-30T23:59:59Z", "1732525200000")


def test_ids_of_models_that_tensorflow_trained_are_those_that_the_predictor_gives(
    encoders: Encoders, tmp_path: Path
) -> None:
    theirs = Encoders(OF_TENSORFLOW, encoders.vocabularies)
    signature = Signature(
        "rows", tuple(Port(name, "float32" if "minus" in name else "int64", 1, "row") for name in OF_TENSORFLOW)
    )
    Staged(tmp_path, 1).write_raw("model", signature, theirs, Batching())
    times = [TIMES[place % len(TIMES)] for place in range(len(TEXTS))]
    texts = {"colour": TEXTS, "whole": WHOLE, "at": times}
    columns = {name: np.array([[text.encode()] for text in values], object) for name, values in texts.items()}
    found = Encoding.load(tmp_path / "model_encode" / "1").outputs({**columns, "number": np.array(NUMBERS)[:, None]})
    expected = theirs.encode(pa.table({**texts, "number": pa.array(NUMBERS, from_pandas=True)}))
    for name, column in expected.items():
        assert_close(found[name][:, 0], column, name)
    assert found["spare"].max() > 4  # beyond the vocabulary
    assert (found["cross"][[4, 5, 8], 0] == 0).all()  # no whole number
    assert found["cross"][1, 0] > 0  # but an empty text is a value


def test_what_tensorflow_trained_takes_raw_values_on_both_servers(tmp_path: Path) -> None:
    predictor = Predictor.open(imported(tmp_path).folder, device="cpu")
    assert predictor.encoders is not None
    signature = signature_of(predictor.spec, predictor.model.features(), "rows")
    Staged(tmp_path / "repository", 1).write_raw("model", signature, predictor.encoders, Batching())
    encoding = Encoding.load(tmp_path / "repository" / "model_encode" / "1")
    copy = copy_version(predictor.bundle.folder, tmp_path / "copy", verify=True)
    opened = open_version(copy, (), RepositorySettings())
    assert [{"name": port.name, "dtype": port.dtype} for port in opened.raw] == encoding.columns
    texts, columns = {}, {}
    for port in opened.raw:
        values = [row[port.name] for row in ROWS]
        if port.dtype == "string":
            texts[port.name] = ["" if value is None else str(value) for value in values]
            columns[port.name] = np.array(texts[port.name], object)[:, None]
        else:
            columns[port.name] = np.array(values, np.float64)[:, None]
    numbers = {name: values[:, 0] for name, values in columns.items() if name not in texts}
    expected, _ = predictor.encode(pa.table({**texts, **numbers}))
    theirs, ours = encoding.outputs(columns), opened.encode(columns, len(ROWS))
    for name, tensor in expected.items():
        np.testing.assert_allclose(theirs[name][:, 0], tensor, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(ours[name][:, 0], tensor, rtol=1e-6, err_msg=name)
    ids = {name: np.array([0 if each is None else each + 1 for each in found]) for name, found in IDS.items()}
    for name, found in ids.items():  # TensorFlow's, of all rows but the one of nulls
        np.testing.assert_array_equal(theirs[name][:3, 0], found[:3], err_msg=name)


# --- histories -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model that reads items, their categories and how long ago they were, of histories of at most three events."""
    folder = tmp_path_factory.mktemp("reviews")
    raw = made_up_amazon.write(folder / "raw", num_users=20, num_items=12, num_reviews=200)
    made = amazon.prepare(PrepareContext(raw, folder / "data"), amazon.Settings(min_reviews=3, history=3))
    return Predictor.open(made_up_bundle(folder / "sim", made.spec, "sim"), device="cpu")


@pytest.fixture(scope="module")
def of_reviews(reviews: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    folder, names = tmp_path_factory.mktemp("repository"), reviews.model.features()
    beside = histories_beside(reviews.spec, names)
    signature = signature_of(reviews.spec, names, "rows")
    assert reviews.encoders is not None
    Staged(folder, 1).write_raw("model", signature, reviews.encoders, Batching(), beside)
    return Encoding.load(folder / "model_encode" / "1")


HISTORIES = {
    "": "",
    "B000000001": "3",
    "B000000001|nobody sells this|B000000003": "9|7.5|0",
    "nobody sells this": "1",
    "B000000001|B000000002|B000000003|B000000004": "9|8|7|6",
}
"""Raw events, and how many days ago each was."""


def of_histories(gaps: list[str]) -> tuple[dict[str, NDArray[np.object_]], pa.Table]:
    rows = {
        "reviewerID": ["A000000001"] * len(HISTORIES),
        "asin": ["B000000002"] * len(HISTORIES),
        "category": ["", "kind 1.1", "nothing", "", ""],
        "history_asin": list(HISTORIES),
        "history_gap": gaps,
    }
    columns = {name: np.array([[text.encode()] for text in texts], object) for name, texts in rows.items()}
    return columns, pa.table({**rows, "category": [text or None for text in rows["category"]]})


def test_events_get_what_the_item_catalogue_knows_of_them_as_the_predictor_gives_it(
    reviews: Predictor, of_reviews: Encoding
) -> None:
    columns, table = of_histories(list(HISTORIES.values()))
    assert {each["name"] for each in of_reviews.columns} <= set(columns)
    found, (expected, _) = of_reviews.outputs(columns), reviews.encode(table)
    assert list(found) == list(expected) == list(reviews.model.features())
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.reshape(len(tensor), -1), rtol=1e-6, err_msg=name)
    assert (found["history_item_id"] != 0).sum(1).tolist() == [0, 1, 2, 0, 3]
    assert (found["history_category"] != 0).sum(1).tolist() == [0, 1, 2, 0, 3]
    np.testing.assert_allclose(found["history_gap"][2], np.log1p([9, 0, 0]), rtol=1e-6)
    np.testing.assert_allclose(found["history_gap"][4], np.log1p([8, 7, 6]), rtol=1e-6)


def test_numbers_beside_the_events_may_be_left_empty_but_not_in_part(reviews: Predictor, of_reviews: Encoding) -> None:
    columns, table = of_histories([""] * len(HISTORIES))
    expected, _ = reviews.encode(table.drop_columns(["history_gap"]))
    np.testing.assert_array_equal(of_reviews.outputs(columns)["history_gap"], expected["history_gap"])
    columns["history_gap"][2, 0] = b"1|2"
    with pytest.raises(ValueError, match="row 2 holds 0 numbers in 'history_gap' beside 1 items; expected one for"):
        of_reviews.outputs(columns)
    columns, _ = of_histories(["", "1e400", "1|2|3", "1", "1|2|3|4"])
    with pytest.raises(ValueError, match="row 1 is infinite; expected a finite number"):
        of_reviews.outputs(columns)
    empty = of_reviews.outputs({name: values[:0] for name, values in columns.items()})
    assert {values.shape[0] for values in empty.values()} == {0}


@pytest.mark.parametrize("gaps", [list(HISTORIES.values()), [""] * len(HISTORIES)])
def test_our_server_takes_the_same_columns_and_gives_the_same_features(
    gaps: list[str], reviews: Predictor, of_reviews: Encoding, tmp_path: Path
) -> None:
    copy = copy_version(reviews.bundle.folder, tmp_path / "copy", verify=True)
    opened = open_version(copy, (), RepositorySettings())
    columns, _ = of_histories(gaps)
    told = [{"name": port.name, "dtype": port.dtype} for port in opened.raw]
    assert told == of_reviews.columns
    texts = {port.name: np.array([[text.decode()] for (text,) in columns[port.name]], object) for port in opened.raw}
    found, expected = opened.encode(texts, len(gaps)), of_reviews.outputs(columns)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


def test_lists_without_a_separator_are_several_columns(encoders: Encoders, tmp_path: Path) -> None:
    """Events as columns, missing ones empty, and NaN for their numbers."""
    made: dict[str, Encoder] = {
        "items": VocabularyEncoder(vocabulary="colour", length=2, keep="last"),
        "gaps": NumberEncoder(length=2, keep="last"),
    }
    ports = (Port("items", "int64", 2, "row", 5, True), Port("gaps", "float32", 2, "row", None, True))
    signature, beside = Signature("rows", ports), {"gaps": Beside("items", None)}
    theirs = Encoders(made, encoders.vocabularies)
    Staged(tmp_path, 1).write_raw("model", signature, theirs, Batching(), beside)
    found = raw_columns(theirs, signature, beside)
    assert [(each.name, each.dtype, each.width) for each in found] == [("items", "string", -1), ("gaps", "float64", -1)]
    encoded = Encoding.load(tmp_path / "model_encode" / "1").outputs(
        {
            "items": np.array([[b"red", b"", b"blue", b"1"], [b"", b"red", b"?", b""]], object),
            "gaps": np.array([[4.0, 3.0, np.nan, 2.0], [np.nan, 1.0, 5.0, np.nan]]),
        }
    )
    assert encoded["items"].tolist() == [[2, 1], [3, 0]]  # 1, blue, red
    assert encoded["gaps"].tolist() == [[3.0, 2.0], [1.0, 0.0]]
    with pytest.raises(ExportError, match="'gaps': numbers of events, but no history of the items' own ids to stand"):
        raw_columns(theirs, signature)


def test_without_a_catalogue_a_history_has_no_raw_form(reviews: Predictor) -> None:
    spec = reviews.spec.replace(metadata={})
    beside = histories_beside(spec, reviews.model.features())
    assert set(beside) == {"history_gap"}
    assert reviews.encoders is not None
    with pytest.raises(ExportError, match="feature 'history_category' has no encoder"):
        raw_columns(reviews.encoders, signature_of(spec, reviews.model.features(), "rows"), beside)
