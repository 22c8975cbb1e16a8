"""Steps applied to tables, on small tables worked out by hand."""

from __future__ import annotations

from pathlib import Path

from recspec.data.prepare.backend import Backend, count_rows, fetch
from recspec.data.prepare.tables import at_least, clean, counts_by, keep_earliest, left_join
from recspec.data.prepare.text_files import ROW
from tests.prepare.small_tables import table

# --- what is done to tables -------------------------------------------------------------------------------------------


def test_of_repeats_the_earliest_is_kept_and_a_tie_falls_to_the_first_row(backend: Backend, tmp_path: Path) -> None:
    rated = table(backend, tmp_path, user=[1, 1, 1, 2], item=[7, 7, 7, 7], time=[5, 3, 3, 9])
    kept = fetch(backend, keep_earliest(rated, ["user", "item"], ["time", ROW]).order_by(ROW))
    assert kept.to_pydict() == {ROW: [1, 3], "user": [1, 2], "item": [7, 7], "time": [3, 9]}


def test_users_with_too_few_rows_are_left_out(backend: Backend, tmp_path: Path) -> None:
    rated = table(backend, tmp_path, user=[1, 2, 2, 3, 3, 3])
    assert fetch(backend, at_least(rated, "user", 2).order_by(ROW)).column("user").to_pylist() == [2, 2, 3, 3, 3]
    assert count_rows(backend, at_least(rated, "user", 4)) == 0


def test_values_are_counted_in_sorted_order_without_missing_ones(backend: Backend, tmp_path: Path) -> None:
    named = table(backend, tmp_path, name=["b", "Z", None, "é", "b"])
    counted = fetch(backend, counts_by(named, "name")).to_pydict()
    assert counted == {"name": ["Z", "b", "é"], "rows": [1, 2, 1]}


def test_repeats_may_be_kept(backend: Backend, tmp_path: Path) -> None:
    acted = table(backend, tmp_path, user_id=["u", "u", "u"], item_id=[1, 2, 1], timestamp=[1, 2, 3])
    for repeats, kept in (("first", [1, 2]), ("keep", [1, 2, 3])):
        cleaned = clean(
            backend,
            acted,
            min_interactions=1,
            order=["timestamp", ROW],
            repeats=repeats,  # type: ignore[arg-type]
        )
        times = fetch(backend, cleaned.rows.order_by("timestamp")).column("timestamp").to_pylist()
        assert times == kept


# --- joins ------------------------------------------------------------------------------------------------------------


def test_a_left_join_keeps_every_row_and_one_column_a_key(backend: Backend, tmp_path: Path) -> None:
    """Keys that are missing meet nothing, as nothing is known of them."""
    ads = table(backend, tmp_path, ad=[1, 2, None, 1], fold=[0, 0, 0, 1])
    rates = table(backend, tmp_path, ad=[1, 1, None], fold=[0, 1, 0], rate=[0.25, 0.5, 9.0])
    joined = left_join(ads, rates.drop(ROW), "ad", "fold")  # type: ignore[attr-defined, arg-type]
    assert joined.columns == (ROW, "ad", "fold", "rate")
    assert fetch(backend, joined.order_by(ROW)).column("rate").to_pylist() == [0.25, None, None, 0.5]
