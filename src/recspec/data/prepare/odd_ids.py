"""Ids of a prepared dataset that look like two spellings of one thing, like shortened numbers, or like nobody's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recspec.base.errors import how_many, shortened
from recspec.data.encoding import VOCABULARIES, Encoders, Vocabulary
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec

ALIKE = 0.01  # share of the ids that are spelled like another one, from which they hardly are by chance
SHORTENED = r"^[0-9](\.[0-9]+)?[eE]\+[0-9]{2,}$"
"""Long numbers as spreadsheets save them: `1.23457E+12`."""
SHARE, TIMES_THE_NEXT = 0.05, 4  # of the train rows that one user has; and that the user with the next most has
FEWEST_IDS, FEWEST_ROWS = 10, 20  # fewer are a trial, not a dataset
HOW = "in case, blanks, accents' coding, invisible letters, leading zeros or a fraction of 0"
INVISIBLE = r"[\x{00AD}\x{200B}-\x{200F}\x{2060}\x{FEFF}]"
MARKS = ";|,"  # between ids in a text


def alike(ids: pa.Array, first: int = 0) -> list[tuple[str, str]]:
    """The ids from place `first` on that are spelled like an earlier one but for `HOW`, each with that one."""
    if pa.types.is_integer(ids.type):
        return []
    seen = pc.replace_substring_regex(pc.utf8_normalize(ids, "NFKC"), INVISIBLE, "")
    key = pc.replace_substring_regex(pc.utf8_lower(pc.utf8_trim_whitespace(seen)), r"^0*([0-9]+)(\.0+)?$", r"\1")
    _, earliest, codes = np.unique(
        key.dictionary_encode().indices.to_numpy(zero_copy_only=False), return_index=True, return_inverse=True
    )
    places = np.arange(len(ids))
    held = np.flatnonzero((earliest[codes] < places) & (places >= first))
    pairs = zip(ids.take(held).to_pylist(), ids.take(earliest[codes[held]]).to_pylist(), strict=True)
    return [*pairs]


def odd_ids(spec: FeatureSpec) -> Iterator[str]:
    """Warnings about ids of users and items."""
    for role in ("user", "item"):
        name = spec.metadata.get(f"{role}_id")
        path = spec.folder / VOCABULARIES / f"{name}.parquet"
        if name is None or not path.is_file():
            continue
        ids = Vocabulary.load(path).values
        yield from _spelled(role, ids)
        yield from _lists(role, ids)
        if role == "user":
            yield from _nobody(spec, str(name), ids)


def _spelled(role: str, ids: pa.Array) -> Iterator[str]:
    pairs = alike(ids)
    if len(ids) >= FEWEST_IDS and pairs and len(pairs) >= ALIKE * len(ids):
        (one, other), *_ = pairs
        yield (
            f"{len(pairs):,} of {len(ids):,} {role}s differ from another one only {HOW}, such as '{shortened(one)}' "
            f"and '{shortened(other)}': if they are the same, write them alike"
        )
    if not pa.types.is_integer(ids.type):
        found = ids.filter(pc.match_substring_regex(ids, SHORTENED))
        if len(found):
            yield (
                f"{how_many(len(found), role)} {'is' if len(found) == 1 else 'are'} written like "
                f"'{shortened(found[0].as_py())}', as spreadsheets shorten long numbers, so different {role}s may have "
                "become one: take the ids from where they come from, as text"
            )


def _lists(role: str, ids: pa.Array) -> Iterator[str]:
    """A warning about ids that are lists, as of a basket: their parts stand at the first place and behind it."""
    for mark in MARKS if len(ids) >= FEWEST_IDS and not pa.types.is_integer(ids.type) else ():
        held = ids.filter(pc.match_substring(ids, mark))
        if len(held) * 2 < len(ids):
            continue
        parts = pc.split_pattern(held, mark)
        each = pc.utf8_trim(parts.flatten(), " []\"'")
        is_first = np.isin(np.arange(len(each)), parts.offsets.to_numpy())
        first, others = pc.unique(each.filter(is_first)), pc.unique(each.filter(~is_first))
        if pc.sum(pc.is_in(first, others)).as_py() * 2 >= len(first):
            yield (
                f"{len(held):,} of {len(ids):,} {role}s hold '{mark}' between parts that other {role}s hold too, such "
                f"as '{shortened(held[0].as_py())}': if they are lists, write a row for each {role}, as explode() of "
                "pandas does"
            )


def _nobody(spec: FeatureSpec, name: str, ids: pa.Array) -> Iterator[str]:
    """A warning about the one user with far more rows than any other, as visitors without an id or a robot have."""
    if len(ids) < FEWEST_IDS or "train" not in spec.splits or name not in spec.columns("train"):
        return
    counts = np.zeros(len(ids) + 1, np.int64)
    for block in open_split(spec, "train", [name]).batches():
        counts += np.bincount(np.asarray(block[name]).reshape(-1), minlength=len(counts))
    rows, counts = int(counts.sum()), counts[1:]
    place = int(counts.argmax())
    second, most = np.partition(counts, -2)[-2:].tolist()
    if most >= max(FEWEST_ROWS, SHARE * rows, TIMES_THE_NEXT * second):
        whole = str(ids[place].as_py())
        column = getattr(Encoders.load(spec.folder).encoders[name], "column", None) or name
        told = (
            f"user '{shortened(whole)}' has {most:,} of {rows:,} train rows ({most / rows:.0%}), and no other one over"
        )
        yield (
            f"{told} {second:,}: if it stands for visitors without an id, or for a robot, --set 'types={{{column}: "
            f"{{type: text, missing: {json.dumps([whole])}}}}}' --set invalid_values=drop leaves it out"
        )
