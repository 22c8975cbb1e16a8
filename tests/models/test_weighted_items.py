"""Weights of a user's items by recency and by event, and the models that read them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS, FittedItemModel, Interactions, UserEvents
from recspec.models import gf_cf as gf_cf_file
from recspec.models import ials as ials_file
from recspec.models import known_items as known_file
from recspec.models import markov as markov_file
from recspec.models.base import on_meta_device
from tests.closeness import assert_close

KINDS: list[tuple[str, dict[str, object]]] = [
    ("item_knn", {"k": 20, "shrink": 1.0}),
    *(("ease", {"form": form, "l2": 5.0, "neighbours": 20}) for form in ("primal", "dual", "sparse")),
    ("markov", {"k": 12}),
    ("gf_cf", {"vectors": 3, "k": 9}),
]
of_every_kind = pytest.mark.parametrize(("name", "settings"), KINDS, ids=lambda each: str(each))


def in_order(lists: list[list[int]], items: int, weights: list[list[float]] | None = None) -> Interactions:
    """Interactions with their events, oldest first."""
    users = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
    joined = np.array([item for each in lists for item in each], np.int64)
    flat = None if weights is None else np.array([w for each in weights for w in each], np.float32)
    return UserEvents.from_rows(users, joined, len(lists), weights=flat).interactions(items)


def fitted(name: str, seen: Interactions, *, weighted: bool = False, **settings: object) -> FittedItemModel:
    model = unfitted(name, seen.num_users, seen.num_items, weighted=weighted, **settings)
    model.fit(seen)
    return model.eval()


def unfitted(name: str, users: int, items: int, *, weighted: bool = False, **settings: object) -> FittedItemModel:
    features: Mapping[str, object] = {
        "user": {"cardinality": users},
        "item": {"cardinality": items},
        "label": {},
        "w": {},
    }
    channels = {"user": ["user"], "item": ["item"], "label": ["label"]}
    metadata = {"event_weight": "w"} if weighted else {}
    spec = FeatureSpec.from_dict({"feature_spec": features, "channel_spec": channels, "metadata": metadata})
    model = on_meta_device(lambda: MODELS[name](spec, MODELS[name].Settings.model_validate(settings)))
    assert isinstance(model, FittedItemModel)
    return model


def scores_of(model: FittedItemModel) -> np.ndarray:
    return model.score_users(torch.arange(model.num_users)).numpy()


def made_up(weighted: bool = False) -> Interactions:
    rng = np.random.default_rng(0)
    lists = [[int(i) for i in rng.permutation(12)[: 2 + u % 5]] for u in range(30)]
    return in_order(lists, 13, [[1.0 + i % 3 for i in each] for each in lists] if weighted else None)


def with_dislikes(seen: Interactions, pairs: list[tuple[int, int]]) -> Interactions:
    users, items = np.array(pairs).T
    found = Interactions.from_pairs(users, items, num_users=seen.num_users, num_items=seen.num_items)
    return replace(seen, dislikes=found)


def test_disliked_items_weigh_against_the_mean_of_the_others() -> None:
    seen = with_dislikes(in_order([[5, 3], [], [1]], 6), [(0, 4), (1, 2), (0, 0)])
    weighed = seen.weighted(0.5).with_dislikes(2.0)  # the mean of .5 and 1 is .75
    assert weighed.weights.tolist() == [-1.5, 1.0, -1.5, 0.5, -2.0, 1.0]  # type: ignore[union-attr]
    assert weighed.items.tolist() == [0, 3, 4, 5, 2, 1]
    assert weighed.offsets.tolist() == [0, 4, 5, 6]
    assert seen.with_dislikes(0.0) is seen
    assert (unknown := in_order([[1]], 2)).with_dislikes(1.0) is unknown


@pytest.mark.parametrize(("name", "settings"), [each for each in KINDS if each[0] != "ials"], ids=str)
def test_linear_models_subtract_the_scores_of_disliked_items(name: str, settings: dict[str, object]) -> None:
    seen = with_dislikes(made_up(), [(0, 12), (0, 11), (3, 12)])
    assert not seen.contain(np.array([0, 0, 3]), np.array([12, 11, 12])).any()
    model = fitted(name, seen, recency=0.5, **settings)
    varied = model.varied({"dislike_weight": 0.4}, seen)
    lists = [[12, 11], [], [], [12]]
    alone = [model.score_events(in_order([[item] for item in each] or [[]], 13)).numpy().sum(0) for each in lists]
    latest = np.diff(seen.offsets)[:4]
    means = [(1 - 0.5**count) / 0.5 / count for count in latest]
    expected = scores_of(model)[:4] - 0.4 * np.array(means)[:, None] * np.array(alone)
    np.testing.assert_allclose(scores_of(varied)[:4], expected, rtol=1e-3, atol=1e-5)
    given = fitted(name, seen, recency=0.5, dislike_weight=0.4, **settings)
    assert_close(scores_of(given), scores_of(varied))
    assert given.state_dict().keys() == model.state_dict().keys()


def test_ials_users_have_the_preference_0_for_disliked_items() -> None:
    seen = with_dislikes(made_up(), [(0, 12), (0, 11), (3, 12)])
    model = fitted("ials", seen, factors=3, l2=0.02, unobserved_weight=0.2, dislike_weight=2.0)
    assert isinstance(model, ials_file.Ials)
    y = model.items.double().numpy()
    likes = y[seen.of(np.array([0]))[1]]
    count, against = len(likes) + 2 * 2.0, y[[11, 12]]
    system = likes.T @ likes + 2.0 * against.T @ against + 0.2 * y.T @ y + 0.02 * (count + 0.2 * 13) * np.eye(3)
    np.testing.assert_allclose(model.users[0].numpy(), np.linalg.solve(system, likes.sum(0)), rtol=1e-3, atol=1e-5)


def test_the_newest_item_weighs_1_and_each_older_one_less() -> None:
    seen = in_order([[5, 3, 5, 4], [], [1]], 6)  # newest first: 4, 5 (its latest event), 3
    assert seen.weighted(0.5).weights.tolist() == [0.25, 1.0, 0.5, 1.0]  # type: ignore[union-attr]  # of 3, 4, 5; 1
    assert seen.weighted(1.0).weights is None
    assert (
        Interactions.from_pairs(np.array([0, 0]), np.array([2, 1]), num_users=1, num_items=3).weighted(0.5).weights
        is None
    )


def test_a_pair_has_the_largest_weight_of_its_events() -> None:
    seen = in_order([[5, 3, 5]], 6, [[2.0, 3.0, 0.5]])
    assert seen.weighted().weights.tolist() == [3.0, 2.0]  # type: ignore[union-attr]
    assert seen.weighted(0.5).weights.tolist() == [1.5, 2.0]  # type: ignore[union-attr]
    assert seen.weighted().by_item().weights.tolist() == [3.0, 2.0]  # type: ignore[union-attr]
    assert seen.weighted().matrix().toarray().tolist() == [[0, 0, 0, 3, 0, 2]]


def test_interactions_of_histories_alone_count_as_the_oldest() -> None:
    events = in_order([[1, 2]], 4).events
    wider = Interactions.from_pairs(np.zeros(3, int), np.array([1, 2, 3]), num_users=1, num_items=4)
    found = Interactions(wider.offsets, wider.items, 4, events).weighted(0.5)
    assert found.weights.tolist() == [0.5, 1.0, 0.25]  # type: ignore[union-attr]


def test_items_of_almost_no_weight_are_not_held() -> None:
    known = known_file.KnownItems(2, 40, weighted=True)
    known.set(in_order([list(range(30)), []], 40).weighted(0.1))
    assert known.items.tolist() == [25, 26, 27, 28, 29]  # down to .1^4
    assert known.longest == 5


@of_every_kind
@pytest.mark.parametrize("weighted", [False, True])
def test_every_way_to_score_reads_the_weights(
    name: str, settings: dict[str, object], weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted(name, made_up(weighted), weighted=weighted, recency=0.5, **settings)
    scores = scores_of(model)
    users, items = torch.arange(30).repeat_interleave(13), torch.arange(13).repeat(30)
    for rows_pay in (0, 10**9):
        monkeypatch.setattr("recspec.models.item_model.ROWS_PAY", rows_pay)
        assert_close(model.score_pairs(users, items).view(30, 13).numpy(), scores)
    monkeypatch.setattr(known_file, "ENTRIES", 20)
    assert_close(scores_of(model), scores)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(model.score_pairs(users, items).view(30, 13).numpy(), scores)
    assert_close(scores_of(model), scores)
    other = fitted(name, made_up(weighted), weighted=weighted, recency=1.0, **settings)
    assert np.abs(scores_of(other) - scores).max() > 1e-3
    varied = other.varied({"recency": 0.5}, made_up(weighted))
    assert_close(scores_of(varied), scores)
    assert varied.state_dict().keys() == model.state_dict().keys()
    assert other.settings.model_dump()["recency"] == 1.0


@of_every_kind
def test_a_baskets_latest_item_counts_most(name: str, settings: dict[str, object]) -> None:
    model = fitted(name, made_up(), recency=0.5, **settings)
    one, other = model.score_events(in_order([[2, 7], [7, 2]], 13)).numpy()
    alone = model.score_events(in_order([[2], [7]], 13)).numpy()
    assert_close(one, 0.5 * alone[0] + alone[1])
    assert_close(other, alone[0] + 0.5 * alone[1])


@of_every_kind
def test_stored_weights_make_their_room(name: str, settings: dict[str, object]) -> None:
    model = fitted(name, made_up(), recency=0.5, **settings)
    empty = on_meta_device(lambda: type(model)(model.spec, model.settings)).to_empty(device="cpu")
    assert empty.allocate_buffers(model.state_dict()) == []
    empty.load_state_dict(model.state_dict())
    assert_close(scores_of(empty), scores_of(model))


def test_ease_weighs_known_items_and_not_those_it_is_fitted_to() -> None:
    """X'X + I = [[3, 1], [1, 2]]: B has 1/3 from 0 to 1, 1/2 from 1 to 0; user 0 acted on 0 first, on 1 last."""
    seen = in_order([[0, 1], [0]], 2)
    for form in ("primal", "dual", "sparse"):
        scores = scores_of(fitted("ease", seen, form=form, l2=1.0, recency=0.6))
        np.testing.assert_allclose(scores, [[1 / 2, 0.6 / 3], [0, 1 / 3]], atol=1e-6)


