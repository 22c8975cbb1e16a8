"""Evaluations that are kept with the model, so that runs can be compared later without evaluating again.

    RUN/evaluations/NAME.json       what was asked of which model and data, and the report
    RUN/evaluations/NAME.parquet    the values of each group, user or row, with their raw ids

NAME is the split and a digest of what was asked. Asking the same again replaces it. A bundle without a run keeps them
in its own folder, outside its manifest. `docs/training.md` describes both files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from recspec import __version__
from recspec.base.errors import BundleError, DataError, RecspecError, of_the_machine, unknown
from recspec.base.files import PathError, confine, confined, manifest, whole_file, write_whole
from recspec.bundle import Bundle, DataRecord, cards, meaning_digest, run_record
from recspec.data.encoding import Vocabulary, VocabularyEncoder, read_encoders
from recspec.evaluation.report import Evaluation, Report
from recspec.feature_spec import FeatureSpec

FOLDER = "evaluations"
FORMAT = 1

MOST_SAVED = 1 << 20
"""Groups or rows of a protocol whose values are kept; of more, every second, third and so on. At most 4 MB a metric."""
MOST_READ = 1_000
"""Evaluations of a run that are read: the newest."""
MOST_LISTED = 50_000
"""Files among which the newest are looked for."""
MOST_BYTES = 16 << 20
"""Of a JSON file."""
MOST_ROWS = 8 * MOST_SAVED
"""Of a Parquet file that is read."""

PROTOCOL, ID, ROW, EVENTS = "protocol", "id", "row", "events"
"""Columns of the Parquet file beside the metrics."""


class SavedGroups(BaseModel):
    """What the Parquet file holds of a protocol."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    feature: str
    """The feature whose ids stand in the column `id`: of the user, or of the group; empty if there are none."""
    raw: bool
    """Whether these are raw ids; otherwise prepared ones, of a feature without a vocabulary."""
    saved: int
    """Rows in the file: groups, users, or rows of the split."""
    of: int
    """Rows that the report is about; more than `saved` if only every second, third and so on is kept."""
    metrics: tuple[str, ...]
    """Columns of the model."""
    baselines: dict[str, tuple[str, ...]] = {}
    """Metrics of each baseline, whose columns are called `BASELINE/METRIC`."""


