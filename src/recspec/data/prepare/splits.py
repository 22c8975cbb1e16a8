"""Splits, whatever the engine and its order of rows, and what each split's users have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.expr.types import StringValue, Table
from numpy.typing import NDArray

from recspec.base.config import duration_in
from recspec.base.errors import DataError, SettingsError
from recspec.data.encoding import VOCABULARIES
from recspec.data.prepare.backend import Backend, count_rows, fetch, figures
from recspec.data.prepare.names import ITEM, ROW, SPLIT, SPLITS, TARGET, TIMESTAMP, USER, WRITTEN, Notes
from recspec.data.prepare.tables import SECONDS, counts_by, first_left_out, left_join
from recspec.data.storage import SEEN_FILE, write_seen_file
from recspec.feature_spec import FOLD_IN

MILLION = 1_000_000
TARGET_SHARE, FEWEST_ROWS = 0.2, 5  # of a held-out user: share of rows that are targets; rows without which none is

Ids = NDArray[np.int64]


def leave_one_out(table: Table, *, by: str, order: Sequence[str], among: str | None = None) -> Table:
    """Each user's last row for test, the last but one for valid, all others for train.

    A user's first row is for train. `order` must leave no tie. With `among`, a column of truth values, the last and the
    last but one of the rows where it is true.
    """
    latest = [ibis.desc(name) for name in order]
    place = {"_later": ibis.row_number().over(ibis.window(group_by=by, order_by=latest))}
    place["_last"] = place["_later"]
    if among is not None:
        place["_last"] = ibis.row_number().over(ibis.window(group_by=[by, among], order_by=latest))
    counted = table.mutate(**place, _rows=table.count().over(ibis.window(group_by=by)))
    may_be = ibis._["_later"] < ibis._["_rows"] - 1
    may_be &= ibis.literal(True) if among is None else ibis._[among]
    split = ibis.cases(
        (may_be & (ibis._["_last"] == 0), "test"), (may_be & (ibis._["_last"] == 1), "valid"), else_="train"
    )
    return counted.mutate(split=split).drop("_later", "_last", "_rows")


def all_train(table: Table) -> Table:
    """Every row for train: nothing is held out."""
    return table.mutate(split=ibis.literal("train"))


def by_time(table: Table, *, time: str, valid: float, test: float) -> Table:
    """The latest share of rows for test, those before for valid; rows of one time stay on the earlier side of a cut.

    A split that would get no row so, as a tenth of the days of a week does, gets its latest time instead, unless that
    leaves less than half of the rows before it.
    """
    counted = table.group_by(_time=table[time]).aggregate(_rows=table.count())  # no engine has to sort all rows
    up_to = counted["_rows"].sum().over(ibis.cumulative_window(order_by=counted["_time"])).cast("int64")
    total = counted["_rows"].sum().over(ibis.window()).cast("int64")
    later = ibis.row_number().over(ibis.window(order_by=ibis.desc(counted["_time"]))).cast("int64")
    counted = counted.mutate(_earlier=up_to - counted["_rows"], _total=total, _later=later)  # _later: times after it
    # Whole numbers, so that rounding moves no row; shares are precise to a millionth.
    place, whole = counted["_earlier"] * MILLION, counted["_total"]
    half = place * 2 >= whole * MILLION
    of_test = place >= whole * (MILLION - round(test * MILLION))
    of_test |= half & (counted["_later"] == 0) & bool(test)
    of_valid = place >= whole * (MILLION - round((test + valid) * MILLION))
    tested = of_test.cast("int64").sum().over(ibis.window())
    of_valid |= half & (counted["_later"] == tested) & bool(valid)
    counted = counted.mutate(_of_test=of_test, _of_valid=of_valid)
    cuts = counted.aggregate(
        _test=counted["_time"].min(where=counted["_of_test"]), _valid=counted["_time"].min(where=counted["_of_valid"])
    )
    cut = table.cross_join(cuts)
    split = ibis.cases((cut[time] >= cut["_test"], "test"), (cut[time] >= cut["_valid"], "valid"), else_="train")
    return cut.mutate(split=split).drop("_test", "_valid")


@dataclass(frozen=True)
class Window:
    """The times of test, of one length; valid has the same length before it, and train all that is older."""

    end: float  # the last time, in the units of the timestamps
    length: float


def up_to_window(
    backend: Backend, rows: Table, length: str, earlier: int, *, time: str, notes: Notes
) -> tuple[Table, Window]:
    """Rows up to the end of a window, and the window: `earlier` lengths before the last row.

    Later rows are gone before anything is counted or filtered, so that nothing of them shows in what is prepared.

    Raises:
        SettingsError: if no row is left for train, or a length such as 7d is of times that are no dates.
    """
    first, last = figures(backend, rows, {"first": rows[time].min(), "last": rows[time].max()}).values()
    dated = SECONDS[0] <= first and last <= SECONDS[1]
    step = duration_in(length, "window", dated=dated)
    window = Window(last - earlier * step, step)
    if first > window.end - 2 * step:
        lies = f", which end{'s' if earlier == 1 else ''} {earlier} of them before the last row" if earlier else ""
        raise SettingsError(
            f"setting 'window': no row is older than the two windows of {length} for valid and test{lies}; take a "
            "shorter or a later one"
        )
    if not earlier:
        return rows, window
    kept = rows.filter(rows[time] <= window.end)
    left_out = count_rows(backend, rows) - count_rows(backend, kept)
    notes.dropped.append(f"{left_out:,} rows after the window of test (earlier={earlier})")
    return backend.stage(kept), window


def by_window(table: Table, *, time: str, window: Window) -> Table:
    """The rows of the window for test, those of the one before it for valid, and older ones for train."""
    begins = window.end - window.length
    test, valid = table[time] > begins, table[time] > begins - window.length
    return table.mutate(split=ibis.cases((test, "test"), (valid, "valid"), else_="train"))


def by_share(table: Table, *, row: str, valid: float, test: float, seed: int) -> Table:
    """A random share of the rows for valid and for test, by the row's number and the seed."""
    return _by_digest(table, table[row].cast("string"), valid=valid, test=test, seed=seed)


