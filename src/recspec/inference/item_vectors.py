"""Vectors of items, by which items are alike.

Shapes: N items with an id; D width of a vector; C chosen items.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recspec.inference.catalogue import Catalogues
from recspec.models import ItemModel, Model, UserEvents
from recspec.nn import Embeddings

BLOCK = 1 << 22
"""Pairs of items that are scored at once."""


def item_vectors(model: Model, known: Catalogues) -> Tensor | None:
    """The vectors (N, D) that a model has of every item by id, or the embeddings of the items' ids; None without.

    They tell which items are alike, so a bias is no part of them.
    """
    made = getattr(model, "likeness_vectors", getattr(model, "item_vectors", None))
    with torch.inference_mode():
        if made is not None:
            known.check_items(model.features())
            vectors: Tensor = made() if isinstance(model, ItemModel) else made(known.items.features)
            return vectors.detach().float()  # a model's own parameter may be what it returns
        if isinstance(model, ItemModel):
            factors = getattr(model, "items", None)  # of a factorisation
            return factors.detach().float() if isinstance(factors, Tensor) and factors.dim() == 2 else None
        name, ids = known.spec.item_id, known.items.features[known.spec.item_id]
        if (rows := getattr(model, "item_embeddings", None)) is not None:
            embedded: Tensor = rows(ids)
            return embedded.detach().float()
        tables = [each for each in model.modules() if isinstance(each, Embeddings) and name in each.widths]
        parts = [each({name: ids}, (name,)).float() for each in tables if each.widths[name] > 1]
        return torch.cat(parts, dim=1) if parts else None


def scores_of_single_items(model: ItemModel, events: Tensor, items: Tensor) -> Tensor:
    """(L, C) scores of items for baskets that each hold one event alone."""
    lists = UserEvents(np.arange(len(events) + 1, dtype=np.int64), events.cpu().numpy().astype(np.int32))
    with torch.inference_mode():
        informed = model.knowing(lists.interactions(model.num_items))
        parts = []
        step = max(1, BLOCK // max(1, len(items)))
        for rows in torch.split(torch.arange(len(events), device=model.device), step):
            users = rows.repeat_interleave(len(items))
            parts.append(informed.score_pairs(users, items.repeat(len(rows))).view(len(rows), len(items)))
        return torch.cat(parts).float() if parts else torch.zeros(0, len(items))
