"""Settings of a class with everything switched on, found from its fields, so that a new setting is covered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from recspec.base.config import Settings
from recspec.base.errors import RecspecError

RANDOM = frozenset({"attention_dropout", "dropout", "hidden_share", "id_dropout", "kl_weight"})
"""Settings that make a step random; they stay as they are where steps are compared."""

DRAWS = frozenset({("loss", "sampled")})
"""Words of settings under which the loss draws items: left out where steps are compared."""

ON = 0.3
"""What numbers are set to: weights of losses and penalties, and deviations of first values."""


def switched_on(settings: type[Settings]) -> dict[str, float]:
    """Every fractional setting of a class, each at a value other than its default."""
    return {
        name: ON if field.default != ON else ON / 2
        for name, field in settings.model_fields.items()
        if float in _kinds(field) and name not in RANDOM
    }


def choices(settings: type[Settings]) -> Iterator[dict[str, Any]]:
    """One other value of one setting at a time: flags, words, and sizes that are null by default."""
    for name, field in settings.model_fields.items():
        kinds = _kinds(field)
        others: list[object] = [word for word in _words(field) if word != field.default and (name, word) not in DRAWS]
        others += [not field.default] if bool in kinds else []
        others += [3] if int in kinds and field.default is None else []
        yield from ({name: other} for other in others)


def variants(settings: type[Settings], base: Mapping[str, object], accepts: Callable[[Settings], object]) -> list[Any]:
    """The settings `base` with all numbers switched on: alone, and with each of `choices`.

    A choice that does not go together with a number (as `short: din` with an auxiliary loss) goes without that number.

    Args:
        settings: the class.
        base: small sizes, and what else must be.
        accepts: raises a `RecspecError` where settings are refused.
    """
    numbers, found = switched_on(settings), []
    for choice in ({}, *choices(settings)):
        for left_out in (None, *numbers):
            kept = {name: value for name, value in numbers.items() if name != left_out}
            try:
                made = settings.model_validate({**base, **kept, **choice})
                accepts(made)
            except (RecspecError, ValueError):
                continue
            found.append(made)
            break
        else:
            raise AssertionError(f"{settings.__name__} with {choice} is refused whatever else is set")
    return found


def _kinds(field: FieldInfo) -> set[object]:
    """The plain types that a setting may have."""
    return {each for each in _options(field.annotation) if isinstance(each, type)}


def _words(field: FieldInfo) -> list[object]:
    return [word for each in _options(field.annotation) if get_origin(each) is Literal for word in get_args(each)]


def _options(annotation: object) -> tuple[object, ...]:
    """The members of a union of types, or the one type that it is."""
    if get_origin(annotation) in (None, Literal, tuple, dict):
        return (annotation,)
    return tuple(option for part in get_args(annotation) for option in _options(part))
