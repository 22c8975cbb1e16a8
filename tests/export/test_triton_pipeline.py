"""A pipeline in a Triton repository gives the items that the Predictor recommends.

The ensemble's configuration is read with Triton's own message types, and its steps are run one after the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxscript")
pytest.importorskip("tritonclient.grpc")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from recspec.bundle import folder as bundle
from recspec.export import ExportSettings, export
from recspec.export.triton_model import Best, Encoding, Finding, TritonPythonModel
from recspec.inference import Predictor, RecommendRequest, build_pipeline
from recspec.inference.merging import best
from tests.blas import flagging
from tests.film_runs import film_runs

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ease": {"l2": 5.0},
    "ials": {"factors": 4, "l2": 0.01},
    "wide_deep": {"hidden": (8,), "dropout": 0.0},
    "two_tower": {"dim": 4, "embedding_dim": 4},
}
QUICK = ExportSettings(format="triton", form="ranker", batch_sizes=(4,), seconds=0.0, threads=1, name="shop")
CANDIDATES = 8
WRONG = 1e-5


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores, vectors of users and vectors of features bring items of two kinds of three."""
    pytest.importorskip("implicit")
    folder = tmp_path_factory.mktemp("pipeline")
    film_runs(folder, SETTINGS)
    runs = [str(folder / "ease"), f"factors={folder / 'ials'}", str(folder / "two_tower")]
    build_pipeline(folder / "made", runs, folder / "wide_deep", candidates=CANDIDATES, filter="kind != 'a'")
    return folder / "made"


