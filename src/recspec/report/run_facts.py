"""Everything that a run's folder says about itself, read once for all sections of a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recspec.base.errors import RecspecError
from recspec.base.files import PathError, confined, local, parse_json, read_json, special
from recspec.bundle import Card, DataRecord, RunRecord, data_digest, folder, meaning_digest, run_record
from recspec.data.storage import PREPARE_FILE
from recspec.evaluation import SavedEvaluation, saved
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.report.dataset_figures import DatasetFigures, figures_of

LOG = "log.jsonl"
MOST_LOG = 64 << 20  # bytes of a log that are read
MOST_ROWS_COUNTED = 50_000_000
"""Rows of a dataset whose users, items and times a run's report counts."""


@dataclass(frozen=True, eq=False)
class RunFacts:
    """A run, or a bundle without one."""

    path: Path
    """As the user named it."""
    name: str
    """Short, and different from the names of the other runs of a report."""
    bundle: Path
    card: Card
    spec: FeatureSpec
    record: RunRecord | None
    events: tuple[Mapping[str, Any], ...]
    """The lines of log.jsonl."""
    evaluations: tuple[SavedEvaluation, ...]
    """The newest first."""
    data: FeatureSpec | None
    """The dataset that the model was trained on, if it is still there."""
    problems: tuple[str, ...] = ()
    """What could not be read, a sentence each."""

    def of(self, event: str) -> Iterator[Mapping[str, Any]]:
        """The log's lines of an event."""
        return (each for each in self.events if each.get("event") == event)

    @property
    def start(self) -> Mapping[str, Any]:
        """The plan, as the last start logged it; empty without a log."""
        return next(iter([*self.of("start")][-1:]), {})

    @property
    def done(self) -> Mapping[str, Any]:
        """The end, as it was logged; empty without one."""
        return next(iter([*self.of("done")][-1:]), {})

    @property
    def data_record(self) -> DataRecord | None:
        """Path and digest of the dataset, as the run or its newest evaluation noted them."""
        if self.record is not None and self.record.data is not None:
            return self.record.data
        return self.evaluations[0].data if self.evaluations else None

    def was_trained_elsewhere(self, saved: SavedEvaluation) -> bool:
        """Whether an evaluation is on other data than the run was trained on, which may hold the answers."""
        own = self.record.data if self.record is not None else None
        return own is not None and own.digest != saved.data.digest

    @property
    def data_path(self) -> str:
        """The dataset's folder, for a command; `DATA` if it is not known."""
        found = self.data_record
        return "DATA" if found is None else found.path

    @property
    def has_users(self) -> bool:
        """Whether the model ranks items for users."""
        return all(self.spec.role(role) for role in ("user", "item")) and (self.bundle / "seen.safetensors").exists()

    @cached_property
    def figures(self) -> DatasetFigures | None:
        """Counts of the dataset; None if it is not there, or too large."""
        if self.data is None:
            return None
        try:
            found = self.preparation.get("summary")
            rows = found.get("rows") if isinstance(found, dict) else None
            if isinstance(rows, dict) and sum(n for n in rows.values() if isinstance(n, int)) > MOST_ROWS_COUNTED:
                return None
            return figures_of(self.data)
        except RecspecError:
            return None

    @cached_property
    def preparation(self) -> Mapping[str, Any]:
        """What `prepare.json` says; empty without the dataset."""
        if self.data is None:
            return {}
        try:
            found = read_json(confined(self.data.folder, PREPARE_FILE))
        except RecspecError:
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def predictor(self) -> Predictor:
        """The model, ready to answer."""
        return Predictor.open(self.bundle, device="cpu")

    @property
    def size(self) -> int:
        """Bytes of the bundle."""
        return sum(file.stat().st_size for file in self.bundle.rglob("*") if file.is_file())


def read_runs(paths: Sequence[Path], data: Path | None = None) -> list[RunFacts]:
    """Read the folders of some runs.

    Raises:
        BundleError: if one holds no trained model, or a damaged one.
        SpecError: if the dataset that the user named can't be read.
    """
    named = None if data is None else FeatureSpec.load(local(data, "the dataset"))
    return [_read(path, name, named) for path, name in zip(paths, _short_names(paths), strict=True)]


def _read(path: Path, name: str, data: FeatureSpec | None) -> RunFacts:
    problems: list[str] = []
    bundle = folder.find(local(path, "RUN"))
    card, spec = folder.read_card(bundle), FeatureSpec.load(bundle)
    home, record = run_record.home(bundle), None
    try:
        record = run_record.read(home)
    except RecspecError as error:
        problems.append(str(error))
    evaluations = saved(path, problems)
    found = RunFacts(path, name, bundle, card, spec, record, (), evaluations, None)
    if data is None:
        data, why_not = _dataset(found.data_record)
        problems += [why_not] if why_not else []
    elif not _is_of(data, spec):
        problems.append(f"{data.folder} is not the dataset that {name} was trained on, so nothing is taken from it")
        data = None
    events, unread = _log(home)
    problems += unread
    return RunFacts(path, name, bundle, card, spec, record, events, evaluations, data, tuple(problems))


def _dataset(record: DataRecord | None) -> tuple[FeatureSpec | None, str]:
    """The dataset that a run was trained on, if it lies where it was and has not changed; or why not."""
    if record is None:
        return None, "The run does not say where its dataset lies; name it with --data."
    try:
        found = FeatureSpec.load(record.path)
        if data_digest(found) == record.digest:
            return found, ""
        return None, f"The dataset in {record.path} has changed since, so nothing is taken from it."
    except (RecspecError, OSError, ValueError):  # a record may hold any text for a path
        return None, f"The dataset is no longer in {record.path}; name its folder with --data."


def _is_of(data: FeatureSpec, spec: FeatureSpec) -> bool:
    try:
        return meaning_digest(data) == meaning_digest(spec)
    except (RecspecError, OSError):
        return False


def _log(home: Path) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """The lines of a run's log, and what is wrong with it."""
    file = home / LOG
    if not file.exists():
        return (), []
    try:
        confined(home, LOG)
        if problem := special(file):
            raise PathError(f"{file}: {problem}")
        with file.open("rb") as stream:
            text = stream.read(MOST_LOG + 1)
    except (PathError, OSError) as error:
        return (), [f"{file}: can't be read: {error}"]
    problems = [f"{file}: holds more than {MOST_LOG:,} bytes; the rest is left out"] if len(text) > MOST_LOG else []
    events, damaged = [], 0
    for line in text[:MOST_LOG].decode("utf-8", "replace").splitlines():
        try:
            found = parse_json(line) if line.strip() else None
        except (ValueError, json.JSONDecodeError):
            found = None
        if isinstance(found, dict):
            events.append(found)
        elif line.strip():
            damaged += 1
    problems += [f"{file}: {damaged:,} lines are damaged and left out"] if damaged else []
    return tuple(events), problems


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    whole = [path.resolve() for path in paths]
    whole = [path.parent if path.name == "bundle" else path for path in whole]
    for count in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-count:]) for path in whole]
        if len(set(names)) == len(set(whole)):
            break
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name} ({place})" if name in twice else name for place, name in enumerate(names, 1)]
