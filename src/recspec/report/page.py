"""Pages made from the templates of this folder, and numbers as they show them."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, TypeGuard

from markupsafe import Markup

from recspec import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_TEXT = 200
"""Characters of an id, title or value that a page shows."""
MOST_COMMAND = 20_000
"""Characters of a command."""
HUGE = 10**18
"""From here on, a number in a file is a mistake or an attack; some have no text and no place on an axis."""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def render(template: str, title: str, sections: Mapping[str, str], **values: object) -> str:
    """A page whose sections, id -> heading, are blocks of the same names in a template.

    Its policy allows the style sheet and the script of this file, by their digests, and nothing else: no request, no
    other script, no form. Whatever a title might smuggle in would stay dead.
    """
    own = resources.files("recspec.report") / "templates"
    style, script = (Markup((own / name).read_text("utf-8")) for name in ("page.css", "page.js"))
    frame = {"title": title, "sections": sections, "style": style, "script": script, "version": __version__}
    return templates().get_template(template).render(**frame, **values)


def macro(name: str, *arguments: object) -> Markup:
    """What a macro of `macros.html` writes."""
    written: Markup = getattr(templates().get_template("macros.html").module, name)(*arguments)
    return written


@cache
def templates() -> Environment:
    """The templates. Every value that is not `Markup` is escaped and loses its control characters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("recspec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "" if value is None else value if isinstance(value, Markup) else _printable(str(value)),
    )
    found.filters |= {each.__name__: each for each in (cell, coded, digest, number, plain, shell)}
    return found


def plain(text: object, most: int = MOST_TEXT) -> str:
    """A text without control characters and changes of direction, and not longer than a page can show."""
    shown = _printable(str(text)[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def coded(text: object, most: int = 2_000) -> str:
    """A sentence in which what stands between backticks is code."""
    parts = plain(text, most).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(part) if place % 2 else part for place, part in enumerate(parts))


def shell(words: Sequence[object]) -> str:
    """A command to copy, from its words: whatever a path is called, a shell takes it for a path."""
    return plain(shlex.join(map(str, words)), MOST_COMMAND)


def digest(text: str) -> str:
    """The source of a policy that allows a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and the value by which it sorts."""

    shown: object
    value: float | str | None = None
    kind: str = "text"
    mark: str = ""
    """`best`, `strong` or `code`."""


def cell(content: object) -> Cell:
    """A value as a cell; a text is cut to what a page can show."""
    if isinstance(content, Cell):
        return content
    return Cell(content if isinstance(content, Markup) or content is None else plain(content))


def num(value: object, shown: str | None = None, *, best: bool = False) -> Cell:
    """A number, aligned to the right."""
    known = value if isinstance(value, (int, float)) else ""
    return Cell(number(value) if shown is None else shown, known, "n", "best" if best else "")


def strong(text: str) -> Cell:
    """A name that stands out."""
    return Cell(text, mark="strong")


def code(text: str) -> Cell:
    """A text of a file."""
    return Cell(text, mark="code")


def draw(drawn: Markup) -> Cell:
    """A small chart inside a table."""
    return Cell(drawn, "", "draw")


def table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, sorts: bool = True, named: bool = True
) -> Markup:
    """A table that scrolls by itself where the page is narrow. With `named`, the first cell of a row is its head.

    A head that begins with `#` is of numbers, an empty one of small charts.
    """
    return macro("table", caption, heads, [*rows], sorts, named)


# --- numbers ---------------------------------------------------------------------------------------------------------


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