class SavedModel(BaseModel):
    """The bundle that was evaluated."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    bundle: str
    """Its folder, absolute."""
    digest: str
    """That of its manifest, as `recspec verify` prints it; empty if it has none."""


class SavedEvaluation(BaseModel):
    """The content of an evaluation's JSON file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = FORMAT
    recspec: str = __version__
    time: str
    """UTC, ISO 8601."""
    seconds: float | None = None
    device: str = "cpu"
    model: SavedModel
    data: DataRecord
    split: str
    protocols: tuple[str, ...] | None = None
    """Those that were asked for; None: every protocol that fits the data."""
    settings: dict[str, Any] = {}
    """`EvaluateSettings`, complete."""
    baselines: bool = False
    against: tuple[str, ...] = ()
    report: dict[str, Any]
    """`Report.to_dict()`."""
    groups: dict[str, SavedGroups] = {}
    """By protocol."""
    values: str = ""
    """SHA-256 of the Parquet file; empty if there is none."""
    file: Path = Field(Path(), exclude=True)
    """Where it was read."""
    is_current: bool = Field(True, exclude=True)
    """Whether it is of the bundle that lies there now."""

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.file.stem

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics of the model by protocol; those that are not numbers are left out."""
        return _numbers(self.report.get("metrics"))

    @property
    def baseline_metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """Baseline -> protocol -> metric -> value."""
        found = self.report.get("baselines")
        return {str(name): _numbers(of) for name, of in found.items()} if isinstance(found, dict) else {}

    def table(self, protocol: str) -> pa.Table:
        """The values of a protocol: the columns `id`, `row` or `events` where there are any, and the metrics.

        Raises:
            BundleError: if the file is gone, damaged, or not the one that was written with this evaluation.
            DataError: for a protocol that it does not hold.
        """
        if protocol not in self.groups:
            raise DataError(f"{self.file}: {unknown('protocol', protocol, self.groups)}")
        file, held = self.file.with_suffix(".parquet"), self.groups[protocol]
        try:
            confined(file.parent, file.name)
            with file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != self.values:
                    raise BundleError(f"{file}: is not the file that was written with {self.file.name}; evaluate again")
            if (rows := pq.read_metadata(file).num_rows) > MOST_ROWS:
                raise BundleError(f"{file}: holds {rows:,} rows; at most {MOST_ROWS:,} are read")
            columns = [ID, ROW, EVENTS, *held.metrics]
            columns += [f"{name}/{metric}" for name, of in held.baselines.items() for metric in of]
            there = [name for name in columns if name in pq.read_schema(file).names]
            found = pq.read_table(file, columns=[PROTOCOL, *there], partitioning=None)
            found = found.filter(pc.equal(found.column(PROTOCOL), protocol)).drop_columns([PROTOCOL])
        except (PathError, OSError, ValueError, pa.ArrowException) as error:
            raise BundleError(f"{file}: can't be read: {error}; evaluate again") from None
        return found.select([name for name in found.column_names if found.column(name).null_count < len(found)])


@dataclass(frozen=True)
class Kept:
    """Where an evaluation was kept; or why not."""

    file: Path | None
    why_not: str = ""


def held_values(table: pa.Table, name: str) -> NDArray[np.float64]:
    """(G,) the values of a metric of `SavedEvaluation.table`; of GAUC under `rows` fewer than the table has rows."""
    values: NDArray[np.float64] = table.column(name).drop_null().to_numpy().astype(np.float64)
    return values


def save(report: Report, trained: Bundle, spec: FeatureSpec) -> Kept:
    """Keep an evaluation with its run, or with its bundle where there is no run.

    A folder that can't be written to is a note, because the evaluation itself is done.
    """
    assert report.asked is not None, "`evaluate` made the report"
    folder = run_record.home(trained.folder) / FOLDER
    made = SavedEvaluation(
        time=run_record.now(),
        seconds=None if report.seconds is None else round(report.seconds, 3),
        device=str(trained.model.device),
        model=SavedModel(
            name=trained.card.model, bundle=str(trained.folder.resolve()), digest=manifest.digest(trained.folder)
        ),
        data=report.data or DataRecord.of(spec),
        split=report.split,
        protocols=report.asked.protocols,
        settings=dict(report.asked.settings),
        baselines=report.asked.baselines,
        against=report.asked.against,
        report=_finite(report.to_dict()),
    )
    name = _name(made)
    try:
        confine(folder.parent, (FOLDER, f"{FOLDER}/{name}.json", f"{FOLDER}/{name}.parquet"))
        folder.mkdir(exist_ok=True)
        table, groups = _tables(report, spec)
        digest = ""
        if table is not None:
            with whole_file(folder / f"{name}.parquet") as temporary:
                pq.write_table(table, temporary, compression="zstd")
                with temporary.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
        made = made.model_copy(update={"groups": groups, "values": digest})
        write_whole(folder / f"{name}.json", made.model_dump_json(indent=2) + "\n")
    except (OSError, RecspecError) as error:
        return Kept(None, f"the evaluation is not kept: {of_the_machine(error) or error}")
    return Kept(folder / f"{name}.json")


def saved(path: Path, problems: list[str] | None = None) -> tuple[SavedEvaluation, ...]:
    """The evaluations that a run or a bundle keeps, the newest first.

    What can't be read is left out, with a sentence in `problems`.
    """
    problems = [] if problems is None else problems
    inner = path / "bundle"
    bundle = inner if (inner / "bundle.json").is_file() else path
    folder = run_record.home(bundle) / FOLDER
    current, found = manifest.digest(bundle), []
    try:
        confined(folder.parent, FOLDER)
        entries = list(islice(folder.iterdir(), MOST_LISTED + 1))
        names = sorted(file.name for file in entries if file.suffix == ".json" and file.name[0] != ".")
        if len(names) > MOST_READ:
            names.sort(key=lambda name: (folder / name).lstat().st_mtime, reverse=True)
    except FileNotFoundError:
        return ()
    except (OSError, PathError) as error:
        problems.append(f"{folder}: {of_the_machine(error) or error}")
        return ()
    if len(names) > MOST_READ:
        problems.append(f"{folder}: holds more than {MOST_READ:,} evaluations; the newest are read, the others are not")
    if len(entries) > MOST_LISTED:
        problems.append(f"{folder}: holds more than {MOST_LISTED:,} files; the others were not looked at")
    for name in names[:MOST_READ]:
        try:
            one = cards.read(folder, name, SavedEvaluation, what="evaluation", version=FORMAT, most=MOST_BYTES)
        except RecspecError as error:
            problems.append(str(error))
        else:
            if one is not None:
                is_current = one.model.digest == current
                found.append(one.model_copy(update={"file": folder / name, "is_current": is_current}))
    return tuple(sorted(found, key=lambda each: (each.time, each.name), reverse=True))


def data_notes(trained: Bundle, here: DataRecord) -> tuple[str, ...]:
    """A note if a model is asked about other data than it was trained on."""
    try:
        record = run_record.read(run_record.home(trained.folder))
    except BundleError as error:
        return (f"{error}; so the dataset that the model was trained on is not known",)
    data = record.data if record is not None else None
    if data is None:
        if meaning_digest(trained.spec) == here.meaning:
            return ()
        unlike = f"counts, vocabularies or catalogues of {here.path} differ from its own"
        return (f"the model does not say on which dataset it was trained, and {unlike}",)
    if here.digest == data.digest:
        return ()
    was, now = data.digest[:12], here.digest[:12]
    if here.path == data.path:
        return (f"{here.path} has changed since the model was trained on it: its digest was {was}, and is {now}",)
    return (f"the model was trained on another dataset: {data.path} ({was}), and this is {here.path} ({now})",)


def other_data(trained: Bundle, here: DataRecord) -> str:
    """Where the run says that it was trained, if that is other data than these; empty if it is not, or not known."""
    data = run_record.data_of(trained.folder)
    return "" if data is None or data.digest == here.digest else f"{data.path}, {data.digest[:12]}"


def _name(made: SavedEvaluation) -> str:
    """The split and a digest of what was asked, for a file."""
    asked = [made.split, made.protocols, made.settings, made.baselines, made.against, made.data.digest]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:10]
    return f"{re.sub('[^A-Za-z0-9_]', '_', made.split)[:40]}-{digest}"


def _tables(report: Report, spec: FeatureSpec) -> tuple[pa.Table | None, dict[str, SavedGroups]]:
    """The values of all protocols as one table, and what it holds."""
    tables, held = [], {}
    for protocol, named in report.model.values.items():
        total = len(next(iter(named.values()), ()))
        if not total:
            continue
        step = slice(None, None, max(1, -(-total // MOST_SAVED)))
        columns = dict(_values(report.model, protocol, total))
        metrics, rows = tuple(columns), len(range(total)[step])
        found = {name: dict(_values(of, protocol, total)) for name, of in report.beside.items()}
        beside = {name: of for name, of in found.items() if of}
        columns |= {f"{name}/{metric}": of for name, named in beside.items() for metric, of in named.items()}
        table: dict[str, pa.Array] = {PROTOCOL: pa.array([protocol] * rows).dictionary_encode()}
        groups, feature, raw = report.model.groups.get(protocol), "", False
        if groups is not None and len(groups.ids) == total:
            feature = groups.feature
            table[ID], raw = raw_ids(spec, feature, groups.ids[step])
            if groups.events is not None:
                table[EVENTS] = pa.array(groups.events[step].astype(np.int64))
        if protocol == "rows":
            table[ROW] = pa.array(_row_numbers(report.model, total)[step])
        tables.append(pa.table({**table, **{name: _filled(of[step], rows) for name, of in columns.items()}}))
        held[protocol] = SavedGroups(
            feature=feature,
            raw=raw,
            saved=rows,
            of=_count(report.model, protocol, total),
            metrics=metrics,
            baselines={name: tuple(of) for name, of in beside.items()},
        )
    if not tables:
        return None, {}
    return pa.concat_tables([each.unify_dictionaries() for each in tables], promote_options="default"), held


def _values(found: Evaluation, protocol: str, total: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Values (total,) of each metric, and of the measures of lists; under `rows` fewer of GAUC, one a group."""
    named: Mapping[str, NDArray[Any]] = found.values.get(protocol, {})
    if protocol == "full":
        named = {**named, **found.list_values}
    yield from (
        (name, of) for name, of in named.items() if len(of) == total or (protocol == "rows" and 0 < len(of) < total)
    )


