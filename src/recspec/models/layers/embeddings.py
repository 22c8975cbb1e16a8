"""Embedding tables.

Shapes: B rows; D a vector's width; L a list feature's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recspec.base.errors import DataError
from recspec.feature_spec import FeatureSpec
from recspec.models.layers import kernels
from recspec.models.layers.batch import Batch
from recspec.models.layers.gathered_rows import take_rows
from recspec.models.layers.hand_written import Gather, RowsOf, may_replace

Combiner = Literal["sum", "mean"]
Start = Literal["glorot", "uniform"]

Fetch: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows of a store (n,), -1 for padding -> a table (m + 1, width) of zeros for padding and then the m distinct rows, and
the place of each row in it (n,)."""

RowsHeld: TypeAlias = Callable[["Embeddings", str], Sequence[range]]
"""The rows of a store of some embeddings that this process holds, ascending."""


class Embeddings(nn.Module):
    """Embedding tables of several features, looked up together, with vectors side by side: (B, sum of widths).

    One tensor, a store, holds all tables of one width one after the other, so that a batch takes one gather a width
    instead of one a feature. Features that share a vocabulary share a table. A list's vectors are pooled without
    padding (id 0): it neither adds to the sum nor counts in the mean, and an empty list gives zeros.

    A row starts Glorot-normal for its table, N(0, 2 / (rows + width)) cut off at two standard deviations, with the
    given standard deviation, or uniform within 1 / sqrt(rows) as in DLRM. With `max_rows` no table has more rows than
    that, and an id beyond them takes the row of its remainder.

    `more_ids` gives the number of ids that a row looks up besides a feature's own, as those of a history. `table_rows`
    chooses the rows that this process holds, by default all. They start with the same values as among all rows: every
    table is drawn, and only the held rows are kept.

    One class because every lookup knows the same stores, bounds and settings.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        widths: Mapping[str, int],
        *,
        combiner: Combiner = "sum",
        start: Start = "glorot",
        std: float | None = None,
        max_rows: int | None = None,
        more_ids: Mapping[str, int] | None = None,
        table_rows: RowsHeld | None = None,
    ) -> None:
        super().__init__()
        self.combiner, self.std = combiner, std
        self.widths = dict(widths)
        self.lengths = {name: (spec.features[name].length or 1) + (more_ids or {}).get(name, 0) for name in widths}
        self.lists = frozenset(name for name in widths if spec.features[name].is_list)
        self.first_row: dict[str, int] = {}
        self.num_rows: dict[str, int] = {}
        self.rows_of_hashed: dict[str, int] = {}
        """Rows of tables with fewer rows than their feature has ids."""
        self.tables: dict[str, dict[str, range]] = {}
        """The rows of each store's tables, by vocabulary."""
        for name, width in widths.items():
            store, num_ids = self.tables.setdefault(str(width), {}), spec.num_ids(name)
            first = max((table.stop for table in store.values()), default=0)
            rows = num_ids if max_rows is None else min(max_rows, num_ids)
            table = store.setdefault(spec.vocabulary(name), range(first, first + rows))
            self.first_row[name], self.num_rows[name] = table.start, len(table)
            if rows < num_ids:
                self.rows_of_hashed[name] = rows
        sizes = {key: [len(table) for table in store.values()] for key, store in self.tables.items()}
        self.stores = nn.ParameterDict(  # sorts the stores of a plain dict
            {
                key: _filled_tables(own, int(key), start, std, table_rows and table_rows(self, key))
                for key, own in sizes.items()
            }
        )
        self.sparse: set[str] = set()
        """Stores whose gradient holds only the rows of the batch; training sets it."""
        self.fetch: dict[str, Fetch] = {}
        """How to get rows of stores that this process does not hold; `recspec.loading` sets it."""
        self.backend: kernels.Backend | None = None
        """What looks rows up; by default Triton on a GPU that has it, else torch."""
        self.in_autocast_type = True
        """Whether Triton gathers vectors in autocast's type, for products; not if they are summed to a logit."""
        self.updates: dict[str, kernels.FusedUpdate] = {}
        """Stores that FBGEMM updates in the backward pass; training sets it."""
        self._bounds: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @property
    def width(self) -> int:
        """The sum of all features' widths."""
        return sum(self.widths.values())

    def ids_per_row(self, store: str) -> int:
        """The most ids that a row of a batch looks up in a store: one for a scalar, its length for a list."""
        return sum(self.lengths[name] for name, width in self.widths.items() if width == int(store))

    def order(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """The features in the order of their vectors in `forward`'s output for `names`."""
        chosen = self.widths if names is None else names
        return tuple(name for key in self.stores for part in self._laid(key, chosen) for name in part)

    def forward(self, batch: Batch, names: Collection[str] | None = None) -> Tensor:
        """The vectors of all features, or of `names`, side by side: (B, sum of their widths)."""
        parts = self.parts(batch, names)
        return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]

    def parts(self, batch: Batch, names: Collection[str] | None = None) -> list[Tensor]:
        """`forward` in parts, for a caller that puts more beside them."""
        chosen = self.widths if names is None else names
        return [part for key in self.stores for part in self._parts(batch, key, chosen)]

    def _parts(self, batch: Batch, key: str, names: Collection[str]) -> list[Tensor]:
        """The parts of `forward` from one store."""
        if key in self.fetch:
            return self._fetched(batch, key, names)
        if key in self.updates and self.training and torch.is_grad_enabled():
            return self._updating(batch, key, names)
        store, (scalars, lists) = self.stores[key], self._laid(key, names)
        if kernels.uses_triton(self.backend, store.device):
            return self._by_triton(batch, store, key, scalars, lists)
        parts = [self._gathered(batch, store, key, scalars)] if scalars else []
        return parts + [self._pooled(batch[name], store, name, key) for name in lists]

    def beside(self, batch: Batch, names: Collection[str], ids: Batch) -> tuple[Tensor | None, Tensor]:
        """`forward` of `names`, if any, and the vectors of `ids` of other, scalar features: (n, sum of their widths).

        All `ids` are (n,), for any n. A store that its lookup updates in the backward pass is looked up once for both,
        so that it moves once a step.
        """
        if not (names and self.updates and self.training and torch.is_grad_enabled()):
            return self(batch, names) if names else None, self(ids, ids)
        asked, rows = {**{name: batch[name] for name in names}, **ids}, len(batch[next(iter(names))])
        ours, theirs = list[Tensor](), list[Tensor]()
        for key in self.stores:
            if key not in self.updates:
                ours += self._parts(batch, key, names)
                theirs += self._parts(ids, key, ids)
            elif laid := [name for part in self._laid(key, asked) for name in part]:
                vectors = torch.cat(self._updating(asked, key, asked), dim=1)
                for name, part in zip(laid, torch.split(vectors, int(key), dim=1), strict=True):
                    (theirs if name in ids else ours).append(part[: len(ids[name]) if name in ids else rows])
        return torch.cat(ours, dim=1), torch.cat(theirs, dim=1)

    def _fetched(self, batch: Batch, key: str, names: Collection[str]) -> list[Tensor]:
        """The parts of `forward` from one store, of which it fetches all rows of the batch at once."""
        scalars, lists = self._laid(key, names)
        if not scalars and not lists:
            return []
        wanted = [(self._rows(name, batch[name]) + self.first_row[name]).flatten() for name in scalars]
        for name in lists:
            rows = self._rows(name, batch[name]) + self.first_row[name]
            wanted.append(torch.where(batch[name] != 0, rows, -1).flatten())
        table, places = self.fetch[key](torch.cat(wanted))
        # On a CPU, summing gradients of equal rows later, in sorted order, takes a fifth of the time.
        sparse = table.requires_grad and table.device.type == "cpu" and not torch.compiler.is_compiling()
        place_of = dict(zip((*scalars, *lists), torch.split(places, [len(ids) for ids in wanted]), strict=True))
        parts = []
        if scalars:
            ids = torch.stack([place_of[name] for name in scalars], dim=1)
            parts.append(F.embedding(ids, table, sparse=sparse).flatten(1))
        for name in lists:
            bags = place_of[name].view(batch[name].shape)
            parts.append(F.embedding_bag(bags, table, mode=self.combiner, padding_idx=0, sparse=sparse))
        return parts

    def _gathered(self, batch: Batch, store: Tensor, key: str, scalars: Sequence[str]) -> Tensor:
        """The vectors of scalar features, side by side (B, sum of widths)."""
        rows, sparse = self._own_rows(batch, scalars), key in self.sparse
        if torch.compiler.is_compiling():
            places, known = _places_compiled(rows, [(self.first_row[name], self.num_rows[name]) for name in scalars])
        else:
            places, known = _places(rows, *self._bounds_of(store, scalars))
        # An exporter is asked first: it would take the number of ids for one of the program's conditions.
        is_plain = torch.compiler.is_compiling() or sparse or store.device.type != "cpu"
        if is_plain or places.numel() < MANY or not may_replace():
            vectors = F.embedding(places, store, sparse=sparse)
        else:
            vectors = cast(Tensor, RowsOf.apply(places, store))  # type: ignore[no-untyped-call]
        return (vectors if known is None else nan_unless(known, vectors)).flatten(1)

    def _bounds_of(self, store: Tensor, names: Sequence[str], widths: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The first row of each feature's table, and the row after its last: (F,) each; `widths` repeat features."""
        place = (store.device, *names, *widths)
        if place in self._bounds:  # kept, so that a GPU does not wait for them at every step
            return self._bounds[place]
        if widths:
            each = [torch.split(bounds, 1) for bounds in self._bounds_of(store, names)]
            firsts, stops = (torch.cat([own.expand(n) for own, n in zip(of, widths, strict=True)]) for of in each)
        else:
            first = torch.tensor([self.first_row[name] for name in names])
            sizes = torch.tensor([self.num_rows[name] for name in names])
            firsts, stops = first.to(store.device), (first + sizes).to(store.device)
        self._bounds[place] = firsts, stops
        return firsts, stops

    def _updating(self, batch: Batch, key: str, names: Collection[str]) -> list[Tensor]:
        """The parts of `forward` from one store, by one lookup whose backward pass updates the store.

        Features may have different numbers of rows; shorter ones are padded with zeros at the end.
        """
        scalars, lists = self._laid(key, names)
        if not (laid := scalars + lists):
            return []
        order = sorted(laid, key=self.first_row.__getitem__)
        ids, counts = [], []
        for name in order:
            own = self._rows(name, batch[name])
            present = batch[name] != 0 if name in self.lists else None
            ids.append(own if present is None else own[present])
            counts.append(torch.ones_like(own) if present is None else present.sum(1))
        every, sizes = torch.cat(ids), torch.tensor([self.num_rows[name] for name in order])
        if bool(((every < 0) | (every >= sizes.repeat_interleave(torch.tensor([len(own) for own in ids])))).any()):
            self.check(dict(zip(order, ids, strict=True)))
        most = max(len(own) for own in counts)
        count = torch.cat([F.pad(own, (0, most - len(own))) for own in counts])
        averaged = self.combiner == "mean" and any(name in self.lists for name in order)
        vectors = kernels.fbgemm_lookup(
            self.stores[key],
            [self.first_row[name] for name in order],
            [self.num_rows[name] for name in order],
            every,
            F.pad(count.cumsum(0), (1, 0)),
            (1 / count).repeat_interleave(count) if averaged else None,
            self.updates[key],
        )
        if order == laid:
            return [vectors]
        part_of = dict(zip(order, torch.split(vectors, int(key), dim=1), strict=True))
        return [part_of[name] for name in laid]

    def check(self, ids: Batch, *, called: Mapping[str, str] | None = None) -> None:
        """Refuse ids outside their tables, where nothing else does; `called` gives features other names in messages.

        Raises:
            DataError: naming every feature.
        """
        problems = [
            f"feature '{called[name] if called else name}': ids from {int(own.min())} to {int(own.max())}; "
            f"its table has rows 0 to {self.num_rows[name] - 1}"
            for name, own in ids.items()
            if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < self.num_rows[name]
        ]
        DataError.refuse("a batch holds ids outside their tables", problems)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        """The row of each id in its table; id 0 keeps row 0."""
        ids = ids.long()
        if name not in self.rows_of_hashed:
            return ids
        # Id 0 keeps row 0 for itself; the others share the rows above it.
        return torch.where(ids > 0, 1 + (ids - 1).remainder(self.rows_of_hashed[name] - 1), 0)

    def places(self, ids: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Rows of the store (B, L, C) for ids (B, L) of features of one width; -1 for an id outside its table."""
        laid = [self._rows(name, ids[name]) for name in names]
        known = [(own >= 0) & (own < self.num_rows[name]) for name, own in zip(names, laid, strict=True)]
        rows = zip(names, laid, known, strict=True)
        return torch.stack([torch.where(ok, own + self.first_row[name], -1) for name, own, ok in rows], dim=2)

    def _own_rows(self, batch: Batch, names: Sequence[str]) -> list[Tensor]:
        """The rows of features' ids in their own tables; the ids themselves, if one operation can widen them all."""
        ids = [batch[name] for name in names]
        if torch.compiler.is_compiling() or any(name in self.rows_of_hashed for name in names):
            return [self._rows(name, own) for name, own in zip(names, ids, strict=True)]
        return ids if len({own.dtype for own in ids}) == 1 else [own.long() for own in ids]

    def _by_triton(
        self, batch: Batch, store: Tensor, key: str, scalars: Sequence[str], lists: Sequence[str]
    ) -> list[Tensor]:
        """The parts of `forward` from one store: one lookup, since each brings a gradient of the whole store.

        A place of a list is looked up as a scalar is; padding has no row, so neither a vector nor a gradient.
        """
        if not scalars and not lists:
            return []
        rows = self._own_rows(batch, (*scalars, *lists))
        widths = [1 if own.dim() == 1 else own.shape[1] for own in rows]
        ids = torch.cat([own.unsqueeze(1) if own.dim() == 1 else own for own in rows], dim=1)
        bounds, dtype = self._bounds_of(store, (*scalars, *lists), widths if lists else ()), self._gathered_type(store)
        if not lists:
            vectors = Gather.apply(store, ids, *bounds, dtype, key in self.sparse)  # type: ignore[no-untyped-call]
            return [vectors.flatten(1)]
        of_lists = ids[:, len(scalars) :]
        absent = of_lists == 0
        of_lists.masked_fill_(absent, -1)
        vectors = Gather.apply(store, ids, *bounds, dtype, key in self.sparse)  # type: ignore[no-untyped-call]
        alone, listed = torch.split(vectors, [len(scalars), of_lists.shape[1]], dim=1)
        listed = listed.masked_fill(absent.unsqueeze(2), 0.0)
        lengths = widths[len(scalars) :]
        if len(set(lengths)) == 1:
            shape = (len(ids), len(lists), lengths[0])
            bags = [(listed.view(*shape, store.shape[1]), absent.view(shape))]
        else:
            cut = zip(torch.split(listed, lengths, dim=1), torch.split(absent, lengths, dim=1), strict=True)
            bags = [(own.unsqueeze(1), missing.unsqueeze(1)) for own, missing in cut]
        parts = [alone.flatten(1)] if scalars else []
        for own, missing in bags:
            total = own.sum(2)
            if self.combiner == "mean":
                total = total / (~missing).sum(2, keepdim=True).clamp(min=1)
            parts.append(total.flatten(1))
        return parts

    def _gathered_type(self, store: Tensor) -> torch.dtype:
        """The type in which Triton gathers vectors."""
        device = store.device.type
        halves = self.in_autocast_type and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if halves else store.dtype

    def _pooled(self, ids: Tensor, store: Tensor, name: str, key: str) -> Tensor:
        """A list's sum or mean without padding: (B, L) -> (B, width)."""
        first, rows, known = self.first_row[name], self._rows(name, ids), None
        if stops_at_unknown_rows(store.device):
            known = (rows >= 0) & (rows < self.num_rows[name])
            rows, known = torch.where(known, rows, 0), known.all(1)
        bags = rows + first
        if torch.compiler.is_compiling():  # exporters do not support padding in a bag
            present = (ids != 0).unsqueeze(-1).to(store.dtype)
            pooled = (F.embedding(bags, store) * present).sum(1)
            pooled = pooled if self.combiner == "sum" else pooled / present.sum(1).clamp(min=1)
        else:
            sparse = key in self.sparse
            pooled = F.embedding_bag(bags, store, mode=self.combiner, padding_idx=first, sparse=sparse)
        return pooled if known is None else nan_unless(known, pooled)

    def _laid(self, key: str, names: Collection[str]) -> tuple[list[str], list[str]]:
        """The scalar features and the lists of a store, in the order of their vectors."""
        own = [name for name, width in self.widths.items() if width == int(key) and name in names]
        return [name for name in own if name not in self.lists], [name for name in own if name in self.lists]


def _places(rows: Sequence[Tensor], firsts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features' rows of their own tables, (B,) each, as rows of the store (B, F); on a GPU also which are in the table.

    Those that are not become the table's first row.
    """
    own = torch.stack(list(rows), dim=1)
    places = own + firsts
    if not stops_at_unknown_rows(own.device):
        return places, None
    known = (own >= 0) & (places < stops)
    return torch.where(known, places, firsts), known


def _places_compiled(rows: Sequence[Tensor], tables: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
    """`_places` by each table's first row and size: a program keeps whole numbers, not a tensor of them."""
    given = list(zip(rows, tables, strict=True))
    if not stops_at_unknown_rows(rows[0].device):
        return torch.stack([own + first for own, (first, _) in given], dim=1), None
    known = torch.stack([(own >= 0) & (own < size) for own, (_, size) in given], dim=1)
    return torch.stack([own.clamp(0, size - 1) + first for own, (first, size) in given], dim=1), known


def stops_at_unknown_rows(device: torch.device) -> bool:
    """Whether a lookup of a row that a table lacks ends the use of the device, instead of raising an error."""
    return device.type != "cpu"


def rows_or_nan(table: Tensor, ids: Tensor, backend: kernels.Backend | None = None) -> Tensor:
    """Rows (m, ...) of a table for ids (m,); on a GPU, an id outside the table gives NaN, and so a loss of NaN."""
    if kernels.uses_triton(backend, table.device) or not stops_at_unknown_rows(table.device):
        return take_rows(table, ids, backend)
    known = (ids >= 0) & (ids < len(table))
    return nan_unless(known, table.index_select(0, torch.where(known, ids, 0)))


def nan_unless(known: Tensor, vectors: Tensor) -> Tensor:
    """Vectors (..., D), with NaN in those that are not known (...); overwrites `vectors`, and never waits for a GPU.

    One number of a vector is enough to make the loss NaN, and costs less than a pass over all of them.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.where(known.view(*known.shape, *[1] * (vectors.dim() - known.dim())), vectors, torch.nan)
    with torch.no_grad():
        (vectors if vectors.dim() == known.dim() else vectors[..., 0]).masked_fill_(~known, torch.nan)
    return vectors


MANY = 1 << 14
"""Ids from which sorting them pays before their gradients are summed."""


def _filled_tables(
    num_rows: Sequence[int], width: int, start: Start, std: float | None, held: Sequence[range] | None = None
) -> nn.Parameter:
    """Tables of one width, one after the other, with their first values; zeros for a deviation of 0.

    With `held`, only those rows.
    """
    store = torch.zeros(sum(num_rows) if held is None else sum(len(rows) for rows in held), width)
    first = 0
    for rows in num_rows:
        table = store[first : first + rows] if held is None else None
        for place, block in _drawn(rows, width, start, std, into=table):
            _keep(store, held or (), first + place, block)
        first += rows
    return nn.Parameter(store)


def _drawn(rows: int, width: int, start: Start, std: float | None, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """A table's first values in blocks of rows, with the first row of each block; drawn into `into` if given.

    Uniform numbers are drawn in order, so blocks equal a whole table. Numbers of a truncated normal distribution are
    redrawn until all fit, so such a table is one block.
    """
    spread = (2 / (rows + width)) ** 0.5 if std is None else std
    if std is None and start == "uniform":
        step = rows if into is not None else max(1, DRAWN // width)
        for place in range(0, rows, step):
            block = torch.empty(min(step, rows - place), width) if into is None else into
            nn.init.uniform_(block, -(rows**-0.5), rows**-0.5)
            yield place, block
    elif spread:
        # Truncation at two standard deviations multiplies the deviation by .87963.
        own = spread / 0.87962566103423978
        block = torch.empty(rows, width) if into is None else into
        nn.init.trunc_normal_(block, std=own, a=-2 * own, b=2 * own)
        yield 0, block


DRAWN = 1 << 24
"""Numbers that are drawn at once if only some rows are kept."""


def _keep(store: Tensor, held: Sequence[range], first: int, block: Tensor) -> None:
    """Copy the held rows of a block, which begins at row `first` of the store."""
    start = 0
    for rows in held:
        here = range(max(rows.start, first), min(rows.stop, first + len(block)))
        if here:
            place = start + here.start - rows.start
            store[place : place + len(here)] = block[here.start - first : here.stop - first]
        start += len(rows)


def ids_and_numbers(spec: FeatureSpec, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The categorical and the numerical ones of some features."""
    ids = tuple(name for name in names if spec.features[name].is_categorical)
    return ids, tuple(name for name in names if name not in ids)


def number_widths(spec: FeatureSpec, names: Sequence[str]) -> dict[str, int]:
    """The numbers that each numerical feature brings: one, or those of a vector."""
    return {name: (spec.features[name].length or 1) if spec.features[name].is_vector else 1 for name in names}


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Numbers (B,) and vectors (B, L) as one matrix (B, V), in order."""
    if all(column.dim() == 1 for column in columns):
        return torch.stack(list(columns), dim=1)
    return torch.cat([column.unsqueeze(1) if column.dim() == 1 else column for column in columns], dim=1)


def embedding_widths(
    spec: FeatureSpec, names: Sequence[str], width: int | Literal["rule"], own: Mapping[str, int]
) -> dict[str, int]:
    """The width of each feature's embedding: its own, else the common one.

    `rule` is 6 x cardinality ^ (1/4): Wang et al., Deep & Cross Network for Ad Click Predictions, 2017, section 4.1.
    """
    common = {name: round(6 * math.pow(spec.num_ids(name), 0.25)) if width == "rule" else width for name in names}
    return {name: own.get(name, common[name]) for name in names}
