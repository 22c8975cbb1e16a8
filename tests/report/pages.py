"""What every page keeps to, whatever is written on it."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<b>bold</b> & 'quoted'",
    "$\\frac{1}{$ `code`",
    "\u202egnp.exe\x00\x07",
    "javascript:alert(1)",
    "]]><!-- --",
    "名前 🎬 \u0301",
)
"""Texts of ids and titles that would be markup, formulas or control codes, if they were let."""

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A page's elements, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"<{tag}/> with {attrs}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        self.inside.setdefault(self.open[-1] if self.open else "", []).append(data)
        if self.open[-2:] == ["pre", "code"]:
            self.inside.setdefault("pre code", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def shown(self) -> str:
        """The text that a reader sees, and that of charts."""
        return " ".join(" ".join(self.texts).split())


def read(path: Path) -> Page:
    """A page that keeps to the promises of all pages."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith('<!doctype html>\n<html lang="en">')
    page = Page(text)
    _is_confined(page)
    _is_accessible(page)
    assert len(text.encode()) < 3_000_000
    return page


def _is_confined(page: Page) -> None:
    """Nothing is loaded, and nothing runs but the page's own script."""
    (policy,) = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "*" not in policy
    for kind in ("script", "style"):
        (written,) = page.inside[kind]
        digest = base64.b64encode(hashlib.sha256(written.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    html = "html head meta title style script body header nav main section footer div h1 h2 h3 h4 p a span strong code"
    html += " pre bdi ul ol li dl dt dd table caption thead tbody tr th td details summary figure figcaption"
    svg = "svg g path defs use clippath rect line circle polygon text tspan desc pattern"
    known = {*html.split(), *svg.split()}
    for name, attributes in page.elements:
        assert name in known, name
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            assert key not in ("style", "src", "srcdoc", "formaction", "action"), (name, key)
            if key == "href":
                assert value is not None
                assert value.startswith("#")
            assert "url(" not in (value or "") or re.fullmatch(r"url\(#[\w-]+\)", value or ""), value
    shown = "".join(page.texts)
    assert not re.search("[\x00-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", shown)


def _is_accessible(page: Page) -> None:
    """Headings in order, tables with heads, names of charts, ids once."""
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), [each for each in ids if ids.count(each) > 1]
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    names = [name for name, _ in page.elements]
    assert names.count("table") == names.count("caption") == names.count("thead")
    for name, attributes in page.elements:
        if name == "th":
            assert attributes.get("scope") in ("col", "row")
        if name == "svg":
            named = (attributes.get("aria-labelledby") or "").split()
            assert attributes.get("aria-hidden") == "true" or (
                attributes.get("role") == "img" and set(named) <= set(ids)
            )
        if name == "a":
            assert (attributes["href"] or "").lstrip("#") in ids
    assert any(each.get("name") == "viewport" for each in page.all("meta"))
