"""The page of a prepared dataset: what `recspec describe --html` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from recspec.base.errors import RecspecError
from recspec.base.files import confined, local, read_json, whole_file
from recspec.base.summaries import NOTES
from recspec.data.encoding import Encoder
from recspec.data.storage import PREPARE_FILE
from recspec.feature_spec import NO_FILES, FeatureSpec
from recspec.report import charts
from recspec.report.dataset_figures import DatasetFigures, Leaks, figures_of, leaks_of
from recspec.report.dataset_summary import Card, FeatureCard, describe
from recspec.report.dataset_values import Numbers, RawNames, TopValues, fill_of, numbers_of, top_values
from recspec.report.page import (
    Cell,
    Child,
    Markup,
    Section,
    coded,
    data_number,
    drawing,
    moment,
    note,
    num,
    number,
    page,
    percent,
    size,
    soft,
    table,
    tag,
    tiles,
)
from recspec.report.page import charts as side_by_side

MOST_FEATURES = 60
"""Features with a table or chart of their own values."""
UP_TO = (
    "A prepared dataset does not mark missing numbers: a missing one holds the mean, 0 or another value that the "
    "preparation chose. Up to: the share of the numbers that are exactly this value, real ones among them."
)


def write_dataset_page(spec: FeatureSpec, out: Path) -> Path:
    """Write the page of a dataset as one HTML file.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    out = local(out, "the page")
    text = dataset_page(spec)
    with whole_file(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return out


def dataset_page(spec: FeatureSpec) -> str:
    """The page of a dataset."""
    card = describe(spec)
    title = f"Dataset {spec.folder.resolve().name}"
    if not spec.splits:
        return page(title, note(NO_FILES), [Section("features", "Features", (_features(spec, card, RawNames(spec)),))])
    figures, leaks, names = figures_of(spec), leaks_of(spec), RawNames(spec)
    split = "train" if "train" in spec.splits else spec.splits[0]
    tops, numbers = top_values(spec, split, names), numbers_of(spec, split, names)
    sections = [
        Section("overview", "At a glance", (*overview(figures), *_notes(spec))),
        Section("leaks", "Suspected leaks", tuple(_leaks(leaks))),
        Section("splits", "Splits", (splits_table(figures), *_split_notes(figures), _files(card))),
        Section("users-items", "Users, items and time", (distributions(figures),)),
        Section("features", "Features", tuple(_feature_parts(spec, card, names))),
        Section("values", "Most frequent values", tuple(_tops(tops, split))),
        Section("numbers", "Numbers", tuple(_numbers(numbers, split))),
    ]
    dataset = tag("strong", str(spec.metadata.get("dataset", "a dataset of your own")))
    lead = tag("p", "Folder ", tag("code", str(spec.folder.resolve())), ", prepared as ", dataset, ".", class_="lead")
    return page(title, lead, [each for each in sections if any(part is not None for part in each.body)])


# --- parts that the report of a run shows too ------------------------------------------------------------------------


def overview(figures: DatasetFigures) -> list[Child]:
    """The numbers to see first."""
    rows = sum(split.rows for split in figures.splits.values())
    what = "positives" if figures.are_positives else "rows"
    firsts = [split.first for split in figures.splits.values() if split.first is not None]
    lasts = [split.last for split in figures.splits.values() if split.last is not None]
    held: dict[str, tuple[str, str] | str] = {"Rows": (number(rows), ", ".join(figures.splits))}
    if figures.are_positives:
        held["Events"] = (number(figures.events), "positives of all splits")
    if figures.users is not None:
        held["Users"] = (number(figures.users), _typical(figures.per_user, what))
    if figures.items is not None:
        held["Items"] = (number(figures.items), _typical(figures.per_item, what))
    if figures.density is not None:
        held["Density"] = (percent(figures.density, 2), "of all pairs of user and item occur")
    if figures.head_share is not None:
        held["Concentration"] = (percent(figures.head_share), f"of the {what} are of the busiest tenth of items")
    if firsts:
        held["From"], held["To"] = moment(min(firsts)), moment(max(lasts))
    return [tiles(held)]


def splits_table(figures: DatasetFigures) -> Markup:
    """A row for each split."""
    columns: dict[str, list[Child | Cell]] = {"Split": [*figures.splits]}
    splits = figures.splits.values()
    columns["#Rows"] = [num(split.rows) for split in splits]
    if figures.are_positives:
        columns["#Positives"] = [num(split.events) for split in splits]
    columns["#Mean label"] = [num(split.label_mean) for split in splits]
    for title, name in (("#Users", "users"), ("#Items", "items")):
        if any(getattr(split, name) is not None for split in splits):
            columns[title] = [num(getattr(split, name)) for split in splits]
            cold = [getattr(split, f"cold_{name}") for split in splits]
            columns[f"#Events of cold {name}"] = [num(share, percent(share)) for share in cold]
    if any(split.first is not None for split in splits):
        columns |= {"First": [moment(each.first) for each in splits], "Last": [moment(each.last) for each in splits]}
    heads, rows = [*columns], [*zip(*columns.values(), strict=True)]
    return table("Rows, users, items and times of each split", heads, rows, sorts=False)


def distributions(figures: DatasetFigures) -> Markup | None:
    """How events spread over users, items and time."""
    what = "positives" if figures.are_positives else "rows"
    drawn = [
        _spread("per-user", figures.per_user, f"Users by their number of {what}", f"{what} of a user", "users"),
        _spread("per-item", figures.per_item, f"Items by their number of {what}", f"{what} of an item", "items"),
        _over_time(figures, what),
    ]
    return side_by_side(*drawn)


def _typical(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], what: str) -> str:
    return f"half have {number(int(np.median(counts)))} {what} or more" if len(counts) else ""


