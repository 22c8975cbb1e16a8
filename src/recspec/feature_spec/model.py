"""The feature specification as one object, in the format that `docs/feature_spec.md` specifies to the letter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from recspec.base.errors import SpecError, unknown
from recspec.base.files import PathError, confined
from recspec.feature_spec import checks
from recspec.feature_spec.checks import PlacedSpecError, Problem, dotted, plain
from recspec.feature_spec.sections import CHANNELS, ROLES, Channel, Chunk, Feature, Role, files_in
from recspec.feature_spec.yaml_file import FILE_NAME, YamlFile, save_yaml

SPLITS = ("train", "valid", "test")
NO_FILES = "the specification names no files; `recspec synthesize` makes some"


@dataclass(frozen=True)
class FeatureSpec:
    """What a prepared dataset holds: complete, checked, immutable; `load(save(spec)) == spec`, wherever its files lie.

    One class because it answers every question about a dataset; nearly every method is one expression.
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
        metadata = plain(self.metadata, ("metadata",), problems)
        assert isinstance(metadata, dict)
        object.__setattr__(self, "metadata", MappingProxyType(metadata))
        problems += checks.feature_problems(self.features)
        problems += checks.source_problems(
            self.sources, self.features, self.channels, self.folder, allow_outside=self.allow_outside
        )
        problems += checks.channel_problems(self.channels, self.features)
        broken = {place[1] for place, _ in problems if len(place) > 1}
        sound = {key: value for key, value in metadata.items() if key not in broken}
        problems += checks.metadata_problems(sound, self.features, self.channels, self.folder)
        if problems:
            raise PlacedSpecError(problems)

    def __deepcopy__(self, memo: object) -> FeatureSpec:
        return self  # immutable; and a model that holds one must be copyable

    def __reduce__(self) -> tuple[object, ...]:
        return partial(FeatureSpec.from_dict, allow_outside=self.allow_outside), (self.to_dict(), self.folder)

    # --- reading and writing -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, allow_outside: bool = False) -> FeatureSpec:
        """Read a specification from its YAML file or folder. Raises `SpecError` with every problem and its line."""
        file = YamlFile(path)
        problems = list(file.duplicates)
        if all(len(place) > 1 for place, _ in problems):  # of a section that stands twice, only the last is in the data
            try:
                spec = cls.from_dict(file.data, file.path.parent, allow_outside=allow_outside)
            except PlacedSpecError as error:
                problems += error.placed
        if problems:
            raise file.error(problems)
        return spec

    @classmethod
    def from_dict(
        cls, data: Mapping[str, object], folder: str | Path = ".", *, allow_outside: bool = False
    ) -> FeatureSpec:
        """Build from the four sections as plain dicts and lists. Raises `SpecError` with every problem."""
        sections, problems, broken = checks.read_sections(data)
        sources = {split: tuple(chunks) for split, chunks in sections.source_spec.items()}
        channels = {channel: tuple(names) for channel, names in sections.channel_spec.items()}
        try:
            spec = cls(sections.feature_spec, sources, channels, sections.metadata, Path(folder), allow_outside)
        except PlacedSpecError as error:
            problems += [problem for problem in error.placed if not checks.follows(problem[0], sections, broken)]
        if problems:
            raise PlacedSpecError(problems)
        return spec

    def to_dict(self) -> dict[str, object]:
        """The four sections as plain dicts and lists, in recspec's one spelling."""
        sources = self.sources.items()
        return {
            "feature_spec": {name: feature.model_dump(exclude_none=True) for name, feature in self.features.items()},
            "source_spec": {split: [chunk.model_dump(mode="json") for chunk in chunks] for split, chunks in sources},
            "channel_spec": {channel: list(names) for channel, names in self.channels.items()},
            "metadata": dict(self.metadata),
        }

    def save(self, path: str | Path) -> Path:
        """Write the YAML file (into `path` when it is a folder) under a temporary name, then rename it."""
        return save_yaml(self.to_dict(), path)

    def replace(self, **fields: object) -> FeatureSpec:
        """A copy with some of `features`, `sources`, `channels`, `metadata`, `folder` replaced, checked again."""
        return replace(self, **fields)  # type: ignore[arg-type]

    # --- what the columns are ------------------------------------------------------------------------------------

    def role(self, role: Role) -> tuple[str, ...]:
        """Names of the features that play a role, in the order of the file; each once."""
        members = [names for channel, names in self.channels.items() if CHANNELS[channel].role == role]
        return tuple(dict.fromkeys(name for names in members for name in names))

    def roles_of(self, name: str) -> tuple[Role, ...]:
        """The roles a feature plays, in the order of `ROLES`."""
        return tuple(role for role in ROLES if name in self.role(role))

    @property
    def label(self) -> str:
        """Name of the label feature."""
        return self.role("label")[0]

    @property
    def group(self) -> str | None:
        """Name of the feature whose equal values mark rows ranked against each other, if there is one."""
        return next(iter(self.role("group")), None)

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
        kinds = {name: (self.features[name].is_categorical, self.features[name].is_list) for name in names}
        return tuple(
            name for name, (ids, lists) in kinds.items() if categorical in (None, ids) and is_list in (None, lists)
        )

    def vocabulary(self, name: str) -> str:
        """Identity of a categorical feature's id space: its own name unless it names another."""
        return self.features[name].vocabulary or name

    def shift(self, name: str) -> int:
        """How much a reader adds to stored ids: 1 if a list of the vocabulary declares no `padding: 0`, else 0."""
        shared = self._sharing(name) if self.features[name].is_categorical else {}
        return int(any(f.is_list and f.is_categorical and f.padding is None for f in shared.values()))

    def num_ids(self, name: str) -> int:
        """Rows of the embedding table: largest cardinality of the vocabulary plus shift. `auto` is a `SpecError`."""
        cardinalities = {n: f.cardinality for n, f in self._sharing(name).items() if f.cardinality is not None}
        for other, cardinality in cardinalities.items():
            if cardinality == "auto":
                resolves = "which only `recspec transcode DATA OUT` resolves"
                raise SpecError(f"feature_spec.{other}.cardinality is 'auto', {resolves}")
        return max(map(int, cardinalities.values())) + self.shift(name)

    def reserves_unknown(self, name: str) -> bool:
        """Whether id 0 of a feature is never a real value: recspec prepared it, or padding takes the place."""
        pads = any(feature.padding == 0 for feature in self._sharing(name).values())
        return self.metadata.get("vocabularies") is not None or self.shift(name) == 1 or pads

    def _sharing(self, name: str) -> dict[str, Feature]:
        """The features whose ids are those of a feature, itself included."""
        space = self.vocabulary(name)
        return {other: feature for other, feature in self.features.items() if self.vocabulary(other) == space}

    def storage_dtype(self, name: str) -> np.dtype[np.generic]:
        """The numpy type of the stored values."""
        return self.features[name].storage_dtype

    # --- what the dataset holds -----------------------------------------------------------------------------------

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have at least one chunk."""
        return tuple(split for split, chunks in self.sources.items() if chunks)

    def columns(self, split: str) -> tuple[str, ...]:
        """Names of the features that a split's files hold. Raises `SpecError` if there is no such split."""
        if not self.splits:
            raise SpecError(f"{self.folder}: {NO_FILES}")
        if split not in self.splits:
            said = unknown("split", split, self.splits)
            if self.metadata.get("split") == "none" and split in ("valid", "test"):  # table was asked for all in train
                said = (
                    f"there is no split {split}: split=none put every row into train, so nothing is held out; "
                    "measure and choose on a dataset prepared with another split"
                )
            raise SpecError(f"{self.folder}: {said}")
        return tuple(name for chunk in self.sources[split] for name in chunk.features)

    def path(self, file: str) -> Path:
        """Where a file of a chunk lies; raises `SpecError` as `beside` does."""
        return self.beside(file, allow_outside=self.allow_outside)

    @property
    def companions(self) -> Mapping[str, str]:
        """Files and folders beside the specification that its metadata names, by the key that names them."""
        return {dotted(place): name for place, name in files_in(self.metadata).items()}

    def catalogue(self, role: Role) -> Path | None:
        """The Parquet file with a row for each user or item, if the metadata names one."""
        name = self.companions.get(f"catalogues.{role}")
        return None if name is None else self.beside(name)

    def vocabulary_file(self, name: str) -> Path | None:
        """Where the raw values of an id space lie, such as `vocabulary(feature)`; None without vocabularies."""
        folder = self.companions.get("vocabularies")
        return None if folder is None else self.beside(f"{folder}/{name}.parquet")

    def beside(self, name: str, *, allow_outside: bool = False) -> Path:
        """Where a file beside the specification lies. Raises `SpecError` if it is special or outside the folder."""
        try:
            return confined(self.folder, name, allow_outside=allow_outside)
        except PathError as error:
            raise SpecError(f"{self.folder / FILE_NAME}: {error}") from None

    @property
    def leaves_padding_unsaid(self) -> tuple[str, ...]:
        """Histories in the published channels that declare no padding, as in SIM's own specification."""
        published = (*self.channels.get("positive_history", ()), *self.channels.get("negative_history", ()))
        unsaid = [name for name in dict.fromkeys(published) if self.features[name].padding is None]
        return tuple(unsaid) if "positive_history" in self.channels else ()

    @property
    def has_series(self) -> bool:
        """Whether valid and test hold ranking candidates: one series of rows a group, made for evaluation."""
        return "test_samples_per_series" in self.metadata

    def require(self, needs: Iterable[str], who: str) -> None:
        """Check that some feature plays each role. Raises `SpecError`, which names every role that `who` lacks."""
        lacks = [role for role in needs if not self.role(role)]  # type: ignore[arg-type]
        problems = [f"{who} needs a feature in the role '{role}'; {self._remedy(role)}" for role in lacks]
        if problems:
            raise SpecError.of(str(self.folder / FILE_NAME), problems)

    def _remedy(self, role: str) -> str:
        """How a dataset gets a feature in a role; one that recspec prepared gets it by being prepared differently."""
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
        sections = self.to_dict()
        text = json.dumps([sections["feature_spec"], sections["channel_spec"]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _id_feature(self, role: Literal["user", "item"]) -> str:
        named = self.metadata.get(f"{role}_id")
        if isinstance(named, str):
            return named
        members = {name: self.features[name] for name in self.role(role)}
        candidates = [name for name, feature in members.items() if feature.is_categorical and not feature.is_list]
        if not candidates:
            none = f"no scalar categorical feature plays the role '{role}'"
            raise SpecError(f"{self.folder / FILE_NAME}: {none}; add the {role}'s id to channel_spec.{role}")
        return max(candidates, key=self.num_ids)


def _completed(features: Mapping[str, Feature], channels: Mapping[str, Sequence[str]]) -> dict[str, Feature]:
    """The features, with what their channels add where the features say nothing themselves."""
    played: dict[str, list[Channel]] = {}
    for channel, names in channels.items():
        for name in names if channel in CHANNELS else ():
            played.setdefault(name, []).append(CHANNELS[channel])
    completed = dict(features)
    for name, found in played.items():
        feature = features.get(name)
        if feature is None or feature.is_categorical:
            continue
        if any(channel.categorical for channel in found):
            completed[name] = feature.model_copy(update={"cardinality": "auto"})
        elif feature.dtype is None and {channel.role for channel in found} == {"group"}:
            # a group has no embedding table, and float32 would merge ids beyond 2^24
            completed[name] = feature.model_copy(update={"dtype": "int64"})
    return completed