@pytest.fixture(scope="module")
def repository(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "repository"
    made = export(bundle.load(pipeline), folder, QUICK)
    assert made.description["triton"]["recommend"] == "shop_recommend"
    return folder


def configured(repository: Path, name: str) -> Any:
    """The configuration of a model, in Triton's own type."""
    return text_format.Parse((repository / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def computed(folder: Path, name: str, inputs: Mapping[str, Any], outputs: list[str]) -> Mapping[str, Any]:
    """What a model of the repository answers."""
    import onnxruntime

    if name.endswith("_request"):
        return Encoding.load(folder).outputs(inputs)
    if name.endswith("_candidates"):
        return Finding.load(folder).outputs(inputs)
    if name.endswith("_best"):
        return Best.load(folder).outputs(inputs)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return dict(zip(outputs, session.run(outputs, dict(inputs)), strict=True))


def recommended(repository: Path, **columns: bytes) -> dict[str, list[Any]]:
    """What the ensemble answers to a request."""
    whole = configured(repository, "shop_recommend")
    held: dict[str, Any] = {each.name: np.array([[columns[each.name]]], object) for each in whole.input}
    for step in whole.ensemble_scheduling.step:
        of = configured(repository, step.model_name)
        assert set(step.input_map) == {each.name for each in of.input}, step.model_name
        assert set(step.output_map) <= {each.name for each in of.output}, step.model_name
        given = {own: held[outer] for own, outer in step.input_map.items()}
        for each in of.input:
            assert [d for d in each.dims if d != -1 and d not in given[each.name].shape] == [], each.name
        made = computed(repository / step.model_name / "1", step.model_name, given, list(step.output_map))
        held |= {outer: made[own] for own, outer in step.output_map.items()}
    inside = held.keys() - {each.name for each in (*whole.input, *whole.output)}
    assert all(each.startswith("_") for each in inside), "no column has these names"
    return {each.name: held[each.name][:, 0].tolist() for each in whole.output}


@pytest.mark.slow
@pytest.mark.parametrize("user", ["u0", "u7", "u39"])
def test_a_request_gets_the_items_that_the_predictor_recommends(pipeline: Path, repository: Path, user: str) -> None:
    found = recommended(repository, user_id=user.encode())
    (expected,) = Predictor.open(pipeline, device="cpu").recommend(RecommendRequest(users=(user,), k=CANDIDATES))
    assert [each.decode() for each in found["item"]] == [str(each.item) for each in expected.items]
    np.testing.assert_allclose(found["logit"], [each.score for each in expected.items], atol=WRONG)
    by = [tuple(each.decode().split(",")) for each in found["retrieved_by"]]
    assert by == [each.retrieved_by for each in expected.items]
    assert all(0 < each < 1 for each in found["sigmoid"])


def test_no_candidate_has_an_event_of_the_user_in_any_split(pipeline: Path, repository: Path) -> None:
    """Scores of the retrievers are random here; the files hold who has seen what."""
    predictor, finding = Predictor.open(pipeline, device="cpu"), Finding.load(repository / "shop_candidates" / "1")
    widths = [
        (31 if name == "ease" else finding._arrays[f"vectors_{place}"].shape[1])
        for place, name in enumerate(("ease", "factors", "two_tower"))
    ]
    rng, events = np.random.default_rng(0), (pipeline.parent / "rows.csv").read_text().split()
    for user in ("u0", "u7", "u39"):
        (number,) = predictor.catalogues.user_ids([user])
        ids, _ = finding.candidates(int(number), [rng.random((1, each)) for each in widths])
        assert len(ids) == CANDIDATES
        found = {str(each) for each in predictor.raw_ids("item", ids).to_pylist()}
        assert not found & {line.split(",")[1] for line in events if line.startswith(f"{user},")}


def test_a_flag_that_a_product_sets_is_no_warning(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, load = recommended(repository, user_id=b"u0"), np.load
    monkeypatch.setattr(np, "load", lambda *given, **named: flagging(load(*given, **named)))
    assert recommended(repository, user_id=b"u0") == expected


def test_an_unknown_user_gets_what_features_and_popularity_bring(repository: Path) -> None:
    found = recommended(repository, user_id=b"nobody")
    assert len(found["item"]) == len(set(found["item"])) == CANDIDATES
    assert {name for each in found["retrieved_by"] for name in each.decode().split(",")} <= {"two_tower", "popularity"}


def test_the_files_need_numpy_alone(repository: Path) -> None:
    code = """
import sys
for name in ("pyarrow", "pydantic", "torch", "recspec"):
    sys.modules[name] = None
import model, numpy
numpy.__version__ = "1.26"  # the version that the server needs
served = model.TritonPythonModel()
served.initialize({"model_repository": "..", "model_version": "1"})
print(type(served.model).__name__)
"""
    for name, kind in (("shop_request", "Encoding"), ("shop_candidates", "Finding"), ("shop_best", "Best")):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=repository / name / "1", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, kind), done.stderr


@pytest.mark.parametrize("joins", [False, True])
def test_requests_that_wait_are_answered_together_or_alone(joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling:
        inputs, about, errors, joins_requests = ["x"], "doubling: ", ValueError, joins

        def outputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
            if (given["x"] < 0).any():
                raise ValueError("a number is negative")
            return {"y": 2 * given["x"]}

    backend = SimpleNamespace(
        get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: np.array(request[name])),
        Tensor=lambda name, values: (name, values.tolist()),
        TritonError=str,
        InferenceResponse=lambda output_tensors=None, error=None: error or dict(output_tensors),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    served = TritonPythonModel()
    served.model = Doubling()  # type: ignore[assignment]
    assert served.execute([{"x": [1, 2]}, {"x": [3]}]) == [{"y": [2, 4]}, {"y": [6]}]
    wrong = "doubling: a number is negative"
    assert served.execute([{"x": [1]}, {"x": [-1]}]) == [wrong if joins else {"y": [2]}, wrong]


def test_without_a_program_of_single_requests_there_is_no_ensemble(pipeline: Path, tmp_path: Path) -> None:
    rows = ExportSettings(format="triton", batch_sizes=(4,), seconds=0.0, threads=1, name="shop")
    told = export(bundle.load(pipeline), tmp_path / "repository", rows).description["triton"]
    assert told["recommend"] == "none: a pipeline needs a program that reads a request once; take --form ranker"
    assert sorted(each.name for each in (tmp_path / "repository").iterdir()) == ["shop", "shop_encode", "shop_raw"]


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0]), max_size=12), st.integers(1, 8), st.booleans())
def test_the_best_ids_are_those_of_a_full_sort(scores: list[float], count: int, ties: bool) -> None:
    order = sorted((place for place, score in enumerate(scores) if score > -np.inf), key=lambda at: (-scores[at], at))
    expected = order[:count]
    if not ties and len(order) > count:
        expected = [place for place in expected if scores[place] > scores[order[count]]]
    assert best(np.array(scores, np.float32), count, ties=ties).tolist() == expected
