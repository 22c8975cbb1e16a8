"""The Dataset Feature Specification: one YAML file that says what a prepared dataset holds.

`FeatureSpec.load` reads the published shape (`feature_spec`, `source_spec`, `channel_spec`, `metadata`) and every
spelling in use, checks all of it, and gives one immutable object in one spelling. `docs/feature_spec.md` is the format
to the letter.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from recspec.errors import SpecError, listed, nearest, unknown
from recspec.outputs import whole_file
from recspec.paths import PathError, confined, local, read_text

FILE_NAME = "feature_spec.yaml"
RAW_SUFFIXES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson", ".gz", ".zip")
"""Ends of the names of files that hold rows; a user may name one in place of the dataset prepared from it."""

Dtype = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"]
ChunkType = Literal["csv", "parquet", "split_binary", "torch_tensor", "tfrecord"]
Role = Literal["user", "item", "context", "history", "negative_history", "label", "group"]

DTYPES: tuple[str, ...] = get_args(Dtype)
CHUNK_TYPES: tuple[str, ...] = get_args(ChunkType)
ROLES: tuple[str, ...] = get_args(Role)
SPLITS = ("train", "valid", "test")
LIST_LENGTH_SPELLINGS = ("dimensions", "max_hotness", "hotness", "max_len")
NO_FILES = "the specification names no files; `recspec synthesize` makes some"
MAX_DEPTH = 50  # of lists and mappings inside one another
MAX_BYTES = 16 << 20  # of the file
MAX_VALUES = 1_000_000  # in the file once its aliases are followed: far beyond any real one, and quick to refuse


@dataclass(frozen=True)
class Channel:
    """What a channel name of the file means: the role, and what its features must be (None: either)."""

    role: Role
    categorical: bool | None = None
    is_list: bool | None = None


CHANNELS: Mapping[str, Channel] = MappingProxyType(
    {
        **{role: Channel(role) for role in ("user", "item", "context")},
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
)


_DTYPE_SPELLINGS = {
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


def _canonical_dtype(value: object) -> object:
    """`torch.int64`, `numpy.int64`, `np.int64`, `long` and `i8` are all int64; a bare word means what torch means."""
    if not isinstance(value, str):
        return value
    name = value.strip().rsplit(".", 1)[-1].lower()
    name = _DTYPE_SPELLINGS.get(name, name)
    if name in DTYPES:
        return name
    try:
        code = np.dtype(name)
    except (TypeError, ValueError):
        return value
    return code.name if code.name in DTYPES and code.byteorder != ">" else value


def _whole(value: object) -> object:
    """numpy's integers are integers; `true` is none, though Python calls it 1."""
    if isinstance(value, bool):
        raise ValueError("expected an integer")
    return operator.index(value) if isinstance(value, np.integer) else value


class Feature(BaseModel):
    """One column of a prepared dataset.

    Categorical when it has a cardinality (ids are integers in [0, cardinality)), numerical otherwise; a list when it
    has a length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Annotated[Dtype | None, BeforeValidator(_canonical_dtype)] = Field(
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
        """`length` from whichever spelling is there: `dimensions: [100]` is 100, and `hotness: 1` says: no list."""
        if not isinstance(data, Mapping):
            return data
        spellings = ("length", *LIST_LENGTH_SPELLINGS)
        given = {key: data[key] for key in spellings if data.get(key) is not None}
        if len(given) > 1:
            raise ValueError(f"its length is given as {listed(given)}; expected one of them")
        rest = {key: value for key, value in data.items() if key not in spellings}
        for spelling, value in given.items():
            length = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
            if not (spelling == "hotness" and length == 1):
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


FileName = Annotated[str, WithJsonSchema({"type": "string", "format": "path"})]
"""A path relative to the folder of the YAML file. Whatever key has this type is confined to that folder."""


class Chunk(BaseModel):
    """Some columns of a split, in files of one type: rows 1..i in the first file, i+1..j in the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ChunkType = Field(description="format of the files")
    features: tuple[str, ...] = Field(description="the columns, in the order they stand in the files", min_length=1)
    files: tuple[FileName, ...] = Field(description="paths relative to the folder of this YAML file", min_length=1)


class _Metadata(BaseModel):
    """The keys of `metadata` that name files; there may be any others."""

    model_config = ConfigDict(extra="allow")

    encoders: FileName | None = Field(None, description="file that says how a raw value becomes a prepared one")
    vocabularies: FileName | None = Field(None, description="folder with a Parquet file for each vocabulary")
    catalogues: dict[Literal["user", "item"], FileName] | None = Field(
        None, description="Parquet file with a row for each id from 1"
    )


def _empty_dict(value: object) -> object:
    return {} if value is None else value


def _empty_list(value: object) -> object:
    return [] if value is None else value


