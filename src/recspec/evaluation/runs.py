"""The runs under a folder: what each one is of, what it reached, when it was made and how large it is.

Nothing is opened but small JSON files, links are not followed, and the search ends at limits that it names.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from recspec.base.errors import DataError, RecspecError, SettingsError, of_the_machine, shortened, unknown
from recspec.bundle import Card, RunRecord, run_record, versions
from recspec.bundle import folder as bundle
from recspec.evaluation.report import is_lower_better
from recspec.evaluation.saved import SavedEvaluation, real, saved

DEPTH = 6
"""Folders below the given one that are looked into."""
MOST_IN_FOLDER, MOST_IN_ALL = 20_000, 500_000
"""Entries of one folder, and of all, that are looked at."""
MOST_RUNS = 2_000
MOST_PARTS = 6
"""Of a dataset's path, in its name."""
MOST_TOLD = 20
"""Folders that can't be read, and so on, that are named; of others only the number."""

FIELDS = ("time", "seconds", "size", "model", "data", "run")
"""What runs are sorted by beside metrics; the newest comes first, and otherwise the smallest."""

CHOICES = {"known": "before", "cold": "keep", "repeats": "drop", "users": None}
"""Choices of a protocol that change what a metric means, and their defaults."""

Values = dict[str, dict[str, float]]


@dataclass(frozen=True)
class FoundRun:
    """A run and what is known of it."""

    path: str
    model: str = ""
    kind: str = ""
    data: str = ""
    """The kind of its dataset, as `table`."""
    data_shown: str = ""
    """The dataset's folder and kind, as `shop/data (table)`: as much of the path as tells it from others."""
    data_path: str = ""
    data_digest: str = ""
    metric: str = ""
    """PROTOCOL/METRIC that chose it on valid; otherwise that of most other runs, or the first one that was measured."""
    values: Values = field(default_factory=dict)
    """Split -> PROTOCOL/METRIC -> value, on the dataset that it was trained on."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Split -> the choices of the protocol that are not the defaults, as `cold drop`."""
    time: str = ""
    seconds: float | None = None
    size: int | None = None
    """Bytes of the bundle."""
    updates: int = 0
    """How often `recspec update` took new events into it; the newest update answers."""
    problem: str = ""
    """Why something is not known."""

    def value(self, split: str, metric: str = "") -> float | None:
        """A metric on a split, by default its own."""
        return self.values.get(split, {}).get(metric or self.metric)

    @property
    def made(self) -> str:
        """When it was made, to the minute, in UTC."""
        return self.time.replace("T", " ").partition("+")[0][:16]

    @property
    def megabytes(self) -> float | None:
        """The size of the bundle."""
        return None if self.size is None else round(self.size / 1e6, 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RunList:
    """The runs under a folder, in the order that was asked for, and why others may be missing."""

    folder: str
    runs: tuple[FoundRun, ...]
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"folder": self.folder, "runs": [each.to_dict() for each in self.runs], "problems": list(self.problems)}


def find_runs(folder: Path, *, sort: str = "time", split: str = "test", depth: int = DEPTH) -> RunList:
    """Find the runs and bundles under a folder, itself included.

    Args:
        folder: where to look.
        sort: `time` (the newest first), `seconds`, `size`, `model`, `data`, `run`, or PROTOCOL/METRIC (the best first).
        split: the split of that metric.
        depth: how many folders deep to look.

    Raises:
        DataError: if the folder is not there.
        SettingsError: for a metric that no run has on the split.
    """
    if not folder.is_dir():
        raise DataError(
            f"{shown(folder)}: {'not a folder' if folder.exists() else 'no such folder'}; name one that holds runs"
        )
    search = _Search(depth)
    runs = _with_one_metric(_with_data_shown([describe(path) for path in search.run(folder)]))
    return RunList(shown(folder), tuple(_sorted(runs, sort, split)), tuple(search.told()))


