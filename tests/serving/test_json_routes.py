"""Questions over HTTP: the bundle's answers, refusals that name the field, documents that hold, and no server error."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.feature_spec import FeatureSpec
from recspec.inference import requests as answers
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.models import LogisticRegression
from recspec.serving.json_routes import OPERATIONS
from recspec.serving.pages import docs_page, document
from recspec.serving.repository import Repository
from recspec.serving.server import ROUTES
from recspec.serving.settings import Limits
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests.asking import Answer, Asked, ask, asking, fits, sources
from tests.made_up_models import films_and_clicks

jsonschema = pytest.importorskip("jsonschema")

LIMITS = Limits(max_rows=50, max_body_mb=200_000 / 2**20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that recommends films to users named by text, and one that scores clicks."""
    return films_and_clicks(tmp_path_factory.mktemp("runs"), "<b>Item</b>")


@pytest.fixture(scope="module")
def films(runs: dict[str, Path]) -> Iterator[Asked]:
    with asking(sources(films=runs["films"]), limits=LIMITS) as asked:
        yield asked


@pytest.fixture(scope="module")
def both(runs: dict[str, Path]) -> Iterator[Asked]:
    with asking(sources(**runs), limits=LIMITS) as asked:
        yield asked


@pytest.fixture(scope="module")
def predictor(runs: dict[str, Path]) -> Predictor:
    return Predictor.open(runs["films"], device="cpu")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_recommend_answers_with_the_bundles_items(films: Asked, predictor: Predictor) -> None:
    answer = films("POST", "/recommend", {"user": "u3", "k": 4, "liked": 2})
    assert answer.status == 200
    fits(answer.data, "Recommendation")
    by_hand = answers.recommend(predictor, RecommendRequest(users=("u3",), k=4), liked=2)
    assert {name: answer.data[name] for name in by_hand} == by_hand
    assert (answer.data["model"], answer.data["version"]) == ("films", "1")


def test_an_unknown_user_is_flagged(films: Asked) -> None:
    answer = films("POST", "/recommend", {"user": 10**18})
    assert answer.data["unknown_user"]
    assert answer.data["notes"][0].startswith("unknown user: these are the 10 most popular items")
    fits(answer.data, "Recommendation")


def test_rank_takes_the_user_in_short_or_as_a_column(films: Asked, predictor: Predictor) -> None:
    short = films("POST", "/rank", {"user": "u3", "candidates": [105, 100, 7], "top_k": 2}).data
    whole = films("POST", "/rank", {"request": {"user_id": "u3"}, "candidates": [105, 100, 7], "top_k": 2}).data
    by_hand = answers.rank(predictor, {"user_id": "u3"}, [105, 100, 7], top_k=2)
    for data in (short, whole):
        fits(data, "Ranking")
        assert data["items"] == list(by_hand.to_dict()["items"])
        assert all("probability" not in each for each in data["items"])
        assert data["unknown_items"] == [7]
        assert not data["unknown_user"]


def test_an_id_is_the_same_in_every_spelling_and_of_any_size(films: Asked) -> None:
    spelled = (
        b'{"user": "u3", "candidates": [{"item_id": 105}, {"item_id": 105.0}, {"item_id": "105"}, {"item_id": %d}]}'
    )
    ranked = films("POST", "/rank", spelled % 2**100).data
    assert len({each["score"] for each in ranked["items"] if each["item"] != str(2**100)}) == 1
    assert ranked["unknown_items"] == [str(2**100)]
    ids = films("POST", "/rank", b'{"user": "u3", "candidates": [105, 105.0, "105", %d]}' % 2**100).data
    assert (ids["items"], ids["unknown_items"]) == (ranked["items"], [str(2**100)])
    found = [films("POST", "/similar", b'{"item": %s}' % each).data["items"] for each in (b"105", b"105.0", b'"105"')]
    assert found[0] == found[1] == found[2]
    for user in (2**63, 2**64 - 1, 2**64, 2**127, -(2**100)):
        data = films("POST", "/recommend", {"user": user, "exclude": [user]}).data
        assert (str(data["user"]), data["unknown_user"]) == (str(user), True)
        fits(data, "Recommendation")
    rows = b'{"rows": [{"user_id": "u3", "item_id": 105}, {"user_id": %d, "item_id": 105.0}]}' % 2**90
    assert films("POST", "/predict", rows).data["gaps"]["user_id"] == {"missing": 0, "unknown": 1}


