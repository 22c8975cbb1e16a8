"""Places in object stores: local copies of what is read, and uploads of what is written."""

from recspec.stores.copies import cache, fetched, shown
from recspec.stores.doors import resolved
from recspec.stores.urls import Url, parse, url_text

__all__ = ["Url", "cache", "fetched", "parse", "resolved", "shown", "url_text"]