class _File(BaseModel):
    """A recspec Dataset Feature Specification: what a prepared dataset holds, where, and which part it plays."""

    model_config = ConfigDict(extra="forbid", title="Dataset Feature Specification")

    feature_spec: dict[str, Annotated[Feature, BeforeValidator(_empty_dict)]] = Field(
        description="feature name -> what the column is"
    )
    source_spec: Annotated[
        dict[str, Annotated[list[Chunk], BeforeValidator(_empty_list)]], BeforeValidator(_empty_dict)
    ] = Field(default_factory=dict, description="split name -> chunks, joined side by side")
    channel_spec: Annotated[
        dict[str, Annotated[list[str], BeforeValidator(_empty_list)]], BeforeValidator(_empty_dict)
    ] = Field(default_factory=dict, description="channel (role) -> feature names")
    metadata: Annotated[dict[str, object], BeforeValidator(_empty_dict)] = Field(
        default_factory=dict, description="anything; recspec reads the keys that docs/feature_spec.md lists"
    )


def json_schema() -> dict[str, object]:
    """JSON Schema of the YAML file, for editors: every spelling that `FeatureSpec.load` reads is accepted."""
    schema = _File.model_json_schema()
    schema["properties"]["metadata"] |= {"properties": _metadata_schema()["properties"]}
    feature = schema["$defs"]["Feature"]["properties"]
    for spelling in LIST_LENGTH_SPELLINGS:
        length = {"type": "integer", "minimum": 1}
        feature[spelling] = {
            "description": "another spelling of `length`",
            "anyOf": [length, {"type": "array", "items": length, "minItems": 1, "maxItems": 1}, {"type": "null"}],
        }
    feature["dtype"] = {"type": ["string", "null"], "description": f"one of {', '.join(DTYPES)}; torch. and numpy. too"}
    sections = schema["properties"]
    sections["channel_spec"]["propertyNames"] = {"enum": list(CHANNELS)}
    for section in ("feature_spec", "source_spec", "channel_spec"):  # `label:` with nothing after it is an empty one
        sections[section]["additionalProperties"] = _or_null(sections[section]["additionalProperties"])
    for section in ("source_spec", "channel_spec", "metadata"):
        sections[section] = _or_null(sections[section])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@cache
def _metadata_schema() -> dict[str, Any]:
    return _Metadata.model_json_schema()


def _or_null(schema: Mapping[str, object]) -> dict[str, object]:
    described = {key: schema[key] for key in ("description", "default") if key in schema}
    return {**described, "anyOf": [{k: v for k, v in schema.items() if k not in described}, {"type": "null"}]}