def test_item_knn_compares_the_weights_of_items() -> None:
    seen = in_order([[0, 1], [0]], 2, [[2.0, 1.0], [1.0]])  # x_0 = [2, 1], x_1 = [1, 0]
    scores = scores_of(fitted("item_knn", seen, weighted=True, k=5, shrink=1.0))
    similarity = 2 / (5**0.5 * 1 + 1)
    np.testing.assert_allclose(scores, [[similarity, 2 * similarity], [0, similarity]], rtol=1e-6)


def test_ials_users_weigh_events_and_recency() -> None:
    """(a0 Y'Y + l2 (sum of c + a0 N)^nu + sum of c y y') x = sum of c y, with Y = [1, 2], a0 = 2 and c = .5, 3."""
    seen = in_order([[0, 1]], 2, [[1.0, 3.0]])
    model = fitted("ials", seen, weighted=True, factors=1, l2=0.1, unobserved_weight=2.0, l2_exponent=0.5, recency=0.5)
    model.items = torch.tensor([[1.0], [2.0]])
    model.know(seen)
    expected = (0.5 * 1 + 3 * 2) / (2 * 5 + 0.1 * (3.5 + 2 * 2) ** 0.5 + 0.5 * 1 + 3 * 4)
    np.testing.assert_allclose(model.score_users(torch.tensor([0])), [[expected, 2 * expected]], rtol=1e-6)


