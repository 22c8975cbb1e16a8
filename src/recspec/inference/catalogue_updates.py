"""New facts on items, from a shop's file, for a model that is trained: `catalogue_changes.parquet` of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from recspec.base import config
from recspec.base.errors import BundleError, DataError, SettingsError, how_many, listed, nearest, shortened
from recspec.base.files import locked
from recspec.bundle import Bundle, cards, versions
from recspec.bundle import folder as bundle
from recspec.data.encoding import (
    LONGEST_ID,
    MISSING_NUMBERS,
    TRUTH,
    Encoders,
    as_text,
    combined,
    is_text,
    plain,
    row_at,
    with_points,
)
from recspec.feature_spec import FeatureSpec
from recspec.inference.answer_files import read_rows
from recspec.inference.catalogue import Catalogues, is_list
from recspec.inference.item_changes import (
    BLOCKED,
    GIVEN,
    ITEM,
    VALUE,
    WITHDRAWN,
    BoundChanges,
    ItemChanges,
    of_one_type,
)
from recspec.inference.new_items import bind, item_features
from recspec.inference.raw_columns import RawCatalogue
from recspec.models import find_model, on_meta_device

NUMBER = r"^-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
WHOLE = r"^-?[0-9]{1,18}$"
ROWS_SHOWN = 3
"""Rows of a problem that a message names."""
MOST_WITHDRAWN = 0.2
"""Share of the items that a file of the whole catalogue may lack."""
IDS_SHOWN = 5
"""Items that a note names."""


@dataclass(frozen=True)
class CatalogueUpdate:
    """The changes of a run's items after a command, and what it changed."""

    file: Path
    version: int
    """The number of commands that changed something; 0 for none."""
    counts: Mapping[str, int]
    """Items of the file that are `new`, `changed`, `unchanged` and `returned`; and items that are `withdrawn` by it."""
    blocked: tuple[str, ...]
    waiting: tuple[str, ...]
    """Items that are new to the model and that it can't score before it is trained with them."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**vars(self), "file": str(self.file)}


def update_catalogue(
    run: Path,
    products: Path | None = None,
    *,
    block: Sequence[str] = (),
    unblock: Sequence[str] = (),
    whole: bool = False,
    most_withdrawn: float = MOST_WITHDRAWN,
) -> CatalogueUpdate:
    """Take new values of items from a file, with one row an item, and change the list of blocked items.

    Columns are those of the items that the run's dataset was prepared with; a column that is left out stays as it is.
    With `whole`, items that the file lacks are withdrawn.

    Raises:
        BundleError: if there is no model that knows items in `run`.
        DataError: with every problem of the file, or if it lacks a larger share of the items than `most_withdrawn`.
        SettingsError: for an item to unblock that is not blocked, or `whole` without a file.
    """
    target = _Target.open(run)
    with locked(target.file, "changing"):
        before = ItemChanges.load(target.file) if target.file.exists() else ItemChanges()
        asked = _Blocks.read(before, block, unblock)
        if whole and products is None:
            raise SettingsError("--whole: withdraws the items that a file lacks; name the file")
        if products is None and not block and not unblock:
            return _told(target, before, {}, ())
        rows = None if products is None else target.read(products)
        after, counts = _merged(target, before, rows, asked, whole=whole)
        if whole:
            _check_withdrawn(target, before, products, counts["withdrawn"], most_withdrawn)
        told = _told(target, after, counts, [*_notes(target, rows, asked, counts, whole=whole)])
        after.save(target.file)
    return told


def _check_withdrawn(target: _Target, before: ItemChanges, file: Path | None, count: int, most: float) -> None:
    """Refuse a file that lacks so many items that it may be cut off."""
    items = len(target.known) - int(before.flags(WITHDRAWN).sum())
    if count > most * items:
        raise DataError(
            f"{file}: lacks {count:,} of {items:,} items, more than a share of {most:g}, so it may be cut off; nothing "
            "was changed; if it is whole, --most-withdrawn 1 withdraws them"
        )


@dataclass(frozen=True, eq=False)
class _Target:
    """The items of a run's newest bundle."""

    run: Path
    trained: Bundle
    """Its model has no weights."""
    encoders: Encoders | None

    @classmethod
    def open(cls, run: Path) -> _Target:
        folder = bundle.find(run)
        home = versions.run_of(folder)
        if home is None or home.resolve() != run.resolve():
            where = "name the run that holds it" if home is None else f"name {home}"
            raise BundleError(f"{run}: is a bundle, whose files must stay as they are; {where}")
        card = bundle.read_card(folder)
        spec = FeatureSpec.load(folder)
        if spec.id_of("item") is None:
            raise BundleError(f"{run}: this model knows no items, so it has no catalogue of them")
        kind = bundle.OF_MEMBERS.get(card.model) or find_model(card.model)
        settings = config.build(kind.Settings, f"{folder / 'bundle.json'}: settings", card.settings)
        model = on_meta_device(lambda: kind(spec, settings))
        trained = Bundle(model, card, spec, folder, pipeline=cards.read_pipeline(folder))
        return cls(home, trained, Encoders.load(folder) if spec.metadata.get("encoders") else None)

    @property
    def file(self) -> Path:
        return self.run / versions.CHANGES

    @cached_property
    def raw(self) -> RawCatalogue:
        """The columns of the items as the bundle has them."""
        return RawCatalogue(self.trained.spec, self.encoders)

    @cached_property
    def _catalogues(self) -> Catalogues:
        return Catalogues(self.trained.spec, self.encoders, torch.device("cpu"))

    @property
    def first_id(self) -> int:
        """The first id of an item."""
        return int(self.trained.spec.reserves_unknown(self.trained.spec.item_id))

    def ids(self, items: Sequence[str]) -> NDArray[np.int64]:
        """The model's ids of items, below the first one for new ones."""
        return self._catalogues.item_ids(items)

    def nearest(self, item: str) -> str:
        """A hint at a known item whose id is like an unknown one's."""
        return nearest(item, self.known.to_pylist())

    def differ(self, before: ItemChanges, rows: pa.Table, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of known items hold another value than the catalogue."""
        raw, found = RawCatalogue(self.trained.spec, self.encoders, self.bound(before)), np.zeros(len(ids), bool)
        places = pa.array(ids - self.first_id)
        for name in rows.column_names[1:]:
            column = raw.column(name)
            held = combined(column) if isinstance(column, pa.ChunkedArray) else column
            one, other = of_one_type(held.take(places), combined(rows.column(name)))
            if pa.types.is_nested(one.type):
                found |= [left != right for left, right in zip(one.to_pylist(), other.to_pylist(), strict=True)]
            else:
                unequal = pc.fill_null(pc.not_equal(one, other), False)
                found |= np.asarray(pc.or_(unequal, pc.xor(pc.is_null(one), pc.is_null(other))))
        return found

    def bound(self, changes: ItemChanges) -> BoundChanges:
        found = bind(changes, self.trained.spec, self.encoders, self.trained)
        assert found is not None
        return found

    @cached_property
    def known(self) -> pa.Array:
        """The raw ids of the model's items as text."""
        ids = self.raw.column(self.trained.spec.item_id)
        return as_text(combined(ids) if isinstance(ids, pa.ChunkedArray) else ids)

    @property
    def keys(self) -> list[str]:
        """Names of a file's column of ids, the likeliest first."""
        spec = self.trained.spec
        encoder = self.encoders.encoders.get(spec.item_id) if self.encoders is not None else None
        names = (spec.metadata.get("items_key"), getattr(encoder, "column", None), spec.item_id)
        return [name for name in dict.fromkeys(names) if isinstance(name, str)]

    def read(self, file: Path) -> pa.Table:
        """The rows of a file: the column `ITEM`, and values by the names that changes have.

        Raises:
            DataError: with every problem.
        """
        table = pa.concat_tables([*read_rows(file)], promote_options="permissive")
        names = {name.strip(): name for name in table.column_names}
        key = next((name for name in self.keys if name in names), None)
        if key is None:
            wanted = "' or '".join(self.keys)
            raise DataError(f"{file}: no column '{wanted}', the item's id; found {listed(names)}")
        problems = [*self._problems_of_ids(combined(table.column(names[key])), key)]
        columns: dict[str, pa.Array] = {}
        has_commas = self.trained.spec.metadata.get("items_decimal") == "comma"
        for name, own in names.items():
            if name == key:
                continue
            kept = self.raw.kept_as(name)
            if not kept:
                choice = f"{nearest(name, self.raw.distinct)}; the items have {listed(self.raw.distinct)}"
                problems.append(f"column '{name}' is none of the items'{choice}; leave it out, or prepare with it")
            if twice := [each for each in kept if each in columns]:
                problems.append(f"column '{name}' is '{twice[0]}' too, which another column gives; leave one out")
            for each in kept:
                values, kind = combined(plain(table.column(own))), self.raw.column(each).type
                if has_commas and is_text(values.type) and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                    given = values
                    values, wrong = with_points(given)
                    if wrong.any():
                        example = shortened(given[int(wrong.argmax())].as_py())
                        told = f"{_rows(wrong)} no number with a decimal comma, as prepared: '{example}'"
                        problems.append(f"column '{name}': {told}")
                values, problem = converted(values, kind)
                columns[each] = values
                problems += [f"column '{name}': {problem}"] if problem else []
        if not table.num_rows:
            problems.append("holds no row, a header at most; expected one for each item")
        if problems:
            raise DataError.of(str(file), dict.fromkeys(problems))
        ids = as_text(combined(table.column(names[key])))
        is_known = pa.array(self.ids(ids.to_pylist()) >= self.first_id)  # an id may begin or end with a blank
        ids = pc.if_else(is_known, ids, pc.utf8_trim_whitespace(ids))
        return pa.table({ITEM: ids.cast(pa.string()), **columns})

    def _problems_of_ids(self, given: pa.Array, key: str) -> Iterator[str]:
        ids = pc.utf8_trim_whitespace(as_text(given))
        empty = np.asarray(pc.fill_null(pc.equal(ids, ""), True))
        if empty.any():
            yield f"column '{key}': {_rows(empty)} no id"
        long = np.asarray(pc.fill_null(pc.greater(pc.utf8_length(ids), LONGEST_ID), False))
        if long.any():
            yield f"column '{key}': {_rows(long)} an id of more than {LONGEST_ID:,} characters"
        counted = pc.value_counts(ids.filter(pa.array(~empty)))
        twice = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
        if len(twice):
            more = f" and {len(twice) - IDS_SHOWN:,} more" if len(twice) > IDS_SHOWN else ""
            names = listed(map(shortened, twice[:IDS_SHOWN].to_pylist()))
            yield f"column '{key}': names {names}{more} more than once; expected one row each"
        if pa.types.is_integer(self.raw.column(self.trained.spec.item_id).type):
            wrong = ~np.asarray(pc.fill_null(pc.match_substring_regex(ids, WHOLE), True)) & ~empty
            if wrong.any():
                example = shortened(ids[int(wrong.argmax())].as_py())
                yield f"column '{key}': {_rows(wrong)} no whole number, such as '{example}', as all known ids are"


@dataclass(frozen=True)
class _Blocks:
    """The items that are to be blocked from now on, and those no longer."""

    on: Sequence[str]
    off: Sequence[str]

    @classmethod
    def read(cls, before: ItemChanges, block: Sequence[str], unblock: Sequence[str]) -> _Blocks:
        """Raises SettingsError with every problem."""
        blocked = before.table.column(ITEM).filter(before.table.column(BLOCKED)).to_pylist()
        problems = [f"--block and --unblock: '{shortened(each)}' is in both" for each in block if each in unblock]
        problems += [
            f"--block: an id of more than {LONGEST_ID:,} characters" for each in block if len(each) > LONGEST_ID
        ]
        problems += ["--block: an empty id" for each in block if not each.strip()]
        problems += [
            f"--unblock: '{shortened(each)}' is not blocked{nearest(each, blocked)}"
            for each in unblock
            if each not in blocked
        ]
        if problems:
            raise SettingsError.of("catalogue", dict.fromkeys(problems))
        return cls([*dict.fromkeys(each.strip() for each in block)], [*dict.fromkeys(unblock)])


def _rows(wrong: NDArray[np.bool_]) -> str:
    """`row 3 has`, or `rows 3, 7, 9 and 4 more have`."""
    places = np.flatnonzero(wrong)
    more = f" and {len(places) - ROWS_SHOWN:,} more" if len(places) > ROWS_SHOWN else ""
    rows = ", ".join(row_at(int(place)).removeprefix("row ") for place in places[:ROWS_SHOWN])
    return f"row{'s' * (len(places) > 1)} {rows}{more} {'have' if len(places) > 1 else 'has'}"


def converted(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, str]:
    """Values of a file as the catalogue's type has them, or with a wider one; and a problem with them, or ''."""
    if values.type == kind or pa.types.is_null(kind) or pa.types.is_null(values.type):
        return values, ""
    if pa.types.is_nested(kind) or pa.types.is_nested(values.type):
        same = is_list(values) and pa.types.is_nested(kind)
        return values, "" if same else f"holds {values.type}; expected {kind}, as JSON lines and Parquet have it"
    if is_text(kind):
        return as_text(values), ""
    is_time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if not is_text(values.type):
        other_time = pa.types.is_timestamp(values.type) or pa.types.is_date(values.type)
        return values, "" if is_time == other_time else f"holds {values.type}; expected {kind}"
    text = pc.utf8_ltrim(pc.utf8_trim_whitespace(values), "+")
    lower = pc.utf8_lower(text)
    given = pc.if_else(pc.is_in(lower, value_set=pa.array(["", *MISSING_NUMBERS])), None, text)
    if is_time:
        try:
            return given.cast(kind), ""
        except pa.ArrowException as error:
            return values, f"holds no times such as 2024-01-31: {error}"
    truth = pc.index_in(lower, value_set=pa.array([*TRUTH]))
    spelled = pa.array([*TRUTH.values()]).take(truth)
    written = pc.if_else(pc.match_substring_regex(text, NUMBER), given, None)
    number = pc.coalesce(written.cast(pa.float64()), spelled.cast(pa.float64()))
    number = pc.if_else(pc.is_finite(number), number, None)
    if pa.types.is_boolean(kind):
        number = pc.if_else(pc.is_in(number, value_set=pa.array([0.0, 1.0])), number, None)
    wrong = np.asarray(pc.and_(pc.is_valid(given), pc.is_null(number)))
    if wrong.any():
        example = shortened(values[int(wrong.argmax())].as_py())
        what = "true nor false" if pa.types.is_boolean(kind) else "number, with a point and without a currency"
        return values, f"{_rows(wrong)} {'neither' if what[0] == 't' else 'no'} {what}: '{example}'"
    if pa.types.is_boolean(kind):
        return number.cast(kind), ""
    if pa.types.is_integer(kind) and pc.all(pc.match_substring_regex(written, WHOLE)).as_py() is not False:
        return pc.coalesce(written.cast(pa.int64()), spelled.cast(pa.int64())), ""
    return number, ""


def _merged(
    target: _Target, before: ItemChanges, rows: pa.Table | None, asked: _Blocks, *, whole: bool
) -> tuple[ItemChanges, dict[str, int]]:
    """The changes with those of a file's rows and of the commands, and what the file changed."""
    held = before.table.num_rows
    given = [] if rows is None else rows.column(ITEM).to_pylist()
    everyone = target.known.to_pylist() if whole else []
    items = [*dict.fromkeys([*before.table.column(ITEM).to_pylist(), *given, *asked.on, *everyone])]
    place = {item: at for at, item in enumerate(items)}
    own = np.array([place[item] for item in given], np.int64)
    was_withdrawn, blocked = (np.pad(before.flags(name), (0, len(items) - held)) for name in (WITHDRAWN, BLOCKED))
    withdrawn = was_withdrawn | whole
    withdrawn[own] = False
    blocked[[place[item] for item in asked.on]] = True
    blocked[[place[item] for item in asked.off]] = False
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*before.columns, *([] if rows is None else rows.column_names[1:])]):
        columns |= _column(name, before, rows, own, len(items))
    ids = target.ids(items)
    is_new = ids < target.first_id
    some = [np.asarray(column) for name, column in columns.items() if name.startswith(GIVEN)]
    needed = np.logical_or.reduce([withdrawn, blocked, is_new, *some]) & ~(is_new & withdrawn & ~blocked)
    table = pa.table({ITEM: pa.array(items, pa.string()), WITHDRAWN: withdrawn, BLOCKED: blocked, **columns})
    after = ItemChanges(table.filter(pa.array(needed)), before.version + 1)
    if rows is None:
        return after, {}
    differs = target.differ(before, rows.filter(pa.array(~is_new[own])), ids[own][~is_new[own]])
    counts = {
        "new": int(is_new[own].sum()),
        "changed": int(differs.sum()),
        "unchanged": int((~differs).sum()),
        "withdrawn": int((withdrawn & ~was_withdrawn).sum()),
        "returned": int(was_withdrawn[own].sum()),
    }
    return after, counts


