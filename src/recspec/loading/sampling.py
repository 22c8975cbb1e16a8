"""Negatives drawn beside the rows of a batch: of each row its own, or shared by all rows.

The draws are a function of (seed, epoch, step) for the global batch, of which each rank keeps its own rows: two ranks
see the negatives that one would. By default a draw may be an item that the user acted on: of uniform draws one in 22
is at ml-1m's density, one in 187 at ml-20m's.

Shared negatives are those of the global batch, on every rank and in every micro-batch: a row's loss does not depend on
the part of the batch that it is in. So that a rank knows the positives of the others, the ranks exchange three numbers
for each row.

Shapes: B rows of a rank's batch; C rows of the global batch; n draws for a row; M = C + n C shared items; I ids of
items; L a list feature's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Literal, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import SettingsError, unknown
from recspec.data.storage import Column, Ragged, open_split, scalar
from recspec.feature_spec import FeatureSpec
from recspec.loading.blocks import RankBatch, mixed_seed, where
from recspec.models.layers import Batch, drawn_of, log_expected_of, num_rows

Distribution = Literal["uniform", "popularity"]

REDRAWS = 8
"""Times a negative that the user acted on is drawn anew; a user who acted on half of all items keeps 1 in 512."""


@dataclass
class NegativeSampler:
    """Adds n rows with other items to each row of a batch."""

    num_negatives: int
    num_items: int
    _: KW_ONLY
    user: str
    item: str
    label: str
    first_id: int = 0
    """Ids are drawn from [first_id, num_items)."""
    weights: InitVar[Tensor | None] = None
    """Proportions of the draws (I,); uniform by default."""
    positives: Tensor | None = None
    """Sorted keys user * num_items + item; an item that a user acted on is drawn anew, up to `REDRAWS` times."""
    item_features: Mapping[str, Tensor] = field(default_factory=dict)
    """The item's other features by id, (I,) or (I, L)."""
    beside: bool = False
    """Whether drawn items are columns beside each row (`models.LossNeeds`) instead of rows behind it."""
    seed: int = 0

    def __post_init__(self, weights: Tensor | None) -> None:
        if self.num_items <= self.first_id:
            raise SettingsError(f"'{self.item}' has no item to draw negatives from; set train.negatives=0")
        self.positives = None if self.positives is None else self.positives.contiguous()
        self._cumulative = None if weights is None else cumulative(weights, self.item)
        share = torch.tensor(1 / (self.num_items - self.first_id)) if weights is None else weights / weights.sum()
        self._log_expected = (self.num_negatives * share).log().float()  # (I,), or () if all are equal

    def __call__(self, share: RankBatch, *, epoch: int, step: int) -> Batch:
        """The rows of the share, then n blocks of as many rows that differ in the item and have label 0.

        With `beside`, the rows of the share, each with the ids of its n items and the logs of their expected counts,
        which are those of the first draws: they know of no item that is drawn anew.
        """
        batch, size = share.batch, num_rows(share.batch)
        mine = slice(share.first_row, share.first_row + size)
        total = max(share.total_rows, mine.stop)  # a filler row lies behind the last one
        device, kind = batch[self.item].device, batch[self.item].dtype
        drawn = self._draw(total, device, kind, epoch, step, 0)[:, mine]
        if self.positives is not None:
            for redraw in range(1, REDRAWS + 1):
                known = acted_on(self.positives, batch[self.user].long() * self.num_items + drawn)  # (n, B)
                if known.device.type == "cpu" and not known.any():  # a GPU would be waited for
                    break
                drawn = torch.where(known, self._draw(total, device, kind, epoch, step, redraw)[:, mine], drawn)
        if self.beside:
            known, shape = self._log_expected, (size, self.num_negatives)
            expected = known[drawn.T.long()] if known.dim() else torch.full(shape, known.item(), device=device)
            return {**batch, drawn_of(self.item): drawn.T, log_expected_of(self.item): expected}
        drawn = drawn.reshape(-1)
        return {name: self._extended(name, tensor, batch[self.item], drawn) for name, tensor in batch.items()}

    def _draw(self, total: int, device: torch.device, kind: torch.dtype, *numbers: int) -> Tensor:
        """Item ids (n, C)."""
        generator = torch.Generator(device).manual_seed(mixed_seed(self.seed, *numbers))
        shape = (self.num_negatives, total)
        if self._cumulative is None:
            return torch.randint(self.first_id, self.num_items, shape, generator=generator, device=device, dtype=kind)
        return _draw_by(self._cumulative, shape, generator).to(kind)

    def _extended(self, name: str, tensor: Tensor, items: Tensor, drawn: Tensor) -> Tensor:
        """A feature of the rows, and of the negatives behind them.

        Items' features come from one place for both: a row's own value, such as the price of that day, would tell the
        rows from the negatives. Items without an id keep their row's value, because none of them is drawn.
        """
        if name == self.item:
            return torch.cat([tensor, drawn])
        if name == self.label:
            return torch.cat([tensor, tensor.new_zeros(len(drawn))])
        if name in self.item_features:
            known = self.item_features[name].index_select(0, torch.cat([items, drawn])).to(tensor.dtype)
            known, given = _equally_wide(known, tensor)
            return torch.cat([_known_or(given, known[: len(items)], items >= self.first_id), known[len(items) :]])
        return tensor.repeat(1 + self.num_negatives, *[1] * (tensor.dim() - 1))


