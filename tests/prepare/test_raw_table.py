"""Raw files of any kind: ids and times as written, types by all values, names of files that mean nothing."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError, RecspecError, SettingsError
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import raw_table
from recspec.data.prepare.backend import fetch
from recspec.data.prepare.declared import check_time_format
from recspec.data.prepare.names import Notes
from recspec.data.prepare.prepared import Prepared
from recspec.data.prepare.raw_files import stage
from recspec.data.prepare.raw_rows import Reading
from recspec.data.prepare.text_files import ROW
from recspec.data.storage import open_split
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import Case, bytes_of, prepare_table, prepare_text, raw_pairs, run, write_table
from tests.prepare.small_tables import connect
from tests.processes import ended

HEAD = "user_id,item_id,timestamp\n"


def numbers(spec: FeatureSpec, name: str) -> list[float]:
    """A column of all splits, in the order of the splits' rows."""
    found: list[float] = []
    for split in spec.splits:
        found += np.asarray(open_split(spec, split, [name]).read(0, 10**6)[name]).tolist()
    return found


def items(out: Path) -> dict[object, dict[str, object]]:
    """The rows of the item catalogue by raw item."""
    table = pq.read_table(out / "items.parquet")
    raw = Encoders.load(out).vocabulary_of("item_id").decode(table.column("item_id").to_numpy()).to_pylist()
    return dict(zip(raw, table.to_pylist(), strict=True))


# --- the names of files ----------------------------------------------------------------------------------------------

PATTERNS = ("userId=1", "data[1]", "a*", "a?", "{a,b}", "**", "[!a]", "~", "$HOME", "%20", "label=1")
ODD = ("it's", 'say "x"', "two  words", "Zürich 日本", "-dash", "--out", "back\\slash", "new\nline", "a;b", "#1")
HOSTILE = (*PATTERNS, *ODD, "s3:bucket", "CON", ".hidden", "_temporary")


def spoil(folder: Path) -> None:
    """Files that patterns out of the hostile names would match too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("data1", "ab", "a1", "a", "b", "x"):
        for ending in (".csv", ".parquet", ".jsonl"):
            (folder / f"{name}{ending}").write_bytes(b"user_id,item_id\n9,9\n")


ROWS = [("u1", "a", 1), ("u1", "b", 2), ("u2", "a", 3), ("u2", "c", 4), ("u1", "c", 5)]


def write_rows(path: Path) -> None:
    """The same rows as the ending of the path says."""
    table = pa.table(dict(zip(("user_id", "item_id", "timestamp"), map(list, zip(*ROWS, strict=True)), strict=True)))
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path.write_text(HEAD + "".join(f"{user},{item},{time}\n" for user, item, time in ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_name_of_a_file_or_folder_means_nothing(name: str, tmp_path: Path) -> None:
    every = (".csv", ".jsonl", ".parquet")
    for ending in every if name in HOSTILE[:3] else (every[HOSTILE.index(name) % 3],):
        folder = tmp_path / name
        spoil(folder)
        write_rows(folder / f"{name}{ending}")
        out = tmp_path / f"{name} {ending}" / name
        spec = prepare_table(folder / f"{name}{ending}", out).spec
        assert sorted(raw_pairs(spec, "train")) == [("u1", "a"), ("u2", "a")], ending
        assert raw_pairs(FeatureSpec.load(out), "test") == raw_pairs(spec, "test")
        assert {path.name for path in (tmp_path / f"{name} {ending}").iterdir()} == {name}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
        lambda name: name not in (".", "..") and len(name.encode()) < 200
    )
)
def test_any_name_of_a_file_is_read(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("any") / name
    folder.mkdir()
    write_rows(folder / f"{name}.csv")
    assert len(raw_pairs(prepare_table(folder / f"{name}.csv", folder / f"{name} out").spec, "train")) == 2


# --- one table in every kind of file ---------------------------------------------------------------------------------

UTC = datetime.UTC
AHEAD = datetime.timezone(datetime.timedelta(hours=2))


def shop(rows: int = 60) -> pa.Table:
    """Purchases with what goes wrong: leading zeros, ISBNs, zones, missing values, truth values, fractions."""
    rng = np.random.default_rng(3)
    start = datetime.datetime(2024, 3, 30, 22, 0, 0, 250_000, tzinfo=UTC)
    return pa.table(
        {
            "user_id": [f"{rng.integers(12):03d}" for _ in range(rows)],
            "item_id": [["0007", "7", "1216X", "0195153448", "GIFT CARD", "é"][rng.integers(6)] for _ in range(rows)],
            "timestamp": pa.array(
                [start + datetime.timedelta(minutes=int(each)) for each in rng.permutation(rows) * 7],
                pa.timestamp("us", "UTC"),
            ),
            "price": [None if row % 7 == 0 else round(float(rng.normal(20, 5)), 2) for row in range(rows)],
            "count": [int(rng.integers(1, 9)) for _ in range(rows)],
            "gift": [bool(rng.integers(2)) for _ in range(rows)],
            "zip": [["01234", "99999", None][rng.integers(3)] for _ in range(rows)],
            "shop": [["north", "süd", 'a "b", c'][rng.integers(3)] for _ in range(rows)],
        }
    )


def by_pandas(table: pa.Table, folder: Path) -> list[Path]:
    frame = table.to_pandas()
    frame["timestamp"] = frame["timestamp"].dt.tz_convert(AHEAD)
    frame.to_csv(folder / "pandas.csv", index=False)
    frame.to_parquet(folder / "pandas.parquet")
    frame.to_json(folder / "pandas.jsonl", orient="records", lines=True, date_format="iso", date_unit="us")
    return [folder / f"pandas.{ending}" for ending in ("csv", "parquet", "jsonl")]


def by_duckdb(table: pa.Table, folder: Path) -> list[Path]:
    made = []
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'America/New_York'")
        connection.register("shop", table)
        for ending, how in (("csv", "HEADER"), ("parquet", "FORMAT parquet"), ("jsonl", "FORMAT json")):
            made.append(folder / f"duckdb.{ending}")
            connection.execute(f"COPY shop TO '{made[-1]}' ({how})")
    return made


def by_polars(table: pa.Table, folder: Path) -> list[Path]:
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(table)
    frame.write_csv(folder / "polars.csv")
    frame.write_parquet(folder / "polars.parquet")
    frame.write_ndjson(folder / "polars.jsonl")
    return [folder / f"polars.{ending}" for ending in ("csv", "parquet", "jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("write", [by_pandas, by_duckdb, by_polars])
@pytest.mark.parametrize("labelled", [False, True])
def test_a_table_is_the_same_dataset_in_every_kind_of_file(
    write: Callable[[pa.Table, Path], list[Path]], labelled: bool, tmp_path: Path
) -> None:
    table = shop()
    pq.write_table(table, tmp_path / "arrow.parquet")
    features = {"context_features": ["price", "count", "zip", "shop", *([] if labelled else ["gift"])]}
    asked = {**features, **({"label": "gift", "split": "time"} if labelled else {"repeats": "keep"})}
    prepare_table(tmp_path / "arrow.parquet", tmp_path / "expected", **asked)
    for path in write(table, tmp_path):
        spec = prepare_table(path, tmp_path / f"out {path.name}", **asked).spec
        assert bytes_of(spec.folder).keys() == bytes_of(tmp_path / "expected").keys()
        for name, held in bytes_of(tmp_path / "expected").items():
            if name != "feature_spec.yaml":  # which tells what was inferred
                assert bytes_of(spec.folder)[name] == held, (path.name, name)


def test_ids_stay_as_they_are_written(tmp_path: Path) -> None:
    text = HEAD + "007,00000023,1\n7,1216X,2\n007,23,3\n7,GIFTCARD,4\n007, 23,5\n"
    spec = prepare_text(tmp_path, text).spec
    vocabularies = {name: Encoders.load(tmp_path / "out").vocabulary_of(name) for name in ("user_id", "item_id")}
    assert vocabularies["user_id"].values.to_pylist() == ["007", "7"]
    assert vocabularies["item_id"].values.to_pylist() == [" 23", "00000023", "1216X", "23", "GIFTCARD"]
    assert vocabularies["user_id"].encode([7]).tolist() == vocabularies["user_id"].encode(["7"]).tolist() == [2]
    assert vocabularies["user_id"].encode(["07", 7.0, True]).tolist() == [0, 2, 0]
    assert spec.num_ids("item_id") == 6


def test_ids_may_be_declared_numbers(tmp_path: Path) -> None:
    text = HEAD + "".join(f"{user:03d},{item},{time}\n" for time, (user, item) in enumerate([(7, 1), (8, 2), (7, 10)]))
    prepare_text(tmp_path, text, types={"user_id": "int64", "item_id": "int64"})
    vocabulary = Encoders.load(tmp_path / "out").vocabulary_of("item_id")
    assert vocabulary.values.to_pylist() == [1, 2, 10]
    with pytest.raises(DataError, match=r"a\.csv: column 'item_id': line 3 is '2x'; declared integer; expected a"):
        prepare_text(tmp_path, HEAD + "1,1,1\n1,2x,2\n", out="b", types={"item_id": "int64"})


def test_whole_numbers_of_parquet_are_text_too_and_that_is_said(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user_id": [7, 7, 8], "item_id": [1, 10, 2], "timestamp": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    result = prepare_table(tmp_path / "a.parquet", tmp_path / "out")
    assert Encoders.load(tmp_path / "out").vocabulary_of("item_id").values.to_pylist() == ["1", "10", "2"]
    assert "'user_id', 'item_id': whole numbers, kept as text" in str(result.summary["inferred"])


def test_a_late_value_decides_the_type_as_well_as_an_early_one(tmp_path: Path) -> None:
    lines = [f"u{row % 50},{row % 40},{row},{row % 9},{row % 5}\n" for row in range(60_000)]
    lines[59_000] = "u1,1216X,59000,8.5,7\n"
    text = "user_id,item_id,timestamp,size,sku\n" + "".join(lines)
    (tmp_path / "items.csv").write_text("item_id,weight\n1,5\n2,6\n1216X,7\nGIFTCARD,8\n")
    result = prepare_text(tmp_path, text, items="items.csv", item_features=["weight"], context_features=["size"])
    assert items(tmp_path / "out")["1216X"]["weight_text"] == 7
    assert result.spec.features["size"].dtype == "float32"


# --- times -----------------------------------------------------------------------------------------------------------


def times_of(tmp_path: Path, times: Sequence[str], **asked: object) -> tuple[list[float], Mapping[str, object]]:
    """The prepared times of one user's rows, all of them in train, in the order of the file, and the summary."""
    assert all("\n" not in time for time in times)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        writer.writerows([f"u{row:03d}", "x", time] for row, time in enumerate(times))
    result = prepare_text(tmp_path, **asked)
    return numbers(result.spec, "timestamp"), result.summary


