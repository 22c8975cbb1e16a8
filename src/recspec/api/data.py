"""Prepared datasets: `prepare` from a data frame or raw files, `open_data`, and what can be asked of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from recspec.api.frames import Kind, chosen_kind, from_table, is_frame, kind_of, reason, to_table
from recspec.api.progress import Stages, stages
from recspec.api.verb_checks import Place, merge_settings, one_of, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import DataError, RecspecError, SettingsError, nearest, require_extra, unknown
from recspec.base.summaries import NOTES, shown, shown_counts

if TYPE_CHECKING:
    import pyarrow as pa

    from recspec.base.config import Settings
    from recspec.feature_spec import FeatureSpec


SIDES = ("users", "items")
"""Settings that name a file beside the rows; a frame is accepted in their place."""
MOST_WINDOWS = 1_000
LARGE = 64 << 20
"""Bytes from which `prepare` recognises a file by its time instead of its content."""


class Data(Viewed):
    """A prepared dataset, opened. `os.fspath(data)` is its folder, so that it can be passed where a path is expected.

    Attributes:
        path: The folder.
        spec: The feature specification.
        message: How the last `prepare` ended; empty for a dataset that was opened.
        kind: The kind of frame in which answers go out by default.
    """

    def __init__(
        self, spec: FeatureSpec, *, kind: Kind = "pyarrow", message: str = "", place: Path | None = None
    ) -> None:
        self.spec, self.path = spec, place or spec.folder
        self.kind, self.message = kind, message

    @cached_property
    def prepared(self) -> Mapping[str, object]:
        """What `prepare` counted, and the lists `warnings`, `inferred`, `dropped` and `changed` of sentences.

        Empty for a dataset made elsewhere.
        """
        from recspec.base.files import read_json
        from recspec.data.storage import PREPARE_FILE

        file = self.spec.folder / PREPARE_FILE
        record = read_json(file) if file.is_file() else {}
        found = record.get("summary") if isinstance(record, dict) else None
        found = found if isinstance(found, dict) else self.spec.summary
        return dict(found)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits: train, valid, test."""
        return tuple(self.spec.splits)

    def describe(self, *, html: Place | None = None) -> Description:
        """See `describe`."""
        return describe(self, html=html)

    def check(self) -> dict[str, int]:
        """See `check`."""
        return check(self)

    def to_frame(self, split: str = "train", *, rows: int | None = None, kind: str | None = None) -> Any:
        """The rows of a split as a data frame, with raw values in place of ids where `prepare` kept them.

        Args:
            rows: Number of rows from the first one on; by default all, which must fit into memory.
            kind: Kind of frame; by default the kind that was prepared.

        Raises:
            SpecError: for an unknown split.
        """
        return from_table(_raw_rows(self.spec, split, rows), chosen_kind(kind, self.kind))

    def view(self) -> View:
        counts = shown_counts(self.prepared, self.spec.metadata)
        features = [
            (
                name,
                ", ".join(self.spec.roles_of(name)),
                _what(feature),
                shown(_known_ids(feature) if self.prepared else feature.cardinality),
            )
            for name, feature in self.spec.features.items()
        ]
        notes = [
            f"{name}: {sentence}"
            for name in NOTES
            if isinstance(told := self.prepared.get(name), list)
            for sentence in told
        ]
        name = str(self.spec.metadata.get("dataset") or self.path.name)
        tables = [figures("counts", counts)] if counts else []
        return View(
            f"Data: {name} in {self.path}, splits {', '.join(self.splits) or 'none'}",
            [*tables, Section("features", ("feature", "roles", "kind", "ids"), features)],
            notes,
        )


class Description(Viewed):
    """What the splits and features of a dataset hold.

    Attributes:
        page: The HTML file that was asked for.
    """

    def __init__(self, spec: FeatureSpec, page: Path | None = None) -> None:
        self._spec, self.page = spec, page

    @cached_property
    def _values(self) -> dict[str, object]:
        from recspec.report import dataset_summary

        return dataset_summary.describe(self._spec).to_dict()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return dict(self._values)

    def view(self) -> View:
        sections = [_section(name, value) for name, value in self._values.items() if isinstance(value, Mapping)]
        notes = self._values.get("notes")
        told = [str(note) for note in notes] if isinstance(notes, (list, tuple)) else []
        return View(f"dataset {self._values.get('folder')}", [each for each in sections if each.rows], told)


