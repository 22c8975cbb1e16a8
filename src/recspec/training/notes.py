"""Notes about a run that its log begins with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from recspec.distributed import PlacementSettings, Ranks
from recspec.errors import listed
from recspec.nn import Embeddings
from recspec.spec import FeatureSpec


def notes_of(model: nn.Module, spec: FeatureSpec, settings: PlacementSettings, ranks: Ranks) -> Iterator[str]:
    """Everything that a user may not expect, a line each."""
    yield from _capped(model)
    if settings.shard_embeddings == "always" and ranks.world_size == 1:
        yield "train.shard_embeddings is always, and there is one process: nothing to divide; torchrun starts several"
    if names := spec.leaves_padding_unsaid:
        yield (
            f"{listed(names)} declare no padding, so id 0 counts as an event; if 0 fills them up, as in SIM's "
            "published records, train on what `recspec prepare amazon FOLDER OUT` makes of them"
        )


def _capped(model: nn.Module) -> Iterator[str]:
    """The effect of a largest table size: which features share rows."""
    size = getattr(getattr(model, "settings", None), "max_table_size", None)
    if size is None:
        return
    capped = [name for each in model.modules() if isinstance(each, Embeddings) for name in each.rows_of_hashed]
    if capped:
        names = listed(dict.fromkeys(capped))
        yield f"settings.max_table_size caps the tables of {names} at {size:,} rows; ids beyond share rows"
    else:
        yield f"settings.max_table_size is {size:,}, and no table has more rows: nothing was capped"
