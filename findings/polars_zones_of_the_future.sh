#!/usr/bin/env bash
# Polars has rules of time zones of its own, older than those of DuckDB and of Python's tzdata.
#
# Version    duckdb 2.0.0 (extension icu), tzdata 2026.6, polars 2.1.0, pyarrow 26.0.1, Python 3.11, Linux
#            x86-64.
# Expected   A moment has one local time, whatever program asks: all read the IANA data, and a machine has
#            one copy up to date.
# Behaviour  Polars holds a copy inside, DuckDB another (in ICU); Python reads the system's, or the package
#            tzdata. The changes of 2026 in Canada and Morocco are missing in Polars' copy, so one moment
#            falls on two days, and a split by local days has it on two sides.
# Known      Not searched for upstream.
# What helps Convert to UTC by one program. recspec does it by Python's zoneinfo for every engine, and
#            splits by UTC.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   duckdb 2.0.0, polars 2.1.0, tzdata 2026.6
#   America/Vancouver, 2030-01-15 07:30 UTC: Python 2030-01-15 00:30:00, DuckDB 2030-01-15 00:30:00, Polars
#     2030-01-14 23:30:00
#   Africa/Casablanca, 2026-10-15 23:30 UTC: Python 2026-10-15 23:30:00, DuckDB 2026-10-15 23:30:00, Polars
#     2026-10-16 00:30:00
#   Europe/Berlin, 2030-01-15 07:30 UTC: Python 2030-01-15 08:30:00, DuckDB 2030-01-15 08:30:00, Polars 2030-01-15
#     08:30:00
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.0 tzdata==2026.6 polars==2.1.0 pyarrow==26.0.1 pytz

cat > "$folder/check.py" <<'PYTHON'
import sys
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, reset_tzpath

import duckdb
import polars
import tzdata

reset_tzpath([])  # the package's data, not this machine's
print(f"duckdb {duckdb.__version__}, polars {polars.__version__}, tzdata {tzdata.__version__}")
found = []
for zone, moment in (
    ("America/Vancouver", datetime(2030, 1, 15, 7, 30, tzinfo=UTC)),
    ("Africa/Casablanca", datetime(2026, 10, 15, 23, 30, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2030, 1, 15, 7, 30, tzinfo=UTC)),
):
    by_python = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    by_duckdb = duckdb.execute("SELECT timezone(?, ?::TIMESTAMPTZ)", [zone, moment]).fetchone()[0]
    aware = polars.Series([moment.replace(tzinfo=None)]).dt.replace_time_zone("UTC")
    by_polars = aware.dt.convert_time_zone(zone).dt.replace_time_zone(None)[0]
    hours = [(each - by_python).total_seconds() / 3600 for each in (by_duckdb, by_polars)]
    found.append(hours)
    print(f"{zone}, {moment:%Y-%m-%d %H:%M} UTC: Python {by_python}, DuckDB {by_duckdb}, Polars {by_polars}")
described = [[0.0, -1.0], [0.0, 1.0], [0.0, 0.0]]
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
