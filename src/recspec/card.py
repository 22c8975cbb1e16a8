"""What a prepared dataset really holds: `check` finds what its files get wrong, `describe` draws its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.encoding import ENCODERS_FILE, VOCABULARIES, Encoder, VocabularyEncoder, read_encoders
from recspec.errors import DataError, RecspecError
from recspec.feature_spec import NO_FILES, Feature, FeatureSpec
from recspec.paths import confined
from recspec.storage import Array, Columns, Ragged, check_split, companions, open_split, published_records

COUNTED_IDS = 1 << 28
"""Largest id whose distinct values are counted: a byte for each id up to it."""

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def check(spec: FeatureSpec) -> None:
    """Read every file of a dataset once, in bounded memory, and tell all that contradicts the specification.

    Files that are missing or of another format, chunks of unequal length, empty splits; values of a wrong type, ids
    outside [0, cardinality), numbers that are not finite or don't fit; series that don't divide valid and test;
    catalogues and vocabularies that are missing or of another length than their ids.

    Raises:
        DataError: with every problem, each with its file, column and row.
    """
    problems: list[str] = []
    for split in spec.splits:
        found = check_split(spec, split)
        problems += found.problems
        problems += _series_problems(spec, split, found.num_rows)
    try:
        companions(spec)
    except DataError as error:
        problems += error.problems
    problems += companion_problems(spec)
    if problems:
        raise DataError.of(str(spec.folder), [*published_records(spec, problems), *problems])


def count_rows(spec: FeatureSpec) -> dict[str, int]:
    """Rows of each split, without reading their values."""
    return {split: open_split(spec, split).num_rows for split in spec.splits}


def _series_problems(spec: FeatureSpec, split: str, num_rows: int | None) -> list[str]:
    series = spec.metadata.get("test_samples_per_series")
    if not isinstance(series, int) or split not in ("valid", "test") or num_rows is None or num_rows % series == 0:
        return []
    over = f"{num_rows % series} rows are left over"
    return [
        f"split '{split}' has {num_rows} rows, no whole number of metadata.test_samples_per_series = {series}: {over}"
    ]


def companion_problems(spec: FeatureSpec) -> list[str]:
    """Catalogues, vocabularies and encoders that have other ids than the specification."""
    try:
        return [*_catalogue_problems(spec), *_vocabulary_problems(spec), *_encoder_problems(spec)]
    except RecspecError as error:  # a name that leads outside, a file that is damaged
        return [str(error)]


def _encoder_problems(spec: FeatureSpec) -> list[str]:
    """Encoders that give other ids than their features have."""
    problems = []
    for name, encoder in _encoders(spec).items():
        feature = spec.features.get(name)
        if feature is None or not isinstance(feature.cardinality, int):
            continue
        ids = _num_ids(encoder, spec.folder)
        if ids is None:
            problems.append(f"{ENCODERS_FILE}: '{name}' is encoded as a number; the specification has ids for it")
        elif ids != feature.cardinality:
            problems.append(
                f"{ENCODERS_FILE}: '{name}' is encoded as {ids} ids; its cardinality is {feature.cardinality}"
            )
    return problems


def _encoders(spec: FeatureSpec) -> dict[str, Encoder]:
    if "encoders" not in spec.companions or not spec.beside(ENCODERS_FILE).exists():
        return {}  # `companions` tells what is missing
    return read_encoders(spec.folder)


def _num_ids(encoder: Encoder, folder: Path) -> int | None:
    """How many ids an encoder gives, 0 included; None for numbers."""
    if isinstance(encoder, VocabularyEncoder):
        return 1 + _num_rows(confined(folder, f"{VOCABULARIES}/{encoder.vocabulary}.parquet")) + encoder.buckets
    return getattr(encoder, "cardinality", None)


def _num_rows(file: Path) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read as Parquet: {error}") from None


def _catalogue_problems(spec: FeatureSpec) -> list[str]:
    problems = []
    for role in ("user", "item"):
        path = spec.catalogue(role)
        if path is not None and spec.role(role):  # without features of the role nothing reads the catalogue
            name = spec.user_id if role == "user" else spec.item_id
            if isinstance(spec.features[name].cardinality, int):
                first = int(spec.reserves_unknown(name))
                problems += _length_problem(spec, path, name, spec.num_ids(name) - first, first) or _order_problem(
                    spec, path, name, first
                )
    return problems


def _vocabulary_problems(spec: FeatureSpec) -> list[str]:
    largest: dict[str, int] = {}
    for name, feature in spec.features.items():
        if isinstance(feature.cardinality, int):
            space = spec.vocabulary(name)
            largest[space] = max(largest.get(space, 0), feature.cardinality)
    encoded = {each.vocabulary for each in _encoders(spec).values() if isinstance(each, VocabularyEncoder)}
    files = {space: spec.vocabulary_file(space) for space in largest if space not in encoded}
    return [
        problem
        for space, path in files.items()
        if path is not None
        for problem in _length_problem(spec, path, space, largest[space] - 1, 1)
    ]


def _length_problem(spec: FeatureSpec, path: Path, name: str, expected: int, first: int) -> list[str]:
    """Row i of such a file is the id `first` + i."""
    file = path.relative_to(spec.folder)
    if not path.exists():
        return []  # `companions` tells what is missing
    try:
        num_rows = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{file}: can't be read as Parquet: {error}"]
    if num_rows == expected:
        return []
    return [f"{file}: has {num_rows} rows; expected {expected}, one for each id of '{name}'{' but 0' * first}"]


def _order_problem(spec: FeatureSpec, path: Path, name: str, first: int) -> list[str]:
    """Row i of a catalogue that has its ids as a column bears the id `first` + i there."""
    try:
        if not path.exists() or name not in pq.read_schema(path).names:
            return []
        ids = pq.read_table(path, columns=[name])[name].to_numpy()
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{path.relative_to(spec.folder)}: can't be read as Parquet: {error}"]
    wrong = np.flatnonzero(ids != np.arange(first, first + len(ids)))
    if not len(wrong):
        return []
    row = int(wrong[0])
    told = f"row {row + 1} is of '{name}' {ids[row]}; expected {first + row}, as rows stand in the order of ids"
    return [f"{path.relative_to(spec.folder)}: {told}"]


# --- the card --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitCard:
    """One split: how much it holds."""

    rows: int
    files: int
    bytes: int
    label_mean: float | None
    """Mean of the label: the share of positives where it is 0 or 1. None where the split has no label."""


@dataclass(frozen=True)
class FeatureCard:
    """One feature over all splits, as it is stored: ids are not shifted."""

    roles: tuple[str, ...]
    dtype: str
    cardinality: int | str | None
    vocabulary: str | None
    length: int | None
    minimum: float | None
    """None where a list feature holds no value at all."""
    maximum: float | None
    mean: float | None
    """Of numbers; None for ids."""
    distinct: int | None
    """Different ids that occur; None for numbers, without files, and where ids are too large to be counted."""
    zero_share: float | None
    """Share of values that are 0: of ids in data prepared by recspec, the unknown ones."""
    list_lengths: Mapping[str, float] | None
    """For a list, quantiles of the values a row holds and their mean."""


@dataclass(frozen=True)
class Card:
    """A dataset's figures."""

    folder: str
    splits: Mapping[str, SplitCard]
    features: Mapping[str, FeatureCard]
    notes: tuple[str, ...]
    """What is allowed, but perhaps not meant."""

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


