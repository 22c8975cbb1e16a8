"""Reading any rows of a split, whatever its chunks are made of, and writing one, a block at a time."""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from recspec.base.errors import DataError, SpecError, listed, nearest, unknown
from recspec.base.files import confined, local, locked, whole_folder
from recspec.data.storage.chunk_file import (
    BLOCK_ROWS,
    TOO_LARGE,
    ColumnPlan,
    FileReader,
    FileWriter,
    Findings,
    Report,
    check_lengths,
    checked,
    sentences,
)
from recspec.data.storage.formats import FORMATS
from recspec.data.storage.ragged import Column, Columns, concatenate, concatenate_column, rows_of
from recspec.feature_spec import FILE_NAME, Chunk, ChunkType, Feature, FeatureSpec

# --- reading ----------------------------------------------------------------------------------------------------------


def open_split(
    spec: FeatureSpec, split: str, features: Sequence[str] | None = None, *, shifted: bool = True
) -> SplitReader:
    """Open a split for reading some of its features, by default all; with `shifted=False`, ids stay as they are stored.

    Raises `SpecError` for an unknown split, and `DataError` for files that are missing or can't be read, chunks of
    unequal length, and no row at all.
    """
    held = spec.columns(split)
    problems = [unknown("feature", name, held) for name in features or () if name not in held]
    DataError.refuse(f"{spec.folder}, split '{split}'", problems)
    findings: Findings = {}
    chunks = open_chunks(spec, split, findings)
    problems = sentences(findings) or length_problems(split, chunks)
    DataError.refuse(str(spec.folder), problems)
    return SplitReader(spec, split, tuple(features if features is not None else held), chunks, shifted=shifted)


class SplitReader:
    """The rows of one split: its chunks joined side by side, each chunk's files one after another."""

    def __init__(
        self, spec: FeatureSpec, split: str, features: tuple[str, ...], chunks: Sequence[ChunkReader], *, shifted: bool
    ) -> None:
        self.spec, self.split, self.features = spec, split, features
        self.num_rows = chunks[0].num_rows
        self._chunks = [
            (chunk, [ColumnPlan.of_spec(spec, name, shifted=shifted) for name in held])
            for chunk in chunks
            if (held := [name for name in chunk.chunk.features if name in features])
        ]

    def read(self, start: int, stop: int) -> Columns:
        """Rows [start, stop) of every feature, as arrays of their own or `Ragged`. A `DataError` names bad values."""
        findings: Findings = {}
        start, stop = max(start, 0), min(stop, self.num_rows)
        columns: Columns = {}
        for chunk, plans in self._chunks:
            columns |= chunk.read(start, max(start, stop), plans, findings)
        if findings:
            problems = sentences(findings)
            raise DataError.of(str(self.spec.folder), [*published_records(self.spec, problems), *problems])
        return {name: columns[name] for name in self.features}

    def batches(self, rows: int = BLOCK_ROWS) -> Iterator[Columns]:
        """All rows in order, `rows` at a time."""
        for start in range(0, self.num_rows, rows):
            yield self.read(start, start + rows)

    def blocks(self, rows: int) -> NDArray[np.int64]:
        """Rows at which to cut the split into blocks of about `rows`: between row groups or CSV blocks, if any."""
        grouped = [chunk.group_ends for chunk, _ in self._chunks if len(chunk.group_ends)]
        if not grouped:
            return np.append(np.arange(0, self.num_rows, rows, dtype=np.int64), self.num_rows)
        cuts = [0]
        for end in max(grouped, key=lambda ends: ends[-1] / len(ends)).tolist():  # the largest groups
            if end - cuts[-1] >= rows or end == self.num_rows:
                cuts.append(end)
        return np.array(cuts, np.int64)

    @property
    def bytes_read(self) -> int:
        """Bytes of the split's files that reads have taken so far."""
        return sum(chunk.bytes_read for chunk, _ in self._chunks)

    @property
    def num_values(self) -> dict[str, int]:
        """Values each feature holds: the rows of a scalar; a list's stored count, or its maximum where unknown."""
        counts: dict[str, int] = {}
        for chunk, plans in self._chunks:
            for plan in plans:
                most = self.num_rows * (plan.feature.length or 1)
                stored = chunk.num_values(plan.name) if plan.feature.is_list else None
                counts[plan.name] = min(most, stored or most)
        return counts


