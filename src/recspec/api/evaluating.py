"""Evaluations: a trained model measured on a split, beside baselines and other runs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.data import Data, opened
from recspec.api.frames import Kind, chosen_kind, from_table, table_of
from recspec.api.progress import Stages, stages
from recspec.api.verb_checks import Place, several, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import SettingsError, listed

if TYPE_CHECKING:
    from recspec.evaluation import Comparison, Report, Slice
    from recspec.inference import Predictor


class EvaluationResult(Viewed):
    """What an evaluation measured, by protocol and metric: `result.metrics["full"]["ndcg@10"]`.

    Attributes:
        report: Everything that was measured.
        model: The model's name.
        run: The folder of its run, as it was named.
        kind: The kind of frame in which `to_frame` answers by default.
        file: The JSON file in the run's folder that keeps it; None if it could not be kept.
        files: That file, and those that keep each compared run's own evaluation in its folder.
        why_not_kept: The reason if one of them could not be kept.
    """

    def __init__(
        self,
        report: Report,
        model: str,
        kind: Kind = "pyarrow",
        *,
        run: str = "",
        file: Path | None = None,
        files: Sequence[Path] = (),
        why_not_kept: str = "",
    ) -> None:
        self.report, self.model, self.kind, self.run = report, model, kind, run
        self.file, self.files, self.why_not_kept = file, tuple(files), why_not_kept

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Protocol -> metric -> value of the model."""
        return self.report.metrics

    @property
    def left_out(self) -> dict[str, str]:
        """Protocol or baseline that was not measured -> the reason."""
        return {**self.report.model.left_out, **self.report.not_fitted}

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each protocol, metric and interval that was left out, and for other data in a comparison."""
        return self.report.notes

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, as `recspec evaluate --json` prints them."""
        return self.report.to_dict()

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a model, protocol and metric: `model`, `protocol`, `metric`, `value`, and its `standard_error`; for
        the model `low` and `high` (the ends of the 95 % interval, with `bootstrap`); for a baseline the `difference`
        (the model's value subtracted) and the `p_value` of the paired t-test."""
        import pyarrow as pa

        from recspec.evaluation import tested_difference

        rows = []
        for name, found in {self.model: self.report.model, **self.report.beside}.items():
            own = found is self.report.model
            for protocol, metrics in found.metrics.items():
                errors = found.standard_errors.get(protocol, {})
                intervals = self.report.intervals.get(protocol, {}) if own else {}
                for metric, value in metrics.items():
                    interval = intervals.get(metric)
                    ends = (interval.low, interval.high) if interval else (None, None)
                    test = None if own else tested_difference(self.report.model, found, protocol, metric)
                    rows.append(
                        (name, protocol, metric, float(value), errors.get(metric), *ends, *(test or (None,) * 2))
                    )
        texts = ("model", "protocol", "metric")
        numbers = ("value", "standard_error", "low", "high", "difference", "p_value")
        kinds = {**dict.fromkeys(texts, pa.string()), **dict.fromkeys(numbers, pa.float64())}
        return from_table(table_of(kinds, rows), chosen_kind(kind, self.kind))

    def comparisons(self, kind: str | None = None) -> Any:
        """One row a compared run, protocol and metric: `run`, `protocol`, `metric`, `ours`, `theirs`, `difference`
        (theirs minus ours), its `standard_error` and 95 % interval (`low`, `high`), `p_value` of the paired t-test,
        `p_permutation`, and `better`: the folder of the better run, empty if the comparison does not tell."""
        import pyarrow as pa

        numbers = ("ours", "theirs", "difference", "standard_error", "low", "high", "p_value", "p_permutation")
        rows = [
            (run, protocol, name, *(getattr(one, each) for each in numbers), self._better(run, name, one))
            for run, compared in self.report.against.items()
            for protocol, named in compared.items()
            for name, one in named.items()
        ]
        kinds = {**dict.fromkeys(("run", "protocol", "metric"), pa.string()), **dict.fromkeys(numbers, pa.float64())}
        return from_table(table_of({**kinds, "better": pa.string()}, rows), chosen_kind(kind, self.kind))

    def view(self) -> View:
        """Metrics by protocol beside the baselines, slices, and comparisons with other runs."""
        from recspec.evaluation import better

        report, sections = self.report, list[Section]()
        for protocol in report.shown:
            beside = {name: found for name, found in report.beside.items() if found.metrics.get(protocol)}
            measured = {self.model: report.model, **beside}
            values = {
                name: {**found.metrics[protocol], **(found.list_metrics if protocol == "full" else {})}
                for name, found in measured.items()
            }
            intervals = report.intervals.get(protocol, {})
            rows = []
            for metric in values[self.model]:
                numbers = [f"{found[metric]:.4f}" if metric in found else "" for found in values.values()]
                if protocol in report.intervals:
                    numbers.insert(1, _interval(intervals[metric]) if metric in intervals else "")
                rows.append((metric, *numbers))
            columns = ("", self.model, *(["95 %"] if protocol in report.intervals else []), *beside)
            sections.append(Section(f"{report.split}, {report.described(protocol)}", columns, rows))
            for by, parts in report.model.slices.get(protocol, {}).items():
                sections.append(_slices(f"{protocol} by {by}", parts))
        columns = ("", "model", "other", "other - model", "error", "95 %", "p (t-test)", "p (permutation)", "better")
        for run, compared in report.against.items():
            for protocol, named in compared.items():
                rows = [
                    (
                        name,
                        *(f"{x:.4f}" for x in (each.ours, each.theirs, each.difference, each.standard_error)),
                        _interval(each),
                        *(f"{p:.3g}" for p in (each.p_value, each.p_permutation)),
                        {"ours": "model", "theirs": "other"}.get(better(report, run, name, each), ""),
                    )
                    for name, each in named.items()
                ]
                sections.append(Section(f"{protocol}: the model against {run}", columns, rows))
        title = f"EvaluationResult of {self.model} on {report.split}"
        remarks = [f"note: {self.why_not_kept}"] if self.why_not_kept else []
        return View(title, sections, report.sentences, report.cautions, remarks)

    def _better(self, run: str, name: str, found: Comparison) -> str:
        """The folder of the better of two runs; empty if the comparison does not tell."""
        from recspec.evaluation import better

        return {"ours": self.run, "theirs": run, "neither": ""}[better(self.report, run, name, found)]


def _interval(found: Any) -> str:
    return f"{found.low:.4f} to {found.high:.4f}"


def _slices(title: str, parts: Mapping[str, Slice]) -> Section:
    """Metrics of each slice, with standard errors."""
    names = list(dict.fromkeys(name for part in parts.values() for name in part.metrics))
    rows = []
    for value, part in parts.items():
        errors = {name: f" ±{error:.4f}" for name, error in part.standard_errors.items()}
        cells = [f"{part.metrics[name]:.4f}{errors.get(name, '')}" if name in part.metrics else "" for name in names]
        rows.append((value, f"{part.count:,}", f"{part.positives:,}", *cells))
    return Section(title, ("", "count", "positives", *names), rows)


@verb
def evaluate(
    run: Place,
    data: Place | None = None,
    split: str = "test",
    *,
    journal: str | None = None,
    protocol: str | Sequence[str] | None = None,
    label: str | None = None,
    k: int | Sequence[int] | None = None,
    baselines: bool = False,
    users: int | None = None,
    known: str = "before",
    cold: str = "keep",
    repeats: str = "drop",
    bootstrap: int = 0,
    against: Place | Sequence[Place] | None = None,
    slice: str | Sequence[str] | None = None,
    diversity: str | None = None,
    event: str = "click",
    window: str = "30m",
    explore_temperature: float | None = None,
    explore_floor: float | None = None,
    explore_pool: int | None = None,
    explore_last: int | None = None,
    device: str = "auto",
    allow_outside: bool = False,
    verify: bool = True,
    progress: bool | Stages | None = None,
) -> EvaluationResult:
    """Measure a trained model on data, or on logged lists.

    Data are a prepared dataset, or a file of events that are newer than the model. The run's folder keeps the result in
    `evaluations`; the same question about the same data replaces it. Each run of `against` keeps its own, as if it had
    been evaluated alone.

    Args:
        run: Folder of a run or a bundle.
        data: Prepared dataset: its folder or specification file; or newer events: a csv, jsonl or parquet file.
        split: Split to score.
        journal: Journal of lists drawn by chance, in place of data: sqlite:///FILE or
            postgresql+psycopg://USER@HOST/DATABASE.
        protocol: Protocol: rows, sampled or full, or several; by default all that fit.
        label: Label to measure, of several; by default the first that the run learned.
        k: Cut-off of metrics, or several; by default the dataset's, or whole lists of a journal.
        baselines: Also fit the classic baselines.
        users: Number of users to rank under full, drawn evenly; by default all.
        known: Splits with known events of a user: before (all earlier ones) or train.
        cold: Items that training never saw: keep or drop.
        repeats: Items that the user acted on before: drop or keep.
        bootstrap: Bootstrap draws for 95 % intervals; 0 gives none.
        against: Run to compare with by paired tests, or several.
        slice: Slices to measure apart: activity (of users), popularity (of items) or a column.
        diversity: Item column for the diversity of lists; by default the first categorical one.
        event: Type of a journal's events that are the reward.
        window: Time after an answer in which such an event counts.
        explore_temperature: Temperature of the lists that the model would draw; by default as logged.
        explore_floor: Share of each place that it would draw evenly; by default as logged.
        explore_pool: Number of best items that it may show; by default as logged.
        explore_last: Number of places at the end that it would draw; by default as logged.
        device: Device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        verify: Compare files with their manifest.
        progress: A function that receives stages (stage, done, total), or False for no bar.

    Raises:
        SpecError: if the dataset lacks the model's features, or the roles that a protocol needs.
        SettingsError: for an unknown protocol or value.
        DataError: if a journal's lists tell nothing of the model, with the reasons.
        BundleError: if a run holds no bundle, or a damaged one.
    """
    own: dict[str, object] = {
        "event": event, "window": window, "explore_temperature": explore_temperature, "explore_floor": explore_floor,
        "explore_pool": explore_pool, "explore_last": explore_last,
    }  # fmt: skip
    of_data: dict[str, object] = {
        "split": split, "protocol": protocol, "label": label, "baselines": baselines, "users": users, "known": known,
        "cold": cold, "repeats": repeats, "slice": slice, "diversity": diversity, "allow_outside": allow_outside,
    }  # fmt: skip
    ks = tuple(dict.fromkeys(several(k))) or None
    names = dict.fromkeys(os.fspath(each) for each in several(against))
    how = _How([os.fspath(run), *names], device, verify, progress)
    if data is None or journal is not None:
        if data is not None or journal is None:
            expected = "a dataset or a journal" if data is None else "one of data and journal"
            raise SettingsError(f"evaluate: expected {expected}")
        _refuse(of_data, "used with data alone")
        return _from_journal(journal, {**own, "ks": ks, **({"draws": bootstrap} if bootstrap else {})}, how)
    _refuse(own, "used with journal alone")
    if _is_of_events(data):
        _refuse({**of_data, "bootstrap": bootstrap}, "used with a prepared dataset, not with a file of events")
        return _from_events(data, ks, how)
    from recspec.base import config
    from recspec.bundle import folder as bundle
    from recspec.evaluation import EvaluateSettings, save
    from recspec.evaluation import evaluate as run_evaluation
    from recspec.inference import PipelineRanker
    from recspec.loading import join

    prepared = opened(data, allow_outside=allow_outside)
    spec = prepared.spec
    asked: dict[str, object] = {
        "label": label,
        "ks": ks,
        "users": users,
        "diversity": diversity,
        "bootstrap": bootstrap,
        "slices": tuple(dict.fromkeys(several(slice))),
        "known": known,
        "cold": cold,
        "repeats": repeats,
    }
    chosen = config.build(EvaluateSettings, "evaluate", asked)
    with join(device) as ranks:
        trained = bundle.load(Path(run), ranks=ranks, verify=verify)
        with stages(progress if ranks.is_first else False) as show:
            others = {name: bundle.load(name, ranks=ranks, verify=verify) for name in names}
            report = run_evaluation(
                trained,
                spec,
                split,
                protocols=several(protocol) or None,
                baselines=baselines,
                settings=chosen,
                against=others,
                ranks=trained.shards.evaluating,
                progress=show,
                of_all=PipelineRanker,
            )
        kept = {}
        if ranks.is_first:
            kept = {name: save(each, others[name], spec) for name, each in report.others.items()}
            kept[""] = save(report, trained, spec)
    why_not = {name: each.why_not for name, each in kept.items() if each.why_not} | dict(report.not_alone)
    told = [f"{name}: {why}" if name else why for name, why in why_not.items()]
    file = kept[""].file if kept else None
    files = [each.file for each in reversed(kept.values()) if each.file is not None]
    return EvaluationResult(
        report,
        trained.card.model,
        prepared.kind,
        run=os.fspath(run),
        file=file,
        files=files,
        why_not_kept="; ".join(told) if kept else "the first process keeps it",
    )


def _is_of_events(data: Data | Place) -> bool:
    """Whether data are a file of events; prepared ones are a folder, or a specification in YAML."""
    endings = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
    return not isinstance(data, Data) and Path(data).suffix in endings and not Path(data).is_dir()


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse options that were given, as their source is not used."""
    usual = inspect.signature(evaluate).parameters
    if strange := [name for name, value in options.items() if value != usual[name].default]:
        raise SettingsError(f"evaluate: {listed(strange)}: {why}")


@dataclass(frozen=True)
class _How:
    """Runs, the first of which is compared with the others, and how they are opened."""

    names: Sequence[str]
    device: str
    verify: bool
    progress: bool | Stages | None

    def measure(self, measure: Callable[[dict[str, Predictor], Stages], Mapping[str, Report]]) -> EvaluationResult:
        """The first report, after each was kept with its run."""
        from recspec.evaluation import save
        from recspec.inference import Predictor

        with stages(self.progress) as show:
            runs = {name: Predictor.open(name, device=self.device, verify=self.verify) for name in self.names}
            reports = measure(runs, show)
        kept = {name: save(report, runs[name].bundle, runs[name].spec) for name, report in reports.items()}
        why_not = [f"{name}: {each.why_not}" for name, each in kept.items() if each.why_not]
        first = next(iter(reports))
        return EvaluationResult(
            reports[first],
            runs[first].bundle.card.model,
            run=first,
            file=kept[first].file,
            files=[each.file for each in kept.values() if each.file is not None],
            why_not_kept="; ".join(why_not),
        )


def _from_events(file: Place, ks: tuple[int, ...] | None, how: _How) -> EvaluationResult:
    """How well the lists or probabilities of runs fit newer events."""
    from recspec.base import config
    from recspec.base.stores import fetched, url_text
    from recspec.evaluation import EvaluateSettings
    from recspec.loop import evaluate_events
    from recspec.training import dataset_of

    config.build(EvaluateSettings, "evaluate", {"ks": ks})  # refuses numbers below 1
    place = fetched(str(file), "data") if url_text(file) else Path(file)

    def measure(runs: dict[str, Predictor], show: Stages) -> Mapping[str, Report]:
        datasets = {name: dataset_of(each.bundle.folder, None) for name, each in runs.items()}
        return evaluate_events(runs, datasets, place, ks, progress=show)

    return how.measure(measure)


def _from_journal(url: str, asked: Mapping[str, object], how: _How) -> EvaluationResult:
    """What the lists of runs would earn, estimated from what a journal's lists earned."""
    from recspec.base import config
    from recspec.loop import Journal, LoggedListSettings, evaluate_journal

    settings = config.build(LoggedListSettings, "evaluate", asked)
    with Journal(url, read_only=True) as journal:
        return how.measure(lambda runs, show: evaluate_journal(runs, journal, settings, progress=show))


@verb
def compare(runs: Sequence[Place], data: Place, split: str = "test", **named: Any) -> EvaluationResult:
    """Measure several runs on a dataset; the first is compared with each of the others by paired tests.

    Args:
        runs: Models or folders of runs, two or more.
        **named: Keywords of `evaluate`.

    Raises:
        SettingsError: for fewer than two runs; otherwise as `evaluate`.
    """
    if isinstance(runs, (str, os.PathLike)) or len(runs) < 2:
        raise SettingsError("compare: expected two runs or more, as in compare(['run-a', 'run-b'], data)")
    first, *others = runs
    return evaluate(first, data, split, against=others, **named)
