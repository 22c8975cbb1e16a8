"""SIM: what it keeps of a long history, what it makes of it, and its joint loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from recspec.base.errors import DataError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import sim
from recspec.models.layers.batch import Batch, num_rows, take
from recspec.models.sim import Sim, SimSettings, _buckets

NUM_ITEMS, NUM_CATEGORIES = 30, 5

WAYS: Mapping[str, Mapping[str, object]] = {
    "as the defaults": {},
    "hard": {"search": "hard", "short": "din"},
    "published": {"exact": "din", "gru_hidden": 6},
    "projected, nothing left out": {"search_dim": 3, "short": "none"},
    "a window": {"long_length": 4, "short": "din", "heads": 1},
}

every_way = pytest.mark.parametrize("way", sorted(WAYS))


def a_spec(*, ids: Mapping[str, int] | None = None, gaps: bool = True, negatives: bool = True) -> FeatureSpec:
    """Histories of up to 12 events; a user, an hour and a price beside."""
    ids = {"item_id": NUM_ITEMS + 1, "category": NUM_CATEGORIES + 1} if ids is None else ids
    channels = ["history", *(["negative_history"] if negatives else [])]
    lists = {
        f"{channel}_{name}": {"cardinality": count, "vocabulary": name, "length": 12, "padding": 0}
        for channel in channels
        for name, count in ids.items()
    }
    roles: dict[str, list[str]] = {channel: [f"{channel}_{name}" for name in ids] for channel in channels}
    features: dict[str, object] = {name: {"cardinality": count} for name, count in ids.items()}
    if gaps:
        roles["history"].append("history_gap")
        features["history_gap"] = {"dtype": "float32", "length": 12}
    others = {"user_id": {"cardinality": 9}, "hour": {"cardinality": 25}, "price": {"dtype": "float32"}}
    return FeatureSpec.from_dict(
        {
            "feature_spec": {**features, **lists, **others, "label": {"dtype": "float32"}},
            "channel_spec": {
                **roles,
                "user": ["user_id"],
                "item": [*ids, "price"],
                "context": ["hour"],
                "label": ["label"],
            },
        }
    )


def a_batch(spec: FeatureSpec, rows: int = 16, length: int = 12, seed: int = 0) -> Batch:
    """Random rows; the first has no event, the second all, the third one. No event is there twice: which of two equal
    ones a search keeps is for the last bit of their scores to say."""
    torch.manual_seed(seed)
    lengths = torch.randint(0, length + 1, (rows,))
    lengths[:3] = torch.tensor([0, length, min(1, length)])[:rows]
    present = torch.arange(length) < lengths.unsqueeze(1)
    batch: Batch = {}
    for name, feature in spec.features.items():
        shape = (rows, length) if feature.is_list else (rows,)
        ids = int(feature.cardinality or 0)
        if feature.is_list and ids > length:
            batch[name] = 1 + torch.rand(rows, ids - 1).argsort(1)[:, :length]
        elif feature.is_categorical:
            batch[name] = torch.randint(1, ids, shape)
        else:
            batch[name] = torch.rand(shape) * 8
        if feature.is_list:
            batch[name] = batch[name] * present
    batch["label"] = torch.randint(0, 2, (rows,)).float()
    return batch


def build(spec: FeatureSpec, **settings: object) -> Sim:
    small = {"embedding_dim": 4, "top_k": 3, "short_length": 3, "hidden": (8,), "search_hidden": (8,), "heads": 2}
    torch.manual_seed(1)
    model = Sim(spec, SimSettings.model_validate({**small, **settings}))
    for parameter in model.parameters():  # large enough that rows differ
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def padded(model: Sim) -> Sim:
    """The same model, made to lay out the vectors of all events, as on a GPU."""
    model._reads_tables = lambda _: False  # type: ignore[method-assign]
    return model


def apart(model: Sim) -> Sim:
    """The same model, each of whose lookups has a whole gradient of its own."""
    model.inputs.tables = lambda *_, **__: model.inputs.embeddings  # type: ignore[method-assign]
    return model


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_joint_loss_of_two_rows_worked_by_hand() -> None:
    spec = a_spec(ids={"item_id": 4}, gaps=False)
    spec = spec.replace(channels={**spec.channels, "item": ("item_id",), "user": (), "context": ()})
    model = build(
        spec, embedding_dim=1, top_k=1, short_length=2, exact="din", hidden=(1,), search_hidden=(1,), gru_hidden=1
    ).train()
    with torch.no_grad():
        model.inputs.embeddings.stores["1"].copy_(torch.tensor([[0.0], [1.0], [2.0], [-1.0]]))
        for head, weights in ((model.search_head, [1.0, 1.0]), (model.head, [1.0, 1.0, 1.0, 0.0])):
            head.mlp.first.weight.copy_(torch.tensor([weights]))
            head.mlp.first.bias.zero_()
            cast(torch.nn.PReLU, head.mlp.activations[0]).weight.fill_(0.1)
            head.out.weight.fill_(1.0)
            head.out.bias.zero_()
        model.next_event.out.weight.zero_()  # it tells nothing from nothing: each answer costs ln 2
        model.next_event.out.bias.zero_()
    batch = {
        "item_id": torch.tensor([1, 3]),  # vectors 1 and -1
        "history_item_id": torch.tensor([[2, 3, 1, 1], [1, 0, 0, 0]]),  # long: 2 and -1; none
        "negative_history_item_id": torch.tensor([[3, 3, 3, 3], [3, 0, 0, 0]]),
        "label": torch.tensor([1.0, 0.0]),
    }
    # Row 1: scores 2 and -1, shares 0.952574 and 0.047426, sum 1.857722; kept: 2, whose mean with one more is 1.
    # Row 2: nothing is searched, and PReLU makes -0.1 of the target.
    searched, exact = (1 + 1.857722, -0.1), (1 + 2 + 1, -0.1)

    def cross_entropy(logits: tuple[float, float]) -> float:
        return (math.log1p(math.exp(-logits[0])) + math.log1p(math.exp(logits[1]))) / 2

    # The first row has one pair of events that follow each other, the second none.
    auxiliary = (2 * math.log(2) + 0) / 2
    expected = 0.5 * cross_entropy(searched) + 0.5 * cross_entropy(exact) + auxiliary
    assert expected == pytest.approx(1.033836, abs=1e-6)
    torch.testing.assert_close(model(batch), torch.tensor(exact))
    assert model.loss(batch).item() == pytest.approx(expected, abs=1e-6)

    model.settings = model.settings.model_copy(update={"alpha": 0.25, "beta": 2.0})
    model.auxiliary = 0.5
    expected = 0.25 * cross_entropy(searched) + 2 * cross_entropy(exact) + 0.5 * auxiliary
    assert model.loss(batch).item() == pytest.approx(expected, abs=1e-6)


def test_the_latest_events_are_the_short_part_and_those_before_are_searched() -> None:
    present = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]]).bool()
    searched, there, places = sim._windows(present, SimSettings(short_length=2, long_length=3))
    long = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()  # the third is padded in front
    assert torch.equal(searched, long)
    assert there.all()
    assert places.tolist() == [[5, 6], [0, 1], [5, 6]]
    everything, _, _ = sim._windows(present, SimSettings(short="none"))
    assert torch.equal(everything, present)


@pytest.mark.parametrize("feature", ["item_id", "category", None])
def test_hard_search_keeps_the_latest_events_that_share_the_id(feature: str | None) -> None:
    spec = a_spec()
    model = build(spec, search="hard", hard_feature=feature, exact="din", short="none")
    batch = a_batch(spec, rows=40)
    batch["history_item_id"][:, ::3] = batch["item_id"].unsqueeze(1) * (batch["history_item_id"][:, ::3] != 0)
    compared = feature or "category"
    names = model.inputs.embeddings.order(("item_id", "category"))
    store, first = model.inputs.embeddings.stores["4"], model.inputs.embeddings.first_row

    def vector(ids: Mapping[str, int]) -> Tensor:
        return torch.cat([store[first[name] + ids[name]] for name in names])

    made = []
    for row in range(40):
        target = {name: int(batch[name][row]) for name in names}
        events = [
            {name: int(batch[f"history_{name}"][row, place]) for name in names}
            for place in range(12)
            if batch["history_item_id"][row, place]
        ]
        kept = [vector(event) for event in events if event[compared] == target[compared]][-3:]
        own, total = vector(target), torch.zeros(8)
        if kept:
            laid = torch.stack(kept)
            total = (laid @ own).softmax(0) @ laid
        mean = sum(kept, torch.zeros(8)) / (len(kept) + 1)
        made.append(torch.cat([own, total, mean]))
    side = model._read(batch).side
    torch.testing.assert_close(model(batch), model.head(torch.cat([torch.stack(made), side], dim=1)))


def test_of_equal_scores_the_later_event_is_kept() -> None:
    spec = a_spec(ids={"item_id": 4}, negatives=False)
    model = build(spec, top_k=1, short="none")
    batch = a_batch(spec, rows=1, length=5)
    batch["item_id"][0], batch["history_item_id"][0] = 1, torch.tensor([2, 3, 2, 3, 0])
    before = {}
    for place in range(4):
        moved = {**batch, "history_gap": torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])}
        moved["history_gap"][0, place] = 7.0
        before[place] = model(moved).item()
    changed = [place for place in range(4) if before[place] != pytest.approx(before[0], abs=1e-7)]
    assert changed in ([2], [3])


# --- promises --------------------------------------------------------------------------------------------------------


@every_way
def test_reading_tables_and_laying_vectors_out_give_the_same_loss_and_gradients(way: str) -> None:
    spec = a_spec()
    batch, found = a_batch(spec), []
    for changes in ((), (padded,), (apart,), (padded, apart)):
        model = build(spec, **WAYS[way]).train()
        for change in changes:
            model = change(model)
        assert way == "hard" or model.settings.search == "soft"
        loss = model.loss(batch)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert [name for name, gradient in gradients.items() if gradient is None] == []
        found.append(
            {
                **{name: cast(Tensor, own) for name, own in gradients.items()},
                "loss": loss.detach(),
                "logits": model(batch).detach(),
            }
        )
    for other in found[1:]:
        for name, left in found[0].items():
            torch.testing.assert_close(left, other[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)


@every_way
@pytest.mark.parametrize("laid_out", [False, True])
def test_padding_and_company_change_no_row(way: str, laid_out: bool) -> None:
    spec = a_spec()
    model, batch = build(spec, **WAYS[way]), a_batch(spec)
    model = padded(model) if laid_out else model
    logits = model(batch)
    lists = [name for name, feature in spec.features.items() if feature.is_list]
    for before, behind in ((0, 5), (4, 0), (2, 3)):
        more = {**batch, **{name: torch.nn.functional.pad(batch[name], (before, behind)) for name in lists}}
        torch.testing.assert_close(model(more), logits, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(model.loss(more), model.loss(batch), atol=1e-6, rtol=1e-5)
    noisy = dict(batch)
    for name in lists:
        if name != "history_item_id":  # what stands where no event is
            noisy[name] = torch.where(batch["history_item_id"] != 0, batch[name], torch.ones_like(batch[name]))
    torch.testing.assert_close(model(noisy), logits, atol=1e-6, rtol=1e-5)
    alone = []
    for row in range(num_rows(batch)):
        one = take(batch, slice(row, row + 1))
        length = int((one["history_item_id"] != 0).sum())
        alone.append(model({**one, **{name: one[name][:, :length] for name in lists}}))
    torch.testing.assert_close(torch.cat(alone), logits, atol=1e-6, rtol=1e-5)


@every_way
@pytest.mark.parametrize(("rows", "length"), [(1, 12), (1, 0), (4, 0)])
def test_one_row_and_no_event_train(way: str, rows: int, length: int) -> None:
    spec = a_spec()
    batch = take(a_batch(spec, rows=5, length=length), slice(5 - rows, 5))
    for changes in ((), (padded,), (apart,), (padded, apart)):
        model = build(spec, **WAYS[way]).train()
        for change in changes:
            model = change(model)
        loss = model.loss(batch)
        loss.backward()
        assert torch.isfinite(loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
        assert model(batch).shape == (rows,)


@every_way
def test_scores_of_items_are_those_of_pairs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec()
    model, batch = build(spec, **WAYS[way]), a_batch(spec)
    items = {
        "item_id": torch.arange(NUM_ITEMS),
        "category": torch.arange(NUM_ITEMS) % 5,
        "price": torch.rand(NUM_ITEMS),
    }
    request = {name: values for name, values in batch.items() if name in model.features() and name not in items}
    with torch.inference_mode():
        pairs = model.pair_scores(request, items)
        torch.testing.assert_close(model.score_items(request, items), pairs, atol=1e-5, rtol=1e-5)
        monkeypatch.setattr(sim, "REQUEST_FLOATS", 1)
        monkeypatch.setattr("recspec.models.layers.event_networks.FLOATS", 7 * 12 * 2)
        monkeypatch.setattr("recspec.models.layers.event_networks.EVENTS", 3)
        torch.testing.assert_close(model.score_items(request, items), pairs, atol=1e-5, rtol=1e-5)
        nobody = {name: values[:0] for name, values in request.items()}
        assert model.score_items(nobody, items).shape == (0, NUM_ITEMS)
        without = {**request, **{name: values[:, :0] for name, values in request.items() if "history" in name}}
        expected = model.pair_scores(without, items)
        torch.testing.assert_close(model.score_items(without, items), expected, atol=1e-5, rtol=1e-5)


def test_the_search_is_taught_by_its_own_loss_alone() -> None:
    spec = a_spec()
    model = build(spec, search_dim=3, alpha=0.0).train()
    model.loss(a_batch(spec)).backward()
    assert all(not cast(Tensor, parameter.grad).any() for parameter in model.search_queries.parameters())
    model = build(spec, search_dim=3).train()
    model.loss(a_batch(spec)).backward()
    assert all(cast(Tensor, parameter.grad).any() for parameter in model.search_queries.parameters())


def test_gaps_and_sampled_events_are_read_where_there_are_any() -> None:
    with_all, without = a_spec(), a_spec(gaps=False, negatives=False)
    assert "history_gap" in build(with_all).features()
    assert "history_gap" not in build(with_all, exact="din").features()
    assert "negative_history_item_id" in build(with_all).loss_needs().features
    assert "negative_history_item_id" not in build(with_all).train().features()
    assert "negative_history_item_id" not in build(with_all, auxiliary=0).loss_needs().features
    model = build(without)
    assert model.auxiliary == 0
    assert model.exact_queries.key.shape[2] == build(with_all).exact_queries.key.shape[2] - 4
    assert torch.isfinite(model.loss(a_batch(without)))


def test_gaps_beyond_the_buckets_take_the_first_and_the_last() -> None:
    gaps = torch.tensor([[-1.0, 0.0, 0.49, 0.5, 0.99, 1.0, 100.0]])
    assert _buckets(gaps, 3).tolist() == [[0, 0, 0, 1, 1, 2, 2]]


def test_an_id_outside_its_table_is_named() -> None:
    spec = a_spec()
    batch = a_batch(spec)
    batch["history_category"][1, 0] = 77
    with pytest.raises(DataError, match=r"feature 'history_category': ids from 0 to 77; its table has rows 0 to 5"):
        build(spec)(batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": "hard", "hard_feature": "categry"}, r"hard_feature.*'categry'.*category"),
        ({"short": "din", "auxiliary": 1.0}, r"auxiliary is 1.0, and short is 'din'; .* set short to dien"),
        ({"auxiliary": 0.5}, r"no feature plays the role 'negative_history'.*or set auxiliary to 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Sim(a_spec(negatives=False), SimSettings.model_validate(settings))


# --- learning --------------------------------------------------------------------------------------------------------


def long_ago(rows: int, seed: int) -> tuple[FeatureSpec, Batch, float]:
    """Rows of 30 events whose label depends on the first 20 alone, and the AUC of their true probabilities."""
    random = np.random.default_rng(seed)
    spec = a_spec(ids={"item_id": 41, "category": 9}, gaps=False, negatives=False)
    spec = spec.replace(channels={**spec.channels, "item": ("item_id", "category"), "user": (), "context": ()})
    category = np.arange(41) % 8 + 1
    target, events = random.integers(1, 41, rows), random.integers(1, 41, (rows, 30))
    of_liked = 8 * random.integers(0, 5, (rows, 20)) + random.integers(0, 8, (rows, 1))
    events[:, :20] = np.where(random.random((rows, 20)) < 0.3, np.where(of_liked, of_liked, 40), events[:, :20])
    share = (category[events[:, :20]] == category[target][:, None]).mean(1)
    probability = 1 / (1 + np.exp(3 - 14 * share))
    label = random.random(rows) < probability
    batch = {
        "item_id": target,
        "category": category[target],
        "label": label.astype(np.float32),
        "history_item_id": events,
        "history_category": category[events],
    }
    return spec, {name: torch.from_numpy(values) for name, values in batch.items()}, metrics.auc(probability, label)


def test_learns_what_happened_long_ago() -> None:
    spec, train, _ = long_ago(4000, seed=0)
    _, test, best = long_ago(2000, seed=1)
    reached = {}
    for long_length in (None, 0):
        torch.manual_seed(0)
        settings = SimSettings(
            embedding_dim=8,
            top_k=10,
            short="din",
            hidden=(32,),
            search_hidden=(32,),
            heads=2,
            long_length=long_length,
        )
        model = Sim(spec, settings).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(4):
            for rows in torch.randperm(4000).split(200):
                optimizer.zero_grad()
                model.loss(take(train, rows)).backward()
                optimizer.step()
        with torch.inference_mode():
            scores = model.eval()(test)
        reached[long_length] = metrics.auc(scores.numpy(), test["label"].numpy() > 0)
    assert reached[None] > reached[0] + 0.45 * (best - 0.5), (reached, best)
