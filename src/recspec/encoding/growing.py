"""Vocabularies that grow: new raw values get the next ids, and no id changes."""

from __future__ import annotations

import pyarrow as pa

from recspec.encoding.raw_columns import narrowed
from recspec.encoding.vocabulary import Vocabulary


def extended(vocabulary: Vocabulary, other: Vocabulary) -> Vocabulary:
    """A vocabulary with the values of another one that it lacks, appended in their order.

    Both hold whole numbers, or both hold texts.
    """
    values = other.values.filter(pa.array(vocabulary.encode(other.values) == 0))
    if not len(values):
        return vocabulary
    kind = pa.int64() if vocabulary.is_numeric else pa.large_string()
    both = pa.chunked_array([vocabulary.values.cast(kind), values.cast(kind)])
    return Vocabulary(narrowed(both.combine_chunks()))