def describe(spec: FeatureSpec) -> Card:
    """Read a dataset once, in bounded memory, and draw its card. Without files it says what the specification does.

    Raises:
        DataError: the first values found that contradict the specification; `check` finds all.
    """
    names = {name for split in spec.splits for name in spec.columns(split)} if spec.splits else spec.features
    figures = {name: _Figures(feature) for name, feature in spec.features.items() if name in names}
    splits = {}
    for split in spec.splits:
        reader = open_split(spec, split, shifted=False)
        label_sum = 0.0
        for columns in reader.batches():
            label_sum += _add(figures, columns, spec.label)
        paths = {spec.path(file) for chunk in spec.sources[split] for file in chunk.files}
        size = sum(path.stat().st_size for path in paths)
        label_mean = label_sum / reader.num_rows if spec.label in reader.features else None
        splits[split] = SplitCard(reader.num_rows, len(paths), size, label_mean)
    features = {name: figure.card(spec, name) for name, figure in figures.items()}
    return Card(str(spec.folder), splits, features, tuple(_notes(spec)))


def _add(figures: Mapping[str, _Figures], columns: Columns, label: str) -> float:
    """Count a block's values; the sum of its labels."""
    for name, column in columns.items():
        if isinstance(column, Ragged):
            figures[name].add_lengths(column.lengths)
            figures[name].add(column.values)
        else:
            figures[name].add(column)
    labels = columns.get(label, np.zeros(0))
    assert not isinstance(labels, Ragged)
    return float(labels.sum(dtype=np.float64))


