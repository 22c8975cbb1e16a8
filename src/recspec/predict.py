"""Predictor: a bundle, raw rows in, probabilities out; a raw user id in, the best unseen items out.

Raw values are encoded by what `prepare` fitted. Unknown values get id 0, and the caller is told; an unknown user is
answered with the most popular items.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec import bundle
from recspec.archives import lines
from recspec.batch import Batch, num_rows, take, to_device
from recspec.bundle import Bundle, Seen
from recspec.distributed import pick_device
from recspec.encoding import (
    UNKNOWN_ID,
    Encoders,
    Gap,
    HashEncoder,
    Lists,
    Vocabulary,
    VocabularyEncoder,
    as_column,
    cut,
    split_lists,
)
from recspec.errors import BundleError, DataError, SettingsError, SpecError, listed, nearest, unknown
from recspec.evaluate import as_batch, check_same_features, id_feature
from recspec.feature_spec import FeatureSpec
from recspec.gaps import LEFT_OUT, NO_EVENT, Predictions, misread_lists, out_of_range, raw_names, row_at
from recspec.lookup import Lookup
from recspec.outputs import whole_file
from recspec.paths import local, special
from recspec.signature import signature_of
from recspec.storage import Column, Ragged, open_split

ROWS = 65_536
"""Raw rows read, scored and written at once."""

SCORES = 1 << 24
"""Scores of users x items held at once: 64 MB."""

TITLE_COLUMNS = ("title", "name", "product_title")
ROW_FORMATS = (".csv", ".jsonl", ".parquet")

Role = Literal["user", "item"]
ROLES: tuple[Role, ...] = ("user", "item")
Progress = Callable[[str, float, float | None], None]


def silent(stage: str, done: float, total: float | None) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class RecommendedItem:
    """One recommended item: its raw id, its title if the catalogue has one, and the model's score (a logit)."""

    item: str | int
    title: str | None
    score: float


