"""Amazon's reviews of 2014, 2018 and 2023, any category, as rows with their user's history.

Every review is an interaction. docs/datasets.md gives the settings of the published preparation (SIM's, of Books 2014).
The defaults differ from it: they leak no negatives and give a valid split.

It writes and reads that preparation's TFRecords too. Features are `label`, `user_feat_0`, and for each item feature i
`item_feat_i_trgt`, `item_feat_i_pos` (the history) and `item_feat_i_neg`, all int64. Histories are left-padded with 0
to one length, ids start at 1, and a cardinality is the largest id. A record is a row, or `prebatch` rows feature by
feature; the remaining rows are in `remainder.tfrecord`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from ibis.expr.types import Table
from numpy.typing import NDArray
from pydantic import Field, model_validator

from recspec.base.errors import DataError, SettingsError, SpecError, listed
from recspec.data.encoding import Encoders
from recspec.data.prepare import (
    CUTS,
    ITEM,
    ROW,
    SPLIT,
    TARGET,
    TIMESTAMP,
    USER,
    Backend,
    Catalogue,
    Column,
    Distribution,
    HistorySettings,
    Notes,
    Prefixes,
    PrepareContext,
    Prepared,
    Progress,
    Source,
    TimeSplitSettings,
    at_least,
    count_rows,
    counts_by,
    fetch,
    first_left_out,
    interactions,
    keep_earliest,
    limit_bytes,
    prepared,
    splits,
    with_splits,
)
from recspec.data.storage import Ragged, SplitReader, open_split, tfrecord, transcode
from recspec.datasets import reviews
from recspec.datasets.reviews import RATING, Files
from recspec.feature_spec import FILE_NAME, Chunk, ChunkType, Feature, FeatureSpec

NAME = "amazon"
ORDER = (TIMESTAMP, ITEM, ROW)  # the order of a user's reviews: by time, then by item as published, then as in the file

ROWS_BYTES = 700_000_000  # memory for writing rows with histories of 100 events (measured: 700 MB beside the engine)
LEAST_BYTES = 800_000_000  # least memory with which the engine can read JSON, in buffers of 32 MB per thread

CHANNELS = {
    "user_features": "user_feat_*",
    "target_item_features": "item_feat_*_trgt",
    "positive_history": "item_feat_*_pos",
    "negative_history": "item_feat_*_neg",
    "label": "label",
}
"""The channels, and the names of their features."""
PUBLISHED_SPEC = "published_feature_spec.yaml"
"""File beside recspec's own specification, with `dimensions` for `length` and cardinalities as in the reference."""
RECORD_ROWS = 16_384  # rows encoded in a block; with 400 ids per row, 50 MB


