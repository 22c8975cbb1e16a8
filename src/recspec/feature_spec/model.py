"""The feature specification as one object, in the format that `docs/feature_spec.md` specifies to the letter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import numpy as np
import yaml

from recspec.base.config import yaml_problem
from recspec.base.errors import SpecError, listed, nearest, unknown
from recspec.base.files import PathError, confined, local, read_text, whole_file
from recspec.feature_spec import checks
from recspec.feature_spec.checks import PlacedSpecError, Problem, dotted, plain, shown
from recspec.feature_spec.sections import CHANNELS, ROLES, Channel, Chunk, Feature, Place, Role, files_in

SPLITS = ("train", "valid", "test")
FOLD_IN = "fold_in"
"""Split with the known events of users of valid and test of whom train has none (held-out users)."""
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
        """Name of the label feature; the first of several."""
        return self.labels[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the label features. A model that learns one label learns the first."""
        return self.role("label")

    def of_label(self, name: str) -> FeatureSpec:
        """The same dataset with this label as the first; itself if it has no such label."""
        if name not in self.labels[1:]:
            return self
        channels = {key: names for key, names in self.channels.items() if CHANNELS[key].role != "label"}
        return self.replace(channels={**channels, "label": (name, *(each for each in self.labels if each != name))})

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

    def id_of(self, role: Literal["user", "item"]) -> str | None:
        """The feature that identifies users or items, if there is one."""
        try:
            return self.user_id if role == "user" else self.item_id
        except SpecError:
            return None

    @property
    def summary(self) -> Mapping[str, object]:
        """What its preparation counted and noted; empty for a dataset made elsewhere."""
        found = self.metadata.get("summary")
        return found if isinstance(found, Mapping) else {}

    @property
    def trained_to(self) -> int:
        """The newest `seq` of the journal whose events the dataset holds; 0 if it has taken none.

        Earlier events of users without an id are in no row: such users may be too new (`admit_after`), or retired.
        """
        return self._seq("trained_to")

    @property
    def exposures_to(self) -> int:
        """The newest answer of the journal whose shown items are rows of the dataset; 0 if it has taken none."""
        return self._seq("exposures_to")

    def _seq(self, name: str) -> int:
        found = self.metadata.get(name)
        return found if isinstance(found, int) and found > 0 else 0

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
        SpecError.refuse(str(self.folder / FILE_NAME), problems)

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


# --- the YAML file: finding it, parsing it with line numbers, writing it ----------------------------------------------


FILE_NAME = "feature_spec.yaml"
RAW_SUFFIXES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson", ".gz", ".zip")  # raw rows, named by mistake
BUNDLES = ("bundle.json", "bundle/bundle.json")  # what a trained model's folder holds, named by mistake too
MAX_BYTES = 16 << 20
MAX_VALUES = 1_000_000  # in the file once its aliases are followed: far beyond any real file, and quick to refuse
MAX_DEPTH = 100  # of lists and mappings in each other, as libyaml may read them: each level takes some of its stack