def _spread(
    name: str, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], title: str, x: str, y: str
) -> Markup | None:
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
        told = [
            f"{name}, {label}: {percent(each)} of its {what}"
            for label, each in zip(labels, share.tolist(), strict=True)
        ]
        series.append(charts.Series(name, np.arange(len(share)), 100 * share, told))
    return charts.lines(
        "over-time", series, title=f"When the {what} of each split happened", x="", y="% of the split", names=labels
    )


def _moments(seconds: Sequence[float], span: float) -> list[str]:
    form = "%Y" if span > 4e8 else "%Y-%m" if span > 2e7 else "%m-%d" if span > 2e5 else "%H:%M"
    try:
        return [f"{datetime.fromtimestamp(each, UTC):{form}}" for each in seconds]
    except (OverflowError, OSError, ValueError):
        return [f"{each:.4g}" for each in seconds]


# --- sections --------------------------------------------------------------------------------------------------------


def _notes(spec: FeatureSpec) -> Iterator[Child]:
    """What the preparation inferred, dropped and changed."""
    try:
        record = read_json(confined(spec.folder, PREPARE_FILE))
    except RecspecError:
        return
    summary = record.get("summary") if isinstance(record, dict) else None
    for name in NOTES:
        told = summary.get(name) if isinstance(summary, dict) else None
        if isinstance(told, list) and told:
            yield tag("h3", f"The preparation {name}" if name != "warnings" else "Warnings of the preparation")
            yield tag("ul", [tag("li", str(each)) for each in told[:50]])


def _leaks(leaks: Leaks) -> Iterator[Child]:
    if leaks.suspected:
        for each in leaks.suspected:
            yield note(tag("strong", "Suspected leak: "), each, kind="bad")
    else:
        yield note(
            tag("strong", "No leak is suspected. "),
            "The checks below are simple: they look at one column at a time, and at an even sample of large splits.",
            kind="good",
        )
    if leaks.remarks:
        yield tag("h3", "Good to know")
        yield tag("ul", [tag("li", coded(each)) for each in leaks.remarks])
    if leaks.clean:
        yield tag("h3", "Looked for and not found")
        yield tag("ul", [tag("li", each) for each in leaks.clean])


