"""What a form needs to know about a column: its kind, the values to choose from, the range of its numbers.

Kinds: `choice` (one of a few values), `choices` (a list of them, or one text with `|` between them), `number`, `truth`
(true and false, or 1 and 0), `date`, `image` (addresses of pictures), `text`, and `other`, which no form shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recspec.data.encoding import (
    BucketEncoder,
    CrossEncoder,
    Encoder,
    Encoders,
    HashEncoder,
    NumberEncoder,
    ScaleEncoder,
    TextEncoder,
    VocabularyEncoder,
    is_text,
    plain,
)

Kind = Literal["choice", "choices", "number", "truth", "date", "image", "text", "other"]
Column: TypeAlias = Any
"""A pyarrow array, or a chunked one (pyarrow has no types)."""

MOST_VALUES = 200
"""Values to choose from; a column with more is a text."""
SAMPLE = 1 << 16
"""Rows that decide the kind."""
LONGEST_VALUE = 100
"""Characters of a value to choose; a column with longer ones is a text."""
MANY = 5
"""Numbers between two whole ones that are this far apart are taken for whole ones, if an example is to be given."""
BETWEEN = "|"
"""What stands between the values of a list that is one text."""

DATE = r"^\d{4}-\d{2}-\d{2}([T ].*)?$"
IMAGE_NAMES = frozenset(
    f"{first}{last}"
    for first in ("image", "img", "picture", "photo", "thumbnail", "poster", "cover")
    for last in ("", "s", "_url", "_link", "_src", "url")
) | {"image_link", "product_image", "main_image", "product_image_url"}
IMAGE_ENDING = r"(?i)^https?://[^?#]+\.(png|jpe?g|gif|webp|avif)([?#].*)?$"
IMAGE_ADDRESS = r"(?i)^(https?://|data:image/(png|jpe?g|gif|webp|avif);base64,)"
"""What an address of a picture begins with."""


@dataclass(frozen=True)
class ColumnFacts:
    """A column as a form shows it."""

    name: str
    kind: Kind
    values: tuple[Any, ...] = ()
    """Of `choice` and `choices`, the most frequent first where that is known."""
    low: float | str | None = None
    high: float | str | None = None
    """The range of `number` and `date`, where it is known."""
    is_whole: bool = False
    """Whether the numbers are whole."""
    is_required: bool = False
    """Whether the model needs a value in every request."""
    example: Any = None
    """A value that the model knows, to begin with; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "values": list(self.values)}


# --- from the values of a catalogue ----------------------------------------------------------------------------------


