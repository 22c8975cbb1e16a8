"""The item index: exact answers and filters that are kept to; its file gives the same answers, others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, MissingExtraError, SettingsError
from recspec.bundle import checkpoint
from recspec.inference import IndexSettings, ItemIndex, exact_search, index
from recspec.inference.index import INDEX_FILE
from tests.blas import flagging

Array = NDArray[Any]


def by_hand(vectors: Array, ids: Array, queries: Array, k: int, keep: Array, hidden: Sequence[Array]) -> Array:
    """The ids of the best items by a sort of all exact scores; -1 fills a short list."""
    answers = np.full((len(queries), k), -1)
    for row, query in enumerate(queries):
        scores = (vectors.astype(np.float64) * query).sum(1).astype(np.float32)
        left = np.flatnonzero(keep & ~np.isin(ids, hidden[row]))
        best = left[np.lexsort((ids[left], -scores[left]))][:k]
        answers[row, : len(best)] = ids[best]
    return answers


def clustered(num_items: int, dim: int, seed: int = 0) -> tuple[Array, Array]:
    """Vectors of items around 40 centres, and 30 queries of the same kind."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, dim))
    made = [centres[rng.integers(0, 40, n)] + 0.4 * rng.standard_normal((n, dim)) for n in (num_items, 30)]
    return made[0].astype(np.float32), made[1].astype(np.float32)


def test_a_small_index_worked_by_hand() -> None:
    held = ItemIndex.build([[1, 0], [0, 2], [1, 1], [2, 0]], [10, 20, 30, 40])
    scores, ids = held.search([[1, 0], [0, 1]], 3)
    assert ids.tolist() == [[40, 10, 30], [20, 30, 10]]  # the first query scores 10 and 30 alike
    assert scores.tolist() == [[2, 1, 1], [2, 1, 0]]
    assert held.search([[1, 0]], 9)[1].tolist() == [[40, 10, 30, 20]]
    assert len(held) == 4
    assert held.dim == 2
    assert held.note == "exact search of 4 items"


def test_allowed_is_a_mask_by_id_or_a_list_of_ids() -> None:
    held = ItemIndex.build([[1.0], [2.0], [3.0]], [1, 4, 6])
    mask = np.zeros(5, bool)
    mask[[1, 4]] = True
    for allowed in (mask, [4, 1, 99], np.array([1, 4])):
        scores, ids = held.search([[1.0]], 3, allowed=allowed)
        assert ids.tolist() == [[4, 1, -1]]
        assert scores.tolist() == [[2, 1, -np.inf]]
    assert held.search([[1.0]], 2, allowed=[4, 1], excluded=[[4, 4, 77]])[1].tolist() == [[1, -1]]
    assert held.search([[1.0]], 1, allowed=[])[1].tolist() == [[-1]]


@pytest.mark.parametrize("kind", ["exact", "approximate"])
@settings(max_examples=40)
@given(st.data())
def test_any_search_is_as_a_sort_of_all_scores_is(kind: str, data: st.DataObject) -> None:
    """With ties, filters of every share, and excluded items."""
    if kind == "approximate":
        pytest.importorskip("faiss")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num, dim, k = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    decimals = data.draw(st.sampled_from([0, 6]))
    vectors = rng.standard_normal((num, dim)).round(decimals).astype(np.float32)
    ids = rng.permutation(200)[:num]
    held = ItemIndex.build(vectors, ids, settings=IndexSettings(kind=kind, recall=1))  # type: ignore[arg-type]
    assert len(held) == len(ids)
    queries = rng.standard_normal((data.draw(st.integers(1, 6)), dim)).round(decimals).astype(np.float32)
    mask = rng.random(200) < data.draw(st.sampled_from([0, 0.1, 0.5, 1]))
    hidden = [rng.integers(0, 250, rng.integers(0, 99)) for _ in queries]
    scores, found = held.search(queries, k, allowed=mask, excluded=hidden)
    expected = by_hand(vectors, ids, queries, min(k, len(ids)), mask[ids], hidden)
    if held.lists is None or mask.mean() < 0.3:
        assert found.tolist() == expected.tolist()
    assert ((found == -1) == (expected == -1)).all()  # never fewer, never more than are allowed
    assert np.isin(found[found >= 0], np.flatnonzero(mask)).all()
    assert ((scores == -np.inf) == (found == -1)).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()