class Settings(HistorySettings, TimeSplitSettings):
    """Settings of Amazon's reviews; lengths, filters and negatives are the published ones."""

    category: str | None = Field(None, description="category of the reviews, if RAW holds several: Books, ...")
    min_rating: float | None = Field(None, description="minimum number of stars; null: all reviews")
    repeats: Literal["keep", "drop"] = Field(
        "keep", description="whether to keep or drop a user's further reviews of the same item"
    )
    min_item_reviews: int = Field(1, ge=1, description="items with fewer reviews are left out, before users are")
    min_reviews: int = Field(20, ge=1, description="users with fewer reviews are left out")
    categories: Literal["last", "path"] = Field(
        "last", description="last: the most specific category of an item; path: also all its categories, as a list"
    )
    brand: bool = Field(False, description="add the item's brand as a category")
    valid: bool = Field(
        True, description="leave_one_out: the second-to-last review goes to valid; false: to train, as published"
    )
    history: int | None = Field(
        100, ge=2, description="maximum number of latest events stored with each row; null: no histories"
    )
    min_history: int = Field(1, ge=0, description="minimum number of earlier events of a train row")
    prefixes: Prefixes = Field(
        "all", description="train rows to keep of each user: all, last, or a number of latest rows"
    )
    negative_history: bool = Field(True, description="store a drawn negative for each event of a history")
    train_negatives: int = Field(
        1, ge=0, description="number of rows with label 0 and drawn items after each train row"
    )
    num_negatives: int = Field(1, ge=0, description="candidates beside the positive in each series of valid and test")
    negatives: Distribution = Field(
        "popularity", description="distribution of drawn items; popularity: the item of a random review, as published"
    )
    seed: int = Field(1, ge=0, description="seed of all draws")
    format: Literal["parquet", "tfrecord"] = Field(
        "parquet", description="format of the rows; tfrecord: with the published layout, names and padding"
    )
    prebatch: int = Field(0, ge=0, description="tfrecord: rows per record, stored feature by feature; 0: one row")
    train_files: int = Field(8, ge=1, description="tfrecord: files of train")
    test_files: int = Field(4, ge=1, description="tfrecord: files of valid and of test")

    @model_validator(mode="after")
    def _make_sense(self) -> Settings:
        problems = []
        if self.split != "leave_one_out" and not self.valid:
            problems.append(f"valid=false is for split leave_one_out; with split={self.split} set valid_share=0")
        if self.format == "tfrecord":
            wrong: dict[str, list[object]] = {
                "history": [None],
                "negative_history": [False],
                "categories": ["path"],
                "split": ["time", "users"],
            }
            problems += [
                f"format=tfrecord can't hold {name}={value}"
                for name, values in wrong.items()
                if (value := getattr(self, name)) in values
            ]
        elif given := [name for name in ("prebatch", "train_files", "test_files") if name in self.model_fields_set]:
            problems.append(f"{listed(given)} say how records are written; set format=tfrecord too")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def prepare(context: PrepareContext, settings: Settings) -> Prepared:
    """Prepare a category's reviews from their folder or file, or records of the published layout from theirs."""
    if (records := _records_in(context.raw)) is not None:
        return _prepare_records(context, records, settings)
    files = reviews.find(context.raw, settings.category)

    def build(folder: Path) -> FeatureSpec:
        limited = replace(context, memory_limit=_limit_of_engine(context.memory_limit))
        with limited.connect(folder / "work") as backend:
            spec = _build(backend, folder, files, settings, context.progress)
        if settings.format == "parquet":
            return spec
        num_files = {"train": settings.train_files, "valid": settings.test_files, "test": settings.test_files}
        return _write_records(spec, settings.prebatch, num_files, context.progress)

    return prepared.run(context, NAME, settings, [files.reviews, *filter(None, [files.meta])], build)


def _limit_of_engine(memory_limit: str | None) -> str | None:
    """The memory limit minus the memory of rows with histories."""
    if memory_limit is None:
        return None
    size = limit_bytes(memory_limit)
    return f"{max(size - ROWS_BYTES, min(size, LEAST_BYTES)) // 1_000_000}MB"


def _prepare_records(context: PrepareContext, path: Path, settings: Settings) -> Prepared:
    """Prepare records, which are rows already, so no setting except the format applies."""
    given = sorted(settings.model_fields_set - {"format"})
    if given:
        raise SettingsError(f"{path}: records are taken as they are; {listed(given)} can't be set for them")
    spec = FeatureSpec.load(path)
    files = [spec.folder / file for chunks in spec.sources.values() for chunk in chunks for file in chunk.files]

    def build(folder: Path) -> FeatureSpec:
        return _read_records(path, folder, settings.format, context.progress)

    return prepared.run(context, NAME, settings, [path, *dict.fromkeys(files)], build)


def _build(backend: Backend, folder: Path, files: Files, settings: Settings, progress: Progress) -> FeatureSpec:
    progress("reading reviews", 0, None)
    layout = reviews.layout_of(files.reviews)
    raw = reviews.read(backend, files.reviews, layout, rated=settings.min_rating is not None)
    progress("filtering reviews", 0, None)
    notes, window = Notes(), None
    if settings.window is not None:
        given = settings.window, settings.earlier
        raw, window = splits.up_to_window(backend, raw, *given, time=TIMESTAMP, notes=notes)
    rows, dropped = _filtered(backend, raw, files.reviews, settings, notes)
    wanted = fetch(backend, counts_by(rows, ITEM)).column(ITEM).to_pylist()
    items = reviews.describe(files.meta, wanted, progress)
    of_users = settings.split == "users"
    split = _split(backend, rows, settings, folder / "work", window)
    if of_users:
        split = backend.stage(split)
        splits.note_unknown_items(backend, notes, rows, split)
    source = Source(
        dataset=NAME,
        rows=split,
        order=(TARGET, *ORDER) if of_users else ORDER,
        items=_catalogue(items.table, settings),
        raw_names={USER: layout.user, ITEM: layout.item},
        vocabularies="train" if settings.split == "time" else "all",
        unknown_targets=settings.unknown_targets,
        summary=lambda _: {
            "category": files.category,
            "layout": layout.releases,
            **dropped,
            **_metadata_summary(items, files, notes),
            "split": settings.split,
        },
        notes=notes,
        seen=with_splits(raw, split, CUTS.get(settings.split)) if settings.min_rating else None,
        folds_in=of_users,
    )
    num_negatives = 0 if of_users else settings.num_negatives
    return interactions.write(
        backend, folder, source, settings, num_negatives=num_negatives, seed=settings.seed, progress=progress
    )


