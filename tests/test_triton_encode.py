"""The encoders that travel in a Triton repository give what `recspec.encoding` does, value by value."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recspec.encoding import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Vocabulary,
    VocabularyEncoder,
)
from recspec.errors import ExportError
from recspec.signature import Port, Signature
from recspec.triton_encode import Encoding
from recspec.triton_repository import Batching, raw_columns, write_raw

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
}
LENGTHS = {"tags": 2, "latest tags": 2, "hashed tags": 3}


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
        numeric = isinstance(ENCODERS[name], (NumberEncoder, ScaleEncoder))
        return Port(name, "float32" if numeric else "int64", LENGTHS.get(name, 1), "row", None, name in LENGTHS)

    return Signature("rows", tuple(port(name) for name in ENCODERS))


def test_every_encoder_gives_the_ids_and_numbers_that_prepare_gives(
    encoders: Encoders, signature: Signature, tmp_path: Path
) -> None:
    write_raw(tmp_path, "model", 1, signature, encoders, Batching())
    encoding = Encoding.load(tmp_path / "model_encode" / "1")
    columns = {
        "colour": np.array([[text.encode()] for text in TEXTS], object),
        "raw colour": np.array([[text.encode()] for text in TEXTS], object),
        "whole": np.array([[text.encode()] for text in WHOLE], object),
        "tags": np.array([[text.encode()] for text in LISTS], object),
        "number": np.array(NUMBERS)[:, None],
    }
    assert {each["name"] for each in encoding.columns} == set(columns)
    found = encoding.encode(columns)
    table = pa.table(
        {
            "colour": [text or None for text in TEXTS],
            "raw colour": TEXTS,
            "whole": WHOLE,
            "tags": LISTS,
            "number": [None if np.isnan(number) else number for number in NUMBERS],
        }
    )
    expected = encoders.encode(table)
    for name, column in expected.items():
        if isinstance(column, tuple):
            values, offsets = column
            rows = [list(values[start:stop]) for start, stop in pairwise(offsets)]
            assert [[each for each in row if each] for row in found[name].tolist()] == rows, name
        else:
            np.testing.assert_array_equal(found[name][:, 0], column, err_msg=name)


def test_the_files_of_the_repository_need_numpy_alone(encoders: Encoders, signature: Signature, tmp_path: Path) -> None:
    write_raw(tmp_path, "model", 1, signature, encoders, Batching())
    folder = tmp_path / "model_encode" / "1"
    code = """
import sys
for name in ("pyarrow", "pydantic", "torch", "recspec"):
    sys.modules[name] = None
import model, numpy, pathlib
made = model.Encoding.load(pathlib.Path(".")).encode({
    **{name: numpy.array([[b"red"]], object) for name in ("colour", "raw colour", "whole", "tags")},
    "number": numpy.array([[1.0]]),
})
print(made["colour"][0, 0], made["hashed"][0, 0])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = encoders.encode(pa.table({"colour": ["red"]}), ["colour", "hashed"])
    assert done.stdout.split() == [str(int(expected[name][0])) for name in ("colour", "hashed")]


def test_columns_are_texts_unless_every_reader_takes_numbers(encoders: Encoders, signature: Signature) -> None:
    found = {column.port.name: column.port.dtype for column in raw_columns(encoders, signature)}
    assert found == {
        "colour": "string",
        "raw colour": "string",
        "whole": "string",
        "tags": "string",
        "number": "float64",
    }


def test_encoders_of_imported_models_are_refused_by_name(encoders: Encoders) -> None:
    others: dict[str, Encoder] = {
        "hashed": HashEncoder(cardinality=50, whole=True),
        "spare": VocabularyEncoder(vocabulary="colour", buckets=2),
        "other": VocabularyEncoder(vocabulary="colour", otherwise=3),
        "cross": CrossEncoder(columns=("a", "b"), cardinality=100, whole=("b",), needs_all=True),
    }
    signature = Signature("rows", tuple(Port(name, "int32", 1, "request") for name in others))
    with pytest.raises(ExportError) as caught:
        raw_columns(Encoders(others, encoders.vocabularies), signature)
    assert len(caught.value.problems) == 5
    assert (
        "feature 'spare': the ensemble does not apply 'buckets' of its encoder; `recspec serve` answers raw rows"
        in caught.value.problems
    )