@pytest.mark.parametrize("with_faiss", [False, True])
def test_large_indexes_answer_as_a_sort_does_with_bf16_codes_and_without(
    with_faiss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_faiss:
        pytest.importorskip("faiss")
        monkeypatch.setattr(exact_search, "COMPRESSED_ROWS", 500)
    else:
        monkeypatch.setattr(exact_search, "find_spec", lambda _: None)
    monkeypatch.setattr(exact_search, "SCORES", 1 << 12)  # several blocks
    monkeypatch.setattr(exact_search, "NUMBERS", 1 << 12)
    monkeypatch.setattr(exact_search, "CANDIDATES", 1 << 11)
    vectors, queries = clustered(3000, 8)
    ids, everyone = np.arange(3000) + 5, np.ones(3005, bool)
    held = ItemIndex.build(vectors, ids)
    rng = np.random.default_rng(1)
    for share in (1, 0.6, 0.1):
        keep = everyone & (rng.random(3005) < share)
        hidden = [rng.choice(3005, 5 + 40 * row) for row in range(30)]
        expected = by_hand(vectors, ids, queries, 50, keep[ids], hidden)
        assert held.search(queries, 50, allowed=keep, excluded=hidden)[1].tolist() == expected.tolist()
        alone = [held.search(queries[[row]], 50, allowed=keep, excluded=[hidden[row]])[1][0].tolist() for row in (0, 9)]
        assert alone == expected[[0, 9]].tolist()


def test_thousands_of_equal_vectors_are_answered_in_the_order_of_ids() -> None:
    """Candidates prove nothing then, and every row is scored."""
    held = ItemIndex.build(np.ones((5000, 3)))
    scores, ids = held.search([[1, 2, 3]], 10, excluded=[[0, 3]])
    assert ids.tolist() == [[1, 2, 4, 5, 6, 7, 8, 9, 10, 11]]
    assert set(scores[0].tolist()) == {6.0}


def test_an_approximate_index_finds_the_recall_that_it_measured() -> None:
    pytest.importorskip("faiss")
    vectors, queries = clustered(6000, 16)
    held = ItemIndex.build(vectors, settings=IndexSettings(kind="approximate"), queries=queries)
    assert held.lists is not None
    assert held.lists.recall is not None
    assert held.lists.recall >= 0.99
    assert "lists are read; recall@100 of 30 of the given queries: 0.99" in held.note or "1.0000" in held.note
    exact = ItemIndex.build(vectors)
    rng = np.random.default_rng(0)
    for keep in (None, rng.random(6000) < 0.1, rng.random(6000) < 0.7):
        _, found = held.search(queries, 100, allowed=keep)
        _, expected = exact.search(queries, 100, allowed=keep)
        overlap = np.mean([len(np.intersect1d(a, b)) / 100 for a, b in zip(found, expected, strict=True)])
        assert overlap >= 0.98
        assert keep is None or keep[found].all()


def test_vectors_without_clusters_are_searched_exactly_and_the_note_says_so() -> None:
    pytest.importorskip("faiss")
    vectors = np.random.default_rng(0).standard_normal((4000, 64))
    held = ItemIndex.build(vectors, settings=IndexSettings(kind="approximate", recall=1))
    assert held.lists is None
    assert "exact search of 4,000 items: recall@100 of 256 vectors of items in a quarter of 256 lists is" in held.note


def test_an_approximate_index_gives_all_that_is_allowed_where_its_lists_hold_too_few() -> None:
    pytest.importorskip("faiss")
    vectors, queries = clustered(6000, 16)
    held = ItemIndex.build(vectors, settings=IndexSettings(kind="approximate"))
    far = np.argsort(vectors @ queries[0])[: int(6000 * 0.6)]  # no list that is near the query holds these
    _, found = held.search(queries[:1], 3000, allowed=far)
    assert (found >= 0).all()
    assert np.isin(found, far).all()
    assert held.search(queries[:1], 6000)[1].min() == 0


def test_an_index_may_be_empty() -> None:
    assert ItemIndex.build(np.zeros((0, 3))).search([[1, 1, 1]], 4, allowed=[7], excluded=[[7]])[1].shape == (1, 0)


@pytest.mark.parametrize("kind", ["exact", "approximate"])
def test_vectors_of_any_width_are_found(kind: Literal["exact", "approximate"]) -> None:
    """faiss holds 21 numbers as 24."""
    pytest.importorskip("faiss")
    vectors, queries = clustered(21_000, 21)
    held = ItemIndex.build(vectors, settings=IndexSettings(kind=kind))
    ids, everyone = np.arange(21_000), np.ones(21_000, bool)
    expected = by_hand(vectors, ids, queries[:4], 20, everyone, [np.zeros(0)] * 4)
    found = np.concatenate([held.search(queries[row : row + 1], 20)[1] for row in range(4)])
    assert (found == expected).mean() == 1 if kind == "exact" else np.isin(found, expected).mean() > 0.9


def test_answers_do_not_depend_on_the_number_of_threads() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    rng = np.random.default_rng(0)
    held = ItemIndex.build(rng.standard_normal((30_000, 24)).round(1))
    queries = rng.standard_normal((40, 24)).round(1)
    told = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with threadpoolctl.threadpool_limits(threads):
            told.append([held.search(some, 50) for some in (queries, queries[:1])])
    torch.set_num_threads(1)
    for one, two in zip(*told, strict=True):
        assert [part.tobytes() for part in one] == [part.tobytes() for part in two]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ItemIndex.build([1.0, 2.0]), "vectors have shape (2,); expected (rows, numbers)"),
        (lambda: ItemIndex.build([["a"]]), "vectors: not rows of equally many numbers"),
        (lambda: ItemIndex.build([[1.0], [np.nan]]), "vectors: row 2 holds a number that is not finite"),
        (lambda: ItemIndex.build([[1.0], [1e30]]), "vectors: row 2 holds a number that is not finite, or is longer"),
        (lambda: ItemIndex.build([[1.0], [2.0]], [3, 3]), "ids: 3 is there twice; expected each once"),
        (lambda: ItemIndex.build([[1.0], [2.0]], [3, -1]), "ids: -1 is negative; expected 0 or more"),
        (lambda: ItemIndex.build([[1.0], [2.0]], [3]), "2 rows, but 1 ids; expected an id for each row"),
        (lambda: ItemIndex.build([[1.0]], [0.5]), "ids are float64; expected whole numbers"),
        (lambda: ItemIndex.build([[1.0]]).search([[1, 2]], 1), "queries have shape (1, 2); expected (rows, 1)"),
        (lambda: ItemIndex.build([[1.0]]).search([[np.inf]], 1), "queries: row 1 holds a number that is not finite"),
        (lambda: ItemIndex.build([[1.0]]).search([[1.0]], 0), "k is 0; expected 1 or more"),
        (lambda: ItemIndex.build([[1.0]]).search([[1.0]], 1, excluded=[]), "excluded: 0 lists for 1 queries"),
        (lambda: ItemIndex.build([[1.0]]).search([[1.0]], 1, allowed=[[True]]), "allowed has 2 dimensions"),
    ],
)
def test_what_can_not_be_searched_is_refused(make: Any, says: str) -> None:
    with pytest.raises(DataError) as error:
        make()
    assert says in str(error.value)


