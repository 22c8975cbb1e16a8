"""The feature columns of a TensorFlow model, as a JSON file describes them, and what they are in recspec.

A checkpoint holds weights only, and a SavedModel its feature columns as hundreds of operations; which raw column is
hashed into how many buckets, or what words a vocabulary holds, this file says. docs/serving.md gives its form. Ids
differ by one: TensorFlow's begin at 0, recspec's at 1, and 0 is a missing value's, for which TensorFlow adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recspec.encoding import (
    CROSS_KEY,
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Vocabulary,
    VocabularyEncoder,
)
from recspec.errors import DataError, listed, nearest, unknown
from recspec.spec import Feature

MOST_BYTES = 1 << 28
"""Of the file of columns, and of a vocabulary's."""

MOST_BUCKETS = 2**31 - 1

IGNORED = ("-1",)
"""What TensorFlow drops from dense columns of whole numbers, as it drops empty texts."""

Part = Literal["user", "item", "context"]
Whole = Literal["int64", "int32"]


class _Column(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, description="the column's name in TensorFlow, and the raw column's")
    wide: bool = Field(False, description="whether the linear part reads it")
    role: Part = Field("context", description="the feature's role in recspec")

    @property
    def raw(self) -> tuple[str, ...]:
        """The raw columns it is made from."""
        return (self.name,)

    @property
    def num_weights(self) -> int:
        """Rows of its weights in the linear part; ids where it is categorical."""
        return 1

    @property
    def deep_name(self) -> str | None:
        """The name that it is sorted by among the MLP's inputs; None where the MLP does not read it."""
        return None

    @property
    def deep_width(self) -> int:
        """Numbers that it takes in the MLP's input."""
        return 1


class Numeric(_Column):
    """`numeric_column` of one number."""

    kind: Literal["numeric"]
    dtype: Literal["float32", "float64", "int32", "int64"] = "float32"
    deep: bool = Field(False, description="whether the MLP reads it")
    default_value: float | None = Field(None, description="in place of a missing value")
    mean: float = Field(0.0, description="of a normalizer_fn (x - mean) / std")
    std: float = Field(1.0, gt=0, description="of a normalizer_fn (x - mean) / std")

    @property
    def deep_name(self) -> str | None:
        return self.name if self.deep else None

    @property
    def is_normalized(self) -> bool:
        """Whether the file says what its normalizer_fn does."""
        return bool({"mean", "std"} & self.model_fields_set)


class _Ids(_Column):
    embedding_dim: int | None = Field(None, gt=0, le=1 << 16, description="width of its embedding_column")
    indicator: bool = Field(False, description="whether the MLP reads it through an indicator_column")
    combiner: Literal["mean", "sum", "sqrtn"] = Field("mean", description="any: of one value all are the same")

    @property
    def deep_name(self) -> str | None:
        if self.embedding_dim is not None:
            return f"{self.name}_embedding"
        return f"{self.name}_indicator" if self.indicator else None

    @property
    def deep_width(self) -> int:
        return self.embedding_dim or self.num_weights

    @model_validator(mode="after")
    def _enters_once(self) -> _Ids:
        if self.embedding_dim is not None and self.indicator:
            raise ValueError("has an embedding_dim and an indicator; the MLP takes one of them")
        return self


class Identity(_Ids):
    """`categorical_column_with_identity`."""

    kind: Literal["identity"]
    dtype: Whole = "int64"
    num_buckets: int = Field(gt=0, le=MOST_BUCKETS)
    default_value: int | None = Field(None, ge=0, description="in place of a value out of range")

    @property
    def num_weights(self) -> int:
        return self.num_buckets

    @model_validator(mode="after")
    def _default_is_an_id(self) -> Identity:
        if self.default_value is not None and self.default_value >= self.num_buckets:
            raise ValueError(f"default_value is {self.default_value}; expected one below num_buckets")
        return self


class Hash(_Ids):
    """`categorical_column_with_hash_bucket`."""

    kind: Literal["hash"]
    dtype: Literal["string", "int64", "int32"] = "string"
    num_buckets: int = Field(gt=0, le=MOST_BUCKETS, description="hash_bucket_size")

    @property
    def num_weights(self) -> int:
        return self.num_buckets


