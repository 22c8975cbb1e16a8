"""Layouts of files that nobody tuned for: prepared rightly, doubted, or refused with a remedy that works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from recspec.base.errors import RecspecError
from recspec.data.prepare.prepared import Prepared
from tests.dataset_cases import prepare_table, prepare_text, raw_pairs

START = 1_511_544_070
Event = tuple[int, int, int]
EVENTS: list[Event] = [
    (user, (user * 2 + place) % 9, START + 172_800 * place + 977 * user)
    for user in range(1, 8)
    for place in reversed(range(6))
]
"""User, item, time; each user's latest event comes first in the file, so that the order of the file is another one."""
USERS = range(1, 8)


def clock(time: int, form: str = "%Y-%m-%dT%H:%M:%S") -> str:
    return datetime.fromtimestamp(time, UTC).strftime(form)


def lines(row: Callable[[int, int, int], str], header: str = "", end: str = "\n") -> str:
    """A line for each event."""
    return header + "".join(row(*event) + end for event in EVENTS)


def by_user() -> list[tuple[int, list[tuple[int, int]]]]:
    return [(user, [(item, time) for each, item, time in EVENTS if each == user]) for user in USERS]


@dataclass(frozen=True)
class Layout:
    """A file, and the outcome: its events, or a refusal and the settings that it asks for."""

    text: str
    refused: str = ""  # what the refusal says; empty: no setting is needed
    settings: Mapping[str, object] = field(default_factory=dict)  # by which it is then read
    doubted: str = ""  # what a warning says
    user: str = "{}"  # how the file writes a user, and an item
    item: str = "{}"
    timed: bool = True  # whether the time of the file gives the order
    name: str = "events.csv"


KIND = ("view", "cart", "buy")
ASIN = "B0000000{:02d}"
REVIEWER = "AE{:026d}"
OTTO = "".join(
    json.dumps({"session": user, "events": [{"aid": item, "ts": time * 1000, "type": "clicks"} for item, time in held]})
    + "\n"
    for user, held in by_user()
)
MPD = [
    {
        "name": "x",
        "pid": user,
        "tracks": [{"pos": place, "track_uri": f"spotify:track:{item}"} for place, (item, _) in enumerate(held)],
    }
    for user, held in by_user()
]

