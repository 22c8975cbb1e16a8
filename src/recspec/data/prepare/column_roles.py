"""Usual names of columns, by what they hold; blanks, underscores, case and a suffix such as `:token` do not count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

ColumnRole = Literal["user", "item", "timestamp", "rating", "label", "split"]

NAMES: dict[ColumnRole, tuple[str, ...]] = {
    "user": (
        "userid",
        "user",
        "uid",
        "userindex",
        "reviewerid",
        "customerid",
        "customer",
        "visitorid",
        "memberid",
        "member",
        "clientid",
        "username",
        "steamid",
        "profileid",
        "accountid",
        "personid",
        "sessionid",
        "session",
    ),
    "item": (
        "itemid",
        "item",
        "iid",
        "itemindex",
        "movieid",
        "movie",
        "parentasin",
        "asin",
        "productid",
        "product",
        "sku",
        "articleid",
        "article",
        "bookid",
        "isbn",
        "songid",
        "trackid",
        "artistid",
        "albumid",
        "venueid",
        "poiid",
        "poi",
        "locationid",
        "businessid",
        "placeid",
        "newsid",
        "videoid",
        "gameid",
        "appid",
        "adid",
        "contentid",
        "goodsid",
        "recipeid",
        "documentid",
        "adgroupid",
        "pageid",
        "items",
        "itemids",
        "itemsequence",
        "sequence",
        "itemlist",
        "stockcode",
        "animeid",
        "jokeid",
        "trackuri",
        "aid",
    ),
    "timestamp": (
        "timestamp",
        "time",
        "ts",
        "unixtime",
        "unixreviewtime",
        "datetime",
        "date",
        "eventtime",
        "createdat",
        "timestampms",
        "checkintime",
        "visittime",
        "clicktime",
        "utctime",
    ),
    "rating": ("rating", "ratings", "stars", "overall", "ratingscore", "score", "bookrating"),
    "label": ("label", "click", "clicked", "isclick", "isclicked", "clk"),
    "split": ("split", "splits", "set", "subset", "partition", "fold"),
}
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