def _column(
    name: str, before: ItemChanges, rows: pa.Table | None, own: NDArray[np.int64], count: int
) -> dict[str, pa.Array]:
    """The values of a column for `count` items: those of a file at the places `own`, else those before."""
    places = np.full(count, -1, np.int64)
    parts: list[pa.Array] = []
    if name in before.columns:
        values, given = before.values(name)
        places[: len(given)] = np.where(given, np.arange(len(given)), -1)
        parts.append(values)
    if rows is not None and name in rows.column_names:
        places[own] = np.arange(len(own)) + sum(map(len, parts))
        parts.append(combined(rows.column(name)))
    whole = pa.concat_arrays(of_one_type(*parts) if len(parts) == 2 else parts)
    found = whole.take(pa.array(places, mask=places < 0))
    return {VALUE + name: found, GIVEN + name: pa.array(places >= 0)}


def _told(
    target: _Target, changes: ItemChanges, counts: Mapping[str, int], notes: Sequence[str] = ()
) -> CatalogueUpdate:
    items, blocked = changes.table.column(ITEM), changes.flags(BLOCKED)
    waits = (target.bound(changes).ids < 0) & ~blocked & ~changes.flags(WITHDRAWN)
    blocks, waiting = (tuple(items.filter(pa.array(mask)).to_pylist()) for mask in (blocked, waits))
    return CatalogueUpdate(target.file, changes.version, counts, blocks, waiting, tuple(notes))


def _notes(
    target: _Target, rows: pa.Table | None, asked: _Blocks, counts: Mapping[str, int], *, whole: bool
) -> Iterator[str]:
    """What a user may not expect."""
    if rows is not None and not whole:
        absent = len(target.known) - (rows.num_rows - counts["new"])
        if absent:
            yield f"not in the file, and left as before: {how_many(absent, 'known item')} (--whole withdraws them)"
    if rows is not None and counts["changed"]:
        read = {name for feature in item_features(target.trained.model) for name in target.raw.kept_as(feature)}
        if stale := [name.removesuffix("_text") for name in rows.column_names if name in read]:
            yield (
                f"filters, boosts and lists use the new {listed(stale)}; the model itself reads those that it was "
                "trained with"
            )
    strange = np.flatnonzero(target.ids(asked.on) < target.first_id).tolist()
    for item in (asked.on[place] for place in strange):
        yield f"'{shortened(item)}' is unknown to the model{target.nearest(item)}; it is blocked once it is known"