def _filtered(
    backend: Backend, raw: Table, path: Path, settings: Settings, notes: Notes
) -> tuple[Table, dict[str, int]]:
    """Stage the filtered reviews, and count those that each filter leaves out."""
    stars = settings.min_rating
    filters: dict[str, tuple[str, str, Callable[[Table], Table]]] = {}  # setting, what it leaves out, and what it keeps
    if stars is not None:
        few = f"of fewer than {stars:g} stars"
        filters["reviews_of_few_stars"] = "min_rating", few, lambda rows: rows.filter(rows[RATING] >= stars)
    if settings.repeats == "drop":
        again = "that repeat an earlier one of the same user and item"
        filters["repeats"] = "repeats", again, lambda rows: keep_earliest(rows, [USER, ITEM], [TIMESTAMP, ROW])
    for whose, key, setting in (("items", ITEM, "min_item_reviews"), ("users", USER, "min_reviews")):
        if (least := getattr(settings, setting)) > 1:
            too_few = f"of {whose} with fewer than {least:,}"
            filters[f"of_{whose}_with_too_few"] = setting, too_few, partial(at_least, key=key, rows=least)
    rows, left = raw, count_rows(backend, raw)
    if not left:
        raise DataError(f"{path}: holds no review; expected one at least")
    counts = {"reviews": left}
    for name, (setting, what, kept) in filters.items():
        before, rows, left_before = rows, backend.stage(kept(rows)), left
        left = count_rows(backend, rows)
        counts[f"{name}_dropped"] = left_before - left
        if not left:
            raise DataError(
                f"{path}: no review is left: of {counts['reviews']:,} all that other filters keep are {what}; set "
                f"{setting} lower"
            )
        if left < left_before:
            example = first_left_out(backend, before, rows)
            notes.dropped.append(
                f"{left_before - left:,} reviews {what}, such as that of user '{example[USER]}' of item "
                f"'{example[ITEM]}' ({setting})"
            )
    return rows.select(ROW, USER, ITEM, TIMESTAMP), counts


def _split(backend: Backend, rows: Table, settings: Settings, folder: Path, window: splits.Window | None) -> Table:
    if window is not None:
        return splits.by_window(rows, time=TIMESTAMP, window=window)
    if settings.split == "users":
        shares = {"valid": settings.valid_share, "test": settings.test_share}
        return splits.by_users(backend, rows, folder, **shares, number=settings.heldout_users, seed=settings.seed)
    if settings.split == "time":
        return splits.by_time(rows, time=TIMESTAMP, valid=settings.valid_share, test=settings.test_share)
    split = splits.leave_one_out(rows, by=USER, order=ORDER)
    return split if settings.valid else split.mutate(**{SPLIT: split[SPLIT].replace("valid", "train")})


def _catalogue(items: pa.Table, settings: Settings) -> Catalogue:
    columns = [Column("category", "category")]
    if settings.categories == "path":
        columns.append(Column("category_path", "list", raw="categories"))
    if settings.brand:
        columns.append(Column("brand", "category"))
    readable = {"title": "title", "category_text": "category", "categories_text": "categories", "brand_text": "brand"}
    return Catalogue(items, ITEM, columns, readable)


def _metadata_summary(items: reviews.Items, files: Files, notes: Notes) -> dict[str, object]:
    nameless = items.table.filter(pc.equal(items.table.column("category"), reviews.NO_CATEGORY))
    without = len(nameless)
    if without:
        notes.changed.append(
            f"{without:,} of {len(items.table):,} items have no category in "
            f"{files.meta.name if files.meta else 'any file: there is no meta file'}, such as item "
            f"'{nameless.column(ITEM)[0].as_py()}'; theirs is '{reviews.NO_CATEGORY}'"
        )
    if items.repeated:
        notes.dropped.append(f"{items.repeated:,} further lines about items that have one already; the first counts")
    if files.meta is None:
        none = f"none: no meta_{files.category}.json.gz beside the reviews"
        return {"metadata": none, "items_without_category": without}
    return {
        "metadata": files.meta.name,
        "items_described": items.described,
        "items_without_category": without,
        "repeated_lines_about_items": items.repeated,
    }


