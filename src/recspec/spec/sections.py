"""The sections of a specification file as pydantic models."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from recspec.spec.aliases import Dtype, canonical_dtype, with_one_length

ChunkType = Literal["csv", "parquet", "split_binary", "torch_tensor", "tfrecord"]
CHUNK_TYPES: tuple[str, ...] = get_args(ChunkType)

Place = tuple[str | int, ...]
"""Keys and positions that lead to a value of the file."""


def _whole(value: object) -> object:
    """Accepts numpy's integers; refuses booleans, which Python counts as integers."""
    if isinstance(value, bool):
        raise ValueError("expected an integer")
    return operator.index(value) if isinstance(value, np.integer) else value


class Feature(BaseModel):
    """One column of a prepared dataset.

    Categorical when it has a cardinality (ids are integers in [0, cardinality)), numerical otherwise; a list when it
    has a length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Annotated[Dtype | None, BeforeValidator(canonical_dtype)] = Field(
        None, description="type of the stored values; int64 for ids and float32 for numbers when not given"
    )
    cardinality: Annotated[Annotated[int, Field(gt=0)] | Literal["auto"] | None, BeforeValidator(_whole)] = Field(
        None, description="number of ids, which lie in [0, cardinality); `auto` is resolved by `recspec transcode`"
    )
    length: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_whole)] = Field(
        None, description="for a list: the most values a row holds"
    )
    vocabulary: str | None = Field(
        None, description="name of the id space; features that name the same one share ids and an embedding table"
    )
    padding: Literal[0] | None = Field(
        None, description="0 when the files reserve id 0 for padding; when not given, a list's ids are shifted by one"
    )
    alpha: float | None = Field(None, gt=0, description="exponent of the ids' power law, for `recspec synthesize`")

    @model_validator(mode="before")
    @classmethod
    def _one_spelling_of_length(cls, data: object) -> object:
        return with_one_length(data) if isinstance(data, Mapping) else data

    @property
    def is_categorical(self) -> bool:
        """Whether the column holds ids."""
        return self.cardinality is not None

    @property
    def is_list(self) -> bool:
        """Whether a row holds several values."""
        return self.length is not None

    @property
    def storage_dtype(self) -> np.dtype[np.generic]:
        """The numpy type of the stored values."""
        return np.dtype(self.dtype or ("int64" if self.is_categorical else "float32"))


FileName = Annotated[str, WithJsonSchema({"type": "string", "format": "path"})]
"""A path relative to the folder of the YAML file, and confined to that folder."""


class Chunk(BaseModel):
    """Some columns of a split, in files of one type: rows 1..i in the first file, i+1..j in the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ChunkType = Field(description="format of the files")
    features: tuple[str, ...] = Field(description="the columns, in the order they stand in the files", min_length=1)
    files: tuple[FileName, ...] = Field(description="paths relative to the folder of this YAML file", min_length=1)


class Metadata(BaseModel):
    """The keys of `metadata` that have a fixed shape; any other key is allowed."""

    model_config = ConfigDict(extra="allow", strict=True)

    test_samples_per_series: int = Field(1, ge=1, description="rows of each ranking series in valid and test")
    cut_offs: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, min_length=1, description="the k of the metrics at k"
    )
    encoders: FileName | None = Field(None, description="file that says how a raw value becomes a prepared one")
    vocabularies: FileName | None = Field(None, description="folder with a Parquet file for each vocabulary")
    catalogues: dict[Literal["user", "item"], FileName] | None = Field(
        None, description="Parquet file with a row for each id from 1"
    )


def files_in(metadata: Mapping[str, object]) -> dict[Place, str]:
    """Place and path of each file or folder that the metadata names."""
    named: dict[Place, object] = {(key,): metadata.get(key) for key in ("encoders", "vocabularies")}
    catalogues = metadata.get("catalogues")
    if isinstance(catalogues, Mapping):
        named |= {("catalogues", str(role)): file for role, file in catalogues.items()}
    return {place: file for place, file in named.items() if isinstance(file, str)}


_EmptyDict = BeforeValidator(lambda value: {} if value is None else value)
_EmptyList = BeforeValidator(lambda value: [] if value is None else value)


class Sections(BaseModel):
    """A recspec Dataset Feature Specification: what a prepared dataset holds, where, and which part it plays."""

    model_config = ConfigDict(extra="forbid", title="Dataset Feature Specification")

    feature_spec: dict[str, Annotated[Feature, _EmptyDict]] = Field(description="feature name -> what the column is")
    source_spec: Annotated[dict[str, Annotated[list[Chunk], _EmptyList]], _EmptyDict] = Field(
        default_factory=dict, description="split name -> chunks, joined side by side"
    )
    channel_spec: Annotated[dict[str, Annotated[list[str], _EmptyList]], _EmptyDict] = Field(
        default_factory=dict, description="channel (role) -> feature names"
    )
    metadata: Annotated[dict[str, object], _EmptyDict] = Field(
        default_factory=dict, description="anything; recspec reads the keys that docs/feature_spec.md lists"
    )
