"""The page at `/`: small, alone, escaped; in headless Chromium, where it is installed, what a person sees and does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from recspec.inference.predictor import Predictor
from recspec.inference.requests import predict, recommend
from recspec.inference.wanted import Wanted
from tests.asking import asking, serving, sources
from tests.made_up_models import films_and_clicks

CHROMIUM = next(
    (
        found
        for name in ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 600.0
"""Seconds until what a test waits for must have come; it goes on as soon as it has."""

TEXT = files("recspec.serving").joinpath("page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Films with titles that a careless page would run; and clicks, without users to recommend to."""
    return films_and_clicks(tmp_path_factory.mktemp("page"), "<img src=x onerror=document.title=1>")


# --- the file --------------------------------------------------------------------------------------------------------


def test_it_is_small_and_needs_nothing_else() -> None:
    assert len(TEXT.encode()) < 25_000
    assert not re.search(r"https?:|<link|<iframe|@import|url\(| src=", TEXT)


def test_it_writes_text_and_never_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\son\w+=", TEXT)


def test_every_field_has_a_label() -> None:
    fields = set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', TEXT))
    assert fields == {"model", "token", "user", "k", "seen", "text"}
    assert fields == set(re.findall(r'<label for="(\w+)"', TEXT))


def test_its_policy_allows_what_stands_in_it_and_this_server_alone(runs: dict[str, Path]) -> None:
    with asking(sources(films=runs["films"])) as asked:
        answer = asked("GET", "/")
    assert answer.body.decode() == TEXT
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[name])
    assert answer.headers["x-content-type-options"] == "nosniff"


# --- in a browser ----------------------------------------------------------------------------------------------------


