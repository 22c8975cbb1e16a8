"""Raw values to ids and scaled numbers."""

from recspec.data.encoding import hashing, raw_values, text_vectors
from recspec.data.encoding.encoder_kinds import (
    BucketEncoder,
    ClockEncoder,
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
    columns_of,
    encode_history,
    extended,
    raw_names,
    read_encoders,
)
from recspec.data.encoding.hashing import CROSS_KEY, mix
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
from recspec.data.encoding.raw_values import COMMA, EVENT_SECONDS, GROUPED, MISSING_NUMBERS, TRUTH, Lists, cut
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
from recspec.data.encoding.stock_names import AVAILABILITY, IN_STOCK, OUT_OF_STOCK, PIECES, STOCK_NAMES
from recspec.data.encoding.text_vectors import MOST_TEXTS, fit_projection
from recspec.data.encoding.vocabulary import LONGEST_ID, Vocabulary, are_blank
