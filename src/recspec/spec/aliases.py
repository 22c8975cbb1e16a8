"""Published spellings of dtypes, lengths and channels, and what each one means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from recspec.errors import listed

Dtype = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64"]
Role = Literal["user", "item", "context", "history", "negative_history", "label", "group"]

DTYPES: tuple[str, ...] = get_args(Dtype)
ROLES: tuple[Role, ...] = get_args(Role)
LIST_LENGTH_SPELLINGS = ("dimensions", "max_hotness", "hotness", "max_len")


@dataclass(frozen=True)
class Channel:
    """The role behind a channel name, and what its features must be (None: either)."""

    role: Role
    categorical: bool | None = None
    is_list: bool | None = None


CHANNELS: Mapping[str, Channel] = MappingProxyType(
    {
        "user": Channel("user"),
        "item": Channel("item"),
        "context": Channel("context"),
        "group": Channel("group", is_list=False),
        "label": Channel("label", is_list=False),
        "history": Channel("history", is_list=True),
        "negative_history": Channel("negative_history", is_list=True),
        # published names
        "user_ch": Channel("user", categorical=True),
        "item_ch": Channel("item", categorical=True),
        "label_ch": Channel("label", is_list=False),
        "categorical": Channel("context", categorical=True),
        "numerical": Channel("context", categorical=False),
        "onehot_categorical": Channel("context", categorical=True, is_list=False),
        "multihot_categorical": Channel("context", categorical=True, is_list=True),
        "map": Channel("group", is_list=False),
        "user_features": Channel("user"),
        "target_item_features": Channel("item", categorical=True),
        "positive_history": Channel("history", categorical=True, is_list=True),
        "numeric_inputs": Channel("context", categorical=False),
        "categorical_user_inputs": Channel("user", categorical=True),
        "categorical_item_inputs": Channel("item", categorical=True),
        "numeric_user_inputs": Channel("user", categorical=False),
        "numeric_item_inputs": Channel("item", categorical=False),
    }
)

_TORCH_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "char": "int8",
    "byte": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "bool_": "bool",
}


def canonical_dtype(value: object) -> object:
    """`int64` for `torch.int64`, `numpy.int64`, `np.int64`, `long` and `i8`; a bare word means what torch means."""
    if not isinstance(value, str):
        return value
    name = value.strip().rsplit(".", 1)[-1].lower()
    name = _TORCH_DTYPES.get(name, name)
    if name in DTYPES:
        return name
    try:
        code = np.dtype(name)
    except (TypeError, ValueError):
        return value
    return code.name if code.name in DTYPES and code.byteorder != ">" else value


def with_one_length(feature: Mapping[Any, Any]) -> dict[Any, Any]:
    """The keys of a feature with `length` in place of any other spelling.

    `dimensions: [100]` is 100. `hotness: 1` marks a scalar, in files that give every feature a hotness.
    """
    spellings = ("length", *LIST_LENGTH_SPELLINGS)
    given = {key: feature[key] for key in spellings if feature.get(key) is not None}
    if len(given) > 1:
        raise ValueError(f"its length is given as {listed(given)}; expected one of them")
    rest = {key: value for key, value in feature.items() if key not in spellings}
    for spelling, value in given.items():
        length = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        if not (spelling == "hotness" and length == 1):
            rest["length"] = length
    return rest
