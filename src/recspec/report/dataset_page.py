"""The page of a prepared dataset: what `recspec describe --html` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from markupsafe import Markup

from recspec.base.files import local, write_whole
from recspec.base.summaries import NOTES
from recspec.data.encoding import Encoder
from recspec.data.storage import preparation
from recspec.feature_spec import NO_FILES, FeatureSpec
from recspec.report import charts
from recspec.report.dataset_figures import DatasetFigures, Ids, SplitFigures, figures_of, leaks_of
from recspec.report.dataset_summary import (
    Card,
    FeatureCard,
    Numbers,
    RawNames,
    TopValues,
    describe,
    fill_of,
    numbers_of,
    top_values,
)
from recspec.report.page import Cell, data_number, draw, moment, num, number, percent, render, size, table

MOST_FEATURES = 60
"""Features with a table or chart of their own values."""


def write_dataset_page(spec: FeatureSpec, out: Path) -> Path:
    """Write the page of a dataset as one HTML file.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    out = local(out, "the page")
    text = dataset_page(spec)
    write_whole(out, text)
    return out


def dataset_page(spec: FeatureSpec) -> str:
    """The page of a dataset."""
    card, names = describe(spec), RawNames(spec)
    title, features = f"Dataset {spec.folder.resolve().name}", _features(spec, card, names)
    if not spec.splits:
        return render("dataset.html", title, {"features": "Features"}, no_files=NO_FILES, features=features, remarks=[])
    figures, leaks = figures_of(spec), leaks_of(spec)
    split = "train" if "train" in spec.splits else spec.splits[0]
    tops, numbers = top_values(spec, split, names), dict([*numbers_of(spec, split, names).items()][:MOST_FEATURES])
    tops, drawn = {name: of for name, of in tops.items() if of.values}, distributions(figures)
    sections = {
        "overview": "At a glance",
        "leaks": "Suspected leaks",
        "splits": "Splits",
        **({"users-items": "Users, items and time"} if any(drawn) else {}),
        "features": "Features",
        **({"values": "Most frequent values"} if tops else {}),
        **({"numbers": "Numbers"} if numbers else {}),
    }
    return render(
        "dataset.html",
        title,
        sections,
        no_files="",
        folder=spec.folder.resolve(),
        dataset=spec.metadata.get("dataset", "a dataset of your own"),
        tiles=overview(figures),
        notes=_notes(spec),
        leaks=leaks,
        splits=splits_table(figures),
        has_cold=any(each.cold_users is not None or each.cold_items is not None for each in figures.splits.values()),
        are_positives=figures.are_positives,
        files=_files(card),
        distributions=drawn,
        features=features,
        remarks=_remarks(spec, card, names),
        split=split,
        tops={name: _top(of) for name, of in [*tops.items()][:MOST_FEATURES]},
        num_left_out=max(0, len(tops) - MOST_FEATURES),
        numbers=_numbers(numbers, split),
        has_filled=any(of.filled for of in numbers.values()),
        number_charts=[
            charts.columns(f"number-{place}", of.edges, of.counts, title=name, x="value", y="rows")
            for place, (name, of) in enumerate(numbers.items())
        ],
    )


# --- parts that the report of a run shows too ------------------------------------------------------------------------


def overview(figures: DatasetFigures) -> dict[str, tuple[str, str] | str]:
    """The numbers to see first."""
    splits = figures.splits.values()
    what = "positives" if figures.are_positives else "rows"
    rows, found = sum(each.rows for each in splits), dict[str, tuple[str, str] | str]()
    names = ", ".join(figures.splits)
    if figures.are_positives:
        drawn = rows - figures.events
        beside = f"; beside {number(drawn)} drawn negatives" if drawn else ""
        found["Events"] = (number(figures.events), f"positives of {names}{beside}")
    else:
        found["Rows"] = (number(rows), _apart([*splits]) or names)
    if figures.users is not None:
        found["Users"] = (number(figures.users), _typical(figures.per_user, what))
    if figures.items is not None:
        found["Items"] = (number(figures.items), _typical(figures.per_item, what))
    if figures.density is not None:
        found["Density"] = (percent(figures.density, 2), "of all pairs of user and item occur")
    if figures.head_share is not None:
        found["Concentration"] = (percent(figures.head_share), f"of the {what} are of the busiest tenth of items")
    times = [each for split in splits for each in (split.first, split.last) if each is not None]
    return {**found, **({"From": moment(min(times)), "To": moment(max(times))} if times else {})}


