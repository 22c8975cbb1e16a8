"""The best k events of a history, and attention over events, padded and by rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recspec.models.layers import history_search
from recspec.models.layers.history_search import (
    Column,
    PaddedHistory,
    Places,
    StoredHistory,
    TableHistory,
    TargetQueries,
    attend,
    attend_by_rows,
    latest_best,
    mean_with_one_more,
)
from tests.closeness import assert_close
from tests.layers.test_kernels import DEVICE, drawn, with_triton


class TestLatestBest:
    def test_of_equal_scores_the_later_event_wins(self) -> None:
        scores = torch.tensor([[2.0, 7.0, 2.0, 2.0, 7.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
        places, _ = latest_best(scores, torch.ones(2, 5, dtype=torch.bool), 3)
        assert [sorted(row) for row in places.tolist()] == [[1, 3, 4], [1, 2, 3]]

    def test_takes_only_what_is_allowed(self) -> None:
        allowed = torch.tensor([[True, False, True, False], [False, False, False, False]])
        places, chosen = latest_best(torch.tensor([[-3.0, 9.0, -1.0, 8.0]] * 2), allowed, 3)
        assert sorted(places[0][chosen[0]].tolist()) == [0, 2]
        assert chosen.sum(1).tolist() == [2, 0]

    def test_equals_a_sort_by_score_and_place(self) -> None:
        torch.manual_seed(0)
        scores = torch.randn(50, 23).mul(2).round()  # many ties, both signs
        allowed = torch.rand(50, 23) < 0.7
        places, chosen = latest_best(scores, allowed, 9)
        for row in range(50):
            known = [place for place in range(23) if allowed[row, place]]
            best = sorted(known, key=lambda place: (-float(scores[row, place]), -place))[:9]
            assert sorted(places[row][chosen[row]].tolist()) == sorted(best)

    def test_is_the_same_in_a_program_that_is_exported(self) -> None:
        class Best(torch.nn.Module):
            def forward(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
                return latest_best(scores, allowed, 4)

        torch.manual_seed(0)
        scores, allowed = torch.randn(20, 9).mul(2).round(), torch.rand(20, 9) < 0.6
        places, chosen = torch.export.export(Best(), (scores, allowed)).module()(scores, allowed)
        ours, of_ours = latest_best(scores, allowed, 4)
        for row in range(20):
            assert sorted(places[row][chosen[row]].tolist()) == sorted(ours[row][of_ours[row]].tolist())


class TestAttend:
    def test_worked_by_hand(self) -> None:
        vectors = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
        present = torch.tensor([[True, True, False]])
        scores, sums = attend(vectors, present, torch.tensor([[[math.log(3), 0.0]]]))
        torch.testing.assert_close(scores[0, 0, :2], torch.tensor([math.log(3), 0.0]))
        torch.testing.assert_close(sums, torch.tensor([[[0.75, 0.25]]]))  # weights 3 and 1 of 4
        torch.testing.assert_close(mean_with_one_more(vectors, present), torch.tensor([[1 / 3, 1 / 3]]))

    def test_a_row_without_events_gives_zeros_and_a_finite_gradient(self) -> None:
        vectors = torch.full((1, 2, 3), torch.nan)  # what stands in padding has no part in anything
        queries = torch.ones(1, 1, 3, requires_grad=True)
        _, sums = attend(vectors.nan_to_num(5.0), torch.zeros(1, 2, dtype=torch.bool), queries)
        sums.sum().backward()
        assert torch.equal(sums, torch.zeros(1, 1, 3))
        assert queries.grad is not None
        assert torch.equal(queries.grad, torch.zeros(1, 1, 3))
        assert torch.equal(mean_with_one_more(vectors, torch.zeros(1, 2, dtype=torch.bool)), torch.zeros(1, 3))


def a_history(rows: int = 6, length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Which events are there, (B, L); ids of two features (B, L); their tables of 3 and 2 numbers."""
    torch.manual_seed(seed)
    lengths = torch.tensor([length, 0, 3, 1, length, 2])[:rows]
    present = torch.arange(length) < lengths.unsqueeze(1)
    ids = [torch.randint(0, size, (rows, length)) for size in (9, 4)]
    tables = [torch.randn(9, 3, dtype=torch.float32), torch.randn(4, 2)]
    return present, lengths, ids, tables


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dense", [1, 4])
def test_by_rows_equals_padded_with_every_gradient(
    heads: int, mean: bool, sparse: bool, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_search, "DENSE", dense)  # at 1 the tables go two ways, at 4 one
    present, _, ids, tables = a_history()
    ids[1] %= 3
    tables[1] = tables[1][:3]
    queries, wanted = torch.randn(6, heads, 5), torch.randn(6, heads + mean, 5)

    def padded(queries: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        vectors = torch.cat([table[own] for table, own in zip(tables, ids, strict=True)], dim=2)
        scores, sums = attend(vectors, present, queries)
        if mean:
            sums = torch.cat([sums, mean_with_one_more(vectors, present).unsqueeze(1)], dim=1)
        return scores, sums

    def by_rows(queries: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        places = Places.of(present)
        columns = [Column(table, places.take(own), sparse=sparse) for table, own in zip(tables, ids, strict=True)]
        scores, sums = attend_by_rows(columns, places, queries, mean=mean)
        return torch.stack([places.to_padded(own, 0.0) for own in scores], dim=1), sums

    found = []
    for way in (padded, by_rows):
        leaves = [each.clone().requires_grad_() for each in (queries, *tables)]
        scores, sums = way(*leaves)
        (sums * wanted).sum().backward()
        gradients = [leaf.grad for leaf in leaves]
        assert all(gradient is not None for gradient in gradients)
        dense = [gradient.to_dense() for gradient in gradients if gradient is not None]
        found.append([scores.detach() * present.unsqueeze(1), sums.detach(), *dense])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


def test_a_sparse_gradient_holds_each_row_seen_once() -> None:
    present, _, ids, tables = a_history()
    places, table = Places.of(present), tables[0].requires_grad_()
    _, sums = attend_by_rows([Column(table, places.take(ids[0]), sparse=True)], places, torch.randn(6, 1, 3))
    sums.sum().backward()
    assert table.grad is not None
    assert table.grad._indices()[0].tolist() == sorted(set(ids[0][present].tolist()))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
@pytest.mark.parametrize("sparse", [False, True])
def test_by_rows_takes_a_batch_without_events(shape: tuple[int, int], sparse: bool) -> None:
    places = Places.of(torch.zeros(shape, dtype=torch.bool))
    table, queries = torch.randn(5, 2, requires_grad=True), torch.randn(shape[0], 2, 2, requires_grad=True)
    column = Column(table, torch.zeros(0, dtype=torch.int64), sparse=sparse)
    scores, sums = attend_by_rows([column], places, queries, mean=True)
    sums.sum().backward()
    assert scores.shape == (2, 0)
    assert torch.equal(sums, torch.zeros(shape[0], 3, 2))
    assert table.grad is not None
    assert not table.grad.to_dense().any()


def test_by_rows_needs_no_gradient_of_the_tables() -> None:
    present, _, ids, tables = a_history()
    places, queries = Places.of(present), torch.randn(6, 1, 3, requires_grad=True)
    attend_by_rows([Column(tables[0], places.take(ids[0]))], places, queries)[1].sum().backward()
    assert queries.grad is not None


@pytest.mark.parametrize("dense", [1, 100])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("second", [slice(10, 14), slice(1, 10)], ids=["two tables", "one vocabulary"])
def test_tables_of_one_store_share_its_gradient(
    dense: int, sparse: bool, second: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_search, "DENSE", dense)
    present, _, ids, _ = a_history()
    places, found = Places.of(present), []
    queries, wanted, numbers = torch.randn(6, 2, 6), torch.randn(6, 2, 6), torch.randn(15, 3)
    for by_rows in (True, False):
        store = numbers.clone().requires_grad_()
        slices = [slice(1, 10), second]
        if by_rows:
            columns = [Column(store, places.take(own), part, sparse) for own, part in zip(ids, slices, strict=True)]
            sums = attend_by_rows(columns, places, queries)[1]
        else:
            vectors = torch.cat([store[part][own] for own, part in zip(ids, slices, strict=True)], dim=2)
            sums = attend(vectors, present, queries)[1]
        (sums * wanted).sum().backward()
        assert store.grad is not None
        found.append(store.grad)
    torch.testing.assert_close(found[0].to_dense(), found[1])
    if sparse:
        seen = {1 + int(own) for own in ids[0][present]} | {second.start + int(own) for own in ids[1][present]}
        assert set(found[0]._indices()[0].tolist()) == seen


def histories() -> tuple[PaddedHistory, StoredHistory]:
    """The same events in both forms."""
    present, _, ids, tables = a_history()
    vectors = torch.cat([table[own] for table, own in zip(tables, ids, strict=True)], dim=2)
    columns = tuple(Column(table, own) for table, own in zip(tables, ids, strict=True))
    return PaddedHistory(vectors, present), StoredHistory(columns, present)


class TestHistory:
    def test_both_forms_search_and_attend_alike(self) -> None:
        padded, stored = histories()
        queries = torch.randn(6, 2, 5)
        for left, right in zip(padded.search(queries[:, 0]), stored.search(queries[:, 0]), strict=True):
            kept = padded.present if left.shape == padded.present.shape else torch.ones_like(left)
            torch.testing.assert_close(left * kept, right * kept)
        torch.testing.assert_close(padded.attend(queries, mean=True), stored.attend(queries, mean=True))
        torch.testing.assert_close(padded.attend(queries), padded.attend(queries, mean=True)[:, :2])
        scores = padded.scores(queries[:, 0]) * padded.present
        torch.testing.assert_close(scores, stored.scores(queries[:, 0]) * stored.present)
        torch.testing.assert_close(scores, padded.search(queries[:, 0])[0] * padded.present)

    def test_both_forms_take_some_events_and_lay_a_table_beside_them(self) -> None:
        torch.manual_seed(1)
        queries, table = torch.randn(6, 1, 7), torch.randn(4, 2)
        rows = torch.randint(0, 4, (6, 7))
        sums = []
        for history in histories():
            places, chosen = latest_best(history.scores(queries[:, 0, :5]), history.present, 2)
            order = places.sort(dim=1).indices
            places, chosen = places.gather(1, order), chosen.gather(1, order)
            sums.append(history.take(places, chosen).beside(table, rows.gather(1, places)).attend(queries))
            assert chosen.sum(1).tolist() == [2, 0, 2, 1, 2, 2]
        torch.testing.assert_close(*sums)


class TestTargetQueries:
    def test_are_what_projected_targets_and_projected_events_give(self) -> None:
        torch.manual_seed(0)
        queries = TargetQueries(4, 6, heads=3, head_dim=2)
        target, event = torch.randn(5, 4), torch.randn(5, 6)
        found = torch.einsum("bhd,bd->bh", queries(target), event)
        for head in range(3):
            asked = target @ queries.query[head]
            answered = event @ queries.key[head].T
            torch.testing.assert_close(found[:, head], (asked * answered).sum(1) / math.sqrt(2))

    def test_a_target_scores_events_by_what_was_made_of_them_as_by_its_queries(self) -> None:
        torch.manual_seed(0)
        queries, targets, events = TargetQueries(4, 6, heads=3, head_dim=2), torch.randn(5, 4), torch.randn(2, 6)
        wanted = torch.einsum("nhd,ld->hln", queries(targets), events)
        torch.testing.assert_close(queries.of_events(events) @ targets.t(), wanted)


# --- on a GPU, by Triton ---------------------------------------------------------------------------------------------


def tables_and_padded(length: int, columns: int, heads: int) -> tuple[TableHistory, PaddedHistory, Tensor]:
    """Histories of 0 to `length` events in both forms, and queries; the first has none."""
    store = drawn(30, 5).requires_grad_()
    rows = torch.randint(30, (4, length, columns), device=DEVICE)
    present = torch.arange(length + 3, device=DEVICE) < torch.tensor([[0], [1], [length], [length // 2]], device=DEVICE)
    present = present[:, :length]  # a part, as that of SIM's long history
    vectors = store[rows].flatten(2)
    queries = drawn(4, heads, columns * 5).requires_grad_()
    return TableHistory(store, rows, present), PaddedHistory(vectors, present), queries


@with_triton
@pytest.mark.parametrize(("length", "columns", "heads"), [(1, 1, 1), (7, 2, 1), (20, 3, 4)])
@pytest.mark.parametrize("mean", [False, True])
def test_attention_in_the_table_is_that_of_vectors(length: int, columns: int, heads: int, mean: bool) -> None:
    table, padded, queries = tables_and_padded(length, columns, heads)
    found, expected = (each.attend(queries, mean=mean) for each in (table, padded))
    assert_close(found, expected)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), (table.store, queries)) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):  # sums of up to 30 events, in another order
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@with_triton
def test_a_search_in_the_table_scores_and_takes_as_one_of_vectors() -> None:
    table, padded, queries = tables_and_padded(9, 2, 1)
    query = queries[:, 0]
    (scores, sums), (their_scores, their_sums) = table.search(query), padded.search(query)
    assert_close(scores.where(padded.present, 0), their_scores.where(padded.present, 0))
    assert_close(sums, their_sums)
    places, chosen = latest_best(scores, table.present, 3)
    kept, theirs = table.take(places, chosen), padded.take(places, chosen)
    assert_close(kept.attend(queries, mean=True), theirs.attend(queries, mean=True))
    gaps, buckets = drawn(4, 2), torch.randint(4, places.shape, device=DEVICE)
    assert_close(kept.beside(gaps, buckets).vectors, theirs.beside(gaps, buckets).vectors)


@with_triton
def test_an_event_outside_the_table_makes_its_row_alone_not_a_number() -> None:
    table, _, queries = tables_and_padded(4, 2, 1)
    rows = table.rows.clone()
    rows[2, 1, 0] = -1
    found = replace(table, rows=rows).attend(queries)
    assert found.isnan().any(2).flatten().tolist() == [False, False, True, False]
