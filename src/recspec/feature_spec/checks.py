"""Checks of a specification: all problems at once, each with its place in the file."""

from __future__ import annotations

import datetime
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from recspec.base.errors import SpecError, listed, nearest, unknown
from recspec.base.files import PathError, confined
from recspec.feature_spec.sections import (
    CHANNELS,
    CHUNK_TYPES,
    DTYPES,
    LIST_LENGTH_SPELLINGS,
    MOST_IDS,
    MOST_VALUES,
    SIGNALS,
    Channel,
    Chunk,
    Feature,
    Metadata,
    Place,
    Role,
    Sections,
    files_in,
)

Problem = tuple[Place, str]
Features = Mapping[str, Feature]
Channels = Mapping[str, Sequence[str]]

MAX_DEPTH = 50  # levels of lists and mappings inside one another in `metadata`


class PlacedSpecError(SpecError):
    """Problems with their places, for a reader that can add the line of each."""

    def __init__(self, placed: Sequence[Problem]) -> None:
        self.placed = list(placed)
        whole = SpecError.of("feature specification", [f"{dotted(place)}: {what}" for place, what in placed])
        super().__init__(str(whole), whole.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return SpecError, (str(self), self.problems)


def read_sections(data: Mapping[str, object]) -> tuple[Sections, list[Problem], set[Place]]:
    """The sections of a file, the problems of their shape, and the broken parts.

    Broken parts are left out, so that the rest can be checked too and one message tells of everything. If a whole
    section is broken, this raises `PlacedSpecError`.
    """
    sections, problems = _named_sections(data)
    broken: set[Place] = set()
    while True:
        try:
            return Sections.model_validate(sections), problems, broken
        except ValidationError as error:
            # a list is too short only because of a wrong item, reported by itself, where it has any
            wrong = [each for each in error.errors() if not (each["type"] == "too_short" and each["input"])]
            found = [_from_pydantic(each["loc"], each["type"], each["msg"], each["input"]) for each in wrong]
            problems += found
            parts = {place[:2] for place, _ in found}
            if any(len(part) == 1 for part in parts) or parts <= broken:  # then leaving them out changes nothing
                raise PlacedSpecError(problems) from None
            broken |= parts
            sections = _without(sections, broken)


def follows(place: Place, sections: Sections, broken: set[Place]) -> bool:
    """Whether a problem may exist only because a broken part was left out."""
    match place:
        case ("channel_spec", "label"):
            return any(section == "channel_spec" for section, _ in broken)
        case ("metadata", key):
            named = sections.metadata.get(str(key))
            return isinstance(named, str) and ("feature_spec", named) in broken
        case ("channel_spec", channel, position):
            return ("feature_spec", sections.channel_spec[str(channel)][int(position)]) in broken
    return False


def _named_sections(data: Mapping[str, object]) -> tuple[dict[str, object], list[Problem]]:
    """The known sections, without names that YAML reads as something other than text."""
    known = Sections.model_fields
    strange = [section if isinstance(section, str) else shown(section) for section in data if section not in known]
    problems: list[Problem] = [((section,), unknown("section", section, known)) for section in strange]
    sections = {section: data[section] for section in known if section in data}
    for section, content in sections.items():
        if not isinstance(content, Mapping):
            continue
        for name in content:
            if not isinstance(name, str):
                what = f"the name {shown(name)} is not text; put it in quotes (no, on, 1 are not text in YAML)"
                problems.append(((section, shown(name)), what))
        sections[section] = {name: value for name, value in content.items() if isinstance(name, str)}
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


def _from_pydantic(loc: Place, kind: str, message: str, value: object) -> Problem:
    """A pydantic finding as a place and a sentence in our words."""
    if kind in ("extra_forbidden", "invalid_key"):
        known = (*Feature.model_fields, *LIST_LENGTH_SPELLINGS) if loc[0] == "feature_spec" else Chunk.model_fields
        return loc, unknown("key", str(loc[-1]), known)
    if kind == "missing":
        return loc, "is missing" if len(loc) > 1 else "this section is missing"
    if kind == "value_error" and len(loc) == 2:
        return loc, message.removeprefix("Value error, ")
    if kind == "too_short":
        return loc, "is empty; expected at least one name"
    if loc[0] == "source_spec" and loc[-1] == "type":
        return loc, unknown("chunk type", value if isinstance(value, str) else shown(value), CHUNK_TYPES)
    place = loc[:3] if loc[0] == "feature_spec" else loc  # without pydantic's names for the branches of a union
    most = _MOST.get(str(place[-1])) if len(place) == 3 and isinstance(value, int) else None
    if isinstance(value, int) and most is not None and value > most:
        return place, f"is {shown(value)}; expected at most {most}"
    hint = nearest(value.rpartition(".")[2], DTYPES) if place[-1:] == ("dtype",) and isinstance(value, str) else ""
    return place, f"is {shown(value)}{hint}; expected {_expected(place)}"


_MOST = {"cardinality": MOST_IDS, "length": MOST_VALUES}


def _expected(place: Place) -> str:
    match place:
        case ("feature_spec", _, key):
            return _EXPECTED_OF_FEATURE[str(key)]
        case ("feature_spec", _):
            return "a mapping such as {dtype: int32, cardinality: 100}, or nothing"
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
    "vector": "true, for numbers of which every row holds exactly `length`; or leave it out",
    "vocabulary": "the name of an id space",
    "padding": "0, the one id that can be padding; leave it out where the files pad with -1 or not at all",
    "alpha": "a number above 0",
}
_EXPECTED_OF_METADATA = {
    "test_samples_per_series": "a number of rows, 1 or more",
    "train_negatives": "a number of rows, 0 or more",
    "cut_offs": "a list of whole numbers from 1, such as [12]",
    "encoders": "a path beside the specification",
    "vocabularies": "a path beside the specification",
    "seen": "a path beside the specification",
    "dislikes": "a path beside the specification",
    "catalogues": "a mapping from 'user' or 'item' to a file, such as {item: items.parquet}",
}


