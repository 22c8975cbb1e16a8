"""The next answer knows what the journal took: events over HTTP, then recommendations and rankings."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from recspec.base.errors import DataError
from recspec.inference.request_features import AnsweredBy
from recspec.loop import Journal
from recspec.serving import journal_reader, pages
from recspec.serving.settings import RepositorySettings
from tests.asking import Asked, asking, fits, sources
from tests.film_runs import film_runs

SETTINGS = {"ease": {"l2": 5.0}, "ials": {"factors": 4, "l2": 0.01}, "neumf": {"factors": 4, "layers": (8, 4)}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """40 users and 30 items, numbered from 100; the order of the events is that of the file."""
    return dict(film_runs(tmp_path_factory.mktemp("next"), SETTINGS))


@pytest.fixture
def shop(runs: dict[str, Path], url: str) -> Iterator[Asked]:
    held = {name: runs[name] for name in SETTINGS}
    with asking(sources(**held), settings=RepositorySettings(watch=0, journal=url)) as asked:
        yield asked


def recommended(asked: Asked, user: object, model: str = "ease", **more: object) -> dict[str, Any]:
    answer = asked("POST", "/recommend", {"model": model, "user": user, "k": 30, **more})
    assert answer.status == 200, answer.data
    fits(answer.data, "Recommendation")
    found: dict[str, Any] = answer.data
    return found


def items(answer: dict[str, Any]) -> list[str]:
    return [each["item"] for each in answer["items"]]


def sent(asked: Asked, user: object, item: object, kind: str = "view") -> None:
    assert asked("POST", "/events", {"user": user, "item": item, "type": kind}).data["accepted"] == 1


@pytest.mark.parametrize("model", [*SETTINGS])
def test_an_item_that_was_acted_on_is_not_in_the_next_answer(shop: Asked, model: str) -> None:
    before = recommended(shop, "u3", model)
    sent(shop, "u3", before["items"][0]["item"])
    after = recommended(shop, "u3", model)
    assert set(items(after)) == set(items(before)[1:])
    assert (before["history_seq"], after["history_seq"]) == (0, 1)
    scores = [{each["item"]: each["score"] for each in answer["items"]} for answer in (after, before)]
    assert (scores[0][items(after)[0]] == scores[1][items(after)[0]]) == (model == "neumf")


def test_a_stranger_becomes_known_by_an_event(shop: Asked) -> None:
    stranger = recommended(shop, 7)
    assert (stranger["unknown_user"], stranger["answered_by"], stranger["liked"]) == (True, "popularity", [])
    sent(shop, 7, 104)
    sent(shop, 7, 111, "impression")
    known = recommended(shop, 7, liked=5)
    assert (known["unknown_user"], known["answered_by"], known["history_seq"]) == (True, "history", 1)
    assert [each["item"] for each in known["liked"]] == ["104"]
    assert "104" not in items(known)
    assert "111" in items(known)
    basket = shop("POST", "/recommend", {"model": "ease", "items": [104], "k": 30}).data
    assert [(each["item"], each["score"]) for each in basket["items"]] == [
        (each["item"], each["score"]) for each in known["items"]
    ]
    of_users = recommended(shop, 7, "neumf")
    assert (of_users["answered_by"], "104" in items(of_users)) == ("popularity", False)


def test_rankings_know_too(shop: Asked) -> None:
    asked = {"model": "ease", "user": "u3", "candidates": [100, 105, 110, 115, 120]}
    before = shop("POST", "/rank", asked).data
    sent(shop, "u3", 111)
    after = shop("POST", "/rank", asked).data
    fits(after, "Ranking")
    assert after["history_seq"] == 1
    assert {each["item"]: each["score"] for each in after["items"]} != {
        each["item"]: each["score"] for each in before["items"]
    }
    by_row = shop("POST", "/rank", {"model": "ease", "request": {"user_id": "u3"}, "candidates": [100, 105]}).data
    assert by_row["history_seq"] == 1
    assert "history_seq" not in shop("POST", "/similar", {"model": "ease", "item": 100}).data


def test_the_page_names_what_an_answer_is_made_from() -> None:
    page = (Path(pages.__file__).parent / "page" / "page.js").read_text(encoding="utf-8")
    named = re.findall(r"(\w+): '", page.partition("const BY = {")[2].partition("};")[0])
    assert {*named} == {*get_args(AnsweredBy)}


def test_without_a_journal_no_answer_names_one(runs: dict[str, Path]) -> None:
    with asking(sources(ease=runs["ease"])) as asked:
        assert "history_seq" not in recommended(asked, "u3")


def test_answers_do_not_wait_for_a_journal_that_fails(
    shop: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent(shop, "u3", 111)
    with_events = recommended(shop, "u3")
    calls: list[int] = []

    def fails(*_: object, **__: object) -> None:
        calls.append(1)
        raise DataError("the journal can't be reached")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "history", fails)
        answers = [recommended(shop, "u3") for _ in range(2)]
    for each in answers:
        assert each["notes"][-1] == journal_reader.NOT_READ
        assert "111" in items(each)
        assert "history_seq" not in each
    assert len(calls) == 1  # no request asks again at once
    assert [record.getMessage() for record in caplog.records] == [
        "answers don't know new events: the journal can't be reached"
    ]
    monkeypatch.setattr(shop.repository.journal_reader, "_resumes", 0.0)
    assert items(recommended(shop, "u3")) == items(with_events)


def test_answers_do_not_wait_for_a_journal_that_hangs(shop: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(journal_reader, "SECONDS", 0.01)
    monkeypatch.setattr(Journal, "history", lambda *_, **__: released.wait(60) and [])
    assert recommended(shop, "u3")["notes"][-1] == journal_reader.NOT_READ
    released.set()
