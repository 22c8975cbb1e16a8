"""A check reads everything and names every problem."""

from __future__ import annotations

from pathlib import Path

from recspec.data.storage.check import check_split
from tests.storage.files import BEYOND, UNEQUAL, spec_of


def test_a_check_finds_every_problem_of_every_column(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("9,x\n1,1\n8,2\n")
    (tmp_path / "2.csv").write_text("nan\n")
    sources = {
        "train": [
            {"type": "csv", "features": ["a", "b"], "files": ["1.csv"]},
            {"type": "csv", "features": ["label"], "files": ["2.csv"]},
        ]
    }
    spec = spec_of(tmp_path, {"a": {"cardinality": 5}, "b": {"cardinality": 5}}, sources)
    problems, num_rows = check_split(spec, "train")
    assert num_rows is None
    assert sorted(problems) == [
        f"1.csv, column 'a', row 1: 9 {BEYOND} (and 1 more row like it)",
        "1.csv, column 'b', row 1: 'x' is not an integer (int64)",
        "2.csv, column 'label', row 1: nan is not a finite number",
        f"{UNEQUAL} 3 rows of 'a', 'b' in '1.csv'; 1 rows of 'label' in '2.csv'",
    ]
