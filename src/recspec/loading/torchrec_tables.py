"""Embedding tables that TorchRec divides among the ranks, looks up and updates.

TorchRec's planner cuts each table, table-, row- or column-wise. Each store becomes one `EmbeddingCollection`: a rank
asks it for the distinct rows of a batch, as a jagged tensor of one sample and one feature a table. TorchRec moves the
rows and their gradients, and FBGEMM updates the tables in the backward pass. All ranks look a store up together; in
an evaluation, where they need different numbers of lookups, the others join with empty ones (`TorchRecShards._round`).

FBGEMM's rows have a multiple of 4 columns. Stores of other widths stay with the exchange of `sharding.py`.

Files are those of that exchange. Memory holds a rank's part twice while its first values are copied.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recspec.base import machine
from recspec.base.errors import MissingExtraError, SettingsError, require_extra
from recspec.loading.placement import Piece, Placement, PlacementSettings, ShardingPlan, Table, plan_sharding, stores_of
from recspec.loading.ranks import Ranks, first_sentence
from recspec.loading.sharding import Shards, Store, distinct, whole_gradient
from recspec.models.layers import kernels, uncompiled

COLUMNS = 4
"""FBGEMM's rows, and the parts of rows that it holds, have a multiple of so many columns."""

RESERVED = 0.15
"""Share of the memory that the planner leaves to everything else; TorchRec's default."""

OPTIMIZERS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""FBGEMM's names of the rules that update tables."""


def why_not() -> str | None:
    """Why TorchRec cannot be used here; None if it can."""
    try:
        require_extra("torchrec.distributed", "torchrec")
    except MissingExtraError as error:
        return str(error)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"TorchRec does not load beside torch {torch.__version__} ({str(error).splitlines()[0]})"
    return None


def takes(store: str) -> bool:
    """Whether TorchRec can hold a store: its width must suit FBGEMM."""
    return int(store.rpartition(".")[2]) % COLUMNS == 0


# --- which rank holds what --------------------------------------------------------------------------------------------


def divide_by_torchrec(placement: Placement, ranks: Ranks, settings: PlacementSettings, by_column: bool) -> Placement:
    """The placement with the stores that TorchRec takes cut by its planner; `by_column` allows cuts by columns.

    Every rank plans alone and finds the same plan, because all give the planner the same tables and the least memory of
    any rank.

    Raises:
        SettingsError: if the planner finds no plan.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, types
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    tables = list(dict.fromkeys(piece.table for piece in placement.plan.pieces))
    ours = [table for table in tables if takes(table.store)]
    cuts = ["table_wise", "row_wise", "column_wise"][: 3 if by_column else 2]
    constraints = {
        f"t{place}": types.ParameterConstraints(
            sharding_types=cuts if settings.shard_cut == "auto" else [settings.shard_cut],
            compute_kernels=["fused"],
            min_partition=min(table.width, -(-table.width // (COLUMNS * ranks.world_size)) * COLUMNS),
        )
        for place, table in enumerate(ours)
    }
    stores = dict.fromkeys(table.store for table in ours)
    numbered = {store: [(i, each) for i, each in enumerate(ours) if each.store == store] for store in stores}
    collections = nn.ModuleList(_collection({f"t{i}": each for i, each in several}) for several in numbered.values())
    own = torch.tensor([[machine.total_memory() // ranks.local_world_size, 0]])
    if ranks.device.type == "cuda":
        own[0, 1] = torch.cuda.get_device_properties(ranks.device).total_memory
    host, gpu = ranks.gather(own).amin(0).tolist()
    trainer = types.TrainerConfig(
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        hbm_cap_bytes=gpu or None,
        ddr_cap_bytes=host,
    )
    planner = EmbeddingShardingPlanner(
        topology=types.TopologyFactory.create_topology(trainer, None, types.KernelConfig(ranks.device.type)),
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        constraints=constraints,
    )
    try:
        found = planner.plan(collections, [EmbeddingCollectionSharder()])
    except types.PlannerError as error:
        raise SettingsError(
            f"train.shard_by is torchrec, whose planner finds no plan: {first_sentence(error)}; take more ranks, or "
            "train.shard_by=recspec"
        ) from None
    pieces: list[Piece] = []
    for place, several in enumerate(numbered.values()):
        for number, table in several:
            for shard in found.plan[f"{place}"][f"t{number}"].sharding_spec.shards:
                (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                cut = None if columns == table.width else range(column, column + columns)
                pieces.append(Piece(table, table.first + row, table.first + row + rows, shard.placement.rank(), cut))
    others = plan_sharding([table for table in tables if not takes(table.store)], ranks.world_size)
    plan = ShardingPlan((*pieces, *others.pieces), ranks.world_size)
    return replace(placement, plan=plan, by_torchrec=frozenset(stores))


def _collection(tables: Mapping[str, Table]) -> nn.Module:
    """A collection of the tables of one store, by name, without memory."""
    from torchrec import EmbeddingCollection, EmbeddingConfig

    configs = [
        EmbeddingConfig(name=name, embedding_dim=each.width, num_embeddings=each.rows, feature_names=[name])
        for name, each in tables.items()
    ]
    return cast(nn.Module, EmbeddingCollection(tables=configs, device=torch.device("meta")))


def _sharding(pieces: Sequence[Piece], ranks: Ranks) -> Any:
    """A table's pieces as TorchRec describes them; ranks of a host have its GPUs in order."""
    from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardMetadata

    on_gpu = ranks.device.type == "cuda"
    shards = [
        ShardMetadata(
            shard_offsets=[piece.first - piece.table.first, 0 if piece.columns is None else piece.columns.start],
            shard_sizes=[len(piece.rows), piece.width],
            placement=f"rank:{piece.rank}/" + (f"cuda:{piece.rank % ranks.local_world_size}" if on_gpu else "cpu"),
        )
        for piece in pieces
    ]
    kind = "table_wise" if len(pieces) == 1 else "row_wise" if pieces[0].columns is None else "column_wise"
    where = [piece.rank for piece in pieces]
    return ParameterSharding(kind, "fused", where, sharding_spec=EnumerableShardingSpec(shards))


