"""Blocks that two or more models use.

Shapes: B rows; D a vector's width; L a list feature's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recspec import kernels
from recspec.batch import Batch
from recspec.errors import DataError
from recspec.feature_spec import FeatureSpec

# --- embeddings ------------------------------------------------------------------------------------------------------

Combiner = Literal["sum", "mean"]
Start = Literal["glorot", "uniform"]

Fetch: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows wanted of a store (n,), -1 for padding -> a table (m + 1, width), zeros for padding and then the m rows that
differ, and the place of each row in it (n,)."""

RowsHeld: TypeAlias = Callable[["Embeddings", str], Sequence[range]]
"""Which rows of a store of some embeddings are held here, ascending."""

_rows_held: ContextVar[RowsHeld | None] = ContextVar("rows_held", default=None)


@contextmanager
def holding(rows: RowsHeld) -> Iterator[None]:
    """Embeddings that are made until the end of the block hold some rows only.

    They start with the values that they would start with among all rows: those are drawn too, a table at a time, and
    forgotten.
    """
    token = _rows_held.set(rows)
    try:
        yield
    finally:
        _rows_held.reset(token)


class Embeddings(nn.Module):
    """Embedding tables of several features, looked up together and laid side by side: (B, sum of widths).

    All tables of one width lie one after the other in one tensor, a store, so that a batch takes one gather a width
    and not one a feature. Features that share a vocabulary share a table. A list's vectors are pooled, padding (id 0)
    left out: it neither adds to the sum nor counts in the mean, and an empty list gives zeros.

    A row starts Glorot-normal for its table, N(0, 2 / (rows + width)) cut off at two standard deviations, with the
    standard deviation given, or uniform within 1 / sqrt(rows) as DLRM's do. With `max_rows` no table has more rows
    than that, and an id beyond them takes the row of its remainder.

    With `narrow`, vectors may come in autocast's type where a kernel looks them up: for models that multiply them in it
    at once, whatever type they come in. `more_ids` says of features how many ids a row looks up beside its own, as
    those of a history.
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
        narrow: bool = False,
        more_ids: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.combiner = combiner
        self.narrow = narrow
        self.widths = dict(widths)
        self.lengths = {name: (spec.features[name].length or 1) + (more_ids or {}).get(name, 0) for name in widths}
        self.lists = frozenset(name for name in widths if spec.features[name].is_list)
        self.first_row: dict[str, int] = {}
        self.num_rows: dict[str, int] = {}
        self.rows_of_hashed: dict[str, int] = {}
        """Rows of the tables that have fewer rows than their feature has ids."""
        tables: dict[int, dict[str, range]] = {}
        for name, width in widths.items():
            store = tables.setdefault(width, {})
            first = max((table.stop for table in store.values()), default=0)
            rows = spec.num_ids(name) if max_rows is None else min(max_rows, spec.num_ids(name))
            table = store.setdefault(spec.vocabulary(name), range(first, first + rows))
            self.first_row[name], self.num_rows[name] = table.start, len(table)
            if rows < spec.num_ids(name):
                self.rows_of_hashed[name] = rows
        self.tables: dict[str, dict[str, range]] = {str(width): store for width, store in tables.items()}
        """The rows of each store's tables, by vocabulary."""
        held = _rows_held.get()
        self.stores = nn.ParameterDict(
            {
                key: _filled_tables(
                    [len(table) for table in store.values()], int(key), start, std, held and held(self, key)
                )
                for key, store in self.tables.items()
            }
        )
        self.sparse: set[str] = set()
        """Stores whose gradient holds the rows of the batch alone; `recspec.train` decides."""
        self.fetch: dict[str, Fetch] = {}
        """How the rows of stores that are not held here are come by; `recspec.sharding` decides."""
        self.backend: kernels.Backend | None = None
        """What looks rows up; when not said Triton on a GPU that has it, else torch."""
        self.updates: dict[str, kernels.FusedUpdate] = {}
        """Stores that FBGEMM updates in the backward pass of training; `recspec.train` decides."""
        self._bounds: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    @property
    def width(self) -> int:
        """Numbers a row: the sum of all features' widths."""
        return sum(self.widths.values())

    def ids_per_row(self, store: str) -> int:
        """Most ids a row of a batch looks up in a store: one of each scalar, a list's length."""
        return sum(self.lengths[name] for name, width in self.widths.items() if width == int(store))

    def order(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """The features in the order in which their vectors stand in what `forward` gives for `names`."""
        chosen = self.widths if names is None else names
        return tuple(
            name
            for store in self.stores
            for part in (self._scalars(int(store), chosen), self._lists(int(store), chosen))
            for name in part
        )

    def forward(self, batch: Batch, names: Collection[str] | None = None) -> Tensor:
        """The vectors of all features, or of those named, side by side: (B, sum of their widths)."""
        chosen = self.widths if names is None else names
        parts: list[Tensor] = []
        for key in self.stores:
            parts += self._parts(batch, key, chosen)
        return torch.cat(parts, dim=1) if len(parts) != 1 else parts[0]

    def _parts(self, batch: Batch, key: str, names: Collection[str]) -> list[Tensor]:
        """What `forward` makes of one store."""
        store, width = self.stores[key], int(key)
        if key in self.fetch:
            return self._fetched(batch, key, names)
        if key in self.updates and self.training and torch.is_grad_enabled():
            return self._updating(batch, store, key, names)
        scalars, lists = self._scalars(width, names), self._lists(width, names)
        parts = [self._gathered(batch, store, key, scalars)] if scalars else []
        return parts + [self._pooled(batch[name], store, name, key) for name in lists]

    def beside(self, batch: Batch, names: Collection[str], ids: Batch) -> tuple[Tensor | None, Tensor]:
        """What `forward` gives for `names`, if any, and the vectors of `ids` of other, scalar features.

        Those are (n,), whatever n, and the same for all: (n, sum of their widths). Where a lookup updates its table in
        the backward pass there is one for both, so that a table moves once a step.
        """
        if not (names and self.updates and self.training and torch.is_grad_enabled()):
            return self(batch, names) if names else None, self(ids, ids)
        asked, rows = {**{name: batch[name] for name in names}, **ids}, len(batch[next(iter(names))])
        ours, theirs = list[Tensor](), list[Tensor]()
        for key, store in self.stores.items():
            if key not in self.updates:
                ours += self._parts(batch, key, names)
                theirs += self._parts(ids, key, ids)
            elif laid := (*self._scalars(int(key), asked), *self._lists(int(key), asked)):
                vectors = torch.cat(self._updating(asked, store, key, asked), dim=1)
                for name, part in zip(laid, torch.split(vectors, int(key), dim=1), strict=True):
                    (theirs if name in ids else ours).append(part[: len(ids[name]) if name in ids else rows])
        return torch.cat(ours, dim=1), torch.cat(theirs, dim=1)

    def _fetched(self, batch: Batch, key: str, names: Collection[str]) -> list[Tensor]:
        """What `forward` makes of one store, from rows that are fetched: all of the batch's at once."""
        scalars, lists = self._scalars(int(key), names), self._lists(int(key), names)
        if not scalars and not lists:
            return []
        wanted = [(self._rows(name, batch[name]) + self.first_row[name]).flatten() for name in scalars]
        for name in lists:
            rows = self._rows(name, batch[name]) + self.first_row[name]
            wanted.append(torch.where(batch[name] != 0, rows, -1).flatten())
        table, places = self.fetch[key](torch.cat(wanted))
        # On a CPU summing the gradients of equal rows later, sorted, takes a fifth of the time.
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
        """Scalar features' vectors (B, sum of widths), one after the other."""
        if not kernels.uses_triton(self.backend, store.device):
            ids = torch.stack([self._rows(name, batch[name]) + self.first_row[name] for name in scalars], dim=1)
            # An exporter is asked first: it would take the number of ids for one of the program's conditions.
            if torch.compiler.is_compiling() or key in self.sparse or store.device.type != "cpu" or ids.numel() < MANY:
                return F.embedding(ids, store, sparse=key in self.sparse).flatten(1)
            return cast(Tensor, _RowsOf.apply(ids, store)).flatten(1)  # type: ignore[no-untyped-call]
        ids = torch.stack([self._rows(name, batch[name]) for name in scalars], dim=1)
        autocast = self.narrow and torch.is_autocast_enabled(store.device.type)
        dtype = torch.get_autocast_dtype(store.device.type) if autocast else store.dtype
        place = (str(store.device), *scalars)
        if place not in self._bounds:  # kept: a GPU is not made to wait for them at every step
            firsts = torch.tensor([self.first_row[name] for name in scalars])
            sizes = torch.tensor([self.num_rows[name] for name in scalars])
            self._bounds[place] = firsts.to(store.device), (firsts + sizes).to(store.device)
        vectors = kernels.Gather.apply(store, ids, *self._bounds[place], dtype, key in self.sparse)  # type: ignore[no-untyped-call]
        return cast(Tensor, vectors.flatten(1))

    def _updating(self, batch: Batch, store: Tensor, key: str, names: Collection[str]) -> list[Tensor]:
        """What `forward` makes of one store, all features in one lookup whose backward pass updates the store.

        Features may have different numbers of rows; those with fewer get zeros behind.
        """
        width = int(key)
        laid = (*self._scalars(width, names), *self._lists(width, names))
        if not laid:
            return []
        order = sorted(laid, key=self.first_row.__getitem__)
        ids, counts = [], []
        for name in order:
            own = self._rows(name, batch[name])
            present = batch[name] != 0 if name in self.lists else None
            ids.append(own if present is None else own[present])
            counts.append(torch.ones_like(own) if present is None else present.sum(1))
        self._check(order, ids)
        most = max(len(own) for own in counts)
        count = torch.cat([F.pad(own, (0, most - len(own))) for own in counts])
        averaged = self.combiner == "mean" and any(name in self.lists for name in order)
        vectors = kernels.fbgemm_lookup(
            store,
            [self.first_row[name] for name in order],
            [self.num_rows[name] for name in order],
            torch.cat(ids),
            F.pad(count.cumsum(0), (1, 0)),
            (1 / count).repeat_interleave(count) if averaged else None,
            self.updates[key],
        )
        if order == list(laid):
            return [vectors]
        part_of = dict(zip(order, torch.split(vectors, width, dim=1), strict=True))
        return [part_of[name] for name in laid]

    def _check(self, names: Sequence[str], ids: Sequence[Tensor]) -> None:
        """Refuse ids outside their tables, where nothing else would.

        Raises:
            DataError: naming every feature.
        """
        sizes = torch.tensor([self.num_rows[name] for name in names])
        lengths = torch.tensor([len(own) for own in ids])
        every = torch.cat(list(ids))
        if bool(((every < 0) | (every >= sizes.repeat_interleave(lengths))).any()):
            raise DataError.of(
                "a batch holds ids outside their tables",
                [
                    f"feature '{name}': ids from {int(own.min())} to {int(own.max())}; "
                    f"its table has rows 0 to {self.num_rows[name] - 1}"
                    for name, own in zip(names, ids, strict=True)
                    if len(own) and not 0 <= int(own.min()) <= int(own.max()) < self.num_rows[name]
                ],
            )

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        """Which row of its table each id takes; id 0 keeps row 0."""
        ids = ids.long()
        if name not in self.rows_of_hashed:
            return ids
        return torch.where(ids > 0, 1 + (ids - 1).remainder(self.rows_of_hashed[name] - 1), 0)

    def _pooled(self, ids: Tensor, store: Tensor, name: str, key: str) -> Tensor:
        """A list's vectors (B, L) -> (B, width), summed or averaged without padding."""
        first = self.first_row[name]
        bags = self._rows(name, ids) + first
        if torch.compiler.is_compiling():  # exporters know no padding in a bag
            present = (ids != 0).unsqueeze(-1).to(store.dtype)
            total = (F.embedding(bags, store) * present).sum(1)
            return total if self.combiner == "sum" else total / present.sum(1).clamp(min=1)
        return F.embedding_bag(bags, store, mode=self.combiner, padding_idx=first, sparse=key in self.sparse)

    def _scalars(self, width: int, names: Collection[str]) -> list[str]:
        return [name for name, own in self.widths.items() if own == width and name in names and name not in self.lists]

    def _lists(self, width: int, names: Collection[str]) -> list[str]:
        return [name for name, own in self.widths.items() if own == width and name in names and name in self.lists]


MANY = 1 << 14
"""Ids from which sorting them pays before their gradients are summed."""


class _RowsOf(torch.autograd.Function):
    """Rows of a table on a CPU, whose gradient sums equal ids sorted, as sparse ones are.

    torch adds up gradients one after the other, each at a random place: of 400,000 ids of 16 numbers that takes five
    times as long.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, store: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = store.shape
        return F.embedding(ids, store)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        rows, order, starts = kernels.segments(ids.flatten())
        sums = F.embedding_bag(order, gradient.reshape(-1, ctx.shape[1]), starts, mode="sum")
        return None, gradient.new_zeros(ctx.shape).index_copy_(0, rows, sums)


def _filled_tables(
    num_rows: Sequence[int], width: int, start: Start, std: float | None, held: Sequence[range] | None = None
) -> nn.Parameter:
    """Tables of one width, one after the other, with their starting values; zeros with a deviation of 0.

    With `held`, those rows alone, one after the other.
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
    """A table's starting values: blocks of rows, and where each begins. They are drawn into `into` where it is given.

    Uniform numbers are drawn one after the other, so blocks of them are what a whole table would be; those of a normal
    distribution that is cut off are redrawn until all fit, so that table is one block.
    """
    spread = (2 / (rows + width)) ** 0.5 if std is None else std
    if std is None and start == "uniform":
        step = rows if into is not None else max(1, DRAWN // width)
        for place in range(0, rows, step):
            block = torch.empty(min(step, rows - place), width) if into is None else into
            nn.init.uniform_(block, -(rows**-0.5), rows**-0.5)
            yield place, block
    elif spread:
        # A normal distribution cut off at two standard deviations has .87963 of its own.
        own = spread / 0.87962566103423978
        block = torch.empty(rows, width) if into is None else into
        nn.init.trunc_normal_(block, std=own, a=-2 * own, b=2 * own)
        yield 0, block


DRAWN = 1 << 24
"""Numbers that are drawn at once where only some rows are kept."""


def _keep(store: Tensor, held: Sequence[range], first: int, block: Tensor) -> None:
    """Copy those rows of a block that are held; it begins at row `first` of all."""
    start = 0
    for rows in held:
        here = range(max(rows.start, first), min(rows.stop, first + len(block)))
        if here:
            place = start + here.start - rows.start
            store[place : place + len(here)] = block[here.start - first : here.stop - first]
        start += len(rows)


def ids_and_numbers(spec: FeatureSpec, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Some features sorted into categorical and numerical ones."""
    ids = tuple(name for name in names if spec.features[name].is_categorical)
    return ids, tuple(name for name in names if name not in ids)


def embedding_widths(
    spec: FeatureSpec, names: Sequence[str], width: int | Literal["rule"], own: Mapping[str, int]
) -> dict[str, int]:
    """How many numbers each feature's embedding has: its own width, else the common one.

    `rule` is 6 x cardinality ^ (1/4): Wang et al., Deep & Cross Network for Ad Click Predictions, 2017, section 4.1.
    """

    def common(name: str) -> int:
        return round(6 * math.pow(spec.num_ids(name), 0.25)) if width == "rule" else width

    return {name: own[name] if name in own else common(name) for name in names}


# --- crosses of features ---------------------------------------------------------------------------------------------


def dot_interaction(vectors: Tensor, backend: kernels.Backend | None = None) -> Tensor:
    """The dot product of every pair of a row's vectors: (B, F, D) -> (B, F (F - 1) / 2).

    The strictly lower triangle of the Gram matrix, row by row: 10, 20, 21, 30, ... Naumov et al.: Deep Learning
    Recommendation Model for Personalization and Recommendation Systems, 2019, section 2.1.
    """
    device = vectors.device.type
    if kernels.uses_triton(backend, vectors.device) and kernels.can_dot(vectors):
        if torch.is_autocast_enabled(device):
            vectors = vectors.to(torch.get_autocast_dtype(device))
        return cast(Tensor, kernels.Dots.apply(vectors))  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        gram = torch.bmm(vectors, vectors.transpose(1, 2))
        return gram.flatten(1).index_select(1, _lower_triangle(vectors.shape[1], vectors.device))
    return cast(Tensor, _DotInteraction.apply(vectors))  # type: ignore[no-untyped-call]


class _DotInteraction(torch.autograd.Function):
    """`dot_interaction` whose backward pass is one product with the symmetric gradient instead of two."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        gram = torch.bmm(vectors, vectors.transpose(1, 2))
        return gram.flatten(1).index_select(1, _lower_triangle(vectors.shape[1], vectors.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        rows, features = vectors.shape[:2]
        # A pair's gradient stands on both sides of the diagonal; the diagonal reads the column of zeros at the end.
        gradient = F.pad(gradient, (0, 1))
        both = gradient.index_select(1, _symmetric(features, vectors.device)).view(rows, features, features)
        return torch.bmm(both, vectors)


def beside_dots(first: Tensor, others: Tensor) -> Tensor:
    """A vector, then `dot_interaction` of it and the others: (B, D), (B, F D) -> (B, D + F (F + 1) / 2)."""
    if others.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        dots = dot_interaction(torch.cat([first, others], dim=1).view(first.shape[0], -1, first.shape[1]))
        return torch.cat([first, dots], dim=1)
    return cast(Tensor, _BesideDots.apply(first, others))  # type: ignore[no-untyped-call]


class _BesideDots(torch.autograd.Function):
    """`beside_dots` on a CPU, some rows at a time: all vectors of those stay in the cache.

    Laying the vectors of a whole batch side by side, and taking their gradient apart again, costs four passes over the
    largest tensors of the step. At (8192, 27, 128) forward and backward take 110 ms on one thread, and with them 138.
    """

    ROWS: ClassVar[int] = 256

    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor) -> Tensor:
        ctx.save_for_backward(first, others)
        rows, dim = first.shape
        vectors = 1 + others.shape[1] // dim
        padded = -(-vectors // 4) * 4  # a product with so many columns is a fifth faster
        block = min(rows, _BesideDots.ROWS)
        side_by_side = first.new_zeros(block, padded, dim)
        gram = first.new_empty(block, padded, padded)
        pairs = (torch.tril_indices(vectors, vectors, -1) * torch.tensor([[padded], [1]])).sum(0)
        out = first.new_empty(rows, dim + len(pairs))
        out[:, :dim] = first
        for own, rest, to in zip(*(torch.split(each, block) for each in (first, others, out)), strict=True):
            here = _laid(own, rest, side_by_side)
            torch.bmm(here, here.transpose(1, 2), out=gram[: len(own)])
            to[:, dim:] = gram[: len(own)].flatten(1).index_select(1, pairs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        first, others = ctx.saved_tensors
        rows, dim = first.shape
        vectors = 1 + others.shape[1] // dim
        block = min(rows, _BesideDots.ROWS)
        side_by_side = first.new_empty(block, vectors, dim)
        product = first.new_empty(block, vectors, dim)
        slopes = torch.empty_like(first), torch.empty_like(others)
        # A pair's gradient stands on both sides of the diagonal, which is overwritten.
        places = (_symmetric(vectors, first.device) + dim).clamp(max=gradient.shape[1] - 1)
        for own, rest, slope, of_first, of_others in zip(
            *(torch.split(each, block) for each in (first, others, gradient, *slopes)), strict=True
        ):
            here, result = _laid(own, rest, side_by_side), product[: len(own)]
            both = slope.index_select(1, places).view(len(own), vectors, vectors)
            both.diagonal(dim1=1, dim2=2).zero_()
            torch.bmm(both, here, out=result)
            torch.add(result[:, 0], slope[:, :dim], out=of_first)
            of_others.copy_(result[:, 1:].flatten(1))
        return slopes


def _laid(first: Tensor, others: Tensor, into: Tensor) -> Tensor:
    """A vector a row and the others of the row, one after the other, in the first rows and vectors of `into`."""
    rows, dim = first.shape
    flat = into.flatten(1)[:rows]
    flat[:, :dim] = first
    flat[:, dim : dim + others.shape[1]] = others
    return into[:rows]


def _lower_triangle(features: int, device: torch.device) -> Tensor:
    """Places in a flattened square matrix of what stands below its diagonal, row by row."""
    if torch.compiler.is_compiling():  # what is made while a program is traced must not outlive it
        return _made_lower_triangle(features, device)
    return _kept_lower_triangle(features, device)


@cache
def _kept_lower_triangle(features: int, device: torch.device) -> Tensor:
    """Kept on the device, which would be waited for at every step."""
    return _made_lower_triangle(features, torch.device("cpu")).to(device)


def _made_lower_triangle(features: int, device: torch.device) -> Tensor:
    if device.type == "cuda":  # a mask's number of places is asked of the device
        row, column = torch.tril_indices(features, features, offset=-1, device=device).unbind()
        return row * features + column
    square = torch.arange(features * features, device=device).view(features, features)
    return square[torch.ones_like(square, dtype=torch.bool).tril(-1)]


@cache
def _symmetric(features: int, device: torch.device) -> Tensor:
    """For each place of a flattened square matrix, which pair it is; the number of pairs on the diagonal."""
    pairs = features * (features - 1) // 2
    square = torch.full((features, features), pairs)
    row, column = torch.tril_indices(features, features, offset=-1)
    square[row, column] = square[column, row] = torch.arange(pairs)
    return square.flatten().to(device)


def linear_of_parts(layer: nn.Linear, parts: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """A linear layer's output from parts of its input, each (..., n) with the n columns it stands in; they broadcast.

    So what belongs to a request is multiplied once for it, and what belongs to an item once for that.
    """
    total: Tensor | None = None
    for x, columns in parts:
        product = F.linear(x, layer.weight[:, torch.tensor(columns, device=x.device)])
        total = product if total is None else total + product
    assert total is not None, "a layer without input"
    return total if layer.bias is None else total + layer.bias


class CrossNetwork(nn.Module):
    """Low-rank cross layers: x_{l+1} = x_0 * (V (U x_l) + b) + x_l, (B, X) -> (B, X).

    Wang et al.: DCN V2: Improved Deep & Cross Network, WWW 2021, equation 2 with W = V U of the rank given; a rank of 0
    takes a full W. Weights start normal, N(0, 2 / (in + out)) cut off at two deviations, biases at 0.
    """

    def __init__(self, width: int, *, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers if rank else 0))
        self.up = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(num_layers))
        for layer in (*self.down, *self.up):
            linear = cast(nn.Linear, layer)
            std = (2 / (linear.in_features + linear.out_features)) ** 0.5
            nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, first: Tensor, product: Tensor | None = None) -> Tensor:
        """All layers, from the first ones' inputs x_0 (..., X) and, where it is known already, `opening` of them."""
        x = first
        for place, up in enumerate(self.up):
            if place == 0 and product is not None:
                crossed = up(product) if len(self.down) else product
            else:
                crossed = up(self.down[place](x) if len(self.down) else x)
            x = torch.addcmul(x, first, crossed)
        return x

    @property
    def opening(self) -> nn.Linear:
        """The layer whose product with x_0 comes first: a sum over its columns, so one over features."""
        return cast(nn.Linear, self.down[0] if len(self.down) else self.up[0])