@dataclass(frozen=True)
class FeatureSpec:
    """What a prepared dataset holds: complete, checked, immutable; `load(save(spec)) == spec`.

    `folder` (where the files lie) takes no part in equality.
    """

    features: Mapping[str, Feature]
    sources: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    channels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    folder: Path = field(default=Path(), compare=False)
    allow_outside: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", MappingProxyType(_completed(self.features, self.channels)))
        object.__setattr__(self, "sources", MappingProxyType({k: tuple(v) for k, v in self.sources.items()}))
        object.__setattr__(self, "channels", MappingProxyType({k: tuple(v) for k, v in self.channels.items()}))
        problems: list[Problem] = []
        metadata = {key: _plain(value, ("metadata", str(key)), problems) for key, value in self.metadata.items()}
        object.__setattr__(self, "metadata", MappingProxyType(metadata))
        problems += _check(self)
        if problems:
            raise _PlacedSpecError(problems)

    def __deepcopy__(self, memo: object) -> FeatureSpec:
        return self  # immutable; and a model that holds one must be copyable

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.to_dict(), self.folder, self.allow_outside)

    # --- reading and writing -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, allow_outside: bool = False) -> FeatureSpec:
        """Read a specification from its YAML file, or from the folder that holds `feature_spec.yaml`.

        Raises:
            SpecError: with every problem, each with its line in the file.
        """
        file = _yaml_file(_local(path))
        if file.name.lower().endswith(RAW_SUFFIXES):
            raise SpecError(
                f"{file}: holds rows, and is not a specification; prepare it (recspec prepare table {file.name} OUT) "
                "and name the folder OUT"
            )
        try:
            text = read_text(file, most=MAX_BYTES)
        except PathError as error:
            raise SpecError(str(error)) from None
        data, lines, placed = _parse_yaml(text, file)
        if not isinstance(data, dict):
            found = "nothing" if data is None else _shown(data)
            raise SpecError(f"{file}: expected sections feature_spec, source_spec, channel_spec; found {found}")
        spec = None
        if all(len(place) > 1 for place, _ in placed):  # of a section that stands twice, only the last would be checked
            try:
                spec = _build(data, file.parent, allow_outside)
            except _PlacedSpecError as error:
                placed += error.placed
        if spec is None or placed:
            raise SpecError.of(str(file), [f"{_line(place, lines)}{_dotted(place)}: {what}" for place, what in placed])
        return spec

    @classmethod
    def from_dict(
        cls, data: Mapping[str, object], folder: str | Path = ".", *, allow_outside: bool = False
    ) -> FeatureSpec:
        """Build from the four sections as plain dicts and lists.

        Raises:
            SpecError: with every problem.
        """
        return _build(data, Path(folder), allow_outside)

    def to_dict(self) -> dict[str, object]:
        """The four sections as plain dicts and lists, in recspec's one spelling."""
        return {
            "feature_spec": {name: feature.model_dump(exclude_none=True) for name, feature in self.features.items()},
            "source_spec": {
                split: [
                    {"type": chunk.type, "features": list(chunk.features), "files": list(chunk.files)}
                    for chunk in chunks
                ]
                for split, chunks in self.sources.items()
            },
            "channel_spec": {channel: list(names) for channel, names in self.channels.items()},
            "metadata": dict(self.metadata),
        }

    def to_yaml(self) -> str:
        """The YAML text that `save` writes."""
        return yaml.dump(self.to_dict(), Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)

    def save(self, path: str | Path) -> Path:
        """Write the YAML file (into `path` when it is a folder) under a temporary name, then rename it."""
        file = local(path, "the specification")
        if file.is_dir() or file.suffix not in (".yaml", ".yml"):
            file = file / FILE_NAME
        with whole_file(file) as temporary:
            temporary.write_text(self.to_yaml(), encoding="utf-8")
        return file

    def replace(self, **fields: object) -> FeatureSpec:
        """A copy with some of `features`, `sources`, `channels`, `metadata`, `folder` replaced, checked again."""
        return replace(self, **fields)  # type: ignore[arg-type]

    # --- what the columns are ------------------------------------------------------------------------------------

    def role(self, role: Role) -> tuple[str, ...]:
        """Names of the features that play a role, in the order of the file; each once."""
        names = (
            name for channel, members in self.channels.items() if CHANNELS[channel].role == role for name in members
        )
        return tuple(dict.fromkeys(names))

    def roles_of(self, name: str) -> tuple[Role, ...]:
        """The roles a feature plays, in the order of `ROLES`."""
        return tuple(role for role in get_args(Role) if name in self.role(role))

    @property
    def label(self) -> str:
        """Name of the label feature."""
        return self.role("label")[0]

    @property
    def group(self) -> str | None:
        """Name of the feature whose equal values mark rows ranked against each other, if there is one."""
        names = self.role("group")
        return names[0] if names else None

    @cached_property
    def user_id(self) -> str:
        """The user's id: `metadata.user_id`, else the role's scalar id feature of largest cardinality."""
        return self._id_feature("user")

    @cached_property
    def item_id(self) -> str:
        """The item's id: `metadata.item_id`, else the role's scalar id feature of largest cardinality."""
        return self._id_feature("item")

    def inputs(self, *, categorical: bool | None = None, is_list: bool | None = None) -> tuple[str, ...]:
        """Features a CTR model reads (roles user, item, context), optionally only ids or numbers, lists or scalars."""
        names = dict.fromkeys((*self.role("user"), *self.role("item"), *self.role("context")))
        return tuple(
            name
            for name in names
            if (categorical is None or self.features[name].is_categorical == categorical)
            and (is_list is None or self.features[name].is_list == is_list)
        )

    def vocabulary(self, name: str) -> str:
        """Identity of a categorical feature's id space: its own name unless it names another."""
        return self.features[name].vocabulary or name

    def shift(self, name: str) -> int:
        """How much a reader adds to the stored ids of a feature: 1 where id 0 may be a real value of a list.

        Lists need an id for padding. Where the files do not declare `padding: 0`, the ids of the whole vocabulary are
        shifted by one, so that padding is never somebody's item.
        """
        if not self.features[name].is_categorical:
            return 0
        space = self.vocabulary(name)
        return int(
            any(
                feature.is_list and feature.is_categorical and feature.padding is None
                for other, feature in self.features.items()
                if self.vocabulary(other) == space
            )
        )

    def num_ids(self, name: str) -> int:
        """Rows of the embedding table a feature needs: its vocabulary's largest cardinality, plus the shift.

        Raises:
            SpecError: if the cardinality is still `auto`.
        """
        space = self.vocabulary(name)
        found = [
            (other, feature.cardinality)
            for other, feature in self.features.items()
            if feature.is_categorical and self.vocabulary(other) == space
        ]
        unresolved = [other for other, cardinality in found if not isinstance(cardinality, int)]
        if unresolved:
            raise SpecError(
                f"feature_spec.{unresolved[0]}.cardinality is 'auto', which only `recspec transcode DATA OUT` resolves"
            )
        return max(int(cardinality) for _, cardinality in found if cardinality is not None) + self.shift(name)

    def reserves_unknown(self, name: str) -> bool:
        """Whether id 0 of a feature is never a real value: recspec prepared it, or padding takes the place."""
        space = self.vocabulary(name)
        pads = any(feature.padding == 0 for other, feature in self.features.items() if self.vocabulary(other) == space)
        return self.metadata.get("vocabularies") is not None or self.shift(name) == 1 or pads

    def storage_dtype(self, name: str) -> np.dtype[np.generic]:
        """The numpy type of the stored values: as declared, else int64 for ids and float32 for numbers."""
        feature = self.features[name]
        return np.dtype(feature.dtype or ("int64" if feature.is_categorical else "float32"))

    # --- what the dataset holds -----------------------------------------------------------------------------------

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have at least one chunk."""
        return tuple(split for split, chunks in self.sources.items() if chunks)

    def columns(self, split: str) -> tuple[str, ...]:
        """Names of the features that a split's files hold.

        Raises:
            SpecError: if there is no such split.
        """
        if not self.splits:
            raise SpecError(f"{self.folder}: {NO_FILES}")
        if split not in self.splits:
            raise SpecError(f"{self.folder}: {unknown('split', split, self.splits)}")
        return tuple(name for chunk in self.sources[split] for name in chunk.features)

    def path(self, file: str) -> Path:
        """Where a file of a chunk lies.

        Raises:
            SpecError: if it leads outside the folder and may not, or is a special file.
        """
        return self._confined(file, allow_outside=self.allow_outside)

    @property
    def companions(self) -> Mapping[str, str]:
        """Files and folders beside the specification that its metadata names, by the key that names them."""
        return {_dotted(place): name for place, name in _names_of_files(self.metadata, _metadata_schema())}

    def catalogue(self, role: Role) -> Path | None:
        """The Parquet file with a row for each user or item, if the metadata names one."""
        name = self.companions.get(f"catalogues.{role}")
        return None if name is None else self._confined(name)

    def vocabulary_file(self, name: str) -> Path | None:
        """Where the raw values of an id space lie, such as `vocabulary(feature)`; None without vocabularies."""
        folder = self.companions.get("vocabularies")
        return None if folder is None else self._confined(f"{folder}/{name}.parquet")

    def beside(self, name: str) -> Path:
        """Where a file or folder beside the specification lies, whatever may lie outside.

        Raises:
            SpecError: if it leads outside the folder, or is a special file.
        """
        return self._confined(name)

    def _confined(self, name: str, *, allow_outside: bool = False) -> Path:
        try:
            return confined(self.folder, name, allow_outside=allow_outside)
        except PathError as error:
            raise SpecError(f"{self.folder / FILE_NAME}: {error}") from None

    @property
    def leaves_padding_unsaid(self) -> tuple[str, ...]:
        """Histories of the published channel names that declare no padding, as SIM's own specification has them."""
        published = (*self.channels.get("positive_history", ()), *self.channels.get("negative_history", ()))
        unsaid = [name for name in dict.fromkeys(published) if self.features[name].padding is None]
        return tuple(unsaid) if "positive_history" in self.channels else ()

    @property
    def has_series(self) -> bool:
        """Whether valid and test hold ranking candidates: one series of rows a group, made for evaluation."""
        return "test_samples_per_series" in self.metadata

    def require(self, needs: Iterable[str], who: str) -> None:
        """Check that every role that `who` needs is played by some feature.

        Raises:
            SpecError: naming each missing role and the channels that would fill it.
        """
        problems = [
            f"{who} needs a feature in the role '{role}'; {self._remedy(role)}"
            for role in needs
            if not self.role(role)  # type: ignore[arg-type]
        ]
        if problems:
            raise SpecError.of(str(self.folder / FILE_NAME), problems)

    def _remedy(self, role: str) -> str:
        """How a dataset gets a feature in a role: one that recspec prepared by preparing it otherwise."""
        dataset = self.metadata.get("dataset")
        if not isinstance(dataset, str):
            return f"add one to channel_spec under '{role}'"
        if role == "history":
            if self.has_series:
                return f"prepare it with --set history=50 (recspec prepare {dataset} ...)"
            return "rows with a label have no history; prepare rows without a label, or train another model"
        if dataset == "table":
            return f"prepare rows that have the {role}'s id, with --set {role}=COLUMN, or train another model"
        return f"{dataset} has none; train another model"

    def content_hash(self) -> str:
        """Hash of what a model depends on: features and channels, not where the files lie."""
        text = json.dumps([self.to_dict()["feature_spec"], self.to_dict()["channel_spec"]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _id_feature(self, role: Literal["user", "item"]) -> str:
        named = self.metadata.get(f"{role}_id")
        if isinstance(named, str):
            return named
        candidates = [
            name for name in self.role(role) if self.features[name].is_categorical and not self.features[name].is_list
        ]
        if not candidates:
            raise SpecError(
                f"{self.folder / FILE_NAME}: no scalar categorical feature plays the role '{role}'; "
                f"add the {role}'s id to channel_spec.{role}"
            )
        return max(candidates, key=self.num_ids)


# --- checks ----------------------------------------------------------------------------------------------------------

Place = tuple[str | int, ...]
Problem = tuple[Place, str]


class _PlacedSpecError(SpecError):
    """Problems with their places, for a reader that can add the line of each."""

    def __init__(self, placed: Sequence[Problem]) -> None:
        self.placed = list(placed)
        shown = SpecError.of("feature specification", [f"{_dotted(place)}: {what}" for place, what in placed])
        super().__init__(str(shown), shown.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return SpecError, (str(self), self.problems)


def _rebuild(data: Mapping[str, object], folder: Path, allow_outside: bool) -> FeatureSpec:
    return FeatureSpec.from_dict(data, folder, allow_outside=allow_outside)


def _build(data: Mapping[str, object], folder: Path, allow_outside: bool) -> FeatureSpec:
    """The specification of four plain sections.

    Parts of the wrong shape are left out while the rest is checked, so that one message tells of both.

    Raises:
        _PlacedSpecError: with every problem.
    """
    sections, problems = _named_sections(data)
    broken: set[Place] = set()
    file: _File | None = None
    while file is None:
        try:
            file = _File.model_validate(sections)
        except ValidationError as error:
            found = [
                _from_pydantic(e["loc"], e["type"], e["msg"], e["input"])
                for e in error.errors()
                if not (e["type"] == "too_short" and e["input"])  # only because what it holds is wrong, said already
            ]
            problems += found
            broken |= {place[:2] for place, _ in found}
            if any(len(part) == 1 for part in broken):  # a whole section: nothing can be said about the rest
                raise _PlacedSpecError(problems) from None
            sections = _without(sections, broken)
    try:
        spec = FeatureSpec(
            features=file.feature_spec,
            sources={split: tuple(chunks) for split, chunks in file.source_spec.items()},
            channels={channel: tuple(names) for channel, names in file.channel_spec.items()},
            metadata=file.metadata,
            folder=folder,
            allow_outside=allow_outside,
        )
    except _PlacedSpecError as error:
        problems += [problem for problem in error.placed if not _follows(problem[0], file, broken)]
    if problems:
        raise _PlacedSpecError(problems)
    return spec


def _named_sections(data: Mapping[str, object]) -> tuple[dict[str, object], list[Problem]]:
    """The known sections, without names that YAML reads as something else than text."""
    problems: list[Problem] = [
        ((str(section),), unknown("section", str(section), _File.model_fields))
        for section in data
        if section not in _File.model_fields
    ]
    sections: dict[str, object] = {}
    for section in _File.model_fields:
        content = data.get(section)
        if section != "metadata" and isinstance(content, Mapping):
            problems += [
                (
                    (section, str(name)),
                    f"the name {name!r} is no text; put it in quotes (no, on, 1 are not text in YAML)",
                )
                for name in content
                if not isinstance(name, str)
            ]
            content = {name: value for name, value in content.items() if isinstance(name, str)}
        if section in data:
            sections[section] = content
    return sections, problems


def _without(sections: Mapping[str, object], broken: Iterable[Place]) -> dict[str, object]:
    """The sections with broken features emptied (their names stay known), broken splits and channels left out."""
    kept = {key: dict(value) if isinstance(value, Mapping) else value for key, value in sections.items()}
    for section, name in broken:
        part = kept[str(section)]
        assert isinstance(part, dict)
        if section == "feature_spec":
            part[name] = {}
        else:
            part.pop(name, None)
    return kept


def _follows(place: Place, file: _File, broken: set[Place]) -> bool:
    """Whether a problem may only be there because a broken part was left out."""
    if place == ("channel_spec", "label"):
        return any(section == "channel_spec" for section, _ in broken)
    if place[0] == "metadata" and len(place) == 2:
        return ("feature_spec", str(file.metadata.get(str(place[1])))) in broken
    if place[0] == "channel_spec" and len(place) == 3:
        _, channel, position = place
        return ("feature_spec", file.channel_spec[str(channel)][int(position)]) in broken
    return False


_PLAIN_VALUES = (str, int, float, datetime.date, bytes, type(None))


def _plain(value: object, place: Place, problems: list[Problem]) -> object:
    """A value of `metadata` as YAML gives it back: numpy's numbers as Python's, tuples as lists."""
    if len(place) > MAX_DEPTH:
        problems.append((place[:2], f"is nested deeper than {MAX_DEPTH} levels"))
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner, (*place, str(key)), problems) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, (*place, position), problems) for position, inner in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, _PLAIN_VALUES):
        kind = type(value).__name__
        problems.append((place, f"holds a {kind}; expected text, numbers, dates, lists and mappings"))
    return str(value) if isinstance(value, str) else value


