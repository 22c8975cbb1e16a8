"""Raw requests through an export: the Predictor's probabilities, whatever the request looks like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recspec.base.errors import BundleError, RequestError
from recspec.export.exported_ranker import ExportedRanker
from recspec.export.exporter import ExportSettings, export
from recspec.inference.predictor import Predictor
from tests.closeness import assert_close
from tests.inference.conftest import clicks, films, predictor, raw  # noqa: F401

pytest.importorskip("onnxruntime")


def exported(trained: Predictor, folder: Path, form: Any) -> ExportedRanker:
    export(trained.bundle, folder, ExportSettings(form=form, batch_sizes=(1,), seconds=0.0, threads=1))
    return ExportedRanker.open(str(trained.bundle.folder), str(folder), threads=1)


FORMS = ("ranker", pytest.param("rows", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=FORMS)
def ranker(
    request: pytest.FixtureRequest,
    films: Predictor,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> ExportedRanker:
    return exported(films, tmp_path_factory.mktemp("exports") / "films", request.param)


@pytest.fixture(scope="module", params=FORMS)
def clicks_ranker(
    request: pytest.FixtureRequest,
    clicks: Predictor,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> ExportedRanker:
    return exported(clicks, tmp_path_factory.mktemp("exports") / "clicks", request.param)


def expected(ranker: ExportedRanker, request: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    return ranker.predictor.predict(pa.Table.from_pylist([{**request, **row} for row in rows]))[0]


def raw_rows(trained: Predictor, rows: int) -> list[dict[str, Any]]:
    """Values of every raw column."""
    rng, made = np.random.default_rng(0), {}
    assert trained.encoders is not None
    for name in trained.model.features():
        encoder = trained.encoders.encoders[name]
        if getattr(encoder, "vocabulary", None):
            values = trained.encoders.vocabulary_of(name).values.to_pylist()
            texts = [str(values[place]) for place in rng.integers(0, len(values), rows)]
            made[name] = [[text, text] for text in texts] if encoder.length else texts  # type: ignore[union-attr]
        else:
            made[name] = rng.normal(size=rows).tolist()
    return [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
def test_lists_numbers_and_ids_give_the_predictors_probabilities(clicks_ranker: ExportedRanker, count: int) -> None:
    ranker = clicks_ranker
    items = set(ranker.predictor.spec.role("item"))
    rows = raw_rows(ranker.predictor, count)
    request = {name: value for name, value in rows[0].items() if name not in items}
    candidates = [{name: value for name, value in row.items() if name in items} for row in rows]
    found = ranker.probabilities(request, candidates)
    assert found.shape == (count,)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(ranker, request, candidates), atol=1e-6)
    columns = {name: [row[name] for row in candidates] for name in candidates[0]}
    assert_close(ranker.probabilities(request, columns), found)


@pytest.mark.parametrize("user", ["u3", "nobody", None])
def test_columns_that_a_catalogue_knows_may_be_left_out(ranker: ExportedRanker, user: str | None) -> None:
    full: list[dict[str, Any]] = [{"item_id": 100 + item, "kind": "abc"[item % 3]} for item in range(4)]
    bare_ids: list[dict[str, Any]] = [{"item_id": 100 + item} for item in range(4)]
    found = ranker.scores({"user_id": user}, full)
    np.testing.assert_allclose(found, expected(ranker, {"user_id": user}, full), atol=1e-5)
    np.testing.assert_allclose(ranker.scores({"user_id": user}, bare_ids), found, atol=1e-5)


def test_rows_that_differ_in_their_columns_are_read_too(ranker: ExportedRanker) -> None:
    candidates: list[dict[str, Any]] = [{"item_id": 101, "kind": "b"}, {"item_id": "102", "kind": None}]
    told: list[dict[str, Any]] = [{"item_id": "101", "kind": "b"}, {"item_id": "102", "kind": None}]
    found = ranker.scores({"user_id": "u1"}, candidates)
    np.testing.assert_allclose(found, expected(ranker, {"user_id": "u1"}, told), atol=1e-5)


def test_no_candidate_gives_nothing(ranker: ExportedRanker) -> None:
    assert ranker.scores({"user_id": "u1"}, []).shape == (0,)
    assert ranker.scores({"user_id": "u1"}, {"item_id": [], "kind": []}).shape == (0,)


def test_a_model_that_ranks_gives_no_probabilities(ranker: ExportedRanker) -> None:
    assert ranker.program.signature.outputs == ("sigmoid", "logit")
    with pytest.raises(BundleError, match="the model ranks and gives no probabilities; ask for scores"):
        ranker.probabilities({"user_id": "u1"}, [])


def test_a_missing_column_is_named(ranker: ExportedRanker) -> None:
    with pytest.raises(RequestError, match="item_id"):
        ranker.scores({"user_id": "u1"}, [{"kind": "a"}])


@pytest.mark.parametrize(
    ("request_", "candidates", "told"),
    [
        (None, [], "request: is null; expected an object"),
        ([1], [], "request: is of type list"),
        ({}, "u1", "candidates: is of type str; expected a list of objects, or columns"),
        ({}, None, "candidates: is null"),
        ({}, [7], "candidate 1 (candidates[0]) is of type int; expected an object of raw values, as {'item_id': ...}"),
        (
            {},
            {"item_id": 7},
            "candidates: expected columns of one length; found values by column: 'item_id': no column",
        ),
        ({}, {"item_id": [7], "kind": []}, "found values by column: 'item_id': 1, 'kind': 0"),
        ({"item_id": 3}, [{"item_id": 3}], "'item_id' is in the request; expected in the candidates"),
        ({}, [{"user_id": 3, "item_id": 3}], "'user_id' is in the candidates; expected in the request"),
    ],
)
def test_what_is_no_request_is_told(ranker: ExportedRanker, request_: Any, candidates: Any, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)):
        ranker.scores(request_, candidates)


def test_another_models_export_is_refused(ranker: ExportedRanker, clicks: Predictor) -> None:  # noqa: F811
    with pytest.raises(
        BundleError, match=r"only one of model and export reads .*; the export was made of another model"
    ):
        ExportedRanker(clicks, ranker.program)
