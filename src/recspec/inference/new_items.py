"""Items that are new to a model: those that it scores by their features get the ids behind its own; others wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from recspec.bundle import Bundle
from recspec.data.encoding import CrossEncoder, Encoders
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue import Catalogues, as_tensor
from recspec.inference.item_changes import BLOCKED, ITEM, WITHDRAWN, BoundChanges, ItemChanges
from recspec.inference.raw_columns import RawCatalogue
from recspec.models import ItemModel, Model
from recspec.models.layers import Batch


def bind(changes: ItemChanges, spec: FeatureSpec, encoders: Encoders | None, trained: Bundle) -> BoundChanges | None:
    """Changes by the ids of a bundle's items; None if it knows no items."""
    if spec.id_of("item") is None:
        return None
    first, num_ids = int(spec.reserves_unknown(spec.item_id)), spec.num_ids(spec.item_id)
    ids = Catalogues(spec, encoders, torch.device("cpu")).item_ids(changes.table.column(ITEM).to_pylist())
    unknown = ids < first
    ids[unknown] = -1
    bound = BoundChanges(changes, ids, num_ids, first)
    features = [] if trained.pipeline is not None else described_by(trained.model)
    if not features or encoders is None or not unknown.any():
        return bound
    raw, columns = RawCatalogue(spec, encoders), dict[str, pa.Array]()
    rows = unknown & ~changes.flags(WITHDRAWN) & ~changes.flags(BLOCKED)
    for column in {column for name in features for column in _sources(encoders, name)}:
        kept = [name for name in raw.kept_as(column) if name in changes.columns]
        if not kept:
            return bound
        columns[column], given = changes.values(kept[0])
        rows &= given
    places = np.flatnonzero(rows)
    if not len(places):
        return bound
    table = pa.table({name: values.take(pa.array(places)) for name, values in columns.items()})
    encoded = encoders.encode(table, features)
    ids[places] = num_ids + np.arange(len(places))
    # an item model looks them up by their ids; others know no such id
    own = torch.from_numpy(ids[places]) if isinstance(trained.model, ItemModel) else torch.zeros(len(places)).long()
    batch: Batch = {spec.item_id: own, **{name: as_tensor(encoded[name], spec, name) for name in features}}
    return BoundChanges(changes, ids, num_ids, first, batch)


def described_by(model: Model) -> list[str]:
    """The features by which a model scores items that it was not trained on; none if it does not."""
    return item_features(model) if model.traits.scores_unseen_items else []


def item_features(model: Model) -> list[str]:
    """The features of items that a model reads, but the id."""
    read = {*model.features(), *getattr(model, "item_inputs", ())} - {model.spec.item_id}
    return [name for name in model.spec.role("item") if name in read]


def _sources(encoders: Encoders, feature: str) -> tuple[str, ...]:
    """The raw columns that a feature is made from."""
    encoder = encoders.encoder(feature)
    return tuple(encoder.columns) if isinstance(encoder, CrossEncoder) else (encoder.column or feature,)


def with_new_items(trained: Bundle, bound: BoundChanges) -> Bundle:
    """The bundle with the new items, which nobody has seen."""
    if not bound.features or trained.seen is None:
        return trained
    counts = torch.nn.functional.pad(trained.seen.counts, (0, len(bound.new_rows)))
    model = trained.model
    if isinstance(model, ItemModel):
        model = model.with_items(bound.features)
    return replace(trained, model=model, seen=replace(trained.seen, counts=counts))