def _completed(features: Mapping[str, Feature], channels: Mapping[str, Sequence[str]]) -> dict[str, Feature]:
    """What the channels say about features that say little themselves.

    In a channel that holds ids only, a feature without a cardinality has one that is still to be found. A feature that
    is a group and nothing else is an id of which no table is made (an impression's, a session's): int64, for float32
    would merge those beyond 2^24.
    """
    ids = {name for channel, names in channels.items() if channel in CHANNELS and CHANNELS[channel].categorical
           for name in names}  # fmt: skip
    roles: dict[str, set[Role]] = {}
    for channel, names in channels.items():
        for name in names if channel in CHANNELS else ():
            roles.setdefault(name, set()).add(CHANNELS[channel].role)
    completed = {}
    for name, feature in features.items():
        update: dict[str, object] = {}
        if name in ids and feature.cardinality is None:
            update["cardinality"] = "auto"
        if roles.get(name) == {"group"} and feature.cardinality is None and feature.dtype is None:
            update["dtype"] = "int64"
        completed[name] = feature.model_copy(update=update) if update else feature
    return completed


def _check(spec: FeatureSpec) -> Iterator[Problem]:
    if not spec.features:
        yield ("feature_spec",), "holds no feature; expected at least a label"
    for name, feature in spec.features.items():
        for key, problem in _check_feature(feature):
            yield ("feature_spec", name, key), problem
    yield from _check_vocabularies(spec)
    for split in spec.sources:
        yield from _check_source(spec, split)
    yield from _check_channels(spec)
    yield from _check_splits_hold_channels(spec)
    yield from _check_metadata(spec)