def plain(value: object, place: Place, problems: list[Problem]) -> object:
    """A value of `metadata` as YAML gives it back: numpy's numbers as Python's, tuples as lists."""
    if len(place) > MAX_DEPTH:
        problems.append((place[:2], f"is nested deeper than {MAX_DEPTH} levels"))
        return None
    if isinstance(value, Mapping):
        for key in value:
            plain(key, place, problems)
        names = {key: key if isinstance(key, str) else shown(key) for key in value}
        return {key: plain(inner, (*place, names[key]), problems) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, (*place, position), problems) for position, inner in enumerate(value)]
    if isinstance(value, np.generic):
        return plain(value.item(), place, problems)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        problems.append((place, f"holds {shown(value)}; an integer of metadata has at most 64 bits: put it in quotes"))
        return None
    if not isinstance(value, (str, int, float, datetime.date, bytes, type(None))):
        kind = type(value).__name__
        problems.append((place, f"holds a {kind}; expected text, numbers, dates, lists and mappings"))
    return str(value) if isinstance(value, str) else value


def feature_problems(features: Features) -> Iterator[Problem]:
    """Contradictions within a feature, and between features of one vocabulary."""
    if not features:
        yield ("feature_spec",), "holds no feature; expected at least a label"
    for name, feature in features.items():
        for key, problem in _contradictions(name, feature, features):
            yield ("feature_spec", name, key), problem


def _contradictions(name: str, feature: Feature, features: Features) -> Iterator[tuple[str, str]]:
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
    if feature.is_vector and feature.is_categorical:
        yield "vector", "is given, but the feature has a cardinality; a vector holds numbers, not ids"
    elif feature.is_vector and not feature.is_list:
        yield "vector", "is given, but the feature has no length; give the number of values of every row as `length`"
    other = feature.vocabulary
    if other is None or other == name or other not in features:
        return
    further, shared = features[other].vocabulary, features[other].cardinality
    if further not in (None, other):
        named = f"is '{other}', a feature that itself names the vocabulary '{further}'"
        yield "vocabulary", f"{named}; name '{further}' here too"
    if feature.is_categorical and shared not in (None, feature.cardinality):
        shares = f"it shares the vocabulary '{other}' whose cardinality is {shared}"
        yield "cardinality", f"is {feature.cardinality}, but {shares}"


def source_problems(
    sources: Mapping[str, Sequence[Chunk]], features: Features, channels: Channels, folder: Path, *, allow_outside: bool
) -> Iterator[Problem]:
    """Unknown or repeated features, files outside the folder, and features of channels that a split lacks."""
    groups, labels = set(_members(channels, "group").values()), set(_members(channels, "label").values())
    used = {name: channel for channel, names in channels.items() for name in names if name in features}
    for split, chunks in sources.items():
        place: Place = ("source_spec", split)
        if not chunks:
            yield place, "has no chunk; expected at least one with type, features and files, or leave the split out"
            continue
        held: Counter[str] = Counter()
        for position, chunk in enumerate(chunks):
            for column, name in enumerate(chunk.features):
                held[name] += 1
                where = (*place, position, "features", column)
                if name not in features:
                    yield where, unknown("feature", name, features)
                elif held[name] > 1:
                    yield where, f"feature '{name}' appears more than once in the split '{split}'; expected once"
            for number, file in enumerate(chunk.files):
                try:
                    confined(folder, file, allow_outside=allow_outside)
                except PathError as error:
                    hint = "" if allow_outside else "; move it there, or pass --allow-outside"
                    yield (*place, position, "files", number), f"{error}{hint if 'outside' in str(error) else ''}"
        for name, channel in used.items():
            chosen_on = split in ("valid", "validation", "val")  # needs labels, unlike a split that is only predicted
            waived = name in groups if split in ("train", *SIGNALS) else name in labels and not chosen_on
            if name not in held and not waived:
                what = f"no chunk holds the feature '{name}' of the channel '{channel}'{nearest(name, held)}"
                yield place, f"{what}; every split holds every feature that a channel names"


