"""Embedding tables laid side by side."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recspec.feature_spec import FeatureSpec
from recspec.models.layers.embeddings import Embeddings, rows_or_nan


def tables(**settings: object) -> Embeddings:
    """Widths 2 and 3; `seen` shares the table of `page`."""
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "page": {"cardinality": 4},
                "hour": {"cardinality": 3},
                "shop": {"cardinality": 5},
                "seen": {"cardinality": 4, "length": 3, "padding": 0, "vocabulary": "page"},
                "label": {},
            },
            "channel_spec": {"context": ["page", "hour", "shop", "seen"], "label": ["label"]},
        }
    )
    return Embeddings(spec, {"page": 2, "hour": 2, "shop": 3, "seen": 2}, **settings)  # type: ignore[arg-type]


BATCH = {
    "page": torch.tensor([1, 3], dtype=torch.int32),
    "hour": torch.tensor([0, 2], dtype=torch.int32),
    "shop": torch.tensor([4, 0]),
    "seen": torch.tensor([[2, 3, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize(("combiner", "pooled"), [("sum", [10.0, 12.0]), ("mean", [5.0, 6.0])])
def test_vectors_stand_side_by_side_and_lists_are_pooled_without_padding(
    combiner: Literal["sum", "mean"], pooled: list[float]
) -> None:
    embeddings = tables(combiner=combiner)
    with torch.no_grad():  # page: rows 0-3, hour: rows 4-6
        embeddings.stores["2"].copy_(torch.arange(14.0).view(7, 2))
        embeddings.stores["3"].copy_(torch.arange(15.0).view(5, 3))
    assert embeddings.order() == ("page", "hour", "seen", "shop")
    assert embeddings.width == 9
    expected = [[2, 3, 8, 9, *pooled, 12, 13, 14], [6, 7, 12, 13, 0, 0, 0, 1, 2]]
    torch.testing.assert_close(embeddings(BATCH), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_a_sparse_gradient_is_the_dense_one(combiner: Literal["sum", "mean"]) -> None:
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        embeddings = tables(combiner=combiner)
        embeddings.sparse = set(embeddings.stores) if sparse else set()
        (embeddings(BATCH) ** 2).sum().backward()
        found = embeddings.stores["2"].grad
        assert found is not None
        assert found.is_sparse == sparse
        gradients.append(found.to_dense())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_padding_gets_no_gradient() -> None:
    embeddings = tables()
    embeddings(BATCH, ["seen"]).sum().backward()
    gradient = embeddings.stores["2"].grad
    assert gradient is not None
    assert gradient[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_pooling_as_exporters_see_it_is_pooling_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for combiner in ("sum", "mean"):
        embeddings = tables(combiner=combiner)
        running = embeddings(BATCH)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            torch.testing.assert_close(embeddings(BATCH), running)


def test_rows_start_glorot_normal_or_with_the_deviation_given() -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"a": {"cardinality": 20_000}, "b": {"cardinality": 100}, "label": {}},
            "channel_spec": {"context": ["a", "b"], "label": ["label"]},
        }
    )
    torch.manual_seed(0)
    store = Embeddings(spec, {"a": 8, "b": 8}).stores["8"]
    assert store[:20_000].std().item() == pytest.approx((2 / 20_008) ** 0.5, rel=0.02)
    assert store[20_000:].std().item() == pytest.approx((2 / 108) ** 0.5, rel=0.1)
    assert Embeddings(spec, {"a": 8}, std=0.3).stores["8"].std().item() == pytest.approx(0.3, rel=0.02)
    assert not Embeddings(spec, {"a": 8}, std=0.0).stores["8"].any()


def test_gradients_of_many_ids_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"a": {"cardinality": 9}, "b": {"cardinality": 5}, "label": {}},
            "channel_spec": {"context": ["a", "b"], "label": ["label"]},
        }
    )
    tables = Embeddings(spec, {"a": 4, "b": 4})
    batch = {"a": torch.randint(0, 9, (50,)), "b": torch.randint(0, 5, (50,), dtype=torch.int32)}
    weights, gradients = torch.randn(50, 8), []
    for many in (1, 1000):
        monkeypatch.setattr("recspec.models.layers.embeddings.MANY", many)
        (gradient,) = torch.autograd.grad((tables(batch) * weights).sum(), [tables.stores["4"]])
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_one_updating_lookup_gives_rows_of_a_batch_and_vectors_of_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's lookup is played by sums of bags in torch, which is what it computes."""
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                "item": {"cardinality": 9},
                "kind": {"cardinality": 5},
                "user": {"cardinality": 7},
                "tags": {"cardinality": 6, "length": 3, "padding": 0},
                "label": {},
            },
            "channel_spec": {"item": ["item", "kind"], "user": ["user", "tags"], "label": ["label"]},
        }
    )
    tables = Embeddings(spec, {"item": 4, "user": 4, "kind": 2, "tags": 4}, more_ids={"item": 10})
    assert (tables.ids_per_row("4"), tables.ids_per_row("2")) == (1 + 10 + 1 + 3, 1)
    batch = {"user": torch.tensor([1, 2]), "tags": torch.tensor([[1, 2, 0], [0, 0, 0]])}
    wanted = {}
    for rows in (1, 2, 5):
        ids = {"item": torch.arange(rows) + 1, "kind": torch.arange(rows) % 5}
        wanted[rows] = tables.beside(batch, ("user", "tags"), ids)
        assert torch.equal(wanted[rows][1], tables(ids, ids))
    lookups = []

    def bags(store: Tensor, firsts: list[int], _: object, ids: Tensor, offsets: Tensor, *rest: object) -> Tensor:
        assert len(rest) == 2  # no weights of ids; the update
        lookups.append(store)
        features = len(firsts)
        rows = (len(offsets) - 1) // features
        counts = offsets.diff().view(features, rows).sum(1)
        placed = ids + torch.tensor(firsts).repeat_interleave(counts)
        summed = F.embedding_bag(placed, store, offsets, mode="sum", include_last_offset=True)
        return summed.view(features, rows, -1).transpose(0, 1).flatten(1)

    monkeypatch.setattr("recspec.models.layers.kernels.fbgemm_lookup", bags)
    tables.updates = dict.fromkeys(tables.stores)  # type: ignore[arg-type]
    for rows, (ours, theirs) in wanted.items():
        ids = {"item": torch.arange(rows) + 1, "kind": torch.arange(rows) % 5}
        lookups.clear()
        found = tables.beside(batch, ("user", "tags"), ids)
        assert ours is not None
        assert found[0] is not None
        assert len(lookups) == 2  # one a store
        torch.testing.assert_close(found[0], ours)
        torch.testing.assert_close(found[1], theirs)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_where_an_unknown_row_would_end_a_gpus_use_it_gives_nan(
    sparse: bool, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of NaN ends training with an error; the lookup itself must not fail, nor read another table's row."""
    torch.manual_seed(13)
    embeddings = tables()
    expected = embeddings(BATCH)
    embeddings.sparse = set(embeddings.stores) if sparse else set()
    wrong = {name: torch.cat([ids, ids, ids]) for name, ids in BATCH.items()}
    wrong["hour"][2], wrong["page"][3], wrong["seen"][4, 1] = 3, -1, 4
    monkeypatch.setattr("recspec.models.layers.embeddings.stops_at_unknown_rows", lambda _: True)
    if compiling:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = embeddings(wrong)
    assert [sorted({*(found[row].isnan().nonzero()[:, 0] // 2).tolist()}) for row in range(6)] == [
        [],
        [],
        [1],
        [0],
        [2],
        [],
    ]
    torch.testing.assert_close(found[[0, 1, 5]], expected[[0, 1, 1]])
    found.sum().backward()
    assert all(store.grad is not None for store in embeddings.stores.values())


def test_rows_of_a_table_are_nan_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = torch.arange(6.0).view(3, 2).requires_grad_(), torch.tensor([2, 3, -1, 0])
    with pytest.raises(IndexError):
        rows_or_nan(table, ids)
    monkeypatch.setattr("recspec.models.layers.embeddings.stops_at_unknown_rows", lambda _: True)
    for rows in (rows_or_nan(table, ids), torch.func.vmap(lambda own: rows_or_nan(table, own))(ids[None])[0]):
        assert rows.isnan().any(1).tolist() == [False, True, True, False]
        assert rows[[0, 3]].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert rows_or_nan(table[:, 0], ids).isnan().tolist() == [False, True, True, False]