def _split_notes(figures: DatasetFigures) -> Iterator[Child]:
    if any(split.cold_users is not None or split.cold_items is not None for split in figures.splits.values()):
        yield soft(
            "Cold: users and items without an event in train. A model that knows ids alone has learned nothing of them."
        )
    if figures.are_positives:
        yield soft("The other rows of valid and test are candidates with label 0, which were drawn for evaluation.")


def _files(card: Card) -> Markup:
    rows = [[name, num(split.files), num(split.bytes, size(split.bytes))] for name, split in card.splits.items()]
    return table("Files of each split", ["Split", "#Files", "#Size"], rows, sorts=False)


def _feature_parts(spec: FeatureSpec, card: Card, names: RawNames) -> Iterator[Child]:
    yield _features(spec, card, names)
    if any(spec.reserves_unknown(name) for name, of in card.features.items() if of.cardinality is not None):
        yield soft("Id 0 stands for missing and unknown values; it is not among the ids.")
    if any(_is_filled(of, names.encoder(name)) for name, of in card.features.items()):
        yield soft(UP_TO)
    yield from (soft(each) for each in card.notes)


def _features(spec: FeatureSpec, card: Card, names: RawNames) -> Markup:
    rows: list[list[Child | Cell]] = []
    for name, of in card.features.items():
        ids, occur = of.cardinality, of.distinct
        if isinstance(ids, int) and spec.reserves_unknown(name) and not spec.shift(name):
            ids, occur = ids - 1, None if occur is None else occur - int(bool(of.zero_share))
        share: float | None = None
        if of.cardinality is not None or _is_filled(of, names.encoder(name)):
            share = of.zero_share
        told = percent(share) if of.cardinality is not None else _up_to(share)
        rows.append(
            [name, ", ".join(of.roles), _kind(of), num(ids), num(occur), num(share, told), num(None, _lengths(of))]
        )
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


def _tops(tops: dict[str, TopValues], split: str) -> Iterator[Child]:
    held = [name for name, of in tops.items() if of.values]
    if held:
        yield soft(f"Of the rows of {split}, as the raw files hold them.")
    parts = []
    for name in held[:MOST_FEATURES]:
        of = tops[name]
        most = of.values[0][1]
        rows: list[list[Child | Cell]] = [
            [
                value,
                num(count),
                num(count / max(1, of.total), percent(count / max(1, of.total))),
                drawing(charts.bar(count / most)),
            ]
            for value, count in of.values
        ]
        if of.unknown:
            share = of.unknown / max(1, of.total)
            rows.append(
                [
                    "missing or unknown",
                    num(of.unknown),
                    num(share, percent(share)),
                    drawing(charts.bar(of.unknown / max(most, of.unknown), 1)),
                ]
            )
        caption = f"{number(of.distinct)} different values" + (
            f", the {len(of.values)} most frequent" if of.distinct > len(of.values) else ""
        )
        parts.append(tag("div", tag("h3", name), table(caption, ["Value", "#Rows", "#Share", ""], rows, sorts=False)))
    if parts:
        yield tag("div", parts, class_="lists")
    if len(held) > MOST_FEATURES:
        yield soft(f"{len(held) - MOST_FEATURES} more features are left out.")


def _numbers(numbers: object, split: str) -> Iterator[Child]:
    assert isinstance(numbers, dict)
    held: dict[str, Numbers] = dict(list(numbers.items())[:MOST_FEATURES])
    if not held:
        return
    rows = [
        [
            name,
            num(of.filled, _up_to(of.filled)),
            *(num(each, data_number(each)) for each in (*of.quantiles, of.mean)),
            "raw" if of.is_raw else "prepared",
        ]
        for name, of in held.items()
    ]
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
    yield table(f"Numbers of {split}", heads, rows)
    if any(of.filled for of in held.values()):
        yield soft("Where a missing number holds the mean, the other columns and the charts leave these rows out.")
    drawn = []
    for place, (name, of) in enumerate(held.items()):
        svg = charts.columns(f"number-{place}", of.edges, of.counts, title=name, x="value", y="rows")
        drawn.append(svg)
    yield side_by_side(*drawn)