def test_times_of_several_zones_are_instants(tmp_path: Path) -> None:
    times = [
        "2024-01-01 12:00:00+04:00",
        "2024-01-01T09:00:00Z",
        "2024-01-01 05:00:00-05:00",
        "2024-01-01T09:30+0000",
        "2024-01-01 14:30:00+05:30",
        "2024-01-01 09:00:00 UTC",
    ]
    found, summary = times_of(tmp_path, times)
    nine = 1704099600
    assert found == [nine - 3600, nine, nine + 3600, nine + 1800, nine, nine]
    assert summary["changed"] == ["'timestamp': times with zones, made UTC"]
    assert summary["last"] == "2024-01-01 10:00:00"


def test_a_clock_change_does_not_move_the_last_purchase(tmp_path: Path) -> None:
    text = (
        HEAD
        + "a,early,2024-10-27 02:59:00+02:00\na,late,2024-10-27 02:01:00+01:00\na,first,2024-10-01 00:00:00+02:00\n"
    )
    spec = prepare_text(tmp_path, text + "b,other,2024-10-01 00:00:00+02:00\n").spec
    assert raw_pairs(spec, "test") == [("a", "late")]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            ["2024-01-01 12:00:00+04:00", "2024-01-01 12:00:00", "2024-01-01 12:00:00Z"],
            "line 3 is '2024-01-01 12:00:00'; 1 times without one and 2 with a time zone; they can't be compared",
        ),
        (
            [*map(str, range(1_700_000_000, 1_700_000_250)), "yesterday", "soon", *map(str, range(1, 300))],
            "line 252 is 'yesterday', line 253 is 'soon'; expected a number, as 549 other values are",
        ),
        (["2024-01-01", "2024-02-30", "2024-01-03"], "line 3 is '2024-02-30'; there is no such day"),
        (["02/03/2024", "03/04/2024"], "line 2 is '02/03/2024', line 3 is '03/04/2024'; expected a number, or a time"),
        (["02/03/2024", "03/04/2024"], "in several ways: --set 'time_format=%m/%d/%Y' or --set 'time_format=%d/%m/%Y'"),
        (["20.11.12 10:30", "21.11.12 10:30"], "'time_format=%d.%m.%y %H:%M' or --set 'time_format=%y.%m.%d %H:%M'"),
        (["31.12.2020", "31.13.2020"], "say how it is written with time_format, in codes such as --set"),
        (["31 Dez 2020", "30 Dez 2020"], "say how it is written with time_format, in codes such as --set"),
        (["30.02.2020", "31.12.2020"], "line 2 is '30.02.2020'; there is no such day"),
        (["1", "", "3"], "line 3 is missing; expected a number"),
        (["soon", "later"], "line 2 is 'soon', line 3 is 'later'; expected a number"),
    ],
)
def test_times_that_can_not_be_told_name_their_lines(times: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        times_of(tmp_path, times)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("%m/%d/%Y", "02/25/2024", 1708819200),
        ("%d/%m/%y %H:%M", "25/2/24 01:30", 1708824600),
        ("%d-%b-%Y %I:%M:%S %p", "25-Feb-2024 12:30:05 AM", 1708821005),
        ("%b %d, %Y", "Feb 25, 2024", 1708819200),
        ("%Y%m%d", "20240225", 1708819200),
        ("%d.%m.%Y %H:%M:%S.%f %z", "25.02.2024 03:00:00.5 +02:00", 1708822800.5),
        ("milliseconds", "1708819200250", 1708819200.25),
        ("microseconds", "1708819200000000", 1708819200),
        ("%d %B %Y", "5 September 2023", 1693872000),
        ("%A, %d.%m.%Y", "Sunday, 25.02.2024", 1708819200),
        ("%a %d %b %Y %H:%M:%S %Z", "Sun 25 Feb 2024 00:00:00 GMT", 1708819200),
    ],
)
def test_a_time_format_may_be_declared(form: str, text: str, expected: float, tmp_path: Path) -> None:
    found, _ = times_of(tmp_path, [text, text], time_format=form)
    assert found == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "form", "last"),
    [
        (["31.12.2020", "1.1.2021"], "%d.%m.%Y", "2021-01-01 00:00:00"),
        (["31.12.2020 23:59", "01.01.2021 7:05"], "%d.%m.%Y %H:%M", "2021-01-01 07:05:00"),
        (["31.12.2020 23:59:59", "30.12.2020 07:05:01"], "%d.%m.%Y %H:%M:%S", "2020-12-31 23:59:59"),
        (["02/25/2024", "03/01/2024"], "%m/%d/%Y", "2024-03-01 00:00:00"),
        (["25/2/2024 1:30 PM", "01/03/2024 12:30 AM"], "%d/%m/%Y %I:%M %p", "2024-03-01 00:30:00"),
        (["2024-2-5", "2024-11-25"], "%Y-%m-%d", "2024-11-25 00:00:00"),
        (["Mar 7, 2019", "December 31, 2020"], "%b %d, %Y", "2020-12-31 00:00:00"),
        ([*["02/03/2024"] * 1_500, "02/25/2024"], "%m/%d/%Y", "2024-02-25 00:00:00"),  # the last row alone tells
        (["Sat Oct 07 00:00:00 -0700 2017"] * 2, "%a %b %d %H:%M:%S %z %Y", "2017-10-07 07:00:00"),  # Twitter
        (["Sat Oct  7 01:02:03 2017", "Sun Oct 15 01:02:03 2017"], "%a %b %d %H:%M:%S %Y", "2017-10-15 01:02:03"),  # C
        (["Sat Oct 7 00:00:00 UTC 2017"] * 2, "%a %b %d %H:%M:%S %z %Y", "2017-10-07 00:00:00"),  # date
        (["Sat, 07 Oct 2017 02:00:00 +0200"] * 2, "%a, %d %b %Y %H:%M:%S %z", "2017-10-07 00:00:00"),  # RFC 2822
        (["Sat, 07 Oct 2017 02:00:00 GMT"] * 2, "%a, %d %b %Y %H:%M:%S %z", "2017-10-07 02:00:00"),  # HTTP
        (["Saturday, 07-Oct-17 02:00:00 GMT"] * 2, "%a, %d-%b-%y %H:%M:%S %z", "2017-10-07 02:00:00"),  # RFC 850
        (["[07/Oct/2017:02:00:00 -0100]"] * 2, "[%d/%b/%Y:%H:%M:%S %z]", "2017-10-07 03:00:00"),  # Apache
        (["07/Oct/2017:02:00:00 +0000"] * 2, "%d/%b/%Y:%H:%M:%S %z", "2017-10-07 02:00:00"),
    ],
)
def test_times_in_the_only_usual_format_that_fits_are_recognised(
    times: list[str], form: str, last: str, tmp_path: Path
) -> None:
    _, summary = times_of(tmp_path, times)
    assert summary["last"] == last
    assert f"'timestamp': times written as {form} (time_format says otherwise)" in str(summary["inferred"])


