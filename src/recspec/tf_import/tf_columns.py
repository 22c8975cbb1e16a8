"""The feature columns of a TensorFlow model, as a JSON file describes them, and their features in recspec.

A checkpoint holds weights only, and a SavedModel holds its feature columns as hundreds of operations. The file names
the raw columns, buckets and vocabularies; docs/serving.md gives its form. TensorFlow's ids begin at 0 and recspec's at
1: id 0 is a missing value, for which TensorFlow adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recspec.base.errors import DataError, listed, nearest, quoted, unknown
from recspec.base.files import confined, read_json, read_text
from recspec.data.encoding import (
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
from recspec.feature_spec import Feature

MOST_BYTES = 1 << 28  # of the file of columns, and of a vocabulary's
IGNORED = ("-1",)  # values that TensorFlow drops from columns of whole numbers, as it drops empty texts
NumBuckets = Annotated[int, Field(gt=0, le=2**31 - 1)]
IdType = Literal["string", "int64", "int32"]


class _Column(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, description="the column's name in TensorFlow, and the raw column's")
    wide: bool = Field(False, description="whether the linear part reads it")
    role: Literal["user", "item", "context"] = Field("context", description="the feature's role in recspec")


class Numeric(_Column):
    """`numeric_column` of one number."""

    kind: Literal["numeric"]
    dtype: Literal["float32", "float64", "int32", "int64"] = "float32"
    deep: bool = Field(False, description="whether the MLP reads it")
    default_value: float | None = Field(None, description="in place of a missing value")
    mean: float = Field(0.0, description="of a normalizer_fn (x - mean) / std")
    std: float = Field(1.0, gt=0, description="of a normalizer_fn (x - mean) / std")

    @property
    def is_normalized(self) -> bool:
        """Whether the file states its normalizer_fn."""
        return bool({"mean", "std"} & self.model_fields_set)


class _Ids(_Column):
    embedding_dim: int | None = Field(None, gt=0, le=1 << 16, description="width of its embedding_column")
    indicator: bool = Field(False, description="whether the MLP reads it through an indicator_column")
    combiner: Literal["mean", "sum", "sqrtn"] = Field("mean", description="any: one value has one mean and sum")

    @model_validator(mode="after")
    def _enters_once(self) -> _Ids:
        if self.embedding_dim is not None and self.indicator:
            raise ValueError("has an embedding_dim and an indicator; the MLP takes one of them")
        return self


class Identity(_Ids):
    """`categorical_column_with_identity`."""

    kind: Literal["identity"]
    dtype: Literal["int64", "int32"] = "int64"
    num_buckets: NumBuckets
    default_value: int | None = Field(None, ge=0, description="in place of a value out of range")

    @model_validator(mode="after")
    def _default_is_an_id(self) -> Identity:
        if self.default_value is not None and self.default_value >= self.num_buckets:
            raise ValueError(f"default_value is {self.default_value}; expected one below num_buckets")
        return self


class Hash(_Ids):
    """`categorical_column_with_hash_bucket`."""

    kind: Literal["hash"]
    dtype: IdType = "string"
    num_buckets: NumBuckets = Field(description="hash_bucket_size")


class Words(_Ids):
    """`categorical_column_with_vocabulary_list` or `_file`."""

    kind: Literal["vocabulary"]
    dtype: IdType | None = None
    vocabulary: tuple[Annotated[str, Field(strict=True)], ...] | tuple[Annotated[int, Field(strict=True)], ...] = Field(
        min_length=1
    )
    num_oov_buckets: int = Field(0, ge=0, le=2**31 - 1)
    default_value: int = Field(-1, ge=-1, description="id of values outside the vocabulary; -1 is none")

    @property
    def is_whole(self) -> bool:
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
        if self.default_value >= num_weights(self):
            raise ValueError(f"default_value is {self.default_value}; expected one below {num_weights(self)}")
        return self


class Bucketized(_Ids):
    """`bucketized_column` of a `numeric_column`, whose raw column is `key`."""

    kind: Literal["bucketized"]
    key: str = Field(min_length=1, description="the number's raw column")
    boundaries: tuple[float, ...] = Field(min_length=1)
    deep: bool = Field(False, description="whether the MLP reads its buckets as they are, one-hot")

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
    num_buckets: NumBuckets = Field(description="hash_bucket_size")
    dtypes: dict[str, IdType] = Field({}, description="of keys without a column of their own; string by default")
    hash_key: int | None = None

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


def num_weights(column: Column) -> int:
    """Rows of a column's weights in the linear part: its ids, or 1 for a number."""
    match column:
        case Numeric():
            return 1
        case Words():
            return len(column.vocabulary) + column.num_oov_buckets
        case Bucketized():
            return len(column.boundaries) + 1
    return column.num_buckets