LAYOUTS = {
    "Taobao's UserBehavior": Layout(
        lines(lambda u, i, t: f"{u},{i},{2520000 + i % 3},{('pv', 'buy')[i % 2]},{t}"),
        refused="the first row is '1, 7, 2520001, buy, 1512409047'. If rows are interactions: --set user=COLUMN "
        "--set item=COLUMN --set timestamp=column_5;",
        settings={"user": "column_1", "item": "column_2", "timestamp": "column_5"},
    ),
    "Last.fm 1K": Layout(
        lines(lambda u, i, t: f'user_{u}\t{clock(t)}Z\tmb{i}\tArtist "{i}\t\tTrack {i}'),
        refused="--set user=COLUMN --set item=COLUMN --set timestamp=column_2",
        settings={"user": "column_1", "item": "column_3", "timestamp": "column_2"},
        user="user_{}",
        item="mb{}",
    ),
    "Foursquare": Layout(
        lines(lambda u, i, t: f"{u}\tv{i}\tc{i % 2}\tBar\t40.{i}\t-74.{i}\t-240\t{clock(t, '%a %b %d %X +0000 %Y')}"),
        refused="--set timestamp=column_8",
        settings={"user": "column_1", "item": "column_2", "timestamp": "column_8"},
        item="v{}",
    ),
    "Yoochoose": Layout(lines(lambda u, i, t: f"{u},{clock(t)}.281Z,{i},0"), name="yoochoose-clicks.dat"),
    "Diginetica by session": Layout(
        lines(
            lambda u, i, t: f"{u};NA;{i};{t % 9000};{clock(t, '%Y-%m-%d')}",
            "sessionId;userId;itemId;timeframe;eventdate\n",
        ),
        settings={"user": "sessionId"},
    ),
    "RetailRocket": Layout(
        lines(lambda u, i, t: f"{t}123,{u},{KIND[i % 3]},{i},", "timestamp,visitorid,event,itemid,transactionid\n"),
        doubted="events of all types in column 'event' count alike; --set 'event=event' --set "
        """'event_weights={"buy": 1, "cart": 1, "view": 1}'""",
    ),
    "OTTO": Layout(
        OTTO,
        refused="'events' holds lists of objects with 'aid', 'ts', 'type'; expected ids; name the key of the "
        "item's id, such as --set 'item=events.aid'",
        settings={"item": "events.aid"},
        name="train.jsonl",
    ),
    "playlists, a line each": Layout(
        "".join(json.dumps(each) + "\n" for each in MPD),
        refused="such as --set 'item=tracks.track_uri'",
        settings={"item": "tracks.track_uri", "user": "pid"},
        item="spotify:track:{}",
        timed=False,
        name="mpd.jsonl",
    ),
    "Steam's reviews": Layout(
        lines(
            lambda u, i, t: repr(
                {
                    "username": f"n {u}",
                    "product_id": f"{i}",
                    "date": clock(t, "%Y-%m-%d"),
                    "text": 'it\'s "ok"',
                    "early_access": False,
                }
            )
        ),
        user="n {}",
        name="steam_reviews.json",
    ),
    "H&M": Layout(
        lines(
            lambda u, i, t: f"{clock(t, '%Y-%m-%d')},c{u},0{i},0.05,2",
            "t_dat,customer_id,article_id,price,sales_channel_id\n",
        ),
        user="c{}",
        item="0{}",
    ),
    "KuaiRec": Layout(
        lines(
            lambda u, i, t: f"{u},{i},99,{clock(t, '%Y-%m-%d %X')}.1,{clock(t, '%Y%m%d')},{t}.1,0.5",
            "user_id,video_id,play_duration,time,date,timestamp,watch_ratio\n",
        )
    ),
    "Amazon 2018, the item first": Layout(
        lines(lambda u, i, t: f"{ASIN.format(i)},{REVIEWER.format(u)},5.0,{t}"), user=REVIEWER, item=ASIN
    ),
    "MovieTweetings": Layout(lines(lambda u, i, t: f"{u}::{i:07d}::9::{t}"), item="000000{}", name="ratings.dat"),
    "LightGCN": Layout(
        "".join(f"{user} {' '.join(str(item) for item, _ in held)}\n" for user, held in by_user()) + "9 \n10 1\n",
        timed=False,
        name="train.txt",
    ),
    "Excel's sep=;": Layout(
        lines(
            lambda u, i, t: f'{u};"{i}";{clock(t, "%d.%m.%Y %H:%M")}', "sep=;\r\nuser_id;item_id;timestamp\r\n", "\r\n"
        )
    ),
    "Excel's sep=; without a header": Layout(lines(lambda u, i, t: f"{u};{i};{t}", "sep=;\n")),
    "MySQL's INTO OUTFILE": Layout(
        lines(lambda u, i, t: f"20{u}\t10{i}\t{clock(t, '%Y-%m-%d %X')}\t\\N") + "207\t\\N\t2017-11-24 00:00:00\t\\N\n",
        settings={"missing_values": ["\\N"], "invalid_values": "drop"},
        user="20{}",
        item="10{}",
    ),
    "psql's CSV": Layout(
        lines(lambda u, i, t: f"{u},{i},{clock(t, '%Y-%m-%d %X')}.25+00", "user_id,item_id,created_at\n")
    ),
    "pandas with its index": Layout(
        "".join(
            f"{row},{u},{i},5,{t}\n" for row, (u, i, t) in enumerate([("user_id", "item_id", "timestamp")])
        ).replace("0,user_id,item_id,5", ",user_id,item_id,rating")
        + "".join(f"{row},{u},{i},5,{t}\n" for row, (u, i, t) in enumerate(EVENTS))
    ),
}