@pytest.mark.parametrize(
    ("times", "odd", "settings"),
    [
        (["2024-01-31"] * 20, ["1900-01-01", "9999-12-31", "2099-12-31"], {}),
        (["31.01.2024"] * 20, ["01.01.1900"], {"time_format": "%d.%m.%Y"}),
        (["2024-01-31"] * 20, ["1970-01-01"], {"types": {"timestamp": "time"}}),
        (["1700000000"] * 20, ["0", "-1", "1700000000000"], {}),
        (["1700000000000"] * 20, ["1700000000"], {"time_format": "milliseconds"}),
    ],
)
def test_a_few_far_times_are_named_and_turn_no_dates_into_numbers(
    times: list[str], odd: list[str], settings: dict[str, object], tmp_path: Path
) -> None:
    named = ", ".join(f"line {22 + place} is '{text}'" for place, text in enumerate(odd))
    with pytest.raises(DataError, match=f"{named}; expected a time between 1973 and 2065, as 20 other values are"):
        times_of(tmp_path, [*times, *odd], **settings)
    _, summary = times_of(tmp_path, [*times, *odd], invalid_values="drop", half_life="30d", **settings)
    assert str(summary["last"]).startswith("202")
    assert summary["invalid_dropped"] == len(odd)


def test_times_that_are_all_far_or_are_declared_numbers_are_kept(tmp_path: Path) -> None:
    assert times_of(tmp_path, ["1900-01-01", "1901-01-01"])[0] == [-2208988800, -2177452800]
    (tmp_path / "declared").mkdir()
    kept, _ = times_of(tmp_path / "declared", [*["1700000000"] * 3, "0"], types={"timestamp": "number"})
    assert sorted(kept)[0] == 0


def test_a_time_that_does_not_fit_its_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3 is '25/02/2024'; there is no such day or time of day"):
        times_of(tmp_path, ["02/25/2024", "25/02/2024"], time_format="%m/%d/%Y")
    with pytest.raises(DataError, match="line 3 is '2024-02-25'; expected a time such as '02/25/2024', by time_format"):
        times_of(tmp_path, ["02/25/2024", "2024-02-25"], time_format="%m/%d/%Y")


def test_a_few_bad_times_of_a_usual_format_are_named_and_can_be_dropped(tmp_path: Path) -> None:
    times = ["13.07.2025 00:55", "gestern", "14.07.2025 01:55", "15.07.2025 03:05", "", "2025-07-16"]
    expected = r"line 3 is 'gestern', line 6 is missing, line 7 is '2025-07-16'; expected a time such as "
    expected += r"'25.02.2024 12:30'; %d.%m.%Y %H:%M fits all but 3 values; correct them; invalid_values=drop leaves"
    for asked in ({}, {"invalid_values": "missing"}):  # a row without its time has no place in the order
        with pytest.raises(DataError, match=expected) as caught:
            times_of(tmp_path, times, **asked)
        assert len(caught.value.problems) == 1
    found, summary = times_of(tmp_path, times, invalid_values="drop")
    assert [(moment - found[0]) // 3600 for moment in found] == [0, 25, 50]
    assert "3 rows of a.csv, by invalid values: column 'timestamp': line 3 is 'gestern'" in str(summary["dropped"])


def test_bad_times_of_a_further_column_can_be_missing(tmp_path: Path) -> None:
    rows = "".join(f"u{row},x,{row},{day}.07.2025\n" for row, day in enumerate(["13", "soon", "15", "16"]))
    text = f"user_id,item_id,timestamp,sent\n{rows}"
    asked = {"types": {"sent": {"type": "time", "invalid": "missing"}}}
    changed = str(prepare_text(tmp_path, text, **asked).summary["changed"])
    assert "1 value of a.csv taken as missing: column 'sent': line 3 is 'soon.07.2025'" in changed


def test_bad_times_in_doubt_between_two_formats_are_never_dropped(tmp_path: Path) -> None:
    for times in (["02/03/2024", "03/04/2024", "soon"], ["02/25/2024", "02/26/2024", "03/04/2024", "26/02/2024"]):
        with pytest.raises(DataError, match=r"in several ways: --set 'time_format=%m/%d/%Y' or .*%d/%m/%Y.* at most"):
            times_of(tmp_path, times, invalid_values="drop")


def test_a_format_that_fits_no_time_is_itself_the_problem(tmp_path: Path) -> None:
    said = r"time_format %Y/%m/%d, such as '2024/02/25', fits no value; %d.%m.%Y fits them"
    for invalid in ("refuse", "drop"):
        with pytest.raises(DataError, match=said) as caught:
            times_of(tmp_path, ["13.07.2025", "14.07.2025"], time_format="%Y/%m/%d", invalid_values=invalid)
        assert "invalid_values" not in str(caught.value)
    declared = {"timestamp": {"type": "time", "format": "%Y/%m/%d"}}
    with pytest.raises(DataError, match=r"; format %Y/%m/%d, .*fits no value; give the format that these values have"):
        times_of(tmp_path, ["soon", "later"], types=declared)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("%Q", "has %Q"),
        ("%Y-%m", "lacks %d"),
        ("%Y %y %m %d", "has twice %y"),
        ("days", "has no code such as %Y"),
        ("%Y-%m-%d%", "has %;"),
        ("%G-W%V-%u", "has %G, %V, %u; known: %Y, "),
        ("%d %m %Y %z %Z", "has twice %z"),
        ("%Y-%m-%d%\n", "has %\n"),
    ],
)
def test_a_time_format_that_is_none_is_refused(form: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"time_format '{form}' {message}"):
        check_time_format(form)


def test_fractions_of_a_second_are_kept(tmp_path: Path) -> None:
    text = HEAD + "a,x,2024-01-01 00:00:00.75\na,y,2024-01-01 00:00:00.25\na,z,2024-01-01 00:00:00.5\nb,w,2024-01-01\n"
    assert raw_pairs(prepare_text(tmp_path, text).spec, "test") == [("a", "x")]
    moments = [datetime.datetime(2024, 1, 1, 0, 0, 0, micros) for micros in (750_000, 250_000, 500_000, 0)]
    table = pa.table({"user_id": list("aaab"), "item_id": list("xyzw"), "timestamp": moments})
    pq.write_table(table, tmp_path / "a.parquet")
    spec = prepare_table(tmp_path / "a.parquet", tmp_path / "b").spec
    assert raw_pairs(spec, "test") == [("a", "x")]
    assert sorted(numbers(spec, "timestamp"))[-1] == 1704067200.75