def splits_table(figures: DatasetFigures) -> Markup:
    """A row for each split."""
    splits = figures.splits.values()
    columns: dict[str, Sequence[object]] = {"Split": [*figures.splits]}
    if figures.are_positives:
        columns["#Positives"] = [num(each.events) for each in splits]
        columns["#Drawn negatives"] = [num(each.rows - each.events) for each in splits]
    else:
        columns["#Rows"] = [num(each.rows) for each in splits]
        columns["#Positives"] = [num(each.positives) for each in splits]
        negatives = [None if each.positives is None else each.rows - each.positives for each in splits]
        columns["#Negatives"] = [num(each) for each in negatives]
        columns["#Mean label"] = [num(each.label_mean) for each in splits]
    for title, name in (("#Users", "users"), ("#Items", "items")):
        if any(getattr(each, name) is not None for each in splits):
            columns[title] = [num(getattr(each, name)) for each in splits]
            cold = [getattr(each, f"cold_{name}") for each in splits]
            columns[f"#Events of cold {name}"] = [num(share, percent(share)) for share in cold]
    if any(each.first is not None for each in splits):
        columns |= {"First": [moment(each.first) for each in splits], "Last": [moment(each.last) for each in splits]}
    rows = zip(*columns.values(), strict=True)
    what = "Events" if figures.are_positives else "Rows"
    return table(f"{what}, users, items and times of each split", [*columns], rows, sorts=False)


def _apart(splits: Sequence[SplitFigures]) -> str:
    """Positives and negatives in words; empty if the labels are not known, or are not all 0 or 1."""
    known = [each.positives for each in splits if each.positives is not None]
    if len(known) < len(splits):
        return ""
    return f"{number(sum(known))} positives and {number(sum(each.rows for each in splits) - sum(known))} negatives"


def distributions(figures: DatasetFigures) -> list[Markup]:
    """Charts of how events spread over users, items and time."""
    what = "positives" if figures.are_positives else "rows"
    drawn = [
        _spread("per-user", figures.per_user, f"Users by their number of {what}", f"{what} of a user", "users"),
        _spread("per-item", figures.per_item, f"Items by their number of {what}", f"{what} of an item", "items"),
        _over_time(figures, what),
    ]
    return [each for each in drawn if each is not None]


def _typical(counts: Ids, what: str) -> str:
    return f"half have {number(int(np.median(counts)))} {what} or more" if len(counts) else ""


def _spread(name: str, counts: Ids, title: str, x: str, y: str) -> Markup | None:
    if len(counts) < 2 or counts.max() == counts.min():
        return None
    edges = np.unique(np.round(np.geomspace(1, counts.max() + 1, 21)))
    heights = np.histogram(counts, edges)[0]
    return charts.columns(name, edges.tolist(), heights.tolist(), title=title, x=x, y=y, log=True)


def _over_time(figures: DatasetFigures, what: str) -> Markup | None:
    held = {name: split for name, split in figures.splits.items() if split.times}
    if not held:
        return None
    edges = np.asarray(figures.time_edges)
    labels = _moments(((edges[:-1] + edges[1:]) / 2).tolist(), float(edges[-1] - edges[0]))
    series = []
    for name, split in held.items():
        share = np.asarray(split.times) / max(1, sum(split.times))
        shares = zip(labels, share.tolist(), strict=True)
        told = [f"{name}, {label}: {percent(each)} of its {what}" for label, each in shares]
        series.append(charts.Series(name, np.arange(len(share)), 100 * share, told))
    title = f"When the {what} of each split happened"
    return charts.lines("over-time", series, title=title, x="", y="% of the split", names=labels)


def _moments(seconds: Sequence[float], span: float) -> list[str]:
    form = "%Y" if span > 4e8 else "%Y-%m" if span > 2e7 else "%m-%d" if span > 2e5 else "%H:%M"
    try:
        return [f"{datetime.fromtimestamp(each, UTC):{form}}" for each in seconds]
    except (OverflowError, OSError, ValueError):
        return [f"{each:.4g}" for each in seconds]


# --- sections --------------------------------------------------------------------------------------------------------


