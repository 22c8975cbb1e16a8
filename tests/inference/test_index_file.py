"""An item index in its folder: the same answers after reading, and a clear error for any other file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import BundleError
from recspec.bundle import checkpoint
from recspec.inference import IndexSettings, ItemIndex, index_file


def saved(folder: Path, kind: str = "exact") -> ItemIndex:
    """An index of 500 items in a folder."""
    vectors = np.random.default_rng(0).standard_normal((500, 4))
    held = ItemIndex.build(vectors, np.arange(500) * 2, settings=IndexSettings(kind=kind, recall=0.5))  # type: ignore[arg-type]
    index_file.save(held, folder)
    return held


@pytest.mark.parametrize("kind", ["exact", "approximate"])
def test_a_saved_index_answers_as_before_and_is_not_copied(tmp_path: Path, kind: str) -> None:
    if kind == "approximate":
        pytest.importorskip("faiss")
    before, queries = saved(tmp_path, kind), np.random.default_rng(1).standard_normal((9, 4))
    after = index_file.load(tmp_path)
    assert (after.is_exact, after.recall, after.note) == (before.is_exact, before.recall, before.note)
    assert after.search(queries, 7)[1].tolist() == before.search(queries, 7)[1].tolist()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / index_file.FILE_NAME) in maps.read_text()


def test_changes_are_in_the_file_in_the_order_of_ids(tmp_path: Path) -> None:
    held = saved(tmp_path)
    held.remove(np.arange(0, 500, 2))
    held.add([[1, 2, 3, 4], [9, 9, 9, 9]], [3, 998])
    index_file.save(held, tmp_path)
    after = index_file.load(tmp_path)
    assert after.rows.ids.tolist() == [3, *range(500, 1000, 2)]
    assert after.vectors_of([998, 3]).tolist() == [[9, 9, 9, 9], [1, 2, 3, 4]]
    index_file.save(after, tmp_path)  # over the file that is mapped
    assert index_file.load(tmp_path).rows.ids.tolist() == after.rows.ids.tolist()


def test_lists_are_left_out_where_faiss_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    saved(tmp_path, "approximate")
    monkeypatch.setattr(index_file, "find_spec", lambda _: None)
    held = index_file.load(tmp_path)
    assert held.is_exact
    assert held.note.startswith("exact search of 500 items, because faiss is not installed: pip install")


def tensors(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those of an approximate index of three items, with some changed or left out."""
    made: dict[str, torch.Tensor | None] = {
        "ids": torch.tensor([1, 2, 5]),
        "vectors": torch.ones(3, 2),
        "centroids": torch.ones(2, 2),
        "assignments": torch.tensor([0, 1, 1], dtype=torch.int32),
    }
    return {name: tensor for name, tensor in {**made, **changed}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changed", "header", "says"),
    [
        ({"ids": None}, {}, "holds 'assignments', 'centroids', 'vectors'; expected 'assignments', 'centroids', 'ids'"),
        ({"ids": torch.tensor([1, 1, 2])}, {}, "'ids' does not rise from 0 or more"),
        ({"ids": torch.tensor([2**63 - 1, -(2**63), 2])}, {}, "'ids' does not rise from 0 or more"),
        ({"ids": torch.tensor([-1, 1, 2])}, {}, "'ids' does not rise from 0 or more"),
        ({"ids": torch.tensor([1, 2])}, {}, "'vectors' has shape (3, 2); expected a row for each of 2 'ids'"),
        ({"vectors": torch.ones(3, 2).double()}, {}, "'vectors' is torch.float64 in 2 dimensions; expected"),
        ({"vectors": torch.full((3, 2), torch.nan)}, {}, "vectors: row 1 holds a number that is not finite"),
        ({"centroids": torch.full((2, 2), torch.inf)}, {}, "'centroids' holds numbers that are not finite"),
        ({"centroids": torch.ones(2, 3)}, {}, "'centroids' has shape (2, 3); expected 1 to 3 rows of 2"),
        ({"centroids": torch.ones(0, 2)}, {}, "'centroids' has shape (0, 2)"),
        (
            {"assignments": torch.tensor([0, 2, 0], dtype=torch.int32)},
            {},
            "'assignments' holds 0 to 2; expected 0 to 1",
        ),
        ({"assignments": torch.zeros(2, dtype=torch.int32)}, {}, "'assignments' has 2 rows; expected 3"),
        ({}, {"num_probes": 3}, "header: num_probes is 3; expected at most 2"),
        ({}, {"num_probes": 0}, "num_probes: Input should be greater than or equal to 1"),
        ({}, {"num_probes": None}, "expected 'ids', 'vectors'"),
        ({}, {"format": 9}, "index format 9; this recspec reads 1"),
        ({}, {"extra": 9}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_hostile_file_is_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor], header: dict[str, object], says: str
) -> None:
    about = {"format": 1, "note": "n", "num_probes": 1, "recall": 1.0, **header}
    checkpoint.write_tensors(tmp_path / index_file.FILE_NAME, tensors(**changed), about)
    with pytest.raises(BundleError) as error:
        index_file.load(tmp_path)
    assert says in str(error.value)
    assert index_file.FILE_NAME in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:0],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: b"\xff" * 64 + data[64:],
        lambda data: data.replace(b'"recspec"', b'"another"'),
        lambda data: b"IxSQ" + data,
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    saved(tmp_path)
    file = tmp_path / index_file.FILE_NAME
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BundleError, match="damaged"):
        index_file.load(tmp_path)


def test_a_missing_file_or_one_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such file; this folder holds no item index"):
        index_file.load(tmp_path)
    (tmp_path / "run").mkdir()
    saved(tmp_path)
    (tmp_path / "run" / index_file.FILE_NAME).symlink_to(tmp_path / index_file.FILE_NAME)
    with pytest.raises(BundleError, match="leads outside the folder"):
        index_file.load(tmp_path / "run")