def test_predict_answers_with_the_bundles_scores(both: Asked, runs: dict[str, Path]) -> None:
    rows = [{"user_id": "u3", "item_id": 105}, {"user_id": "u4", "item_id": None}]
    data = both("POST", "/predict", {"model": "films", "rows": rows}).data
    fits(data, "RowScores")
    by_hand, _ = Predictor.open(runs["films"], device="cpu").predict(
        pa.table({"user_id": ["u3", "u4"], "item_id": pa.array([105, None])})
    )
    assert np.float32(data["scores"]).tolist() == by_hand.tolist()
    assert data["gaps"] == {"item_id": {"missing": 1, "unknown": 0}}
    assert both("POST", "/predict", {"model": "films", "rows": []}).data["scores"] == []


def test_predict_explains_rows_of_a_model_that_can(runs: dict[str, Path], tmp_path: Path) -> None:
    spec = FeatureSpec.load(runs["clicks"].parent / "clicks")
    own = LogisticRegression.Settings()
    train("logistic_regression", spec, tmp_path / "run", settings=TrainSettings(), model_settings=own)
    lists = {name for name in spec.inputs() if spec.features[name].is_list}
    row = {name: [1] if name in lists else 1 for name in spec.inputs()}
    with asking(sources(sums=tmp_path / "run", clicks=runs["clicks"])) as asked:
        data = asked("POST", "/predict", {"model": "sums", "rows": [row, row], "explain": True}).data
        refused = asked("POST", "/predict", {"model": "clicks", "rows": [row], "explain": True})
    fits(data, "RowScores")
    first, second = data["explanations"]
    assert first == second
    assert set(first["contributions"]) == set(spec.inputs())
    log_odds = first["base"] + sum(first["contributions"].values())
    assert first["log_odds"] == pytest.approx(log_odds)
    assert data["probabilities"][0] == pytest.approx(1 / (1 + np.exp(-log_odds)), abs=1e-6)
    assert refused.status == 400
    assert "wide_deep does not tell what each column contributes" in str(refused.data)


def test_models_say_what_they_can_be_asked(both: Asked) -> None:
    data = both("GET", "/models").data
    fits(data, "Models")
    told = {each["name"]: (each["kind"], each["recommends"], each["ranks"], each["raw"]) for each in data["models"]}
    assert told == {"films": ("neumf", True, True, True), "clicks": ("wide_deep", False, True, True)}
    assert [each["name"] for each in data["models"][0]["columns"]] == ["user_id", "item_id"]


def test_metrics_count_what_was_asked(films: Asked) -> None:
    for body in ({"user": "u1", "model": "films"}, {"user": "u1", "model": "x" * 90}, {"user": {}, "model": "films"}):
        films("POST", "/recommend", body)
    films("GET", "/users?model=films")
    answer = films("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    for route, model, status in (
        ("recommend", "films", 200),
        ("recommend", "-", 400),
        ("recommend", "-", 404),
        ("users", "films", 200),
    ):
        labels = f'model="{model}",protocol="http",route="{route}",status="{status}"'
        counted = re.search(rf"recspec_requests_total{{{labels}}} (\d+)", text)
        assert counted is not None, labels
        assert int(counted[1]) >= 1
    assert "xxx" not in text  # what a client makes up is no label