def published_records(spec: FeatureSpec, problems: Sequence[str]) -> list[str]:
    """Advice for ids that are too large in SIM's published records, whose specification declares no padding."""
    if not spec.leaves_padding_unsaid or not any(TOO_LARGE in problem for problem in problems):
        return []
    told = (
        f"{listed(spec.leaves_padding_unsaid)} are histories without `padding`, and ids are too large; if these are "
        "SIM's published records, in which ids count from 1, 0 is padding and a cardinality is the largest id, "
        "`recspec prepare amazon FOLDER OUT` reads them; else give the largest id plus one as cardinality"
    )
    return [told]


class ChunkReader:
    """A chunk's files, one after another."""

    def __init__(self, chunk: Chunk, files: Sequence[FileReader]) -> None:
        self.chunk, self._files = chunk, files
        self._last: FileReader | None = None
        self._ends = np.cumsum([file.num_rows for file in files], dtype=np.int64).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        ends = [file.group_ends + end - file.num_rows for file, end in zip(files, self._ends, strict=True)]
        self.group_ends: NDArray[np.int64] = np.concatenate(ends) if ends else np.zeros(0, np.int64)

    def read(self, start: int, stop: int, plans: Sequence[ColumnPlan], findings: Findings) -> Columns:
        """Rows [start, stop) of some columns; what is wrong with them is added to the findings."""
        parts: list[Columns] = []
        for number in range(bisect_right(self._ends, start), len(self._files)):
            first = self._ends[number] - self._files[number].num_rows
            if first >= stop and parts:
                break
            a, b = max(start, first) - first, min(stop, self._ends[number]) - first
            report = Report(findings, self.chunk.files[number])
            if self._last is not None and self._last is not self._files[number]:
                self._last.forget()  # else memory would hold a group of every file that was read
            self._last = self._files[number]
            try:
                raw = self._files[number].read(a, max(a, b), plans, report)
                check_lengths(raw, max(0, b - a))
            except DataError as error:
                report.add("damage", str(error))
                parts.append({plan.name: plan.zeros(max(0, b - a)) for plan in plans})
                continue
            parts.append({plan.name: checked(raw[plan.name], plan, report.of(plan.name, a)) for plan in plans})
        return concatenate(parts) if parts else {plan.name: plan.zeros(0) for plan in plans}

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that reads have taken so far."""
        return sum(file.bytes_read for file in self._files)

    def num_values(self, name: str) -> int | None:
        """How many values a column's lists hold, where every file says it without being read."""
        counts = [file.num_values(name) for file in self._files]
        return None if None in counts else sum(count or 0 for count in counts)

    def describe_length(self) -> str:
        """`60 + 40 = 100 rows of 'a', 'b' in 'x.csv', 'y.csv'`."""
        counts = [file.num_rows for file in self._files]
        total = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        return f"{total} rows of {listed(self.chunk.features)} in {listed(self.chunk.files)}"


def open_chunks(spec: FeatureSpec, split: str, findings: Findings) -> list[ChunkReader]:
    """The chunks of a split; files that can't be opened are added to the findings."""
    chunks = []
    for chunk in spec.sources[split]:
        plans = [ColumnPlan.of_spec(spec, name, shifted=False) for name in chunk.features]
        files: list[FileReader] = []
        for name in chunk.files:
            try:
                path = spec.path(name)
                _check_is_there(path)
                files.append(FORMATS[chunk.type].reader(path, plans))
            except (DataError, SpecError) as error:
                Report(findings, name).add("file", str(error))
        chunks.append(ChunkReader(chunk, files if len(files) == len(chunk.files) else []))
    return chunks


def _check_is_there(path: Path) -> None:
    if path.is_file():
        return
    if path.exists():
        raise DataError("is a folder; expected a file")
    if not path.parent.is_dir():
        raise DataError(f"no such file: the folder {path.parent} does not exist")
    raise DataError(f"no such file{nearest(path.name, [found.name for found in path.parent.iterdir()])}")


def length_problems(split: str, chunks: Sequence[ChunkReader]) -> list[str]:
    """What is wrong with the numbers of rows: unequal, or none."""
    if len({chunk.num_rows for chunk in chunks}) > 1:
        shown = "; ".join(chunk.describe_length() for chunk in chunks)
        return [f"split '{split}': its chunks must hold the same number of rows; found {shown}"]
    if chunks[0].num_rows == 0:
        files = listed(file for chunk in chunks for file in chunk.chunk.files)
        return [f"split '{split}' holds no row (files {files}); fill it, or leave it out of source_spec"]
    return []


# --- writing ----------------------------------------------------------------------------------------------------------


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
        DataError.refuse(f"{self.folder}, split '{self.split}' being written", problems)
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
    DataError.refuse("feature_spec", problems)
