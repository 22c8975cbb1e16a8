"""Charts as inline SVG, drawn by matplotlib.

Every chart is about 400 units wide, so that its text has the size of the page's on a phone; a page puts several charts
side by side. Colours are CSS variables: a chart follows the page's light or dark theme. Only numbers, and words of
recspec's own, are drawn. Names from data stand in the HTML beside a chart, where they are escaped.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from recspec.base.errors import require_extra
from recspec.report.page import macro, plain

WIDTH, HEIGHT = 400, 240  # CSS pixels at full size
MOST_HOVERED = 80
"""Points of a chart with a tooltip each."""

SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
INK, SOFT, LINE = "#0b0001", "#0b0002", "#0b0003"
VARIABLES = {colour: f"var(--c{place})" for place, colour in enumerate(SERIES, 1)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"}
"""Colours that matplotlib is given -> what a page calls them."""

DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
HATCHES = (None, "///", "...", "xx", "\\\\", "++")
MARKERS = ("o", "s", "^", "D", "v", "P")
POINTS = {"^": "12,2 16,10 8,10", "v": "12,10 16,2 8,2", "D": "12,1 17,6 12,11 7,6", "s": "8,2 16,2 16,10 8,10"}
"""Marker -> the corners of its sample in a legend; the others are circles."""

SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "recspec",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "axes.formatter.useoffset": False,
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "hatch.linewidth": 0.5,
}

Values = Sequence[float] | NDArray[Any]


@dataclass(frozen=True)
class Series:
    """Points of one name; their colour, dash and marker come from the place among the chart's series."""

    name: str
    x: Values
    y: Values
    hover: Sequence[str] = ()
    """A tooltip for each point."""


def lines(
    name: str,
    series: Sequence[Series],
    *,
    title: str,
    x: str,
    y: str,
    marks: Mapping[str, float] | None = None,
    names: Sequence[str] = (),
) -> Markup:
    """Lines over numbers, with vertical `marks` at places of interest; a figure with its legend.

    `names` stand under the axis in place of 0, 1 and so on.
    """
    with _drawing(name, title, x, y) as chart:
        for place, each in enumerate(series):
            chart.plot(place, each, linewidth=1.8, markersize=4, is_marked=len(each.x) <= 30)
            if len(each.x) <= MOST_HOVERED:
                chart.hover(each.x, each.y, each.hover)
        for at in (marks or {}).values():
            chart.axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        if names:
            chart.name_places(range(len(names)), names)
        return chart.figure(_described(series, x, y), _legend(series), *(f"┆ {text}" for text in marks or {}))


def columns(
    name: str,
    edges: Values,
    heights: Values,
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
) -> Markup:
    """A histogram: columns between edges."""
    left, right = np.asarray(edges[:-1], float), np.asarray(edges[1:], float)
    with _drawing(name, title, x, y) as chart:
        bars = chart.axes.bar(left, heights, right - left, align="edge", color=SERIES[0], linewidth=0.4, edgecolor=LINE)
        told = [f"{a:.4g} to {b:.4g}: {of:,.4g}" for a, b, of in zip(left, right, heights, strict=True)]
        chart.hover_patches(bars, told)
        if log:
            chart.axes.set_xscale("log")
            chart.count_in_tens(float(left[0]), float(right[-1]))
        return chart.figure(f"{y} by {x}; the highest column is {max(heights, default=0):,.4g}.")