# --- refusals --------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[int, str, object, str]] = {
    "no field": (400, "/predict", {}, "rows: field required"),
    "a name nearly right": (400, "/recommend", {"user": 1, "kk": 3}, "kk: extra inputs are not permitted; found 3"),
    "a text for a number": (400, "/recommend", {"user": 1, "k": "3"}, 'k: input should be a valid integer; found "3"'),
    "a number too large": (400, "/recommend", {"user": 1, "k": 10**6}, "k: input should be less than or equal to 1"),
    "a user that is none": (400, "/recommend", {"user": [1]}, "user: input should be a valid string; found a list"),
    "a user without end": (400, "/recommend", {"user": "9" * 1001}, "user: string should have at most 1000 characters"),
    "no object": (400, "/predict", [1], "expected a JSON object"),
    "a row that is none": (400, "/predict", {"rows": [{}, 1]}, "row 2 (rows[1]): input should be a valid"),
    "a value that is none": (400, "/predict", {"rows": [{"user_id": {"a": 1}}]}, "row 1 (rows[0].user_id) is an"),
    "a column that is missing": (400, "/predict", {"rows": [{"user": 1}]}, "rows: 2 problems"),
    "a candidate that is none": (400, "/rank", {"user": 1, "candidates": [1, None]}, "candidate 2 (candidates[1]): "),
    "ids and rows": (400, "/rank", {"user": 1, "candidates": [1, {}]}, "(candidates[1]): expected an id as those"),
    "the user twice": (400, "/rank", {"user": 1, "request": {"user_id": 1}, "candidates": []}, "give one of them"),
    "not a number": (400, "/predict", b'{"rows": [{"user_id": NaN}]}', "is not JSON"),
    "a whole float that may be another": (400, "/recommend", b'{"user": 9007199254740993.0}', "user: input should be"),
    # "nested too deeply" or "expected a JSON object", by how deep this Python recurses
    "as deep as JSON may be": (400, "/predict", b"[" * 1023 + b"]" * 1023, ""),
    "that deep in a row": (
        400,
        "/predict",
        b'{"rows":[{"user_id":' + b"[" * 1020 + b"]" * 1020 + b"}]}",
        "rows[0].user_id) holds",
    ),
    "deeper lists": (400, "/predict", b"[" * 9000 + b"]" * 9000, "is not JSON"),
    "half a surrogate": (400, "/recommend", b'{"user": "\\ud800"}', "is not JSON"),
    "too many rows": (413, "/predict", {"rows": [{}] * 51}, "the request has 51 rows; at most 50 are taken"),
    "too many candidates": (413, "/rank", {"user": 1, "candidates": [1] * 51}, "the request has 51 rows"),
    "too many bytes": (413, "/predict", b" " * 200_001, "larger than the 200000 bytes taken"),
    "an unknown model": (404, "/recommend", {"user": 1, "model": "film"}, "no model 'film' (did you mean 'films'?)"),
    "an unknown version": (404, "/recommend", {"user": 1, "version": "7"}, "model 'films' has no version '7'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_and_named(films: Asked, case: str) -> None:
    status, path, body, message = WRONG[case]
    answer = films("POST", path, body)
    assert (answer.status, message in answer.data["error"]) == (status, True), answer.data
    fits(answer.data, "Refusal")
    assert len(answer.body) < 2000


@pytest.mark.parametrize(
    ("method", "target", "status", "message"),
    [
        ("GET", "/recommend", 405, "GET is not answered here"),
        ("POST", "/users", 405, "POST is not answered here"),
        ("GET", "/nothing", 404, "no route '/nothing'"),
        ("GET", "/users?limit=0", 400, 'limit: input should be greater than or equal to 1; found "0"'),
        ("GET", "/users?limit=1000", 400, 'limit: input should be less than or equal to 100; found "1000"'),
        ("GET", "/items?limit=%C2%B2", 400, "limit: input should be a valid integer"),
        ("GET", "/users?query=" + "a" * 201, 400, "query: string should have at most 200 characters"),
        ("GET", "/users?model=no", 404, "no model 'no'"),
    ],
)
def test_addresses_that_are_wrong_are_refused(
    films: Asked, method: str, target: str, status: int, message: str
) -> None:
    answer = films(method, target)
    assert (answer.status, message in answer.data["error"]) == (status, True), answer.data


def test_of_several_models_one_must_be_named(both: Asked) -> None:
    answer = both("POST", "/recommend", {"user": 1})
    assert (answer.status, answer.data["error"]) == (400, "model: expected the name of one; known: 'films', 'clicks'")
    answer = both("POST", "/recommend", {"user": 1, "model": "clicks"})
    assert answer.status == 400
    assert "the model reads 'hour', 'speed', which differ from request to request" in answer.data["error"]


def test_a_named_model_is_found_without_a_list_of_all(both: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    # A server of a thousand models listed them for every request: 3.5 ms.
    monkeypatch.setattr("recspec.serving.json_routes._names", lambda _: pytest.fail("listed"))
    assert both("POST", "/recommend", {"user": 1, "model": "films"}).status == 200


def test_a_form_of_another_page_is_not_read(films: Asked) -> None:
    assert films("POST", "/recommend", {"user": 1}, content_type="text/plain").status == 415
    assert films("POST", "/recommend", {"user": 1}, origin="http://elsewhere").status == 403
    assert films("POST", "/recommend", {"user": 1}, origin="http://localhost").status == 200


def test_a_token_is_asked_of_everything_but_the_pages(runs: dict[str, Path]) -> None:
    with asking(sources(films=runs["films"]), token="secret") as asked:
        for path in ("/models", "/metrics", "/users"):
            assert asked("GET", path).status == 401
            assert asked("GET", path, authorization="Bearer secret").status == 200
        assert asked("POST", "/recommend", {"user": 1}, authorization="Bearer wrong").status == 401
        for path in ("/", "/docs", "/openapi.json"):
            assert asked("GET", path).status == 200


# --- documents -------------------------------------------------------------------------------------------------------


def test_the_openapi_document_names_every_route_and_only_those(films: Asked) -> None:
    said = films("GET", "/openapi.json").data
    there = {
        (route.path, method.lower())
        for routes in ROUTES
        for route in routes(films.repository)
        for method in (route.methods or ())
        if method != "HEAD" and not route.path.startswith("/v2")
    }
    assert {(path, method) for path, methods in said["paths"].items() for method in methods} == there
    assert said["openapi"] == "3.1.0"
    jsonschema.Draft202012Validator.check_schema({"$defs": said["components"]["schemas"]})


def test_every_reference_of_the_document_leads_somewhere() -> None:
    said = document()
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(said))):
        found: Any = said
        for part in reference.split("/"):
            assert part in found, reference
            found = found[part]


