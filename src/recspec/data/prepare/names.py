"""Names of columns and splits, raw and prepared, and the notes of a preparation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from recspec.feature_spec import FOLD_IN, SIGNALS
from recspec.feature_spec import SPLITS as SPLITS

USER, ITEM, TIMESTAMP = "user_id", "item_id", "timestamp"
LABEL, GROUP, SERIES = "label", "group", "series"
EVENT_WEIGHT = "event_weight"
SPLIT = "split"  # column with the split of a row: one of `WRITTEN`
WRITTEN = (*SPLITS, FOLD_IN)  # the numbers of splits are their places here
SIGNALS_OF = dict(zip(SPLITS[1:], SIGNALS, strict=True))  # the splits of their events that are not predicted
TARGET = "__target__"  # column that sorts the targets of held-out users behind their other events
HISTORY, NEGATIVE_HISTORY, GAP = "history", "negative_history", "history_gap"
ROW = "__row__"  # column with a row's place in its raw file; files with a column of this name are refused
FILE_SPLIT = "__split__"  # column with the split of a row's file, if files are splits; likewise refused
AS_IN_FILE = "\0"  # before the name of a column that a catalogue shows as its file holds it
SEEN = "__seen__"  # column that says whether an event counts as seen, if the settings name types; likewise refused
IS_TARGET = "__is_target__"  # whether an event is of a type that is predicted, if the settings name such; likewise
WEIGHT = "__weight__"  # column with the weight of a row's event, if the settings give weights; likewise refused
SPLIT_BEFORE = "__split_before__"  # column with the split that a row had in the dataset before; likewise refused
NEW = "-new"  # ends the name of the folder with those rows of a split that were not in it before
DESCRIBES = {"user": "__user__", "item": "__item__"}
"""Before the name of a column of the users' or items' file that rows of new events hold; likewise refused."""


@dataclass
class Notes:
    """Sentences with counts and an example; every changed value and every left-out row has one."""

    warnings: list[str] = field(default_factory=list)  # what looks wrong, and the setting that mends it
    inferred: list[str] = field(default_factory=list)  # choices made from the data, such as the type of a column
    dropped: list[str] = field(default_factory=list)  # rows, users, items and values that are left out
    changed: list[str] = field(default_factory=list)  # values kept in another form
    time_format: str | None = None  # in which the times of the rows are written, if it was found in them
    num_invalid: int = 0  # rows that were left out by invalid values

    def summary(self) -> dict[str, object]:
        """The non-empty lists, as in `prepare.json`."""
        return {name: told for name, told in asdict(self).items() if isinstance(told, list) and told}


ColumnRole = Literal["user", "item", "timestamp", "rating", "label", "split"]

_NAMES: Mapping[ColumnRole, str] = {
    "user": (
        "userid user uid userindex reviewerid customerid customer visitorid memberid member clientid username "
        "steamid profileid accountid personid sessionid session"
    ),
    "item": (
        "itemid item iid itemindex movieid movie parentasin asin productid product sku articleid article "
        "bookid isbn songid trackid artistid albumid venueid poiid poi locationid businessid placeid newsid "
        "videoid gameid appid adid contentid goodsid recipeid documentid adgroupid pageid items itemids "
        "itemsequence sequence itemlist stockcode animeid jokeid trackuri aid"
    ),
    "timestamp": (
        "timestamp time ts unixtime unixreviewtime datetime date eventtime createdat timestampms checkintime "
        "visittime clicktime utctime"
    ),
    "rating": "rating ratings stars overall ratingscore score bookrating",
    "label": "label click clicked isclick isclicked clk",
    "split": "split splits set subset partition fold",
}
NAMES = {role: names.split() for role, names in _NAMES.items()}
"""Plain names of each role, the likeliest first."""

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), "train"),
    **dict.fromkeys(("valid", "validation", "vali", "val", "dev", "validate"), "valid"),
    **dict.fromkeys(("test", "testing", "tst", "holdout"), "test"),
}
"""Words for a split, in lower case."""


def plain(name: str) -> str:
    """A column's name as `NAMES` has it: `User_ID:token` is `userid`."""
    return re.sub(r"[\W_]", "", name.partition(":")[0].lower())


def columns_of(role: ColumnRole, columns: Iterable[str]) -> list[str]:
    """The columns whose names are usual for a role, the likeliest first, and the first of each name."""
    names, by_name = [*columns], dict[str, str]()
    one_table = len({name.rpartition(".")[0] for name in names}) == 1  # of a database, as in `events.user_id`
    for column in names:
        by_name.setdefault(plain(column.rpartition(".")[2] if one_table else column), column)
    return [by_name[name] for name in NAMES[role] if name in by_name]


def column_of(role: ColumnRole, columns: Iterable[str]) -> str | None:
    """The column whose name is the likeliest for a role, the first among equals."""
    return next(iter(columns_of(role, columns)), None)


def is_usual(name: str) -> bool:
    """Whether a name is usual for any role."""
    return any(plain(name) in names for names in NAMES.values())
