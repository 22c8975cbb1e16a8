"""Places in object stores: local copies of what is read, and uploads of what is written."""

from recspec.base.stores.copies import fetched, shown
from recspec.base.stores.store import parse, url_text
from recspec.base.stores.url_resolver import with_local_paths