EXAMPLES = {each.path: each.request.example for each in OPERATIONS if each.request and each.method == "POST"}


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_what_the_document_says(path: str) -> None:
    said = document()
    name = said["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fits(dict(EXAMPLES[path]), name.rpartition("/")[2])


def test_the_documents_page_shows_every_route_and_loads_nothing(films: Asked) -> None:
    page = films("GET", "/docs")
    text = page.body.decode()
    assert text == docs_page()
    for path in document()["paths"]:
        assert f"{path}</code></h2>" in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="?https?:', text)
    assert "default-src 'none'; script-src 'none'" in page.headers["content-security-policy"]


# --- whatever comes --------------------------------------------------------------------------------------------------

VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
KNOWN = st.sampled_from(["u1", "u3", "nobody", 105, 100, 7, "105", "", 1.0, 105.0, True, None, 2**63, [1], ["a"], []])
COLUMNS = st.sampled_from(["user_id", "item_id", "label", "", " item_id", "kind", "context_id", "price", "tags", "x"])
ROWS = st.dictionaries(COLUMNS, KNOWN | VALUES, max_size=5)
MODEL = st.sampled_from(["films", "clicks", "films_raw", "no", ""]) | VALUES
FIELDS: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "model": (st.sampled_from(["films", "clicks"]), MODEL),
    "version": (st.sampled_from(["1", None]), VALUES),
    "user": (st.sampled_from(["u1", "nobody", 105]), KNOWN | VALUES),
    "request": (st.just({}) | st.just({"user_id": "u1"}), ROWS | JSON),
    "candidates": (st.lists(st.sampled_from([105, 100, 7]), max_size=4), st.lists(KNOWN) | st.lists(ROWS) | JSON),
    "top_k": (st.integers(1, 5), st.integers(-1, 5) | VALUES),
    "rows": (st.lists(st.fixed_dictionaries({"user_id": KNOWN, "item_id": KNOWN}), max_size=3), st.lists(ROWS) | JSON),
    "k": (st.integers(1, 40), st.integers(-1, 40) | VALUES),
    "liked": (st.integers(0, 40), st.integers(-1, 40) | VALUES),
    "exclude_seen": (st.booleans(), VALUES),
    "item": (st.sampled_from(["105", 105, "none"]), KNOWN | VALUES),
    "items": (st.lists(st.sampled_from(["105", 107, "none"]), max_size=3), st.lists(KNOWN) | JSON),
    "context": (st.just({}), ROWS | JSON),
    "filter": (st.sampled_from([None, "item_id != '105'", "title contains '1'"]), VALUES),
    "exclude": (st.lists(st.sampled_from(["105", 107, "none"]), max_size=3), st.lists(KNOWN) | JSON),
    "boosts": (st.lists(st.sampled_from(["title contains '1': 2", "item_id in ('105'): -1"]), max_size=2), JSON),
    "diversity": (st.sampled_from([0, 0.5, 1]), VALUES),
    "diverse_by": (st.none(), st.sampled_from(["title", "item_id", "tags"]) | VALUES),
    "at_most": (st.sampled_from([None, "title:1", "item_id: 2"]), st.sampled_from(["tags:1", "title:0"]) | VALUES),
    "explain": (st.booleans(), VALUES),
}
"""Of each field of a question: what may be right, and what need not be."""
ASKED_OF = {
    each.path: tuple(each.request.model_fields)
    for each in OPERATIONS
    if each.request and each.path in ("/rank", "/recommend", "/similar", "/predict")
}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "application/octet-stream", "text/plain", "", ";", "é"]),
        "content-encoding": st.sampled_from(["gzip", "deflate", "identity", "br", "gzip, gzip"]),
        "content-length": st.sampled_from(["0", "-1", "9" * 30, "x", "²"]),
        "inference-header-content-length": st.sampled_from(["0", "5", "10", "-1", "9" * 30, "x", "²"]),
        "origin": st.sampled_from(["http://here", "http://there", "null", "http://[", ""]),
    },
)
PATHS = st.sampled_from(
    [
        route.path.format(model="films", version="1", experiment="none")
        for routes in ROUTES
        for route in routes(Repository([]))
    ]
    + ["/v2/models/films_raw/infer", "/v2/models/films/versions/9/infer"]
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["user_id", "item_id", "x"]) | VALUES,
        "datatype": st.sampled_from(["INT32", "INT64", "FP32", "FP64", "BYTES", "BOOL", "X"]) | VALUES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "data": st.lists(KNOWN | VALUES, max_size=4) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "x"]), VALUES | st.integers(0, 9)) | JSON,
    },
)
INFER = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "inputs": st.lists(TENSORS, max_size=3) | JSON,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["logit", "x"]) | VALUES}), max_size=2)
        | JSON,
        "parameters": st.dictionaries(st.sampled_from(["timeout", "binary_data_output"]), VALUES) | JSON,
    },
)