def embedding_dim(column: Column) -> int | None:
    """The width of a column's embedding, if it has one."""
    return None if isinstance(column, Numeric) else column.embedding_dim


def deep_width(column: Column) -> int:
    """The width of a column in the MLP's input."""
    return embedding_dim(column) or num_weights(column)


def deep_name(column: Column) -> str | None:
    """The name that sorts a column among the MLP's inputs; None if the MLP does not read it."""
    if isinstance(column, (Numeric, Bucketized)) and column.deep:
        return column.name
    if embedding_dim(column) is not None:
        return f"{column.name}_embedding"
    return f"{column.name}_indicator" if not isinstance(column, Numeric) and column.indicator else None


@dataclass(frozen=True)
class Columns:
    """All columns of a model, in the file's order."""

    columns: Sequence[Column]
    label: str = "label"

    @classmethod
    def load(cls, path: Path) -> Columns:
        """Read the file of columns."""
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
                name = value.get("name") if isinstance(value, dict) else None
                called = f" '{name}'" if isinstance(name, str) else ""
                problems += [f"columns[{place}]{called}{problem}" for problem in found]
            else:
                columns.append(found)
        problems += _fit_together(columns, str(label), whole=len(columns) == len(data["columns"]))
        DataError.refuse(str(path), problems)
        return cls(tuple(columns), str(label))

    @property
    def wide(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.wide)

    @property
    def deep(self) -> tuple[Column, ...]:
        """The columns of the MLP, in the order of its input: TensorFlow sorts them by name."""
        read = [column for column in self.columns if deep_name(column) is not None]
        return tuple(sorted(read, key=lambda column: str(deep_name(column))))

    @property
    def read(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.wide or deep_name(column) is not None)

    def features(self) -> dict[str, Feature]:
        """The feature of each column that is read."""
        ids = {column.name: None if isinstance(column, Numeric) else num_weights(column) + 1 for column in self.read}
        return {
            name: Feature(dtype="int64", cardinality=each) if each else Feature(dtype="float32")
            for name, each in ids.items()
        }

    def encoders(self) -> Encoders:
        """Encoders from raw values to recspec's ids: TensorFlow's plus one, or 0 if TensorFlow has none."""
        vocabularies = {}
        for column in self.read:
            if isinstance(column, Identity):
                vocabularies[column.name] = Vocabulary(pa.array(np.arange(column.num_buckets)))
            elif isinstance(column, Words):
                kind = pa.int64() if column.is_whole else pa.string()
                vocabularies[column.name] = Vocabulary(pa.array(column.vocabulary, kind))
        return Encoders({column.name: self._encoder(column) for column in self.read}, vocabularies)

    def _encoder(self, column: Column) -> Encoder:
        match column:
            case Numeric(is_normalized=True):
                return ScaleEncoder(missing=column.default_value, mean=column.mean, std=column.std)
            case Numeric():
                return NumberEncoder(missing=column.default_value)
            case Identity():
                otherwise = 0 if column.default_value is None else column.default_value + 1
                return VocabularyEncoder(vocabulary=column.name, missing_values=IGNORED, otherwise=otherwise)
            case Hash():
                whole = column.dtype != "string"
                missing = IGNORED if whole else ()
                return HashEncoder(cardinality=column.num_buckets + 1, whole=whole, missing_values=missing)
            case Words(name=name, num_oov_buckets=buckets):
                missing, otherwise = IGNORED if column.is_whole else (), column.default_value + 1
                return VocabularyEncoder(vocabulary=name, missing_values=missing, buckets=buckets, otherwise=otherwise)
            case Bucketized():
                return BucketEncoder(column=column.key, boundaries=column.boundaries)
        return self._cross_encoder(column)

    def _cross_encoder(self, cross: Cross) -> CrossEncoder:
        by_name = {other.name: other for other in self.columns}
        others = {key: by_name.get(key) for key in cross.keys}
        return CrossEncoder(
            columns=tuple(_raw_column(key, other) for key, other in others.items()),
            cardinality=cross.num_buckets + 1,
            boundaries={other.key: other.boundaries for other in others.values() if isinstance(other, Bucketized)},
            whole=tuple(key for key, other in others.items() if _is_whole(cross, key, other)),
            needs_all=True,
        )