def channel_problems(channels: Channels, features: Features) -> Iterator[Problem]:
    """Unknown or repeated names, features of the wrong kind, and roles that contradict one another."""
    for channel, names in channels.items():
        if channel not in CHANNELS:
            yield ("channel_spec", channel), unknown("channel", channel, CHANNELS)
            continue
        for position, name in enumerate(names):
            where = ("channel_spec", channel, position)
            if name not in features:
                yield where, unknown("feature", name, features)
            elif name in names[:position]:
                yield where, f"feature '{name}' appears more than once in the channel '{channel}'; expected once"
            elif problem := _kind_problem(CHANNELS[channel], channel, name, features[name]):
                yield where, problem
    yield from _role_problems(channels)


def _members(channels: Channels, *roles: Role) -> dict[Place, str]:
    """Place and name of every feature in the channels of some roles."""
    return {
        ("channel_spec", channel, position): name
        for channel, names in channels.items()
        if channel in CHANNELS and CHANNELS[channel].role in roles
        for position, name in enumerate(names)
    }


def _kind_problem(rule: Channel, channel: str, name: str, feature: Feature) -> str | None:
    if rule.categorical is False and feature.is_categorical:
        return f"'{name}' has a cardinality, but the channel '{channel}' holds numbers"
    if rule.is_list is True and not feature.is_list:
        return f"'{name}' has no length, but the channel '{channel}' holds lists; give feature_spec.{name}.length"
    if rule.is_list is True and feature.is_vector:
        return f"'{name}' is a vector, but the channel '{channel}' holds lists with one value for each event"
    if rule.is_list is False and feature.is_list:
        return f"'{name}' is a list, but the channel '{channel}' holds one value a row"
    return None


def _role_problems(channels: Channels) -> Iterator[Problem]:
    labels, groups = _members(channels, "label"), _members(channels, "group")
    if not labels:
        yield ("channel_spec", "label"), "expected a label feature; found none"
    if len(groups) > 1:
        yield ("channel_spec", "group"), f"expected at most one group feature; found {listed(groups.values())}"
    of_labels, users = set(labels.values()), set(_members(channels, "user").values())
    for where, name in _members(channels, "user", "item", "context", "history", "negative_history").items():
        if name in of_labels:
            yield where, f"'{name}' is a label; it can't be an input too"
    for where, name in _members(channels, "item").items():
        if name in users:
            yield where, f"'{name}' is in the role 'user' too; a feature describes the user or the item"


def metadata_problems(
    metadata: Mapping[str, object], features: Features, channels: Channels, folder: Path
) -> Iterator[Problem]:
    """Values of the wrong shape, names of unknown features, and paths that lead outside the folder."""
    try:
        Metadata.model_validate({key: metadata[key] for key in Metadata.model_fields if key in metadata})
    except ValidationError as error:
        too_large: dict[str, bool] = {}
        for each in error.errors():
            key = str(each["loc"][0])
            too_large[key] = each["type"] == "less_than_equal" and too_large.get(key, True)
        for key, only in too_large.items():
            expected = f"at most {MOST_VALUES}" if only else _EXPECTED_OF_METADATA[key]
            yield ("metadata", key), f"is {shown(metadata[key])}; expected {expected}"
    for role in ("user", "item"):
        name = metadata.get(f"{role}_id")
        feature = features.get(name) if isinstance(name, str) else None
        if feature is None:
            if name is not None:
                yield ("metadata", f"{role}_id"), unknown("feature", str(name), features)
        elif not feature.is_categorical or feature.is_list or name not in _members(channels, role).values():
            expected = f"expected a feature in the role '{role}' that has a cardinality and is no list"
            yield ("metadata", f"{role}_id"), f"is '{name}'; {expected}"
    leak = metadata.get("leak")
    if leak is not None and (not isinstance(leak, str) or leak not in features):
        yield ("metadata", "leak"), unknown("feature", str(leak), features)
    elif leak is not None and any(leak in members for members in channels.values()):
        yield ("metadata", "leak"), f"is '{leak}', which plays a role; a model must not read what gives the label away"
    for key in ("timestamp", "event_weight"):
        yield from _number_problems(key, metadata.get(key), features, channels)
    for place, file in files_in(metadata).items():
        try:
            confined(folder, file)
        except PathError as error:
            yield ("metadata", *place), str(error)


def _number_problems(key: str, name: object, features: Features, channels: Channels) -> Iterator[Problem]:
    """Problems of a key that names a number of each row, which no model may read as an input."""
    if name is None:
        return
    if not isinstance(name, str) or name not in features:
        yield ("metadata", key), unknown("feature", str(name), features)
    elif features[name].is_categorical or features[name].is_list:
        yield ("metadata", key), f"is '{name}'; expected a feature that has no cardinality and is no list"
    elif any(name in members for members in channels.values()):
        yield ("metadata", key), f"is '{name}', which plays a role; take it out of channel_spec"


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        bits = value.bit_length()  # Python refuses to write thousands of digits
        return f"an integer of {bits:,} bits" if bits > _MOST_BITS else super().repr_int(value, level)


_MOST_BITS = 128
_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """A short repr for a message."""
    return _SHORT.repr(value)


def dotted(place: Place) -> str:
    """`channel_spec.user[0]` from its parts."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"