def _notes(spec: FeatureSpec) -> dict[str, list[str]]:
    """What the preparation inferred, dropped and changed, by its heading."""
    summary = preparation(spec.folder).get("summary")
    found = {}
    for name in NOTES:
        told = summary.get(name) if isinstance(summary, dict) else None
        if isinstance(told, list) and told:
            heading = f"The preparation {name}" if name != "warnings" else "Warnings of the preparation"
            found[heading] = [str(each) for each in told[:50]]
    return found


def _files(card: Card) -> Markup:
    rows = [[name, num(split.files), num(split.bytes, size(split.bytes))] for name, split in card.splits.items()]
    return table("Files of each split", ["Split", "#Files", "#Size"], rows, sorts=False)


def _remarks(spec: FeatureSpec, card: Card, names: RawNames) -> Iterator[str]:
    if any(spec.reserves_unknown(name) for name, of in card.features.items() if of.cardinality is not None):
        yield "Id 0 stands for missing and unknown values; it is not among the ids."
    if any(_is_filled(of, names.encoder(name)) for name, of in card.features.items()):
        yield (
            "A prepared dataset does not mark missing numbers: a missing one holds the mean, 0 or another value that "
            "the preparation chose. Up to: the share of the numbers that are exactly this value, real ones among them."
        )
    yield from card.notes


def _features(spec: FeatureSpec, card: Card, names: RawNames) -> Markup:
    rows: list[list[object]] = []
    for name, of in card.features.items():
        ids, occur = of.cardinality, of.distinct
        if isinstance(ids, int) and spec.reserves_unknown(name) and not spec.shift(name):
            ids, occur = ids - 1, None if occur is None else occur - int(bool(of.zero_share))
        is_id = of.cardinality is not None
        share = of.zero_share if is_id or _is_filled(of, names.encoder(name)) else None
        missing = num(share, percent(share) if is_id else _up_to(share))
        rows.append([name, ", ".join(of.roles), _kind(of), num(ids), num(occur), missing, num(None, _lengths(of))])
    heads = ["Feature", "Roles", "Kind", "#Ids", "#Ids that occur", "#Missing or unknown", "#Values in a list"]
    return table("Features over all splits", heads, rows)


def _is_filled(of: FeatureCard, encoder: Encoder | None) -> bool:
    """Whether a feature holds single numbers among which a 0 may stand for a missing one."""
    return of.length is None and fill_of(encoder) == 0


def _up_to(share: float | None) -> str:
    """The share of numbers that are missing: all or some of those that hold what a missing one becomes."""
    return f"up to {percent(share)}" if share else percent(share)


def _kind(of: FeatureCard) -> str:
    kind = "ids" if of.cardinality is not None else "numbers"
    return f"vector of {of.length}" if of.vector else f"list of {kind}" if of.length is not None else kind


def _lengths(of: FeatureCard) -> str:
    if not of.list_lengths:
        return "–"
    least, middle, most = (number(int(of.list_lengths[name])) for name in ("0%", "50%", "100%"))
    return f"{least} to {most}, half {middle} or fewer"


def _top(of: TopValues) -> Markup:
    """The most frequent values of a feature."""

    def row(value: str, count: int, longest: int, place: int) -> list[object]:
        share = count / max(1, of.total)
        return [value, num(count), num(share, percent(share)), draw(charts.bar(count / longest, place))]

    most = of.values[0][1]
    rows = [row(value, count, most, 0) for value, count in of.values]
    if of.unknown:
        rows.append(row("missing or unknown", of.unknown, max(most, of.unknown), 1))
    caption = f"{number(of.distinct)} different values"
    caption += f", the {len(of.values)} most frequent" if of.distinct > len(of.values) else ""
    return table(caption, ["Value", "#Rows", "#Share", ""], rows, sorts=False)


def _numbers(numbers: Mapping[str, Numbers], split: str) -> Markup:
    heads = [
        "Feature",
        "#Missing",
        "#Least",
        "#Lower quarter",
        "#Median",
        "#Upper quarter",
        "#Largest",
        "#Mean",
        "Units",
    ]
    rows = []
    for name, of in numbers.items():
        values: list[Cell] = [num(each, data_number(each)) for each in (*of.quantiles, of.mean)]
        rows.append([name, num(of.filled, _up_to(of.filled)), *values, "raw" if of.is_raw else "prepared"])
    return table(f"Numbers of {split}", heads, rows)