def grouped(
    name: str,
    labels: Sequence[str],
    series: Mapping[str, Values],
    *,
    title: str,
    x: str,
    y: str,
    level: float | None = None,
) -> Markup:
    """Columns side by side for each label, one of each series; `level` is a dashed line to compare with."""
    count, at = max(1, len(series)), np.arange(len(labels))
    with _drawing(name, title, x, y) as chart:
        for place, (who, heights) in enumerate(series.items()):
            left, hatch = at + (place - (count - 1) / 2) * 0.8 / count, HATCHES[place % len(HATCHES)]
            style = {"color": _colour(place), "edgecolor": INK, "linewidth": 0.3, "hatch": hatch}
            bars = chart.axes.bar(left, heights, 0.8 / count, **style)
            told = [f"{who}, {label}: {value:,.4g}" for label, value in zip(labels, heights, strict=True)]
            chart.hover_patches(bars, told)
        if level is not None:
            chart.axes.axhline(level, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        chart.name_places(at, labels)
        keys = [_key(place, who, is_patch=True) for place, who in enumerate(series)] if count > 1 else []
        return chart.figure(f"{y} by {x}, for {len(labels)} ranges.", keys)


def ranges(
    name: str, labels: Sequence[str], values: Values, low: Values, high: Values, *, title: str, x: str, y: str
) -> Markup:
    """A value with its interval for each label, beside a line at 0."""
    at = np.arange(len(labels))
    middle, down, up = (np.asarray(each, float) for each in (values, low, high))
    with _drawing(name, title, x, y) as chart:
        chart.axes.axhline(0, color=SOFT, linewidth=1)
        ends = [middle - down, up - middle]
        chart.axes.errorbar(at, middle, ends, fmt="o", color=SERIES[0], capsize=4, linewidth=1.8)
        told = [f"{n}: {m:+.4g} ({a:+.4g} to {b:+.4g})" for n, m, a, b in zip(labels, middle, down, up, strict=True)]
        chart.hover(at, middle, told)
        chart.name_places(at, labels)
        chart.axes.set_xlim(-0.6, len(labels) - 0.4)
        return chart.figure("; ".join(told))


def reliability(name: str, series: Sequence[Series], *, title: str) -> Markup:
    """Share of positives over the mean probability of each bin, beside the diagonal of perfect calibration."""
    x, y = "mean probability", "share of positives"
    with _drawing(name, title, x, y) as chart:
        top = max((float(np.max(v)) for each in series for v in (each.x, each.y) if len(v)), default=1.0)
        chart.axes.plot([0, top], [0, top], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for place, each in enumerate(series):
            chart.plot(place, each, linewidth=1.4, markersize=5)
            chart.hover(each.x, each.y, each.hover)
        return chart.figure(_described(series, x, y), _legend(series), "┄ perfectly calibrated")


def bar(share: float, place: int = 0) -> Markup:
    """A bar for a table cell, of a share of its width; the number stands in another cell."""
    return macro("bar", round(100 * min(1.0, max(0.0, share)), 1), VARIABLES[_colour(place)])


def whisker(
    low: float, value: float, high: float, least: float, most: float, place: int = 0, *, zero: bool = False
) -> Markup:
    """An interval for a table cell, on the scale from `least` to `most`; the numbers stand in other cells.

    `zero` draws a line in the middle of the scale.
    """
    span = (most - least) or 1.0
    ends = [round(4 + 192 * (each - least) / span, 1) for each in (low, value, high)]
    return macro("whisker", ends if least <= value <= most else None, VARIABLES[_colour(place)], zero)


def _legend(series: Sequence[Series]) -> list[Markup]:
    return [_key(place, each.name) for place, each in enumerate(series)] if len(series) > 1 else []


def _key(place: int, name: str, *, is_patch: bool = False) -> Markup:
    """A sample of a series and its name."""
    points = POINTS.get(MARKERS[place % len(MARKERS)], "")
    hatch = (HATCHES[place % len(HATCHES)] or "") if is_patch else None
    return macro("key", name, VARIABLES[_colour(place)], DASHES[place % len(DASHES)], points, hatch)


def _colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def _described(series: Sequence[Series], x: str, y: str) -> str:
    told = []
    for each in series:
        values = np.asarray(each.y, float)
        values = values[np.isfinite(values)]
        if len(values):
            span = f"{values.min():.4g} to {values.max():.4g}"
            told.append(f"{plain(each.name, 60)}: {values[0]:.4g} first, {values[-1]:.4g} last, {span}")
    return f"{y} over {x}. " + "; ".join(told)


# --- drawing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _drawing(name: str, title: str, x: str, y: str) -> Iterator[_Chart]:
    """A chart under this module's settings of matplotlib; those of the caller are put back afterwards."""
    matplotlib = require_extra("matplotlib", "report")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield _Chart(name, title, x, y)


class _Chart:
    """One figure with one pair of axes, and the tooltips of its parts."""

    def __init__(self, name: str, title: str, x: str, y: str) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.name, self.title = f"chart-{name}", plain(title)
        self.canvas = FigureCanvasSVG(Figure(figsize=(WIDTH / 72, HEIGHT / 72)))
        # a layout engine would take most of the time
        self.axes = self.canvas.figure.add_axes((0.14, 0.19, 0.84, 0.77), xlabel=x, ylabel=y)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.grid(axis="y", color=LINE, linewidth=0.6)
        self.axes.set_axisbelow(True)
        self.tooltips: dict[str, str] = {}

    def plot(self, place: int, series: Series, *, linewidth: float, markersize: float, is_marked: bool = True) -> None:
        """The line of a series."""
        dash = DASHES[place % len(DASHES)]
        self.axes.plot(
            series.x,
            series.y,
            color=_colour(place),
            linewidth=linewidth,
            linestyle=(0, tuple(map(float, dash.split()))) if dash else "-",
            marker=MARKERS[place % len(MARKERS)] if is_marked else None,
            markersize=markersize,
        )

    def name_places(self, at: Values, labels: Sequence[str]) -> None:
        """Names under the axis, leaving some out where there is no room."""
        room = (WIDTH - 60) / 5.5  # characters
        step = max(1, math.ceil(sum(len(label) + 2 for label in labels) / room))
        self.axes.set_xticks([*at][::step], [*labels][::step])

    def count_in_tens(self, low: float, high: float) -> None:
        """Plain numbers under a logarithmic axis."""
        tens = [10.0**power for power in range(13) if low <= 10.0**power <= high]
        self.axes.set_xticks(tens, [f"{each:,.0f}" for each in tens])
        self.axes.minorticks_off()

    def hover(self, x: Values, y: Values, texts: Sequence[str]) -> None:
        """Invisible points that tell their numbers."""
        for a, b, text in zip(x, y, texts, strict=False):
            if len(self.tooltips) < MOST_HOVERED:
                self.axes.plot([a], [b], "o", markersize=9, color=INK, alpha=0, gid=self._gid(text))

    def hover_patches(self, patches: Any, texts: Sequence[str]) -> None:
        """Tooltips of columns."""
        for patch, text in zip(patches, texts, strict=True):
            if len(self.tooltips) < MOST_HOVERED:
                patch.set_gid(self._gid(text))

    def _gid(self, text: str) -> str:
        gid = f"tip{len(self.tooltips)}"
        self.tooltips[gid] = text
        return gid

    def figure(self, description: str, keys: Sequence[Markup] = (), *notes: str) -> Markup:
        """The chart with its caption and legend; its ids begin with `chart-NAME`."""
        written = io.StringIO()
        self.canvas.figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        drawn = ElementTree.fromstring(written.getvalue())
        named = {"role": "img", "aria-labelledby": f"{self.name}-title {self.name}-desc"}
        root = ElementTree.Element("svg", {"viewBox": drawn.get("viewBox", ""), "class": "chart", **named})
        for kind, text in (("title", self.title), ("desc", plain(description, 600))):
            ElementTree.SubElement(root, kind, id=f"{self.name}-{kind}").text = text
        root.extend(self._elements(drawn))
        svg = ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
        return macro("figure", self.title, Markup(svg), [*keys, *notes])

    def _elements(self, parent: ElementTree.Element) -> Iterator[ElementTree.Element]:
        """Parts of matplotlib's SVG without style attributes and sheets, which the page's policy forbids."""
        for node in parent:
            kind = _local(node.tag)
            if kind in ("style", "metadata"):
                continue
            attributes: dict[str, str] = {}
            for key, value in node.attrib.items():
                attributes |= _presentation(value) if key == "style" else {_local(key): value}
            tip = self.tooltips.get(attributes.get("id", ""))
            if kind == "g" and tip is None:
                attributes.pop("id", None)
            made = ElementTree.Element(kind, {key: self._value(key, value) for key, value in attributes.items()})
            if tip is not None:
                ElementTree.SubElement(made, "title").text = plain(tip)
            if kind == "text":
                made.text = (node.text or "").strip()
            made.extend(self._elements(node))
            yield made

    def _value(self, key: str, value: str) -> str:
        """An attribute's value with the page's colours, and with ids that begin with the chart's name."""
        if key == "id":
            return f"{self.name}-{value}"
        if key == "href":
            return f"#{self.name}-{value.lstrip('#')}"
        return VARIABLES.get(value.lower(), value).replace("url(#", f"url(#{self.name}-")


def _presentation(style: str) -> dict[str, str]:
    """The properties of a style attribute as attributes of their own; the font's family is the page's."""
    found: dict[str, str] = {}
    for part in style.split(";"):
        key, _, value = (each.strip() for each in part.partition(":"))
        if key == "font":
            found["font-size"] = next(iter(re.findall(r"([\d.]+)px", value)), "9")
        elif key and key != "font-family":
            found[key] = value
    return found


def _local(name: str) -> str:
    return name.rpartition("}")[2]
