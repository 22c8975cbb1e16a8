"""The report of an evaluation: a model beside baselines, under named protocols."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from recspec.bundle import DataRecord
from recspec.evaluation import warnings
from recspec.evaluation.warnings import Difference, ModelWarning, Probabilities

PerGroup = NDArray[np.floating]
Metrics = dict[str, dict[str, float]]  # protocol -> metric -> value
LOWER_IS_BETTER = ("log_loss", "calibration_error", "log_loss_uncalibrated", "calibration_error_uncalibrated")
NOT_COMPARED = ("calibration_error",)  # with baselines: a constant has none

LEVEL = 0.95
"""Confidence of intervals and tests."""


@dataclass(frozen=True)
class Slice:
    """Metrics of the part of an evaluation in which a column has one value."""

    count: int
    """Groups or rows."""
    positives: int
    metrics: Mapping[str, float]
    standard_errors: Mapping[str, float]


@dataclass(frozen=True)
class Exposure:
    """How recommendations spread over popular and rare items; see `list_metrics.exposure`."""

    shares: tuple[float, ...]
    """Of the places of all lists, from the part of the most popular items to that of items without interactions."""
    items: tuple[int, ...]
    """Number of items in each part."""


@dataclass(frozen=True)
class Groups:
    """Whose values an evaluation holds: users or other groups in order, or the user of each row."""

    feature: str
    """The feature of the ids; empty if rows have no user."""
    ids: NDArray[np.integer]
    """Prepared ids."""
    events: NDArray[np.integer] | None = None
    """Items that each user acted on before the split, where they were read."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model or baseline on a split."""

    metrics: Metrics
    protocols: dict[str, dict[str, object]] = field(default_factory=dict)  # protocol -> facts about its candidates
    values: dict[str, dict[str, PerGroup]] = field(default_factory=dict, repr=False)
    """Protocol -> metric -> one value a group; under `rows` one a row, but of `group_auc` one a group."""
    positive: NDArray[np.bool_] | None = field(default=None, repr=False)  # of the rows of `values`
    groups: dict[str, Groups] = field(default_factory=dict, repr=False)  # protocol -> whose values these are
    list_metrics: dict[str, float] = field(default_factory=dict)  # coverage and so on, of the lists of protocol full
    list_values: dict[str, PerGroup] = field(default_factory=dict, repr=False)  # of each user
    exposure: Exposure | None = None  # of the longest lists that `list_metrics` is of
    slices: dict[str, dict[str, dict[str, Slice]]] = field(default_factory=dict)  # protocol -> slice by -> its value
    left_out: dict[str, str] = field(default_factory=dict)  # protocol -> reason
    fitted: Mapping[str, object] = field(default_factory=dict)  # details of a baseline's fit
    probabilities: Probabilities | None = None  # of labelled rows of both classes

    @property
    def standard_errors(self) -> Metrics:
        """Standard errors of the metrics that are means over groups or rows, and of AUC and GAUC."""
        return {
            protocol: {name: standard_error(values) for name, values in named.items() if len(values) > 1}
            for protocol, named in self.values.items()
        }


