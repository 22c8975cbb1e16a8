"""Listings: models, datasets, the runs in a folder, and their reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from recspec.api.frames import chosen_kind, from_table
from recspec.api.verbs import Place, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import require_extra

if TYPE_CHECKING:
    from recspec.evaluation import RunList


class Listing(Viewed, Mapping[str, type[BaseModel]]):
    """Names with their descriptions and settings: `listing["sasrec"]` is the class of the settings."""

    def __init__(
        self, what: str, about: Mapping[str, str], settings: Mapping[str, type[BaseModel]], values: Mapping[str, object]
    ) -> None:
        self._what, self._about, self._settings, self._values = what, about, settings, values

    def __getitem__(self, name: str) -> type[BaseModel]:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def settings(self, name: str) -> View:
        """The settings of one, with their defaults, as a table."""
        rows = [
            (
                field,
                "required"
                if each.is_required()
                else json.dumps(each.get_default(call_default_factory=True), default=str),
                each.description or "",
            )
            for field, each in self._settings[name].model_fields.items()
        ]
        return View(f"settings of {name}", [Section("", ("name", "default", "what it is"), rows)])

    def to_dict(self) -> dict[str, object]:
        """Names and JSON Schemas of settings, as the command prints them with `--json`."""
        return dict(self._values)

    def _view(self) -> View:
        rows = [(name, self._about[name]) for name in self]
        return View(self._what, [Section("", ("name", "about"), rows)])


@verb
def models() -> Listing:
    """List the models, the roles they need and their settings."""
    from recspec.models import all_models
    from recspec.training import TrainSettings

    found = all_models()
    about = {name: f"{_first_line(model.__doc__)} Needs: {', '.join(model.needs)}." for name, model in found.items()}
    schemas = {
        name: {"needs": list(model.needs), "settings": model.Settings.model_json_schema()["properties"]}
        for name, model in found.items()
    }
    values = {"models": schemas, "train": TrainSettings.model_json_schema()["properties"]}
    return Listing("models", about, {name: model.Settings for name, model in found.items()}, values)


@verb
def datasets() -> Listing:
    """List the datasets of `prepare`, the files they take and their settings."""
    from recspec.datasets import DATASETS

    about = {name: dataset.about for name, dataset in DATASETS.items()}
    values = {name: dataset.Settings.model_json_schema()["properties"] for name, dataset in DATASETS.items()}
    return Listing("datasets", about, {name: dataset.Settings for name, dataset in DATASETS.items()}, values)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


HEIGHT = 900
"""Pixels of a report in a notebook's cell; it scrolls."""


class Runs(Viewed):
    """The runs under a folder, in the order that was asked for.

    Attributes:
        found: The runs, and why others may be missing.
    """

    def __init__(self, found: RunList, metric: str = "") -> None:
        self.found, self._metric = found, metric

    def __len__(self) -> int:
        return len(self.found.runs)

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders, for `open` and `report`."""
        return tuple(each.path for each in self.found.runs)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, as `recspec runs --json` prints them."""
        return self.found.to_dict()

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a run: `run`, `data`, `model`, `metric`, `valid`, `test`, `time` (UTC), `seconds`, `bytes`."""
        import pyarrow as pa

        texts, numbers = ("run", "data", "model", "metric"), ("valid", "test")
        schema = pa.schema(
            {
                **dict.fromkeys(texts, pa.string()),
                **dict.fromkeys(numbers, pa.float64()),
                "time": pa.string(),
                "seconds": pa.float64(),
                "bytes": pa.int64(),
            }
        )
        rows = [dict(zip(schema.names, row, strict=True)) for row in self._rows()]
        return from_table(pa.Table.from_pylist(rows, schema=schema), chosen_kind(kind))

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (
                each.path,
                each.data_shown,
                each.model,
                self._metric or each.metric,
                *(each.value(split, self._metric) for split in ("valid", "test")),
                each.time,
                each.seconds,
                each.size,
            )
            for each in self.found.runs
        ]

    def _view(self) -> View:
        columns = ("run", "data", "model", "metric", "valid", "test", "made (UTC)", "seconds", "MB")
        rows = [
            (*row[:-3], each.made, row[-2], each.megabytes)
            for each, row in zip(self.found.runs, self._rows(), strict=True)
        ]
        problems = [f"{each.path}: {each.problem}" for each in self.found.runs if each.problem]
        differing = [
            f"{each.path}: on {split} with {choices}"
            for each in self.found.runs
            for split, choices in each.choices.items()
        ]
        counted = "1 run" if len(self) == 1 else f"{len(self)} runs"
        return View(
            f"{counted} in {self.found.folder}",
            [Section("", columns, rows)],
            [*differing, *problems, *self.found.problems],
        )


@verb
def runs(folder: Place = ".", *, sort: str = "time", split: str = "test", depth: int = 6) -> Runs:
    """List the runs in a folder: data, model, metric, time and size.

    Args:
        folder: Folder to search for runs and bundles.
        sort: Order: time, seconds, size, model, data, run, or PROTOCOL/METRIC with the best first.
        split: Split of the metric that sorts.
        depth: How many folders deep to search.

    Raises:
        DataError: if the folder is not there.
        SettingsError: for a metric that no run has on the split.
    """
    from recspec.evaluation import find_runs

    return Runs(find_runs(Path(folder), sort=sort, split=split, depth=depth), sort if "/" in sort else "")


class Report:
    """A report on disk: one HTML file that needs no network. `os.fspath(report)` is its path; a notebook shows it.

    Attributes:
        path: The file.
        why_not_tracked: Why the MLflow run that tracks the run could not get the report; None if it has it, or if none
            tracks the run.
    """

    def __init__(self, path: Path, why_not_tracked: str | None = None) -> None:
        self.path, self.why_not_tracked = path, why_not_tracked

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Report: {self.path}"

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return (
            f"<iframe srcdoc=\"{page}\" sandbox='allow-scripts' title='report' "
            f"style='width:100%;height:{HEIGHT}px;border:1px solid #8888'></iframe>"
        )


@verb
def report(runs: Place | Sequence[Place], *, out: Place | None = None, data: Place | None = None) -> Report:
    """Write the report of a run, or the comparison of several, as one HTML file that needs no network.

    Args:
        runs: Models, or folders of runs or bundles; the others are compared with the first.
        out: File to write; by default `RUN/report.html`, or `comparison.html` here for several runs.
        data: The dataset of the runs; by default where they say it lies, if it has not changed since.

    Raises:
        BundleError: if a folder holds no trained model, or a damaged one.
        DataError: if the report can't be written.
        SettingsError: for no run, too many, or one that is given twice.
        MissingExtraError: without matplotlib.
    """
    from recspec.report import write_report
    from recspec.training import send_file

    require_extra("matplotlib", "report")
    several = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    named = [os.fspath(each) for each in several]
    written = write_report(
        named, None if out is None else os.fspath(out), data=None if data is None else os.fspath(data)
    )
    return Report(written, send_file(Path(named[0]), written) if len(named) == 1 else None)
