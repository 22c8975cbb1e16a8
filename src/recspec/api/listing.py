"""Listings: models, datasets, the runs in a folder, and their reports."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.frames import chosen_kind, from_table, table_of
from recspec.api.verb_checks import Place, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import how_many, require_extra
from recspec.base.summaries import shown

if TYPE_CHECKING:
    from pydantic import BaseModel

    from recspec.evaluation import FoundRun, RunList
    from recspec.models import Model


class Listing(Viewed, Mapping[str, Any]):
    """Names with their descriptions and settings: `listing["sasrec"]` is the class of the settings.

    Attributes:
        about: Name -> description.
    """

    def __init__(
        self,
        what: str,
        about: Mapping[str, str],
        settings: Mapping[str, type[BaseModel]],
        values: Mapping[str, object],
        sheet: View | None = None,
    ) -> None:
        self.about, self._what, self._settings, self._values = about, what, settings, values
        self._sheet = sheet

    def __getitem__(self, name: str) -> Any:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def settings(self, name: str) -> View:
        """The settings of one, with their defaults, as a table."""
        return View(f"settings of {name}", [_settings("", self._settings[name])])

    def to_dict(self) -> dict[str, object]:
        """Names and JSON Schemas of settings, as the command prints them with `--json`."""
        return dict(self._values)

    def view(self) -> View:
        """A line for each name; of one model everything that there is to know."""
        return self._sheet or View(self._what, [Section("", ("name", "about"), list(self.about.items()))])


def _settings(title: str, settings: type[BaseModel], names: Iterable[str] | None = None) -> Section:
    """Name, default and meaning of settings, by default of all."""
    rows = []
    for name in settings.model_fields if names is None else names:
        field = settings.model_fields[name]
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        rows.append((name, "required" if field.is_required() else default, field.description or ""))
    return Section(title, ("name", "default", "what it is"), rows)


@verb
def models(name: str | None = None) -> Listing:
    """List the models, or describe one with its settings.

    Args:
        name: Name of one model.

    Raises:
        SettingsError: for an unknown model.
    """
    from recspec.models import all_models, find_model
    from recspec.training import TrainSettings

    found = all_models() if name is None else {name: find_model(name)}
    lines = {name: (model.__doc__ or "").strip().partition("\n")[0] for name, model in found.items()}
    about = {name: f"{lines[name]} Needs: {', '.join(model.needs)}." for name, model in found.items()}
    schemas = {
        name: {"needs": list(model.needs), "settings": model.Settings.model_json_schema()["properties"]}
        for name, model in found.items()
    }
    values = {"models": schemas, "train": TrainSettings.model_json_schema()["properties"]}
    sheet = None if name is None else _sheet(found[name])
    what = "models; `recspec models NAME` shows the settings of one"
    return Listing(what, about, {name: model.Settings for name, model in found.items()}, values, sheet)


def _sheet(model: type[Model]) -> View:
    """What a model is for, what it needs, how to train it, and its settings."""
    from recspec.models import FittedItemModel, FittedModel, FittedRowModel, TrainedItemModel
    from recspec.training import TrainSettings

    rows = {
        FittedRowModel: "labelled rows",
        FittedItemModel: "interactions",
        TrainedItemModel: "users, with their events",
    }
    learns = next((what for kind, what in rows.items() if issubclass(model, kind)), "rows")
    fitted = issubclass(model, FittedModel)
    facts = {
        "needs the roles": ", ".join(model.needs),
        "learns from": f"{learns}, {'fitted in one go' if fitted else 'by gradient steps'}",
        "items that training never saw": "ranked by their features" if model.traits.scores_unseen_items else "",
        "needs to train": "pip install 'recspec[baselines]'" if model.traits.libraries else "",
        "train": f"recspec train {model.name} DATA RUN",
    }
    read = model.reads if issubclass(model, FittedModel) else TrainSettings.model_fields
    sections = [
        Section("", ("", ""), [(fact, value) for fact, value in facts.items() if value]),
        _settings("settings (--set NAME=VALUE)", model.Settings),
        _settings("settings of training (--set train.NAME=VALUE)", TrainSettings, read),
    ]
    return View(f"{model.name}: {inspect.getdoc(model)}", sections)


@verb
def datasets() -> Listing:
    """List the datasets of `recspec prepare` and their settings."""
    from recspec.datasets import DATASETS

    about = {name: dataset.about for name, dataset in DATASETS.items()}
    values = {name: dataset.Settings.model_json_schema()["properties"] for name, dataset in DATASETS.items()}
    return Listing("datasets", about, {name: dataset.Settings for name, dataset in DATASETS.items()}, values)


HEIGHT = 900
"""Pixels of a report in a notebook's cell; it scrolls."""


