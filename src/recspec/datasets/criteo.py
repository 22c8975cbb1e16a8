"""Criteo's click logs: a label, integers and hashed categories, separated by tabs, without a header, of any size.

Kaggle's train.txt is split by rows, the Terabyte's day_0 to day_23 by days, always in order of time. The work has
stages that survive a kill: rows are read into Parquet, counted, and encoded into buckets (`Scatter`); then splits are
written. The engine joins rows with vocabularies, so Python holds none. All features have the role context, because
there are neither users nor items.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recspec.datasets.criteo_files import check_width, find_days
from recspec.datasets.criteo_settings import Settings as Settings
from recspec.datasets.criteo_stages import BLOCK_ROWS, Encoded, Stages, finished_stages
from recspec.encoding import ENCODERS_FILE, VOCABULARIES
from recspec.prepare import LABEL, PrepareContext, Prepared, Progress, prepared
from recspec.spec import Chunk, FeatureSpec
from recspec.storage import Column, SplitWriter

NAME = "criteo"


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a file of rows or a folder of days; a killed run continues at its last finished stage.

    Raises:
        DataError: if a file is missing, a line malformed or train empty, or if `out` holds something else.
        SettingsError: if settings name days without a file, or `rows` of whole days.
    """
    files = find_days(context.raw, settings)
    for file in files:
        check_width(file.path, settings)

    def build(folder: Path) -> FeatureSpec:
        shutil.rmtree(folder / "work" / "engine", ignore_errors=True)
        with context.connect(folder / "work" / "engine") as backend:
            encoded = Stages(backend, folder / "work", files, settings, context).encode()
        return _write(folder, encoded, settings, context.progress)

    return prepared.run(
        context,
        NAME,
        settings,
        [file.path for file in files],
        build,
        resumable=True,
        finished=lambda folder: finished_stages(folder / "work", len(files), settings),
    )


def _write(folder: Path, encoded: Encoded, settings: Settings, progress: Progress) -> FeatureSpec:
    encoded.encoders.save(folder)
    (folder / VOCABULARIES).mkdir(exist_ok=True)
    for name in settings.categories:
        _copy_values(folder / "work" / VOCABULARIES / f"{name}.parquet", folder / VOCABULARIES / f"{name}.parquet")
    chunks: dict[str, tuple[Chunk, ...]] = {}
    done, total = 0, sum(encoded.counts.values())
    for split in encoded.counts:
        shutil.rmtree(folder / split, ignore_errors=True)  # of a run killed here
        folders = [place / split for place in encoded.folders]
        with SplitWriter(folder, split, encoded.features, settings.format, label=LABEL) as writer:
            for block in encoded.scatters[split].ordered(folders, BLOCK_ROWS):
                columns: dict[str, Column] = dict(block)
                writer.write(columns)
                done += len(block[LABEL])
                progress("writing splits", done, total)
        chunks[split] = writer.chunks
    channels = {"context": tuple(name for name in encoded.features if name != LABEL), "label": (LABEL,)}
    metadata = {
        "dataset": NAME,
        "catalogues": {},
        "encoders": ENCODERS_FILE,
        "vocabularies": VOCABULARIES,
        "summary": dict(encoded.summary),
    }
    return FeatureSpec(encoded.features, chunks, channels, metadata, folder)


def _copy_values(place: Path, target: Path) -> None:
    """Copy a vocabulary as `Vocabulary.load` reads it: values in the order of ids."""
    with pq.ParquetWriter(target, pa.schema([("value", pa.string())])) as writer:
        for batch in pq.ParquetFile(place).iter_batches(columns=["value"]):
            writer.write_batch(batch)