# --- training ---------------------------------------------------------------------------------------------------------


def with_torchrec(
    shards: Shards, model: nn.Module, updates: Mapping[str, kernels.FusedUpdate | None], precision: str
) -> TorchRecShards:
    """Move the stores of `updates` from the model and its optimizers to TorchRec.

    The model's parameters and the optimizers' states of these stores have no rows from here on.

    Args:
        shards: the model's divided stores.
        model: the model, with this rank's rows.
        updates: the update of each store of TorchRec; None for one that is not trained.
        precision: the type of what ranks send each other.
    """
    # TorchRec asks torch in an old way whether it is traced, and each rank would tell the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    made = TorchRecShards(dict(shards.stores), shards.placement, shards.ranks)
    for name, module, key, weight in stores_of(model):
        if name in updates:
            place = shards.stores[name].place
            made.stores[name] = TorchRecStore(
                place, weight, made.placement.plan, name, made.ranks, updates[name], precision
            )
        if name in made:
            module.fetch[key] = partial(made.fetch, made.stores[name])
    return made


class TorchRecStore(Store):
    """A store whose rows, with their optimizer's state, TorchRec holds."""

    def __init__(
        self,
        place: int,
        weight: nn.Parameter,
        plan: ShardingPlan,
        name: str,
        ranks: Ranks,
        update: kernels.FusedUpdate | None,
        precision: str,
    ) -> None:
        super().__init__(place, weight, plan, name, ranks)
        self.update = update
        self.tables: dict[str, Table] = {}
        pieces: dict[str, list[Piece]] = {}
        for table in dict.fromkeys(piece.table for piece in plan.of(name)):
            own = f"t{len(pieces)}"
            self.tables[own] = table
            pieces[own] = [piece for piece in plan.of(name) if piece.table == table]
        self._firsts = torch.tensor([table.first for table in self.tables.values()], device=ranks.device)
        self._stops = torch.tensor([each.first + each.rows for each in self.tables.values()], device=ranks.device)
        with torch.random.fork_rng():  # TorchRec draws first values, which ours replace
            self.collection = _shard(self.tables, pieces, ranks, update, precision)
        self._weights = self._own(self.collection.state_dict(), "embeddings.{0}.weight")
        state = self.collection.fused_optimizer.state_dict()["state"] if update and update.states() else {}
        self._state = self._own({key: each for own in state.values() for key, each in own.items()}, "{0}.momentum1")
        self.rounds: list[tuple[Tensor, Tensor, Tensor]] = []
        """Rows of each lookup since the last step, their vectors, and the table that the model uses."""
        with torch.no_grad():
            weight.data = self.take(name, weight.detach())
            for each in update.states() if update else ():
                each.data = self.take("/state", each)

    def _own(self, tensors: Mapping[str, Any], called: str) -> dict[Piece, Tensor]:
        """This rank's pieces of TorchRec's sharded tensors, each as a matrix that shares its memory."""
        found = {}
        for name, table in self.tables.items():
            sharded = tensors.get(called.format(name))
            for shard in sharded.local_shards() if sharded is not None else ():
                (row, *column), (rows, *_) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                for piece in self.pieces:
                    same_column = piece.columns is None or piece.columns.start == column[0]
                    if piece.table == table and piece.first == table.first + row and same_column and rows:
                        found[piece] = shard.tensor.detach().view(rows, -1)
        assert not found or len(found) == len(self.pieces)
        return found

    def lookup(self, rows: Tensor) -> Tensor:
        """The vectors of different rows of the store, ascending (m,) -> (m, width); all ranks call it together."""
        from torchrec import KeyedJaggedTensor

        # FBGEMM has no lookup for `torch.inference_mode`, and leaving that mode turns gradients on.
        learns = torch.is_grad_enabled()
        if learns and self.update is not None:  # FBGEMM's backward pass takes the rate of the forward pass
            optimizer = self.collection.fused_optimizer
            for group in optimizer.param_groups:
                group["lr"] = self.update.group["lr"]
            optimizer.step()  # tells FBGEMM the rate, and nothing else
        with torch.inference_mode(False), torch.set_grad_enabled(learns):
            lengths = torch.diff(torch.searchsorted(rows, self._stops), prepend=rows.new_zeros(1))
            ids = rows - self._firsts.repeat_interleave(lengths)
            found = self.collection(KeyedJaggedTensor(keys=list(self.tables), values=ids, lengths=lengths)).wait()
            return torch.cat([found[name].values() for name in self.tables])

    def deliver(self, *, sparse: bool) -> None:  # noqa: ARG002
        """Update the rows by the gradients of all lookups since the last step: FBGEMM's backward pass is one step."""
        if not self.rounds:
            return
        assert self.update is not None
        gradient = torch.cat([whole_gradient(table)[1:] for _, _, table in self.rounds])
        vectors = self.rounds[0][1]
        if len(self.rounds) > 1:
            rows, places = distinct(torch.cat([rows for rows, _, _ in self.rounds]))
            gradient = gradient.new_zeros(len(rows), self.width).index_add_(0, places, gradient)
            vectors = self.lookup(rows)
        self.rounds.clear()
        vectors.backward(gradient)  # type: ignore[no-untyped-call]
        self.update.count()

    def parts(self, key: str, tensor: Tensor) -> Mapping[Piece, Tensor]:  # noqa: ARG002
        return self._state if "/" in key else self._weights

    def take(self, key: str, tensor: Tensor) -> Tensor:
        """Copy a tensor (rows held here, ...) to TorchRec; returns one without rows."""
        starts, so_far = {}, 0
        for rows in self.held:
            starts[rows] = so_far
            so_far += len(rows)
        for piece, own in self.parts(key, tensor).items():
            given = tensor[starts[piece.rows] :][: len(piece.rows)]
            own.copy_(given if piece.columns is None else given[:, piece.columns.start : piece.columns.stop])
        return tensor.new_empty(0, *tensor.shape[1:])