def describe(path: Path) -> FoundRun:
    """What is known of the run or bundle in a folder."""
    problems: list[str] = []
    inner = path / "bundle"
    of = inner if (inner / "bundle.json").is_file() else path
    has_bundle = (of / "bundle.json").is_file()
    card: Card | None = _tried(lambda: bundle.read_card(of), problems) if has_bundle else None
    record: RunRecord | None = _tried(lambda: run_record.read(path), problems)
    if not has_bundle:
        problems.append("unfinished: it holds no bundle")
    evaluations = [each for each in saved(path, problems) if each.is_current] if has_bundle else []
    known: dict[str, Any] = {}
    if record is not None:
        known |= {"model": brief(record.model), "kind": record.kind, "time": brief(record.started)}
        if (data := record.data) is not None:
            evaluations = [each for each in evaluations if each.data.digest == data.digest]
            known |= {"data": brief(data.name), "data_path": shown(data.path), "data_digest": brief(data.digest)}
    taken: object = record.seconds if record is not None else None
    if card is not None:
        known |= {"model": brief(card.model), "metric": brief(str(card.trained.get("valid_metric") or ""))}
        taken = card.trained.get("seconds") if taken is None else taken
    values, choices = _values(card, evaluations)
    return FoundRun(
        shown(path),
        **known,
        values=values,
        choices=choices,
        seconds=seconds if (seconds := real(taken)) is not None and seconds >= 0 else None,
        size=_size(of) if has_bundle else None,
        updates=len(versions.updates_of(path)),
        problem="; ".join(brief(each) for each in problems),
    )


def shown(text: object) -> str:
    """A text from a file or a file's name for a line: characters that can't be printed are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def brief(text: object) -> str:
    """A text from a file for a cell of a table: `shown`, and cut if it is long."""
    return shortened(shown(text))


class _Search:
    """A search for the folders of runs, within limits."""

    def __init__(self, depth: int) -> None:
        self.depth, self.entries, self.found = depth, 0, 0
        self.problems: list[str] = []
        self.links: list[Path] = []
        self.deep: list[Path] = []

    def run(self, folder: Path) -> Iterator[Path]:
        """The folders of runs, in order of their paths."""
        waiting = [(folder, 0)]
        while waiting:
            path, level = waiting.pop()
            try:
                if level and _is_second_training(path):
                    continue
                if _is_run(path):
                    self.found += 1
                    if self.found > MOST_RUNS:
                        self.problems.append(f"there are more than {MOST_RUNS:,} runs; name a folder inside")
                        return
                    yield path
                    continue
                if (path / "feature_spec.yaml").is_file():  # a prepared dataset
                    continue
                inside = self._folders(path)
            except OSError as error:
                self.problems.append(f"{shown(path)}: {error.strerror or error}")
                continue
            if self.entries > MOST_IN_ALL:
                self.problems.append(f"more than {MOST_IN_ALL:,} files were met; name a folder inside")
                return
            if inside and level >= self.depth:
                self.deep.append(path)
                continue
            waiting += [(each, level + 1) for each in reversed(inside)]

    def told(self) -> list[str]:
        """A sentence for each reason that runs may be missing; of many alike the first and their number."""
        told = self.problems[:MOST_TOLD]
        if len(self.problems) > MOST_TOLD:
            told.append(f"{len(self.problems) - MOST_TOLD:,} more folders can't be read")
        if self.links:
            told.append(f"{_first(self.links)} links to folders, which are not followed")
        if self.deep:
            told.append(f"{_first(self.deep)} what is in them is too deep and was not looked at; see --depth")
        return told

    def _folders(self, path: Path) -> list[Path]:
        """The folders in a folder, by name; links are reported and not followed."""
        inside = []
        with os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                self.entries += 1
                if number >= MOST_IN_FOLDER:
                    told = f"{shown(path)}: holds more than {MOST_IN_FOLDER:,} entries; the others were not looked at"
                    self.problems.append(told)
                    break
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    if Path(entry.path).is_dir():
                        self.links.append(Path(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    inside.append(path / entry.name)
        return sorted(inside)


def _first(paths: list[Path]) -> str:
    return f"{shown(paths[0])}{f' and {len(paths) - 1:,} more' if len(paths) > 1 else ''}:"


def _is_run(path: Path) -> bool:
    """Whether a folder is a run, or a bundle without one."""
    signs = (run_record.FILE_NAME, "bundle.json", "bundle/bundle.json", "checkpoints")
    return any((path / name).exists() for name in signs)


def _is_second_training(path: Path) -> bool:
    """Whether a folder holds what a finished search trained again for its `best`, which is listed itself."""
    name, search = path.name.removesuffix("-again"), path.parent.parent
    is_of_search = path.parent.name == "runs" and (search / "leaderboard.json").is_file()
    return name != path.name and is_of_search and _is_run(path.parent / name) and _is_run(search / "best")


def _with_data_shown(runs: list[FoundRun]) -> list[FoundRun]:
    """The runs with names of their datasets that tell different ones apart."""
    digests: dict[str, set[str]] = {}
    for each in runs:
        if each.data_path:
            digests.setdefault(each.data_path, set()).add(each.data_digest)
    parts = {path: Path(path).parts[-MOST_PARTS:] for path in digests}
    ends = Counter(own[-count:] for own in parts.values() for count in range(1, len(own) + 1))
    named = {}
    for path, own in parts.items():
        count = next((count for count in range(1, len(own)) if ends[own[-count:]] == 1), len(own))
        named[path] = str(Path(*own[-count:]))

    def told(run: FoundRun) -> str:
        folder = named.get(run.data_path, run.data)
        state = run.data_digest[:6] if len(digests.get(run.data_path, ())) > 1 else ""  # prepared again in between
        about = ", ".join(each for each in (run.data, state) if each and each != folder)
        return brief(f"{folder} ({about})" if about else folder)

    return [replace(each, data_shown=told(each)) for each in runs]


def _with_one_metric(runs: list[FoundRun]) -> list[FoundRun]:
    """The runs; one that was not chosen by a metric has that of most others if it was measured, else its first one."""
    usual = next((name for name, _ in Counter(each.metric for each in runs if each.metric).most_common(1)), "")

    def of(run: FoundRun) -> str:
        measured = list(dict.fromkeys(name for named in run.values.values() for name in named))
        return run.metric or (usual if usual in measured else next(iter(measured), ""))

    return [replace(each, metric=of(each)) for each in runs]


def _values(card: Card | None, found: list[SavedEvaluation]) -> tuple[Values, dict[str, str]]:
    """Metrics by split: of each evaluation that was kept, and of valid as training measured it.

    Of several evaluations of a split, those with the protocol's default choices count before others, and the newest.
    """
    values: Values = {}
    choices: dict[str, str] = {}
    for each in sorted(found, key=_unusual):
        told = ", ".join(f"{name} {brief(each.settings.get(name))}" for name in _unusual(each))
        split = brief(each.split)
        if not values.get(split) or choices.get(split, "") == told:
            choices[split] = told
            _add(values, split, each.metrics)
    if card is not None:
        _add(values, "valid", card.metrics)
    measured = {split: own for split, own in values.items() if own}
    return measured, {split: told for split, told in choices.items() if told}


def _unusual(found: SavedEvaluation) -> list[str]:
    """The choices of an evaluation that are not the defaults."""
    return [name for name, default in CHOICES.items() if found.settings.get(name, default) != default]


def _add(values: Values, split: str, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Add the finite ones of some metrics that the split does not have yet."""
    own = values.setdefault(split, {})
    for protocol, named in metrics.items():
        for name, value in named.items():
            if math.isfinite(value):
                own.setdefault(brief(f"{protocol}/{name}"), value)


