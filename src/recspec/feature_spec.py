"""The Dataset Feature Specification: one YAML file that says what a prepared dataset holds.

`FeatureSpec.load` reads the published shape (`feature_spec`, `source_spec`, `channel_spec`, `metadata`) and every
spelling in use, checks all of it, and gives one immutable object in one spelling. `docs/feature_spec.md` is the format
to the letter.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import numpy as np
import yaml
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from recspec.errors import SpecError, listed, nearest, unknown

FILE_NAME = "feature_spec.yaml"

Dtype = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"]
ChunkType = Literal["csv", "parquet", "split_binary", "torch_tensor", "tfrecord"]
Role = Literal["user", "item", "context", "history", "negative_history", "label", "group"]

DTYPES: tuple[str, ...] = get_args(Dtype)
CHUNK_TYPES: tuple[str, ...] = get_args(ChunkType)
ROLES: tuple[str, ...] = get_args(Role)
SPLITS = ("train", "valid", "test")
LIST_LENGTH_SPELLINGS = ("dimensions", "max_hotness", "hotness", "max_len")


@dataclass(frozen=True)
class Channel:
    """What a channel name of the file means: the role, and what its features must be (None: either)."""

    role: Role
    categorical: bool | None = None
    is_list: bool | None = None


CHANNELS: Mapping[str, Channel] = MappingProxyType(
    {
        **{role: Channel(role) for role in ("user", "item", "context", "group")},
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
        "map": Channel("group"),
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


def _canonical_dtype(value: object) -> object:
    """`torch.int64`, `numpy.int64`, `np.int64` and `int64` are one dtype; `half`, `float`, `double` too."""
    if not isinstance(value, str):
        return value
    name = value.strip().rsplit(".", 1)[-1].lower()
    named = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
    return named.get(name, {"short": "int16", "char": "int8", "byte": "uint8", "bool_": "bool"}.get(name, name))


def _canonical_length(value: object) -> object:
    """A list's length from any of its spellings: `[100]` is 100, and a hotness of 1 is a scalar."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value == 1 else value


class Feature(BaseModel):
    """One column of a prepared dataset.

    Categorical when it has a cardinality (ids are integers in [0, cardinality)), numerical otherwise; a list when it
    has a length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    dtype: Annotated[Dtype | None, BeforeValidator(_canonical_dtype)] = Field(
        None, description="type of the stored values; int64 for ids and float32 for numbers when not given"
    )
    cardinality: Annotated[int, Field(gt=0)] | Literal["auto"] | None = Field(
        None, description="number of ids, which lie in [0, cardinality); `auto` is resolved by `recspec transcode`"
    )
    length: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_canonical_length)] = Field(
        None,
        description="for a list: the most values a row holds",
        validation_alias=AliasChoices("length", *LIST_LENGTH_SPELLINGS),
    )
    vocabulary: str | None = Field(
        None, description="name of the id space; features that name the same one share ids and an embedding table"
    )
    padding: Literal[0] | None = Field(
        None, description="0 when the files reserve id 0 for padding; when not given, a list's ids are shifted by one"
    )
    alpha: float | None = Field(None, gt=1, description="exponent of the ids' power law, for `recspec synthesize`")

    @property
    def is_categorical(self) -> bool:
        """Whether the column holds ids."""
        return self.cardinality is not None

    @property
    def is_list(self) -> bool:
        """Whether a row holds several values."""
        return self.length is not None


class Chunk(BaseModel):
    """Some columns of a split, in files of one type: rows 1..i in the first file, i+1..j in the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: ChunkType = Field(description="format of the files")
    features: tuple[str, ...] = Field(description="the columns, in the order they stand in the files", min_length=1)
    files: tuple[str, ...] = Field(description="paths relative to the folder of this YAML file", min_length=1)


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
    """JSON Schema of the YAML file, for editors."""
    schema = _File.model_json_schema()
    feature = schema["$defs"]["Feature"]["properties"]
    for spelling in LIST_LENGTH_SPELLINGS:  # read as `length`, so an editor must accept them too
        feature[spelling] = {"description": "another spelling of `length`"}
    feature["dtype"] = {"type": ["string", "null"], "description": f"one of {', '.join(DTYPES)}; torch. and numpy. too"}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["channel_spec"]["propertyNames"] = {"enum": list(CHANNELS)}
    return schema


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
        features = _with_auto_cardinality(self.features, self.channels)
        object.__setattr__(self, "features", MappingProxyType(dict(features)))
        object.__setattr__(self, "sources", MappingProxyType({k: tuple(v) for k, v in self.sources.items()}))
        object.__setattr__(self, "channels", MappingProxyType({k: tuple(v) for k, v in self.channels.items()}))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        problems = list(_check(self))
        if problems:
            raise _PlacedSpecError(problems)

    # --- reading and writing -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, allow_outside: bool = False) -> FeatureSpec:
        """Read a specification from its YAML file, or from the folder that holds `feature_spec.yaml`.

        Raises:
            SpecError: with every problem, each with its line in the file.
        """
        file = _yaml_file(Path(path))
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise SpecError(f"{file}: can't be read as text: {error}") from None
        data, lines, problems = _parse_yaml(text, file)
        if not isinstance(data, dict):
            raise SpecError(f"{file}: expected sections feature_spec, source_spec, channel_spec; found {_shown(data)}")
        try:
            spec = _build(data, file.parent, allow_outside)
        except _PlacedSpecError as error:
            problems += [f"{_line(place, lines)}{_dotted(place)}: {what}" for place, what in error.placed]
        if problems:
            raise SpecError.of(str(file), problems)
        return spec

    @classmethod
    def from_dict(
        cls, data: Mapping[str, object], folder: str | Path = ".", *, allow_outside: bool = False
    ) -> FeatureSpec:
        """Build from the four sections as plain dicts and lists.

        Raises:
            SpecError: with every problem.
        """
        return _build(dict(data), Path(folder), allow_outside)

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
        file = Path(path)
        if file.is_dir() or file.suffix not in (".yaml", ".yml"):
            file = file / FILE_NAME
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(self.to_yaml(), encoding="utf-8")
        temporary.replace(file)
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

    @property
    def user_id(self) -> str:
        """The user's id: `metadata.user_id`, else the role's scalar id feature of largest cardinality."""
        return self._id_feature("user")

    @property
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
        encoded = self.metadata.get("vocabularies") is not None
        return encoded or self.shift(name) == 1 or self.features[name].padding == 0

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
        if split not in self.splits:
            raise SpecError(f"{self.folder}: {unknown('split', split, self.splits)}")
        return tuple(name for chunk in self.sources[split] for name in chunk.features)

    def path(self, file: str) -> Path:
        """Where a file named in the specification lies."""
        return self.folder / file

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
            f"{who} needs a feature in the role '{role}'; add one to channel_spec under '{role}'"
            for role in needs
            if not self.role(role)  # type: ignore[arg-type]
        ]
        if problems:
            raise SpecError.of(str(self.folder / FILE_NAME), problems)

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