class YamlFile:
    """A parsed specification file: its data, the line of every value, and the names that stand twice."""

    def __init__(self, path: str | Path) -> None:
        """Parse the file. Raises `SpecError` if it is missing, holds raw rows, or is no YAML mapping."""
        try:
            self.path = _find(local(path, "the specification"))
            text = read_text(self.path, most=MAX_BYTES)
        except PathError as error:
            raise SpecError(str(error)) from None
        self.duplicates: list[Problem] = []  # of a name that stands twice, YAML keeps the last
        self._lines: dict[Place, int] = {}
        self._values: dict[int, int] = {}  # node id -> values it stands for; 0 while they are counted
        data = self._parse(text)
        if not isinstance(data, dict):
            found = "nothing" if data is None else shown(data)
            raise SpecError(f"{self.path}: expected sections feature_spec, source_spec, channel_spec; found {found}")
        self.data: dict[str, object] = data

    def error(self, problems: Iterable[Problem]) -> SpecError:
        """One error for all problems, each with its line."""
        return SpecError.of(str(self.path), [f"{self._line(place)}{dotted(place)}: {what}" for place, what in problems])

    def _line(self, place: Place) -> str:
        """`line 12: ` for a place, or for the nearest part of it that the file holds."""
        parts = (place[:end] for end in range(len(place), 0, -1))
        return next((f"line {self._lines[part]}: " for part in parts if part in self._lines), "")

    def _parse(self, text: str) -> object:
        try:
            loader = _loader(text)
            root = loader.get_single_node()
            if root is None:
                return None
            self._visit(root, ())
            return loader.construct_document(root)
        except yaml.YAMLError as error:
            raise SpecError(f"{self.path}: {yaml_problem(error)}") from None
        except ValueError as error:  # a date such as 2020-13-45
            raise SpecError(f"{self.path}: not valid YAML: {error}") from None
        except RecursionError:
            raise SpecError(f"{self.path}: not valid YAML: lists and mappings are nested too deeply") from None

    def _visit(self, node: yaml.Node, place: Place) -> int:
        """Note lines and duplicate names; count the values that a node stands for, with all its aliases followed."""
        self._lines.setdefault(place, node.start_mark.line + 1)
        if id(node) not in self._values:
            self._values[id(node)] = 0
            self._values[id(node)] = 1 + sum(self._visit(child, inner) for inner, child in self._children(node, place))
        count = self._values[id(node)]
        if count == 0:
            raise yaml.MarkedYAMLError(problem="a value that holds itself", problem_mark=node.start_mark)
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
                self.duplicates.append(((*place, name), f"appears twice, first in line {first[name]}; remove one"))
            first.setdefault(name, line)
            self._lines[*place, name] = line
            yield (*place, name), value


def _loader(text: str) -> yaml.SafeLoader:
    """A reader of one YAML document: libyaml's, which takes a tenth of the time, where it reads the text.

    PyYAML's own says what is wrong with any other text, and refuses deep nesting, which would overflow libyaml's stack.
    """
    if yaml.__with_libyaml__:
        depth = 0
        try:
            for event in yaml.parse(text, yaml.CSafeLoader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH:
                    return yaml.SafeLoader(text)
            return cast("yaml.SafeLoader", yaml.CSafeLoader(text))
        except yaml.YAMLError:
            pass
    return yaml.SafeLoader(text)


def save_yaml(data: Mapping[str, object], path: str | Path) -> Path:
    """Write the YAML file (into `path` when it is a folder) under a temporary name, then rename it."""
    file = local(path, "the specification")
    if file.is_dir() or file.suffix not in (".yaml", ".yml"):
        file = file / FILE_NAME
    with whole_file(file) as temporary:
        text = yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)
        temporary.write_text(text, encoding="utf-8")
    return file


class _PlainDumper(yaml.SafeDumper):
    """Writes short lists on one line and no anchors, so that a person can read and edit the file."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _write_list(dumper: yaml.SafeDumper, data: list[object]) -> yaml.Node:
    flow = all(not isinstance(value, (dict, list)) for value in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_PlainDumper.add_representer(list, _write_list)


def _find(path: Path) -> Path:
    """The specification file that a path stands for. Raises an error that says what is there instead."""
    if path.is_dir():
        try:
            file = confined(path, FILE_NAME)
        except PathError as error:
            raise SpecError(f"{path}: {error}") from None
        if not file.is_file() and any((path / name).is_file() for name in BUNDLES):
            raise SpecError(
                f"{path}: is a trained model, not a prepared dataset; `recspec evaluate RUN DATA` takes the run first"
            )
        if not file.is_file():
            others = sorted(found.name for found in path.glob("*.y*ml"))
            hint = f"; found {listed(others)}: name the one you mean" if others else ""
            raise SpecError(f"{path}: no {FILE_NAME} in this folder, so it is not a prepared dataset{hint}")
        return file
    if not path.is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise SpecError(f"{path}: no such file or folder{nearest(path.name, known)}")
    if path.name.lower().endswith(RAW_SUFFIXES):
        prepare = f"prepare it (recspec prepare table {path.name} OUT) and name the folder OUT"
        raise SpecError(f"{path}: holds rows, and is not a specification; {prepare}")
    return path
