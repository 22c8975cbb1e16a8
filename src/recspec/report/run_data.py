"""Section: the data that a run was trained on."""

from __future__ import annotations

from collections.abc import Iterator

from recspec.report.dataset_page import distributions, overview, splits_table
from recspec.report.markup import Child, tag
from recspec.report.measured import real
from recspec.report.numbers import number, percent
from recspec.report.page import Section, command, details, note, soft, table, tiles
from recspec.report.run_facts import RunFacts


def data_section(run: RunFacts) -> Section:
    """Name, place, digest and figures of the dataset."""
    return Section("data", "Data", tuple(_body(run)))


def _body(run: RunFacts) -> Iterator[Child]:
    record, figures = run.data_record, run.figures
    if record is not None:
        rows = [["Dataset", record.name], ["Folder", tag("code", record.path)], ["Digest", tag("code", record.digest)]]
        rows += [["Made from", _inputs(run)]] if run.preparation.get("inputs") else []
        yield table("The dataset that the model was trained on", ["", "Value"], rows, sorts=False)
    if figures is not None:
        yield from overview(figures)
        yield splits_table(figures)
        if (drawn := distributions(figures)) is not None:
            yield details("Distributions of users, items and time", drawn)
    else:
        yield from _summary(run)
    yield soft("More about the dataset, such as suspected leaks, its most frequent values and missing shares:")
    yield command(["recspec", "describe", run.data_path, "--html", "dataset.html"])


def _inputs(run: RunFacts) -> str:
    inputs = run.preparation.get("inputs")
    names = [str(each.get("name")) for each in inputs if isinstance(each, dict)] if isinstance(inputs, list) else []
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more files" if len(names) > 5 else "")


def _summary(run: RunFacts) -> Iterator[Child]:
    """What the bundle itself knows of the data."""
    for problem in run.problems:
        if "dataset" in problem or "--data" in problem:
            yield note(problem)
    summary = run.spec.metadata.get("summary")
    held = summary if isinstance(summary, dict) else {}
    shown = {name.replace("_", " ").capitalize(): number(value) for name, value in held.items()
             if isinstance(value, (int, float, str))}  # fmt: skip
    users, items, events = (real(held.get(name)) for name in ("users", "items", "interactions"))
    if users and items and events:
        shown["Density"] = percent(events / (users * items), 2)
    if shown:
        yield soft("As the preparation counted it:")
        yield tiles(dict(list(shown.items())[:12]))