def _shard(
    tables: Mapping[str, Table],
    pieces: Mapping[str, Sequence[Piece]],
    ranks: Ranks,
    update: kernels.FusedUpdate | None,
    precision: str,
) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.types import ShardingEnv

    fused = {"optimizer": EmbOptimType[OPTIMIZERS[update.rule if update else "sgd"]], "learning_rate": 0.0}
    if update and "eps" in update.group:
        fused["eps"] = update.group["eps"]
    sent = CommType[precision.upper()]
    sharder = EmbeddingCollectionSharder(
        fused_params=fused,
        qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig(sent, sent), device=ranks.device),
    )
    sharding = {name: _sharding(own, ranks) for name, own in pieces.items()}
    return sharder.shard(_collection(tables), sharding, ShardingEnv.from_process_group(dist.group.WORLD), ranks.device)


class TorchRecShards(Shards):
    """Divided stores, some of them by TorchRec."""

    @uncompiled
    def fetch(self, store: Store, rows: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(store, TorchRecStore):
            return super().fetch(store, rows)
        keys, places = distinct(torch.cat([rows.new_zeros(1), rows + 1]))  # with padding first
        wanted = keys[1:] - 1
        learns = torch.is_grad_enabled()
        # In training all ranks make the same requests; in an evaluation they agree on each.
        vectors = store.lookup(wanted) if learns else self._round(store, wanted, (), done=False)[0]
        table = torch.cat([vectors.new_zeros(1, store.width), vectors.detach()])
        if learns and store.weight.requires_grad:
            store.rounds.append((wanted, vectors, table.requires_grad_()))
        return table, places[1:]

    def _round(
        self, store: Store, rows: Tensor, requested: Sequence[int], *, done: bool
    ) -> tuple[Tensor, list[tuple[Store, Tensor]], bool]:
        """A round as of all divided stores; then all ranks look up the stores of TorchRec that any rank asked for."""
        by_torchrec, none = isinstance(store, TorchRecStore), rows[:0]
        asked, counts = (none, [0] * self.ranks.world_size) if by_torchrec else (rows, requested)
        vectors, wanted, ended = super()._round(store, asked, counts, done=done)
        for each in sorted({theirs for theirs, _ in wanted}, key=lambda theirs: theirs.place):
            if isinstance(each, TorchRecStore):
                found = each.lookup(rows if each is store else none)
                vectors = found if each is store else vectors
        return vectors, wanted, ended