def _filled(values: NDArray[Any], rows: int) -> pa.Array:
    """A column of values, with null after the last one."""
    held = pa.array(np.asarray(values, np.float32))
    return pa.concat_arrays([held, pa.nulls(rows - len(held), held.type)])


def _row_numbers(found: Evaluation, total: int) -> NDArray[np.int64]:
    """Numbers of the split's rows whose values are kept."""
    step = max(1, -(-_count(found, "rows", total) // max(1, total)))
    return np.arange(total, dtype=np.int64) * step


def _count(found: Evaluation, protocol: str, total: int) -> int:
    """Rows or groups that the metrics are about."""
    known = found.protocols.get(protocol, {}).get("rows" if protocol == "rows" else "groups")
    return known if isinstance(known, int) else total


def raw_ids(spec: FeatureSpec, feature: str, ids: NDArray[np.integer]) -> tuple[pa.Array, bool]:
    """Prepared ids (G,) as raw ones in text, null for unknown; and whether they are raw, or stay prepared."""
    if not feature or feature not in spec.features or not spec.features[feature].is_categorical:
        return pa.array(map(str, ids.tolist()), pa.string()), True  # a group's number is what the raw files hold
    if not spec.metadata.get("encoders"):
        return pa.array(map(str, (ids - spec.shift(feature)).tolist()), pa.string()), True
    encoder = read_encoders(spec.folder).get(feature)
    file = spec.vocabulary_file(encoder.vocabulary) if isinstance(encoder, VocabularyEncoder) else None
    if file is None:
        return pa.array(map(str, ids.tolist()), pa.string()), False
    distinct, codes = np.unique(ids, return_inverse=True)
    raw = Vocabulary.load(file).decode(distinct).cast(pa.string())
    return raw.take(pa.array(codes)), True


def _finite(value: object) -> object:
    """A JSON value in which numbers that are not finite are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(of) for name, of in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(of) for of in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return value


def _numbers(found: object) -> dict[str, dict[str, float]]:
    """Finite numbers by protocol and metric; anything else is left out."""
    held = found.items() if isinstance(found, Mapping) else ()
    return {
        str(protocol): {str(name): value for name, of in named.items() if (value := real(of)) is not None}
        for protocol, named in held
        if isinstance(named, Mapping)
    }


def real(value: object) -> float | None:
    """A JSON value that is a finite number; None otherwise. A whole number may be larger than any float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None
