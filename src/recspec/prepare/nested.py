"""Objects inside of columns: the keys that settings name become columns, such as `items.item_id`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ibis.expr.datatypes import DataType

from recspec.errors import DataError, listed, shortened
from recspec.prepare.column_roles import column_of


def keys_of(structure: object) -> tuple[bool, list[str]]:
    """Whether a structure is a list, and the keys of its objects whose values are no lists or objects."""
    is_list = isinstance(structure, list)
    inner = structure[0] if isinstance(structure, list) and structure else structure
    return is_list, [key for key, kind in inner.items() if isinstance(kind, str)] if isinstance(inner, dict) else []


def fields_of(kind: DataType) -> tuple[bool, list[str]]:
    """`keys_of` for a column of structs in Parquet."""
    is_list = kind.is_array()
    inner = kind.value_type if is_list else kind
    return is_list, [key for key, each in inner.fields.items() if not each.is_nested()] if inner.is_struct() else []


def inside(keys: Mapping[str, tuple[bool, Sequence[str]]], asked: Collection[str]) -> dict[str, tuple[str, str]]:
    """The columns inside of objects that settings name, and all others of these objects: {column: (key, inner key)}."""
    found: dict[str, tuple[str, str]] = {}
    for name, (_, inner) in keys.items():
        columns = {f"{name}.{key}": (name, key) for key in inner if f"{name}.{key}" not in keys}
        found |= columns if {*asked} & {*columns} else {}
    return found


def check_items(keys: Mapping[str, tuple[bool, Sequence[str]]], item: str | None, where: str) -> None:
    """Refuse objects as items. Raises DataError, which names the setting for the key of their id."""
    items = item if item in keys else column_of("item", keys)
    is_inside = any((item or "").startswith(f"{name}.") for name in keys)
    if items is None and not is_inside and column_of("label", keys) is None:
        items = next((name for name, (_, inner) in keys.items() if column_of("item", inner)), None)
    if items is None or not keys[items][1] or is_inside:
        return
    is_list, inner = keys[items]
    likely = column_of("item", inner) or next((key for key in inner if key == "id"), inner[0])
    raise DataError(f"{where}: column '{shortened(items)}' holds {'lists of ' if is_list else ''}objects with "
                    f"{listed(inner)}; expected ids; name the key of the item's id, such as --set "
                    f"'item={items}.{likely}'")  # fmt: skip
