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
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import require_extra
from recspec.report.page import Markup, plain, tag

WIDTH, HEIGHT = 400, 240  # CSS pixels at full size
MOST_HOVERED = 80
"""Points of a chart with a tooltip each."""

SERIES = ("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")
INK, SOFT, LINE = "#0b0001", "#0b0002", "#0b0003"
VARIABLES = {
    **{colour: f"var(--c{place})" for place, colour in enumerate(SERIES, 1)},
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
}
"""Colours that matplotlib is given -> what a page calls them."""

DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
HATCHES = (None, "///", "...", "xx", "\\\\", "++")
MARKERS = ("o", "s", "^", "D", "v", "P")

Values = Sequence[float] | NDArray[Any]


@dataclass(frozen=True)
class Series:
    """Points of one name; their colour, dash and marker come from the place among the chart's series."""

    name: str
    x: Values
    y: Values
    hover: Sequence[str] = field(default=())
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
    with _drawing() as chart:
        for place, each in enumerate(series):
            few = len(each.x) <= MOST_HOVERED
            chart.axes.plot(
                each.x,
                each.y,
                color=_colour(place),
                linewidth=1.8,
                linestyle=_dash(place),
                marker=MARKERS[place % len(MARKERS)] if few and len(each.x) <= 30 else None,
                markersize=4,
            )
            if few:
                chart.hover(each.x, each.y, each.hover)
        for at in (marks or {}).values():
            chart.axes.axvline(at, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        if names:
            chart.name_places(range(len(names)), names)
        chart.label(x, y)
        svg = chart.svg(name, title, _described(series, x, y))
    keys = [legend(place, each.name) for place, each in enumerate(series)] if len(series) > 1 else []
    notes = [tag("span", "┆ ", text, class_="key") for text in marks or {}]
    return figure(svg, title, keys + notes)


def columns(
    name: str,
    edges: Values,
    heights: Values,
    *,
    title: str,
    x: str,
    y: str,
    labels: Sequence[str] = (),
    log: bool = False,
) -> Markup:
    """A histogram: columns between edges; `labels` name the places instead of numbers."""
    left, right = np.asarray(edges[:-1], float), np.asarray(edges[1:], float)
    with _drawing() as chart:
        bars = chart.axes.bar(left, heights, right - left, align="edge", color=SERIES[0], linewidth=0.4, edgecolor=LINE)
        told = labels or [f"{a:.4g} to {b:.4g}" for a, b in zip(left, right, strict=True)]
        chart.hover_patches(bars, [f"{a}: {b:,.4g}" for a, b in zip(told, heights, strict=True)])
        if log:
            chart.axes.set_xscale("log")
            chart.count_in_tens(float(left[0]), float(right[-1]))
        if labels:
            chart.name_places((left + right) / 2, labels)
        chart.label(x, y)
        svg = chart.svg(name, title, f"{y} by {x}; the highest column is {max(heights, default=0):,.4g}.")
    return figure(svg, title)


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
    count = max(1, len(series))
    with _drawing() as chart:
        for place, (who, heights) in enumerate(series.items()):
            at = np.arange(len(labels)) + (place - (count - 1) / 2) * 0.8 / count
            bars = chart.axes.bar(
                at,
                heights,
                0.8 / count,
                color=_colour(place),
                edgecolor=INK,
                linewidth=0.3,
                hatch=HATCHES[place % len(HATCHES)],
            )
            told = [f"{label}: {value:,.4g}" for label, value in zip(labels, heights, strict=True)]
            chart.hover_patches(bars, [f"{who}, {text}" for text in told])
        if level is not None:
            chart.axes.axhline(level, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        chart.name_places(np.arange(len(labels)), labels)
        chart.label(x, y)
        svg = chart.svg(name, title, f"{y} by {x}, for {len(labels)} ranges.")
    return figure(svg, title, [legend(place, who, patch=True) for place, who in enumerate(series)] if count > 1 else [])


def ranges(
    name: str, labels: Sequence[str], values: Values, low: Values, high: Values, *, title: str, x: str, y: str
) -> Markup:
    """A value with its interval for each label, beside a line at 0."""
    at = np.arange(len(labels))
    middle, down, up = (np.asarray(each, float) for each in (values, low, high))
    with _drawing() as chart:
        chart.axes.axhline(0, color=SOFT, linewidth=1)
        chart.axes.errorbar(
            at, middle, [middle - down, up - middle], fmt="o", color=SERIES[0], capsize=4, linewidth=1.8
        )
        told = [f"{n}: {m:+.4g} ({a:+.4g} to {b:+.4g})" for n, m, a, b in zip(labels, middle, down, up, strict=True)]
        chart.hover(at, middle, told)
        chart.name_places(at, labels)
        chart.axes.set_xlim(-0.6, len(labels) - 0.4)
        chart.label(x, y)
        svg = chart.svg(name, title, "; ".join(told))
    return figure(svg, title)


def reliability(name: str, series: Sequence[Series], *, title: str) -> Markup:
    """Share of positives over the mean probability of each bin, beside the diagonal of perfect calibration."""
    with _drawing() as chart:
        top = max((float(np.max(v)) for each in series for v in (each.x, each.y) if len(v)), default=1.0)
        chart.axes.plot([0, top], [0, top], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for place, each in enumerate(series):
            chart.axes.plot(
                each.x,
                each.y,
                color=_colour(place),
                linestyle=_dash(place),
                linewidth=1.4,
                marker=MARKERS[place % len(MARKERS)],
                markersize=5,
            )
            chart.hover(each.x, each.y, each.hover)
        chart.label("mean probability", "share of positives")
        svg = chart.svg(name, title, _described(series, "mean probability", "share of positives"))
    keys = [legend(place, each.name) for place, each in enumerate(series)] if len(series) > 1 else []
    return figure(svg, title, [*keys, tag("span", "┄ perfectly calibrated", class_="key")])


def bar(share: float, place: int = 0) -> Markup:
    """A bar for a table cell, of a share of its width; the number stands in another cell."""
    width = round(100 * min(1.0, max(0.0, share)), 1)
    rect = tag("rect", width=width, height=10, rx=2, fill=f"var(--c{place % len(SERIES) + 1})")
    return tag("svg", rect, class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


def whisker(low: float, value: float, high: float, least: float, most: float, place: int = 0) -> Markup:
    """An interval for a table cell, on the scale from `least` to `most`; the numbers stand in other cells."""
    span = (most - least) or 1.0
    if value < least or value > most:
        return tag("svg", class_="whisker", viewBox="0 0 200 16", aria_hidden="true")
    left, middle, right = (round(4 + 192 * (each - least) / span, 1) for each in (low, value, high))
    colour = f"var(--c{place % len(SERIES) + 1})"
    drawn = [
        tag("line", x1=left, x2=right, y1=8, y2=8, stroke=colour, stroke_width=2),
        *(
            tag("line", x1=at, x2=at, y1=4, y2=12, stroke=colour, stroke_width=2)
            for at in (left, right)
            if left != right
        ),
        tag("circle", cx=middle, cy=8, r=4, fill=colour),
    ]
    return tag("svg", *drawn, class_="whisker", viewBox="0 0 200 16", aria_hidden="true")


def legend(place: int, name: str, *, patch: bool = False) -> Markup:
    """A sample of a series and its name."""
    colour = f"var(--c{place % len(SERIES) + 1})"
    if patch:
        sample = [tag("rect", x=2, y=1, width=20, height=10, fill=colour, stroke="var(--ink)", stroke_width=0.5)]
        sample += [
            tag("line", x1=at, y1=11, x2=at + 8, y2=1, stroke="var(--ink)", stroke_width=0.7)
            for at in (4, 8, 12)
            if HATCHES[place % len(HATCHES)] == "///"
        ]
        sample += [
            tag("circle", cx=at, cy=6, r=1.2, fill="var(--ink)")
            for at in (6, 12, 18)
            if HATCHES[place % len(HATCHES)] == "..."
        ]
    else:
        dash = DASHES[place % len(DASHES)] or None
        sample = [
            tag("line", x1=0, x2=24, y1=6, y2=6, stroke=colour, stroke_width=2, stroke_dasharray=dash),
            _marker(place, colour),
        ]
    svg = tag("svg", *sample, width=24, height=12, viewBox="0 0 24 12", aria_hidden="true")
    return tag("span", svg, " ", plain(name, 60), class_="key")


def figure(svg: Markup, title: str, keys: Sequence[Markup] = ()) -> Markup:
    """A chart with its caption and legend."""
    return tag("figure", tag("figcaption", plain(title)), svg, tag("p", *keys, class_="keys") if keys else None)


def _marker(place: int, colour: str) -> Markup:
    shape = MARKERS[place % len(MARKERS)]
    points = {"^": "12,2 16,10 8,10", "v": "12,10 16,2 8,2", "D": "12,1 17,6 12,11 7,6", "s": "8,2 16,2 16,10 8,10"}
    if shape in points:
        return tag("polygon", points=points[shape], fill=colour)
    return tag("circle", cx=12, cy=6, r=4, fill=colour)


def _colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def _dash(place: int) -> Any:
    dash = DASHES[place % len(DASHES)]
    return (0, tuple(map(float, dash.split()))) if dash else "-"


def _described(series: Sequence[Series], x: str, y: str) -> str:
    told = []
    for each in series:
        held = np.asarray(each.y, float)
        held = held[np.isfinite(held)]
        if len(held):
            span = f"{held.min():.4g} to {held.max():.4g}"
            told.append(f"{plain(each.name, 60)}: {held[0]:.4g} first, {held[-1]:.4g} last, {span}")
    return f"{y} over {x}. " + "; ".join(told)


# --- drawing ---------------------------------------------------------------------------------------------------------


@contextmanager
def _drawing() -> Iterator[_Chart]:
    """A chart under this module's settings of matplotlib; those of the caller are put back afterwards."""
    matplotlib = require_extra("matplotlib", "report")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
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
        )
        yield _Chart()


class _Chart:
    """One figure with one pair of axes, and the tooltips of its parts."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        FigureCanvasSVG(self.figure)
        self.axes = self.figure.add_axes((0.14, 0.19, 0.84, 0.77))  # a layout engine would take most of the time
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.grid(axis="y", color=LINE, linewidth=0.6)
        self.axes.set_axisbelow(True)
        self.tooltips: dict[str, str] = {}

    def label(self, x: str, y: str) -> None:
        """Name the axes."""
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

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

    def svg(self, name: str, title: str, description: str) -> Markup:
        """The chart as an element whose ids begin with `chart-NAME`."""
        name = f"chart-{name}"
        written = io.StringIO()
        self.figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        root = ElementTree.fromstring(written.getvalue())
        labels = [
            tag("title", plain(title), id=f"{name}-title"),
            tag("desc", plain(description, 600), id=f"{name}-desc"),
        ]
        kept = [_element(child, name, self.tooltips) for child in root]
        return tag(
            "svg",
            labels,
            kept,
            viewBox=root.get("viewBox"),
            class_="chart",
            role="img",
            aria_labelledby=f"{name}-title {name}-desc",
        )


def _element(node: ElementTree.Element, name: str, tooltips: Mapping[str, str]) -> Markup | None:
    """An element of matplotlib's SVG without style attributes and sheets, which the page's policy forbids."""
    kind = _local(node.tag)
    if kind in ("style", "metadata"):
        return None
    attributes: dict[str, str] = {}
    for key, value in node.attrib.items():
        attributes |= _presentation(value) if key == "style" else {_local(key): value}
    tip = tooltips.get(attributes.get("id", ""))
    if kind == "g" and tip is None:
        attributes.pop("id", None)
    attributes = {key: _named(key, value, name) for key, value in attributes.items()}
    title = None if tip is None else tag("title", plain(tip))
    text = (node.text or "").strip() if kind == "text" else None
    return tag(kind, title, text, [_element(child, name, tooltips) for child in node], **attributes)


def _named(key: str, value: str, name: str) -> str:
    """An attribute's value with the page's colours, and with ids that begin with the chart's name."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.lstrip('#')}"
    return VARIABLES.get(value.lower(), value).replace("url(#", f"url(#{name}-")


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
