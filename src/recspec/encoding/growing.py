"""Vocabularies that grow: new raw values get the next ids, and no id changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from recspec.encoding.encoder_kinds import VocabularyEncoder
from recspec.encoding.encoders import Encoders
from recspec.encoding.raw_columns import as_array, as_int64, as_text, is_text, narrowed, split_lists
from recspec.encoding.vocabulary import Vocabulary
from recspec.errors import DataError


def with_new_values(encoders: Encoders, tables: Iterable[tuple[pa.Table, Iterable[str]]]) -> Encoders:
    """The encoders with the values of raw rows that they do not know, appended in sorted order.

    `tables` gives raw rows with the features to read of them. A feature whose raw column is not there, or that has no
    vocabulary, is passed over.

    Raises:
        DataError: for an id that is no whole number, where all known ones are; or ids beyond the vocabulary.
    """
    known: dict[str, Vocabulary] = dict(encoders.vocabularies)
    for table, features in tables:
        for name in features:
            encoder = encoders.encoder(name)
            source = encoders.sources(name, table.column_names)[0]
            if isinstance(encoder, VocabularyEncoder) and source is not None:
                if encoder.buckets or encoder.otherwise:
                    raise DataError(f"feature '{name}': values beyond its vocabulary have ids, so it can't grow")
                known[encoder.vocabulary] = _grown(known[encoder.vocabulary], encoder, table.column(source), name)
    return Encoders(encoders.encoders, known)


def grown_by(before: Encoders, after: Encoders) -> Mapping[str, int]:
    """The number of new values of each vocabulary that has grown."""
    found = {name: len(each) - len(before.vocabularies[name]) for name, each in after.vocabularies.items()}
    return {name: count for name, count in found.items() if count}


def _grown(vocabulary: Vocabulary, encoder: VocabularyEncoder, column: pa.ChunkedArray, feature: str) -> Vocabulary:
    values = encoder.present(column)
    if encoder.length is not None:
        values = encoder.present(split_lists(values, encoder.separator)[0])
    values = pc.unique(pc.drop_null(as_array(values)))
    values = values.filter(pa.array(vocabulary.encode(values) == 0))
    if is_text(values.type):
        values = values.filter(pc.not_equal(values, ""))
    if vocabulary.is_numeric:
        numbers = as_int64(values)
        if numbers.null_count:
            wrong = values.filter(numbers.is_null())[0].as_py()
            raise DataError(f"feature '{feature}': '{wrong}' is no whole number, and all known values are")
        values = numbers
    else:
        values = as_text(values)
    if not len(values):
        return vocabulary
    values = pc.unique(values)
    values = values.take(pc.sort_indices(values))
    kind = vocabulary.values.type if vocabulary.is_numeric else pa.large_string()
    both = pa.chunked_array([vocabulary.values.cast(kind), values.cast(kind)])
    return Vocabulary(narrowed(both.combine_chunks()))
