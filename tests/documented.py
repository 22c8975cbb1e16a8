"""What documents show: their fenced blocks, headings and links, read the same way by every test of the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.write_tables import documents

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = [*documents(), *NOTEBOOKS]

_FENCE = re.compile(r"^( *)(`{3,}|:{3,})([^\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int  # of the page, of the opening fence, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(path: Path) -> str:
    """`docs/serving.md`: a page's name in a test's id."""
    return path.relative_to(ROOT).as_posix()


@cache
def prose_of(page: Path) -> str:
    """A page as Markdown; of a notebook the cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown") + "\n"


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, in order."""
    text = prose_of(page)
    for found in _FENCE.finditer(text):
        indent, body = found[1], found[4]
        if indent:
            body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        yield Fence(page, text.count("\n", 0, found.start()) + 1, found[3].strip(), body)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    shown = _FENCE.sub("", prose_of(page))
    titles = [re.sub(r"[^\w -]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", shown, re.MULTILINE)]
    return {title.replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links and pictures, code left out."""
    shown = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", prose_of(page)))
    yield from re.findall(r"\]\(([^)\s]+)\)", shown)
    yield from re.findall(r"<(?:img|source)[^>]* src(?:set)?=\"([^\"]+)\"", shown)
