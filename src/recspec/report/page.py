"""The frame of a page: one file that needs no network, with the parts that its sections are made of."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from recspec import __version__
from recspec.report.markup import Child, Markup, joined, plain, tag
from recspec.report.numbers import number

MOST_COMMAND = 20_000
"""Characters of a command."""


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading of its own."""

    name: str
    """Its id, a word of recspec's own."""
    title: str
    body: tuple[Child, ...]


def page(title: str, lead: Child, sections: Sequence[Section]) -> str:
    """A whole page.

    Its policy allows the style sheet and the script of this file, by their digests, and nothing else: no request, no
    other script, no form. Whatever a title might smuggle in would stay dead.
    """
    style, script = (
        resources.files("recspec.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    policy += "; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", **{"http-equiv": "Content-Security-Policy"}, content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", plain(title)),
        tag("style", Markup(style)),
    )
    links = [tag("a", section.title, href=f"#{section.name}") for section in sections]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", plain(title)), lead),
        tag("nav", links, aria_label="Sections"),
        tag("main", [_section(each) for each in sections], id="content"),
        tag("footer", f"Written by recspec {__version__}. This file is complete: it loads nothing from a network."),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _section(section: Section) -> Markup:
    return tag("section", tag("h2", section.title, id=f"{section.name}-title"), *section.body, id=section.name,
               aria_labelledby=f"{section.name}-title")  # fmt: skip


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- parts of sections -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and the value by which it sorts."""

    shown: Child
    value: float | str | None = None
    kind: str = ""


def num(value: object, shown: str | None = None, *, best: bool = False) -> Cell:
    """A number, aligned to the right."""
    known = value if isinstance(value, (int, float)) else ""
    text = number(value) if shown is None else shown
    return Cell(tag("span", text, " ★", class_="best", title="best in its row") if best else text, known, "n")


def drawing(drawn: Markup) -> Cell:
    """A small chart inside a table."""
    return Cell(drawn, "", "draw")


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[Child | Cell]],
    *,
    sorts: bool = True,
    named: bool = True,
) -> Markup:
    """A table that scrolls by itself where the page is narrow. With `named`, the first cell of a row is its head.

    A head that begins with `#` is of numbers, an empty one of small charts.
    """
    held = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    first = [tag("th", head.removeprefix("#"), scope="col", class_="n" if head.startswith("#") else None) if head
             else tag("td") for head in heads]  # fmt: skip
    body = [
        tag("tr", *(_cell(cell, "th" if named and not place else "td") for place, cell in enumerate(row)))
        for row in held
    ]
    can_sort = sorts and len(held) > 2
    made = tag("table", tag("caption", plain(caption)), tag("thead", tag("tr", *first)), tag("tbody", *body),
               class_="sorts" if can_sort else None)  # fmt: skip
    return tag("div", made, class_="scroll", role="region", aria_label=plain(caption), tabindex="0")


def _cell(cell: Cell, kind: str) -> Markup:
    shown = cell.shown if isinstance(cell.shown, (Markup, list, tuple)) or cell.shown is None else plain(cell.shown)
    return tag(kind, shown, class_=cell.kind or "text", scope="row" if kind == "th" else None, data_value=cell.value)


def tiles(held: Mapping[str, tuple[str, str] | str]) -> Markup:
    """Numbers to see first: a name, the number, and a line about it."""
    made = []
    for name, value in held.items():
        shown, of = value if isinstance(value, tuple) else (value, "")
        made.append(
            tag(
                "div",
                tag("dt", plain(name)),
                tag("dd", plain(shown)),
                tag("dd", plain(of), class_="of") if of else None,
                class_="tile",
            )
        )
    return tag("dl", made, class_="tiles")


def charts(*drawn: Markup | None) -> Markup | None:
    """Charts side by side, where the page is wide enough."""
    there = [each for each in drawn if each is not None]
    return tag("div", there, class_="charts") if there else None


def note(*text: Child, kind: str = "") -> Markup:
    """A remark that stands out."""
    return tag("div", tag("p", *text), class_=f"note {kind}".strip())


def soft(*text: Child) -> Markup:
    """A remark that does not stand out."""
    return tag("p", *text, class_="soft")


def command(*lines: Sequence[object]) -> Markup:
    """Commands to copy, a line each, from their words: whatever a path is called, a shell takes it for a path."""
    return tag("pre", tag("code", "\n".join(plain(shlex.join(map(str, words)), MOST_COMMAND) for words in lines)))


def details(summary: str, *body: Child) -> Markup:
    """A part that is folded at first."""
    return tag("details", tag("summary", summary), joined(body))
