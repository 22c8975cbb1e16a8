"""Backtests: a model trained and measured anew on each of several datasets, such as successive windows of time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from recspec.api.data import Data, open_data
from recspec.api.evaluating import EvaluationResult, evaluate
from recspec.api.frames import Kind, chosen_kind, from_table, table_of
from recspec.api.progress import Events
from recspec.api.training import train
from recspec.api.verb_checks import Place, verb
from recspec.api.views import Section, View, Viewed
from recspec.base.errors import DataError, listed

if TYPE_CHECKING:
    from recspec.evaluation import Comparison


class Backtest(Viewed):
    """What a model reached on each dataset of a folder.

    Attributes:
        model: The model's name.
        results: Name of a dataset -> what was measured on it.
        against: Folder of the runs that it is compared with; empty without any.
        pooled: Protocol -> metric -> the paired comparison with them over the users of all datasets.
        kind: The kind of frame in which `to_frame` answers by default.
    """

    def __init__(
        self,
        model: str,
        results: Mapping[str, EvaluationResult],
        kind: Kind = "pyarrow",
        *,
        against: str = "",
        pooled: Mapping[str, Mapping[str, Comparison]] | None = None,
    ) -> None:
        self.model, self.results, self.kind = model, dict(results), kind
        self.against, self.pooled = against, pooled or {}

    @cached_property
    def metrics(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Protocol -> metric -> mean over the datasets that have it, and its standard error; NaN for one dataset.

        The error is sqrt(sum (value - mean)^2 / (n (n - 1))). It takes the datasets for independent: those of windows
        share rows of train.
        """
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for protocol, metric, values in self._values():
            held = [*values.values()]
            error = stdev(held) / math.sqrt(len(held)) if len(held) > 1 else math.nan
            found.setdefault(protocol, {})[metric] = mean(held), error
        return found

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "metrics": {
                protocol: {
                    name: {"mean": value, "standard_error": None if math.isnan(error) else error}
                    for name, (value, error) in named.items()
                }
                for protocol, named in self.metrics.items()
            },
            "datasets": {name: each.metrics for name, each in self.results.items()},
            "against": {
                protocol: {name: asdict(each) for name, each in named.items()}
                for protocol, named in self.pooled.items()
            },
        }

    def to_frame(self, kind: str | None = None) -> Any:
        """One row a dataset, protocol and metric: `dataset`, `protocol`, `metric`, `value`."""
        import pyarrow as pa

        rows = [
            (name, protocol, metric, value)
            for protocol, metric, values in self._values()
            for name, value in values.items()
        ]
        texts = dict.fromkeys(("dataset", "protocol", "metric"), pa.string())
        return from_table(table_of({**texts, "value": pa.float64()}, rows), chosen_kind(kind, self.kind))

    def view(self) -> View:
        """Each metric on each dataset, with its mean and standard error; then the comparison over all of them."""
        from recspec.evaluation import favours

        rows: dict[str, list[Sequence[object]]] = {}
        for protocol, metric, values in self._values():
            value, error = self.metrics[protocol][metric]
            told = [f"{values[name]:.4f}" if name in values else "" for name in self.results]
            row = (metric, f"{value:.4f}", "" if math.isnan(error) else f"{error:.4f}", *told)
            rows.setdefault(protocol, []).append(row)
        sections = [Section(protocol, ("", "mean", "error", *self.results), each) for protocol, each in rows.items()]
        heads = ("", "model", "other", "other - model", "error", "p (t-test)", "p (permutation)", "better")
        for protocol, named in self.pooled.items():
            compared = [
                (
                    name,
                    *(f"{x:.4f}" for x in (each.ours, each.theirs, each.difference, each.standard_error)),
                    *(f"{p:.3g}" for p in (each.p_value, each.p_permutation)),
                    {"ours": "model", "theirs": "other"}.get(favours(name, each), ""),
                )
                for name, each in named.items()
            ]
            sections.append(Section(f"{protocol}: the model against {self.against}, all datasets", heads, compared))
        return View(f"Backtest of {self.model} on {len(self.results)} datasets", sections)

    def _values(self) -> list[tuple[str, str, dict[str, float]]]:
        """Protocol, metric, and the value on each dataset that has it."""
        held: dict[tuple[str, str], dict[str, float]] = {}
        for name, result in self.results.items():
            for protocol, named in result.metrics.items():
                for metric, value in named.items():
                    held.setdefault((protocol, metric), {})[name] = value
        return [(*key, values) for key, values in held.items()]