# --- the published records: writing -----------------------------------------------------------------------------------


def _write_records(spec: FeatureSpec, prebatch: int, num_files: Mapping[str, int], progress: Progress) -> FeatureSpec:
    """Rewrite a prepared dataset with histories in the published layout, in the same folder."""
    names = _published_names(spec)
    old = [spec.folder / file for chunks in spec.sources.values() for chunk in chunks for file in chunk.files]
    sources: dict[str, tuple[Chunk, ...]] = {}
    for split in spec.splits:
        files = _write_split(spec, split, names, max(1, prebatch), num_files[split], progress)
        sources[split] = (Chunk(type="tfrecord", features=tuple(names.values()), files=tuple(files)),)
    for file in old:
        file.unlink()
    _rename_companions(spec, names)
    written = _specification(spec, names, sources)
    _write_published(written)
    return written


def _published_names(spec: FeatureSpec) -> dict[str, str]:
    """The published name of each feature that the layout holds, in its order."""
    items, histories = spec.role("item"), spec.role("history")
    names = {spec.label: "label", **{name: f"user_feat_{place}" for place, name in enumerate(spec.role("user"))}}
    problems = []
    for suffix, prefix in (("trgt", ""), ("pos", "history_"), ("neg", "negative_history_")):
        for place, name in enumerate(items):
            names[f"{prefix}{name}"] = f"item_feat_{place}_{suffix}"
            if f"{prefix}{name}" not in spec.features:
                problems.append(f"item feature '{name}' has no '{prefix}{name}'; found {listed(histories)}")
    SpecError.refuse("the published records", problems)
    return names