def test_settings_are_checked_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="kind is 'ivf'; expected 'auto', 'exact' or 'approximate'"):
        IndexSettings(kind="ivf")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"recall is 1\.5; expected more than 0, and at most 1"):
        IndexSettings(recall=1.5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'recspec\[retrieval\]'"):
        ItemIndex.build(np.eye(3), settings=IndexSettings(kind="approximate"))
    monkeypatch.setattr(index, "find_spec", lambda _: None)
    held = ItemIndex.build(np.eye(3), settings=IndexSettings(most_exact=2))
    assert held.note.startswith("exact search of 3 items, more than 2; above that, pip install 'recspec[retrieval]'")


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_flag_that_the_product_sets_is_no_warning(num_queries: int) -> None:
    vectors, queries = clustered(40, 5)
    found = [
        exact_search.FlatRows(each).top(queries[:num_queries], 4)[1].tolist() for each in (vectors, flagging(vectors))
    ]
    assert found[0] == found[1]


def test_highest_scores_of_long_rows_are_those_of_a_sort() -> None:
    numbers = torch.Generator().manual_seed(0)
    for count in (1, 63, 64, 65, 1000, 5003):
        for kinds in (2, 50, 10**6):  # few kinds: many ties
            scores = torch.randint(0, kinds, (4, count), generator=numbers).float()
            scores[1, ::3] = -torch.inf
            for k in (1, 5, 17):
                width = min(k, count)
                best, places = exact_search.highest(scores, width)
                order = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :width]
                assert best.tolist() == np.take_along_axis(scores.numpy(), order, 1).tolist()
                finite = np.isfinite(best.numpy())
                assert np.array_equal(places.numpy()[finite], order[finite])


# --- its file ----------------------------------------------------------------------------------------------------


def saved(folder: Path, kind: str = "exact") -> ItemIndex:
    """An index of 500 items in a folder."""
    vectors = np.random.default_rng(0).standard_normal((500, 4))
    held = ItemIndex.build(vectors, np.arange(500) * 2, settings=IndexSettings(kind=kind, recall=0.5))  # type: ignore[arg-type]
    held.save(folder)
    return held


@pytest.mark.parametrize("kind", ["exact", "approximate"])
def test_a_saved_index_answers_as_before_and_is_not_copied(tmp_path: Path, kind: str) -> None:
    if kind == "approximate":
        pytest.importorskip("faiss")
    before, queries = saved(tmp_path, kind), np.random.default_rng(1).standard_normal((9, 4))
    after = ItemIndex.load(tmp_path)
    assert after.note == before.note
    assert after.search(queries, 7)[1].tolist() == before.search(queries, 7)[1].tolist()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / INDEX_FILE) in maps.read_text()


def test_lists_are_left_out_where_faiss_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    saved(tmp_path, "approximate")
    monkeypatch.setattr(index, "find_spec", lambda _: None)
    held = ItemIndex.load(tmp_path)
    assert held.lists is None
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
    checkpoint.write_tensors(tmp_path / INDEX_FILE, tensors(**changed), about)
    with pytest.raises(BundleError) as error:
        ItemIndex.load(tmp_path)
    assert says in str(error.value)
    assert INDEX_FILE in str(error.value)


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
    file = tmp_path / INDEX_FILE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BundleError, match="damaged"):
        ItemIndex.load(tmp_path)


def test_a_missing_file_or_one_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such file; this folder holds no item index"):
        ItemIndex.load(tmp_path)
    (tmp_path / "run").mkdir()
    saved(tmp_path)
    (tmp_path / "run" / INDEX_FILE).symlink_to(tmp_path / INDEX_FILE)
    with pytest.raises(BundleError, match="leads outside the folder"):
        ItemIndex.load(tmp_path / "run")
