"""The memory that rows with long lists take while they are written."""

from __future__ import annotations

from collections.abc import Mapping

from recspec.errors import SettingsError, listed
from recspec.prepare.names import SPLITS
from recspec.spec import Feature
from recspec.storage import BLOCK_ROWS

WRITING_BYTES = 370_000_000  # of the process while it writes splits without lists (measured: 330 to 370 MB)
LIST_BYTES = 10  # per list value of a row group: 4, held 2.5 times (570 MB for 10 million rows with two lists of 50)


def check_memory_limit(memory_limit: int | None, features: Mapping[str, Feature], rows: int) -> None:
    """Refuse lists whose row groups, one per split with at most `rows`, exceed the memory limit."""
    lists = {name: feature.length for name, feature in features.items() if feature.length}
    values = sum(lists.values())
    least = WRITING_BYTES + len(SPLITS) * LIST_BYTES * values * min(rows, BLOCK_ROWS)
    if memory_limit is not None and lists and least > memory_limit:
        held = f"rows with {values:,} values in lists ({listed(sorted(lists))})"
        raise SettingsError(f"--memory-limit of {memory_limit / 1e6:,.0f} MB is too little for {held}; give "
                            f"{-(-least // 10**8) * 100:,} MB or more, or make the lists shorter")  # fmt: skip