def test_ials_blocks_of_users_do_not_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted("ials", made_up(), factors=3, recency=0.8)
    whole = scores_of(model)
    monkeypatch.setattr(ials_file, "BLOCK", 7)
    model.know(made_up())
    # conjugate gradients end when a step is small, so other blocks change the fifth digit
    assert float(np.abs(scores_of(model) - whole).max()) < 1e-4


@pytest.mark.parametrize(("l2", "unobserved", "power"), [(0.01, 0.3, 1.0), (1e-6, 1e-3, 0.5), (3.0, 100.0, 0.0)])
def test_ials_solves_for_users_of_few_items_and_of_many_alike(l2: float, unobserved: float, power: float) -> None:
    rng = np.random.default_rng(1)
    seen = in_order([rng.permutation(40)[:count].tolist() for count in (1, 2, 7, 8, 9, 30, 0)], 40)
    settings = {"l2": l2, "unobserved_weight": unobserved, "l2_exponent": power}
    model = unfitted("ials", 7, 40, factors=8, recency=0.8, **settings)
    model.items = torch.from_numpy(rng.standard_normal((40, 8)).astype(np.float32))
    model.know(seen)
    known = seen.weighted(0.8).matrix().toarray().astype(np.float64)
    vectors = model.items.numpy().astype(np.float64)
    for user, weights in enumerate(known):
        penalty = l2 * (weights.sum() + unobserved * 40) ** power
        normal = unobserved * vectors.T @ vectors + vectors.T @ (weights[:, None] * vectors) + penalty * np.eye(8)
        np.testing.assert_allclose(
            model.users[user], np.linalg.solve(normal, vectors.T @ weights), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_ials_comes_to_where_no_factor_can_be_bettered(seed: int) -> None:
    """After many rounds, the loss of the file's docstring is the least for the users, and for the items."""
    seen = made_up(weighted=True)
    model = unfitted("ials", 30, 13, weighted=True, factors=3, l2=0.02, unobserved_weight=0.2, iterations=200)
    model.fit(seen, seed=seed)
    weights = torch.from_numpy(seen.weighted().matrix().toarray())
    users, items = (each.detach().double().requires_grad_() for each in (model.users, model.items))
    scores = users @ items.T
    penalties = [
        0.02 * ((weights.sum(1 - of) + 0.2 * (13, 30)[of]) * each.square().sum(1)).sum()
        for of, each in enumerate((users, items))
    ]
    loss = (weights * (1 - scores).square()).sum() + 0.2 * scores.square().sum() + sum(penalties)
    for gradient in torch.autograd.grad(loss, [users, items]):
        assert gradient.abs().max() < 1e-3
    assert scores[weights > 0].min() > scores[weights == 0].mean()


def test_ials_factors_follow_the_seed() -> None:
    one, same, other = (unfitted("ials", 30, 13, factors=3) for _ in range(3))
    for model, seed in ((one, 0), (same, 0), (other, 1)):
        model.fit(made_up(), seed=seed)
    np.testing.assert_array_equal(one.users, same.users)  # same operations
    assert not torch.equal(one.users, other.users)


def test_ials_solves_for_the_users_of_a_request_anew_after_other_weights() -> None:
    model, other = (fitted("ials", made_up(), factors=3, iterations=rounds) for rounds in (8, 1))
    basket = in_order([[2, 7]], 13)
    model.score_events(basket)
    model.items = other.items
    assert_close(model.score_events(basket), other.score_events(basket))


# --- markov -----------------------------------------------------------------------------------------------------------


def test_markov_by_hand() -> None:
    """1 -> 2 at distance 1 twice; 1 -> 3 at distance 2 (weight .5); 2 -> 3 once; item 0 is seen by nobody."""
    seen = in_order([[1, 2, 3], [1, 2], [3]], 4)
    model = fitted("markov", seen, window=2, decay=0.5, source=0.5, target=1.0, recency=0.6)
    from_1 = np.array([0, 0, 2 / 2, 0.5 / 2]) / 2**0.5
    from_2 = np.array([0, 0, 0, 1 / 2]) / 2**0.5
    np.testing.assert_allclose(scores_of(model)[0], 0.36 * from_1 + 0.6 * from_2, rtol=1e-6)
    np.testing.assert_allclose(scores_of(model)[1], 0.6 * from_1 + from_2, rtol=1e-6)
    assert not scores_of(model)[2].any()  # nothing followed item 3


def test_markov_counts_repeats_and_weighs_events() -> None:
    seen = in_order([[1, 2, 1, 2]], 3, [[1.0, 2.0, 3.0, 1.0]])
    settings = markov_file.MarkovSettings(window=1, source=0.0, target=0.0)
    [weights] = markov_file.next_counts(seen.events, 3, settings)
    assert weights.toarray().tolist() == [[0, 0, 0], [0, 0, 2 + 3], [0, 6, 0]]


def test_markov_blocks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores_of(fitted("markov", made_up()))
    monkeypatch.setattr(markov_file, "BLOCK", 30)
    assert_close(scores_of(fitted("markov", made_up())), whole)


def test_the_largest_entries_of_a_row_are_kept_the_first_of_equal_ones() -> None:
    matrix = sparse.csr_array(np.array([[3.0, 1, 2, 1], [0, 0, 0, 5], [1, 1, 1, 1], [0, 0, 0, 0]]))
    kept = known_file.largest_entries(matrix, 2).toarray().tolist()
    assert kept == [[3, 0, 2, 0], [0, 0, 0, 5], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["markov", "gf_cf"])
def test_more_successors_than_memory_holds_are_refused_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.base.machine.total_memory", lambda: 10**9)
    model = unfitted(name, 10, 10**6, k=100, **({"vectors": 0} if name == "gf_cf" else {}))
    with pytest.raises(SettingsError, match=rf"{name}: weights of 0\.8 GB, and 0\.5 GB are free .* take smaller sizes"):
        model.how()


@pytest.mark.parametrize("recency", [1.0, 0.6])
def test_scores_by_lists_and_by_entries_are_the_same(recency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_file, "ENTRIES", 20)
    model = fitted("markov", made_up(), recency=recency)
    users = torch.tensor([2, 0, 2, 5])
    by_lists = model.successors.list_by_list(model.known, users)
    assert by_lists.any()
    torch.testing.assert_close(by_lists, model.successors.by_entries(model.known, users))


def test_hostile_successors_are_told() -> None:
    model = fitted("markov", made_up())
    stored = model.state_dict()
    stored["successors.items"] = torch.full_like(stored["successors.items"], 13)
    empty = on_meta_device(lambda: type(model)(model.spec, model.settings))
    assert empty.allocate_buffers(stored) == ["weight 'successors': 'items' holds ids from 13 to 13; expected 0 to 12"]


# --- gf_cf ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_gf_cf_is_its_formula(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = made_up(weighted)
    dense = seen.weighted().matrix().toarray().astype(np.float64)
    of_users, of_items = dense.sum(1), np.maximum(dense.sum(0), 1e-12)  # nobody acted on item 12
    graph = dense / np.sqrt(of_users)[:, None] / np.sqrt(of_items)
    vectors = np.linalg.svd(graph)[2][:4].T
    low_pass = vectors @ vectors.T * np.sqrt(of_items) / np.sqrt(of_items)[:, None]
    expected = dense @ (graph.T @ graph + 0.7 * low_pass)
    for block in (1 << 24, 40):
        monkeypatch.setattr(known_file, "PRODUCTS", block)
        model = fitted("gf_cf", seen, weighted=weighted, alpha=0.7, vectors=4, k=13)
        np.testing.assert_allclose(scores_of(model), expected, rtol=1e-4, atol=1e-5)


def test_gf_cf_of_fewer_vectors_needs_no_other_fit() -> None:
    model = fitted("gf_cf", made_up(), vectors=5)
    fewer = model.varied({"vectors": 2}, made_up())
    assert_close(scores_of(fewer), scores_of(fitted("gf_cf", made_up(), vectors=2)))
    with pytest.raises(SettingsError, match=r"settings\.vectors is 9, and 5 were computed; fit again"):
        model.varied({"vectors": 9}, made_up())


def test_gf_cf_without_vectors_is_the_linear_filter() -> None:
    none, unweighted = (fitted("gf_cf", made_up(), **each) for each in ({"vectors": 0}, {"alpha": 0.0}))  # type: ignore[arg-type]
    assert_close(scores_of(none), scores_of(unweighted))
    assert none.state_dict()["vectors"].shape == (13, 0)


@pytest.mark.parametrize("block", [4096, 7])
def test_leading_vectors_are_those_of_the_svd(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gf_cf_file, "BLOCK", block)
    rng = np.random.default_rng(0)
    dense = rng.random((80, 5)) @ np.diag([9.0, 5, 3, 2, 1]) @ rng.random((5, 60))
    found = gf_cf_file.leading_vectors(sparse.csr_array(dense), 3, seed=0)
    expected = np.linalg.svd(dense)[2][:3]
    np.testing.assert_allclose(np.abs(expected @ found), np.eye(3), atol=1e-4)


@pytest.mark.parametrize(("setting", "value"), [("recency", 0.0), ("recency", 1.1), ("window", 0), ("decay", -1.0)])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    with pytest.raises(SettingsError, match=setting):
        config.build(MODELS["markov"].Settings, "settings", {setting: value})