def test_numbers_that_look_like_another_unit_are_said(tmp_path: Path) -> None:
    found, summary = times_of(tmp_path, ["1708819200250", "1708819200251"])
    assert found == [1708819200250, 1708819200251]
    assert "look like milliseconds since 1970, which time_format=milliseconds makes dates" in str(summary["inferred"])
    (tmp_path / "b").mkdir()
    _, summary = times_of(tmp_path / "b", ["20240225", "20240226"])
    assert "look like days, which time_format=%Y%m%d makes dates" in str(summary["inferred"])


def timed(columns: Mapping[str, Sequence[object]], rows: int = 3) -> str:
    """Rows of one user with these columns beside the ids."""
    lines = (",".join(["u", str(row), *(str(values[row]) for values in columns.values())]) for row in range(rows))
    return f"user_id,item_id,{','.join(columns)}\n" + "".join(f"{line}\n" for line in lines)


DAYS = ["2024-01-03", "2024-01-02", "2024-01-01"]


def test_a_time_column_that_is_not_found_is_said_first(tmp_path: Path) -> None:
    text = timed({"size": [1, 2, 3], "at": ["1708819200", "1708819201", "1708819202"]})
    said = prepare_text(tmp_path, text).summary["inferred"]
    assert isinstance(said, list)
    assert said[0].startswith("no time column was found: there is no column 'timestamp', so rows are taken in file")
    assert "columns that look like times: 'at' (--set timestamp=at)" in said[0]
    untimed = prepare_text(tmp_path, text, out="b", timestamp=None)
    assert "time" not in str(untimed.summary["inferred"])


@pytest.mark.parametrize("values", [DAYS, ["03/01/2024", "02/26/2024", "02/25/2024"]])
def test_the_only_column_of_dates_is_the_time(values: list[str], tmp_path: Path) -> None:
    text = timed({"size": [1, 2, 3], "born": ["1990-01-01"] * 3, "rang": values})
    result = prepare_text(tmp_path, text)
    said = result.summary["inferred"]
    assert isinstance(said, list)
    assert (
        said[0] == "the time is column 'rang', because no other one holds times of the rows (timestamp=null ignores it)"
    )
    assert result.summary["order"] == "by column 'rang'"
    assert result.summary["last"] == ("2024-03-01 00:00:00" if "/" in values[0] else "2024-01-03 00:00:00")


def test_the_only_column_of_type_timestamp_or_date_is_the_time(tmp_path: Path) -> None:
    for place, kind in enumerate((pa.timestamp("us"), pa.date32())):
        moments = pa.array([datetime.datetime(2024, 1, day) for day in (3, 2, 1)]).cast(kind)
        table = pa.table({"user_id": list("uuu"), "item_id": list("012"), "rang": moments})
        pq.write_table(table, tmp_path / "a.parquet")
        result = prepare_table(tmp_path / "a.parquet", tmp_path / f"out{place}")
        assert (result.summary["order"], result.summary["last"]) == ("by column 'rang'", "2024-01-03 00:00:00")


def test_of_several_columns_of_dates_none_is_taken_and_that_is_said_first(tmp_path: Path) -> None:
    text = timed({"rang": DAYS, "sent": DAYS})
    said = prepare_text(tmp_path, text).summary["inferred"]
    assert isinstance(said, list)
    assert "columns that look like times: 'rang', 'sent' (--set timestamp=rang)" in said[0]


# --- numbers, missing values, truth ----------------------------------------------------------------------------------


def features_of(tmp_path: Path, values: Sequence[str], **asked: object) -> Prepared:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp", "price"])
        writer.writerows([f"u{row:04d}", "x", row, value] for row, value in enumerate(values))
    return prepare_text(tmp_path, context_features=["price"], **asked)


@pytest.mark.parametrize("marker", ["N/A", "None", "-", ""])
def test_what_says_missing_among_numbers_is_missing_and_said(marker: str, tmp_path: Path) -> None:
    result = features_of(tmp_path, ["1.5", "2.5", marker, "3.5", " 4.5"])
    assert result.spec.features["price"].dtype == "float32"
    assert numbers(result.spec, "price")[2] == 0  # the mean
    expected = f"'price': 1 value taken as missing: '{marker}' (the first in line 4)"
    assert result.summary.get("changed") == ([expected] if marker else None)
    encoders = Encoders.load(tmp_path / "out")
    assert encoders.encode_column("price", ["3", marker]).tolist()[1] == 0  # type: ignore[union-attr]


def test_text_among_numbers_is_an_error_that_names_the_rows(tmp_path: Path) -> None:
    values = [f"{row}.5" for row in range(404)]
    values[250], values[300] = "soon", "TBD"
    with pytest.raises(DataError) as caught:
        features_of(tmp_path, values)
    assert caught.value.problems[0].startswith(
        "column 'price': line 252 is 'soon', line 302 is 'TBD'; 402 of its 404 values are numbers; correct them, name "
        "what stands for a missing value in missing_values, or keep the column as text with categorical=[price]"
    )
    result = features_of(tmp_path, values, missing_values=["soon", "TBD"])
    assert result.spec.features["price"].dtype == "float32"
    assert Encoders.load(tmp_path / "out").encode_column("price", ["soon"]).tolist() == [0]  # type: ignore[union-attr]


def test_text_among_numbers_may_be_kept_as_text(tmp_path: Path) -> None:
    spec = features_of(tmp_path, ["38", "40", "M", "038"], categorical=["price"]).spec
    assert Encoders.load(tmp_path / "out").vocabulary_of("price").values.to_pylist() == ["038", "38", "40", "M"]
    assert spec.features["price"].cardinality == 5


@pytest.mark.parametrize(
    "values", [["1,234.50", "12.30", "5,000.00", "7.00"], ["12,5", "7,25", "3,0"], ["$3", "$4", "5"]]
)
def test_numbers_as_people_write_them_are_not_a_category(values: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"write numbers with a point and nothing else, such as 1234.5, or keep the"):
        features_of(tmp_path, values)


@pytest.mark.slow
@pytest.mark.parametrize("values", [["01234", "12345", "99999"], ["12345678901234567890", "1", "2"]])
def test_digits_that_are_codes_stay_text(values: list[str], tmp_path: Path) -> None:
    result = features_of(tmp_path, values)
    assert Encoders.load(tmp_path / "out").vocabulary_of("price").values.to_pylist() == sorted(values)
    assert "digits that are no plain numbers" in str(result.summary["inferred"])


def test_long_whole_numbers_of_parquet_are_codes_as_in_csv(tmp_path: Path) -> None:
    """Such as hashes of devices: as numbers, float64 takes neighbours for one."""
    columns = {"device": [2**60 + row % 3 for row in range(60)], "tens": [10**14 + row for row in range(60)]}
    table = pa.table({"user_id": range(60), "item_id": [row % 7 for row in range(60)], **columns})
    pq.write_table(table, tmp_path / "rows.parquet")
    pa.csv.write_csv(table, tmp_path / "rows.csv")
    asked = {"context_features": ["device", "tens"]}
    specs = [prepare_table(tmp_path / f"rows.{end}", tmp_path / end, **asked).spec for end in ("csv", "parquet")]
    assert [spec.features["device"].cardinality for spec in specs] == [4, 4]
    assert bytes_of(specs[0].folder)["encoders.json"] == bytes_of(specs[1].folder)["encoders.json"]
    said = str(specs[1].metadata["summary"]["inferred"])
    assert "'device': digits that are no plain numbers" in said
    assert "'tens': digits" not in said
    asked = {**asked, "numeric": ["device"]}
    assert prepare_table(tmp_path / "rows.parquet", tmp_path / "n", **asked).spec.features["device"].cardinality is None


def test_numbers_that_float64_can_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 4 is '1e999'; 2 of its 3 values are numbers"):
        features_of(tmp_path, ["1", "2", "1e999"])


