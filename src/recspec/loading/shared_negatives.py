"""Items that all rows of a batch are compared with: drawn ones, and the positives of the batch's own rows.

They are those of the global batch, on every rank and in every micro-batch: a row's loss does not depend on the part of
the batch that it is in. Draws are a function of (seed, epoch, step). So that a rank knows the positives of the others,
the ranks exchange three numbers for each row.

Shapes: B rows of a rank's batch; C rows of the global batch; n draws for a row; M = C + n C items; I ids of items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recspec.batch import Batch, drawn_of, log_expected_of
from recspec.errors import SettingsError
from recspec.loading.ahead import Share
from recspec.loading.blocks import mixed_seed
from recspec.loading.sampling import Distribution, acted_on, cumulative, item_features, positive_rows
from recspec.spec import FeatureSpec
from recspec.storage import Ragged, open_split


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

    def __call__(self, share: Share, *, epoch: int, step: int) -> Batch:
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
        every = torch.cat(ids)
        masked = torch.cat(left_out, dim=1) | (own.long()[:, None] == every)
        columns = {
            drawn_of(self.item): every.to(own.dtype).expand(len(own), -1),
            log_expected_of(self.item): torch.cat(log_expected).expand(len(own), -1).masked_fill(masked, torch.inf),
        }
        return {**self._described(batch), **columns, **self._features_of(every, batch)}

    def _of_all_ranks(self, share: Share) -> Tensor:
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
        uniform = torch.rand(number, generator=generator, device=device, dtype=torch.float64)
        return torch.searchsorted(self._cumulative.to(device), uniform, right=True).clamp_(max=self.num_items - 1)

    def _acted_on(self, batch: Batch, drawn: Tensor) -> Tensor:
        """Which drawn items each row's user acted on (B, n C), if these are left out."""
        if self.positives is None or self.user not in batch:
            return torch.zeros(len(batch[self.item]), len(drawn), dtype=torch.bool, device=drawn.device)
        return acted_on(self.positives, batch[self.user].long()[:, None] * self.num_items + drawn)

    def _described(self, batch: Batch) -> Batch:
        """The rows, with the catalogue's features of items that have an id."""
        own = batch[self.item]
        has_id = own >= self.first_id
        described = dict(batch)
        for name, table in self.item_features.items():
            given = batch[name]
            known = table.index_select(0, own.long()).to(given.dtype)
            if known.dim() == 2:
                width = max(given.shape[1], known.shape[1])
                given, known = (F.pad(each, (0, width - each.shape[1])) for each in (given, known))
            described[name] = torch.where(has_id if known.dim() == 1 else has_id[:, None], known, given)
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
    splits: Sequence[str] = ("train",),
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    seed: int = 0,
    device: torch.device | None = None,
) -> SharedNegatives:
    """The shared negatives of a dataset, on the device of the batches; reads from `splits` only what they need.

    Items without a positive row are never drawn: a loss that pushes them down would outweigh what their features say.
    The arguments are those of `sampler_for`; with `row_shares`, which are p (I,), the positives of the batch are
    negatives too (`Loader.shares_of_positives`).

    Raises:
        SettingsError: if no item has a positive row.
    """
    item, num_items = spec.item_id, spec.num_ids(spec.item_id)
    user = next((spec.user_id for name in spec.role("user") if _is_id(spec, name)), None)
    counts = np.zeros(num_items, np.int64)
    for (items,) in positive_rows(spec, splits, item):
        counts += np.bincount(items, minlength=num_items)
    first_id = int(spec.reserves_unknown(item))
    known = np.where(np.arange(num_items) < first_id, 0, counts)
    if not known.any():
        raise SettingsError(f"no '{item}' has a positive row to compare others with; set settings.loss=binary")
    keys = None
    if reject_positives and user is not None:
        pairs = positive_rows(spec, splits, user, item)
        each = [users.astype(np.int64) * num_items + items for users, items in pairs]  # 8 bytes a pair
        keys = torch.from_numpy(np.unique(np.concatenate([np.zeros(0, np.int64), *each]))).to(device)
    weights = known > 0 if distribution == "uniform" else known**power * (known > 0)
    others = [name for name in features if name != item and name in spec.role("item")]
    return SharedNegatives(
        item=item,
        label=spec.label,
        user=user,
        first_id=first_id,
        num_negatives=num_negatives,
        proportions=torch.from_numpy(weights.astype(np.float64)).to(device) if num_negatives else None,
        row_shares=None if row_shares is None else torch.from_numpy(row_shares).to(device),
        positives=keys,
        item_features={name: table.to(device) for name, table in item_features(spec, splits, others).items()},
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
            keep = np.asarray(columns[spec.label]) > 0 if positives_only else None
            for name in names:
                found[name][_ids_of(columns[name], keep)] = True
    return {name: torch.from_numpy(flags) for name, flags in found.items()}


def _ids_of(column: NDArray[np.generic] | Ragged, keep: NDArray[np.bool_] | None) -> NDArray[np.integer]:
    """The ids of a column's rows, of those in `keep` if given."""
    values = column
    if isinstance(column, Ragged):
        values = column.values[column.offsets[0] : column.offsets[-1]]
        keep = None if keep is None else np.repeat(keep, column.lengths)
    assert isinstance(values, np.ndarray)
    return cast(NDArray[np.integer], values if keep is None else values[keep])


def _is_id(spec: FeatureSpec, name: str) -> bool:
    return spec.features[name].is_categorical and not spec.features[name].is_list