def _check_feature(feature: Feature) -> Iterator[tuple[str, str]]:
    if feature.is_categorical and feature.dtype is not None and np.dtype(feature.dtype).kind == "f":
        yield "dtype", f"is {feature.dtype}, but a feature with a cardinality holds ids; expected an integer dtype"
    elif isinstance(feature.cardinality, int) and feature.dtype is not None:
        largest = 1 if feature.dtype == "bool" else int(np.iinfo(feature.dtype).max)
        if feature.cardinality - 1 > largest:
            wide = f"ids up to {feature.cardinality - 1} do not fit {feature.dtype}, whose largest value is {largest}"
            yield "cardinality", f"is {feature.cardinality}, but {wide}; use a wider dtype"
    for key in ("vocabulary", "padding"):
        if getattr(feature, key) is not None and not feature.is_categorical:
            yield key, "is given, but the feature has no cardinality; only ids have one"


def _check_vocabularies(spec: FeatureSpec) -> Iterator[Problem]:
    for name, feature in spec.features.items():
        other = feature.vocabulary
        if other is None or other == name or other not in spec.features:
            continue
        further = spec.features[other].vocabulary
        if further not in (None, other):
            named = f"is '{other}', a feature that itself names the vocabulary '{further}'"
            yield ("feature_spec", name, "vocabulary"), f"{named}; name '{further}' here too"
        shared = spec.features[other].cardinality
        if feature.is_categorical and shared not in (None, feature.cardinality):
            yield (
                ("feature_spec", name, "cardinality"),
                f"is {feature.cardinality}, but it shares the vocabulary '{other}' whose cardinality is {shared}",
            )