def _raw_column(key: str, column: Column | None) -> str:
    return column.key if isinstance(column, Bucketized) else key


def _is_whole(cross: Cross, key: str, column: Column | None) -> bool:
    """Whether a key of a cross is a raw column of whole numbers."""
    if isinstance(column, Words):
        return column.is_whole
    if isinstance(column, (Identity, Hash)):
        return column.dtype != "string"
    return not isinstance(column, Bucketized) and cross.dtypes.get(key, "string") != "string"


def _fit_together(columns: Sequence[Column], label: str, *, whole: bool) -> Iterator[str]:
    """Problems between columns; unless the file is `whole`, none that a malformed column may have caused."""
    by_name: dict[str, Column] = {}
    for column in columns:
        if column.name in by_name:
            yield f"column '{column.name}' stands more than once; expected once"
        by_name[column.name] = column
    if label in by_name:
        yield f"the label is called '{label}', as a column is; name another one with \"label\""
    keys = {key for column in columns if isinstance(column, Cross) for key in column.keys}
    keys |= {column.key for column in columns if isinstance(column, Bucketized)}
    for column in columns:
        if isinstance(column, Cross):
            yield from _fit_keys(column, by_name)
        if whole and not column.wide and deep_name(column) is None and column.name not in keys:
            how = '"deep": true' if isinstance(column, Numeric) else 'an "embedding_dim" or "indicator": true'
            yield f"column '{column.name}' is read by neither part; give it \"wide\": true, or {how}"
    for role in ("user", "item"):
        own = [column for column in columns if column.role == role]
        if own and all(isinstance(column, (Numeric, Cross)) for column in own):
            yield f"the role '{role}' has no identity, hash, vocabulary or bucketized column; expected its id"


def _fit_keys(cross: Cross, by_name: Mapping[str, Column]) -> Iterator[str]:
    for key in cross.keys:
        column = by_name.get(key)
        if isinstance(column, (Numeric, Cross)):
            instead = "its bucketized column" if isinstance(column, Numeric) else "its keys"
            yield f"column '{cross.name}': the key '{key}' is a {column.kind} column; name {instead} instead"
        if column is not None and key in cross.dtypes:
            yield f"column '{cross.name}': dtypes names '{key}', whose own column says it"
    if len({_raw_column(key, by_name.get(key)) for key in cross.keys}) < len(cross.keys):
        yield f"column '{cross.name}': two keys are made from one raw column, which is not mapped"


def _json(path: Path) -> Any:
    if not path.exists():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: can't be read: no such file{nearest(path.name, known)}")
    return read_json(path, most=MOST_BYTES)


def _column(value: object, folder: Path) -> Column | list[str]:
    """A column, or its problems."""
    if not isinstance(value, dict):
        return [f" is {quoted(value)}; expected an object with name and kind"]
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return [f": has no kind; one of {listed(KINDS)}" if kind is None else f": {unknown('kind', str(kind), KINDS)}"]
    value = dict(value)
    if kind == "vocabulary" and "vocabulary_file" in value:
        if "vocabulary" in value:
            return [": has a vocabulary and a vocabulary_file; expected one of them"]
        try:
            value["vocabulary"] = _lines(folder, str(value.pop("vocabulary_file")), value.get("dtype", "string"))
        except DataError as error:
            return [f".vocabulary_file: {error}"]
    try:
        return KINDS[kind].model_validate(value)
    except ValidationError as error:
        fields = [*KINDS[kind].model_fields, *(["vocabulary_file"] if kind == "vocabulary" else [])]
        return list(dict.fromkeys(_told(found, fields) for found in error.errors()))


def _lines(folder: Path, name: str, dtype: object) -> list[str] | list[int]:
    """The values of a vocabulary's file, one a line, which lies in the folder of the file of columns."""
    file = confined(folder, name)
    lines = read_text(file, most=MOST_BYTES).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    try:
        return lines if dtype == "string" else [int(line) for line in lines]
    except ValueError as error:
        raise DataError(f"{file}: can't be read as a vocabulary, one value a line: {error}") from None


def _told(found: Any, fields: Sequence[str]) -> str:
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
    return f"{shown} is {quoted(found['input'])}: {what}"
