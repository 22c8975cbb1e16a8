"""What counts as seen: every event of a user in any split, whatever its rating or weight; see `storage.seen_file`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import ibis
from ibis.expr.types import Table

from recspec.data.encoding import VOCABULARIES
from recspec.data.prepare.backend import Backend
from recspec.data.prepare.names import ITEM, ROW, SPLIT, SPLITS, TIMESTAMP, USER
from recspec.data.prepare.tables import left_join
from recspec.data.storage import SEEN_FILE, write_seen_file


def write_seen(backend: Backend, folder: Path, events: Table) -> None:
    """Write `seen.parquet` from raw events (columns user_id, item_id, split), beside the vocabularies of their ids.

    Events of users and items without an id are left out.
    """
    held = events.select(USER, ITEM, _split=events[SPLIT].cases(*((name, n) for n, name in enumerate(SPLITS))))
    for name, number in ((USER, "_user"), (ITEM, "_item")):
        ids = backend.read_parquet([folder / VOCABULARIES / f"{name}.parquet"], row=True)
        ids = ids.select(_value="value", **{number: ids[ROW] + 1})
        held = held.inner_join(ids, held[name] == ids["_value"]).drop("_value", name)
    ids = {USER: held["_user"], ITEM: held["_item"]}
    first = held.group_by(**ids).aggregate(**{SPLIT: held["_split"].min()})
    write_seen_file(folder / SEEN_FILE, backend.batches(first.order_by(USER, ITEM)))


def with_splits(events: Table, rows: Table, cut: Literal["user", "all"] | None) -> Table:
    """Events (columns of `rows` but maybe the split) with the split whose rows know of them first.

    Those among `rows` have one. Another one keeps its own, if it has one. Else it is of the last split that begins
    before it in time: among the rows of its user, or of all users. Without a `cut`, it is of train.
    """
    kept = rows.select(ROW, _kept=rows[SPLIT])
    held = left_join(events, kept, ROW)
    own = [held["_kept"], *([held[SPLIT]] if SPLIT in events.columns else [])]
    for name in SPLITS[1:] if cut else ():
        of_split = rows.filter(rows[SPLIT] == name)
        begins = {f"_{name}_time": of_split[TIMESTAMP].min(), f"_{name}_row": of_split[ROW].min()}
        if cut == "user":
            held = left_join(held, of_split.group_by(USER).aggregate(**begins), USER)
        else:
            held = held.cross_join(of_split.aggregate(**begins))
    for name in reversed(SPLITS[1:]) if cut else ():
        time, row = held[f"_{name}_time"], held[f"_{name}_row"]
        after = (held[TIMESTAMP] > time) | ((held[TIMESTAMP] == time) & (held[ROW] >= row))
        own.append(ibis.ifelse(after, name, ibis.null("string")))
    return held.select(USER, ITEM, **{SPLIT: ibis.coalesce(*own, ibis.literal("train"))})
