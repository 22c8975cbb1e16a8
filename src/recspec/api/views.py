"""Text and HTML views of results: tables with titles and notes. Every text is escaped, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from recspec.base.summaries import shown

WIDEST = 60
"""Characters of a cell in a text view; longer ones are cut."""
MOST_ROWS = 60
"""Rows of a table in a view."""
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( |$)|$")


@dataclass(frozen=True)
class Section:
    """A table with a title; columns of numbers stand at the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def to_text(self) -> str:
        """The table in columns of text."""
        cells = [[_line(shown(value)) for value in row] for row in self.rows[:MOST_ROWS]]
        lines = [list(map(_line, self.columns)), *cells] if any(self.columns) else cells
        widths = [max((len(line[at]) for line in lines), default=0) for at in range(len(self.columns))]
        right = [self.is_of_numbers(at) for at in range(len(self.columns))]
        texts = [
            "  ".join(
                text.rjust(width) if is_right else text.ljust(width)
                for text, width, is_right in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join(
            [*([_line(self.title)] if self.title else []), *(f"  {text}" for text in texts), *self._rest()]
        )

    def is_of_numbers(self, at: int) -> bool:
        """Whether all cells of a column begin with a number, or are empty."""
        return all(_NUMBER.match(shown(row[at])) for row in self.rows)

    def to_html(self) -> str:
        """The table as HTML."""
        head = "".join(f"<th>{escape(str(name))}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows[:MOST_ROWS])
        title = f"<caption style='text-align:left'>{escape(self.title)}</caption>" if self.title else ""
        rest = "".join(f"<p>{escape(line.strip())}</p>" for line in self._rest())
        thead = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        return f"<table>{title}{thead}<tbody>{body}</tbody></table>{rest}"

    def _rest(self) -> list[str]:
        return [f"  ... {len(self.rows) - MOST_ROWS:,} more rows"] if len(self.rows) > MOST_ROWS else []


@dataclass(frozen=True)
class View:
    """A result to look at: a title, tables, and notes."""

    title: str
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    """What stands above everything else."""
    remarks: Sequence[str] = ()
    """What the command line prints on standard error, each with a word such as `note: ` before it."""

    def to_text(self) -> str:
        """The view as text."""
        warned, notes = (
            [f"{word}: {_printable(each)}" for each in told]
            for word, told in (("warning", self.warnings), ("note", self.notes))
        )
        sections = [each.to_text() for each in self.sections]
        return "\n".join([*warned, _line(self.title), *sections, *notes, *map(_printable, self.remarks)])

    def to_html(self) -> str:
        """The view as HTML, without scripts."""
        tables = "".join(each.to_html() for each in self.sections)
        notes = "".join(f"<li>{escape(note)}</li>" for note in (*self.notes, *self.remarks))
        listing = f"<ul>{notes}</ul>" if notes else ""
        warned = "".join(f"<p><b>warning: {escape(each)}</b></p>" for each in self.warnings)
        return f"<div>{warned}<p><b>{escape(self.title)}</b></p>{tables}{listing}</div>"


class Viewed:
    """A result with a text view and an HTML view for notebooks."""

    def view(self) -> View:
        """The result as tables and notes."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.view().to_text()

    def _repr_html_(self) -> str:
        return self.view().to_html()

    def to_html(self) -> str:
        """The HTML view, without scripts; texts of the data are escaped."""
        return self.view().to_html()


def figures(title: str, values: Mapping[str, object]) -> Section:
    """Names and values as a table of two columns."""
    return Section(title, ("", ""), [(name, shown(value)) for name, value in values.items()])


def _line(text: str) -> str:
    """A printable line of bounded length."""
    plain = _printable(text)
    return plain if len(plain) <= WIDEST * 3 else f"{plain[: WIDEST * 3]}..."


def _printable(text: str) -> str:
    """One line, in which nothing moves the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def _cell(value: object) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    style = " style='text-align:right'" if is_number else " style='text-align:left'"
    return f"<td{style}>{escape(shown(value))}</td>"
