"""Vocabularies that grow: new raw values get the next ids, and no id changes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from recspec.encoding.raw_columns import as_int64, narrowed
from recspec.encoding.vocabulary import Vocabulary
from recspec.errors import DataError


def extended(vocabulary: Vocabulary, other: Vocabulary) -> Vocabulary:
    """A vocabulary with the values of another one that it lacks, appended in their order.

    Raises:
        DataError: for a value that is no whole number of 64 bits, where all known ones are.
    """
    values = other.values.filter(pa.array(vocabulary.encode(other.values) == 0))
    if not len(values):
        return vocabulary
    if vocabulary.is_numeric:
        numbers = as_int64(values)
        if numbers.null_count:
            wrong = values.filter(numbers.is_null())[0]
            raise DataError(f"'{wrong}' is no whole number of 64 bits, and all known values are; prepare all rows anew")
        values = pc.unique(numbers)  # 6 and 6.0 are one
    kind = pa.int64() if vocabulary.is_numeric else pa.large_string()
    both = pa.chunked_array([vocabulary.values.cast(kind), values.cast(kind)])
    return Vocabulary(narrowed(both.combine_chunks()))
