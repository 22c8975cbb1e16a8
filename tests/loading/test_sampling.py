"""Negatives: what they are, how often each item is drawn, and that neither rank nor repetition changes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.loading.blocks import RankBatch
from recspec.loading.sampling import REDRAWS, NegativeSampler, holds_negatives, negatives_by_default, sampler_for
from recspec.models.layers.batch import drawn_of, log_expected_of
from tests import made_up

NUM_ITEMS = 50


def rows(num_rows: int, **features: torch.Tensor) -> RankBatch:
    ids = torch.arange(num_rows, dtype=torch.int32)
    batch = {"user_id": ids % 7, "item_id": ids % NUM_ITEMS, "label": torch.ones(num_rows), **features}
    return RankBatch(batch, num_rows, num_rows, 0)


def part(whole: RankBatch, first: int, stop: int) -> RankBatch:
    batch = {name: tensor[first:stop] for name, tensor in whole.batch.items()}
    return RankBatch(batch, stop - first, whole.total_rows, first)


def sampler(num_negatives: int, **arguments: object) -> NegativeSampler:
    names = {"user": "user_id", "item": "item_id", "label": "label"}
    return NegativeSampler(num_negatives, NUM_ITEMS, **names, **arguments)  # type: ignore[arg-type]


def test_rows_come_first_then_blocks_with_other_items_and_label_0() -> None:
    given = rows(3, age=torch.tensor([20.0, 30.0, 40.0]), history=torch.tensor([[1, 2], [3, 0], [4, 5]]))
    batch = sampler(2)(given, epoch=0, step=0)
    assert batch["user_id"].tolist() == [0, 1, 2] * 3
    assert batch["age"].tolist() == [20.0, 30.0, 40.0] * 3
    assert batch["history"].tolist() == [[1, 2], [3, 0], [4, 5]] * 3
    assert batch["item_id"][:3].tolist() == [0, 1, 2]
    assert batch["label"].tolist() == [1.0] * 3 + [0.0] * 6
    assert batch["item_id"].dtype == torch.int32
    given.batch["label"] = torch.tensor([1.0, 0.0, 1.0])
    assert sampler(1)(given, epoch=0, step=0)["label"].tolist() == [1, 0, 1, 0, 0, 0], "labels of the file stay"
    assert sampler(0)(given, epoch=0, step=0)["item_id"].tolist() == [0, 1, 2]
    filler = RankBatch(part(given, 2, 3).batch, num_rows=0, total_rows=3, first_row=3)
    assert len(sampler(2)(filler, epoch=0, step=0)["item_id"]) == 3


def test_draws_are_a_function_of_seed_epoch_and_step() -> None:
    given = rows(100)
    state = torch.random.get_rng_state()
    first = sampler(4, seed=1)(given, epoch=2, step=3)["item_id"]
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator is left alone"
    assert torch.equal(first, sampler(4, seed=1)(given, epoch=2, step=3)["item_id"])
    for seed, epoch, step in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, sampler(4, seed=seed)(given, epoch=epoch, step=step)["item_id"])


@pytest.mark.parametrize("cut", [1, 37, 99])
@pytest.mark.parametrize("rejecting", [False, True])
def test_two_ranks_see_the_negatives_of_one(cut: int, rejecting: bool) -> None:
    positives = torch.arange(7 * NUM_ITEMS)[::3] if rejecting else None
    whole = rows(100)
    draw = sampler(3, positives=positives)
    together = draw(whole, epoch=1, step=1)["item_id"].view(4, 100)
    first = draw(part(whole, 0, cut), epoch=1, step=1)["item_id"].view(4, cut)
    second = draw(part(whole, cut, 100), epoch=1, step=1)["item_id"].view(4, 100 - cut)
    assert torch.equal(together, torch.cat([first, second], dim=1))


def test_uniform_draws_are_uniform_and_never_below_the_first_id() -> None:
    drawn = sampler(20, first_id=1)(rows(5000), epoch=0, step=0)["item_id"][5000:]
    counts = torch.bincount(drawn, minlength=NUM_ITEMS)
    assert len(drawn) == 100_000
    assert counts[0] == 0
    # 49 degrees of freedom less one: a chi-square of 100 has a probability of 2e-5.
    expected = len(drawn) / (NUM_ITEMS - 1)
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 100


def test_weighted_draws_follow_the_weights() -> None:
    weights = torch.arange(NUM_ITEMS, dtype=torch.float64)
    drawn = sampler(20, weights=weights)(rows(5000), epoch=0, step=0)["item_id"][5000:]
    counts = torch.bincount(drawn, minlength=NUM_ITEMS)
    expected = weights / weights.sum() * len(drawn)
    assert counts[0] == 0
    assert ((counts - expected)[1:] ** 2 / expected[1:]).sum() < 100
    beside = sampler(4, weights=weights, beside=True)(rows(500), epoch=0, step=0)
    wanted = 4 * beside[drawn_of("item_id")] / weights.sum()
    torch.testing.assert_close(beside[log_expected_of("item_id")].exp(), wanted.float())


@pytest.mark.parametrize("cut", [1, 37, 99])
def test_beside_each_row_are_the_items_that_would_be_behind_it(cut: int) -> None:
    whole = rows(100, age=torch.arange(100.0))
    behind = sampler(3, first_id=1)(whole, epoch=1, step=1)["item_id"].view(4, 100)
    draw = sampler(3, first_id=1, beside=True)
    parts = [draw(part(whole, *cuts), epoch=1, step=1) for cuts in ((0, cut), (cut, 100))]
    beside = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    assert torch.equal(beside[drawn_of("item_id")].T, behind[1:])
    assert beside[drawn_of("item_id")].dtype == torch.int32
    torch.testing.assert_close(beside[log_expected_of("item_id")].exp(), torch.full((100, 3), 3 / (NUM_ITEMS - 1)))
    assert all(torch.equal(beside[name], whole.batch[name]) for name in whole.batch)


def test_what_a_user_acted_on_is_drawn_anew() -> None:
    # User u acted on every item but u, u + 10 and u + 20: of 50 draws 47 must be redrawn, again and again.
    acted = torch.ones(7, NUM_ITEMS, dtype=torch.bool)
    for user in range(7):
        acted[user, user : user + 21 : 10] = False
    sparse = ~acted
    batch = sampler(30, positives=sparse.view(-1).nonzero().view(-1))(rows(200), epoch=0, step=0)
    assert not sparse[batch["user_id"][200:].long(), batch["item_id"][200:].long()].any()
    batch = sampler(30, positives=acted.view(-1).nonzero().view(-1))(rows(200), epoch=0, step=0)
    still = acted[batch["user_id"][200:].long(), batch["item_id"][200:].long()].double().mean().item()
    assert still == pytest.approx((47 / 50) ** (1 + REDRAWS), abs=0.03)


def test_a_catalogue_without_an_item_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'item_id' has no item to draw negatives from; set train\.negatives=0"):
        NegativeSampler(1, 1, user="user_id", item="item_id", label="label", first_id=1)


# --- made for a dataset ----------------------------------------------------------------------------------------------


def dataset(folder: Path, *, catalogue: bool) -> FeatureSpec:
    """Five items (id 0 is unknown) of two kinds; the last row is a negative."""
    train = {
        "user_id": np.array([1, 1, 2, 2, 2, 3], np.int32),
        "item_id": np.array([1, 2, 2, 3, 1, 4], np.int32),
        "kind": np.array([7, 8, 8, 7, 7, 8], np.int32),
        "label": np.array([1, 1, 1, 1, 1, 0], np.float32),
    }
    pq.write_table(pa.table(train), folder / "train.parquet")
    pq.write_table(
        pa.table({"kind": np.array([7, 8, 7, 8, 5], np.int32), "title": list("abcde")}), folder / "items.parquet"
    )
    features = {
        "user_id": {"dtype": "int32", "cardinality": 4},
        "item_id": {"dtype": "int32", "cardinality": 6},
        "kind": {"dtype": "int32", "cardinality": 9},
        "label": {"dtype": "float32"},
    }
    prepared = {"vocabularies": "vocabularies", "catalogues": {"item": "items.parquet"}}
    return FeatureSpec.from_dict(
        {
            "feature_spec": features,
            "source_spec": {"train": [{"type": "parquet", "features": list(features), "files": ["train.parquet"]}]},
            "channel_spec": {"user": ["user_id"], "item": ["item_id", "kind"], "label": ["label"]},
            "metadata": {"item_id": "item_id", **(prepared if catalogue else {})},
        },
        folder,
    )


def first_batch() -> RankBatch:
    batch = {
        "user_id": torch.tensor([1, 2], dtype=torch.int32),
        "item_id": torch.tensor([1, 2], dtype=torch.int32),
        "kind": torch.tensor([7, 8], dtype=torch.int32),
        "label": torch.ones(2),
    }
    return RankBatch(batch, 2, 2, 0)


def test_item_features_come_from_the_catalogue(tmp_path: Path) -> None:
    draw = sampler_for(dataset(tmp_path, catalogue=True), 50, features=("user_id", "item_id", "kind"))
    batch = draw(first_batch(), epoch=0, step=0)
    kinds = {1: 7, 2: 8, 3: 7, 4: 8, 5: 5}
    assert draw.first_id == 1
    assert set(batch["item_id"].tolist()) == set(kinds)
    assert [kinds[item] for item in batch["item_id"].tolist()] == batch["kind"].tolist()


def test_without_a_catalogue_item_features_come_from_the_rows(tmp_path: Path) -> None:
    draw = sampler_for(dataset(tmp_path, catalogue=False), 50, features=("user_id", "item_id", "kind"))
    batch = draw(first_batch(), epoch=0, step=0)
    kinds = {0: 0, 1: 7, 2: 8, 3: 7, 4: 8, 5: 0}
    assert set(batch["item_id"].tolist()) == set(kinds)
    assert [kinds[item] for item in batch["item_id"].tolist()] == batch["kind"].tolist()


def test_popularity_counts_positive_rows_to_the_power(tmp_path: Path) -> None:
    spec = dataset(tmp_path, catalogue=True)
    draw = sampler_for(spec, 20_000, features=("item_id",), distribution="popularity", power=0.5)
    drawn = draw(first_batch(), epoch=0, step=0)["item_id"][2:]
    shares = torch.bincount(drawn, minlength=6) / len(drawn)
    # Items 1 and 2 have two positive rows each, item 3 has one; item 4 has a negative row, item 5 none.
    root = 2**0.5
    expected = torch.tensor([0, root, root, 1, 0, 0]) / (2 * root + 1)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


def test_rejection_knows_the_positive_rows_of_the_splits(tmp_path: Path) -> None:
    draw = sampler_for(dataset(tmp_path, catalogue=True), 500, features=("item_id",), reject_positives=True)
    batch = draw(first_batch(), epoch=0, step=0)
    pairs = list(zip(batch["user_id"][2:].tolist(), batch["item_id"][2:].tolist(), strict=True))
    assert {(1, 3), (1, 4), (1, 5), (2, 4), (2, 5)} <= set(pairs)
    known = {(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)}
    assert sum(pair in known for pair in pairs) <= 20  # of 1000: user 2 acted on 3 of 5 items, and (3/5)^9 is 1 %


@pytest.mark.parametrize(
    ("metadata", "count"),
    [
        ({}, 0),
        ({"test_samples_per_series": 100}, 4),
        ({"test_samples_per_series": 2, "train_negatives": 1}, 0),
        ({"test_samples_per_series": 2, "train_negatives": 0}, 4),
    ],
)
def test_none_are_drawn_by_default_beside_labelled_ones(metadata: dict[str, object], count: int) -> None:
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"user": {"cardinality": 3}, "item": {"cardinality": 3}, "label": {}},
            "channel_spec": {"user": ["user"], "item": ["item"], "label": ["label"]},
            "metadata": metadata,
        }
    )
    assert negatives_by_default(spec) == count
    assert holds_negatives(spec) == ("train_negatives" in metadata and bool(metadata["train_negatives"]))


def test_lists_of_other_widths_are_padded_to_one() -> None:
    sampler = NegativeSampler(
        1, 3, user="user", item="item", label="label", first_id=1, item_features={"tags": torch.tensor([[0] * 3] * 3)}
    )
    batch = {"user": torch.tensor([1]), "item": torch.tensor([0]), "label": torch.ones(1), "tags": torch.tensor([[5]])}
    made = sampler(RankBatch(batch, 1, 1, 0), epoch=0, step=0)
    assert made["tags"].tolist() == [[5, 0, 0], [0, 0, 0]]  # an unknown item's row keeps its own


def test_a_known_items_feature_is_that_of_the_table_for_rows_and_negatives_alike() -> None:
    sampler = NegativeSampler(
        1, 3, user="user", item="item", label="label", first_id=1, item_features={"price": torch.tensor([0, 7, 8])}
    )
    batch = {name: torch.tensor([1]) for name in ("user", "item", "label")} | {"price": torch.tensor([5])}
    made = sampler(RankBatch(batch, 1, 1, 0), epoch=0, step=0)
    assert made["price"].tolist() == [7, {1: 7, 2: 8}[int(made["item"][1])]]


def test_an_unknown_distribution_names_the_known_ones(tmp_path: Path) -> None:
    spec = made_up.interactions(tmp_path / "data")
    with pytest.raises(SettingsError, match=r"unknown distribution 'populer' .did you mean 'popularity'"):
        sampler_for(spec, 1, features=(), distribution="populer")  # type: ignore[arg-type]