def _sorted(runs: list[FoundRun], sort: str, split: str) -> list[FoundRun]:
    """Runs in order; those without a value come last."""
    runs = sorted(runs, key=lambda each: each.path)
    if sort in FIELDS:
        largest_first = sort == "time"
    else:
        known = dict.fromkeys(name for each in runs for name in each.values.get(split, {}))
        if runs and sort not in known:
            raise SettingsError(f"--sort: {unknown('metric', sort, known)} on {split}, and {', '.join(FIELDS)}")
        largest_first = not is_lower_better(sort)

    def key(run: FoundRun) -> Any:
        field = {"run": "path", "data": "data_shown"}.get(sort, sort)
        return getattr(run, field) if sort in FIELDS else run.value(split, sort)

    has = [each for each in runs if key(each) not in (None, "")]
    return sorted(has, key=key, reverse=largest_first) + [each for each in runs if key(each) in (None, "")]


def _size(folder: Path) -> int | None:
    """Bytes of a bundle's files; None if they can't be counted within limits."""
    total, waiting, seen = 0, [folder], 0
    try:
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MOST_IN_FOLDER:
                        return None
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    except OSError:
        return None
    return total


def _tried(read: Callable[[], Any], problems: list[str]) -> Any:
    """What is read; None with the reason in `problems` if it can't be."""
    try:
        return read()
    except (RecspecError, OSError) as error:
        problems.append(of_the_machine(error) or str(error).replace("\n  - ", " "))
        return None
