"""The published layout of behaviour sequences: TFRecords as in the SIM reference.

Features are `label`, `user_feat_0`, and for each item feature i `item_feat_i_trgt`, `item_feat_i_pos` (the history) and
`item_feat_i_neg`, all int64. Histories are left-padded with 0 to one length, ids start at 1, and a cardinality is the
largest id. A record is a row, or `prebatch` rows feature by feature; the remaining rows are in `remainder.tfrecord`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from recspec.base.errors import SpecError, listed
from recspec.data.encoding import Encoders
from recspec.data.prepare import Progress
from recspec.data.storage import Ragged, SplitReader, open_split, tfrecord, transcode
from recspec.feature_spec import FILE_NAME, Chunk, ChunkType, Feature, FeatureSpec

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
ROWS = 16_384  # rows encoded in a block; with 400 ids per row, 50 MB


# --- writing ---------------------------------------------------------------------------------------------------------


def write(spec: FeatureSpec, prebatch: int, num_files: Mapping[str, int], progress: Progress) -> FeatureSpec:
    """Rewrite a prepared dataset with histories in the published layout, in the same folder."""
    names = published_names(spec)
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


def published_names(spec: FeatureSpec) -> dict[str, str]:
    """The published name of each feature that the layout holds, in its order."""
    items, histories = spec.role("item"), spec.role("history")
    names = {spec.label: "label", **{name: f"user_feat_{place}" for place, name in enumerate(spec.role("user"))}}
    problems = []
    for suffix, prefix in (("trgt", ""), ("pos", "history_"), ("neg", "negative_history_")):
        for place, name in enumerate(items):
            names[f"{prefix}{name}"] = f"item_feat_{place}_{suffix}"
            if f"{prefix}{name}" not in spec.features:
                problems.append(f"item feature '{name}' has no '{prefix}{name}'; found {listed(histories)}")
    if problems:
        raise SpecError.of("the published records", problems)
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
    step = max(ROWS // batch, 1) * batch
    for first in range(start, end, step):
        columns = reader.read(first, min(first + step, end))
        block = {}
        for name, published in names.items():
            column, length = columns[name], spec.features[name].length or 1
            rows = left_padded(column, length) if isinstance(column, Ragged) else column
            values = np.asarray(rows, np.int64).reshape(-1)
            block[published] = Ragged(values, np.arange(0, len(values) + 1, length * batch))
        yield block


def left_padded(lists: Ragged, length: int) -> NDArray[np.int64]:
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


# --- reading ---------------------------------------------------------------------------------------------------------


def found_in(raw: Path) -> Path | None:
    """The specification of published records, if `raw` is that file or its folder."""
    path = raw / FILE_NAME if raw.is_dir() else raw
    return path if path.suffix in (".yaml", ".yml") and path.is_file() else None


def read(path: Path, out: Path, to: ChunkType, progress: Progress) -> FeatureSpec:
    """Convert a dataset of the published layout to recspec's own, in another folder and chunk type."""
    spec = in_recspecs_words(FeatureSpec.load(path))
    written = transcode(spec, out, to, progress=lambda done, total: progress("reading records", done, total))
    rows = {split: open_split(written, split, [written.label]).num_rows for split in written.splits}
    inferred = ["id 0 is padding, and no cardinality counts it: the specification leaves both unsaid"]
    summary = {"rows": rows, "inferred": inferred}
    return written.replace(metadata={**written.metadata, "dataset": "amazon", "summary": summary})


def in_recspecs_words(spec: FeatureSpec) -> FeatureSpec:
    """The published specification with its implicit rules stated.

    Id 0 is padding, which no cardinality counts. The i-th target, history and negative history share their ids.
    """
    problems = [f"channel '{name}' is missing or empty" for name in CHANNELS if not spec.channels.get(name)]
    if problems:
        raise SpecError.of(f"{spec.folder}: no dataset of the published layout", problems)
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
    if problems:
        raise SpecError.of(f"{spec.folder}: the published layout", problems)
    features, shared = {}, dict(pairs)
    for name, feature in spec.features.items():
        ids = feature.cardinality
        further = {"padding": 0, "vocabulary": shared[name]} if name in shared else {}
        features[name] = feature.model_copy(update={"cardinality": ids + 1 if isinstance(ids, int) else ids, **further})
    return spec.replace(features=features)