def _section(title: str, value: Mapping[str, Any]) -> Section:
    if value and all(isinstance(row, Mapping) for row in value.values()):
        named = dict.fromkeys(name for row in value.values() for name in row)
        names = [name for name in named if any(shown(row.get(name)) for row in value.values())]
        rows = [(str(name), *(shown(row.get(column)) for column in names)) for name, row in value.items()]
        return Section(title, ("", *names), rows)
    return figures(title, value)


def _known_ids(feature: Any) -> object:
    """The number of ids without id 0, which is that of missing and unknown values."""
    return feature.cardinality - 1 if isinstance(feature.cardinality, int) else feature.cardinality


def _what(feature: Any) -> str:
    kind = "ids" if feature.is_categorical else "numbers"
    if feature.is_vector:
        return f"vector of {feature.length}"
    return f"list of {kind}" if feature.is_list else kind.removesuffix("s")


# --- prepare ---------------------------------------------------------------------------------------------------------


@verb
def prepare(
    raw: object,
    out: Place,
    *,
    dataset: str = "table",
    engine: Literal["duckdb", "spark"] = "duckdb",
    memory_limit: str = "4GB",
    force: bool = False,
    windows: int = 1,
    settings: Mapping[str, object] | None = None,
    progress: bool | Stages | None = None,
    **named: object,
) -> Data:
    """Turn raw rows into a prepared dataset.

    Unset settings are inferred: ids, times, labels, ratings, lists, vectors. The result shows them; a setting changes
    them.

    Args:
        raw: Raw files: a folder, a file or a zip; in Python also a frame of pandas, polars, pyarrow or DuckDB, a dict
            of columns or a list of rows.
        out: Folder to write.
        dataset: Name from `recspec datasets`; `table` is your own table.
        engine: Query engine.
        memory_limit: Memory limit of the process, such as 4GB.
        force: Replace a dataset prepared with other settings.
        windows: Number of datasets to write, by successive windows of time, the oldest in OUT/window-1; needs the
            settings split=time and window.
        settings: Settings of the dataset by name, for names that are no Python keywords.
        progress: A function that receives stages (stage, done, total), or False for no bar.
        **named: Settings of the dataset, such as `user="customer", item="sku", timestamp="bought_at"`. `users` and
            `items` may be frames too: one row a user or item, joined by id.

    Returns:
        The dataset; of several windows, the newest. If `out` holds the same one already, nothing is done again.

    Raises:
        SettingsError: for an unknown dataset or setting, or columns that do not exist.
        DataError: if the data are malformed, no row is left for train, or `out` holds something else.
        MissingExtraError: with the engine spark, without PySpark.
    """
    from recspec.base.files import local, special
    from recspec.data.prepare import ENGINES, PrepareContext
    from recspec.datasets import DATASETS

    one_of("--engine", engine, ENGINES)
    if engine == "spark":
        require_extra("pyspark", "spark")
    if dataset not in DATASETS:
        raise SettingsError(unknown("dataset", dataset, DATASETS))
    chosen = DATASETS[dataset]
    folder = local(Path(out), "OUT")
    frames = {name: named[name] for name in SIDES if is_frame(named.get(name))}
    values = merge_settings("prepare", settings, {name: value for name, value in named.items() if name not in frames})
    kind = kind_of(raw) if is_frame(raw) else "pyarrow"
    with ExitStack() as held:
        if is_frame(raw):
            if dataset != "table":
                raise SettingsError(f"dataset '{dataset}' is made from raw files; a data frame is for dataset='table'")
            raw_path, sides = held.enter_context(staged(folder, raw, frames))
            values |= sides
        elif frames:
            raise SettingsError(f"{' and '.join(frames)}: a frame goes with a frame of rows; for files, name a file")
        else:
            raw_path = _path_of(raw)
            if problem := special(raw_path):
                raise DataError(f"{raw_path}: {problem}")
        asked = _settings(chosen.Settings, values)
        show = held.enter_context(stages(progress))

        def tell(stage: str, done: int, total: int | None) -> None:
            show(stage, done, total)

        context = PrepareContext(raw_path, folder, engine, memory_limit, progress=tell, force=force)
        for place, own in _each_window(folder, asked, windows):
            made = chosen.prepare(replace(context, out=place), own)
    data = Data(made.spec, kind=kind, message=made.message)
    data.prepared = made.summary
    return data