class Tab:
    """A page in Chromium, spoken to in its DevTools protocol: JSON between NUL bytes, on pipes."""

    def __init__(self, asks: BinaryIO, answers: BinaryIO) -> None:
        self._asks, self._answers, self._number, self._session = asks, answers, 0, ""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method and wait for its result."""
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            said["sessionId"] = self._session
        self._asks.write(json.dumps(said).encode() + b"\0")
        self._asks.flush()
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])
            self.events.append(told)

    def open(self, address: str) -> None:
        """Show an address in a new tab."""
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.events = []
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=address)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is worth there."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not (found := self.value(f"!!({expression})")):
            shown = self.value("document.body && document.body.innerText")
            assert time.monotonic() < until, f"never true: {expression}; the page shows: {shown}"
            time.sleep(0.02)
        return found

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        codes = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Escape": 27, "Tab": 9}
        for key in keys:
            text = "\r" if key == "Enter" else ""
            for kind in ("keyDown", "keyUp"):
                more = {"text": text} if text and kind == "keyDown" else {}
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                          windowsVirtualKeyCode=codes[key], **more)  # fmt: skip

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.send("Input.insertText", text=text)

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Errors and breaches of the policy; answers that are refusals are none."""
        self.send("Runtime.evaluate", expression="1")
        entries = [told["params"]["entry"] for told in self.events if told.get("method") == "Log.entryAdded"]
        thrown = [told["params"] for told in self.events if told.get("method") == "Runtime.exceptionThrown"]
        return thrown + [each for each in entries if each["level"] == "error" and each["source"] != "network"]

    def _read(self) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\0"):
            more = self._answers.read(1)
            assert more, "the browser ended"
            text += more
        return dict(json.loads(text[:-1]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Chromium without a window, and a tab in it."""
    assert CHROMIUM is not None
    asks, told = os.pipe()
    answers, says = os.pipe()

    def as_three_and_four() -> None:  # where Chromium reads and writes
        first, second = os.dup(asks), os.dup(says)
        os.dup2(first, 3)
        os.dup2(second, 4)

    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    chromium = subprocess.Popen(
        command, preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(asks)
    os.close(says)
    try:
        with os.fdopen(told, "wb", 0) as writes, os.fdopen(answers, "rb") as reads:
            yield Tab(writes, reads)
            chromium.terminate()
            chromium.wait(600)
    finally:
        chromium.kill()
        chromium.wait()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def texts(tab: Tab, selector: str) -> list[str]:
    found = tab.value(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
    return [str(each) for each in found]


@needs_chromium
def test_a_user_is_picked_with_the_keyboard_and_gets_titled_items(tab: Tab, runs: dict[str, Path]) -> None:
    by_hand = recommend(Predictor.open(runs["films"], device="cpu"), Wanted(users=("u7",)), liked=12)
    with serving(sources(films=runs["films"])) as addresses:
        tab.open(addresses.http)
        tab.wait("!document.getElementById('people').hidden && document.getElementById('user').value")
        assert tab.value("document.getElementById('models-box').hidden")
        tab.value("document.getElementById('user').focus()")
        tab.press("ArrowDown")
        tab.wait("document.querySelectorAll('#found [role=option]').length == 8")  # the busiest, as nothing was typed
        tab.press("Escape")
        assert tab.value("document.getElementById('found').hidden")
        tab.value("document.getElementById('user').focus()")
        tab.value("document.getElementById('user').value = ''")
        tab.type("u7")
        tab.wait(
            "!document.getElementById('found').hidden && document.querySelector('#found span').textContent == 'u7'"
        )
        assert tab.value("document.getElementById('user').getAttribute('aria-expanded')") == "true"
        tab.press("ArrowDown")
        assert tab.value("document.getElementById('user').getAttribute('aria-activedescendant')") == "user-0"
        tab.press("Enter")
        tab.wait("document.querySelectorAll('#items tbody tr').length == 10")
        assert texts(tab, "#items tbody tr td:nth-child(2)") == [str(each["item"]) for each in by_hand["items"]]
        assert texts(tab, "#items tbody tr td:nth-child(3)") == [each["title"] for each in by_hand["items"]]
        scores = [float(text) for text in texts(tab, "#items tbody tr td:nth-child(4)")]
        assert scores == pytest.approx([each["score"] for each in by_hand["items"]], abs=6e-4)
        assert texts(tab, "#liked li") == [each["title"] for each in by_hand["liked"]]
        assert re.search(r"User u7 .* ms in the server, .* ms in all", texts(tab, "#who")[0])
        assert tab.value("document.querySelectorAll('img').length") == 0
        assert tab.value("document.title") == "recspec: try a model"
        assert tab.complaints == []


@needs_chromium
def test_an_unknown_user_is_said_to_be_one(tab: Tab, runs: dict[str, Path]) -> None:
    with serving(sources(films=runs["films"])) as addresses:
        tab.open(addresses.http)
        tab.wait("!document.getElementById('people').hidden && document.getElementById('user').value")
        tab.value("document.getElementById('user').focus()")
        tab.value("document.getElementById('user').value = ''")
        tab.type("<script>nobody")
        tab.press("Enter")
        tab.wait("document.querySelector('#who .flag')")
        assert "the 10 most popular items" in texts(tab, "#who")[0]
        assert "User <script>nobody" in texts(tab, "#who")[0]
        assert tab.complaints == []


@needs_chromium
def test_a_pasted_row_is_scored_as_json_and_as_csv(tab: Tab, runs: dict[str, Path]) -> None:
    predictor = Predictor.open(runs["clicks"], device="cpu")
    with serving(sources(**runs)) as addresses:
        tab.open(addresses.http)
        tab.wait("document.querySelectorAll('#model option').length == 2")
        tab.value("document.getElementById('model').value = 'clicks'; "
                  "document.getElementById('model').dispatchEvent(new Event('change'))")  # fmt: skip
        tab.wait("document.getElementById('people').hidden && !document.getElementById('rows').hidden")
        row = json.loads(tab.value("document.getElementById('text').value"))[0]
        assert set(row) >= {"user_id", "item_id"}
        scalars = {name: 3 for name, value in row.items() if value is None}
        lists = {name: value for name, value in row.items() if value is not None}
        rows = [{**scalars, **lists}, {**scalars, **lists, "item_id": 4}]
        score(tab, json.dumps(rows))
        expected = predict(predictor, rows)
        assert shown(tab) == pytest.approx(list(expected.probabilities), rel=1e-3)
        assert texts(tab, "#notes li") == list(expected.notes)
        if not lists:
            score(tab, ",".join(scalars) + "\n" + ",".join('"3"' if name == "item_id" else "3" for name in scalars))
            assert shown(tab) == pytest.approx([expected.probabilities[0]], rel=1e-3)
        score(tab, "[{]", fails=True)
        assert "The rows are not JSON" in texts(tab, "#problem")[0]
        score(tab, '[{"item_id": {}}]', fails=True)
        assert "row 1 (rows[0].item_id) is an object" in texts(tab, "#problem")[0]
        score(tab, "a,b\n1", fails=True)
        assert "Row 1 has 1 values for 2 columns." in texts(tab, "#problem")[0]
        assert tab.complaints == []


def score(tab: Tab, rows: str, *, fails: bool = False) -> None:
    tab.value(f"document.getElementById('told').textContent = ''; "
              f"document.getElementById('text').value = {json.dumps(rows)}; "
              "document.getElementById('score').requestSubmit()")  # fmt: skip
    tab.wait(f"document.getElementById('{'problem' if fails else 'told'}').textContent")


def shown(tab: Tab) -> list[float]:
    return [float(text) for text in texts(tab, "#scores tbody tr td:nth-child(2)")]


@needs_chromium
def test_a_token_is_asked_for_where_the_server_wants_one(tab: Tab, runs: dict[str, Path]) -> None:
    with serving(sources(films=runs["films"]), token="secret") as addresses:
        tab.open(addresses.http)
        tab.wait("!document.getElementById('token-box').hidden")
        assert "Authorization: Bearer TOKEN" in texts(tab, "#problem")[0]
        tab.value("document.getElementById('token').value = 'secret'; "
                  "document.getElementById('token').dispatchEvent(new Event('change'))")  # fmt: skip
        tab.wait("!document.getElementById('people').hidden")
        assert texts(tab, "#problem") == [""]