def acted_on(positives: Tensor, keys: Tensor) -> Tensor:
    """Which keys, of any shape, are among the sorted `positives`."""
    keys = keys.contiguous()
    at = torch.searchsorted(positives, keys).clamp_(max=max(0, len(positives) - 1))
    return positives[at] == keys if len(positives) else torch.zeros_like(keys, dtype=torch.bool)


def _draw_by(cumulative: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Item ids of a shape, drawn by the cumulative shares (I,) of the items."""
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return torch.searchsorted(cumulative.to(generator.device), uniform, right=True)


def _equally_wide(*features: Tensor) -> list[Tensor]:
    """Features of some rows; of lists, which may come in other widths, the narrower ones are padded with 0."""
    if features[0].dim() == 1:
        return [*features]
    width = max(each.shape[1] for each in features)
    return [F.pad(each, (0, width - each.shape[1])) for each in features]


def _known_or(given: Tensor, known: Tensor, has_id: Tensor) -> Tensor:
    """A feature of rows: the catalogue's value for an item with an id, the row's own value for any other."""
    return torch.where(has_id if known.dim() == 1 else has_id[:, None], known, given)


def negatives_by_default(spec: FeatureSpec) -> int:
    """Negatives a row by default: 4 where train holds interactions alone, none beside labelled rows."""
    return 4 if spec.has_series and not holds_negatives(spec) else 0


def holds_negatives(spec: FeatureSpec) -> bool:
    """Whether the train split was prepared with negatives behind its interactions."""
    return bool(spec.metadata.get("train_negatives"))


def sampler_for(
    spec: FeatureSpec,
    num_negatives: int,
    *,
    features: Iterable[str],
    distribution: Distribution = "uniform",
    power: float = 0.75,
    reject_positives: bool = False,
    beside: bool = False,
    splits: Sequence[str] = ("train",),
    seed: int = 0,
    device: torch.device | None = None,
) -> NegativeSampler:
    """The sampler for a dataset, on the device of the batches; reads from `splits` only what the draws need.

    Of the `features` that the model reads, those of the item are looked up for drawn items in the item catalogue, or
    without one in the rows of `splits`. With `popularity`, items are drawn in proportion to their positive rows to the
    `power`. With `reject_positives`, items that the user acted on in `splits` are drawn anew. With `beside`, drawn
    items are columns instead of rows.

    Raises:
        SettingsError: if there is no item to draw, or for an unknown distribution.
    """
    if distribution not in get_args(Distribution):
        raise SettingsError(unknown("distribution", distribution, get_args(Distribution)))
    weights = None
    if distribution == "popularity":
        counts = _positives_of_items(spec, splits)
        weights = torch.from_numpy(counts**power * (counts > 0)).to(device)
    return NegativeSampler(
        num_negatives,
        spec.num_ids(spec.item_id),
        user=spec.user_id,
        item=spec.item_id,
        label=spec.label,
        first_id=int(spec.reserves_unknown(spec.item_id)),
        weights=weights,
        positives=_positive_keys(spec, splits, spec.user_id).to(device) if reject_positives else None,
        item_features=_tables(spec, splits, features, device),
        beside=beside,
        seed=seed,
    )


# --- what the draws need to know of the data -------------------------------------------------------------------------


def positive_rows(spec: FeatureSpec, splits: Sequence[str], *names: str) -> Iterator[tuple[NDArray[np.integer], ...]]:
    """Blocks of some id columns, of the rows whose label is positive."""
    for split in splits:
        for columns in open_split(spec, split, [*names, spec.label]).batches():
            keep = scalar(columns[spec.label]) > 0
            yield tuple(scalar(columns[name])[keep] for name in names)


def _positives_of_items(spec: FeatureSpec, splits: Sequence[str]) -> NDArray[np.float64]:
    """The number of positive rows of each item (I,)."""
    counts = np.zeros(spec.num_ids(spec.item_id))
    for (items,) in positive_rows(spec, splits, spec.item_id):
        counts += np.bincount(items, minlength=len(counts))
    return counts


def _positive_keys(spec: FeatureSpec, splits: Sequence[str], user: str) -> Tensor:
    """Sorted keys user * I + item of the positive rows; 8 bytes a pair."""
    num_items, pairs = spec.num_ids(spec.item_id), positive_rows(spec, splits, user, spec.item_id)
    keys = [users.astype(np.int64) * num_items + items for users, items in pairs]
    return torch.from_numpy(np.unique(np.concatenate([np.zeros(0, np.int64), *keys])))


def _tables(spec: FeatureSpec, splits: Sequence[str], features: Iterable[str], device: torch.device | None) -> Batch:
    """Those of some features that belong to the item, without its id, by id."""
    names = [name for name in features if name != spec.item_id and name in spec.role("item")]
    return {name: table.to(device) for name, table in item_features(spec, splits, names).items()}


def item_features(spec: FeatureSpec, splits: Sequence[str], names: Sequence[str]) -> Batch:
    """Some features of every item by id, (I,) or (I, L); zeros for an item that is nowhere described.

    They come from the item catalogue, whose first row is the first id after unknown, where the dataset has one; else
    from the rows of `splits`.
    """
    tables: dict[str, NDArray[np.generic]] = {}
    for ids, columns in _described_items(spec, splits, names) if names else ():
        for name in names:
            length = spec.features[name].length
            column = columns[name]
            values = column.pad(length or 0) if isinstance(column, Ragged) else column
            table = tables.setdefault(name, np.zeros((spec.num_ids(spec.item_id), *values.shape[1:]), values.dtype))
            table[ids] = values
    return {name: torch.from_numpy(table) for name, table in tables.items()}


def _described_items(
    spec: FeatureSpec, splits: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[NDArray[np.integer], Mapping[str, Column]]]:
    """Blocks of item ids and those items' features."""
    file = spec.catalogue("item")
    if file is not None and set(names) <= set(pq.read_schema(file).names):
        table = pq.read_table(file, columns=list(names), partitioning=None)
        first = int(spec.reserves_unknown(spec.item_id))
        columns = {name: _from_arrow(table.column(name).combine_chunks()) for name in names}
        yield np.arange(first, first + len(table)), columns
        return
    for split in splits:
        for block in open_split(spec, split, [spec.item_id, *names]).batches():
            yield scalar(block[spec.item_id]), block


def _from_arrow(column: pa.Array) -> Column:
    if isinstance(column, pa.ListArray):
        offsets = column.offsets.to_numpy().astype(np.int64)
        return Ragged(column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])
    return cast(NDArray[np.generic], column.to_numpy(zero_copy_only=False))