def _each_window(folder: Path, asked: Settings, windows: int) -> Iterator[tuple[Path, Settings]]:
    """The folder and the settings of each window, the oldest first; the given ones of a single dataset."""
    if windows == 1:
        yield folder, asked
        return
    if not 1 < windows <= MOST_WINDOWS:
        raise SettingsError(f"--windows is {windows}; expected 1 to {MOST_WINDOWS:,}")
    if vars(asked).get("window") is None or vars(asked).get("earlier"):
        raise SettingsError(
            f"--windows {windows}: set split=time and window to the length of each, such as --set window=7d, and leave "
            "out earlier, which counts them"
        )
    for number in range(windows):
        own = asked.model_copy(update={"earlier": windows - 1 - number})
        yield folder / f"window-{number + 1:0{len(str(windows))}d}", own


def _settings(kind: type[Settings], values: Mapping[str, object]) -> Settings:
    """The dataset's settings; the nearest name of an unknown one may also be a keyword of `prepare` itself."""
    own = {"out": 0, "dataset": 0, "engine": 0, "memory_limit": 0, "force": 0, "windows": 0, "settings": 0}
    own["progress"] = 0
    known = {**kind.model_fields, **own}
    if strange := [name for name in values if name.partition(".")[0] not in known]:
        listing = "see `recspec datasets`"
        raise SettingsError.of(
            "prepare", [f"unknown setting '{name}'{nearest(name, known)}; {listing}" for name in strange]
        )
    from recspec.base import config

    return config.build(kind, "prepare", config.assign(values, {"prepare": kind})["prepare"])


def _path_of(raw: object) -> Path:
    from recspec.base.files import local

    if isinstance(raw, (str, os.PathLike)) and os.fspath(raw):  # "" would be the folder that the process is in
        return local(os.fspath(raw), "RAW")
    found = "the path is empty" if isinstance(raw, str) else f"found {type(raw).__name__}"
    raise DataError(f"prepare: {found}; expected a data frame or the path of raw files")


@contextmanager
def staged(out: Path, rows: object, sides: Mapping[str, object]) -> Iterator[tuple[Path, dict[str, object]]]:
    """Frames as Parquet files in a folder beside `out` that is removed at the end; messages name the frames."""
    from recspec.base.files import hidden_sibling, staging

    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(hidden_sibling(out, "frames")) as folder:
        names = {"rows": "the data frame", **{side: f"the data frame {side}" for side in sides}}
        for name, frame in {"rows": rows, **sides}.items():
            table = to_table(frame, names[name])
            if not table.num_columns:
                raise DataError(f"{names[name]}: has no columns; expected one for each of user, item and so on")
            _write(table, folder / f"{name}.parquet", names[name])
        try:
            yield folder / "rows.parquet", {side: f"{side}.parquet" for side in sides}
        except RecspecError as error:
            raise _renamed(error, {str(folder / f"{name}.parquet"): said for name, said in names.items()}) from None


def _write(table: pa.Table, file: Path, what: str) -> None:
    """Write a frame so that equal frames give equal files, by which `prepare` recognises them."""
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, file, compression="zstd", coerce_timestamps="us", allow_truncated_timestamps=True)
    except pa.ArrowException as error:
        raise DataError(f"{what}: holds a type that can't be kept: {reason(error)}; leave that column out") from None
    if file.stat().st_size > LARGE:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        moment = int.from_bytes(digest[:6], "big")  # nanoseconds: the time of the file stands for its content
        os.utime(file, ns=(moment, moment))


def _renamed(error: RecspecError, names: Mapping[str, str]) -> RecspecError:
    """The same error, in which frames are called frames and not by their files."""

    def told(text: str) -> str:
        for path, name in names.items():
            text = text.replace(path, name)
        return text

    again = type(error)(told(str(error)), [told(problem) for problem in error.problems])
    for note in getattr(error, "__notes__", ()):
        again.add_note(told(note))
    return again


# --- open, look, convert ---------------------------------------------------------------------------------------------


@verb
def open_data(data: Place, *, allow_outside: bool = False, kind: str | None = None) -> Data:
    """Open a prepared dataset by its folder or its specification file.

    Args:
        data: Prepared dataset: its folder or specification file.
        allow_outside: Allow files outside the specification's folder.
        kind: Kind of frame in which answers go out; by default pyarrow.

    Raises:
        SpecError: if there is none, or with every problem of its specification.
    """
    return Data(opened(data, allow_outside=allow_outside).spec, kind=chosen_kind(kind))