def dumped(data: object) -> bytes:
    """JSON as Python writes it: with NaN and numbers of any size."""
    return json.dumps(data).encode("utf-8", "replace")


@st.composite
def questions(draw: st.DrawFn, path: str) -> bytes:
    """A question of a route that may be right but for a field or two."""
    wrong = draw(st.lists(st.sampled_from(ASKED_OF[path]), max_size=2))
    left_out = draw(st.lists(st.sampled_from(ASKED_OF[path]), max_size=1))
    return dumped(
        {name: draw(FIELDS[name][name in wrong]) for name in ASKED_OF[path] if name not in left_out or name == "model"}
    )


QUESTIONS = st.one_of([questions(path) for path in ASKED_OF])
BODIES = st.one_of(QUESTIONS, INFER.map(dumped), JSON.map(dumped), st.binary(max_size=40))


@st.composite
def mutated(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """A body as it is, cut short, doubled, with bytes in its midst or behind it."""
    body = draw(bodies)
    at = draw(st.integers(0, len(body)))
    how = draw(st.sampled_from(["as it is", "as it is", "cut", "doubled", "amid", "behind"]))
    more = draw(st.binary(max_size=12))
    return {
        "as it is": body,
        "cut": body[:at],
        "doubled": body * 2,
        "amid": body[:at] + more + body[at:],
        "behind": body + more,
    }[how]


def check(asked: Asked, method: str, target: str, body: bytes, headers: dict[str, str]) -> None:
    """No server error, whatever was asked; JSON and a reason where it was refused."""
    answer = asked(method, target, body, **{name.replace("-", "_"): value for name, value in headers.items()})
    assert answer.status < 500, (method, target, body, headers, answer.body)
    if answer.status >= 400 and method != "HEAD" and not target.endswith("/ready"):
        assert answer.data["error"], (method, target, body, answer.body)


def fuzz(asked: Asked, examples: int) -> None:
    quick = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )

    @quick
    @given(st.sampled_from(sorted(ASKED_OF)), st.data())
    def ask_questions(path: str, data: st.DataObject) -> None:
        check(asked, "POST", path, data.draw(questions(path) | mutated(questions(path))), {})

    @quick
    @given(st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "X"]), PATHS, mutated(BODIES), HEADERS)
    def anything(method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        check(asked, method, path, body, headers)

    @quick
    @given(st.sampled_from(["users", "items"]), st.text(max_size=30), st.text(max_size=5), MODEL)
    def finding(path: str, query: str, limit: str, model: object) -> None:
        from urllib.parse import urlencode

        named = urlencode({"query": query, "limit": limit or "5", "model": str(model)}, errors="replace")
        check(asked, "GET", f"/{path}?{named}", b"", {})

    @quick
    @given(mutated(INFER.map(dumped)), st.sampled_from(["", "0", "2", "40", "x"]), st.booleans())
    def tensors(body: bytes, length: str, raw: bool) -> None:
        headers = {"inference-header-content-length": length} if length else {}
        check(asked, "POST", f"/v2/models/films{'_raw' * raw}/infer", body, headers)

    ask_questions()
    anything()
    finding()
    tensors()


def test_nothing_that_comes_makes_the_server_fail(both: Asked) -> None:
    fuzz(both, 60)


@pytest.mark.slow
def test_nothing_of_much_that_comes_makes_the_server_fail(both: Asked) -> None:
    fuzz(both, 5000)


def test_recommend_takes_what_a_shop_asks(films: Asked, predictor: Predictor) -> None:
    body = {
        "user": "u3",
        "k": 3,
        "filter": "title contains '1'",
        "exclude": ["zz"],
        "boosts": ["title contains '12': 1"],
        "diversity": 0.5,
        "diverse_by": "title",
        "at_most": "title:1",
        "explain": True,
    }
    data = films("POST", "/recommend", body).data
    wanted = RecommendRequest(
        ("u3",),
        k=3,
        filter="title contains '1'",
        exclude=("zz",),
        diversity=0.5,
        diverse_by="title",
        boosts=("title contains '12': 1",),
        at_most="title:1",
        explain=True,
    )
    by_hand = answers.recommend(predictor, wanted)
    assert {name: data[name] for name in by_hand} == by_hand
    assert data["items"][0]["because"]["kind"] == "nearest"
    basket = films("POST", "/recommend", {"items": ["105", "zz"], "k": 2}).data
    assert (basket["user"], basket["answered_by"], len(basket["items"])) == (None, "basket_vectors", 2)
    assert "basket: 1 of 2 items are unknown: 'zz'" in basket["notes"]


def test_similar_answers_with_the_bundles_items(films: Asked, predictor: Predictor) -> None:
    data = films("POST", "/similar", {"item": "105", "k": 3, "filter": "title contains '11'"}).data
    by_hand = answers.similar(predictor, RecommendRequest(items=("105",), k=3, filter="title contains '11'"))
    assert {name: data[name] for name in by_hand} == by_hand
    assert (data["item"], data["by"], [each["rank"] for each in data["items"]]) == ("105", "vectors", [1, 2, 3])


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/recommend", {"user": "u3", "filter": "knd == 1", "boosts": ["x"], "context": {"a": 1}}, "3 problems"),
        ("/recommend", {"user": "u3", "filter": "price <"}, "filter, character 8: the filter ends; expected a number"),
        ("/recommend", {"user": "u3", "boosts": ["a: 1"] * 21}, "boosts: list should have at most 20 items"),
        ("/recommend", {"user": "u3", "exclude": [[1]]}, "exclude[0]: input should be a valid string; found a list"),
        ("/recommend", {"items": [1] * 1001}, "items: list should have at most 1000 items"),
        (
            "/recommend",
            {"user": "u3", "diversity": 1.5},
            "diversity: input should be less than or equal to 1; found 1.5",
        ),
        (
            "/recommend",
            {"user": "u3", "context": {"a" * 2000: 1}},
            "context holds a text of more than 1,000 characters",
        ),
        ("/similar", {"item": "zz"}, "similar: no item 'zz' in the catalogue of the model"),
        ("/similar", {}, "item: field required"),
        ("/similar", {"item": "105", "k": 0}, "k: input should be greater than or equal to 1; found 0"),
    ],
)
def test_what_a_shop_asks_wrongly_is_refused(films: Asked, path: str, body: dict[str, Any], told: str) -> None:
    answer = films("POST", path, body)
    assert answer.status == 400
    assert told in answer.data["error"]


def test_a_full_queue_and_a_late_answer_are_told_apart(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is being computed, one waits, and one finds no room; the first two get no answer in time."""
    limits = Limits(queue=1, timeout=1.0, retry_seconds=7)
    released = threading.Event()
    with asking(sources(films=runs["films"]), limits=limits) as asked:
        recommend = answers.recommend_with_chances

        def slow(*given: Any, **named: Any) -> Any:
            released.wait(600)
            return recommend(*given, **named)

        monkeypatch.setattr(answers, "recommend_with_chances", slow)

        async def three() -> list[Answer]:
            body = {"user": "u1"}
            return list(await asyncio.gather(*(ask(asked.app, "POST", "/recommend", body) for _ in range(3))))

        found = asked.runner.run(three())
        released.set()
        assert [answer.status for answer in found] == [504, 504, 503]
        assert found[2].headers["retry-after"] == "7"
        assert "no answer within" in found[0].data["error"]
        while (again := asked("POST", "/recommend", {"user": "u1"})).status == 504:
            pass  # on a machine so busy that a second is too short
        assert again.status == 200
