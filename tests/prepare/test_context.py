"""Settings of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.base.errors import SettingsError
from recspec.data.prepare.prepared import limit_bytes
from tests.prepare.small_tables import connect


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2_000_000_000),
        ("512 mb", 512_000_000),
        ("1.5GiB", 1_610_612_736),
        ("1000000", 1_000_000),
        ("2048K", 2_048_000),
    ],
)
def test_amounts_of_memory_are_understood(text: str, size: int) -> None:
    assert limit_bytes(text) == size


@pytest.mark.parametrize(("text", "size"), [("500", "500"), ("4.5k", "4,500"), ("0GB", "0")])
def test_so_little_memory_that_its_unit_is_missing_is_said(text: str, size: str) -> None:
    with pytest.raises(SettingsError) as raised:
        limit_bytes(text)
    assert str(raised.value) == f"--memory-limit: '{text}' is {size} bytes; expected such as '2GB' or '512MB'"


@pytest.mark.parametrize("text", ["", "much", "1.2.3GB", "-2GB", f"{'9' * 400}GB"])
def test_what_is_no_amount_of_memory_is_said(text: str) -> None:
    with pytest.raises(SettingsError, match="is not an amount of memory; expected such as '2GB'"):
        limit_bytes(text)


def test_an_unknown_engine_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'duckbd' \(did you mean 'duckdb'\?\); known: 'duckdb', 'spark'"):
        connect("duckbd", folder=tmp_path / "work")


def test_spark_without_java_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("SPARK_MASTER", raising=False)
    with pytest.raises(SettingsError, match="needs Java"):
        connect("spark", folder=tmp_path / "work")