def _write_split(
    spec: FeatureSpec, split: str, names: Mapping[str, str], batch: int, num_files: int, progress: Progress
) -> list[str]:
    """Write files of about equally many records of `batch` rows, then a record of the remaining rows."""
    reader = open_split(spec, split, list(names))
    total = reader.num_rows
    whole = total // batch
    ends = [batch * (whole * place // num_files) for place in range(num_files + 1)]
    parts = [(f"{split}/part_{place}.tfrecord", start, end, batch) for place, (start, end) in enumerate(pairwise(ends))]
    parts.append((f"{split}/remainder.tfrecord", ends[-1], total, total - ends[-1]))
    parts = [part for part in parts if part[1] < part[2]]
    for file, start, end, rows in parts:
        with (spec.folder / file).open("wb") as stream:
            for block in _blocks(spec, reader, names, start, end, rows):
                stream.write(tfrecord.encode(block))
                progress("writing records", end, total)
    return [file for file, *_ in parts]


def _blocks(
    spec: FeatureSpec, reader: SplitReader, names: Mapping[str, str], start: int, end: int, batch: int
) -> Iterator[dict[str, Ragged]]:
    """Records of `batch` rows, some at a time."""
    step = max(RECORD_ROWS // batch, 1) * batch
    for first in range(start, end, step):
        columns = reader.read(first, min(first + step, end))
        block = {}
        for name, published in names.items():
            column, length = columns[name], spec.features[name].length or 1
            rows = _left_padded(column, length) if isinstance(column, Ragged) else column
            values = np.asarray(rows, np.int64).reshape(-1)
            block[published] = Ragged(values, np.arange(0, len(values) + 1, length * batch))
        yield block


def _left_padded(lists: Ragged, length: int) -> NDArray[np.int64]:
    """Lists as (rows, length), each at the end of its row after zeros."""
    rows = np.zeros((len(lists), length), np.int64)
    rows[np.arange(length) >= length - lists.lengths[:, None]] = lists.values
    return rows


def _specification(spec: FeatureSpec, names: Mapping[str, str], sources: dict[str, tuple[Chunk, ...]]) -> FeatureSpec:
    features = {}
    for name, published in names.items():
        feature = spec.features[name]
        shared = names.get(spec.vocabulary(name)) if feature.is_categorical else None
        features[published] = Feature(
            dtype="bool" if name == spec.label else "int64",
            cardinality=feature.cardinality,
            length=feature.length,
            padding=feature.padding,
            vocabulary=shared if shared != published else None,
        )
    channels = {channel: tuple(fnmatch.filter(features, pattern)) for channel, pattern in CHANNELS.items()}
    ids = {key: names[name] for key, name in (("user_id", spec.user_id), ("item_id", spec.item_id)) if name in names}
    kept = {name: value for name, value in spec.metadata.items() if name not in ("timestamp", "event_weight")}
    return spec.replace(features=features, sources=sources, channels=channels, metadata={**kept, **ids})


def _rename_companions(spec: FeatureSpec, names: Mapping[str, str]) -> None:
    known = Encoders.load(spec.folder)
    renamed = {
        names[name]: encoder.model_copy(update={"column": getattr(encoder, "column", None) or name})
        for name, encoder in known.encoders.items()
        if name in names
    }
    Encoders(renamed, known.vocabularies).save(spec.folder)
    for file in filter(None, (spec.catalogue("user"), spec.catalogue("item"))):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), file)


def _write_published(spec: FeatureSpec) -> None:
    features: dict[str, dict[str, object]] = {}
    for name, feature in spec.features.items():
        features[name] = {"dtype": str(feature.dtype)}
        if isinstance(feature.cardinality, int):
            features[name]["cardinality"] = feature.cardinality - 1
        if feature.length is not None:
            features[name]["dimensions"] = [feature.length]
    text = yaml.safe_dump({**spec.to_dict(), "feature_spec": features, "metadata": {}}, sort_keys=False)
    (spec.folder / PUBLISHED_SPEC).write_text(text, encoding="utf-8")


# --- the published records: reading -----------------------------------------------------------------------------------


def _records_in(raw: Path) -> Path | None:
    """The specification of published records, if `raw` is that file or its folder."""
    path = raw / FILE_NAME if raw.is_dir() else raw
    return path if path.suffix in (".yaml", ".yml") and path.is_file() else None


def _read_records(path: Path, out: Path, to: ChunkType, progress: Progress) -> FeatureSpec:
    """Convert a dataset of the published layout to recspec's own, in another folder and chunk type."""
    spec = _in_recspecs_words(FeatureSpec.load(path))
    written = transcode(spec, out, to, progress=lambda done, total: progress("reading records", done, total))
    rows = {split: open_split(written, split, [written.label]).num_rows for split in written.splits}
    inferred = ["id 0 is padding, and no cardinality counts it: the specification leaves both unsaid"]
    summary = {"rows": rows, "inferred": inferred}
    return written.replace(metadata={**written.metadata, "dataset": NAME, "summary": summary})


def _in_recspecs_words(spec: FeatureSpec) -> FeatureSpec:
    """The published specification with its implicit rules stated.

    Id 0 is padding, which no cardinality counts. The i-th target, history and negative history share their ids.
    """
    problems = [f"channel '{name}' is missing or empty" for name in CHANNELS if not spec.channels.get(name)]
    SpecError.refuse(f"{spec.folder}: no dataset of the published layout", problems)
    targets = spec.channels["target_item_features"]
    pairs: list[tuple[str, str]] = []
    for channel in ("positive_history", "negative_history"):
        lists = spec.channels[channel]
        if len(lists) == len(targets):
            pairs += zip(lists, targets, strict=True)
        else:
            problems.append(
                f"channel '{channel}' holds {listed(lists)}, but 'target_item_features' {listed(targets)}; expected as "
                "many, in the same order"
            )
    for name, target in pairs:
        feature, expected = spec.features[name], spec.features[target].cardinality
        if feature.cardinality != expected:
            problems.append(
                f"'{name}' has cardinality {feature.cardinality}, but '{target}', whose ids it shares by its place in "
                f"the channel, {expected}"
            )
        if feature.padding is not None or feature.vocabulary is not None:
            problems.append(f"'{name}' declares padding or a vocabulary, so recspec wrote it; use `recspec transcode`")
    SpecError.refuse(f"{spec.folder}: the published layout", problems)
    features, shared = {}, dict(pairs)
    for name, feature in spec.features.items():
        ids = feature.cardinality
        further = {"padding": 0, "vocabulary": shared[name]} if name in shared else {}
        features[name] = feature.model_copy(update={"cardinality": ids + 1 if isinstance(ids, int) else ids, **further})
    return spec.replace(features=features)