def _build(data: dict[str, object], folder: Path, allow_outside: bool) -> FeatureSpec:
    """The specification of four plain sections.

    Raises:
        _PlacedSpecError: with every problem of shape, or where the shape is right, of meaning.
    """
    problems: list[Problem] = [
        ((section,), unknown("section", section, _File.model_fields))
        for section in data
        if section not in _File.model_fields
    ]
    try:
        file = _File.model_validate({key: value for key, value in data.items() if key in _File.model_fields})
    except ValidationError as error:
        problems += [_from_pydantic(e["loc"], e["type"], e["msg"], e["input"]) for e in error.errors()]
    if problems:
        raise _PlacedSpecError(problems)
    return FeatureSpec(
        features=file.feature_spec,
        sources={split: tuple(chunks) for split, chunks in file.source_spec.items()},
        channels={channel: tuple(names) for channel, names in file.channel_spec.items()},
        metadata=file.metadata,
        folder=folder,
        allow_outside=allow_outside,
    )


def _with_auto_cardinality(
    features: Mapping[str, Feature], channels: Mapping[str, Sequence[str]]
) -> Mapping[str, Feature]:
    """Features of a channel that holds ids only are categorical even where no cardinality was written down."""
    categorical = {
        name
        for channel, names in channels.items()
        if channel in CHANNELS and CHANNELS[channel].categorical
        for name in names
    }
    return {
        name: feature.model_copy(update={"cardinality": "auto"})
        if name in categorical and feature.cardinality is None
        else feature
        for name, feature in features.items()
    }


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
    elif isinstance(feature.cardinality, int) and feature.dtype is not None and feature.dtype != "bool":
        largest = int(np.iinfo(feature.dtype).max)
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
        shared = spec.features[other].cardinality
        if feature.cardinality != shared and shared is not None:
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
            problem = None if spec.allow_outside else _outside(spec.folder, file)
            if problem is not None:
                yield (*place, position, "files", number), problem


def _outside(folder: Path, file: str) -> str | None:
    base = folder.resolve()
    if (base / file).resolve().is_relative_to(base):
        return None
    return f"'{file}' lies outside the specification's folder {base}; move it there, or pass --allow-outside"


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
    labels = [
        (channel, name)
        for channel, names in spec.channels.items()
        if channel in CHANNELS and CHANNELS[channel].role == "label"
        for name in names
    ]
    if len(labels) != 1:
        found = listed(name for _, name in labels)
        yield ("channel_spec", "label"), f"expected exactly one label feature; found {found}"
    for channel, names in spec.channels.items():
        role = CHANNELS[channel].role if channel in CHANNELS else None
        for position, name in enumerate(names):
            if role not in (None, "label", "group") and name in [label for _, label in labels]:
                yield ("channel_spec", channel, position), f"'{name}' is the label; it can't be an input too"
    groups = [name for channel, names in spec.channels.items() if channel in CHANNELS
              and CHANNELS[channel].role == "group" for name in names]  # fmt: skip
    if len(groups) > 1:
        yield ("channel_spec", "group"), f"expected at most one group feature; found {listed(groups)}"


