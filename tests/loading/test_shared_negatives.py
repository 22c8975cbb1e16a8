"""Negatives that all rows of a batch share: which, how often they are expected, and what leaves one out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.data.storage import Ragged, SplitWriter
from recspec.feature_spec import Chunk, FeatureSpec
from recspec.loading.blocks import RankBatch
from recspec.loading.sampling import SharedNegatives, ids_present, shared_negatives_for
from recspec.models.layers.batch import drawn_of, log_expected_of

ITEM, EXPECTED = drawn_of("item_id"), log_expected_of("item_id")
SHARES = torch.tensor([0.0, 0.5, 0.25, 0.125, 0.125])
"""Of the training rows, by item."""


def rows(users: list[int], items: list[int], labels: list[float] | None = None, **more: torch.Tensor) -> RankBatch:
    label = torch.tensor(labels or [1.0] * len(users))
    batch = {"user_id": torch.tensor(users), "item_id": torch.tensor(items), "label": label, **more}
    return RankBatch(batch, len(users), len(users), 0)


def negatives(**arguments: object) -> SharedNegatives:
    return SharedNegatives(item="item_id", label="label", user="user_id", first_id=1, **arguments)  # type: ignore[arg-type]


def test_positives_of_the_batch_are_expected_as_often_as_training_rows_hold_them() -> None:
    made = negatives(row_shares=SHARES)(rows([0, 1, 2], [1, 2, 3]), epoch=0, step=0)
    assert made[ITEM].tolist() == [[1, 2, 3]] * 3
    inf = math.inf
    # Three rows: item 1 is expected 3 / 2 times, item 2 3 / 4 times, item 3 3 / 8 times; a row's own item is left out.
    wanted = torch.tensor([[inf, 0.75, 0.375], [1.5, inf, 0.375], [1.5, 0.75, inf]]).log()
    torch.testing.assert_close(made[EXPECTED], wanted)


def test_drawn_and_batch_items_are_expected_as_often_as_both_together() -> None:
    uniform = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    made = negatives(row_shares=SHARES, num_negatives=2, proportions=uniform)(rows([0, 1], [1, 2]), epoch=0, step=0)
    assert made[ITEM].shape == (2, 2 + 2 * 2)
    assert made[ITEM][0, :2].tolist() == [1, 2]
    expected = 2 * (2 / 4 + SHARES)  # two rows, of which each draws two of four items
    for row, own in enumerate([1, 2]):
        for item, log in zip(made[ITEM][row].tolist(), made[EXPECTED][row].tolist(), strict=True):
            assert log == (math.inf if item == own else pytest.approx(math.log(expected[item])))


def test_draws_follow_their_proportions() -> None:
    sampler = negatives(num_negatives=500, proportions=torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]))
    made = sampler(rows(list(range(8)), [2] * 8), epoch=0, step=0)
    drawn = torch.bincount(made[ITEM][0], minlength=5) / 4000
    torch.testing.assert_close(drawn, torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]), atol=0.03, rtol=0)
    assert made[EXPECTED][0].exp().sum().item() == pytest.approx(4000 * (0.25 * 1000 + 0.75 * 3000), rel=0.05)


def test_other_positives_of_the_user_labels_0_and_unknown_items_are_left_out() -> None:
    share = rows([0, 0, 1, 2, 3], [1, 2, 3, 4, 0], [1.0, 1.0, 1.0, 0.0, 1.0])
    made = negatives(row_shares=SHARES)(share, epoch=0, step=0)
    compared = (made[EXPECTED] < math.inf).int().tolist()
    assert compared == [
        [0, 0, 1, 0, 0],  # not the user's own two, nor the row with label 0, nor the unknown item
        [0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
    ]


def test_drawn_items_that_the_user_acted_on_are_left_out_if_asked() -> None:
    keys = torch.tensor([0 * 5 + 3, 1 * 5 + 4])
    sampler = negatives(num_negatives=50, proportions=torch.tensor([0.0, 1, 1, 1, 1]), positives=keys)
    made = sampler(rows([0, 1], [1, 2]), epoch=0, step=0)
    for row, known in enumerate([{1, 3}, {2, 4}]):
        left_out = made[ITEM][row][made[EXPECTED][row] == math.inf]
        assert set(left_out.tolist()) == known


def test_every_rank_compares_its_rows_with_the_same_items() -> None:
    whole = rows([0, 1, 2, 0, 3], [1, 2, 3, 4, 2])
    arguments = {"row_shares": SHARES, "num_negatives": 2, "proportions": SHARES}
    wanted = negatives(**arguments)(whole, epoch=3, step=7)
    everyone = torch.stack([whole.batch["item_id"], torch.ones(5, dtype=torch.int64), whole.batch["user_id"]], dim=1)
    for first, stop in ((0, 2), (2, 5)):
        batch = {name: values[first:stop] for name, values in whole.batch.items()}
        part = RankBatch(batch, stop - first, 5, first)
        found = negatives(**arguments, gather=lambda _: everyone)(part, epoch=3, step=7)
        for name, values in wanted.items():
            assert torch.equal(found[name], values[first:stop]), name
    filler = RankBatch({name: values[-1:] for name, values in whole.batch.items()}, 0, 5, 5)
    given: list[int] = []

    def gather(mine: torch.Tensor) -> torch.Tensor:
        given.append(len(mine))
        return everyone

    assert negatives(**arguments, gather=gather)(filler, epoch=3, step=7)[ITEM].shape == wanted[ITEM][:1].shape
    assert given == [0]  # a filler row is nobody's negative


def test_features_of_items_come_from_the_catalogue() -> None:
    prices, tags = torch.tensor([0.0, 10.0, 20.0, 30.0, 40.0]), torch.tensor([[0, 0], [1, 0], [2, 3], [3, 0], [4, 5]])
    share = rows([0, 1, 2], [1, 2, 0], price=torch.tensor([11.0, 22.0, 7.0]), tags=torch.tensor([[9], [9], [9]]))
    features = {"price": prices, "tags": tags}
    made = negatives(row_shares=SHARES, item_features=features)(share, epoch=0, step=0)
    assert made["price"].tolist() == [10.0, 20.0, 7.0]  # an unknown item keeps what its row says
    assert made["tags"].tolist() == [[1, 0], [2, 3], [9, 0]]
    assert made[drawn_of("price")][1].tolist() == [10.0, 20.0, 0.0]
    assert made[drawn_of("tags")][2].tolist() == [[1, 0], [2, 3], [0, 0]]
    assert made[drawn_of("tags")].stride(0) == 0  # all rows are one


# --- from files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> FeatureSpec:
    """Five items, of which training rows hold the first three, item 2 only with label 0, and a list of tags."""
    ids = {"user_id": 5, "item_id": 6}
    features = FeatureSpec.from_dict(
        {
            "feature_spec": {
                **{name: {"dtype": "int32", "cardinality": count} for name, count in ids.items()},
                "tags": {"dtype": "int32", "cardinality": 8, "length": 3, "padding": 0},
                "label": {"dtype": "float32"},
            },
            "channel_spec": {"user": ["user_id", "tags"], "item": ["item_id"], "label": ["label"]},
        }
    )
    columns = {
        "user_id": np.array([1, 1, 2, 3], np.int32),
        "item_id": np.array([1, 3, 1, 2], np.int32),
        "tags": Ragged.of([[1], [2, 3], [], [7]], np.int32),
        "label": np.array([1, 1, 1, 0], np.float32),
    }
    with SplitWriter(tmp_path, "train", features.features) as writer:
        writer.write(columns)
    sources: dict[str, tuple[Chunk, ...]] = {"train": writer.chunks}
    features.replace(sources=sources, metadata={"user_id": "user_id", "item_id": "item_id"}, folder=tmp_path).save(
        tmp_path
    )
    return FeatureSpec.load(tmp_path)


def test_items_without_a_positive_row_are_never_drawn(spec: FeatureSpec) -> None:
    names = ("user_id", "item_id")
    made = shared_negatives_for(spec, 100, features=names)
    assert made.proportions is not None
    assert made.proportions.tolist() == [0, 1, 0, 1, 0, 0]
    popular = shared_negatives_for(spec, 1, features=names, distribution="popularity", power=2.0)
    assert popular.proportions is not None
    assert popular.proportions.tolist() == [0, 4, 0, 1, 0, 0]
    keys = shared_negatives_for(spec, 1, features=names, reject_positives=True).positives
    assert keys is not None
    assert keys.tolist() == [1 * 6 + 1, 1 * 6 + 3, 2 * 6 + 1]


def test_data_without_a_positive_row_is_refused(spec: FeatureSpec, tmp_path: Path) -> None:
    with SplitWriter(tmp_path, "valid", spec.features) as writer:
        one, tags = np.array([1], np.int32), Ragged.of([[]], np.int32)
        writer.write({"user_id": one, "item_id": one, "tags": tags, "label": np.array([0], np.float32)})
    other = spec.replace(sources={**spec.sources, "valid": writer.chunks})
    with pytest.raises(SettingsError, match=r"no 'item_id' has a positive row .* set settings.loss=binary"):
        shared_negatives_for(other, 1, features=("item_id",), splits=("valid",))


def test_ids_present_are_those_of_all_rows_or_of_positive_ones(spec: FeatureSpec) -> None:
    names = ("item_id", "tags")
    positive = ids_present(spec, ("train",), names, positives_only=True)
    every = ids_present(spec, ("train",), names, positives_only=False)
    assert positive["item_id"].nonzero().flatten().tolist() == [1, 3]
    assert every["item_id"].nonzero().flatten().tolist() == [1, 2, 3]
    assert positive["tags"].nonzero().flatten().tolist() == [1, 2, 3]
    assert every["tags"].nonzero().flatten().tolist() == [1, 2, 3, 7]


def test_a_disliked_item_is_a_negative_of_its_users_rows_alone() -> None:
    """User 1 dislikes item 4, user 2 items 1 and 3; user 0 nothing. A disliked item weighs as half of all 5 items."""
    dislikes = torch.tensor([0, 0, 1, 3]), torch.tensor([4, 1, 3])
    sampler = negatives(row_shares=SHARES, dislikes=dislikes, dislike_weight=0.5)
    drawn = set()
    for step in range(20):
        made = sampler(rows([0, 1, 2], [1, 2, 2]), epoch=0, step=step)
        items, expected = made[ITEM][0, 3:].tolist(), made[EXPECTED][:, 3:]
        assert items[1] == 4
        drawn.add(items[2])
        weights = (-expected).exp()
        torch.testing.assert_close(weights, torch.diag(torch.tensor([0.0, 2.5, 2.5])))
    assert drawn == {1, 3}


def test_dislikes_drawn_do_not_depend_on_the_ranks() -> None:
    dislikes = torch.tensor([0, 3, 6]), torch.tensor([1, 2, 3, 2, 3, 4])
    sampler = negatives(row_shares=SHARES, dislikes=dislikes)
    whole = rows([0, 1, 1, 0], [4, 1, 1, 4])
    alone = sampler(whole, epoch=0, step=3)[ITEM][0, 4:]
    second = RankBatch({name: values[2:] for name, values in whole.batch.items()}, 2, 4, 2)
    assert sampler(second, epoch=0, step=3)[ITEM][0, 2:].tolist() == alone[2:].tolist()