class Runs(Viewed):
    """The runs under a folder, in the order that was asked for.

    Attributes:
        found: The runs, and why others may be missing.
    """

    def __init__(self, found: RunList, metric: str = "", split: str = "test") -> None:
        self.found, self._metric = found, metric
        self._splits = tuple(dict.fromkeys(("valid", "test", split)))

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

        kinds = dict.fromkeys(("run", "data", "model", "metric"), pa.string())
        kinds |= {**dict.fromkeys(("valid", "test"), pa.float64()), "time": pa.string()}
        kinds |= {"seconds": pa.float64(), "bytes": pa.int64()}
        rows = []
        for run in self.found.runs:
            measured = [run.value(split, self._metric) for split in ("valid", "test")]
            rows.append((*self._named(run), *measured, run.time, run.seconds, run.size))
        return from_table(table_of(kinds, rows), chosen_kind(kind))

    def _named(self, run: FoundRun) -> tuple[str, str, str, str]:
        return run.path, run.data_shown, run.model, self._metric or run.metric

    def view(self) -> View:
        """A line for each run; remarks say what is unknown, and why."""
        found = self.found
        columns = ("run", "data", "model", "metric", *self._splits, "made (UTC)", "seconds", "MB")
        rows = []
        for each in found.runs:
            measured = {split: each.value(split, self._metric) for split in self._splits}
            values = [
                "" if value is None else f"{value:.4f}{' *' if each.choices.get(split) else ''}"
                for split, value in measured.items()
            ]
            seconds = "" if each.seconds is None else shown(round(each.seconds, 1))
            rows.append((*self._named(each), *values, each.made, seconds, shown(each.megabytes)))
        remarks = [
            f"* {each.path}: on {split} with {choices}"
            for each in found.runs
            for split, choices in each.choices.items()
        ]
        for each in found.runs:
            if each.updates:
                remarks.append(f"* {each.path}: {how_many(each.updates, 'update')} since; the newest answers")
            if each.problem:
                remarks.append(f"note: {each.path}: {each.problem}")
        remarks += [f"note: {problem}" for problem in found.problems]
        title = f"{how_many(len(found.runs), 'run') if found.runs else 'no run'} in {found.folder}"
        return View(title, [Section("", columns, rows)] if rows else [], remarks=remarks)


@verb
def runs(folder: Place = ".", *, sort: str = "time", split: str = "test", depth: int = 6) -> Runs:
    """List the runs in a folder: data, model, metric, time and size.

    Args:
        folder: Folder to search for runs and bundles.
        sort: Order: time, seconds, size, model, data, run or PROTOCOL/METRIC with the best first.
        split: Split of the metric that sorts.
        depth: Number of folder levels to search.

    Raises:
        DataError: if the folder is not there.
        SettingsError: for a metric that no run has on the split.
    """
    from recspec.evaluation import find_runs

    return Runs(find_runs(Path(folder), sort=sort, split=split, depth=depth), sort if "/" in sort else "", split)


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
    """Write an HTML report of a run, or a comparison of several.

    Args:
        runs: Runs or bundles; the others are compared with the first.
        out: HTML file; by default RUN/report.html, or comparison.html.
        data: Dataset of the runs, if it was moved.

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