@dataclass(frozen=True)
class Recommendation:
    """The answer for one user, best item first."""

    user: str | int
    known: bool
    items: tuple[RecommendedItem, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The answer as plain values, for JSON."""
        return {
            "user": self.user,
            "known": self.known,
            "items": [{"item": item.item, "title": item.title, "score": item.score} for item in self.items],
            "notes": list(self.notes),
        }


class Predictor:
    """A trained model that speaks raw values."""

    def __init__(self, trained: Bundle, device: torch.device) -> None:
        self.bundle, self.spec, self.device = trained, trained.spec, device
        self.model = trained.model.eval()
        self.model.settle()
        self.encoders = _encoders(trained)
        self._items: _Catalogue | None = None
        self._users: _Catalogue | None = None

    @classmethod
    def open(cls, path: str | Path, *, device: str = "auto", verify: bool = True) -> Predictor:
        """Open a bundle, or a run that holds one; with `verify`, compare its files with its manifest.

        Raises:
            BundleError: if there is none, or it is damaged.
        """
        chosen = pick_device(device)
        return cls(bundle.load(path, device=chosen, verify=verify), chosen)

    # --- rows ---------------------------------------------------------------------------------------------------

    def predict(self, rows: pa.Table) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], Predictions]:
        """Probability (B,) of the label for each of B raw rows, and what was unknown in them.

        A user's or item's own features may be left out where the catalogue knows them.

        Raises:
            DataError: naming every column that is missing or holds what it can't.
        """
        if self.encoders is not None:
            rows = rows.rename_columns(self.encoders.named(rows.column_names))
        batch, gaps = self.encode(rows)
        with torch.inference_mode():
            parts = [self.model(take(batch, slice(at, at + ROWS))).float() for at in range(0, rows.num_rows, ROWS)]
        logits = torch.cat(parts) if parts else torch.zeros(0)
        found = self.told(rows, gaps, *self.in_vain(rows.column_names))
        return torch.sigmoid(logits).cpu().numpy(), found

    def told(
        self, rows: pa.Table, gaps: dict[str, Gap], not_read: tuple[str, ...] = (), absent: tuple[str, ...] = ()
    ) -> Predictions:
        """What there is to tell of encoded raw rows: their gaps, lists cut at another sign, numbers out of range."""
        if self.encoders is None:
            return Predictions(rows.num_rows, gaps, {}, not_read, absent)
        features = self.model.features()
        lists, beyond = misread_lists(rows, self.encoders, features), out_of_range(rows, self.encoders, features)
        return Predictions(rows.num_rows, gaps, lists, not_read, absent, beyond)

    def in_vain(self, columns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Raw columns that nothing is made from, and the features whose columns may have been meant.

        The label and the group may be there. Features are named where a column is none of the dataset's, so that its
        name may be mistaken: all those that no column gives, an unknown user's id aside.
        """
        not_read = self._not_read(columns)
        if {name.strip() for name in not_read} <= {*raw_names(self.encoders, self.spec.features)}:
            return not_read, ()
        given = (self.anonymous_id(columns), *(name for name in self._asked if self._has_column(name, columns)))
        return not_read, tuple(name for name in self._asked if name not in given)

    def _not_read(self, columns: Sequence[str]) -> tuple[str, ...]:
        ids = [own for role in ROLES if (own := id_feature(self.spec, role)) is not None]
        read = {*raw_names(self.encoders, [*self._asked, *ids]), self.spec.label, self.spec.group}
        return tuple(name for name in columns if name.strip() not in read)

    @property
    def _asked(self) -> list[str]:
        """The features that rows may give: of a history its items and numbers, for the catalogue knows the others."""
        if self.encoders is None:
            return [*self.model.features()]
        past, items = self.spec.role("history"), self._history_of_items
        return [name for name in self.model.features()
                if name not in past or name == items or not self.spec.features[name].is_categorical]  # fmt: skip

    def encode(self, rows: pa.Table, features: Sequence[str] | None = None) -> tuple[Batch, dict[str, Gap]]:
        """Features of raw rows as the model reads them (all of the model's by default), and what was unknown in them.

        Raises:
            DataError: as `predict`.
        """
        wanted = self.model.features() if features is None else features
        anonymous = self.anonymous_id(rows.column_names)
        if anonymous is not None:
            rows = rows.append_column(anonymous, pa.nulls(rows.num_rows, pa.string()))
        looked_up = self._from_catalogues(wanted, rows.column_names)
        past = [name for name in wanted if name in self.spec.role("history")]
        given = [name for name in wanted if name not in looked_up and name not in past]
        columns = self._encode_columns(rows, given)
        batch = {name: _tensor(columns[name], self.spec, name).to(self.device) for name in given}
        for name, (own_id, catalogue) in looked_up.items():
            batch[name] = catalogue.features[name].index_select(0, batch[own_id].long())
        histories, lacking = self._encode_histories(rows, past) if past else ({}, {})
        batch |= {name: _tensor(column, self.spec, name).to(self.device) for name, column in histories.items()}
        if self.encoders is not None:
            return batch, self.encoders.gaps(rows, columns) | lacking
        unknown = {
            name: int((batch[name] == 0).sum())
            for name in given
            if self.spec.features[name].is_categorical
            and not self.spec.features[name].is_list
            and self.spec.reserves_unknown(name)
        }
        return batch, {name: Gap(0, count, UNKNOWN_ID) for name, count in unknown.items() if count}

    def _encode_histories(self, rows: pa.Table, names: Sequence[str]) -> tuple[Mapping[str, Lists], dict[str, Gap]]:
        """The lists of each row's history, aligned.

        They come from the column of its items, of which the item catalogue knows the rest; where there is none, from
        what the user catalogue holds of the row's user.
        """
        items, numbers = self._history_of_items, [n for n in names if not self.spec.features[n].is_categorical]
        if items is None or (not self._has_column(items, rows.column_names) and self._knows_histories(rows, names)):
            return self._histories_of_users(rows, names) if items is not None else (self._given(rows, names), {})
        if self.encoders is None:
            return self._given(rows, names), {}
        found = self.encoders.encode_history(rows, items, numbers[0] if numbers else None)
        ids, offsets = found.ids
        lists: dict[str, Lists] = {items: found.ids}
        for name in names:
            if name in numbers:
                lists[name] = found.numbers or (np.zeros(len(ids), np.float32), offsets)
            elif name != items:
                lists[name] = self._feature_of_items(name)[ids], offsets
        gaps = {
            items: Gap(found.empty, 0, NO_EVENT),
            **{name: Gap(rows.num_rows, 0, "0") for name in numbers if found.numbers is None},
            f"events of {items}": Gap(0, found.with_unknown, LEFT_OUT),
        }
        return lists, {name: gap for name, gap in gaps.items() if gap.missing or gap.unknown}

    @property
    def _history_of_items(self) -> str | None:
        """The history that holds the items' own ids."""
        if not self.spec.role("item"):
            return None
        space = self.spec.vocabulary(self.spec.item_id)
        found = (name for name in self.spec.role("history") if self.spec.features[name].is_categorical)
        return next((name for name in found if self.spec.vocabulary(name) == space), None)

    def _knows_histories(self, rows: pa.Table, names: Sequence[str]) -> bool:
        """Whether the rows name users of whom the catalogue holds what they did."""
        user = id_feature(self.spec, "user")
        return user is not None and self._has_column(user, rows.column_names) and set(names) <= set(self.users.lists)

    def _histories_of_users(self, rows: pa.Table, names: Sequence[str]) -> tuple[Mapping[str, Lists], dict[str, Gap]]:
        user = self._encode_columns(rows, [self.spec.user_id])[self.spec.user_id]
        assert not isinstance(user, tuple), "a user's id is a scalar"
        found = {name: self.users.lists_of(name, user.astype(np.int64)) for name in names}
        empty = int((next(iter(found.values())).lengths == 0).sum())
        gaps = {names[0]: Gap(empty, 0, NO_EVENT)} if empty else {}
        return {name: (lists.values, lists.offsets) for name, lists in found.items()}, gaps

    def _given(self, rows: pa.Table, names: Sequence[str]) -> dict[str, Lists]:
        """Histories of rows that hold ids and numbers already.

        Raises:
            DataError: naming columns that are missing, and the row whose lists are not equally long.
        """
        lists: dict[str, Lists] = {}
        for name, column in _prepared_columns(rows, names, self.spec).items():
            assert isinstance(column, tuple), f"{name} is a list"
            lists[name] = column
        first = names[0]
        for name in names[1:]:
            wrong = np.flatnonzero(np.diff(lists[name][1]) != np.diff(lists[first][1]))
            if len(wrong):
                row = int(wrong[0])
                held = [f"{np.diff(lists[n][1])[row]} in '{n}'" for n in (first, name)]
                raise DataError(f"raw rows: row {row + 1} holds {' and '.join(held)}; expected as many of each event")
        return {name: cut(*column, self.spec.features[name].length or 1, "last") for name, column in lists.items()}

    def _feature_of_items(self, history: str) -> NDArray[np.generic]:
        """What a history holds of each item, by the item's id (I,)."""
        space = self.spec.vocabulary(history)
        own = next((name for name in self.spec.role("item") if self.spec.vocabulary(name) == space), None)
        if own is None or own not in self.items.features:
            raise DataError(f"raw rows: the item catalogue does not know what '{history}' holds of an item")
        known: NDArray[np.generic] = self.items.features[own].cpu().numpy()
        return known

    def anonymous_id(self, columns: Sequence[str]) -> str | None:
        """The user's id where no column holds it, though unknown users have one: such rows are an unknown user's.

        A column with nearly that name that nothing reads was rather meant to hold it; then nothing stands for it.
        """
        user = id_feature(self.spec, "user") if self.spec.role("user") else None
        if user is None or self.encoders is None or self._has_column(user, columns):
            return None
        has_unknown = isinstance(self.encoders.encoders.get(user), VocabularyEncoder | HashEncoder)
        return user if has_unknown and not nearest(user, self._not_read(columns)) else None

    def _encode_columns(self, rows: pa.Table, names: Sequence[str]) -> Mapping[str, NDArray[np.generic] | Lists]:
        if self.encoders is not None:
            return self.encoders.encode(rows, names)
        return _prepared_columns(rows, names, self.spec)

    def _from_catalogues(self, wanted: Sequence[str], columns: Sequence[str]) -> dict[str, tuple[str, _Catalogue]]:
        """Features that the rows leave out and a catalogue knows: name -> (id feature, catalogue)."""
        found: dict[str, tuple[str, _Catalogue]] = {}
        for role in ROLES:
            if not self.spec.role(role):
                continue
            own_id = self._id_feature(role)
            missing = [
                name
                for name in self.spec.role(role)
                if name in wanted and name != own_id and not self._has_column(name, columns)
            ]
            if missing and own_id in wanted:
                catalogue = self.users if role == "user" else self.items
                found |= {name: (own_id, catalogue) for name in missing if name in catalogue.features}
        return found

    def can_encode(self, feature: str, columns: Sequence[str], features: Sequence[str]) -> bool:
        """Whether a feature comes from raw columns, or from the catalogue of a user or item among `features`."""
        return (
            self._has_column(feature, columns)
            or feature == self.anonymous_id(columns)
            or feature in self._from_catalogues(features, columns)
        )

    def _has_column(self, feature: str, columns: Sequence[str]) -> bool:
        if self.encoders is not None and feature in self.encoders.encoders:
            return self.encoders.can_encode(feature, columns)
        return feature in columns

    @cached_property
    def quick(self) -> tuple[Lookup, Lookup]:
        """What encodes usual values of the request's features, and of the candidates', in microseconds."""
        items, features = {*self.spec.role("item")}, self.model.features()
        inputs, encoders = signature_of(self.spec, features, "rows").inputs, self.encoders or Encoders({}, {})
        request = [port for port in inputs if port.name not in items]
        return Lookup(encoders, request), Lookup(encoders, [port for port in inputs if port.name in items])

    # --- recommendations ----------------------------------------------------------------------------------------

    @property
    def items(self) -> _Catalogue:
        """Every item, in order of id."""
        if self._items is None:
            self._items = _read_catalogue(self.bundle, "item", self.device)
        return self._items

    @property
    def users(self) -> _Catalogue:
        """Every user, in order of id."""
        if self._users is None:
            self._users = _read_catalogue(self.bundle, "user", self.device)
        return self._users

    @property
    def seen(self) -> Seen:
        """Which items each user acted on.

        Raises:
            BundleError: if the model was trained without users or items.
        """
        if self.bundle.seen is None:
            lacks = "item to recommend" if id_feature(self.spec, "user") else "user to recommend to"
            raise BundleError(f"{self.bundle.folder}: this model has no {lacks}; score rows with `recspec predict`")
        return self.bundle.seen

    def recommend(self, users: Sequence[str | int], *, k: int = 10, include_seen: bool = False) -> list[Recommendation]:
        """The k best items of each raw user id, best first, without those the user acted on.

        Equal scores are ordered by id. Items that nobody acted on in training are left out: the model knows nothing
        of them. An unknown user gets the most popular items, and `known` is False.
        """
        _ = self.seen  # a model that can't recommend says so first
        ids = self.user_ids(users)
        known = np.flatnonzero(ids >= self.users.first_id)
        raw = self.raw_ids("user", ids[known]).to_pylist()
        answers: dict[int, Recommendation] = {}
        for start in range(0, len(known), self.block):
            places = known[start : start + self.block]
            scores, items = self.best(torch.from_numpy(ids[places]), k, include_seen=include_seen)
            for row, place in enumerate(places):
                answers[int(place)] = self._answer(raw[start + row], scores[row], items[row], k)
        popular = self._described(*self.most_popular(k)) if len(answers) < len(users) else ()
        note = f"unknown user: these are the {len(popular)} most popular items; score is the number of users"
        return [answers.get(place) or Recommendation(user, False, popular, (note,)) for place, user in enumerate(users)]

    def liked(self, user: str | int, *, k: int = 5) -> list[str]:
        """Titles (or raw ids) of some items the user acted on, the most popular first."""
        number = max(0, int(self.user_ids([user])[0]))
        items = self.seen.of(number).long()
        best = items[torch.argsort(self.seen.counts[items], descending=True, stable=True)][:k]
        return [item.title or str(item.item) for item in self._described(best, torch.zeros(len(best)))]

    def busiest_user(self) -> str | int:
        """The raw id of the user who acted on most items."""
        number = int(torch.argmax(self.seen.offsets.diff()))
        raw: str | int = self.raw_ids("user", np.array([number]))[0].as_py()
        return raw

    def best(self, users: Tensor, k: int, *, include_seen: bool) -> tuple[Tensor, Tensor]:
        """Scores (R, k) and ids (R, k) of the best items of R users; a score of -inf fills a short list."""
        seen, items = self.seen, self.items
        request = self._request(users)
        with torch.inference_mode():
            scores = self.model.score_items(request, items.candidates).float()
            if not bool(scores.isfinite().all()):
                raise BundleError(
                    f"{self.bundle.folder}: the model gives no finite score for some items; train it again"
                )
            scores[:, (seen.counts[items.first_id :] == 0).to(self.device)] = -torch.inf
            if not include_seen:
                rows, columns = _pairs(seen, users, items.first_id)
                scores[rows.to(self.device), columns.to(self.device)] = -torch.inf
            best, places = _top(scores, min(k, scores.shape[1]))
        return best.cpu(), places.cpu() + items.first_id

    def _request(self, users: Tensor) -> Batch:
        """Features of the users; the model must need nothing that belongs to neither user nor item."""
        known, past = self.users.features, self.users.lists
        item_features = set(self.spec.role("item"))
        lacking = [name for name in self.model.features() if name not in {*known, *past, *item_features}]
        if lacking:
            raise BundleError(
                f"{self.bundle.folder}: the model reads {listed(lacking)}, which differ from request to request; "
                "recommend knows users and items only, so score rows with predict"
            )
        rows = users.to(self.device)
        request = {name: known[name].index_select(0, rows) for name in self.model.features() if name in known}
        for name in self.model.features():
            if name in past:
                lists = self.users.lists_of(name, users.cpu().numpy())
                request[name] = torch.from_numpy(lists.pad(int(lists.lengths.max(initial=0)))).to(self.device)
        return request

    def _answer(self, user: str | int, scores: Tensor, items: Tensor, k: int) -> Recommendation:
        kept = torch.isfinite(scores)
        found = self._described(items[kept], scores[kept])
        notes = (f"only {len(found)} unseen items are left",) if len(found) < k else ()
        return Recommendation(user, True, found, notes)

    def most_popular(self, k: int) -> tuple[Tensor, Tensor]:
        """Ids of the k items that most users acted on, and their numbers of users; ties by id."""
        counts = self.seen.counts.clone()
        counts[: self.items.first_id] = 0
        order = torch.argsort(counts, descending=True, stable=True)[:k]
        order = order[counts[order] > 0]
        return order, counts[order].float()

    def _described(self, items: Tensor, scores: Tensor) -> tuple[RecommendedItem, ...]:
        raw, titles = self.raw_ids("item", items.numpy()).to_pylist(), self.items.titles_of(items.numpy())
        return tuple(
            RecommendedItem(item, title, round(score, 6))
            for item, title, score in zip(raw, titles.to_pylist(), scores.tolist(), strict=True)
        )

    def user_ids(self, users: Sequence[str | int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Prepared ids; 0 (or -1 where 0 is a real user) for unknown ones."""
        vocabulary = self._vocabulary("user")
        if vocabulary is not None:
            return vocabulary.encode(list(users))
        shift, count = self.spec.shift(self.spec.user_id), self.spec.num_ids(self.spec.user_id)
        numbers = [int(user) + shift if re.fullmatch(r"-?[0-9]{1,18}", str(user)) else -1 for user in users]
        return np.array([number if shift <= number < count else -1 for number in numbers], np.int64)

    def raw_ids(self, role: Role, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
        """Raw values of prepared ids (N,) of users or items."""
        vocabulary = self._vocabulary(role)
        if vocabulary is not None:
            return vocabulary.decode(ids)
        return pa.array(ids - self.spec.shift(self._id_feature(role)))

    def _id_feature(self, role: Role) -> str:
        return self.spec.user_id if role == "user" else self.spec.item_id

    def _vocabulary(self, role: Role) -> Vocabulary | None:
        return self.encoders.vocabulary_of(self._id_feature(role)) if self.encoders is not None else None

    @property
    def block(self) -> int:
        """Users scored at once: users x items within `SCORES`."""
        return max(1, SCORES // max(1, len(self.items)))


# --- files of rows and users -----------------------------------------------------------------------------------------


def predict_file(
    predictor: Predictor, rows: Path, out: Path | None, *, columns: Sequence[str] | None = None
) -> Predictions:
    """Score a csv, jsonl or parquet file of raw rows; write them, with `probability` added, to a file of its kind.

    Of the rows' columns those named in `columns` are written, in that order; all without. Without `out`, CSV goes to
    standard output. Files larger than memory pass through in blocks.

    Raises:
        DataError: if the file can't be read, or a row holds what it can't.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    total = Predictions()
    with _row_writer(out) as write:
        for table in _read_rows(rows):
            if "probability" in table.column_names:
                raise DataError(f"{rows}: has a column 'probability' already; rename or remove it")
            names = {name.strip(): name for name in table.column_names}  # ` ad_id` where blanks follow the commas
            chosen = () if columns is None else _chosen(columns, list(names), rows)
            with _counted_from(total.rows):
                probability, found = predictor.predict(table)
            total += found
            scored = table.append_column("probability", pa.array(probability))
            if columns is not None:
                scored = scored.select([names[name] for name in chosen] + ["probability"])
                scored = scored.rename_columns([*chosen, "probability"])
            write(scored)
    return total


_ROW = re.compile(r"((?:raw rows: )?(?:column '.*?': )?)row ([0-9]+)\b")


def renumbered(problem: str, told: Callable[[int], str]) -> str:
    """What is wrong with encoded rows, with its row, whose place in its table `told` gets, told otherwise."""
    return _ROW.sub(lambda found: found[1] + told(int(found[2]) - 1), problem, count=1)


@contextmanager
def _counted_from(first: int) -> Iterator[None]:
    """Counts the rows of a file through all of its blocks, in what is wrong with them."""
    try:
        yield
    except DataError as error:
        if not first:
            raise
        problems = [problem.removeprefix("raw rows: ") for problem in error.problems]
        told = [renumbered(problem, lambda place: row_at(first + place)) for problem in problems]
        raise DataError.of("raw rows", told) from None


def predict_split(
    predictor: Predictor,
    spec: FeatureSpec,
    split: str,
    out: Path | None,
    *,
    columns: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Predictions:
    """Score a split of a prepared dataset, labelled or not, and write a row of it each: who, what, how likely.

    Columns: the group, the user's and the item's id (raw values where a vocabulary is there, null for the unknown
    one), the label, as far as the split holds them (or those of `columns`, which may be any feature that is no list),
    and `probability`. Written as the ending of `out` says, CSV to standard output without one; in blocks, so memory
    does not grow with the rows.

    Raises:
        SpecError: an unknown split, or another dataset than the model was trained on.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    _point_to_raw_rows(spec, split)
    held = spec.columns(split)
    check_same_features(predictor.model, spec)
    features = predictor.model.features()
    ids = (spec.group, *(id_feature(spec, role) for role in ROLES), spec.label)
    shown = tuple(dict.fromkeys(name for name in ids if name is not None and name in held))
    if columns is not None:
        scalars = [name for name in held if not spec.features[name].is_list]
        shown = _chosen(columns, scalars, f"{spec.folder}, split '{split}'")
    vocabularies = {name: found for name in shown if (found := _vocabulary_of(spec, name)) is not None}
    reader = open_split(spec, split, tuple(dict.fromkeys((*features, *shown))))
    total = Predictions()
    with _row_writer(out) as write, torch.inference_mode():
        for start, stop in pairwise(reader.blocks(ROWS).tolist()):
            progress("predict", start, reader.num_rows)
            block = reader.read(start, stop)
            batch = to_device(as_batch({name: block[name] for name in features}, spec), predictor.device)
            parts = [predictor.model(take(batch, slice(at, at + ROWS))).float() for at in range(0, stop - start, ROWS)]
            probability = torch.sigmoid(torch.cat(parts)).cpu().numpy()
            rows = {name: _raw(block[name], spec, name, vocabularies.get(name)) for name in shown}
            write(pa.table({**rows, "probability": pa.array(probability)}))
            total.rows += stop - start
    progress("predict", total.rows, reader.num_rows)
    return total


def _chosen(columns: Sequence[str], known: Sequence[str], where: Path | str) -> tuple[str, ...]:
    """The columns to write before `probability`, each once."""
    chosen = tuple(dict.fromkeys(name for name in columns if name != "probability"))
    strange = [name for name in chosen if name not in known]
    if strange:
        raise SettingsError(f"--columns: {where}: {unknown('column', strange, known)}")
    return chosen


def _point_to_raw_rows(spec: FeatureSpec, split: str) -> None:
    """A name that is no split may be a file of raw rows beside the splits, as Outbrain's clicks_test."""
    if split in spec.splits or "/" in split:
        return
    file = next((file for ending in ROW_FORMATS if (file := spec.folder / f"{split}{ending}").is_file()), None)
    if file is not None:
        raise SpecError(
            f"{spec.folder}: {unknown('split', split, spec.splits)}; {file} is there: "
            f"if it holds raw rows, `recspec predict RUN {file}`"
        )


def _vocabulary_of(spec: FeatureSpec, name: str) -> Vocabulary | None:
    """The raw values of a feature's ids, where `prepare` left them beside the specification."""
    file = spec.vocabulary_file(spec.vocabulary(name)) if spec.features[name].is_categorical else None
    return Vocabulary.load(file) if file is not None and file.is_file() else None


def _raw(column: Column, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None) -> pa.Array:
    assert not isinstance(column, Ragged), "a group, an id or a label is a scalar"
    if vocabulary is not None:
        return vocabulary.decode(column.astype(np.int64))
    shift = spec.shift(name)
    return pa.array(column - shift if shift else column)


def read_users(path: Path) -> list[str]:
    """Raw user ids of a text file, one a line; empty lines are passed over.

    Raises:
        DataError: if the file can't be read.
    """
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as a list of users: {error}") from None


def recommend_to_parquet(
    predictor: Predictor,
    users: Sequence[str | int] | None,
    out: Path,
    *,
    k: int = 10,
    include_seen: bool = False,
    progress: Progress = lambda *_: None,
) -> tuple[int, int]:
    """Write the k best items of the users (None: of all) to Parquet, in blocks of bounded memory.

    Gives the number of users, and how many of them are unknown.

    Columns: user, known, rank (from 1), item, title, score; one row an item.
    """
    seen = predictor.seen
    if users is None:
        ids = np.arange(predictor.users.first_id, seen.num_users)
        raw = predictor.raw_ids("user", ids)
    else:
        ids = predictor.user_ids(users)
        raw = _as_array(users)
    with _parquet_writer(out, _recommendation_schema(predictor, raw)) as write:
        for start in range(0, len(ids), predictor.block):
            part = slice(start, start + predictor.block)
            write(_recommendation_table(predictor, raw[part], ids[part], k, include_seen))
            progress("recommend", min(start + predictor.block, len(ids)), len(ids))
    return len(ids), int((ids < predictor.users.first_id).sum())


def _recommendation_schema(predictor: Predictor, users: pa.Array) -> pa.Schema:
    item = predictor.raw_ids("item", np.zeros(0, np.int64)).type
    return pa.schema(
        {
            "user": users.type,
            "known": pa.bool_(),
            "rank": pa.int32(),
            "item": item,
            "title": pa.string(),
            "score": pa.float32(),
        }.items()
    )


def _recommendation_table(
    predictor: Predictor, users: pa.Array, ids: np.ndarray[tuple[int], np.dtype[np.int64]], k: int, include_seen: bool
) -> pa.Table:
    """The answers of a block of users, one row an item."""
    popular, counts = predictor.most_popular(k)
    known = ids >= predictor.users.first_id
    width = min(k, len(predictor.items))
    items = np.zeros((len(ids), width), np.int64)
    scores = np.full((len(ids), width), -np.inf, np.float32)
    if known.any():
        best, places = predictor.best(torch.from_numpy(ids[known]), k, include_seen=include_seen)
        scores[known], items[known] = best.numpy(), places.numpy()
    scores[~known, : len(counts)], items[~known, : len(popular)] = counts.numpy(), popular.numpy()
    kept = np.isfinite(scores)
    rows, ranks = np.nonzero(kept)
    chosen = items[kept]
    columns = [
        users.take(pa.array(rows)),
        pa.array(known[rows]),
        pa.array(ranks.astype(np.int32) + 1),
        predictor.raw_ids("item", chosen),
        predictor.items.titles_of(chosen),
        pa.array(scores[kept]),
    ]
    return pa.Table.from_arrays(columns, schema=_recommendation_schema(predictor, users))


# --- catalogues ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Catalogue:
    """Features of every user or item, by id: row i of each tensor is id i; ids below `first_id` are nobody's."""

    features: Batch
    first_id: int
    titles: pa.Array | None
    lists: Mapping[str, Ragged] = field(default_factory=dict)
    """Histories of users, by id; they lie on the host, for most are not asked for."""

    def __len__(self) -> int:
        return num_rows(self.features) - self.first_id

    def lists_of(self, name: str, ids: NDArray[np.int64]) -> Ragged:
        """The histories of some users."""
        lists = self.lists[name]
        lengths = lists.lengths[ids]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        places = np.arange(offsets[-1]) + np.repeat(lists.offsets[ids] - offsets[:-1], lengths)
        return Ragged(lists.values[places], offsets)

    @property
    def candidates(self) -> Batch:
        """Every real user or item as a batch."""
        return take(self.features, slice(self.first_id, None))

    def titles_of(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
        """Titles (N,) of ids (N,); null where there is none."""
        if self.titles is None:
            return pa.nulls(len(ids), pa.string())
        return self.titles.take(pa.array(ids - self.first_id))


def _read_catalogue(trained: Bundle, role: Role, device: torch.device) -> _Catalogue:
    """The catalogue that the bundle keeps, or where there is none, the bare ids."""
    spec = trained.spec
    own_id = spec.user_id if role == "user" else spec.item_id
    first_id = int(spec.reserves_unknown(own_id))
    features: Batch = {own_id: torch.arange(spec.num_ids(own_id), device=device)}
    file = spec.catalogue(role)
    if file is None:
        return _Catalogue(features, first_id, None)
    try:
        table = pq.read_table(file, partitioning=None)
        _check_catalogue(table, spec, own_id)
    except (pa.ArrowException, OSError, ValueError, DataError) as error:
        raise BundleError(f"{file}: damaged, or of another specification: {error}") from None
    past = {name for name in table.column_names if name in spec.role("history")}
    lists = {name: _history(_column(table.column(name)), first_id) for name in past}
    for name in table.column_names:
        if name in spec.role(role) and name != own_id:  # a column for people may be named like another feature
            tensor = _tensor(_column(table.column(name)), spec, name)
            nobody = tensor.new_zeros((first_id, *tensor.shape[1:]))
            features[name] = torch.cat([nobody, tensor]).to(device)
    title = next((name for name in TITLE_COLUMNS if name in table.column_names), None)
    titles = table.column(title).combine_chunks().cast(pa.string()) if title else None
    return _Catalogue(features, first_id, titles, lists)


def _check_catalogue(table: pa.Table, spec: FeatureSpec, own_id: str) -> None:
    """Every feature's column in range, a row for each id.

    Raises:
        DataError: naming every column that is not.
    """
    problems = []
    for name in table.column_names:
        feature = spec.features.get(name)
        if feature is None or name == own_id:
            continue
        column = table.column(name).combine_chunks()
        of_lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        values = column.flatten() if of_lists else column
        whole = pa.types.is_integer(values.type)
        fits = whole or (pa.types.is_floating(values.type) and not feature.is_categorical)
        if of_lists != feature.is_list or not fits:
            what = f"{'lists of ' * feature.is_list}{'ids' if feature.is_categorical else 'numbers'}"
            problems.append(f"column '{name}' holds {column.type}; expected {what}")
        elif column.null_count or values.null_count:
            problems.append(f"column '{name}' has missing values; expected one in every row")
        elif len(values):
            low, high = (each.as_py() for each in pc.min_max(values).values())
            if feature.is_categorical and not 0 <= low <= high < spec.num_ids(name):
                problems.append(f"column '{name}' holds ids {low} to {high}; expected 0 to {spec.num_ids(name) - 1}")
            elif not feature.is_categorical and not pc.all(pc.is_finite(values)).as_py():
                problems.append(f"column '{name}' holds numbers that are not finite")
    own = spec.features[own_id].cardinality
    expected = spec.num_ids(own_id) - int(spec.reserves_unknown(own_id))
    if isinstance(own, int) and len(table) != expected:
        problems.append(f"has {len(table)} rows; expected {expected}, one for each id of '{own_id}'")
    if problems:
        raise DataError.of("its columns", problems)


def _history(column: object, first_id: int) -> Ragged:
    """A user catalogue's column of lists, by id: those below the first have none."""
    assert isinstance(column, tuple), "a history is a list"
    values, offsets = column
    return Ragged(np.array(values), np.concatenate([np.zeros(first_id, np.int64), np.asarray(offsets, np.int64)]))


def _encoders(trained: Bundle) -> Encoders | None:
    return Encoders.load(trained.folder) if trained.spec.metadata.get("encoders") else None


def _column(column: pa.ChunkedArray) -> object:
    """A Parquet column as an array, or for lists as values and offsets."""
    array = column.combine_chunks()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return array.flatten().to_numpy(zero_copy_only=False), np.asarray(array.offsets, np.int64)
    return array.to_numpy(zero_copy_only=False)


def _tensor(column: object, spec: FeatureSpec, name: str) -> Tensor:
    """A prepared column as the tensor a batch holds: (B,), or (B, length) with padding 0."""
    if isinstance(column, tuple):
        values, offsets = column
        length = spec.features[name].length
        assert length is not None, f"{name} is no list, but its column holds lists"
        return torch.from_numpy(Ragged(np.asarray(values), np.asarray(offsets)).truncate(length).pad(length))
    return torch.from_numpy(np.array(column))  # a copy: arrow's memory may not be written to


def _prepared_columns(
    rows: pa.Table, names: Sequence[str], spec: FeatureSpec
) -> Mapping[str, NDArray[np.generic] | Lists]:
    """Columns of a dataset that recspec did not prepare: the rows hold ids and numbers already.

    Raises:
        DataError: naming every column that is missing, and every id that is out of range.
    """
    columns: dict[str, NDArray[np.generic] | Lists] = {}
    problems = []
    for name in names:
        if name not in rows.column_names:
            problems.append(f"no column '{name}'{nearest(name, rows.column_names)}")
            continue
        column = rows.column(name).combine_chunks()
        try:
            made = _prepared_lists if spec.features[name].is_list else _prepared_column
            columns[name] = made(column, spec, name)
        except (DataError, pa.ArrowException) as error:
            problems.append(f"column '{name}': {error}")
    if problems:
        raise DataError.of("raw rows", problems)
    return columns


def _prepared_column(column: pa.Array, spec: FeatureSpec, name: str) -> NDArray[np.generic]:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        raise DataError("holds lists; expected one value a row")
    if column.null_count:
        row = column.is_null().index(True).as_py() + 1
        raise DataError(f"row {row} has no value; expected one in every row")
    if not spec.features[name].is_categorical:
        numbers: NDArray[np.generic] = column.cast(pa.float32()).to_numpy(zero_copy_only=False)
        return numbers
    return _in_range(column, np.arange(len(column) + 1), spec, name)


def _prepared_lists(column: pa.Array, spec: FeatureSpec, name: str) -> Lists:
    """Values and offsets of lists, without the padding that stands in them."""
    feature, of_events = spec.features[name], name in spec.role("history")
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise DataError(f"holds {column.type}; expected a list in every row, as JSONL and Parquet have them")
    flat, offsets = split_lists(column, None)
    if not feature.is_categorical:
        lengths = np.diff(offsets)
        wrong = np.flatnonzero((lengths != feature.length) & (not of_events))
        if len(wrong):
            row = int(wrong[0])
            raise DataError(f"row {row + 1} holds {np.diff(offsets)[row]} numbers; expected {feature.length}")
        return flat.cast(pa.float32()).to_numpy(zero_copy_only=False), offsets
    padding = -1 if feature.padding is None else feature.padding
    lists = Ragged(flat.cast(pa.int64()).to_numpy(zero_copy_only=False), offsets)
    lists = lists.where(lists.values != padding)
    return _in_range(pa.array(lists.values), lists.offsets, spec, name), lists.offsets


def _in_range(values: pa.Array, offsets: NDArray[np.int64], spec: FeatureSpec, name: str) -> NDArray[np.int64]:
    """Ids as batches have them, of rows [offsets[i], offsets[i + 1])."""
    shift = spec.shift(name)
    ids: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False) + shift
    limit = spec.num_ids(name)
    wrong = np.flatnonzero((ids < shift) | (ids >= limit))
    if len(wrong):
        row = int(np.searchsorted(offsets, wrong[0], side="right"))
        verb = "holds" if spec.features[name].is_list else "is"
        raise DataError(f"row {row} {verb} {ids[wrong[0]] - shift}; expected an id in [0, {limit - shift})")
    return ids


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values (R, k) and places (R, k) of the k highest of each row (R, N), best first, equal ones by place.

    torch.topk alone takes any of the equal scores at the end of the list: rows where some are left out are sorted.
    """
    best, places = torch.topk(scores, k, dim=1)
    if k:
        last = best[:, -1:]
        cut = ((scores >= last).sum(dim=1) > k) & torch.isfinite(last[:, 0])
        places[cut] = torch.argsort(scores[cut], dim=1, descending=True, stable=True)[:, :k]
    places = places.sort(dim=1).values
    best = scores.gather(1, places)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


def _pairs(seen: Seen, users: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """Row of the user and column of the item of everything that the users acted on."""
    starts, counts = seen.offsets[users], seen.offsets[users + 1] - seen.offsets[users]
    rows = torch.repeat_interleave(torch.arange(len(users)), counts)
    within = torch.arange(len(rows)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return rows, seen.items[torch.repeat_interleave(starts, counts) + within].long() - first_id


# --- files -----------------------------------------------------------------------------------------------------------


def _read_rows(path: Path) -> Iterator[pa.Table]:
    """Tables of at most `ROWS` rows.

    Raises:
        DataError: if the file can't be read as what its ending says.
    """
    if not local(path, "rows").is_file():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        wrong = special(path) or f"no such file{nearest(path.name, known)}"
        raise DataError(f"{path}: {wrong}")
    if path.suffix not in ROW_FORMATS:
        raise DataError(f"{path}: rows are read from {', '.join(ROW_FORMATS)}; found '{path.suffix}'")
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                yield from (pa.Table.from_batches([batch]) for batch in file.iter_batches(ROWS))
        elif path.suffix == ".csv":
            with path.open("rb") as names, path.open("rb") as values:
                with pa_csv.open_csv(names) as reader:
                    texts = dict.fromkeys(reader.schema.names, pa.string())
                # Text as it is written: `007` is no 7, and the encoders know where numbers are meant.
                convert = pa_csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
                with pa_csv.open_csv(values, convert_options=convert, parse_options=_CSV) as reader:
                    for batch in reader:
                        yield from _cut(pa.Table.from_batches([batch]))
        else:
            yield from _read_objects(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as {path.suffix[1:]}: {error}") from None


_CSV = pa_csv.ParseOptions(newlines_in_values=True)


def _read_objects(path: Path) -> Iterator[pa.Table]:
    """Tables of JSON lines: numbers are numbers, and texts stay as they are, dates among them.

    Raises:
        DataError: naming a line that is no JSON object, or has no end.
    """
    waiting: list[dict[str, object]] = []
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number:,}: is no JSON object: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"{path}: line {number:,}: is no JSON object: {line[:60]!r}")
        waiting.append(found)
        if len(waiting) == ROWS:
            yield _table_of(waiting)
            waiting = []
    if waiting:
        yield _table_of(waiting)


def _table_of(objects: Sequence[Mapping[str, object]]) -> pa.Table:
    names = dict.fromkeys(name for each in objects for name in each)
    return pa.table({name: as_column([each.get(name) for each in objects]) for name in names})


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    yield from (table.slice(start, ROWS) for start in range(0, table.num_rows, ROWS))


@contextmanager
def _row_writer(out: Path | None) -> Iterator[Callable[[pa.Table], None]]:
    """Writes tables as the ending of `out` says; CSV to standard output without one."""
    if out is None:
        yield _csv_to(sys.stdout.buffer)
        return
    if out.suffix not in ROW_FORMATS:
        raise SettingsError(f"--out {out}: expected a name that ends in {', '.join(ROW_FORMATS)}")
    if out.suffix == ".parquet":
        with _parquet_writer(out, None) as write:
            yield write
        return
    with whole_file(local(out, "out")) as temporary, temporary.open("wb") as file:
        yield _csv_to(file) if out.suffix == ".csv" else _jsonl_to(file)


def _csv_to(file: BinaryIO) -> Callable[[pa.Table], None]:
    written: list[bool] = []

    def write(table: pa.Table) -> None:
        table = _with_lists_as_texts(table)
        pa_csv.write_csv(table, file, pa_csv.WriteOptions(include_header=not written, quoting_style="needed"))
        written.append(True)

    return write


def _with_lists_as_texts(table: pa.Table) -> pa.Table:
    """The same table, each list one text with its values between `|`: CSV has no lists."""
    for place, column in enumerate(table.columns):
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            texts = pc.binary_join(column.cast(pa.list_(pa.string())), "|")
            table = table.set_column(place, table.field(place).name, texts)
    return table


def _jsonl_to(file: BinaryIO) -> Callable[[pa.Table], None]:
    def write(table: pa.Table) -> None:
        file.writelines((json.dumps(row, default=str, ensure_ascii=False) + "\n").encode() for row in table.to_pylist())

    return write


@contextmanager
def _parquet_writer(out: Path, schema: pa.Schema | None) -> Iterator[Callable[[pa.Table], None]]:
    """Writes tables to a Parquet file under a temporary name, renamed at the end; without a row it has the schema."""
    with whole_file(local(out, "out")) as temporary:
        writers: list[pq.ParquetWriter] = []

        def write(table: pa.Table) -> None:
            if not writers:
                writers.append(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
            writers[0].write_table(table)

        try:
            yield write
            if not writers:
                pq.write_table((schema or pa.schema([])).empty_table(), temporary)
        finally:
            for writer in writers:
                writer.close()


def _as_array(users: Sequence[str | int]) -> pa.Array:
    """Raw user ids as one column; numbers and texts together become texts."""
    if all(isinstance(user, int) for user in users):
        return pa.array(users, pa.int64())
    return pa.array([str(user) for user in users], pa.string())