def facts_of_values(name: str, column: Column) -> ColumnFacts:
    """The facts of a column from its values."""
    array = plain(pa.chunked_array([column]) if isinstance(column, pa.Array) else column)
    kind = array.type
    if pa.types.is_boolean(kind):
        return ColumnFacts(name, "truth")
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _of_numbers(name, array)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _of_dates(name, array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False))
    if is_text(kind):
        return _of_texts(name, array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        within = kind.value_type
        if is_text(within) or pa.types.is_integer(within):
            values = _few_values(pc.list_flatten(array))
            return ColumnFacts(name, "other" if values is None else "choices", values or ())
    return ColumnFacts(name, "other")


def _of_numbers(name: str, array: Column) -> ColumnFacts:
    values = array.drop_null().cast(pa.float64(), safe=False).to_numpy()
    values = values[np.isfinite(values)]
    if not len(values):
        return ColumnFacts(name, "other")
    low, high = float(values.min()), float(values.max())
    is_whole = bool((values == np.floor(values)).all())
    if low >= 0 and high <= 1 and is_whole:
        return ColumnFacts(name, "truth")
    return ColumnFacts(name, "number", (), low, high, is_whole)


def _of_dates(name: str, array: Column) -> ColumnFacts:
    low, high = (each.as_py() for each in pc.min_max(array).values())
    if low is None:
        return ColumnFacts(name, "other")
    return ColumnFacts(name, "date", (), f"{low:%Y-%m-%d}", f"{high:%Y-%m-%d}")


def _of_texts(name: str, array: Column) -> ColumnFacts:
    sample = array.slice(0, SAMPLE).drop_null()
    sample = sample.filter(pc.not_equal(sample, pa.scalar("", sample.type)))
    if not len(sample):
        return ColumnFacts(name, "other")
    if _all(sample, IMAGE_ADDRESS) and (name.lower() in IMAGE_NAMES or _all(sample, IMAGE_ENDING)):
        return ColumnFacts(name, "image")
    if _all(sample, DATE):
        found = pc.min_max(array.filter(pc.match_substring_regex(array, DATE)))
        return ColumnFacts(name, "date", (), *(found[each].as_py()[:10] for each in ("min", "max")))
    if _has_several(sample) and _few_values(_parted(sample)) is not None:
        values = _few_values(_parted(array))
        return ColumnFacts(name, "text" if values is None else "choices", values or ())
    values = _few_values(sample) and _few_values(array)
    return ColumnFacts(name, "choice" if values else "text", values or ())


def _all(texts: Column, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _has_several(texts: Column) -> bool:
    """Whether some texts hold several values, with the same sign between them."""
    return bool(pc.any(pc.match_substring(texts, BETWEEN)).as_py())


def _parted(texts: Column) -> Column:
    return pc.list_flatten(pc.split_pattern(texts, BETWEEN))


def _few_values(array: Column) -> tuple[Any, ...] | None:
    """The distinct values, most frequent first; None if there are many, or hardly any is there twice."""
    counts = pc.value_counts(array.drop_null())
    values, numbers = counts.field(0), counts.field(1).to_numpy(zero_copy_only=False)
    texts = is_text(values.type)
    if texts and len(values):
        kept = pc.not_equal(values, pa.scalar("", values.type))
        values, numbers = values.filter(kept), numbers[kept.to_numpy(zero_copy_only=False)]
    if not 0 < len(values) <= MOST_VALUES or 2 * len(values) > numbers.sum():
        return None
    if texts and pc.max(pc.utf8_length(values)).as_py() > LONGEST_VALUE:
        return None
    order = sorted(range(len(values)), key=lambda place: (-int(numbers[place]), str(values[place])))
    return tuple(values.take(pa.array(order)).to_pylist())


# --- from what encodes a request -------------------------------------------------------------------------------------


def facts_of_encoder(name: str, encoders: Encoders | None, *, is_required: bool = False) -> ColumnFacts:
    """The facts of a raw column of requests, from the encoder that reads it."""
    found = ColumnFacts(name, "text") if encoders is None else _of_encoder(name, encoders)
    return replace(found, is_required=is_required)


def _of_encoder(name: str, encoders: Encoders) -> ColumnFacts:
    encoder = _reader(name, encoders)
    match encoder:
        case None | TextEncoder():
            return ColumnFacts(name, "text")
        case VocabularyEncoder():
            vocabulary = encoders.vocabularies[encoder.vocabulary]
            is_list = encoder.separator is not None or encoder.length is not None
            kind: Kind = "other" if is_list else "number" if vocabulary.is_numeric else "text"
            kept = vocabulary.values[: MOST_VALUES + 1].to_pylist()
            first = None if is_list or not kept else kept[0]
            if len(kept) <= MOST_VALUES:
                values = tuple(each for each in kept if each != encoder.missing)
                return ColumnFacts(name, "choices" if is_list else "choice", values, example=first)
            return ColumnFacts(name, kind, is_whole=vocabulary.is_numeric, example=first)
        case BucketEncoder():
            return ColumnFacts(name, "number")
        case ScaleEncoder() | NumberEncoder():
            if getattr(encoder, "length", None) is not None:
                return ColumnFacts(name, "other")
            return ColumnFacts(name, "number", (), encoder.low, encoder.high, example=_usual(encoder))
        case CrossEncoder():
            is_number = name in encoder.boundaries or name in encoder.whole
            return ColumnFacts(name, "number" if is_number else "text", is_whole=name in encoder.whole)
        case HashEncoder():
            kind = "number" if encoder.whole else "other" if encoder.length is not None else "text"
            return ColumnFacts(name, kind, is_whole=encoder.whole)
    return ColumnFacts(name, "other")  # a vector


def _usual(encoder: ScaleEncoder | NumberEncoder) -> float | None:
    """The mean of the numbers in train, before they were scaled, to three digits; None if it is not known."""
    if not isinstance(encoder, ScaleEncoder):
        return encoder.low
    found = float(encoder.mean)
    if encoder.log1p:
        found = float(np.sign(found) * np.expm1(min(abs(found), 50.0)))
    elif encoder.log_plus is not None:
        found = float(np.exp(min(found, 50.0))) - encoder.log_plus
    if encoder.low is not None and encoder.high is not None and encoder.high - encoder.low >= MANY:
        are_whole = encoder.low.is_integer() and encoder.high.is_integer()
        return float(round(found)) if are_whole else float(f"{found:.3g}")
    return float(f"{found:.3g}")


def _reader(name: str, encoders: Encoders) -> Encoder | None:
    """The encoder that tells most about a raw column: its own, else a cross's."""
    own = encoders.encoders.get(name)
    if own is not None and not isinstance(own, CrossEncoder):
        return own
    of_column = [each for each in encoders.encoders.values() if getattr(each, "column", None) == name]
    crossed = [each for each in encoders.encoders.values() if isinstance(each, CrossEncoder) and name in each.columns]
    return next(iter([*sorted(of_column, key=lambda each: each.kind == "bucket"), *crossed]), None)


# --- values of items -------------------------------------------------------------------------------------------------

LONGEST_TEXT, LONGEST_LIST, LONGEST_IMAGE = 300, 20, 1 << 16
"""Characters, entries and characters of a picture that one value shows."""


def shown_values(facts: ColumnFacts, values: Sequence[Any]) -> list[Any]:
    """Values as JSON has them: texts and lists cut short, times as texts, and only allowed addresses of pictures."""
    return [_shown(facts, value) for value in values]


def _shown(facts: ColumnFacts, value: Any) -> Any:
    if facts.kind == "image":
        is_one = isinstance(value, str) and len(value) <= LONGEST_IMAGE and re.match(IMAGE_ADDRESS, value)
        return value if is_one else None
    if facts.kind == "truth" and value is not None:
        return bool(value)
    if facts.kind == "choices" and isinstance(value, str):
        value = [each for each in value.split(BETWEEN) if each]
    if isinstance(value, list):
        return [_scalar(each) for each in value[:LONGEST_LIST]]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if hasattr(value, "isoformat"):
        return value.isoformat()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None
