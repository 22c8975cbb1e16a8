"""The label of raw rows, as 0 and 1."""

from __future__ import annotations

import ibis
from ibis.expr.types import Column as Values

from recspec.errors import listed
from recspec.prepare.raw_rows import NUMBER, RawRows
from recspec.prepare.tables import fetch

LABELS = {1: ("1", "1.0", "true", "t", "yes", "y"), 0: ("0", "0.0", "false", "f", "no", "n")}
"""Spellings of a label, in any case."""


def label_of(rows: RawRows, name: str, positive_from: float | None) -> Values:
    """The label column as 0 and 1; 1 from `positive_from` on, if given."""
    values = rows.table[name]
    if positive_from is not None:
        number = values
        if values.type().is_string():
            text = values.strip()
            number = ibis.ifelse(text.re_search(NUMBER), text, None).try_cast("float64")
        rows.refuse(number.isnull(), name, "expected a number, as positive_from is set", ", the label")
        return (number >= positive_from).cast("int64")
    expected = "expected 0 or 1, true or false, yes or no (or set positive_from to where a 1 begins)"
    if not values.type().is_string():
        rows.refuse(values.isnull() | ~values.isin([0, 1]), name, expected, ", the label")
        return values.cast("int64")
    text = values.strip().lower()
    pairs = [(word, label) for label, words in LABELS.items() for word in words]
    label = text.cases(*pairs, else_=None)
    rows.refuse(label.isnull(), name, expected, ", the label")
    held = fetch(rows.backend, rows.table.group_by(word=values.strip()).aggregate(rows=rows.table.count()))
    words = sorted({str(word) for word in held.column("word").to_pylist()} - {"0", "1"})
    if words and not rows.problems:
        ones = [word for word in words if word.lower() in LABELS[1]]
        zeros = [word for word in words if word.lower() in LABELS[0]]
        told = [f"{listed(each)} as {value}" for value, each in ((1, ones), (0, zeros)) if each]
        rows.notes.changed.append(f"label '{name}': {' and '.join(told)}")
    return label