def cumulative(weights: Tensor, item: str) -> Tensor:
    """Share of the draws that fall on an id or one before it (I,)."""
    total = weights.double().cumsum(0)
    if not total[-1] > 0:
        raise SettingsError(f"no '{item}' has a positive row to draw by popularity; use negative_distribution=uniform")
    return total / total[-1]


@dataclass(kw_only=True)
class SharedNegatives:
    """Adds to each row of a batch the M items that all its rows are compared with.

    The number of times m_j that item j is expected among the M items is C (n q_j + p_j): q_j is the share of the draws
    that fall on it, p_j the share of an epoch's rows that are its positives. Yang et al.: Mixed Negative Sampling for
    Learning Two-tower Neural Networks in Recommendations, WWW 2020.
    """

    item: str
    label: str
    user: str | None = None
    """The user's id; two rows of one user are never compared with each other's positives."""
    first_id: int = 0
    """Items with smaller ids, which are unknown ones, are negatives of no row."""
    num_negatives: int = 0
    """n."""
    proportions: Tensor | None = None
    """Proportions of the draws (I,), if there are draws."""
    row_shares: Tensor | None = None
    """p (I,), if the positives of the batch's rows are negatives of the others."""
    positives: Tensor | None = None
    """Sorted keys user * I + item: a row is not compared with drawn items that its user acted on."""
    dislikes: tuple[Tensor, Tensor] | None = None
    """Offsets (U + 1,) and items of users' disliked items; each row is compared with a drawn one of its user."""
    dislike_weight: float = 1.0
    """The weight of that item, in those of all items together."""
    item_features: Mapping[str, Tensor] = field(default_factory=dict)
    """The item's other features by id, (I,) or (I, L)."""
    gather: Callable[[Tensor], Tensor] = lambda rows: rows
    """The rows of all ranks, in the order of the ranks, from those of this rank."""
    seed: int = 0

    def __post_init__(self) -> None:
        expected: Tensor | None = None  # for each row of the global batch
        if self.proportions is not None:
            self._cumulative = cumulative(self.proportions, self.item)
            expected = self.num_negatives * self.proportions.double() / self.proportions.double().sum()
        if self.row_shares is not None:
            own = self.row_shares.double()
            expected = own if expected is None else expected + own
        assert expected is not None
        self._log_expected = expected.log()
        self.num_items = len(expected)

    def __call__(self, share: RankBatch, *, epoch: int, step: int) -> Batch:
        """The rows of the share with the columns that `models.Model.shares_negatives` names.

        Item features of the rows themselves are those of the catalogue too, since a row's own value, such as the price
        of that day, would tell the positive from the others.
        """
        batch, total, own = share.batch, share.total_rows, share.batch[self.item]
        ids, log_expected, left_out = list[Tensor](), list[Tensor](), list[Tensor]()
        if self.row_shares is not None:
            theirs, positive, users = self._of_all_ranks(share).unbind(1)
            ids.append(theirs)
            log_expected.append(
                torch.where((positive > 0) & (theirs >= self.first_id), self._log(theirs, total), torch.inf)
            )
            left_out.append(self._same_user(batch, users))
        if self.proportions is not None:
            drawn = self._draw(total * self.num_negatives, own.device, epoch, step)
            ids.append(drawn)
            log_expected.append(self._log(drawn, total))
            left_out.append(self._acted_on(batch, drawn))
        if self.dislikes is not None and self.user in batch:
            drawn, any_disliked = self._disliked(share, epoch, step, *self.dislikes)
            ids.append(drawn)
            log_expected.append(
                torch.full_like(drawn, -math.log(self.dislike_weight * self.num_items), dtype=torch.float32)
            )
            left_out.append(~torch.diag(any_disliked))
        every = torch.cat(ids)
        masked = torch.cat(left_out, dim=1) | (own.long()[:, None] == every)
        columns = {
            drawn_of(self.item): every.to(own.dtype).expand(len(own), -1),
            log_expected_of(self.item): torch.cat(log_expected).expand(len(own), -1).masked_fill(masked, torch.inf),
        }
        return {**self._described(batch), **columns, **self._features_of(every, batch)}

    def _of_all_ranks(self, share: RankBatch) -> Tensor:
        """Item, whether it is a positive, and user of each row (C, 3)."""
        batch, item = share.batch, share.batch[self.item].long()
        user = batch[self.user].long() if self.user in batch else torch.full_like(item, -1)
        return self.gather(torch.stack([item, (batch[self.label] > 0).long(), user], dim=1)[: share.num_rows])

    def _log(self, ids: Tensor, total: int) -> Tensor:
        """The logs of the expected counts of items (M,) in a global batch of so many rows."""
        return (self._log_expected.to(ids.device)[ids] + math.log(total)).float()

    def _same_user(self, batch: Batch, users: Tensor) -> Tensor:
        """Which rows of the global batch are of each row's own user (B, C)."""
        if self.user in batch:
            return batch[self.user].long()[:, None] == users
        return torch.zeros(len(batch[self.item]), len(users), dtype=torch.bool, device=users.device)

    def _draw(self, number: int, device: torch.device, epoch: int, step: int) -> Tensor:
        """Item ids (number,)."""
        generator = torch.Generator(device).manual_seed(mixed_seed(self.seed, epoch, step))
        return _draw_by(self._cumulative, (number,), generator)

    def _disliked(
        self, share: RankBatch, epoch: int, step: int, offsets: Tensor, items: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For each row (B,) an item that its user disliked, and whether there is one."""
        users = share.batch[str(self.user)].long()
        counts = offsets[users + 1] - offsets[users]
        generator = torch.Generator(users.device).manual_seed(mixed_seed(self.seed, epoch, step, 1))
        total = max(share.total_rows, share.first_row + len(users))
        drawn = torch.rand(total, generator=generator, device=users.device)[share.first_row :][: len(users)]
        places = offsets[users] + (drawn * counts).long()
        return items[places.clamp(max=len(items) - 1)], counts > 0

    def _acted_on(self, batch: Batch, drawn: Tensor) -> Tensor:
        """Which drawn items each row's user acted on (B, n C), if these are left out."""
        if self.positives is None or self.user not in batch:
            return torch.zeros(len(batch[self.item]), len(drawn), dtype=torch.bool, device=drawn.device)
        return acted_on(self.positives, batch[self.user].long()[:, None] * self.num_items + drawn)

    def _described(self, batch: Batch) -> Batch:
        """The rows, with the catalogue's features of items that have an id."""
        own, described = batch[self.item], dict(batch)
        for name, table in self.item_features.items():
            known, given = _equally_wide(table.index_select(0, own.long()).to(batch[name].dtype), batch[name])
            described[name] = _known_or(given, known, own >= self.first_id)
        return described

    def _features_of(self, ids: Tensor, batch: Batch) -> Batch:
        """The columns of the other features of items (M,)."""
        found = {}
        for name, table in self.item_features.items():
            values = table.index_select(0, ids.long()).to(batch[name].dtype)
            found[drawn_of(name)] = values.expand(len(batch[self.item]), *values.shape)
        return found


def shared_negatives_for(
    spec: FeatureSpec,
    num_negatives: int,
    *,
    features: Iterable[str],
    row_shares: NDArray[np.float64] | None = None,
    distribution: Distribution = "uniform",
    power: float = 0.75,
    reject_positives: bool = False,
    dislikes: tuple[Tensor, Tensor] | None = None,
    dislike_weight: float = 1.0,
    splits: Sequence[str] = ("train",),
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    seed: int = 0,
    device: torch.device | None = None,
) -> SharedNegatives:
    """The shared negatives of a dataset, on the device of the batches; reads from `splits` only what they need.

    Items without a positive row are never drawn: a loss that pushes them down would outweigh what their features say.
    `dislikes` and their weight are those of `SharedNegatives`, the other arguments those of `sampler_for`. With
    `row_shares`, which are p (I,), the positives of the batch are negatives too (`Loader.shares_of_positives`).

    Raises:
        SettingsError: if no item has a positive row.
    """
    ids = [name for name in spec.role("user") if spec.features[name].is_categorical and not spec.features[name].is_list]
    user = spec.user_id if ids else None
    known, first_id = _positives_of_items(spec, splits), int(spec.reserves_unknown(spec.item_id))
    known[:first_id] = 0
    if not known.any():
        raise SettingsError(f"no '{spec.item_id}' has a positive row to compare others with; set settings.loss=binary")
    weights = known > 0 if distribution == "uniform" else known**power * (known > 0)
    return SharedNegatives(
        item=spec.item_id,
        label=spec.label,
        user=user,
        first_id=first_id,
        num_negatives=num_negatives,
        proportions=torch.from_numpy(weights.astype(np.float64)).to(device) if num_negatives else None,
        row_shares=None if row_shares is None else torch.from_numpy(row_shares).to(device),
        positives=_positive_keys(spec, splits, user).to(device) if reject_positives and user is not None else None,
        dislikes=None if dislikes is None or user is None else (dislikes[0].to(device), dislikes[1].to(device)),
        dislike_weight=dislike_weight,
        item_features=_tables(spec, splits, features, device),
        gather=gather,
        seed=seed,
    )


def ids_present(
    spec: FeatureSpec, splits: Sequence[str], names: Sequence[str], *, positives_only: bool
) -> dict[str, Tensor]:
    """Which ids (ids,) of some categorical features the rows of `splits` hold, or those with a positive label."""
    found = {name: np.zeros(spec.num_ids(name), np.bool_) for name in names}
    for split in splits:
        for columns in open_split(spec, split, [*names, *([spec.label] if positives_only else [])]).batches():
            num_rows = len(next(iter(columns.values())))
            keep = scalar(columns[spec.label]) > 0 if positives_only else np.ones(num_rows, bool)
            for name in names:
                column = where(columns[name], keep)
                found[name][column.values if isinstance(column, Ragged) else column] = True
    return {name: torch.from_numpy(flags) for name, flags in found.items()}
