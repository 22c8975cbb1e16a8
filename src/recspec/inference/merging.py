"""Several lists of items as the candidates of one request, in NumPy alone: a Triton repository copies this file.

Shapes: N ids of items; C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def joined(lists: Sequence[Ids], popular: Ids, count: int, excluded: Ids) -> tuple[Ids, NDArray[np.uint16]]:
    """Ids (C,) and what brought them (C,): the first of every list, then the second, each once; then popular ones.

    Bit i is set if list i holds the item; the bit after those of all lists is popularity's. -1 in a list counts as
    nothing. `popular` fills the candidates up to `count`, without items of `excluded`.
    """
    table = np.full((max((len(each) for each in lists), default=0), len(lists)), -1, np.int64)
    for place, each in enumerate(lists):
        table[: len(each), place] = each
    flat = table.ravel()
    flat = flat[flat >= 0]
    ids = flat[np.sort(np.unique(flat, return_index=True)[1])][:count]
    bits = np.zeros(len(ids), np.uint16)
    for place, each in enumerate(lists):
        bits[np.isin(ids, each)] |= np.uint16(1 << place)
    if len(ids) < count:
        filling = popular[~np.isin(popular, ids) & ~np.isin(popular, excluded)][: count - len(ids)]
        ids = np.concatenate([ids, filling])
        bits = np.concatenate([bits, np.full(len(filling), 1 << len(lists), np.uint16)])
    return ids, bits


def best(scores: NDArray[Any], count: int, *, ties: bool) -> Ids:
    """At most `count` ids of the highest scores (N,), best first, equal ones by id; -inf leaves an item out.

    Without `ties`, items that share their score with one beyond the list are left out: a model of counts gives the same
    score to all items of which it knows nothing.
    """
    ids = np.flatnonzero(scores > -np.inf)
    if len(ids) > count:
        values = scores[ids]
        last = np.partition(values, -count - 1)[-count - 1]
        above, equal = ids[values > last], ids[values == last]
        ids = np.concatenate([above, equal[: max(0, count - len(above))]]) if ties else above
    order = np.lexsort((ids, -scores[ids]))
    return ids[order][:count].astype(np.int64)
