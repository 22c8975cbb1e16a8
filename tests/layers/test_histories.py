"""Which features of a specification belong together, and their vectors."""

from __future__ import annotations

import pytest
import torch

from recspec.base.errors import SpecError
from recspec.feature_spec import FeatureSpec
from recspec.models.layers.batch import Batch
from recspec.models.layers.events import Histories


def a_spec(**changed: object) -> FeatureSpec:
    features: dict[str, dict[str, object]] = {
        "user_id": {"cardinality": 7},
        "item_id": {"cardinality": 12},
        "category": {"cardinality": 5},
        "history_category": {"cardinality": 5, "vocabulary": "category", "length": 4, "padding": 0},
        "history_item_id": {"cardinality": 12, "vocabulary": "item_id", "length": 4, "padding": 0},
        "negative_history_item_id": {"cardinality": 12, "vocabulary": "item_id", "length": 4, "padding": 0},
        "negative_history_category": {"cardinality": 5, "vocabulary": "category", "length": 4, "padding": 0},
        "history_gap": {"dtype": "float32", "length": 4},
        "label": {"dtype": "float32"},
    }
    channels = {
        "user": ["user_id"],
        "item": ["item_id", "category"],
        "history": ["history_category", "history_item_id", "history_gap"],
        "negative_history": ["negative_history_item_id", "negative_history_category"],
        "label": ["label"],
    }
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": {**channels, **changed}})


def a_batch() -> Batch:
    """Rows of two, no, four and one events."""
    return {
        "user_id": torch.tensor([1, 2, 3, 4]),
        "item_id": torch.tensor([5, 6, 7, 8]),
        "category": torch.tensor([1, 2, 3, 4]),
        "history_item_id": torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]),
        "history_category": torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 1, 2], [3, 0, 0, 0]]),
        "negative_history_item_id": torch.tensor([[8, 9, 0, 0], [0, 0, 0, 0], [9, 8, 7, 1], [2, 0, 0, 0]]),
        "negative_history_category": torch.tensor([[4, 3, 0, 0], [0, 0, 0, 0], [2, 1, 1, 2], [3, 0, 0, 0]]),
        "history_gap": torch.tensor([[2.0, 1, 0, 0], [0, 0, 0, 0], [4, 3, 2, 1], [0.5, 0, 0, 0]]),
        "label": torch.tensor([1.0, 0, 1, 0]),
    }


class TestHistories:
    def test_belong_to_the_item_features_of_their_vocabulary(self) -> None:
        found = Histories(a_spec(), "Din")
        assert found.pairs == {"item_id": "history_item_id", "category": "history_category"}
        assert found.negatives == {"item_id": "negative_history_item_id", "category": "negative_history_category"}
        assert (found.mark, found.time_gaps) == ("history_item_id", ("history_gap",))
        assert found.features == ("history_item_id", "history_category", "history_gap")
        assert found.ids_per_event == {"item_id": 8, "category": 8}

    def test_without_shared_vocabularies_belong_by_order(self) -> None:
        spec = FeatureSpec.from_dict(
            {
                "feature_spec": {
                    "item": {"cardinality": 12},
                    "cat": {"cardinality": 5},
                    "item_seen": {"cardinality": 12, "dimensions": [4]},
                    "cat_seen": {"cardinality": 5, "dimensions": [4]},
                    "label": {},
                },
                "channel_spec": {
                    "target_item_features": ["item", "cat"],
                    "positive_history": ["item_seen", "cat_seen"],
                    "label": ["label"],
                },
            }
        )
        found = Histories(spec, "Din")
        assert (found.pairs, found.negatives) == ({"item": "item_seen", "cat": "cat_seen"}, {})
        # The reader shifts the lists' ids by one, so that 0 is padding, and leaves the scalars' as they are.
        assert (spec.shift("item"), spec.shift("item_seen")) == (0, 1)
        assert found.spec.num_ids("item") == 13
        ids = found.target({"item": torch.tensor([0, 3]), "cat": torch.tensor([1, 1])})
        assert (ids["item"].tolist(), ids["cat"].tolist()) == ([1, 4], [2, 2])

    def test_that_belong_to_no_item_feature_are_named(self) -> None:
        with pytest.raises(SpecError, match="'history_category' in the role 'history' shares its vocabulary with no"):
            Histories(a_spec(item=["item_id"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="'negative_history' shares the vocabulary of 'history_category'; exp"):
            Histories(a_spec(negative_history=["negative_history_item_id"]), "Din")
        with pytest.raises(SpecError, match="'history' holds no list of ids; expected one for an item feature"):
            Histories(a_spec(history=["history_gap"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="share a vocabulary; expected one of them for 'item_id'"):
            Histories(a_spec(history=["history_item_id", "negative_history_item_id"], negative_history=[]), "Din")
        with pytest.raises(SpecError, match="Din needs a feature in the role 'history'"):
            Histories(a_spec(history=[]), "Din")

    @pytest.mark.parametrize(
        ("last", "kept"),
        [(2, [[1, 2], [], [5, 6], [7]]), (1, [[2], [], [6], [7]]), (None, [[1, 2], [], [3, 4, 5, 6], [7]])],
    )
    @pytest.mark.parametrize("padded", [False, True])
    def test_the_latest_events_alone(
        self, last: int | None, kept: list[list[int]], padded: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: padded)
        events = Histories(a_spec(), "Din").events(batch := a_batch(), last=last)
        assert (events.present is not None) == padded
        items, rows = events.flat(batch["history_item_id"]), events.rows
        there = torch.ones_like(rows, dtype=torch.bool) if events.present is None else events.present
        assert [items[there & (rows == row)].tolist() for row in range(4)] == kept
        assert events.lengths.tolist() == [len(row) for row in kept]
