"""Clock times of zones as instants, against Python's own answer."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.data.prepare.backend import Backend, fetch
from recspec.data.prepare.declared import Change, offset_of, pattern_of, zone_between
from recspec.data.prepare.times import ZONED

NAMES = (
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "Africa/Casablanca",
    "UTC",
    "America/Sao_Paulo",
    "Pacific/Apia",
)
BERLIN_2024 = [Change(1_711_846_800, 3600, 7200), Change(1_729_990_800, 7200, 3600)]  # 31 March, 27 October, 01:00 UTC
clocks = st.datetimes(datetime(1971, 1, 1), datetime(2037, 12, 31)).map(lambda each: each.replace(microsecond=0))


def seconds(clock: datetime) -> int:
    return int((clock - datetime(1970, 1, 1)).total_seconds())


def test_the_changes_of_a_year_are_found_to_the_second() -> None:
    zone = zone_between("Europe/Berlin", seconds(datetime(2024, 2, 1)), seconds(datetime(2024, 11, 30)))
    assert zone.first == 3600
    assert [*zone.changes] == BERLIN_2024
    assert BERLIN_2024[0].doubtful == (seconds(datetime(2024, 3, 31, 2)), seconds(datetime(2024, 3, 31, 3)))
    assert BERLIN_2024[1].doubtful == (seconds(datetime(2024, 10, 27, 2)), seconds(datetime(2024, 10, 27, 3)))


@pytest.mark.parametrize(("name", "offset"), [("+05:30", 19_800), ("-03:00", -10_800), ("+0200", 7200), ("UTC", 0)])
def test_an_offset_is_a_zone_without_changes(name: str, offset: int) -> None:
    assert zone_between(name, 0, 10**9).first == offset
    assert not zone_between(name, 0, 10**9).changes


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), st.lists(clocks, min_size=1, max_size=40))
def test_instants_are_those_of_python(
    backend: Backend, tmp_path_factory: pytest.TempPathFactory, name: str, times: list[datetime]
) -> None:
    around = [seconds(time) for time in times]
    zone = zone_between(name, min(around), max(around))
    for change in zone.changes[:5]:  # clocks before, within and after the hours that come twice or not at all
        around += [change.instant + shift for shift in (change.before, change.after, change.before - 1)]
    path = tmp_path_factory.mktemp("zone") / "clocks.parquet"
    pq.write_table(pa.table({"clock": pa.array(around, pa.int64())}), path)
    zone = zone_between(name, min(around), max(around))
    table = backend.read_parquet([Path(path)])
    found = fetch(backend, table.select("clock", utc=zone.instants(table["clock"]))).to_pydict()
    assert len(found["clock"]) == len(around)
    for clock, utc in zip(found["clock"], found["utc"], strict=True):
        local = (datetime(1970, 1, 1) + timedelta(seconds=clock)).replace(tzinfo=ZoneInfo(name))
        assert utc == int(local.astimezone(UTC).timestamp()), (name, local)


@pytest.mark.parametrize("offset", ["+15:00", "-25:00", "+12:60", "+99", "+2400"])
def test_an_offset_that_no_zone_has_is_no_time(offset: str) -> None:
    assert offset_of(offset) is None
    assert re.fullmatch(pattern_of("%Y-%m-%d %H:%M%z")[0], f"2024-01-01 00:00{offset}") is None
    assert re.search(ZONED, f"2024-01-01T00:00:00{offset}") is None
    for sound in ("+14:00", "-0330", "+05"):
        assert re.search(ZONED, f"2024-01-01T00:00:00{sound}")