def _channel_problem(rule: Channel, channel: str, name: str, feature: Feature) -> str | None:
    if rule.categorical is False and feature.is_categorical:
        return f"'{name}' has a cardinality, but the channel '{channel}' holds numbers"
    if rule.is_list is True and not feature.is_list:
        return f"'{name}' has no length, but the channel '{channel}' holds lists; give feature_spec.{name}.length"
    if rule.is_list is False and feature.is_list:
        return f"'{name}' is a list, but the channel '{channel}' holds one value a row"
    return None


def _check_splits_hold_channels(spec: FeatureSpec) -> Iterator[Problem]:
    groups = {name for channel, names in spec.channels.items() if channel in CHANNELS
              and CHANNELS[channel].role == "group" for name in names}  # fmt: skip
    used = {name: channel for channel, names in spec.channels.items() for name in names if name in spec.features}
    for split, chunks in spec.sources.items():
        if not chunks:
            continue
        held = {name for chunk in chunks for name in chunk.features}
        for name, channel in used.items():
            if name not in held and not (name in groups and split == "train"):
                yield (
                    ("source_spec", split),
                    f"no chunk holds the feature '{name}' of the channel '{channel}'{nearest(name, held)}",
                )


def _check_metadata(spec: FeatureSpec) -> Iterator[Problem]:
    series = spec.metadata.get("test_samples_per_series", 1)
    if not isinstance(series, int) or isinstance(series, bool) or series < 1:
        yield ("metadata", "test_samples_per_series"), f"is {_shown(series)}; expected a number of rows, 1 or more"
    for key in ("user_id", "item_id"):
        name = spec.metadata.get(key)
        if name is not None and name not in spec.features:
            yield ("metadata", key), unknown("feature", str(name), spec.features)


def _from_pydantic(loc: tuple[str | int, ...], kind: str, message: str, value: object) -> Problem:
    """A pydantic finding as a place and a sentence in our words."""
    place = tuple(part for part in loc if part not in ("int", "literal['auto']", "constrained-int"))
    if kind == "extra_forbidden":
        known = (*Feature.model_fields, *LIST_LENGTH_SPELLINGS) if loc[0] == "feature_spec" else Chunk.model_fields
        return place, unknown("key", str(loc[-1]), known)
    if kind == "missing":
        return place, "is missing"
    if place[-1:] == ("cardinality",):
        return place, f"is {_shown(value)}; expected a number of ids, 1 or more, or 'auto'"
    if place[-1:] == ("dtype",):
        return place, f"unknown dtype {_shown(value)}{nearest(str(value), DTYPES)}; expected one of {', '.join(DTYPES)}"
    if loc[0] == "source_spec" and place[-1:] == ("type",):
        return place, unknown("chunk type", str(value), CHUNK_TYPES)
    if kind == "too_short":
        return place, "is empty; expected at least one name"
    return place, f"{_shown(value)}: {message[0].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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


def _yaml_file(path: Path) -> Path:
    """The file to read for what the user named, or an error that says what is there instead."""
    if path.is_file():
        return path
    if path.is_dir():
        file = path / FILE_NAME
        if file.is_file():
            return file
        others = sorted(found.name for found in path.glob("*.y*ml"))
        hint = f"; found {listed(others)}: name the one you mean" if others else ""
        raise SpecError(f"{path}: no {FILE_NAME} in this folder, so it is not a prepared dataset{hint}")
    known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
    raise SpecError(f"{path}: no such file or folder{nearest(path.name, known)}")


def _parse_yaml(text: str, file: Path) -> tuple[object, dict[Place, int], list[str]]:
    """The data, the line of every place in it, and the problems that YAML itself would hide."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        what = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{file}: {line}not valid YAML: {what}") from None
    lines: dict[Place, int] = {}
    duplicates: list[str] = []
    if root is not None:
        _walk(root, (), lines, duplicates)
    return data, lines, duplicates


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], duplicates: list[str]) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in seen:
                duplicates.append(
                    f"line {line}: {_dotted((*place, name))}: stands twice, first in line {seen[name]}; remove one"
                )
            seen[name] = line
            lines[(*place, name)] = line
            _walk(value, (*place, name), lines, duplicates)
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            _walk(value, (*place, position), lines, duplicates)


def _line(place: Place, lines: Mapping[Place, int]) -> str:
    """`line 12: ` of a place, or of the nearest part of it that the file holds."""
    for end in range(len(place), 0, -1):
        if place[:end] in lines:
            return f"line {lines[place[:end]]}: "
    return ""