def by_group(table: Table, *, group: str, valid: float, test: float, seed: int) -> Table:
    """A random share of the groups for valid and for test; the rows of a group stay together."""
    return _by_digest(table, table[group].cast("string"), valid=valid, test=test, seed=seed)


def by_users(
    backend: Backend, table: Table, folder: Path, *, valid: float, test: float, number: int | None, seed: int
) -> Table:
    """Held-out users: all rows of most users for train; of the others some for fold_in and some for valid or test.

    The procedure of Liang et al., "Variational autoencoders for collaborative filtering", WWW 2018, and its draws. Of
    the sorted users in random order, the last `number` are for test and as many before them for valid; without a
    number, shares of them are. Their rows of items that no train user has are left out. Of the n rows of each, in the
    order of the file, int(n / 5) random ones are targets and the others are folded in; of fewer than 5 rows, all are.
    The column `TARGET` is 1 for targets. Needs USER, ITEM and ROW; files in `folder` are read until the engine closes.

    Raises:
        DataError: if no user is left for train.
    """
    users = fetch(backend, counts_by(table, USER)).column(USER)
    of_valid, of_test = (number or round(share * len(users)) for share in (valid, test))
    if of_valid + of_test >= len(users):
        raise DataError(
            f"split users: of {len(users):,} users, {of_valid:,} are held out for valid and {of_test:,} for test; hold "
            "out fewer (heldout_users), so that train has some"
        )
    parts = np.zeros(len(users), np.int64)
    order = _seeded(seed).permutation(len(users))[len(users) - of_valid - of_test :]
    parts[order[:of_valid]], parts[order[of_valid:]] = 1, 2
    held = _read_back(backend, folder / "heldout_users.parquet", {USER: users, "_part": pa.array(parts)})
    divided = left_join(table, held, USER)
    train = divided.filter(divided["_part"] == 0)
    kept = backend.stage(divided.semi_join(train.select(ITEM).distinct(), ITEM))
    others = kept.filter(kept["_part"] > 0)
    each = others.group_by(USER).aggregate(_part=others["_part"].max(), rows=others.count())
    counted = fetch(backend, each.order_by(USER))
    owners, places = _draw_targets(counted.column("_part").to_numpy(), counted.column("rows").to_numpy(), seed)
    drawn = {USER: counted.column(USER).take(pa.array(owners)), "_place": places}
    targets = _read_back(backend, folder / "heldout_targets.parquet", {**drawn, TARGET: np.ones_like(places)})
    place = ibis.row_number().over(ibis.window(group_by=USER, order_by=ROW)).cast("int64")
    found = left_join(kept.mutate(_place=place), targets, USER, "_place")
    is_target = found[TARGET].notnull()
    split = ibis.cases(
        (found["_part"] == 0, "train"), (~is_target, FOLD_IN), (found["_part"] == 1, "valid"), else_="test"
    )
    return found.mutate(split=split, **{TARGET: is_target.cast("int64")}).drop("_part", "_place")


def note_unknown_items(backend: Backend, notes: Notes, before: Table, after: Table) -> int:
    """Note, and return, how many rows `by_users` left out."""
    count = count_rows(backend, before) - count_rows(backend, after)
    if count:
        first = first_left_out(backend, before, after)
        notes.dropped.append(
            f"{count:,} rows of held-out users, whose items no user of train has, such as user '{first[USER]}' and "
            f"item '{first[ITEM]}'"
        )
    return count


def _seeded(seed: int) -> np.random.RandomState:
    """NumPy's legacy generator, by which published splits were drawn and whose stream is frozen."""
    return np.random.RandomState(seed % 2**32)