def test_truth_values_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    expected = None
    for number, values in enumerate(
        (["True", "False", "", "True"], ["true", "false", "", "true"], ["1", "0", "", "1"])
    ):
        (tmp_path / str(number)).mkdir()
        spec = features_of(tmp_path / str(number), values).spec
        expected = expected or numbers(spec, "price")
        assert numbers(spec, "price") == expected
    encoders = Encoders.load(tmp_path / "0" / "out")
    same = [encoders.encode_column("price", [value]).tolist() for value in (True, 1, "True", "TRUE", "1")]  # type: ignore[union-attr]
    assert same == same[:1] * 5


def test_a_category_of_truth_values_is_found_however_it_is_written(tmp_path: Path) -> None:
    features_of(tmp_path, ["True", "False", "", "True"], categorical=["price"])
    encoders = Encoders.load(tmp_path / "out")
    assert encoders.encode_column("price", ["TRUE", "false", "", None]).tolist() == [2, 1, 0, 0]  # type: ignore[union-attr]
    assert encoders.encode_column("price", [True, False]).tolist() == [2, 1]  # type: ignore[union-attr]


def test_text_in_parquet_that_holds_numbers_stays_text_and_is_said(tmp_path: Path) -> None:
    table = pa.table({"user_id": list("abcd"), "item_id": list("xxxx"), "price": ["1.5", "2.5", "n/a", "3.5"]})
    pq.write_table(table, tmp_path / "a.parquet")
    result = prepare_table(tmp_path / "a.parquet", tmp_path / "out", timestamp=None, context_features=["price"])
    assert result.spec.features["price"].is_categorical
    assert "'price' is taken as a category, for the file calls it text, though 3 of its 4 values are numbers" in str(
        result.summary["inferred"]
    )
    result = prepare_table(
        tmp_path / "a.parquet", tmp_path / "b", timestamp=None, context_features=["price"], numeric=["price"]
    )
    assert not result.spec.features["price"].is_categorical
    assert "'price': 1 value taken as missing: 'n/a' (the first in row 3)" in str(result.summary["changed"])


@pytest.mark.parametrize("missing", [["-999"], [-999]])
def test_declared_missing_values_are_missing_in_every_column(missing: list[object], tmp_path: Path) -> None:
    text = "user_id,item_id,price,place\nu1,x,1,-999\nu2,x,-999,b\nu3,x,2,-999\n"
    spec = prepare_text(
        tmp_path, text, timestamp=None, missing_values=missing, context_features=["price", "place"]
    ).spec
    assert numbers(spec, "price")[1] == 0
    encoders = Encoders.load(tmp_path / "out")
    assert encoders.vocabulary_of("place").values.to_pylist() == ["b"]
    assert encoders.encode_column("price", [-999, "-999"]).tolist() == [0, 0]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"a\.csv: column 'user_id' has no value in 1 row, such as line 3"):
        prepare_text(tmp_path, out="b", timestamp=None, missing_values=["u2"])


