"""Everything that a run's folder says about itself, read once for all sections of a report; and users to show.

Shapes: U users of the model; S shown users.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import RecspecError, how_many
from recspec.base.files import PathError, confined, local, parse_json, special
from recspec.bundle import Card, DataRecord, RunRecord, data_digest, folder, meaning_digest, run_record
from recspec.data.storage import preparation
from recspec.evaluation import SavedEvaluation, read_events, read_rows, saved
from recspec.feature_spec import FOLD_IN, SIGNALS, FeatureSpec
from recspec.inference import Predictor, Recommendation, RecommendRequest
from recspec.report.dataset_figures import DatasetFigures, figures_of
from recspec.report.dataset_summary import RawNames, numbers_of, top_values
from recspec.report.page import plain

LOG = "log.jsonl"
MOST_LOG = 64 << 20  # bytes of a log that are read
MOST_ROWS_COUNTED = 50_000_000
"""Rows of a dataset whose users, items and times a run's report counts."""

LISTED = 10  # items of a list
HISTORY = 8  # events of a user that are shown
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Places of the shown users among all users in order of their number of events."""

KNOWN = ("train", FOLD_IN, "valid", SIGNALS[0])
"""Splits whose events a bundle knows."""

Raw = str | int


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
        """Whether an evaluation is on another dataset than the run was trained on, which may hold the answers."""
        own, here = self.record.data if self.record is not None else None, saved.data
        return own is not None and here.name not in ("journal", "events") and own.digest != here.digest

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
        return {} if self.data is None else preparation(self.data.folder)

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


# --- users to show ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A user, and what is known of them."""

    user: Raw
    events: str
    """How many there are, in words."""
    history: tuple[str, ...]
    """Items, the latest first, or the most popular first where their order is not known."""
    targets: frozenset[Raw]
    """Raw ids of the items that the held-out split holds."""
    held_out: tuple[tuple[str, bool], ...]
    """Titles of some of them, and whether the model knows the event already, so that it never recommends the item."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Gives users of a run with their histories and lists."""

    run: RunFacts
    split: str
    """The held-out split, whose items are marked as hits."""

    def typical(self) -> list[Raw]:
        """Five users, from few events to many."""
        lengths = self._lengths
        known = np.flatnonzero(lengths > 0)
        known = known[known >= self.run.predictor.users.first_id]
        if self._targets is not None:
            with_targets = known[np.isin(known, self._targets[0])]
            known = with_targets if len(with_targets) >= len(QUANTILES) else known
        order = known[np.argsort(lengths[known], kind="stable")]
        if not len(order):
            return []
        places = sorted({min(len(order) - 1, int(share * len(order))) for share in QUANTILES})
        return [*self._raw("user", order[places])]

    def of(self, users: Sequence[Raw]) -> list[Shown]:
        """What is known of some users."""
        ids = self.run.predictor.catalogues.user_ids(users)
        return [self._of(user, int(number)) for user, number in zip(users, ids, strict=True)]

    def recommended(self, users: Sequence[Raw]) -> list[Recommendation]:
        """The best items for some users as before the held-out split, whose items may be hits.

        Raises:
            RecspecError: if the model can't recommend, for example because it needs a context.
        """
        predictor = self.run.predictor
        found: list[Recommendation] = []
        for user, number in zip(users, predictor.catalogues.user_ids(users).tolist(), strict=True):
            seen = tuple(self._raw("item", self._seen_before(number)))
            asked = RecommendRequest(users=(user,), k=LISTED, context=self.context, include_seen=True, exclude=seen)
            found += predictor.recommend(asked)
        return found

    def _seen_before(self, number: int) -> NDArray[np.int64]:
        """Items that a user has seen, without those that the held-out split alone holds."""
        seen = self.run.predictor.recommender.seen
        if not 0 <= number < seen.num_users:
            return np.zeros(0, np.int64)
        new = np.setdiff1d(self._held(number), seen.known_of(number).numpy())
        return np.setdiff1d(seen.of(number).numpy(), new)

    @cached_property
    def context(self) -> dict[str, object]:
        """The most usual raw value of each feature that differs from request to request; empty if there is none."""
        asked, data = self.run.predictor.recommender.request_features.context_features, self.run.data
        if not asked or data is None or "train" not in data.splits:
            return {}
        names = RawNames(data)
        tops, numbers = top_values(data, "train", names, asked), numbers_of(data, "train", names)
        found: dict[str, object] = {name: numbers[name].quantiles[2] for name in asked if name in numbers}
        single = [name for name in asked if name in tops and not data.features[name].is_list and tops[name].values]
        found |= {name: tops[name].values[0][0] for name in single}
        return {name: found[name] for name in asked if name in found}

    @property
    def context_in_words(self) -> str:
        """The context of the lists in a sentence; empty without one."""
        told = ", ".join(f"{name} {plain(value, 40)}" for name, value in self.context.items())
        return f" The lists are made for the most usual context: {told}." if told else ""

    @property
    def has_order(self) -> bool:
        """Whether histories are in order of time."""
        return self._events is not None

    def _of(self, user: Raw, number: int) -> Shown:
        predictor = self.run.predictor
        if self._events is not None and 0 <= number < self._events.num_users:
            events = self._events
            items = events.items[events.offsets[number] : events.offsets[number + 1]].astype(np.int64)
            history = self._titled(items[::-1][:HISTORY])
        else:
            history = tuple(predictor.liked(user, k=HISTORY))
        held = self._held(number)
        seen = predictor.recommender.seen
        known = seen.known_of(number).numpy() if 0 <= number < len(self._lengths) else np.zeros(0, np.int64)
        length = int(self._lengths[number]) if 0 <= number < len(self._lengths) else 0
        titles = zip(self._titled(held), np.isin(held, known).tolist(), strict=True)
        return Shown(
            user, how_many(length, "event"), history, frozenset(self._raw("item", held)), tuple(titles)[:HISTORY]
        )

    def _held(self, number: int) -> NDArray[np.int64]:
        """Items of a user's held-out positives."""
        if self._targets is None:
            return np.zeros(0, np.int64)
        held: NDArray[np.int64] = self._targets[1][self._targets[0] == number]
        return held[held >= self.run.predictor.items.first_id]

    def _titled(self, items: NDArray[np.int64]) -> tuple[str, ...]:
        known = self.run.predictor.items
        kept = items[items >= known.first_id]
        titles = known.titles_of(kept).to_pylist()
        return tuple(str(title or raw) for title, raw in zip(titles, self._raw("item", kept), strict=True))

    def _raw(self, role: Any, ids: NDArray[np.int64]) -> list[Raw]:
        found: list[Raw] = self.run.predictor.raw_ids(role, ids).to_pylist()
        return found

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """(U,) items that each user acted on, as the model knows them."""
        found: NDArray[np.int64] = self.run.predictor.recommender.seen.num_known.numpy()
        return found

    @cached_property
    def _events(self) -> Any:
        """The events of every user before the held-out split, oldest first; None without the dataset."""
        data, figures = self.run.data, self.run.figures
        if data is None or figures is None:
            return None
        before = [split for split in KNOWN if split in data.splits]
        try:
            return read_events(data, before)
        except RecspecError:
            return None

    @cached_property
    def _targets(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Users and items of the held-out positives; None without the dataset, or if the model knows the split."""
        data = self.run.data
        if data is None or self.run.figures is None or self.split not in data.splits or self.split in KNOWN:
            return None
        try:
            rows = read_rows(data, self.split)
        except RecspecError:
            return None
        if rows.users is None or rows.items is None:
            return None
        return rows.users[rows.labels].astype(np.int64), rows.items[rows.labels].astype(np.int64)
