"""Routes that look things up: users and items by title, fields of items, columns for forms; and a run's report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from recspec.inference import MOST_SHOWN
from recspec.serving import access as accesses
from recspec.serving import model_folders
from recspec.serving.access import Access
from tests.asking import Asked, asking, fits, sources

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def asked(shop_runs: dict[str, Path]) -> Iterator[Asked]:
    with asking(sources(ease=shop_runs["ease"], clicks=shop_runs["clicks"])) as opened:
        yield opened


def test_users_and_items_are_found_by_title(asked: Asked) -> None:
    users = asked("GET", "/users?model=ease&query=customer%2012").data
    fits(users, "Users")
    assert [each["user"] for each in users["users"]] == ["c12"]
    items = asked("GET", "/items?model=ease&query=DOCUMENT.title%3D1%3E%207&limit=1").data
    fits(items, "Items")
    assert (items["total"], items["items"][0]["item"]) == (24, "p7")


def test_typical_users_come_first_where_they_are_asked_for(asked: Asked) -> None:
    users = {
        order: asked("GET", f"/users?model=ease&limit=100&order={order}").data["users"]
        for order in ("busiest", "typical")
    }
    counts = [each["count"] for each in users["busiest"]]
    distance = [abs(each["count"] - sorted(counts)[len(counts) // 2]) for each in users["typical"]]
    assert distance == sorted(distance)
    assert "order: input should be 'busiest' or 'typical'" in asked("GET", "/users?model=ease&order=odd").data["error"]


def test_fields_of_items(asked: Asked) -> None:
    data = asked("POST", "/catalogue", {"model": "ease", "items": ["p3", "none"]}).data
    fits(data, "Catalogue")
    assert data["items"][0]["fields"]["price"] == 3.5
    assert [each["is_for_sale"] for each in data["items"]] == [True, False]
    assert [each["is_known"] for each in data["items"]] == [True, False]


def test_columns_for_forms(asked: Asked) -> None:
    data = asked("GET", "/columns?model=clicks").data
    fits(data, "Columns")
    assert [(each["name"], each["is_required"]) for each in data["context"]] == [("device", True), ("hour", True)]
    assert {each["name"] for each in data["rows"]} == {"customer", "sku", "device", "hour"}
    assert {each["name"] for each in data["items"]} >= {"category", "price", "image"}
    assert (data["for_sale"], data["event_types"]) == ("`in_stock` == true", [])  # no journal takes events


def test_models_say_how_they_can_be_asked(asked: Asked) -> None:
    data = asked("GET", "/models").data
    fits(data, "Models")
    told = {
        each["name"]: (each["recommends"], each["in_context"], each["probabilities"], each["report"])
        for each in data["models"]
    }
    assert told == {"ease": (True, True, False, None), "clicks": (False, True, True, None)}
    assert data["takes_events"] is False
    for each in data["models"]:
        age = datetime.now(UTC) - datetime.fromisoformat(each["made_at"])
        assert (len(each["digest"]), each["catalogue"], age >= timedelta(seconds=-1)) == (16, 0, True)


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "message"),
    [
        ("POST", "/catalogue", {"model": "ease"}, 400, "items: field required"),
        ("POST", "/catalogue", {"model": "ease", "items": ["p1"] * (MOST_SHOWN + 1)}, 400, "at most 200 items"),
        ("POST", "/catalogue", {"model": "ease", "items": [{}]}, 400, "items[0]: input should be a valid"),
        ("POST", "/catalogue", {"items": []}, 400, "model: expected the name of one"),
        ("GET", "/columns", None, 400, "model: expected the name of one"),
        ("GET", "/columns?model=nothing", None, 404, "no model 'nothing'"),
        ("POST", "/columns", {}, 405, "POST is not answered here"),
        ("GET", "/report/nothing", None, 404, "no model 'nothing'"),
        ("GET", "/report/ease/../../secret", None, 404, "no route"),
        ("GET", "/report/", None, 404, "no route"),
    ],
)
def test_wrong_requests_are_refused(
    asked: Asked, method: str, target: str, body: object, status: int, message: str
) -> None:
    answer = asked(method, target, body)
    assert (answer.status, message in answer.data["error"]) == (status, True), answer.data


# --- the report of a run ---------------------------------------------------------------------------------------------

REPORT = "<!doctype html><title>r</title><style>p{color:red}</style><script>let a = 1;</script><p style='top:0'>é"


@pytest.fixture
def report(shop_runs: dict[str, Path]) -> Iterator[Path]:
    path = shop_runs["ease"] / "report.html"
    path.write_text(REPORT, encoding="utf-8")
    yield path
    path.unlink(missing_ok=True)


def test_a_report_is_served_in_a_sandbox_without_a_way_out(asked: Asked, report: Path) -> None:
    assert asked("GET", "/models").data["models"][0]["report"] == "/report/ease"
    answer = asked("GET", "/report/ease")
    assert (answer.status, answer.body.decode()) == (200, REPORT)
    assert answer.headers["content-type"].startswith("text/html")
    rules = dict(rule.partition(" ")[::2] for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["sandbox"] == "allow-scripts"  # an origin of its own: it reads nothing that the page keeps
    for name in ("default-src", "connect-src", "form-action", "frame-ancestors", "base-uri"):
        assert rules[name] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert rules["img-src"] == "data:"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert asked("POST", "/report/ease", {}).status == 405
    report.unlink()
    gone = asked("GET", "/report/ease")
    assert (gone.status, "has no report; write one with `recspec report RUN`" in gone.data["error"]) == (404, True)


def test_nothing_but_an_ordinary_report_is_read(
    asked: Asked, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.unlink()
    (tmp_path / "secret").write_text("secret")
    report.symlink_to(tmp_path / "secret")
    assert asked("GET", "/models").data["models"][0]["report"] is None
    assert asked("GET", "/report/ease").status == 404
    report.unlink()
    os.mkfifo(report)
    assert asked("GET", "/report/ease").status == 404  # and no waiting for a writer
    report.unlink()
    report.mkdir()
    assert asked("GET", "/report/ease").status == 404
    report.rmdir()
    report.write_text("x" * 11)
    monkeypatch.setattr(model_folders, "REPORT_BYTES", 10)
    assert asked("GET", "/report/ease").status == 404


def test_the_report_needs_the_token_or_an_address_that_the_server_signed(
    shop_runs: dict[str, Path], report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report.exists()
    with asking(sources(ease=shop_runs["ease"], ials=shop_runs["ials"]), token="secret") as asked:
        bearer = {"authorization": "Bearer secret"}
        assert asked("GET", "/report/ease").status == 401
        assert asked("GET", "/report/ease", **bearer).status == 200
        address = asked("GET", "/models", **bearer).data["models"][0]["report"]
        path, _, query = address.partition("?")
        assert (path, asked("GET", address).status) == ("/report/ease", 200)
        until, key = (part.partition("=")[2] for part in query.split("&"))
        for other in (
            f"/report/ials?{query}",
            f"/models?{query}",
            f"/recommend?{query}",
            f"{path}?until={until}",
            f"{path}?until={int(until) + 1}&key={key}",
            f"{path}?until={until}&key={key[:-1]}",
            f"{path}?key={key}",
            f"{path}?until=%C2%B2&key={key}",
            f"{path}?until={until}&key=%C3%A9",
            f"{path}?until={'9' * 30}&key={key}",
            f"{path}?{'&'.join(['a=b'] * 20)}&{query}",
            f"/report/ease/?{query}",
        ):
            assert asked("GET", other).status == 401, other
        monkeypatch.setattr(accesses.time, "time", lambda: float(until) + 1)
        assert asked("GET", address).status == 401


def test_a_signature_is_of_one_process_and_one_path() -> None:
    first, second = Access("secret"), Access("secret")
    path, _, query = first.signed("/report/a").partition("?")
    assert first.admits(path, query.encode())
    assert not second.admits(path, query.encode())
    assert not first.admits("/report/b", query.encode())
    assert not first.admits(path, b"\xff" + query.encode())
    assert first.signed("/report/a") != second.signed("/report/a")
    assert Access().signed("/report/a") == "/report/a"  # nothing to keep out
    assert "key" not in repr(first)


def test_the_report_of_a_bundle_lies_in_its_run(tmp_path: Path) -> None:
    assert model_folders.report_path(tmp_path / "run" / "bundle") == tmp_path / "run" / "report.html"
    assert model_folders.report_path(tmp_path / "copied") == tmp_path / "copied" / "report.html"
    assert not model_folders.has_report(tmp_path)
