"""The sections of a specification file as pydantic models, which read every published spelling."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from recspec.base.errors import listed

Place = tuple[str | int, ...]  # keys and positions that lead to a value of the file
ChunkType = Literal["csv", "parquet", "split_binary", "torch_tensor", "tfrecord"]
CHUNK_TYPES: tuple[str, ...] = get_args(ChunkType)

Dtype = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"]
Role = Literal["user", "item", "context", "history", "negative_history", "label", "group"]

DTYPES: tuple[str, ...] = get_args(Dtype)
ROLES: tuple[Role, ...] = get_args(Role)
SIGNALS = ("valid_signals", "test_signals")
"""Splits with events of types that are not predicted, from the time of valid on and from that of test on."""
LIST_LENGTH_SPELLINGS = ("dimensions", "max_hotness", "hotness", "max_len")
MOST_IDS = 2**63 - 1
"""The largest cardinality: every id, also one raised by a shift, then fits int64, and so does the number of ids."""
MOST_VALUES = 2**31 - 1
"""The largest number of values of a row, and of any count in the metadata."""


@dataclass(frozen=True)
class Channel:
    """The role behind a channel name, and what its features must be (None: either)."""

    role: Role
    categorical: bool | None = None
    is_list: bool | None = None


CHANNELS: Mapping[str, Channel] = {
    "user": Channel("user"),
    "item": Channel("item"),
    "context": Channel("context"),
    "group": Channel("group", is_list=False),
    "label": Channel("label", is_list=False),
    "history": Channel("history", is_list=True),
    "negative_history": Channel("negative_history", is_list=True),
    # published names
    "user_ch": Channel("user", categorical=True),
    "item_ch": Channel("item", categorical=True),
    "label_ch": Channel("label", is_list=False),
    "categorical": Channel("context", categorical=True),
    "numerical": Channel("context", categorical=False),
    "onehot_categorical": Channel("context", categorical=True, is_list=False),
    "multihot_categorical": Channel("context", categorical=True, is_list=True),
    "map": Channel("group", is_list=False),
    "user_features": Channel("user"),
    "target_item_features": Channel("item", categorical=True),
    "positive_history": Channel("history", categorical=True, is_list=True),
    "numeric_inputs": Channel("context", categorical=False),
    "categorical_user_inputs": Channel("user", categorical=True),
    "categorical_item_inputs": Channel("item", categorical=True),
    "numeric_user_inputs": Channel("user", categorical=False),
    "numeric_item_inputs": Channel("item", categorical=False),
}

_TORCH_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "char": "int8",
    "byte": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "bool_": "bool",
}


def canonical_dtype(value: object) -> object:
    """`int64` for `torch.int64`, `numpy.int64`, `np.int64`, `long` and `i8`; a bare word means what torch means."""
    if not isinstance(value, str):
        return value
    name = value.strip().rsplit(".", 1)[-1].lower()
    name = _TORCH_DTYPES.get(name, name)
    if name in DTYPES:
        return name
    try:
        code = np.dtype(name)
    except (TypeError, ValueError):
        return value
    return code.name if code.name in DTYPES and code.byteorder != ">" else value


def _whole(value: object) -> object:
    """Accepts numpy's integers; refuses booleans, which Python counts as integers."""
    if isinstance(value, bool):
        raise ValueError("expected an integer")
    return operator.index(value) if isinstance(value, np.integer) else value


def _true_or_nothing(value: object) -> object:
    """`vector: false` says what leaving it out says."""
    return None if value is False else value