def prepared(layout: Layout, folder: Path, **settings: object) -> Prepared:
    (folder / layout.name).write_text(layout.text, newline="")
    return prepare_table(folder / layout.name, folder / "out", **settings)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_events_are_read_with_their_users_items_and_order(layout: Layout, tmp_path: Path) -> None:
    if layout.refused:
        with pytest.raises(RecspecError, match=re.escape(layout.refused)):
            prepared(layout, tmp_path)
    result = prepared(layout, tmp_path, **layout.settings)
    held = {split: sorted(raw_pairs(result.spec, split)) for split in ("train", "valid", "test")}  # type: ignore[type-var]
    latest = [
        max((e for e in EVENTS if e[0] == u), key=lambda e: e[2])
        if layout.timed
        else [e for e in EVENTS if e[0] == u][-1]
        for u in USERS
    ]

    def named(events: Sequence[Event]) -> list[tuple[str, str]]:
        return sorted((layout.user.format(user), layout.item.format(item)) for user, item, _ in events)

    own = {layout.user.format(user) for user in USERS}
    assert [pair for pair in held["test"] if pair[0] in own] == named(latest)
    assert sorted(pair for pairs in held.values() for pair in pairs if pair[0] in own) == named(EVENTS)
    assert layout.doubted in str(result.summary.get("warnings", "")).replace("\\'", "'")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"info": {"v": 1}, "playlists": MPD}, indent=4), """as jq -c '."playlists"[]' events.csv"""),
        (
            "".join(f"{len(held)} {' '.join('1' * len(held))}\n" for held in ("ab", "abc", "a", "abc")),
            "write the number of the line there, as awk '{$1=NR}1' events.csv does",
        ),
        (
            "".join(f"{' '.join('05030')}{' 0' * 20}\n" for _ in range(30)),
            "found 25 columns without names, column_1 to column_25; the first row is '0, 5, 0, 3, 0",
        ),
        ("99,7.61,-9.43,99,1,2,3,4,5,6\n" * 3, "write user, item and rating of each rated cell as a row"),
        ("1 | price:.23 sqft:.25 age:.05 2006\n0 | price:.18 sqft:.15 age:.35 1976\n", "Vowpal Wabbit's format"),
        ("| user_id | item_id |\n|---|---|\n| 1 | 2 |\n", "a table that a database's shell drew"),
        ("┌─────────┬─────────┐\n│ user_id │ item_id │\n", "a table that a database's shell drew"),
        ("product/productId: B1\nreview/userId: A1\nreview/score: 5.0\n\n" * 3, "records over several lines"),
        ("a0f\t\tradiohead\t42\n" + "a0f\tmb1\tmuse\t7\n" * 3, "or give them an id; invalid_values=drop"),
    ],
    ids=["Spotify's MPD", "CiteULike", "Coat", "Jester", "VW", "Markdown", "DuckDB", "SNAP", "Last.fm 360K"],
)
def test_other_layouts_are_refused_with_what_to_do(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecspecError, match=re.escape(said)):
        prepare_table(tmp_path / "events.csv", tmp_path / "out", text)


def test_an_old_spreadsheet_is_named(tmp_path: Path) -> None:
    (tmp_path / "jester.csv").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99))
    with pytest.raises(RecspecError, match=r"an old spreadsheet \(.xls\); save it as CSV"):
        prepare_table(tmp_path / "jester.csv", tmp_path / "out")


def test_ids_that_look_missing_are_doubted(tmp_path: Path) -> None:
    text = LAYOUTS["Diginetica by session"].text
    told = prepare_text(tmp_path, text + "9;5;1;1;2017-12-09\n").summary["warnings"]
    assert (
        "'userId': 1 id, in 42 rows, look like missing values, and are kept as ids: 'NA'; --set "
        """'missing_values=["NA"]' --set invalid_values=drop leaves them out"""
    ) in told  # type: ignore[operator]


def test_the_queries_of_letor_stay_whole(tmp_path: Path) -> None:
    rows = [
        f"{(query + row) % 3} qid:{query} 1:0.{row + 1} 2:0.{query % 7 + 1} #docid = {row}\n"
        for query in range(40)
        for row in range(5)
    ]
    with pytest.raises(RecspecError, match="--set label=label --set positive_from=2"):
        prepare_table(tmp_path / "train.txt", tmp_path / "out", "".join(rows))
    result = prepare_table(tmp_path / "train.txt", tmp_path / "out", label="label", positive_from=2, num_negatives=0)
    assert "splits keep the rows of each 'qid' together" in str(result.summary["inferred"])
    counts = result.summary["rows"]
    assert isinstance(counts, dict)
    assert sum(counts.values()) == 200
    assert {count % 5 for count in counts.values()} == {0}


@pytest.mark.parametrize("settings", [{}, {"timestamp": "hour"}, {"timestamp": "hour", "time_format": "%y%m%d%H"}])
def test_the_hours_of_avazu_may_be_the_time(settings: dict[str, object], tmp_path: Path) -> None:
    text = "id,click,hour,site_id\n" + "".join(
        f"{10**16 + row * 7919},{row % 5 == 0:d},141021{row % 24:02d},s{row % 7}\n" for row in range(120)
    )
    result = prepare_text(tmp_path, text, num_negatives=0, **settings)
    said = str(result.summary["inferred"]).replace("\\'", "'")
    if not settings:
        assert "('hour' may be the time, or dates of something else; timestamp=hour makes the latest rows" in said
        return
    assert "the latest rows by 'hour' are valid and test" in said
    assert ("they look like hours, which time_format=%y%m%d%H makes dates" in said) == (len(settings) == 1)


def test_lines_behind_an_announced_separator_keep_their_numbers(tmp_path: Path) -> None:
    text = 'sep=;\nuser_id;item_id;timestamp\n1;2;3\n\n1;"a\nb";4\n1;2\n'
    with pytest.raises(RecspecError, match="line 7: has 2 columns, expected 3"):
        prepare_text(tmp_path, text)