def _draw_targets(parts: NDArray[np.int64], rows: NDArray[np.int64], seed: int) -> tuple[Ids, Ids]:
    """The targets of held-out users: each one's place among the users, and among that user's rows.

    The generator starts anew for valid (part 1) and for test (2), and draws user by user.
    """
    owners, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in (1, 2):
        random = _seeded(seed)
        for user in np.flatnonzero((parts == part) & (rows >= FEWEST_ROWS)).tolist():
            count = int(rows[user])
            places.append(random.choice(count, size=int(TARGET_SHARE * count), replace=False).astype(np.int64))
            owners.append(np.full(len(places[-1]), user))
    return np.concatenate(owners), np.concatenate(places)


def _read_back(backend: Backend, file: Path, columns: Mapping[str, object]) -> Table:
    """Columns in memory as a table of the engine."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return backend.read_parquet([file])


def folds(table: Table, *, group: str, folds: int, seed: int) -> Table:
    """Add the column `fold`, 0 to folds - 1: groups in folds of equal size, independent of the splits."""
    digest = (ibis.literal(f"fold:{seed}:") + table[group].cast("string")).hexdigest("md5")
    bounds = [(digest < _hex((number + 1) / folds), number) for number in range(folds - 1)]
    number = ibis.cases(*bounds, else_=folds - 1) if bounds else ibis.literal(0)
    return table.mutate(fold=number.cast("int64"))


def last_of_train(table: Table, *, by: str, order: Sequence[str]) -> Table:
    """Each user's last train row for valid, of users with three or more; `order` must leave no tie."""
    window = ibis.window(group_by=[by, "split"], order_by=[ibis.desc(name) for name in order])
    counted = table.mutate(
        _last=ibis.row_number().over(window), _rows=table.count().over(ibis.window(group_by=[by, "split"]))
    )
    chosen = (ibis._["split"] == "train") & (ibis._["_last"] == 0) & (ibis._["_rows"] > 2)
    return counted.mutate(split=ibis.ifelse(chosen, "valid", ibis._["split"])).drop("_last", "_rows")


def with_digest(table: Table, name: str, *, row: str, seed: int) -> Table:
    """Add a column whose order is random by the seed, without ties."""
    digest = (ibis.literal(f"order:{seed}:") + table[row].cast("string")).hexdigest("md5")
    return table.mutate(**{name: digest})


def _by_digest(table: Table, key: StringValue, *, valid: float, test: float, seed: int) -> Table:
    """MD5 is a hash that all engines have; its hexadecimal digits sort like uniform numbers in [0, 1)."""
    digest = (ibis.literal(f"{seed}:") + key).hexdigest("md5")
    split = ibis.cases((digest < _hex(test), "test"), (digest < _hex(test + valid), "valid"), else_="train")
    return table.mutate(split=split)


def _hex(share: float) -> str:
    """The digits below which `share` of all digests lie; `g` is above all digests."""
    return "g" if share >= 1 else f"{int(share * 2**32):08x}"


def write_seen(backend: Backend, folder: Path, events: Table, name: str = SEEN_FILE) -> None:
    """Write `seen.parquet`, or a file of its form, from raw events (columns user_id, item_id, split).

    It lies beside the vocabularies of their ids.

    Events of users and items without an id are left out.
    """
    held = events.select(USER, ITEM, _split=events[SPLIT].cases(*((name, n) for n, name in enumerate(WRITTEN))))
    for of, number in ((USER, "_user"), (ITEM, "_item")):
        ids = backend.read_parquet([folder / VOCABULARIES / f"{of}.parquet"], row=True)
        ids = ids.select(_value="value", **{number: ids[ROW] + 1})
        held = held.inner_join(ids, held[of] == ids["_value"]).drop("_value", of)
    ids = {USER: held["_user"], ITEM: held["_item"]}
    first = held.group_by(**ids).aggregate(**{SPLIT: held["_split"].min()})
    write_seen_file(folder / name, backend.batches(first.order_by(USER, ITEM)))


CUTS: Mapping[str, Literal["user", "all"]] = {"leave_one_out": "user", "time": "all"}
"""Whose rows tell when a split begins, for `with_splits`; of other splits none do."""


def with_splits(events: Table, rows: Table, cut: Literal["user", "all"] | None) -> Table:
    """Events (columns of `rows` but maybe the split) with the split whose rows know of them first.

    Those among `rows` have one. Another one keeps its own, if it has one. Else it is of the last split that begins
    before it in time: among the rows of its user, or of all users, where rows of one time belong together. Without a
    `cut`, it is of train.
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
        after = held[TIMESTAMP] >= time
        if cut == "user":
            after = (held[TIMESTAMP] > time) | ((held[TIMESTAMP] == time) & (held[ROW] >= row))
        own.append(ibis.ifelse(after, name, ibis.null("string")))
    return held.select(USER, ITEM, ROW, **{SPLIT: ibis.coalesce(*own, ibis.literal("train"))})