class Feature(BaseModel):
    """One column of a prepared dataset.

    Categorical when it has a cardinality (ids are integers in [0, cardinality)), numerical otherwise; a list when it
    has a length; a vector when every row of a list of numbers holds exactly `length` of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Annotated[Dtype | None, BeforeValidator(canonical_dtype)] = Field(
        None, description="type of the stored values; int64 for ids and float32 for numbers when not given"
    )
    cardinality: Annotated[
        Annotated[int, Field(gt=0, le=MOST_IDS)] | Literal["auto"] | None, BeforeValidator(_whole)
    ] = Field(
        None, description="number of ids, which lie in [0, cardinality); `auto` is resolved by `recspec transcode`"
    )
    length: Annotated[Annotated[int, Field(gt=0, le=MOST_VALUES)] | None, BeforeValidator(_whole)] = Field(
        None, description="for a list: the most values a row holds"
    )
    vector: Annotated[
        Literal[True] | None, BeforeValidator(_true_or_nothing), WithJsonSchema({"type": ["boolean", "null"]})
    ] = Field(None, description="true for numbers of which every row holds exactly `length`, such as an embedding")
    vocabulary: str | None = Field(
        None, description="name of the id space; features that name the same one share ids and an embedding table"
    )
    padding: Annotated[Literal[0] | None, BeforeValidator(_whole)] = Field(
        None, description="0 when the files reserve id 0 for padding; when not given, a list's ids are shifted by one"
    )
    alpha: Annotated[float | None, BeforeValidator(_whole)] = Field(
        None, gt=0, allow_inf_nan=False, description="exponent of the ids' power law, for `recspec synthesize`"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_spelling_of_length(cls, data: object) -> object:
        """`dimensions: [100]` is 100. `hotness: 1` marks a scalar, in files that give every feature a hotness."""
        if not isinstance(data, Mapping):
            return data
        spellings = ("length", *LIST_LENGTH_SPELLINGS)
        given = {key: data[key] for key in spellings if data.get(key) is not None}
        if len(given) > 1:
            raise ValueError(f"its length is given as {listed(given)}; expected one of them")
        rest = {key: value for key, value in data.items() if key not in spellings}
        for spelling, value in given.items():
            length = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
            if not (spelling == "hotness" and length == 1 and not isinstance(length, bool)):
                rest["length"] = length
        return rest

    @property
    def is_categorical(self) -> bool:
        """Whether the column holds ids."""
        return self.cardinality is not None

    @property
    def is_list(self) -> bool:
        """Whether a row holds several values."""
        return self.length is not None

    @property
    def is_vector(self) -> bool:
        """Whether every row holds exactly `length` numbers."""
        return self.vector is not None

    @property
    def storage_dtype(self) -> np.dtype[np.generic]:
        """The numpy type of the stored values."""
        return np.dtype(self.dtype or ("int64" if self.is_categorical else "float32"))


FileName = Annotated[str, WithJsonSchema({"type": "string", "format": "path"})]
"""A path relative to the folder of the YAML file, and confined to it."""


class Chunk(BaseModel):
    """Some columns of a split, in files of one type: rows 1..i in the first file, i+1..j in the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ChunkType = Field(description="format of the files")
    features: tuple[str, ...] = Field(description="the columns, in the order they stand in the files", min_length=1)
    files: tuple[FileName, ...] = Field(description="paths relative to the folder of this YAML file", min_length=1)


class Metadata(BaseModel):
    """The keys of `metadata` that have a fixed shape; any other key is allowed."""

    model_config = ConfigDict(extra="allow", strict=True)

    test_samples_per_series: int = Field(
        1, ge=1, le=MOST_VALUES, description="rows of each ranking series in valid and test"
    )
    train_negatives: int | None = Field(
        None, ge=0, le=MOST_VALUES, description="rows of label 0 after each positive of train"
    )
    cut_offs: list[Annotated[int, Field(ge=1, le=MOST_VALUES)]] | None = Field(
        None, min_length=1, description="the k of the metrics at k"
    )
    encoders: FileName | None = Field(None, description="file that says how a raw value becomes a prepared one")
    vocabularies: FileName | None = Field(None, description="folder with a Parquet file for each vocabulary")
    catalogues: dict[Literal["user", "item"], FileName] | None = Field(
        None, description="Parquet file with a row for each id from 1"
    )
    seen: FileName | None = Field(None, description="Parquet file of the items that each user acted on, in any split")
    dislikes: FileName | None = Field(None, description="likewise of those that the user disliked")


def files_in(metadata: Mapping[str, object]) -> dict[Place, str]:
    """Place and path of each file or folder that the metadata names."""
    named: dict[Place, object] = {(key,): metadata.get(key) for key in ("encoders", "vocabularies", "seen", "dislikes")}
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


def json_schema() -> dict[str, object]:
    """JSON Schema of the YAML file; it accepts every spelling that `FeatureSpec.load` reads."""
    schema = Sections.model_json_schema()
    sections = schema["properties"]
    sections["metadata"] |= {"properties": Metadata.model_json_schema()["properties"]}
    sections["channel_spec"]["propertyNames"] = {"enum": list(CHANNELS)}
    feature = schema["$defs"]["Feature"]["properties"]
    length = {"type": "integer", "minimum": 1, "maximum": MOST_VALUES}
    any_of = [length, {"type": "array", "items": length, "minItems": 1, "maxItems": 1}, {"type": "null"}]
    for spelling in LIST_LENGTH_SPELLINGS:
        feature[spelling] = {"description": "another spelling of `length`", "anyOf": any_of}
    feature["dtype"] = {"type": ["string", "null"], "description": f"one of {', '.join(DTYPES)}; torch. and numpy. too"}
    for section in ("feature_spec", "source_spec", "channel_spec"):  # `label:` with nothing after it is empty
        sections[section]["additionalProperties"] = _or_null(sections[section]["additionalProperties"])
    for section in ("source_spec", "channel_spec", "metadata"):
        sections[section] = _or_null(sections[section])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_null(schema: Mapping[str, object]) -> dict[str, object]:
    described = {key: schema[key] for key in ("description", "default") if key in schema}
    return {**described, "anyOf": [{k: v for k, v in schema.items() if k not in described}, {"type": "null"}]}