@dataclass(frozen=True)
class Interval:
    """A metric with its interval; see `bootstrap`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """How another evaluation's metric differs from this one's, over the same groups."""

    ours: float
    theirs: float
    difference: float
    """Theirs minus ours."""
    standard_error: float
    low: float
    high: float
    """The ends of the interval of the difference."""
    p_value: float
    """Two-sided, of the paired t-test."""
    p_permutation: float
    """Two-sided, of the paired permutation test, which flips the signs of differences."""

    @property
    def is_significant(self) -> bool:
        """Whether both tests reject equal means at 1 - `LEVEL`."""
        return max(self.p_value, self.p_permutation) < 1 - LEVEL


@dataclass(frozen=True)
class Asked:
    """What an evaluation was asked for."""

    protocols: tuple[str, ...] | None
    """None: every protocol that fits the data."""
    settings: Mapping[str, object]
    baselines: bool
    against: tuple[str, ...] = ()
    """Other runs, as they were named."""


@dataclass(frozen=True)
class Report:
    """A model and the baselines on one split."""

    split: str
    model: Evaluation
    beside: Mapping[str, Evaluation] = field(default_factory=dict)
    not_fitted: Mapping[str, str] = field(default_factory=dict)  # baseline -> reason
    intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)  # protocol -> metric
    against: Mapping[str, Mapping[str, Mapping[str, Comparison]]] = field(default_factory=dict)  # run -> protocol ->
    chosen_by: str = ""  # PROTOCOL/METRIC on valid that chose the model, if known
    asked: Asked | None = None
    data: DataRecord | None = None
    folder: str = "DATA"
    """The dataset's folder as it was named, for commands."""
    data_notes: tuple[str, ...] = ()
    """What differs between this dataset and the one that the model was trained on."""
    label_columns: Mapping[str, float] = field(default_factory=dict)
    """Columns that the model reads and that alone order the labels of train -> their AUC."""
    seconds: float | None = None
    others: Mapping[str, Report] = field(default_factory=dict, repr=False)
    """Each run of `against` as if it had been evaluated alone, under the same task."""
    not_alone: Mapping[str, str] = field(default_factory=dict)
    """Run of `against` that is not among `others` -> the reason."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Run of `against`, or "" for the model -> the other dataset that it was trained on."""

    @property
    def metrics(self) -> Metrics:
        """Metrics of the model."""
        return self.model.metrics

    @property
    def shown(self) -> tuple[str, ...]:
        """The protocols to show: those that were asked for; by default full alone where it was measured, else all."""
        named = self.asked.protocols if self.asked is not None else None
        return ("full",) if named is None and "full" in self.metrics else tuple(self.metrics)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is said below the metrics: verdicts, protocols that are not shown, notes and warnings."""
        told = [line for line in self.verdicts if line.partition(":")[0] in self.shown]
        if hidden := [name for name in self.metrics if name not in self.shown]:
            told.append(f"{' and '.join(hidden)}: measured too and kept; --protocol NAME (protocol=NAME) shows one")
        notes = self.notes[len(self.cautions) :]
        return (*told, *notes, *(f"warning: {each.message}" for each in self.warnings))

    @property
    def baselines(self) -> dict[str, Metrics]:
        """Baseline -> protocol -> metric -> value."""
        return {name: evaluation.metrics for name, evaluation in self.beside.items()}

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each protocol and baseline that beats the model, or is ahead by too little to tell.

        The difference is given in standard errors over the same groups or rows; from 2 on, it is a win. Without a
        standard error, it is none.
        """
        sentences = []
        for protocol, reached in self.model.metrics.items():
            for name, baseline in self.beside.items():
                wins: dict[bool, dict[tuple[float, float], str]] = {True: {}, False: {}}
                for metric, ours in reached.items():
                    if metric in NOT_COMPARED:
                        continue
                    theirs = baseline.metrics.get(protocol, {}).get(metric, ours)
                    if theirs < ours if is_lower_better(metric) else theirs > ours:
                        found = difference(self.model, baseline, protocol, metric)
                        # infinitely many if the difference is the same in every group
                        errors = (abs(found[0]) / found[1] if found[1] else math.inf) if found else None
                        by = " (standard error unknown)" if errors is None else f" ({errors:.1f} standard errors)"
                        # Equal metrics count once, as HR and recall of one positive.
                        among = wins[found is not None and warnings.is_clear(*found)]
                        among.setdefault((ours, theirs), f"{metric} {theirs:.4f} against {ours:.4f}{by}")
                if clear := wins[True] or wins[False]:
                    said = "beats" if wins[True] else "is level with"
                    first, others = list(clear.values())[:2], len(clear) - 2
                    more = f" and {others} more" if others > 0 else ""
                    sentences.append(f"{protocol}: {name} {said} the model: {', '.join(first)}{more}")
        return tuple(sentences)

    @property
    def warnings(self) -> tuple[ModelWarning, ...]:
        """What is wrong with the model, by this report."""
        differences = []
        for protocol, reached in self.model.metrics.items():
            for name, baseline in self.beside.items():
                for metric in (each for each in reached if each not in NOT_COMPARED):
                    if found := difference(self.model, baseline, protocol, metric):
                        both = reached[metric], baseline.metrics[protocol][metric]
                        better_by = -found[0] if is_lower_better(metric) else found[0]
                        count = len(self.model.values[protocol][metric])
                        differences.append(Difference(name, f"{protocol}/{metric}", *both, better_by, found[1], count))
        return (
            *warnings.of_label_columns(self.label_columns),
            *warnings.of_probabilities(self.model.probabilities, self.split),
            *warnings.of_protocols(self.model.protocols, self.split),
            *warnings.of_baselines(differences, self.split, self.chosen_by, self.folder),
        )

    @property
    def cautions(self) -> tuple[str, ...]:
        """A sentence for each run of a comparison that was trained on other data than it is measured on."""
        here = "" if self.data is None else f"{self.data.path}, {self.data.digest[:12]}"
        return tuple(
            f"{name or 'the model'} was trained on other data ({where}) than it is measured on ({here}): it may have "
            "seen the answers, so comparisons with it name no better run"
            for name, where in self.elsewhere.items()
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each reason to leave something out, protocol of a pipeline, and partly fitted baseline."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.not_fitted.items():
            by_reason.setdefault(why, []).append(name)
        notes = [*self.cautions, *self.data_notes]
        notes += [f"protocol {name} left out: {why}" for name, why in self.model.left_out.items()]
        notes += [*self._undefined()]
        for name, facts in self.model.protocols.items():
            if "stages" in facts:
                recall = facts.get("candidates_recall")
                share = "" if recall is None else f"; the candidates hold {recall:.4f} of the positives"
                notes.append(f"protocol {name} measures {facts['stages']}{share}")
        if self.intervals.get("rows") and "log_loss" in self.metrics["rows"].keys() - self.intervals["rows"].keys():
            notes.append(
                f"log loss has no interval: fewer than {warnings.FEWEST_ROWS} rows may lack the rare large losses"
            )
        notes += [f"{', '.join(names)} left out: {why}" for why, names in by_reason.items()]
        for name, found in self.beside.items():
            rows, of_rows = (_count(found.fitted, each) for each in ("rows", "of_rows"))
            if rows != of_rows:
                notes.append(f"{name} was fitted on an even sample of {rows} of {of_rows} rows")
        return tuple(notes)

    def _undefined(self) -> Iterator[str]:
        """A line for each metric of rows, and each standard error, that these data do not define."""
        rows, facts = self.metrics.get("rows"), self.model.protocols.get("rows", {})
        if rows is not None and "auc" not in rows:
            yield f"rows has no AUC: every row of {self.split} is {'positive' if facts['positives'] else 'negative'}"
        elif rows is not None and "group_auc" not in rows and _one_class(facts):
            yield f"rows has no GAUC: no group has rows of both classes ({_one_class(facts)})"
        for name in self.metrics.keys() - {"rows"}:
            if self.model.protocols[name]["groups"] == 1:
                yield f"{name} has no standard errors: it ranks a single {'user' if name == 'full' else 'group'}"

    def described(self, protocol: str) -> str:
        """The protocol's name and candidates, in a line."""
        facts = self.model.protocols.get(protocol, {})
        if protocol == "rows":
            apart = _one_class(facts) if "group_auc" in self.metrics["rows"] else ""
            without = f"; GAUC leaves out {apart}" if apart else ""
            return f"rows ({_count(facts, 'rows')} rows, {_count(facts, 'positives')} positive{without})"
        if "described" in facts:
            return f"{protocol} ({facts['described']})"
        fewest, most = (int(str(facts.get(name, 0))) for name in ("fewest_candidates", "most_candidates"))
        many = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        notes, all_positives = [str(facts.get("candidates", ""))], _count(facts, "of_positives")
        counted = {
            "groups_without_positive": "groups without a positive left out",
            "groups_without_negative": "groups hold positives alone, which any model ranks right",
            "of_unknown_users_left_out": "positives of unknown users left out",
            "of_unknown_items_left_out": "positives of unknown items left out",
            "repeats_left_out": f"of {all_positives} positives left out, which repeat items of the user",
        }
        notes += [f"{_count(facts, name)} {what}" for name, what in counted.items() if facts.get(name)]
        if facts.get("repeats") == "keep":
            notes.append("items that the user acted on before are candidates and targets")
        if facts.get("input"):
            notes.append(f"input at {self.split}: {facts['input']}")
        if isinstance(splits := facts.get("trained_on"), list):
            notes.append(f"trained on {' and '.join(map(str, splits))}")
        if facts.get("cold") == "drop":
            dropped, items = (_count(facts, name) for name in ("cold_targets_dropped", "cold_items"))
            notes.append(f"cold: {dropped} targets and {items} items dropped")
        if isinstance(certain := facts.get("certain"), list):
            notes.append(f"{', '.join(certain)} left out, 1 for any model")
        who = "users" if protocol == "full" else "groups"
        return f"{protocol} ({_count(facts, 'groups')} {who}, {many} candidates each: {'; '.join(notes)})"

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        every = {"model": self.model, **self.beside}
        return {
            "split": self.split,
            "metrics": self.model.metrics,
            "standard_errors": self.model.standard_errors,
            "intervals": _plain(self.intervals),
            "against": {run: _plain(found) for run, found in self.against.items()},
            "protocols": self.model.protocols,
            "baselines": self.baselines,
            "beyond_accuracy": {
                name: of.list_metrics for name, of in every.items() if of.list_metrics or of is self.model
            },
            "exposure": {name: asdict(of.exposure) for name, of in every.items() if of.exposure is not None},
            "slices": {
                protocol: {by: {value: asdict(part) for value, part in parts.items()} for by, parts in found.items()}
                for protocol, found in self.model.slices.items()
            },
            "fitted": {name: dict(found.fitted) for name, found in self.beside.items() if found.fitted},
            "verdicts": list(self.verdicts),
            "notes": list(self.notes),
            "warnings": [each.to_dict() for each in self.warnings],
            "probabilities": asdict(self.model.probabilities) if self.model.probabilities is not None else None,
            "left_out": {**self.model.left_out, **self.not_fitted},
        }


def _plain(found: Mapping[str, Mapping[str, Interval | Comparison]]) -> dict[str, dict[str, dict[str, object]]]:
    return {protocol: {name: asdict(each) for name, each in named.items()} for protocol, named in found.items()}


def is_lower_better(metric: str) -> bool:
    """Whether less of a metric is better, with or without its protocol: `rows/log_loss` or `log_loss`."""
    return metric.rpartition("/")[2] in LOWER_IS_BETTER


def standard_error(values: PerGroup) -> float:
    """Of the mean of values."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def difference(model: Evaluation, other: Evaluation, protocol: str, metric: str) -> tuple[float, float] | None:
    """The other's metric minus the model's over the same groups or rows, and its standard error; None if unknown."""
    ours, theirs = (each.values.get(protocol, {}).get(metric) for each in (model, other))
    if ours is None or theirs is None or len(ours) != len(theirs) or len(ours) < 2:
        return None
    differences = theirs.astype(np.float64) - ours
    return float(differences.mean()), standard_error(differences)


def _one_class(facts: Mapping[str, object]) -> str:
    """The groups of rows of one class, in words; empty if there are none."""
    held = [name for name in ("positive", "negative") if facts.get(f"groups_without_{name}")]
    return " and ".join(f"{_count(facts, f'groups_without_{name}')} groups without a {name}" for name in held)


def _count(facts: Mapping[str, object], name: str) -> str:
    value = facts.get(name, 0)
    return f"{value:,}" if isinstance(value, int) else str(value)
