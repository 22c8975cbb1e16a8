"""Choices of a run's embedding tables."""

from __future__ import annotations

import math
from collections.abc import Collection

from recspec.distributed import Placement, Ranks, place
from recspec.errors import SettingsError
from recspec.nn import kernels
from recspec.training.choice import Choice
from recspec.training.optimizer_settings import numbers_beside, updates_rows_exactly
from recspec.training.outline import Outline
from recspec.training.row_optimizers import sparse_pays
from recspec.training.settings import TrainSettings


def place_tables(outline: Outline, settings: TrainSettings, ranks: Ranks, precision: str) -> Placement:
    """Where the tables lie.

    Raises:
        SettingsError: if tables would be divided or left on the host in precision fp16.
    """

    def bytes_per_row(store: str, width: int) -> float:
        own = outline.all_optimizers.settings_of(store)
        whole_gradient = settings.clip_norm is not None or not updates_rows_exactly(own)
        return 4 * width * (1 + numbers_beside(own, width) + whole_gradient + (settings.average > 0))

    placement = place(outline.make, ranks, settings, bytes_per_row)
    if placement.plan.pieces and precision == "fp16":
        raise SettingsError(
            f"train.precision is fp16, whose loss scaler knows only gradients that every rank has, and tables are "
            f"divided or left on the host ({placement.why}); take bf16 or tf32"
        )
    return placement


def describe_placement(placement: Placement, ranks: Ranks) -> Choice[str]:
    """Where the tables lie, in words."""
    divided = "divided among ranks" if placement.plan.pieces and ranks.world_size > 1 else ""
    offloaded = f"{', '.join(sorted(placement.offloaded))} in the host's memory" if placement.offloaded else ""
    return Choice("; ".join(filter(None, (divided, offloaded))) or "whole on each rank", placement.why)


def pick_embedding_backend(
    outline: Outline, settings: TrainSettings, ranks: Ranks, divided: Collection[str], compiles: bool
) -> tuple[Choice[kernels.Backend], tuple[str, ...]]:
    """What looks up and updates embedding tables, and the tables that FBGEMM updates in the backward pass.

    Raises:
        SettingsError: naming every obstacle to the backend asked for.
    """
    asked, device = settings.embedding_backend, ranks.device
    if asked == "auto":
        if kernels.uses_triton(None, device):
            return Choice("triton", "this GPU has it"), ()
        return Choice("torch", f"this {device.type} does not run the Triton kernels"), ()
    why_not = kernels.why_not(asked, device)
    problems = [why_not] if why_not else []
    fused: list[str] = []
    if asked == "fbgemm":
        needs = {
            f"train.accumulate is {settings.accumulate}": settings.accumulate > 1,
            f"train.clip_norm is {settings.clip_norm}": settings.clip_norm is not None,
            "train.sparse_gradients is never": settings.sparse_gradients == "never",
            "train.compile is true": compiles,
            f"{ranks.world_size} processes train together": ranks.world_size > 1,
        }
        problems += [
            f"{what}, which needs gradients, and fbgemm updates tables in the backward pass and leaves none"
            for what, is_so in needs.items()
            if is_so
        ]
        fused = [name for name, *_ in outline.tables() if name not in divided]
        problems += filter(None, (_why_not_fused(outline, name) for name in fused))
    if problems:
        raise SettingsError.of(f"train.embedding_backend is {asked}; auto takes what is there", problems)
    return Choice(asked, "as asked"), tuple(fused)


def _why_not_fused(outline: Outline, name: str) -> str:
    """The obstacle to FBGEMM's update of a table; empty without one."""
    if decay := outline.optimizers.settings_of(name).weight_decay:
        return (
            f"{name}: weight_decay is {decay}, which moves every row of a table at every step, and fbgemm updates the "
            f"rows of a batch alone; set train.parts.{name.rpartition('.stores.')[0]}.weight_decay=0"
        )
    try:
        outline.optimizers.fused_update(name)
    except SettingsError as error:
        return str(error)
    return ""


def pick_sparse_gradients(
    outline: Outline,
    settings: TrainSettings,
    ranks: Ranks,
    *,
    rows_per_step: int,
    divided: Collection[str],
    fused: Collection[str],
    compiles: bool,
) -> Choice[tuple[str, ...]]:
    """The tables whose gradients hold only the rows that a step has seen.

    Raises:
        SettingsError: if they are asked for together with `clip_norm`.
    """
    asked = settings.sparse_gradients
    if asked == "never":
        return Choice((), "as asked")
    if settings.clip_norm is not None:
        if asked == "always":
            raise SettingsError("train.clip_norm measures whole gradients; leave train.sparse_gradients at auto")
        return Choice((), "train.clip_norm measures whole gradients")
    rows = math.ceil(rows_per_step / ranks.world_size)
    chosen = []
    for name, module, key, store in outline.tables():
        if name in fused:
            continue
        held = store.shape[0] // ranks.world_size if name in divided else store.shape[0]
        pays = sparse_pays(held, store.shape[1], rows * module.ids_per_row(key))
        exact = updates_rows_exactly(outline.optimizers.settings_of(name))
        if asked == "always" or (pays and exact and not compiles):
            chosen.append(name)
    if asked == "always":
        return Choice(tuple(chosen), "as asked")
    if chosen:
        return Choice(tuple(chosen), "a step sees few of their rows, and the optimizer gives the same result")
    return Choice((), "there is no table where this is faster and gives the same result")
