"""Methods compared over seeds: the runs of a folder, grouped by all but their seed, measured and tested."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recspec.api.data import Data, opened
from recspec.api.evaluating import evaluate
from recspec.api.frames import Kind, chosen_kind, from_table, table_of
from recspec.api.progress import Stages
from recspec.api.verb_checks import Place, one_of, several, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import DataError, SettingsError, how_many, listed, of_the_machine, unknown

if TYPE_CHECKING:
    from recspec.evaluation import EvaluateSettings, FoundRun, Method, MethodPair, SavedEvaluation, SeedValues

SUFFIXES = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
"""How the name of a file ends -> the format of its table."""
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    each: f"\\{each}" for each in "&%$#_{}"
}
OF_THE_TASK = ("label", "ks", "users", "known", "cold", "repeats")
"""Settings of an evaluation on which the values of users depend."""

TableFormat = Literal["csv", "markdown", "latex"]


class MethodTable(Viewed):
    """Means and standard deviations over seeds of one or more methods, and tests of their differences.

    Attributes:
        methods: The methods: a name, the runs, and their seeds.
        values: Method -> PROTOCOL/METRIC -> its values.
        pairs: Each pair of methods in each metric, with its test.
        split: The split that was measured.
        notes: A sentence for each run that was left out, and on what the tests don't cover.
        kind: The kind of frame in which `to_frame` answers by default.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        values: Mapping[str, Mapping[str, SeedValues]],
        split: str,
        notes: Sequence[str] = (),
        kind: Kind = "pyarrow",
    ) -> None:
        from recspec.evaluation import compare_methods

        self.methods, self.values, self.split, self.notes, self.kind = tuple(methods), values, split, tuple(notes), kind
        self.pairs = compare_methods(values)

    @property
    def metrics(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Method -> PROTOCOL/METRIC -> mean and standard deviation over seeds; the latter NaN for one run."""
        return {name: {key: (x.mean, x.deviation) for key, x in of.items()} for name, of in self.values.items()}

    def best(self, metric: str) -> str:
        """The method with the best mean of a metric, PROTOCOL/METRIC."""
        from recspec.evaluation import is_lower_better

        choose = min if is_lower_better(metric) else max
        return choose(self.values, key=lambda name: self.values[name][metric].mean)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        methods = [{"name": each.name, "runs": list(each.runs), "seeds": list(each.seeds)} for each in self.methods]
        tables = {"metrics": self.to_frame("rows"), "comparisons": self.comparisons("rows")}
        return {"split": self.split, "methods": methods, **tables, "notes": list(self.notes)}

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a metric and method: `protocol`, `metric`, `method`, `runs`, `mean`, `deviation` over seeds, and
        against the best method of the metric: its name `best`, the `difference` (method minus best), its
        `standard_error`, `p_value`, and `p_holm`, corrected over all pairs of methods."""
        import pyarrow as pa

        rows = []
        for metric in self._metrics():
            best = self.best(metric)
            for name, of in self.values.items():
                test = self._test(metric, name)
                own = of[metric]
                start = (*metric.split("/", 1), name, len(own.seeds), own.mean, _known(own.deviation), best)
                rows.append((*start, *(test or (None,) * 4)))
        texts, numbers = dict.fromkeys(("protocol", "metric", "method"), pa.string()), ("mean", "deviation")
        tests = dict.fromkeys(("difference", "standard_error", "p_value", "p_holm"), pa.float64())
        kinds = {**texts, "runs": pa.int64(), **dict.fromkeys(numbers, pa.float64()), "best": pa.string(), **tests}
        return from_table(table_of(kinds, rows), chosen_kind(kind, self.kind))

    def comparisons(self, kind: str | None = None) -> Any:
        """One row a metric and pair of methods: `protocol`, `metric`, `method`, `other`, the `difference` (method
        minus other), its `standard_error`, `p_value`, `p_holm`, and `better`, empty if the test does not tell."""
        import pyarrow as pa

        numbers = ("difference", "standard_error", "p_value", "p_holm")
        rows = [
            (*x.metric.split("/", 1), x.method, x.other, *(_known(getattr(x, each)) for each in numbers), x.better)
            for x in self.pairs
        ]
        texts = dict.fromkeys(("protocol", "metric", "method", "other"), pa.string())
        kinds = {**texts, **dict.fromkeys(numbers, pa.float64()), "better": pa.string()}
        return from_table(table_of(kinds, rows), chosen_kind(kind, self.kind))

    def to_text(self, format: TableFormat) -> str:
        """The table for a paper, a line a method, as Markdown or LaTeX; or all figures of `to_frame` as CSV.

        The best mean of a metric is bold, and so is each one that the test does not tell from it.
        """
        one_of("--format", format, SUFFIXES.values())
        if format == "csv":
            import pyarrow.csv as csv

            held = io.BytesIO()
            csv.write_csv(self.to_frame("pyarrow"), held)
            return held.getvalue().decode()
        heads, lines = ["method", "runs", *self._metrics()], []
        for name, of in self.values.items():
            cells = [_cell(of[metric], format, self._is_on_top(metric, name)) for metric in of]
            first = latex(name) if format == "latex" else _markdown(name)
            lines.append([first, str(max(len(each.seeds) for each in of.values())), *cells])
        if format == "markdown":
            table = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
            return "".join(f"| {' | '.join(row)} |\n" for row in table)
        rows = [" & ".join(row) + r" \\" for row in ([latex(each) for each in heads], *lines)]
        begin, end = f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\end{tabular}"
        return "\n".join([begin, r"\hline", rows[0], r"\hline", *rows[1:], r"\hline", end, ""])

    def view(self) -> View:
        """Means and deviations by protocol, then each method against the best one."""
        sections = []
        for protocol in dict.fromkeys(metric.partition("/")[0] for metric in self._metrics()):
            own = [metric for metric in self._metrics() if metric.startswith(f"{protocol}/")]
            columns = ("", "runs", *(metric.partition("/")[2] for metric in own))
            rows: list[Sequence[object]] = [
                (name, len(of[own[0]].seeds), *(_cell(of[each]) for each in own)) for name, of in self.values.items()
            ]
            sections.append(Section(f"{self.split}, {protocol}: mean ± standard deviation over seeds", columns, rows))
        tests: list[Sequence[object]] = []
        for metric in self._metrics():
            best = self.best(metric)
            for name in self.values:
                if (test := self._test(metric, name)) is not None and test[2] is not None:
                    told = "" if self._is_on_top(metric, name) else best
                    figures = (f"{test[0]:.4f}", f"{test[1]:.4f}", f"{test[2]:.3g}", f"{test[3]:.3g}")
                    tests.append((metric, name, best, *figures, told))
        if tests:
            columns = ("", "method", "best", "method - best", "error", "p", "p (Holm)", "better")
            sections.append(Section("against the best mean, over users and seeds", columns, tests))
        title = f"{how_many(len(self.methods), 'method')} on {self.split}"
        return View(title, sections, remarks=[f"note: {note}" for note in self.notes])

    def _metrics(self) -> list[str]:
        return list(next(iter(self.values.values()), {}))

    def _pair(self, metric: str, name: str) -> MethodPair | None:
        """A method and the best one; None for the best itself."""
        both = {name, self.best(metric)}
        return next((each for each in self.pairs if each.metric == metric and {each.method, each.other} == both), None)

    def _test(self, metric: str, name: str) -> tuple[float | None, ...] | None:
        """Difference to the best, its error, and both p-values; None for the best itself."""
        if (pair := self._pair(metric, name)) is None:
            return None
        sign = 1 if pair.method == name else -1
        return sign * pair.difference, *map(_known, (pair.standard_error, pair.p_value, pair.p_holm))

    def _is_on_top(self, metric: str, name: str) -> bool:
        """Whether a method is the best, or the test does not tell it from the best."""
        pair = self._pair(metric, name)
        return pair is None or not pair.better


def latex(text: str) -> str:
    """A text for LaTeX, whose special characters stand for themselves."""
    return "".join(LATEX.get(letter, letter) for letter in text)


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", text)


def _cell(values: SeedValues, format: str = "", is_bold: bool = False) -> str:
    signs = {"latex": (r" $\pm$ ", r"\textbf{{{}}}"), "markdown": (" ± ", "**{}**")}
    between, bold = signs.get(format, (" ± ", "{}"))
    mean = bold.format(f"{values.mean:.4f}") if is_bold else f"{values.mean:.4f}"
    return mean if math.isnan(values.deviation) else f"{mean}{between}{values.deviation:.4f}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


@verb
def compare_folder(
    folder: Place,
    data: Place | None = None,
    split: str = "test",
    *,
    protocol: str | Sequence[str] | None = None,
    metric: str | Sequence[str] | None = None,
    label: str | None = None,
    k: int | Sequence[int] | None = None,
    users: int | None = None,
    known: str = "before",
    cold: str = "keep",
    repeats: str = "drop",
    out: Place | None = None,
    format: TableFormat | None = None,
    device: str = "auto",
    progress: bool | Stages | None = None,
    tell: Callable[[str], None] | None = None,
) -> MethodTable:
    """Compare the runs of a folder over their seeds.

    Runs that differ by their seed alone are one method. Each run is measured once and keeps its evaluation, so the
    same call continues one that was stopped. Differences are tested over users and seeds, and corrected (Holm).

    Args:
        folder: Folder that holds the runs.
        data: Prepared dataset; by default the one that the runs name.
        split: Split to score.
        protocol: Protocol: rows, sampled or full, or several; by default all that fit.
        metric: Metric of the table, or several; by default all that are means over users or rows.
        label: Label to measure, of several; by default the first that the runs learned.
        k: Cut-off of metrics, or several; by default the dataset's.
        users: Number of users to rank under full, drawn evenly; by default all.
        known: Splits with known events of a user: before (all earlier ones) or train.
        cold: Items that training never saw: keep or drop.
        repeats: Items that the user acted on before: drop or keep.
        out: File for the table: .csv, .md or .tex.
        format: Format of the table in place of the terminal's; in Python of the file `out`.
        device: Device: auto, cpu, cuda or cuda:N.
        progress: A function that receives stages (stage, done, total), or False for no bar.
        tell: Receives a sentence on each run that is measured.

    Raises:
        DataError: if the folder holds no run of the dataset, or the file can't be written.
        SettingsError: for an unknown metric, or runs of several datasets without `data`; otherwise as `evaluate`.
    """
    from recspec.base import config
    from recspec.bundle import DataRecord
    from recspec.evaluation import EvaluateSettings, find_runs, measured_methods, methods_of
    from recspec.loading import join

    suffix = Path(out).suffix if out is not None else ""
    if out is not None and format is None and suffix not in SUFFIXES:
        raise SettingsError(f"--out {out}: expected a name that ends in {listed(SUFFIXES)}, or --format")
    found = find_runs(Path(folder), sort="run")
    prepared = opened(_data_of(Path(folder), found.runs) if data is None else data)
    digest = DataRecord.of(prepared.spec).digest
    asked: dict[str, Any] = {"label": label, "users": users, "known": known, "cold": cold, "repeats": repeats}
    ks, protocols = tuple(dict.fromkeys(several(k))) or None, several(protocol) or None
    wanted = config.build(EvaluateSettings, "compare", {**asked, "ks": ks})
    methods, notes = methods_of([run for run in found.runs if run.data_digest in ("", digest)])
    others = [run.path for run in found.runs if run.data_digest not in ("", digest)]
    notes = [*found.problems, *notes, *(f"{path}: left out: it was trained on other data" for path in others)]
    if not methods:
        raise DataError.of(f"{folder}: holds no run of {prepared.path} to compare", notes or ["no run"])
    evaluations: dict[str, list[SavedEvaluation]] = {}
    total, number = sum(len(each.runs) for each in methods), 0
    for method in methods:
        for run in method.runs:
            number += 1
            kept = _kept(run, digest, split, protocols, wanted)
            if kept is None:
                more = {**asked, "k": ks, "protocol": protocols, "device": device, "progress": progress}
                evaluate(run, prepared, split, **more)
                with join(device):  # the first process has kept it once all meet
                    kept = _kept(run, digest, split, protocols, wanted)
                if kept is not None and tell is not None:
                    tell(f"{run}: measured, {number} of {total}")
            if kept is None:
                raise DataError(f"{run}: its evaluation could not be kept; make its folder writable")
            evaluations.setdefault(method.name, []).append(kept)
    values = measured_methods(evaluations)
    known_metrics = list(next(iter(values.values())))
    if strange := [each for each in several(metric) if each not in known_metrics]:
        raise SettingsError(f"--metric: {unknown('metric', strange, known_metrics)} on {split}")
    chosen = list(dict.fromkeys(several(metric))) or known_metrics
    if len(methods) > 1:
        alone = [each.name for each in methods if len(each.runs) == 1]
        notes += [f"{name}: one run, so the tests don't count the chance of its training" for name in alone]
    table = MethodTable(
        methods, {name: {key: of[key] for key in chosen} for name, of in values.items()}, split, notes, prepared.kind
    )
    if out is not None:
        _write(Path(out), table.to_text(format or SUFFIXES[suffix]))  # type: ignore[arg-type]
    return table


def trained_seeds(folder: Path, runs: Sequence[Path], data: Data) -> MethodTable:
    """What runs of one method below a folder reached on valid, as training measured it."""
    from recspec.evaluation import SeedValues, find_runs, methods_of

    found = {Path(run.path): run for run in find_runs(folder).runs}
    (method, *_), _ = methods_of([found[run] for run in runs])
    valid = [found[Path(run)].values.get("valid", {}) for run in method.runs]
    common = [key for key in valid[0] if all(key in each for each in valid)]
    values = {key: SeedValues(tuple(each[key] for each in valid)) for key in common}
    return MethodTable([method], {method.name: values}, "valid", kind=data.kind)


def _data_of(folder: Path, runs: Sequence[FoundRun]) -> Path:
    """The dataset that all runs name."""
    places = sorted({run.data_path for run in runs if run.data_path})
    if len(places) != 1:
        told = f"the runs name {len(places)} datasets ({listed(places)})" if places else "no run names its dataset"
        raise SettingsError(f"{folder}: {told}; name the dataset, as in compare {folder} DATA")
    return Path(places[0])


def _kept(
    run: str, digest: str, split: str, protocols: Sequence[str] | None, wanted: EvaluateSettings
) -> SavedEvaluation | None:
    """The newest evaluation of a run that answers the same question on the same data, with its values."""
    from recspec.bundle import folder as bundle
    from recspec.evaluation import saved

    asked = wanted.model_dump(mode="json")
    for each in saved(bundle.find(Path(run))):
        same = all(each.settings.get(name) == asked[name] for name in OF_THE_TASK)
        is_asked = each.protocols is None if protocols is None else {*protocols} <= {*each.groups}
        if each.is_current and (each.split, each.data.digest) == (split, digest) and same and is_asked and each.groups:
            return each
    return None


def _write(out: Path, text: str) -> None:
    from recspec.base.files import write_whole

    try:
        write_whole(out, text)
    except OSError as error:
        raise DataError(f"{out}: the table could not be written: {of_the_machine(error) or error}") from None
