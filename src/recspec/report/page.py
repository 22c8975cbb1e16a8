"""The frame of a page, its escaped HTML elements, and numbers as it shows them."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import TypeGuard

from recspec import __version__

MOST_TEXT = 200
"""Characters of an id, title or value that a page shows."""

VOID = {"meta", "link", "br", "hr", "img", "input"}

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Markup(str):
    """HTML that goes onto a page as it is; any other text is escaped."""

    __slots__ = ()


Child = object
"""A text, a number, `Markup`, None (nothing), or a list or tuple of these."""


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element: `tag("p", "1 < 2", class_="soft")`. None and False leave an attribute out, True gives it no value."""
    opened = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{opened}>")
    return Markup(f"<{name}{opened}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Children one after the other, escaped."""
    return Markup("".join(_of(child) for child in children))


def coded(text: object, most: int = 2_000) -> list[Child]:
    """A sentence in which what stands between backticks is code."""
    parts = plain(text, most).split("`")
    if len(parts) % 2 == 0:
        return ["`".join(parts)]
    return [tag("code", part) if place % 2 else part for place, part in enumerate(parts)]


def plain(text: object, most: int = MOST_TEXT) -> str:
    """A text without control characters and changes of direction, and not longer than a page can show."""
    shown = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text)[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _of(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return joined(child)
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(child)))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_of(value)}"'


HUGE = 10**18
"""From here on, a number in a file is a mistake or an attack; some have no text and no place on an axis."""


def number(value: object, digits: int = 4) -> str:
    """A count with thousands, another number with some significant digits, a dash for none; texts as they are."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return plain(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < HUGE else "huge"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "-infinite"
    if value == int(value) and 1_000 <= abs(value) < HUGE:
        return f"{int(value):,}"
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.{max(0, digits - max(0, len(str(int(abs(value)))) - 1))}f}"


def data_number(value: float) -> str:
    """A number of the data, such as a year: as `number` shows it, but without thousands."""
    return number(value).replace(",", "")


def signed(value: float, digits: int = 4) -> str:
    """A difference, with its sign."""
    shown = number(value, digits)
    return shown if value < 0 or math.isnan(value) or float(value) == 0 else f"+{shown}"


def _is_known(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and abs(value) < HUGE  # which is false of NaN


def percent(share: object, digits: int = 1) -> str:
    """A share as a percentage; one that rounds to 0 is written as less than the smallest shown."""
    if not _is_known(share):
        return "–"
    least = 10.0**-digits
    if 0 < 100 * share < least / 2:
        return f"under {least:g} %"
    return f"{100 * share:.{digits}f} %"


def duration(seconds: object) -> str:
    """`12.3 s`, `4 min 10 s`, `2 h 5 min`."""
    if not _is_known(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours:,} h {of_hour} min" if hours else f"{minutes} min {rest} s"


def size(count: object) -> str:
    """Bytes in the largest fitting unit."""
    if not _is_known(count):
        return "–"
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(count) < 1_000 or unit == "GB":
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1_000
    raise AssertionError


def moment(seconds: object) -> str:
    """A Unix time as a date and time in UTC; a dash where it is none."""
    if not isinstance(seconds, (int, float)):
        return "–"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):
        return "–"


def p_value(value: float) -> str:
    """A p-value; small ones as a bound."""
    return "–" if math.isnan(value) else "under 0.001" if value < 0.001 else f"{value:.3f}"


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
    return tag(
        "section",
        tag("h2", section.title, id=f"{section.name}-title"),
        *section.body,
        id=section.name,
        aria_labelledby=f"{section.name}-title",
    )


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
    first = [
        tag("th", head.removeprefix("#"), scope="col", class_="n" if head.startswith("#") else None)
        if head
        else tag("td")
        for head in heads
    ]
    body = [
        tag("tr", *(_cell(cell, "th" if named and not place else "td") for place, cell in enumerate(row)))
        for row in held
    ]
    can_sort = sorts and len(held) > 2
    made = tag(
        "table",
        tag("caption", plain(caption)),
        tag("thead", tag("tr", *first)),
        tag("tbody", *body),
        class_="sorts" if can_sort else None,
    )
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
