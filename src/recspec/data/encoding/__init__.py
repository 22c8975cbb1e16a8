"""Raw values to ids and scaled numbers."""

from recspec.data.encoding import hashing, raw_values, text_vectors
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    Scaler,
    TextEncoder,
    VectorEncoder,
    VocabularyEncoder,
    vector_scale,
)
from recspec.data.encoding.encoders import (
    ENCODERS_FILE,
    VOCABULARIES,
    Arrays,
    Encoders,
    RequestEncoder,
    encode_history,
    extended,
    raw_names,
    read_encoders,
)
from recspec.data.encoding.hashing import CROSS_KEY
from recspec.data.encoding.raw_columns import (
    BETWEEN,
    EXACT,
    as_column,
    as_text,
    combined,
    decoded_type,
    in_strings,
    is_text,
    plain,
    repeated,
    split_lists,
    vectors_of,
    widened,
    with_points,
)
from recspec.data.encoding.raw_values import COMMA, GROUPED, MISSING_NUMBERS, TRUTH, Lists, cut
from recspec.data.encoding.row_notes import (
    LEFT_OUT,
    NO_EVENT,
    NO_KNOWN_EVENT,
    UNKNOWN_ID,
    MissingValues,
    Predictions,
    column_notes,
    count_missing,
    misread_lists,
    out_of_range,
    renumbered,
    row_at,
)
from recspec.data.encoding.text_vectors import MOST_TEXTS, fit_projection
from recspec.data.encoding.vocabulary import LONGEST_ID, Vocabulary, are_blank

__all__ = [
    "BETWEEN", "COMMA", "CROSS_KEY", "ENCODERS_FILE", "EXACT", "GROUPED", "LEFT_OUT", "LONGEST_ID", "MISSING_NUMBERS",
    "MOST_TEXTS", "NO_EVENT", "NO_KNOWN_EVENT", "TRUTH", "UNKNOWN_ID", "VOCABULARIES", "Arrays", "BucketEncoder",
    "CrossEncoder", "Encoder", "Encoders", "HashEncoder", "Lists", "MissingValues", "NumberEncoder", "Predictions",
    "RequestEncoder", "ScaleEncoder", "Scaler", "TextEncoder", "VectorEncoder", "Vocabulary", "VocabularyEncoder",
    "are_blank", "as_column", "as_text", "column_notes", "combined", "count_missing", "cut", "decoded_type",
    "encode_history", "extended", "fit_projection", "hashing", "in_strings", "is_text", "misread_lists", "out_of_range",
    "plain", "raw_names", "raw_values", "read_encoders", "renumbered", "repeated", "row_at", "split_lists",
    "text_vectors", "vector_scale", "vectors_of", "widened", "with_points",
]  # fmt: skip