def opened(data: Place, *, allow_outside: bool = False) -> Data:
    """A dataset that is opened already, or that lies at a path."""
    from recspec.base.stores import fetched, url_text
    from recspec.feature_spec import FeatureSpec

    if isinstance(data, Data):
        return data
    place = fetched(str(data), "data") if url_text(data) else Path(data)
    return Data(FeatureSpec.load(place, allow_outside=allow_outside))


@verb
def check(data: Place, *, allow_outside: bool = False) -> dict[str, int]:
    """Validate a specification and its files.

    Args:
        data: Prepared dataset: its folder or specification file.
        allow_outside: Allow files outside the specification's folder.

    Returns:
        The number of rows by split.

    Raises:
        SpecError, DataError: with every problem found, such as ids out of range and wrong numbers of rows.
    """
    from recspec.data.storage import check as dataset_check

    spec = opened(data, allow_outside=allow_outside).spec
    dataset_check.check(spec)
    return dict(dataset_check.count_rows(spec))


@verb
def describe(data: Place, *, html: Place | None = None, allow_outside: bool = False) -> Description:
    """Summarise a dataset: rows, features, label rate, histories.

    Args:
        data: Prepared dataset: its folder or specification file.
        html: HTML file to write instead, with distributions and suspected leaks.
        allow_outside: Allow files outside the specification's folder.

    Raises:
        DataError: the first values found that contradict the specification.
        MissingExtraError: with `html`, without matplotlib.
    """
    from recspec.report import write_dataset_page

    if html is not None:
        require_extra("matplotlib", "report")
    spec = opened(data, allow_outside=allow_outside).spec
    if html is not None:
        return Description(spec, write_dataset_page(spec, os.fspath(html)))
    found = Description(spec)
    found.to_dict()
    return found


@verb
def synthesize(
    spec: Place,
    out: Place,
    *,
    rows: int = 1000,
    to: str = "parquet",
    distribution: Literal["uniform", "power_law"] = "uniform",
    seed: int = 0,
) -> Data:
    """Generate random data in the shape of a specification.

    Args:
        spec: Specification of the data to generate.
        out: Folder to write.
        rows: Rows of train; other splits get a tenth.
        to: Chunk type to write.
        distribution: Distribution of the ids.
        seed: Random seed.

    Raises:
        SettingsError: for an unknown chunk type or distribution.
    """
    from recspec.data.storage import Distribution
    from recspec.data.storage import synthesize as run
    from recspec.feature_spec import ChunkType

    drawn: Distribution = one_of("--distribution", distribution, get_args(Distribution))
    kind: ChunkType = one_of("--to", to, get_args(ChunkType), "chunk type")
    return Data(run(opened(spec).spec, Path(out), rows, type=kind, distribution=drawn, seed=seed))


@verb
def transcode(data: Place, out: Place, *, to: str = "parquet", allow_outside: bool = False) -> Data:
    """Convert a dataset to another chunk type.

    It also resolves cardinalities of `auto`.

    Args:
        data: Prepared dataset: its folder or specification file.
        out: Folder to write.
        to: Chunk type to write.
        allow_outside: Allow files outside the specification's folder.

    Raises:
        SettingsError: for an unknown chunk type.
    """
    from recspec.data.storage import transcode as run
    from recspec.feature_spec import ChunkType

    kind: ChunkType = one_of("--to", to, get_args(ChunkType), "chunk type")
    return Data(run(opened(data, allow_outside=allow_outside).spec, Path(out), to=kind))


def _raw_rows(spec: FeatureSpec, split: str, rows: int | None) -> pa.Table:
    """Rows of a split; ids are raw values where there is a vocabulary, and the unknown one is null."""
    import pyarrow as pa

    from recspec.data.encoding import Vocabulary
    from recspec.data.storage import Ragged, open_split

    reader = open_split(spec, split)
    columns = reader.read(0, reader.num_rows if rows is None else min(max(0, rows), reader.num_rows))
    found = {}
    for name, column in columns.items():
        values = column.values if isinstance(column, Ragged) else column
        file = spec.vocabulary_file(spec.vocabulary(name)) if spec.features[name].is_categorical else None
        if file is not None and file.is_file():
            array = Vocabulary.load(file).decode(values.astype("int64"))
        else:
            array = pa.array(values - spec.shift(name) if spec.shift(name) else values)
        found[name] = (
            pa.LargeListArray.from_arrays(pa.array(column.offsets, pa.int64()), array)
            if isinstance(column, Ragged)
            else array
        )
    return pa.table(found)
