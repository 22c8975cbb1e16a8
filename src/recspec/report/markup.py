"""HTML elements whose texts and attributes are escaped, so that no id or title can add markup to a page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

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