@verb
def backtest(
    model: str,
    data: Place,
    out: Place,
    *,
    split: str = "test",
    protocol: str | Sequence[str] | None = None,
    k: int | Sequence[int] | None = None,
    cold: str = "keep",
    repeats: str = "drop",
    against: Place | None = None,
    recipe: Place | None = None,
    force: bool = False,
    device: str = "auto",
    settings: Mapping[str, object] | None = None,
    progress: bool | Events | None = None,
    tell: Callable[[str], None] | None = None,
    **named: Any,
) -> Backtest:
    """Train and measure a model on each dataset of a folder.

    `recspec prepare` with --windows writes such a folder, one dataset a window of time.

    Args:
        model: Name from `recspec models`.
        data: Folder of prepared datasets.
        out: Folder for the runs, which have the names of their datasets.
        split: Split to score.
        protocol: Protocol: rows, sampled or full; by default all that fit.
        k: Cut-off of metrics; by default the dataset's.
        cold: Items that training never saw: keep or drop.
        repeats: Items that the user acted on before: drop or keep.
        against: Folder of another backtest on the same datasets, to compare with by one paired test over all of them.
        recipe: Recipe: a YAML file, or the name of a published one.
        force: Replace the runs in the folder.
        device: Device: auto, cpu, cuda or cuda:N.
        settings: Settings by name, such as {"dim": 64, "train.epochs": 3}.
        progress: A function that receives the events of each training, or False for no bar.
        tell: Receives a sentence on each dataset.
        **named: Settings of the model and of training as keywords.

    Raises:
        DataError: if the folder holds no prepared dataset, or `against` lacks the run of one.
        SettingsError: as `train` and `evaluate`.
    """
    from recspec.evaluation import compare_over

    results: dict[str, EvaluationResult] = {}
    datasets = _datasets(Path(data))
    others = {} if against is None else {each.path.name: Path(against) / each.path.name for each in datasets}
    if absent := [str(other) for other in others.values() if not other.is_dir()]:
        raise DataError(f"--against: no run {listed(absent)}; expected one a dataset, as another backtest writes them")
    for each in datasets:
        run = Path(out) / each.path.name
        given: dict[str, Any] = {
            "recipe": recipe,
            "force": force,
            "device": device,
            "settings": settings,
            "progress": progress,
        }
        train(model, each, run, **given, **named)
        results[each.path.name] = evaluate(
            run,
            each,
            split,
            protocol=protocol,
            k=k,
            cold=cold,
            repeats=repeats,
            against=others.get(each.path.name),
            device=device,
            progress=False if progress is False else None,
        )
        if tell is not None:
            tell(f"{each.path.name}: trained and measured")
    pairs = [
        (each.spec, found.report.model, other.model)
        for each, found in zip(datasets, results.values(), strict=True)
        for other in found.report.others.values()
    ]
    if others and len(pairs) < len(datasets):
        told = [f"{name}: {why}" for found in results.values() for name, why in found.report.not_alone.items()]
        raise DataError.of("--against: not comparable", told)
    return Backtest(model, results, against=str(against or ""), pooled=compare_over(pairs))


def _datasets(folder: Path) -> list[Data]:
    """The prepared datasets of a folder, in the order of the numbers in their names."""
    from recspec.feature_spec import FILE_NAME

    places = [each.parent for each in folder.glob(f"*/{FILE_NAME}") if not each.parent.name.startswith(".")]
    if not places:
        raise DataError(f"{folder}: holds no prepared dataset; expected folders such as {folder / 'window-1'}")
    parts = {place: re.split(r"(\d+)", place.name) for place in places}
    places.sort(key=lambda place: [(int(part), "") if part.isdecimal() else (-1, part) for part in parts[place]])
    return [open_data(place) for place in places]