def _check_source(spec: FeatureSpec, split: str) -> Iterator[Problem]:
    place: Place = ("source_spec", split)
    if not spec.sources[split]:
        yield place, "has no chunk; expected at least one with type, features and files, or leave the split out"
    seen: Counter[str] = Counter()
    for position, chunk in enumerate(spec.sources[split]):
        for column, name in enumerate(chunk.features):
            seen[name] += 1
            where = (*place, position, "features", column)
            if name not in spec.features:
                yield where, f"{unknown('feature', name, spec.features)}"
            elif seen[name] > 1:
                yield where, f"feature '{name}' stands more than once in the split '{split}'; expected once"
        for number, file in enumerate(chunk.files):
            try:
                confined(spec.folder, file, allow_outside=spec.allow_outside)
            except PathError as error:
                hint = "" if spec.allow_outside else "; move it there, or pass --allow-outside"
                yield (*place, position, "files", number), f"{error}{hint if 'outside' in str(error) else ''}"


def _names_of_files(value: object, schema: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Place and text of every value that the schema calls a path."""
    for branch in schema.get("anyOf", ()):
        yield from _names_of_files(value, branch, place)
    if schema.get("format") == "path" and isinstance(value, str):
        yield place, value
    if isinstance(value, Mapping):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            below = known.get(key, others)
            if isinstance(below, Mapping):
                yield from _names_of_files(inner, below, (*place, str(key)))
    if isinstance(value, (list, tuple)) and isinstance(below := schema.get("items"), Mapping):
        for position, inner in enumerate(value):
            yield from _names_of_files(inner, below, (*place, position))


def _check_channels(spec: FeatureSpec) -> Iterator[Problem]:
    for channel, names in spec.channels.items():
        if channel not in CHANNELS:
            yield ("channel_spec", channel), unknown("channel", channel, CHANNELS)
            continue
        for position, name in enumerate(names):
            where = ("channel_spec", channel, position)
            if name not in spec.features:
                yield where, unknown("feature", name, spec.features)
            elif name in names[:position]:
                yield where, f"feature '{name}' stands more than once in the channel '{channel}'; expected once"
            else:
                problem = _channel_problem(CHANNELS[channel], channel, name, spec.features[name])
                if problem:
                    yield where, problem
    yield from _check_roles(spec)


def _members(spec: FeatureSpec, *roles: Role) -> dict[Place, str]:
    """Place and name of every feature in the channels of some roles."""
    return {
        ("channel_spec", channel, position): name
        for channel, names in spec.channels.items()
        if channel in CHANNELS and CHANNELS[channel].role in roles
        for position, name in enumerate(names)
    }


def _check_roles(spec: FeatureSpec) -> Iterator[Problem]:
    labels, groups = _members(spec, "label"), _members(spec, "group")
    if len(labels) != 1:
        yield ("channel_spec", "label"), f"expected exactly one label feature; found {listed(labels.values())}"
    if len(groups) > 1:
        yield ("channel_spec", "group"), f"expected at most one group feature; found {listed(groups.values())}"
    for where, name in _members(spec, "user", "item", "context", "history", "negative_history").items():
        if name in labels.values():
            yield where, f"'{name}' is the label; it can't be an input too"
    users = set(_members(spec, "user").values())
    for where, name in _members(spec, "item").items():
        if name in users:
            yield where, f"'{name}' is in the role 'user' too; a feature describes the user or the item"


def _channel_problem(rule: Channel, channel: str, name: str, feature: Feature) -> str | None:
    if rule.categorical is False and feature.is_categorical:
        return f"'{name}' has a cardinality, but the channel '{channel}' holds numbers"
    if rule.is_list is True and not feature.is_list:
        return f"'{name}' has no length, but the channel '{channel}' holds lists; give feature_spec.{name}.length"
    if rule.is_list is False and feature.is_list:
        return f"'{name}' is a list, but the channel '{channel}' holds one value a row"
    return None


CHOSEN_ON = ("valid", "validation", "val")
"""Splits that choose a model, so they need labels; one that is only predicted may lack them."""


def _check_splits_hold_channels(spec: FeatureSpec) -> Iterator[Problem]:
    groups, labels = set(_members(spec, "group").values()), set(_members(spec, "label").values())
    used = {name: channel for channel, names in spec.channels.items() for name in names if name in spec.features}
    for split, chunks in spec.sources.items():
        if not chunks:
            continue
        held = {name for chunk in chunks for name in chunk.features}
        for name, channel in used.items():
            waived = name in groups if split == "train" else name in labels and split not in CHOSEN_ON
            if name not in held and not waived:
                what = f"no chunk holds the feature '{name}' of the channel '{channel}'{nearest(name, held)}"
                yield ("source_spec", split), f"{what}; every split holds every feature that a channel names"


def _check_metadata(spec: FeatureSpec) -> Iterator[Problem]:
    series = spec.metadata.get("test_samples_per_series", 1)
    if not isinstance(series, int) or isinstance(series, bool) or series < 1:
        yield ("metadata", "test_samples_per_series"), f"is {_shown(series)}; expected a number of rows, 1 or more"
    for role in ("user", "item"):
        name = spec.metadata.get(f"{role}_id")
        if name is not None:
            problem = _id_problem(spec, role, name)
            if problem:
                yield ("metadata", f"{role}_id"), problem
    cut_offs = spec.metadata.get("cut_offs")
    if cut_offs is not None and not _is_cut_offs(cut_offs):
        yield ("metadata", "cut_offs"), f"is {_shown(cut_offs)}; expected a list of whole numbers from 1, such as [12]"
    leak = spec.metadata.get("leak")
    if leak is not None and leak not in spec.features:
        yield ("metadata", "leak"), unknown("feature", str(leak), spec.features)
    elif leak is not None and any(leak in members for members in spec.channels.values()):
        yield ("metadata", "leak"), f"is '{leak}', which plays a role; a model must not read what gives the label away"
    for place, name in _names_of_files(spec.metadata, _metadata_schema()):
        try:
            confined(spec.folder, name)
        except PathError as error:
            yield ("metadata", *place), str(error)
    for key in ("encoders", "vocabularies"):
        name = spec.metadata.get(key)
        if name is not None and not isinstance(name, str):
            yield ("metadata", key), f"is {_shown(name)}; expected a path beside the specification"
    catalogues = spec.metadata.get("catalogues")
    if catalogues is not None and not _is_catalogues(catalogues):
        expected = "expected a mapping from 'user' or 'item' to a file, such as {item: items.parquet}"
        yield ("metadata", "catalogues"), f"is {_shown(catalogues)}; {expected}"


def _id_problem(spec: FeatureSpec, role: Literal["user", "item"], name: object) -> str | None:
    if not isinstance(name, str) or name not in spec.features:
        return unknown("feature", str(name), spec.features)
    feature = spec.features[name]
    if not feature.is_categorical or feature.is_list or name not in _members(spec, role).values():
        return f"is '{name}'; expected a feature in the role '{role}' that has a cardinality and is no list"
    return None


def _is_cut_offs(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in value)
    )


def _is_catalogues(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        role in ("user", "item") and isinstance(file, str) for role, file in value.items()
    )


def _from_pydantic(loc: tuple[str | int, ...], kind: str, message: str, value: object) -> Problem:
    """A pydantic finding as a place and a sentence in our words."""
    if kind == "extra_forbidden":
        known = (*Feature.model_fields, *LIST_LENGTH_SPELLINGS) if loc[0] == "feature_spec" else Chunk.model_fields
        return loc, unknown("key", str(loc[-1]), known)
    if kind == "missing":
        return loc, "is missing" if len(loc) > 1 else "this section is missing"
    if kind == "value_error" and len(loc) == 2:
        return loc, message.removeprefix("Value error, ")
    if kind == "too_short":
        return loc, "is empty; expected at least one name"
    if loc[0] == "source_spec" and loc[-1] == "type":
        return loc, unknown("chunk type", str(value), CHUNK_TYPES)
    place = loc[:3] if loc[0] == "feature_spec" else loc  # without pydantic's names for the branches of a union
    hint = nearest(str(value).rpartition(".")[2], DTYPES) if place[-1:] == ("dtype",) else ""
    return place, f"is {_shown(value)}{hint}; expected {_expected(place)}"


def _expected(place: Place) -> str:
    match place:
        case ("feature_spec", _, key):
            return _EXPECTED_OF_FEATURE[str(key)]
        case ("feature_spec", _):
            return "what the column is, such as {dtype: int32, cardinality: 100}, or nothing"
        case ("source_spec", _):
            return "a list of chunks, each with type, features and files"
        case ("source_spec", _, _):
            return "a chunk: a mapping with type, features and files"
        case ("channel_spec", _) | ("source_spec", _, _, _):
            return "a list of names, such as [a, b]"
        case ("channel_spec", _, _) | ("source_spec", _, _, _, _):
            return "a name; put it in quotes (no, on, 1 are not text in YAML)"
        case _:
            return "a mapping, one `name: ...` a line"


_EXPECTED_OF_FEATURE = {
    "dtype": f"one of {', '.join(DTYPES)}",
    "cardinality": "a number of ids, 1 or more, or 'auto'",
    "length": "the most values a row holds, 1 or more",
    "vocabulary": "the name of an id space",
    "padding": "0, the one id that can be padding; leave it out where the files pad with -1 or not at all",
    "alpha": "a number above 0",
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def _shown(value: object) -> str:
    return _SHORT.repr(value)


def _dotted(place: Place) -> str:
    """`channel_spec.user[0]` from its parts."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


# --- YAML ------------------------------------------------------------------------------------------------------------


class _PlainDumper(yaml.SafeDumper):
    """Writes short lists on one line and no anchors, so that a person can read and edit the file."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _write_list(dumper: yaml.SafeDumper, data: list[object]) -> yaml.Node:
    flow = all(not isinstance(value, (dict, list)) for value in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_PlainDumper.add_representer(list, _write_list)


def _local(path: str | Path) -> Path:
    try:
        return local(path, "the specification")
    except PathError as error:
        raise SpecError(str(error)) from None


def _yaml_file(path: Path) -> Path:
    """The file to read for what the user named, or an error that says what is there instead."""
    if path.is_file():
        return path
    if path.is_dir():
        try:
            file = confined(path, FILE_NAME)
        except PathError as error:
            raise SpecError(f"{path}: {error}") from None
        if file.is_file():
            return file
        others = sorted(found.name for found in path.glob("*.y*ml"))
        hint = f"; found {listed(others)}: name the one you mean" if others else ""
        raise SpecError(f"{path}: no {FILE_NAME} in this folder, so it is not a prepared dataset{hint}")
    known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
    raise SpecError(f"{path}: no such file or folder{nearest(path.name, known)}")


def _parse_yaml(text: str, file: Path) -> tuple[object, dict[Place, int], list[Problem]]:
    """The data, the line of every place in it, and the names that stand twice, of which YAML keeps the last."""
    walk = _Walk()
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, {}, []
        walk.visit(root, ())
        return loader.construct_document(root), walk.lines, walk.duplicates
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        what = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{file}: {line}not valid YAML: {what}") from None
    except ValueError as error:  # a date such as 2020-13-45
        raise SpecError(f"{file}: not valid YAML: {error}") from None
    except RecursionError:
        raise SpecError(f"{file}: not valid YAML: lists and mappings are nested too deeply") from None


class _Walk:
    """Goes once through the nodes of a file: notes lines and duplicates, refuses what would not end."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.duplicates: list[Problem] = []
        self._values: dict[int, int] = {}  # of a node seen before: how many values it stands for
        self._open: set[int] = set()

    def visit(self, node: yaml.Node, place: Place) -> int:
        """How many values a node stands for, with all its aliases followed."""
        self.lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in self._open:
            raise yaml.MarkedYAMLError(problem="a value that holds itself", problem_mark=node.start_mark)
        if id(node) not in self._values:
            self._open.add(id(node))
            self._values[id(node)] = 1 + sum(self.visit(child, inner) for inner, child in self._children(node, place))
            self._open.remove(id(node))
        count = self._values[id(node)]
        if count > MAX_VALUES:
            what = f"its aliases make more than {MAX_VALUES:,} values of it"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        return count

    def _children(self, node: yaml.Node, place: Place) -> Iterator[tuple[Place, yaml.Node]]:
        if isinstance(node, yaml.SequenceNode):
            yield from (((*place, position), child) for position, child in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            return
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first:
                self.duplicates.append(((*place, name), f"stands twice, first in line {first[name]}; remove one"))
            first.setdefault(name, line)
            self.lines[*place, name] = line
            yield (*place, name), value


def _line(place: Place, lines: Mapping[Place, int]) -> str:
    """`line 12: ` of a place, or of the nearest part of it that the file holds."""
    for end in range(len(place), 0, -1):
        if place[:end] in lines:
            return f"line {lines[place[:end]]}: "
    return ""