WORDS = [("True", "False"), ("yes", "no"), ("Y", "N"), ("t", "f"), ("1", "0"), ("1.0", "0.0"), ("TRUE", "FALSE")]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        pytest.param(ending, words, marks=[] if words in WORDS[:2] else [pytest.mark.slow])
        for ending in (".csv", ".jsonl", ".parquet")
        for words in WORDS
    ],
)
def test_a_label_may_be_written_in_words(ending: str, words: tuple[str, str], tmp_path: Path) -> None:
    rows = [{"user_id": f"u{row % 3}", "item_id": "x", "y": words[row % 3 > 0]} for row in range(30)]
    if ending == ".csv":
        (tmp_path / "a.csv").write_text("user_id,item_id,y\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    elif ending == ".jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    result = prepare_table(tmp_path / f"a{ending}", tmp_path / "out", label="y", user="user_id")
    assert result.summary["positives"] == 10
    assert ("changed" in result.summary) == (words != ("1", "0"))


def test_a_label_that_is_none_is_named(tmp_path: Path) -> None:
    text = "user_id,item_id,y\n" + "u,x,yes\n" * 20 + "u,x,maybe\nu,x,\n" + "u,x,no\n" * 20
    with pytest.raises(DataError, match=r"column 'y', the label: line 22 is 'maybe', line 23 is missing; expected 0"):
        prepare_text(tmp_path, text, label="y")


# --- kinds of files --------------------------------------------------------------------------------------------------


def test_a_folder_of_files_is_read_file_after_file(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "2.csv").write_text("item_id,user_id\nlast,a\n")
    (tmp_path / "raw" / "1.csv").write_text("user_id,item_id\na,first\na,second\nb,x\n")
    spec = prepare_table(tmp_path / "raw", tmp_path / "out").spec
    assert raw_pairs(spec, "test") == [("a", "last")]
    spec = prepare_table(tmp_path / "raw", tmp_path / "b", files=["2.csv", "1.csv"]).spec
    assert raw_pairs(spec, "test") == [("a", "second")]
    with pytest.raises(SettingsError, match=r"setting 'files': no file '3\.csv'"):
        prepare_table(tmp_path / "raw", tmp_path / "c", files=["3.csv"])
    (tmp_path / "raw" / "2.csv").write_text("item_id,user_id\nlast,\n")
    with pytest.raises(DataError, match=r"column 'user_id' has no value in 1 row, such as 2\.csv line 2"):
        prepare_table(tmp_path / "raw", tmp_path / "c")
    (tmp_path / "raw" / "2.csv").write_text("item_id,name\nlast,a\n")
    with pytest.raises(DataError, match=r"2\.csv: columns differ from those of 1\.csv: .* name the files you mean"):
        prepare_table(tmp_path / "raw", tmp_path / "c")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("user_id,item_id,time\n1,2,3\n", "4,5,6\n7,8,9\n", "the first line is data, and that of the first file names"),
        ("1,2\n3,4\n", "user_id,item_id\n5,6\n", "the first line is a header, and that of the first file is data"),
    ],
)
def test_a_header_in_some_files_alone_costs_no_row(first: str, second: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name, text in (("1.csv", first), ("2.csv", second), ("._1.csv", "\0\5")):
        (tmp_path / "raw" / name).write_text(text)
    with pytest.raises(DataError, match=rf"2\.csv: {told}"):
        prepare_table(tmp_path / "raw", tmp_path / "out")
    if len(first.split("\n")[0].split(",")) == 2:
        named = prepare_table(tmp_path / "raw", tmp_path / "out", columns=["user_id", "item_id"])
        assert named.summary["raw_rows"] == 3


@pytest.mark.parametrize("ending", [".ndjson", ".jsonl.gz"])
def test_json_lines_are_read(ending: str, tmp_path: Path) -> None:
    rows = [
        {"user_id": "007", "item_id": 7, "tags": ["a", "b"], "row": 1},
        {"user_id": 8, "item_id": "7"},
        {"user_id": "007", "item_id": "0.5", "tags": None, "late": True},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    spec = prepare_table(path, tmp_path / "out", timestamp=None, context_features=["tags", "late", "row"]).spec
    assert raw_pairs(spec, "train") == [("007", "7"), ("8", "7")]
    assert spec.features["tags"].is_list
    assert not spec.features["late"].is_categorical
    path.write_bytes(gzip.compress(b"{}\n[1]\n") if ending.endswith(".gz") else b"{}\n[1]\n")
    with pytest.raises(DataError, match="line 2: is no JSON object"):
        prepare_table(path, tmp_path / "b", timestamp=None)


def test_objects_of_json_lines_are_no_ids(tmp_path: Path) -> None:
    """Their texts would be ids: two spellings of one object two users, or one user in two countries."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"user_id": 1, "item_id": "{a}"}\n{"user_id": {"id": 1, "land": "EG"}, "item_id": "b"}\n')
    with pytest.raises(DataError, match="column 'user_id' holds objects, such as line 2; ids must be text or whole"):
        prepare_table(path, tmp_path / "out", timestamp=None)
    path.write_text('{"user_id": 1, "item_id": "{a}"}\n{"user_id": 1, "item_id": "b"}\n')
    assert ("1", "{a}") in raw_pairs(prepare_table(path, tmp_path / "out", timestamp=None).spec, "train")


def test_fractions_that_pandas_made_are_no_ids_and_the_message_says_how_numbers_stay_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": [1.0, None], "item_id": ["a", "b"]}), tmp_path / "a.parquet")
    told = "column 'user_id' holds float64; ids must be text or whole numbers; write them so; pandas keeps"
    with pytest.raises(DataError, match=told):
        prepare_table(tmp_path / "a.parquet", tmp_path / "out", timestamp=None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252", "latin-1", "utf-16-le"])
def test_other_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    text = 'user_id,item_id,timestamp\nZoë,"ä\nö",1\nZoë,y,2\nBob,y,3\n'
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    asked = {} if encoding in ("utf-8", "utf-8-sig", "utf-16") else {"encoding": encoding}
    result = prepare_text(tmp_path, **asked)
    assert raw_pairs(result.spec, "train") == [("Bob", "y"), ("Zoë", "ä\nö")]
    assert ("utf-16" in str(result.summary.get("inferred"))) == (encoding == "utf-16")


def test_text_of_another_encoding_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("user_id,item_id\nZoë,x\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"is not utf-8 text: byte 0xeb .*name its encoding where .* as in --set"):
        prepare_text(tmp_path)
    with pytest.raises(DataError, match="is not utf-16 text"):
        prepare_text(tmp_path, encoding="utf-16")
    with pytest.raises(ValueError, match="encoding 'utf-99' is not known; expected such as utf-8"):
        prepare_text(tmp_path, encoding="utf-99")
    with pytest.raises(ValueError, match="encoding 'base64' is not known"):
        prepare_text(tmp_path, encoding="base64")


def test_a_sequence_a_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("7 a b c\n\n08 e\n9\n7 d\n")
    result = prepare_table(tmp_path / "a.txt", tmp_path / "out", layout="sequences")
    assert raw_pairs(result.spec, "test") == [("7", "d")]
    assert raw_pairs(result.spec, "valid") == [("7", "c")]
    assert result.summary["dropped"] == ["1 users of a.txt: their line holds no item"]
    (tmp_path / "b.csv").write_text("7;a;b\n8;c\n")
    assert raw_pairs(
        prepare_table(tmp_path / "b.csv", tmp_path / "b", layout="sequences", separator=";").spec, "test"
    ) == [("7", "b")]
    with pytest.raises(ValueError, match="layout sequences has users and items alone; leave out label"):
        prepare_table(tmp_path / "a.txt", tmp_path / "c", layout="sequences", label="y")


@pytest.mark.parametrize(("mark", "called"), [(";", "semicolons"), ("::", "'::'")])
def test_another_separator_is_found_by_the_header_alone(tmp_path: Path, mark: str, called: str) -> None:
    text = f"user_id{mark}item_id\na{mark}1,5\nb{mark}2,5\n"
    result = prepare_text(tmp_path, text)
    assert raw_pairs(result.spec, "train") == [("a", "1,5"), ("b", "2,5")]
    assert f"a.csv: columns are separated by {called}, as in the first line" in str(result.summary["inferred"])


def test_a_time_column_taken_for_its_name_is_doubted_where_another_looks_like_times(tmp_path: Path) -> None:
    text = "user_id,item_id,timestamp,bought\na,x,9,2024-01-01T00:00:00Z\na,y,5,2024-01-02T00:00:00Z\n"
    said = str(prepare_text(tmp_path, text).summary["inferred"])
    assert "the time is column 'timestamp', because of its name; its values don't look like times" in said
    assert "those of 'bought' do (--set timestamp=bought)" in said
    for sure in (
        prepare_text(tmp_path, text, out="b", timestamp="timestamp"),
        prepare_table(
            tmp_path / "c.csv", tmp_path / "c", text.replace(",9,", ",1704067200,").replace(",5,", ",1704067300,")
        ),
    ):
        assert "because of its name" not in str(sure.summary.get("inferred"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_ids_that_may_be_meant_otherwise_are_told(tmp_path: Path, suffix: str) -> None:
    ids = ["NA", " a", "a", "null", "NA", "007"]
    table = pa.table({"user_id": ids, "item_id": list("uvwxyz")})
    if suffix == "csv":
        text = "".join(f"{user},{item}\n" for user, item in zip(*table.to_pydict().values(), strict=True))
        (tmp_path / "a.csv").write_text("user_id,item_id\n" + text)
    else:
        pq.write_table(table, tmp_path / "a.parquet")
    said = prepare_table(tmp_path / f"a.{suffix}", tmp_path / "out", timestamp=None).summary
    assert said["inferred"] == ["'user_id': 1 id, in 1 row, have blanks around them, which are part of the id: ' a'"]
    assert said["warnings"] == [
        (
            "'user_id': 2 ids, in 3 rows, look like missing values, and are kept as ids: 'NA', 'null'; --set "
            '\'missing_values=["NA", "null"]\' --set invalid_values=drop leaves them out'
        )
    ]


def test_what_is_inferred_of_a_catalogue_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,price\nx,1.5\ny,2\n")
    text = "user_id,item_id,timestamp,price\na,x,1,3\na,y,2,4\n"
    summary = prepare_text(
        tmp_path, text, items="items.csv", item_features=["price"], context_features=["price"]
    ).summary
    assert summary["inferred"] == ["'price' of items.csv: numbers", "'price': whole numbers"]
    assert (
        "columns of items.csv have other names in the prepared items.parquet, for display: 'price' is 'price_text'"
    ) in str(summary["changed"]).replace('"', "")


def test_every_column_of_a_catalogue_and_its_new_name_are_told(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        "item_id;Name;Kind;Price;Weight;Shelf\nx;Hat;a;7,14;3;007\ny;Cap;b;$9;n/a;008\nz;Tie;a;1,50;5;009\n"
    )
    text = "user_id,item_id,timestamp\na,x,1\na,y,2\na,z,3\n"
    asked = {"items": "items.csv", "title": "Name", "item_features": ["Kind"]}
    result = prepare_text(tmp_path, text, **asked)
    inferred, changed = (" ".join(map(str, result.summary[name])) for name in ("inferred", "changed"))  # type: ignore[call-overload]
    assert "'Name' of items.csv: text" in inferred
    assert "'Kind' of items.csv: text, taken as categories" in inferred
    assert (
        "'Price' of items.csv: text, though most values are numbers with separators or units; write them with a point "
        "and nothing else, such as 1234.5, to have numbers, or set decimal=comma if a comma is the decimal mark"
    ) in inferred
    assert (
        "'Weight' of items.csv: text, though most values are numbers; types={COLUMN: {type: number, invalid: missing}} "
        "takes the others as missing"
    ) in inferred
    assert (
        "'Shelf' of items.csv: digits that are no plain numbers (leading zeros, or too many digits), kept as"
        in inferred
    )
    assert "prepared items.parquet, for display: 'Name' is 'title', 'Kind' is 'Kind_text'" in changed
    declared = prepare_text(tmp_path, out="b", **asked, types={"Weight": {"type": "number", "invalid": "missing"}})
    shown = pq.read_table(declared.spec.folder / "items.parquet")
    assert shown.column("Weight").to_pylist() == [3.0, None, 5.0]
    assert {"title", "Kind_text"} <= {*shown.column_names}


def test_repeats_may_be_kept(tmp_path: Path) -> None:
    text = HEAD + "a,x,1\na,y,2\na,x,3\nb,z,4\n"
    result = prepare_text(tmp_path, text)
    assert raw_pairs(result.spec, "test") == [("a", "x")]  # a visit, which is not lost unasked
    assert raw_pairs(result.spec, "valid") == [("a", "y")]
    assert result.summary["repeats_dropped"] == 0
    assert "1 of 4 rows repeat an earlier one of the same user and item; all are kept" in str(
        result.summary["inferred"]
    )
    first = prepare_text(tmp_path, out="first", repeats="first")
    assert (raw_pairs(first.spec, "train"), raw_pairs(first.spec, "test")) == ([("a", "x"), ("b", "z")], [("a", "y")])
    last = prepare_text(tmp_path, out="last", repeats="last")
    assert (raw_pairs(last.spec, "train"), raw_pairs(last.spec, "test")) == ([("a", "y"), ("b", "z")], [("a", "x")])
    told = "1 of 4 rows repeat a later one of the same user and item, such as user 'a' and item 'x'; the latest counts"
    assert last.summary["dropped"][0] == told  # type: ignore[index]


NAMES = ("row", "rows", "_row", "index", "user", "select", 'a "b"', "a b", "ä", "x.y", "a`b", "%", "_0_present")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [NAMES, ("Row",), ("_row",)], ids=["all", "Row", "_row"])
def test_any_column_name_can_be_a_feature(names: tuple[str, ...], ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    columns = {name: [place + 1.5, place + 2.5, 2 * place + 4.5] for place, name in enumerate(names)}
    table = pa.table({"user_id": list("aab"), "item_id": list("xyx"), **columns})
    if ending == "csv":
        pyarrow.csv.write_csv(table, path)
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in table.to_pylist()))
    else:
        pq.write_table(table, path)
    spec = prepare_table(path, tmp_path / "out", timestamp=None, context_features=list(names)).spec
    assert spec.role("context") == names
    for name in names:
        assert len(set(numbers(spec, name))) > 1


def test_names_that_engines_can_not_keep_apart_are_refused(tmp_path: Path) -> None:
    names = ["user_id", "item_id", "Price", "price", "__ROW__"]
    pq.write_table(pa.table([[1], [2], [3], [4], [5]], names=names), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        prepare_table(tmp_path / "a.parquet", tmp_path / "out")
    assert caught.value.problems == (
        "column '__row__' has a name that recspec needs for itself; rename it",
        "columns 'Price', 'price' differ in case alone; rename all but one",
    )


# --- files without an end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".csv.gz", ".tsv", ".jsonl"])
def test_a_line_without_an_end_is_an_error_and_fills_no_memory(ending: str, tmp_path: Path) -> None:
    head = b"user_id,item_id\n" if "json" not in ending else b'{"user_id": "'
    path, opener = tmp_path / f"a{ending}", gzip.open if ending.endswith(".gz") else open
    for body in (b"", b"a,x\nb,"):
        if ending == ".tsv":
            head, body = head.replace(b",", b"\t"), body.replace(b",", b"\t")
        with opener(path, "wb") as file:
            file.write(head + (body if "json" not in ending else b""))
            for _ in range(40):
                file.write(b"z" * (1 << 20))
        with pytest.raises(DataError, match=r"is longer than [0-9,]+ characters; expected line breaks between rows"):
            prepare_table(path, tmp_path / "out")


def test_a_header_without_an_end_and_a_quote_without_one_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x" * (3 << 20))
    with pytest.raises(DataError, match="line 1: is longer than 2,097,152 characters"):
        prepare_text(tmp_path)
    (tmp_path / "a.csv").write_text('user_id,item_id\na,"x\n' + "b,y\n" * (1 << 20))
    with pytest.raises(DataError, match="line 2: a value is longer than 2,097,152 characters; is a closing quote"):
        prepare_text(tmp_path)


CELL = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=12)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=8))
def test_any_values_are_read_letter_for_letter_or_refused_by_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("cells")
    with (folder / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["user_id", "item_id", "size"])
        writer.writerows(rows)
    try:
        spec = prepare_text(folder, timestamp=None, context_features=["size"], repeats="keep").spec
    except RecspecError as error:
        said = str(error)
        if " line " not in said and "no interaction" not in said:
            raise
        return
    users = Encoders.load(spec.folder).vocabulary_of("user_id").values.to_pylist()
    assert users == sorted({user for user, _, _ in rows}, key=lambda text: text.encode())


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [False, True])
def test_spark_reads_every_kind_of_file_as_duckdb_does(labelled: bool, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    asked = {
        "context_features": ["price", "count", "zip", "shop"],
        **({"label": "gift", "split": "time"} if labelled else {"repeats": "keep"}),
    }
    folder = tmp_path / "userId=1" / "a[1]*"
    folder.mkdir(parents=True)
    for path in by_pandas(shop(), folder):
        for engine in ("duckdb", "spark"):
            run(
                Case("table", write_table, {"num_negatives": 1, **asked}),
                path,
                tmp_path / f"{engine} {path.name}",
                engine=engine,
            )
        assert bytes_of(tmp_path / f"duckdb {path.name}") == bytes_of(tmp_path / f"spark {path.name}")


def read_typed(path: Path, roles: raw_table.Roles, work: Path, reading: Reading = Reading()) -> pa.Table:  # noqa: B008
    with connect("duckdb", folder=work, threads=1) as backend:
        found = raw_table.typed(stage(backend, [path], roles.ids, reading, Notes(), work), roles)
        return fetch(backend, found.order_by(ROW))


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_times_of_parquet_are_the_same_in_every_unit(zone: str | None, tmp_path: Path) -> None:
    nanos = [1_700_000_000_123_456_789, -1_001, 0]
    for unit, per_second in (("ns", 10**9), ("us", 10**6)):
        times = pa.array([time * per_second // 10**9 for time in nanos], pa.timestamp(unit, zone))
        pq.write_table(pa.table({"when": times}), tmp_path / f"{unit}.parquet")
        found = read_typed(tmp_path / f"{unit}.parquet", raw_table.Roles(time="when"), tmp_path / f"{unit}-work")
        assert found.column("when").to_pylist() == pytest.approx([1_700_000_000.123456, -0.000002, 0], abs=1e-7)


def test_times_do_not_depend_on_the_zone_of_the_machine(tmp_path: Path) -> None:
    pq.write_table(pa.table({"when": pa.array([1_700_000_000], pa.timestamp("s", "UTC"))}), tmp_path / "a.parquet")
    code = (
        "import sys, time; time.tzset(); from pathlib import Path;"
        "from tests.prepare.test_raw_table import raw_table, read_typed; path = Path(sys.argv[1]);"
        "roles = raw_table.Roles(time='when');"
        "print(read_typed(path, roles, path.parent / 'work').column('when').to_pylist())"
    )
    found = ended(code, str(tmp_path / "a.parquet"), TZ="America/New_York")
    assert found.stdout.strip() == "[1700000000]", found.stderr


@pytest.mark.parametrize("size", [0.5, 2.0])  # beside 2.0, the statistics tell a constant
def test_a_nan_of_parquet_is_missing_though_its_statistics_leave_it_out(tmp_path: Path, size: float) -> None:
    sizes = [size, float("nan"), 2.0, None]
    pq.write_table(pa.table({"size": sizes, "of": [{"size": each} for each in sizes]}), tmp_path / "a.parquet")
    reading, roles = Reading(mentioned=frozenset({"of.size"})), raw_table.Roles(features=("size", "of.size"))
    found = read_typed(tmp_path / "a.parquet", roles, tmp_path / "work", reading)
    assert found.column("size").to_pylist() == found.column("of.size").to_pylist() == [size, None, 2.0, None]


# --- typed values that no model can hold -----------------------------------------------------------------------------


def typed_file(folder: Path, name: str, values: pa.Array, *, file: str = "rows.parquet") -> Path:
    """Interactions of 8 users with 5 items in Parquet, and a column `name`, which may replace one of theirs."""
    rows = range(len(values))
    columns = {
        "user_id": [f"u{row % 8}" for row in rows],
        "item_id": [f"i{row % 5}" for row in rows],
        "timestamp": [10**9 + row for row in rows],
        name: values,
    }
    pq.write_table(pa.table(columns), folder / file)
    return folder / file


def spoiled(value: float, kind: pa.DataType | None = None) -> pa.Array:
    """40 numbers, two of which are `value`."""
    return pa.array([value if row in (3, 9) else row + 0.5 for row in range(40)], kind or pa.float64())


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (float("inf"), {"context_features": ["price"]}),
        (float("-inf"), {"item_features": ["price"]}),
        (1e308, {"user_features": ["price"]}),
        (1e39, {"rating": "price"}),
        (float("inf"), {"label": "price", "positive_from": 3}),
        (float("-inf"), {"weight": "price"}),
        (1e308, {"context_features": ["price"], "types": {"price": "number"}}),
        (1e39, {"context_features": ["price"], "buckets": {"price": 4}}),
    ],
)
def test_a_number_of_parquet_that_float32_can_not_hold_is_an_error_that_names_its_rows(
    value: float, asked: dict[str, object], tmp_path: Path
) -> None:
    path = typed_file(tmp_path, "price", spoiled(value))
    with pytest.raises(DataError) as caught:
        prepare_table(path, tmp_path / "out", **asked)
    (problem,) = caught.value.problems
    assert re.match(
        rf"column 'price'(, the label|, the weight)?: row 4 is '{re.escape(str(value))}', row 10 is", problem
    )
    assert "invalid_values=drop leaves such rows out" in problem


def test_such_numbers_of_parquet_can_be_dropped_or_missing(tmp_path: Path) -> None:
    path = typed_file(tmp_path, "price", spoiled(float("inf"), pa.float32()))
    asked = {"context_features": ["price"], "repeats": "keep"}
    dropped = prepare_table(path, tmp_path / "dropped", invalid_values="drop", **asked)
    assert dropped.summary["invalid_dropped"] == 2
    kept = prepare_table(path, tmp_path / "missing", invalid_values="missing", **asked)
    assert "2 values of rows.parquet taken as missing: column 'price': row 4 is 'inf'" in str(kept.summary["changed"])
    assert np.isfinite(numbers(kept.spec, "price")).all()


@pytest.mark.slow
def test_spark_refuses_and_drops_such_numbers_as_duckdb_does(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    path = typed_file(tmp_path, "price", spoiled(float("inf")))
    asked = {"num_negatives": 1, "context_features": ["price"], "repeats": "keep"}
    with pytest.raises(DataError, match=r"column 'price': row 4 is 'Infinity', row 10 is 'Infinity'; expected a"):
        run(Case("table", write_table, asked), path, tmp_path / "refused", engine="spark")
    for engine in ("duckdb", "spark"):
        run(Case("table", write_table, {**asked, "invalid_values": "drop"}), path, tmp_path / engine, engine=engine)
    assert numbers(FeatureSpec.load(tmp_path / "duckdb"), "price") == numbers(
        FeatureSpec.load(tmp_path / "spark"), "price"
    )


def test_such_numbers_of_a_file_of_items_name_the_file(tmp_path: Path) -> None:
    path = typed_file(tmp_path, "price", spoiled(1.0))
    items = pa.table({"item_id": [f"i{row}" for row in range(5)], "size": [1.0, 2.0, float("inf"), 4.0, 5.0]})
    pq.write_table(items, tmp_path / "items.parquet")
    with pytest.raises(DataError, match=r"items\.parquet: column 'size': row 3 is 'inf'; expected a finite number"):
        prepare_table(path, tmp_path / "out", items="items.parquet", item_features=["size"])


def test_a_text_that_is_a_number_too_large_for_float32_names_its_line(tmp_path: Path) -> None:
    for text in ("1e200", "9" * 40):
        with pytest.raises(DataError, match=r"column 'price': line 4 is .*; expected a finite number of at most"):
            features_of(tmp_path, ["1.5", "2.5", text], numeric=["price"])
    with pytest.raises(DataError, match="column 'price': line 4 is '1e200'; expected a finite number"):
        features_of(tmp_path, ["1.5", "2.5", "1e200"], types={"price": "number"})
    assert features_of(tmp_path, ["1.5", "2.5", "1e5"]).spec.features["price"].dtype == "float32"


@pytest.mark.parametrize("value", [float("inf"), 1e308, 2.0**63])
def test_a_time_without_end_is_an_error_that_names_its_rows(value: float, tmp_path: Path) -> None:
    path = typed_file(tmp_path, "timestamp", spoiled(value))
    with pytest.raises(DataError, match=r"column 'timestamp': row 4 is '.*expected a number of seconds, below 2\^63"):
        prepare_table(path, tmp_path / "out")


def test_a_time_in_milliseconds_beyond_the_calendar_names_its_row(tmp_path: Path) -> None:
    times = pa.array([10**12 + row for row in range(39)] + [2**62], pa.timestamp("ms"))
    path = typed_file(tmp_path, "timestamp", times)
    with pytest.raises(DataError, match=r"rows\.parquet: column 'timestamp': row 40 is a time of 4,611,686,018,427,38"):
        prepare_table(path, tmp_path / "out")


def test_a_large_number_declared_integer_names_its_rows(tmp_path: Path) -> None:
    whole = pa.array([float("inf") if row == 3 else float(row) for row in range(40)])
    path = typed_file(tmp_path, "count", whole)
    with pytest.raises(DataError, match="column 'count': row 4 is 'inf'; declared integer; expected a whole number"):
        prepare_table(path, tmp_path / "out", context_features=["count"], types={"count": "integer"})


def test_whole_numbers_beyond_the_sign_are_ids_and_categories_and_never_numbers(tmp_path: Path) -> None:
    hashes = pa.array([2**64 - 1 - row % 5 for row in range(40)], pa.uint64())
    result = prepare_table(typed_file(tmp_path, "item_id", hashes), tmp_path / "out")
    held = Encoders.load(tmp_path / "out").vocabulary_of("item_id").values.to_pylist()
    assert held == sorted(str(2**64 - 1 - row) for row in range(5))
    assert "'item_id': whole numbers, some of more than 63 bits, read as text" in str(result.summary["inferred"])
    path = typed_file(tmp_path, "shop", hashes)
    prepare_table(path, tmp_path / "category", context_features=["shop"])
    assert len(Encoders.load(tmp_path / "category").vocabulary_of("shop")) == 5
    lists = typed_file(tmp_path, "shops", pa.array([[each] for each in hashes.to_pylist()], pa.list_(pa.uint64())))
    prepare_table(lists, tmp_path / "lists", context_features=["shops"])
    assert len(Encoders.load(tmp_path / "lists").vocabulary_of("shops")) == 5


def test_neighbouring_whole_numbers_that_floats_can_not_tell_apart_share_a_bucket(tmp_path: Path) -> None:
    path = typed_file(tmp_path, "count", pa.array([2**63 - 1 - row for row in range(40)]))
    spec = prepare_table(path, tmp_path / "out", context_features=["count"], buckets={"count": 4}).spec
    assert spec.features["count_bucket"].cardinality in (2, 3)


DAY, LISTED = datetime.date(2024, 1, 31), [[[1.5], [2.5]]]


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ([DAY], {"rating": "x"}, "column 'x' holds timestamp; expected numbers"),
        ([[1.5]], {"rating": "x"}, "column 'x' holds array<float64>; expected numbers"),
        ([DAY], {"label": "x"}, "column 'x', the label: holds timestamp; expected numbers or text"),
        ([[1]], {"label": "x", "positive_from": 1}, "the label: holds array<int64>; expected numbers or text"),
        ([datetime.timedelta(1)], {"label": "x", "positive_from": 1}, "the label: holds interval"),
        (LISTED, {"context_features": ["x"]}, "holds array<array<float64>>; a list must hold texts or numbers"),
        (
            [{"a": 1}],
            {"context_features": ["x"]},
            "struct<a: int64>, not numbers; take it out of the features, or write",
        ),
        ([{"a": 1}], {"context_features": ["x"], "numeric": ["x"]}, "not numbers; take it out of `numeric`"),
        ([2.0, None], {"context_features": ["x"], "categorical": ["x"]}, "holds float64; a category .* as Int64"),
        ([[0.5, 1e308]], {"context_features": ["x"]}, "row 1 holds a number as large as 1e\\+308 in its vector"),
        ([b"\xff"], {"context_features": ["x"], "categorical": ["x"]}, "holds binary that is no text .*in UTF-8"),
    ],
)
def test_values_of_a_type_that_is_none_of_a_columns_role_are_one_message(
    values: list[object], asked: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = typed_file(tmp_path, "x", pa.array(values * 40))
    with pytest.raises(RecspecError, match=message):
        prepare_table(path, tmp_path / "out", **asked)