class Words(_Ids):
    """`categorical_column_with_vocabulary_list` or `_file`."""

    kind: Literal["vocabulary"]
    dtype: Literal["string", "int64", "int32"] | None = None
    vocabulary: tuple[Annotated[str, Field(strict=True)], ...] | tuple[Annotated[int, Field(strict=True)], ...] = Field(
        min_length=1
    )
    num_oov_buckets: int = Field(0, ge=0, le=MOST_BUCKETS)
    default_value: int = Field(-1, ge=-1, description="the id of values that the vocabulary does not hold; -1 is none")

    @property
    def num_weights(self) -> int:
        return len(self.vocabulary) + self.num_oov_buckets

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.vocabulary[0], int)

    @model_validator(mode="after")
    def _fits_together(self) -> Words:
        if len(set(self.vocabulary)) < len(self.vocabulary):
            twice = next(value for value in self.vocabulary if self.vocabulary.count(value) > 1)
            raise ValueError(f"vocabulary holds {twice!r} more than once")
        if self.dtype is not None and (self.dtype == "string") == self.is_whole:
            raise ValueError(
                f"dtype is {self.dtype}, but the vocabulary holds {'numbers' if self.is_whole else 'texts'}"
            )
        if self.num_oov_buckets and self.default_value != -1:
            raise ValueError("has num_oov_buckets and a default_value; TensorFlow takes one of them")
        if self.default_value >= self.num_weights:
            raise ValueError(f"default_value is {self.default_value}; expected one below {self.num_weights}")
        return self


