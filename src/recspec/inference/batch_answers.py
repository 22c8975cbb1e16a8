"""Batch jobs: recommendations for many users, probabilities of many rows, as a folder of Parquet shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recspec.base.errors import DataError, SettingsError, require_extra, unknown
from recspec.base.files import manifest, temporary_name
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from recspec.inference import batch_engines, batch_job
from recspec.inference.answer_files import Progress, silent
from recspec.inference.batch_engines import Engine, Note
from recspec.inference.batch_job import SHARD_SIZE, Done, Job, ShardWriter, Work, count_users, settings_of, shards_of
from recspec.inference.index import INDEX_FILE, ItemIndex
from recspec.inference.predictor import Predictor, note_of_scores
from recspec.inference.retrievers import has_vectors, item_vectors
from recspec.inference.wanted import Wanted

MOST_WORKERS = 1024

LIBRARIES: Mapping[str, str] = MappingProxyType({"spark": "pyspark", "ray": "ray"})
"""Engine -> its library, which the extra of the engine's name installs."""


def untold(note: str) -> None:
    """Drop a note."""


@dataclass(frozen=True)
class How:
    """How a job is divided: it changes no answer, except that shards of a job that goes on keep their size."""

    engine: Engine = "local"
    workers: int = 1
    """Processes; on a cluster, at least as many shards are worked on at once."""
    shard_size: int = SHARD_SIZE

    def check(self) -> None:
        """Raises `SettingsError`, naming everything that is out of range, or `MissingExtraError`."""
        found = []
        if self.engine not in get_args(Engine):
            found.append(f"engine: {unknown('engine', self.engine, get_args(Engine))}")
        if not 1 <= self.workers <= MOST_WORKERS:
            found.append(f"workers is {self.workers}; expected 1 to {MOST_WORKERS:,}")
        if self.shard_size < 1:
            found.append(f"shard_size is {self.shard_size}; expected 1 or more")
        if found:
            raise SettingsError.of("batch job", found)
        if self.engine in LIBRARIES:
            require_extra(LIBRARIES[self.engine], self.engine)


@dataclass(frozen=True)
class Counts:
    """What the shards of a job hold together."""

    count: int
    """Users or rows."""
    unknown: int
    shards: int
    kept: int
    """Shards that an earlier start had finished."""


def recommend_shards(
    predictor: Predictor,
    users: Path | None,
    out: Path,
    wanted: Wanted,
    how: How,
    *,
    progress: Progress = silent,
    note: Note = untold,
) -> Counts:
    """Write the best items of the users of a file, or of all (None), as Parquet shards into the folder `out`.

    The columns are those of `recommend_to_parquet`. A job that was killed goes on with its unfinished shards.

    Raises:
        RequestError: with every problem of the request.
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if processes die of a shard; a second start goes on.
    """
    how.check()
    predictor.recommender.check(wanted)  # raises before any work
    if users is None:
        asked, count = dict[str, Any](all=True), len(predictor.users)
    else:
        asked, count = {"users": str(users.resolve()), **_version(users)}, count_users(users)
    job = Job(
        answers="recommendations",
        model=_digest(predictor),
        input=asked,
        settings=settings_of(wanted),
        count=count,
        shard_size=how.shard_size,
    )
    through_index = predictor.pipeline is None and not wanted.boosts and has_vectors(predictor.model)
    return _run(predictor, job, out, how, progress, note, through_index=through_index)


def predict_shards(
    predictor: Predictor,
    rows: Path | FeatureSpec,
    out: Path,
    how: How,
    *,
    split: str = "test",
    columns: Sequence[str] | None = None,
    allow_outside: bool = False,
    progress: Progress = silent,
    note: Note = untold,
) -> Counts:
    """Write rows of a Parquet file, or a split of a prepared dataset, with `Predictor.column`, as Parquet shards.

    Raises:
        SettingsError: if `out` holds another job, or a setting is out of range.
        DataError: if the rows can't be read, or processes die of a shard; a second start goes on.
    """
    how.check()
    if isinstance(rows, FeatureSpec):
        reader = open_split(rows, split, tuple(predictor.model.features()))
        asked: dict[str, Any] = {"data": str(rows.folder.resolve()), "split": split, "spec": rows.content_hash()}
        count = reader.num_rows
    else:
        if rows.suffix != ".parquet":
            raise SettingsError(
                f"{rows}: shards are made of Parquet files, whose rows can be found without reading those before them; "
                "name a Parquet file or a prepared dataset, or write one file with --out FILE"
            )
        try:
            count = pq.read_metadata(rows).num_rows
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{rows}: can't be read as parquet: {error}") from None
        asked = {"rows": str(rows.resolve()), **_version(rows)}
    if said := note_of_scores(predictor):
        note(said)
    chosen = None if columns is None else list(columns)
    job = Job(
        answers="probabilities",
        model=_digest(predictor),
        input=asked,
        settings={"columns": chosen},
        count=count,
        shard_size=how.shard_size,
    )
    return _run(predictor, job, out, how, progress, note, allow_outside=allow_outside)


def _run(
    predictor: Predictor,
    job: Job,
    out: Path,
    how: How,
    progress: Progress,
    note: Note,
    *,
    through_index: bool = False,
    allow_outside: bool = False,
) -> Counts:
    """Write the shards that are not there yet."""
    what = "recommend" if job.answers == "recommendations" else "predict"
    with batch_job.opened(out, job) as finished:
        kept, shards = len(finished), [each for each in shards_of(job) if each.number not in finished]
        if kept and shards:
            note(f"{out}: {kept:,} of {job.num_shards:,} shards are there; the job goes on with the others")

        def done(found: Done) -> None:
            finished[found.number] = found
            progress(what, sum(each.count for each in finished.values()), job.count)

        if shards:
            if through_index:
                _make_index(predictor, out)
            work = Work(
                str(predictor.bundle.folder.resolve()),
                str(out.resolve()),
                str(predictor.device),
                allow_outside,
                through_index,
            )
            if how.engine == "spark":
                batch_engines.write_by_spark(work, shards, how.workers, done)
            elif how.engine == "ray":
                batch_engines.write_by_ray(work, shards, how.workers, done)
            elif how.workers == 1:
                batch_engines.write_here(ShardWriter(work, predictor), shards, done)
                if through_index:
                    predictor.recommender.index = None  # its file goes with the job
            else:
                batch_engines.write_by_processes(work, shards, how.workers, done, note)
        whole = finished.values()
        return Counts(sum(each.count for each in whole), sum(each.unknown for each in whole), len(finished), kept)


def _make_index(predictor: Predictor, out: Path) -> None:
    """Vectors of all items that the model can recommend, in a file that every process maps."""
    folder = out / batch_job.ITEMS
    if (folder / INDEX_FILE).exists():  # of the same model: the job says so
        return
    ids = np.flatnonzero(predictor.recommender.chooser.scorable)
    ids = ids[ids >= predictor.items.first_id]
    index = ItemIndex.build(item_vectors(predictor.model, predictor.items.features)[ids], ids)
    temporary = temporary_name(folder)
    temporary.mkdir()
    index.save(temporary)
    temporary.rename(folder)


def _digest(predictor: Predictor) -> str:
    """What tells a model from others: the digest of its bundle's manifest."""
    return manifest.digest(predictor.bundle.folder)


def _version(file: Path) -> dict[str, int]:
    """What changes when a file is written again."""
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}") from None
    return {"bytes": found.st_size, "modified": found.st_mtime_ns}
