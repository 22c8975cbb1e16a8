"""Numbers with a decimal comma, as a setting declares them: `1.234,5` is 1234.5."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import ibis
from ibis.expr.types import Column as Values

from recspec.errors import how_many
from recspec.prepare.names import ROW
from recspec.prepare.raw_files import NUMBER, RawRows, is_missing_marker
from recspec.prepare.tables import figures

COMMA = r"^[+-]?([0-9]{1,3}(\.[0-9]{3})+|[0-9]+)?,[0-9]+([eE][+-]?[0-9]{1,3})?$"
GROUPED = r"^[+-]?[0-9]{1,3}(\.[0-9]{3})+$"
"""Thousands with points; without a comma in the column they may also be fractions."""


def with_points(rows: RawRows, as_written: Collection[str]) -> RawRows:
    """The rows with a point in the numbers of text columns that hold nothing else, but for columns `as_written`.

    Problems of `rows` name numbers with a point, which may be a fraction or thousands.
    """
    table, declared = rows.table, rows.reading.types
    names = [name for name in table.columns if name not in (ROW, *as_written) and table[name].type().is_string()
             and (name not in declared or declared[name].type in ("integer", "number"))]  # fmt: skip
    asked: dict[str, Values] = {}
    for place, name in enumerate(names):
        text = table[name].strip()
        number = text.re_search(COMMA) | text.re_search(GROUPED) | text.re_search(NUMBER)
        tests = {"commas": text.re_search(COMMA), "points": text.re_search(NUMBER) & text.contains("."),
                 "rest": (text != "") & ~number & ~is_missing_marker(text)}  # fmt: skip
        asked |= {f"{what}_{place}": test.cast("int64").sum() for what, test in tests.items()}
    found = figures(rows.backend, table, asked) if asked else {}
    changed: dict[str, Values] = {}
    for place, name in enumerate(names):
        commas, points, rest = (int(found[f"{what}_{place}"] or 0) for what in ("commas", "points", "rest"))
        if rest and name not in declared:
            continue
        text = table[name].strip()
        if points:
            with_point = text.re_search(NUMBER) & text.contains(".")
            rows.refuse(with_point & ~text.re_search(GROUPED) if commas else with_point, name,
                        "expected a decimal comma, as the setting decimal says", nullable=True,
                        remedy="; write it with a comma, or declare the column text in types")  # fmt: skip
        if commas:
            is_number = text.re_search(COMMA) | text.re_search(GROUPED)
            changed[name] = ibis.ifelse(is_number, text.replace(".", "").replace(",", "."), table[name])
            rows.notes.changed.append(f"'{name}': {how_many(commas, 'number')} with a decimal comma, read with a point")
    return replace(rows, raw=table.mutate(**changed)) if changed else rows
