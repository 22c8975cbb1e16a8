#!/usr/bin/env bash
# pyarrow cannot floor a time to its day where clocks skip midnight, or show it twice.
#
# Version    pyarrow 26.0.1, polars 2.1.0, tzdata 2026.6, Python 3.11, Linux x86-64.
# Expected   The day of an event is known in any zone. Where clocks skip midnight (Sao Paulo 2018-11-04,
#            Cairo 2024-04-26, Beirut 2024-03-31) it begins at 01:00; where midnight comes twice (Havana
#            2024-11-03), at the first.
# Behaviour  `floor_temporal` raises ArrowInvalid for the whole column if one event is on such a day, also
#            at noon. It has no option, though `assume_timezone` has two. Polars gives the first moment of
#            the day.
# Known      Upstream has an open report (its issue 45757) and an unfinished change (12528).
# What helps Take the local date (`local_timestamp`, then date32), which needs no way back. recspec splits
#            by UTC.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   pyarrow 26.0.1, polars 2.1.0
#   America/Sao_Paulo: pyarrow ArrowInvalid: Local time does not exist; polars 2018-11-04 01:00:00-02:00; date
#     2018-11-04
#   Africa/Cairo: pyarrow ArrowInvalid: Local time does not exist; polars 2024-04-26 01:00:00+03:00; date 2024-04-26
#   America/Havana: pyarrow ArrowInvalid: Local time is ambiguous; polars 2024-11-03 00:00:00-05:00; date 2024-11-03
#   Europe/Berlin: pyarrow 2024-03-31 00:00:00+01:00; polars 2024-03-31 00:00:00+01:00; date 2024-03-31
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 polars==2.1.0 tzdata==2026.6

cat > "$folder/check.py" <<'PYTHON'
import sys
from datetime import UTC, datetime

import polars
import pyarrow as pa
import pyarrow.compute as pc

print(f"pyarrow {pa.__version__}, polars {polars.__version__}")
found = []
for zone, noon in (
    ("America/Sao_Paulo", datetime(2018, 11, 4, 15, tzinfo=UTC)),
    ("Africa/Cairo", datetime(2024, 4, 26, 10, tzinfo=UTC)),
    ("America/Havana", datetime(2024, 11, 3, 17, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2024, 3, 31, 10, tzinfo=UTC)),
):
    times = pa.array([noon], pa.timestamp("us", zone))
    try:
        result = str(pc.floor_temporal(times, unit="day")[0].as_py())
    except pa.ArrowInvalid as error:
        result = f"ArrowInvalid: {str(error).splitlines()[0].split(':')[0]}"
    found.append(result.startswith("ArrowInvalid"))
    begins = polars.from_arrow(times).dt.truncate("1d")[0]
    print(f"{zone}: pyarrow {result}; polars {begins}; date {pc.local_timestamp(times).cast(pa.date32())[0]}")
described = [True, True, True, False]
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
