"""Places in object stores: local copies of what is read, and uploads of what is written."""

from recspec.base.stores.copies import fetched, shown
from recspec.base.stores.doors import resolved
from recspec.base.stores.store import parse, url_text

__all__ = [
    "fetched", "parse", "resolved", "shown", "url_text",
]  # fmt: skip
