"""A headless Chromium for tests of pages, where playwright and Chromium are installed; else the tests skip."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
PATIENCE = 120.0
"""Seconds until what a test waits for must have come; it goes on as soon as it has."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's, with the system's Chromium; nothing is downloaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install 'recspec[browser]')")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield opened
        finally:
            opened.close()


class Page:
    """A page of playwright's that waits without a limit of its own, and collects complaints."""

    def __init__(self, page: Any) -> None:
        self.page, self.complaints = page, list[str]()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._collect(message))
        page.on("request", lambda request: self.requests.append(request.url))
        self.requests = list[str]()

    def _collect(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # refusals are none
            self.complaints.append(message.text)

    def wait(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true; playwright's own way is forbidden by a strict policy."""
        until = time.monotonic() + PATIENCE
        while not self.page.evaluate(f"!!({expression})"):
            assert time.monotonic() < until, f"never true: {expression}; the page shows: {self.page.inner_text('body')}"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that a selector finds."""
        return [str(each) for each in self.page.locator(selector).all_text_contents()]
