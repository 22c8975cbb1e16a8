"""Writing the splits of a prepared dataset, a block at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from recspec.base.errors import DataError, unknown
from recspec.base.files import confined, local, locked, whole_folder
from recspec.data.storage.chunk_file import BLOCK_ROWS, ColumnPlan, FileWriter, Findings, Report, checked, sentences
from recspec.data.storage.formats import FORMATS
from recspec.data.storage.ragged import Column, Columns, concatenate_column, rows_of
from recspec.feature_spec import FILE_NAME, Chunk, ChunkType, Feature, FeatureSpec


@contextmanager
def new_dataset(out: str | Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block succeeds. Raises `DataError` if `out` holds something or is in use."""
    folder = local(out, "OUT")
    with locked(folder, "writing"):
        if (folder / FILE_NAME).exists():
            raise DataError(f"{folder}: holds a dataset already; name an empty folder, or remove that one first")
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(f"{folder}: already exists and is not an empty folder; choose another place")
        with whole_folder(folder) as temporary:
            yield temporary


def write_dataset(
    spec: FeatureSpec,
    folder: Path,
    type: ChunkType,
    splits: Mapping[str, tuple[Sequence[str], Iterable[Columns]]],
    num_rows: int,
    *,
    rows_per_file: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSpec:
    """Write some features of each split, block by block, and the specification with the new files."""
    done = 0
    sources: dict[str, tuple[Chunk, ...]] = {}
    for split, (names, blocks) in splits.items():
        features = {name: spec.features[name] for name in names}
        with SplitWriter(folder, split, features, type, rows_per_file=rows_per_file, label=spec.label) as writer:
            for columns in blocks:
                writer.write(columns)
                if progress is not None:
                    progress(done + writer.num_rows, num_rows)
        done += writer.num_rows
        sources[split] = writer.chunks
    written = spec.replace(sources=sources, folder=folder, allow_outside=False)
    written.save(folder)
    return written


class SplitWriter:
    """Writes one split as chunks of one type; `chunks` then describes them.

    Columns pass the same checks as when they are read, so what is written can be read back. Files get their names when
    the writer closes; after an exception nothing remains.

    `parquet`, `csv` and `tfrecord` hold all features in one chunk. `split_binary` gives each categorical feature a
    file and `torch_tensor` each dtype of ids; both put numbers of one dtype into one file, and `label` into its own.
    Both store a list as `length` values, filled with its padding: 0 where it is declared, else -1.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        features: Mapping[str, Feature],
        type: ChunkType = "parquet",
        *,
        rows_per_file: int | None = None,
        label: str | None = None,
    ) -> None:
        if type not in FORMATS:
            raise DataError(unknown("chunk type", type, FORMATS))
        self.folder, self.split = Path(folder), split
        self.type: ChunkType = type
        self.num_rows = 0
        self.chunks: tuple[Chunk, ...] = ()
        self._plans = {name: ColumnPlan.of(name, feature, is_label=name == label) for name, feature in features.items()}
        _check_can_hold(self._plans.values(), type)
        self._rows_per_file = rows_per_file or (64 * BLOCK_ROWS if type == "parquet" else None)
        self._groups = list(_grouped(self._plans, type, label))
        self._waiting: list[Columns] = []
        self._num_waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def write(self, columns: Mapping[str, Column]) -> None:
        """Add rows: arrays, and for lists `Ragged` or (rows, length). Raises `DataError` for what does not fit."""
        num_rows = self._check_columns(columns)
        findings: Findings = {}
        report = Report(findings, f"split '{self.split}' being written")
        rows = {
            name: checked(columns[name], plan, report.of(name, self.num_rows)) for name, plan in self._plans.items()
        }
        if findings:
            raise DataError.of(str(self.folder), sentences(findings))
        self.num_rows += num_rows
        self._waiting.append(rows)
        self._num_waiting += num_rows
        self._flush(BLOCK_ROWS)

    def close(self) -> None:
        """Write what is waiting, and give the files their names."""
        try:
            self._flush(1)
            for group in self._groups:
                if not group.outputs:
                    self._open(group)
            outputs = [output for group in self._groups for output in group.outputs]
            for output in outputs:
                output.close()
        except BaseException:
            self._discard()
            raise
        for output in outputs:
            output.temporary.replace(output.path)
        for group in self._groups:
            files = tuple(f"{self.split}/{output.path.name}" for output in group.outputs)
            self.chunks += (Chunk(type=self.type, features=group.features, files=files),)

    def _check_columns(self, columns: Mapping[str, Column]) -> int:
        counts = {name: len(column) for name, column in columns.items()}
        problems = [f"column '{name}' is missing" for name in self._plans if name not in counts]
        problems += [unknown("feature", name, self._plans) for name in counts if name not in self._plans]
        if len(set(counts.values())) > 1:
            problems.append(f"columns must hold the same number of rows; found {counts}")
        if problems:
            raise DataError.of(f"{self.folder}, split '{self.split}' being written", problems)
        return next(iter(counts.values()), 0)

    def _flush(self, least: int) -> None:
        """Write blocks of `BLOCK_ROWS` rows while at least `least` rows wait."""
        if self._num_waiting < least:
            return
        parts, self._waiting = self._waiting, []  # each part is freed as it is joined
        waiting = {name: concatenate_column([part.pop(name) for part in parts]) for name in self._plans}
        start, end = 0, self._num_waiting
        while self._num_waiting >= least:
            rows = min(BLOCK_ROWS, self._num_waiting)
            if self._rows_per_file is not None:
                written = self.num_rows - self._num_waiting
                rows = min(rows, self._rows_per_file - written % self._rows_per_file)
            for group in self._groups:
                if not group.outputs or group.outputs[-1].num_rows == self._rows_per_file:
                    self._open(group)
                group.outputs[-1].write(rows_of({name: waiting[name] for name in group.features}, start, start + rows))
            start += rows
            self._num_waiting -= rows
        if start < end:  # copied, so that the rows outside the views can be freed
            self._waiting = [copy.deepcopy(rows_of(waiting, start, end))]

    def _open(self, group: _Group) -> None:
        if group.outputs:
            group.outputs[-1].close()
        number = len(group.outputs)
        stem = f"{group.stem}-{number:05d}" if group.numbered or number else group.stem
        path = confined(self.folder, f"{self.split}/{stem}{FORMATS[self.type].suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        group.outputs.append(FORMATS[self.type].writer(path, [self._plans[name] for name in group.features]))

    def _discard(self) -> None:
        for group in self._groups:
            for output in group.outputs:
                output.discard()


@dataclass
class _Group:
    """Features that share files; `numbered` when the first file has a number too."""

    stem: str
    features: tuple[str, ...]
    numbered: bool
    outputs: list[FileWriter] = field(default_factory=list)


def _grouped(plans: Mapping[str, ColumnPlan], kind: ChunkType, label: str | None) -> Iterator[_Group]:
    if not FORMATS[kind].fixed_length:
        yield _Group("part", tuple(plans), numbered=True)
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for name, plan in plans.items():
        key = ("number", str(plan.dtype))
        if name == label:
            key = ("label", "")
        elif plan.feature.is_categorical:
            key = ("id", name if kind == "split_binary" else str(plan.dtype))
        groups.setdefault(key, []).append(name)
    several = sum(role == "number" for role, _ in groups) > 1
    taken: set[str] = set()
    for number, ((role, dtype), names) in enumerate(groups.items()):
        stem = names[0] if role != "number" else f"numerical_{dtype}" if several else "numerical"
        stem = f"data_{number}" if kind == "torch_tensor" else _safe(stem, taken)
        yield _Group(stem, tuple(names), numbered=False)


def _safe(stem: str, taken: set[str]) -> str:
    """The stem of a file for any feature name; published names may already end in `.bin`."""
    safe = re.sub(r"[^\w.-]", "_", stem.removesuffix(".bin")) or "_"
    while safe.lower() in taken:
        safe += "_"
    taken.add(safe.lower())
    return safe


def _check_can_hold(plans: Iterable[ColumnPlan], kind: ChunkType) -> None:
    problems = []
    for plan in plans:
        needs_minus_one = plan.feature.is_list and plan.feature.is_categorical and plan.feature.padding is None
        if FORMATS[kind].fixed_length and needs_minus_one and plan.dtype.kind != "i":
            needs = f"needs -1 as padding in {kind}, which {plan.dtype} can't hold"
            problems.append(f"the list '{plan.name}' {needs}; give it a signed dtype, or declare `padding: 0`")
        if kind == "tfrecord" and plan.dtype.name == "float64":
            problems.append(f"'{plan.name}' is float64, but tfrecord holds float32 only; give it that dtype")
    if problems:
        raise DataError.of("feature_spec", problems)