class Bucketized(_Ids):
    """`bucketized_column` of a `numeric_column`, whose raw column is `key`."""

    kind: Literal["bucketized"]
    key: str = Field(min_length=1, description="the number's raw column")
    boundaries: tuple[float, ...] = Field(min_length=1)
    deep: bool = Field(False, description="whether the MLP reads its buckets as they are, one-hot")

    @property
    def raw(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def num_weights(self) -> int:
        return len(self.boundaries) + 1

    @property
    def deep_name(self) -> str | None:
        return self.name if self.deep else super().deep_name

    @model_validator(mode="after")
    def _fits_together(self) -> Bucketized:
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("boundaries must rise")
        if self.deep and (self.indicator or self.embedding_dim is not None):
            raise ValueError("has deep beside an indicator or an embedding_dim; the MLP takes one of them")
        return self


class Cross(_Ids):
    """`crossed_column`."""

    kind: Literal["cross"]
    keys: tuple[str, ...] = Field(min_length=2, description="raw columns and bucketized ones, in hashing order")
    num_buckets: int = Field(gt=0, le=MOST_BUCKETS, description="hash_bucket_size")
    dtypes: dict[str, Literal["string", "int64", "int32"]] = Field(
        {}, description="of keys that are no column of their own; string when not given"
    )
    hash_key: int | None = None

    @property
    def raw(self) -> tuple[str, ...]:
        return self.keys

    @property
    def num_weights(self) -> int:
        return self.num_buckets

    @model_validator(mode="after")
    def _fits_together(self) -> Cross:
        if len(set(self.keys)) < len(self.keys):
            raise ValueError("keys holds a name more than once")
        if strange := [name for name in self.dtypes if name not in self.keys]:
            raise ValueError(f"dtypes: {unknown('key', strange, self.keys)}")
        if self.hash_key not in (None, CROSS_KEY):
            raise ValueError(f"hash_key is {self.hash_key}; only TensorFlow's default, {CROSS_KEY}, is mapped")
        return self


Column: TypeAlias = Numeric | Identity | Hash | Words | Bucketized | Cross
KINDS: Mapping[str, type[Column]] = {
    "numeric": Numeric,
    "identity": Identity,
    "hash": Hash,
    "vocabulary": Words,
    "bucketized": Bucketized,
    "cross": Cross,
}


@dataclass(frozen=True)
class Columns:
    """All columns of a model, in the file's order."""

    columns: Sequence[Column]
    label: str = "label"

    @classmethod
    def load(cls, path: Path) -> Columns:
        """Read the file of columns.

        Raises:
            DataError: with every problem, each with its place.
        """
        data = _json(path)
        if not isinstance(data, dict) or not isinstance(data.get("columns"), list) or not data["columns"]:
            raise DataError(f'{path}: expected an object with a list "columns", one object a feature column')
        problems = [unknown("key", key, ("columns", "label")) for key in data if key not in ("columns", "label")]
        label = data.get("label", "label")
        if not isinstance(label, str) or not label:
            problems.append(f"label is {label!r}; expected a name")
        columns: list[Column] = []
        for place, value in enumerate(data["columns"]):
            found = _column(value, path.parent)
            if isinstance(found, list):
                problems += [f"columns[{place}]{_called(value)}{problem}" for problem in found]
            else:
                columns.append(found)
        problems += _fit_together(columns, str(label), whole=len(columns) == len(data["columns"]))
        if problems:
            raise DataError.of(str(path), problems)
        return cls(tuple(columns), str(label))

    @property
    def wide(self) -> tuple[Column, ...]:
        """Those that the linear part reads."""
        return tuple(column for column in self.columns if column.wide)

    @property
    def deep(self) -> tuple[Column, ...]:
        """Those that the MLP reads, in the order in which TensorFlow lays them side by side: sorted by name."""
        return tuple(sorted((c for c in self.columns if c.deep_name is not None), key=lambda c: str(c.deep_name)))

    @property
    def read(self) -> tuple[Column, ...]:
        """Those that either part reads."""
        return tuple(column for column in self.columns if column.wide or column.deep_name is not None)

    def features(self) -> dict[str, Feature]:
        """What each column that is read is in a prepared dataset."""
        return {
            column.name: Feature(dtype="float32")
            if isinstance(column, Numeric)
            else Feature(dtype="int64", cardinality=column.num_weights + 1)
            for column in self.read
        }

    def encoders(self) -> Encoders:
        """How raw values become recspec's ids, which are TensorFlow's plus one, and 0 where TensorFlow has none."""
        vocabularies = {}
        for column in self.read:
            if isinstance(column, Identity):
                vocabularies[column.name] = Vocabulary(pa.array(np.arange(column.num_buckets)))
            elif isinstance(column, Words):
                kind = pa.int64() if column.is_whole else pa.string()
                vocabularies[column.name] = Vocabulary(pa.array(column.vocabulary, kind))
        return Encoders({column.name: self._encoder(column) for column in self.read}, vocabularies)

    def _encoder(self, column: Column) -> Encoder:
        if isinstance(column, Numeric):
            if column.is_normalized:
                return ScaleEncoder(missing=column.default_value, mean=column.mean, std=column.std)
            return NumberEncoder(missing=column.default_value)
        if isinstance(column, Identity):
            otherwise = 0 if column.default_value is None else column.default_value + 1
            return VocabularyEncoder(vocabulary=column.name, missing_values=IGNORED, otherwise=otherwise)
        if isinstance(column, Hash):
            whole = column.dtype != "string"
            return HashEncoder(cardinality=column.num_buckets + 1, whole=whole, missing_values=IGNORED if whole else ())
        if isinstance(column, Words):
            return VocabularyEncoder(
                vocabulary=column.name,
                missing_values=IGNORED if column.is_whole else (),
                buckets=column.num_oov_buckets,
                otherwise=column.default_value + 1,
            )
        if isinstance(column, Bucketized):
            return BucketEncoder(column=column.key, boundaries=column.boundaries)
        return self._cross_encoder(column)

    def _cross_encoder(self, column: Cross) -> CrossEncoder:
        by_name = {other.name: other for other in self.columns}
        raw: list[str] = []
        boundaries: dict[str, tuple[float, ...]] = {}
        whole = []
        for key in column.keys:
            other = by_name.get(key)
            raw.append(other.key if isinstance(other, Bucketized) else key)
            if isinstance(other, Bucketized):
                boundaries[other.key] = other.boundaries
            elif _dtype_of_key(column, key, other) != "string":
                whole.append(key)
        cardinality = column.num_buckets + 1
        return CrossEncoder(
            columns=tuple(raw), cardinality=cardinality, boundaries=boundaries, whole=tuple(whole), needs_all=True
        )


def _dtype_of_key(cross: Cross, key: str, column: Column | None) -> str:
    """What a raw column that is crossed holds."""
    if isinstance(column, Words):
        return "int64" if column.is_whole else "string"
    if isinstance(column, (Identity, Hash)):
        return column.dtype
    return cross.dtypes.get(key, "string")


def _fit_together(columns: Sequence[Column], label: str, *, whole: bool) -> Iterator[str]:
    """Problems between columns; without the `whole` file none that a column left out may have made."""
    by_name: dict[str, Column] = {}
    for column in columns:
        if column.name in by_name:
            yield f"column '{column.name}' stands more than once; expected once"
        by_name[column.name] = column
    if label in by_name:
        yield f"the label is called '{label}', as a column is; name another one with \"label\""
    keys = {key for column in columns if isinstance(column, (Cross, Bucketized)) for key in column.raw}
    for column in columns:
        if isinstance(column, Cross):
            yield from _fit_keys(column, by_name)
        if whole and not column.wide and column.deep_name is None and column.name not in keys:
            how = '"deep": true' if isinstance(column, Numeric) else 'an "embedding_dim" or "indicator": true'
            yield f"column '{column.name}' is read by neither part; give it \"wide\": true, or {how}"
    for role in ("user", "item"):
        own = [column for column in columns if column.role == role]
        if own and all(isinstance(column, (Numeric, Cross)) for column in own):
            yield f"the role '{role}' has no identity, hash, vocabulary or bucketized column; expected its id"


def _fit_keys(cross: Cross, by_name: Mapping[str, Column]) -> Iterator[str]:
    raw: list[str] = []
    for key in cross.keys:
        column = by_name.get(key)
        if isinstance(column, (Numeric, Cross)):
            instead = "its bucketized column" if isinstance(column, Numeric) else "its keys"
            yield f"column '{cross.name}': the key '{key}' is a {column.kind} column; name {instead} instead"
        if column is not None and key in cross.dtypes:
            yield f"column '{cross.name}': dtypes names '{key}', whose own column says it"
        raw.append(column.key if isinstance(column, Bucketized) else key)
    if len(set(raw)) < len(raw):
        yield f"column '{cross.name}': two keys are made from one raw column, which is not mapped"


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: has more than {MOST_BYTES:,} bytes, which is no file of columns")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: can't be read: {error.strerror}{nearest(path.name, known)}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None


def _column(value: object, folder: Path) -> Column | list[str]:
    """A column, or what is wrong with it."""
    if not isinstance(value, dict):
        return [f" is {str(value)[:60]!r}; expected an object with name and kind"]
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return [
            f": {unknown('kind', str(kind), KINDS)}" if kind is not None else f": has no kind; one of {listed(KINDS)}"
        ]
    value = dict(value)
    if kind == "vocabulary" and "vocabulary_file" in value:
        if "vocabulary" in value:
            return [": has a vocabulary and a vocabulary_file; expected one of them"]
        try:
            value["vocabulary"] = _lines(folder / str(value.pop("vocabulary_file")), value.get("dtype", "string"))
        except DataError as error:
            return [f".vocabulary_file: {error}"]
    try:
        return KINDS[kind].model_validate(value)
    except ValidationError as error:
        fields = [*KINDS[kind].model_fields, *(["vocabulary_file"] if kind == "vocabulary" else [])]
        return list(dict.fromkeys(_told(found, fields) for found in error.errors()))


def _lines(file: Path, dtype: object) -> list[str] | list[int]:
    """The values of a vocabulary's file, one a line."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(f"{file}: has more than {MOST_BYTES:,} bytes")
        lines = file.read_text(encoding="utf-8").split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        return lines if dtype == "string" else [int(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read as a vocabulary, one value a line: {error}") from None


def _told(found: Any, fields: Sequence[str]) -> str:
    """One problem that pydantic found."""
    place, what = found["loc"], found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return f": {unknown('key', str(place[0]), fields)}"
    if found["type"] == "missing":
        return f": has no {place[0]}"
    if not place:
        return f": {what}"
    if place[0] == "vocabulary":
        return ".vocabulary: expected texts, or whole numbers, at least one"
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return f"{shown} is {str(found['input'])[:60]!r}: {what}"


def _called(value: object) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return f" '{name}'" if isinstance(name, str) else ""


assert set(KINDS.values()) == set(get_args(Column)), "a kind of column is not in the table"