def _notes(spec: FeatureSpec) -> list[str]:
    notes = [] if spec.splits else [NO_FILES]
    for name, feature in spec.features.items():
        if feature.cardinality == "auto":
            notes.append(f"cardinality of '{name}' is auto: models need a number, which `recspec transcode` finds")
    return notes


@dataclass
class _Figures:
    """Running figures of one feature."""

    feature: Feature
    count: int = 0
    total: float = 0.0
    zeros: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf
    seen: NDArray[np.bool_] | None = field(default_factory=lambda: np.zeros(0, np.bool_))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # rows of each list length

    def add(self, values: Array) -> None:
        if not len(values):
            return
        self.count += len(values)
        self.zeros += len(values) - int(np.count_nonzero(values))
        self.minimum = min(self.minimum, values.min().item())
        self.maximum = max(self.maximum, values.max().item())
        if self.feature.is_categorical:
            self._mark(values)
        else:
            self.total += float(values.sum(dtype=np.float64))

    def add_lengths(self, lengths: NDArray[np.int64]) -> None:
        counts = np.bincount(lengths, minlength=len(self.lengths))
        counts[: len(self.lengths)] += self.lengths
        self.lengths = counts

    def _mark(self, ids: Array) -> None:
        if self.seen is None or self.maximum >= COUNTED_IDS:
            self.seen = None
            return
        if self.maximum >= len(self.seen):
            declared = self.feature.cardinality if isinstance(self.feature.cardinality, int) else 0
            grown = np.zeros(min(COUNTED_IDS, max(declared, 2 * int(self.maximum) + 1)), np.bool_)
            grown[: len(self.seen)] = self.seen
            self.seen = grown
        self.seen[ids] = True

    def card(self, spec: FeatureSpec, name: str) -> FeatureCard:
        feature, some = self.feature, self.count > 0
        read = some or bool(self.lengths.any())
        return FeatureCard(
            roles=spec.roles_of(name),
            dtype=str(spec.storage_dtype(name)),
            cardinality=feature.cardinality,
            vocabulary=spec.vocabulary(name) if feature.is_categorical else None,
            length=feature.length,
            minimum=self.minimum if some else None,
            maximum=self.maximum if some else None,
            mean=self.total / self.count if some and not feature.is_categorical else None,
            distinct=int(self.seen.sum()) if feature.is_categorical and self.seen is not None and read else None,
            zero_share=self.zeros / self.count if some else None,
            list_lengths=_quantiles(self.lengths) if feature.is_list and read else None,
        )


def _quantiles(counts: NDArray[np.int64]) -> dict[str, float]:
    """Of a variable that was k in counts[k] cases: the least value that a share of the cases does not exceed."""
    total = int(counts.sum())
    below = np.cumsum(counts)
    ranks = {f"{share:.0%}": max(1, int(np.ceil(share * total))) for share in QUANTILES}
    found: dict[str, float] = {name: int(np.searchsorted(below, rank)) for name, rank in ranks.items()}
    return {**found, "mean": float(np.arange(len(counts)) @ counts / max(total, 1))}
