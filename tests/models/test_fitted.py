"""Models fitted in one go: each against its formula by hand, what they know of users, hostile weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recspec.base import config
from recspec.base.errors import DataError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.metrics.measures import hit_rate, ndcg, rank_groups
from recspec.models import MODELS, FittedItemModel, Interactions
from recspec.models import ease as ease_file
from recspec.models import known_items as known_file
from recspec.models.base import on_meta_device
from tests.closeness import assert_close

FORMS = ("primal", "dual", "sparse")
CASES: list[tuple[str, dict[str, object]]] = [
    ("popularity", {}),
    ("item_knn", {"k": 5, "shrink": 1.0}),
    *(("ease", {"form": form, "l2": 5.0, "neighbours": 99}) for form in FORMS),
    ("ials", {"factors": 4, "l2": 0.003, "unobserved_weight": 0.3}),
    ("markov", {"k": 12}),
    ("gf_cf", {"vectors": 3, "k": 15}),
]
every_case = pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda each: str(each))
PERSONAL = pytest.mark.parametrize(("name", "settings"), CASES[1:], ids=lambda each: str(each))


def of_pairs(pairs: Sequence[tuple[int, int]], users: int, items: int) -> Interactions:
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Interactions.from_pairs(*columns, num_users=users, num_items=items)


def specification(users: int, items: int) -> FeatureSpec:
    features = {"user": {"cardinality": users}, "item": {"cardinality": items}, "label": {}}
    channels = {"user": ["user"], "item": ["item"], "label": ["label"]}
    return FeatureSpec.from_dict({"feature_spec": features, "channel_spec": channels})


def fitted(name: str, interactions: Interactions, seed: int = 0, **settings: object) -> FittedItemModel:
    spec = specification(interactions.num_users, interactions.num_items)
    model = on_meta_device(lambda: MODELS[name](spec, MODELS[name].Settings.model_validate(settings)))
    assert isinstance(model, FittedItemModel)
    model.fit(interactions, seed=seed)
    return model.eval()


def all_scores(model: FittedItemModel) -> np.ndarray:
    request = {"user": torch.arange(model.num_users)}
    return model.score_items(request, {"item": torch.arange(model.num_items)}).numpy()


def pair_scores(model: FittedItemModel) -> np.ndarray:
    """Of every pair by `forward`."""
    users = torch.arange(model.num_users).repeat_interleave(model.num_items)
    items = torch.arange(model.num_items).repeat(model.num_users)
    return model({"user": users, "item": items}).view(model.num_users, -1).numpy()


def two_tastes() -> Interactions:
    """40 users: even ones act on most of the items 1..10, odd ones on most of 11..20; user 40 and item 0 on none."""
    rng = np.random.default_rng(0)
    return of_pairs([(u, 1 + i + 10 * (u % 2)) for u in range(40) for i in range(10) if rng.random() < 0.6], 41, 21)


@every_case
def test_pairs_have_the_scores_of_their_users_in_every_block_size(
    name: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted(name, two_tastes(), **settings)
    scores = all_scores(model)
    assert_close(pair_scores(model), scores)
    monkeypatch.setattr("recspec.models.item_model.SCORES", 50)
    monkeypatch.setattr(known_file, "ENTRIES", 20)
    monkeypatch.setattr(known_file, "ACTED", 60)
    assert_close(pair_scores(model), scores)
    monkeypatch.setattr("recspec.models.item_model.ROWS_PAY", 0)  # one by one
    assert_close(pair_scores(model), scores)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(pair_scores(model), scores)
    assert_close(all_scores(model), scores)


@every_case
def test_neither_the_order_of_the_pairs_nor_their_repetition_matters(name: str, settings: dict[str, object]) -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 1), (2, 3), (3, 0)]
    one, other = (all_scores(fitted(name, of_pairs(each, 4, 4), **settings)) for each in (pairs, pairs[::-1] * 2))
    np.testing.assert_array_equal(one, other)  # same operations


@every_case
def test_a_user_told_of_after_fitting_is_scored_by_that(name: str, settings: dict[str, object]) -> None:
    """User 0 is said to have done what user 1 did, whose taste is the other one."""
    before = two_tastes()
    users = np.repeat(np.arange(before.num_users), np.diff(before.offsets))
    _, others = before.of(np.array([1]))
    pairs = [(int(u), int(i)) for u, i in zip(users, before.items, strict=True) if u] + [(0, int(i)) for i in others]
    model = fitted(name, before, **settings)
    alone = all_scores(model)
    model.know(of_pairs(pairs, 41, 21))
    scores = all_scores(model)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scores[2:], alone[2:], rtol=0.01, atol=0.02)
    np.testing.assert_allclose(pair_scores(model), scores, rtol=1e-4, atol=1e-4)
    if name != "popularity":
        assert scores[0, 11:].mean() > scores[0, 1:11].mean() + 0.1


@every_case
def test_a_user_who_did_nothing_has_a_score_for_every_item(name: str, settings: dict[str, object]) -> None:
    scores = all_scores(fitted(name, of_pairs([(0, 0), (0, 1), (1, 0)], 3, 4), **settings))
    assert np.isfinite(scores).all()
    assert name == "popularity" or (np.abs(scores[2]) < 1e-6).all()


@every_case
def test_one_user_and_one_item_are_enough(name: str, settings: dict[str, object]) -> None:
    scores = all_scores(fitted(name, of_pairs([(0, 0)], 1, 1), **settings))
    assert scores.shape == (1, 1)
    assert np.isfinite(scores).all()


@every_case
def test_no_positive_at_all_is_refused(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(DataError, match="there is no positive to fit on; is the label 1 anywhere"):
        fitted(name, of_pairs([], 3, 3), **settings)


@every_case
def test_scores_become_logits_by_a_line(name: str, settings: dict[str, object]) -> None:
    model = fitted(name, two_tastes(), **settings)
    scores = all_scores(model)
    assert not model.gives_logits
    model.set_line(2.0, -3.0)
    assert model.gives_logits
    assert_close(all_scores(model), 2 * scores - 3)
    assert_close(pair_scores(model), 2 * scores - 3)


def test_regularisation_grows_with_the_interactions_of_a_user_or_item() -> None:
    assert of_pairs([(0, 1), (0, 2), (1, 1), (1, 2)], 9, 9).scale == 1.0  # 4 over 2 users and 2 items
    assert of_pairs([(u, i) for u in range(18) for i in range(18)], 30, 30).scale == 3.0


def test_interactions_without_others() -> None:
    some = of_pairs([(0, 1), (2, 1), (1, 0), (2, 2)], 3, 4)
    left = some.without(of_pairs([(2, 1), (0, 0), (1, 0)], 3, 4))
    assert left.keys.tolist() == [1, 10]
    assert left.offsets.tolist() == [0, 1, 1, 2]
    assert some.without(of_pairs([], 3, 4)).keys.tolist() == some.keys.tolist()
    assert some.without(some).num_pairs == 0


def test_interactions_by_item_are_the_users_of_each_item() -> None:
    turned = of_pairs([(0, 1), (2, 1), (1, 0), (2, 2)], 3, 4).by_item()
    assert turned.offsets.tolist() == [0, 1, 3, 4, 4]
    assert turned.items.tolist() == [1, 0, 2, 2]
    assert turned.num_items == 3


# --- each by hand -----------------------------------------------------------------------------------------------------


def test_popularity_counts_users() -> None:
    assert all_scores(fitted("popularity", of_pairs([(0, 1), (1, 1), (1, 2)], 3, 4))).tolist() == [[0, 2, 1, 0]] * 3


def test_item_knn_sums_shrunk_cosines_of_the_nearest_items() -> None:
    # users of item 0: {0, 1, 2}; of 1: {0, 1}; of 2: {2, 3}; of 3: {0, 3}
    seen = of_pairs([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 2), (3, 2), (0, 3), (3, 3)], 4, 4)
    near, far = 2 / (6**0.5 + 1), 1 / (6**0.5 + 1)  # items 0 and 1; items 0 and 2, 0 and 3
    pair = 1 / (2 + 1)  # items 1 and 3, 2 and 3
    scores = all_scores(fitted("item_knn", seen, k=100, shrink=1.0))[2]  # user 2 acted on items 0 and 2
    np.testing.assert_allclose(scores, [far, near, far, far + pair], rtol=1e-6)
    # with k = 1 item 1 keeps item 0 alone, and item 0 keeps item 1, which user 2 does not know
    np.testing.assert_allclose(all_scores(fitted("item_knn", seen, k=1, shrink=1.0))[2, :2], [0.0, near], rtol=1e-6)


@pytest.mark.parametrize("sparse", [1, 10**9], ids=["sparse", "dense"])  # a product's cost in a sparse sum
@pytest.mark.parametrize(("k", "items"), [(3, 50), (49, 50), (200, 50), (5, 128)])
def test_item_knn_is_its_formula_in_both_forms(
    sparse: int, k: int, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties have no order, so sums of the kept similarities are compared."""
    rng = np.random.default_rng(k)
    seen = of_pairs([(u, int(i)) for u in range(40) for i in rng.permutation(items - 1)[: 1 + u % 9]], 40, items)
    dense = seen.matrix().toarray().astype(np.float64)
    sizes = np.sqrt(dense.sum(0))
    expected = dense.T @ dense / (sizes[:, None] * sizes + 2.0)
    np.fill_diagonal(expected, 0.0)
    largest = np.sort(expected, axis=1)[:, ::-1][:, : min(k, items - 1)]
    monkeypatch.setattr("recspec.models.item_knn.SPARSE", sparse)
    for block in (1 << 24, items * 7):
        monkeypatch.setattr("recspec.models.item_knn.BLOCK", block)
        stored = fitted("item_knn", seen, k=k, shrink=2.0).state_dict()
        kept, places = stored["neighbours.weight"].numpy(), stored["neighbours.items"].numpy()
        np.testing.assert_allclose(-np.sort(-kept, axis=1), largest, rtol=1e-5, atol=1e-7)
        held = np.where(kept > 0, np.take_along_axis(expected, places.astype(np.int64), axis=1), 0.0)
        np.testing.assert_allclose(kept, held, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_ease_by_hand_in_every_form(form: str) -> None:
    """X'X + I = [[3, 1], [1, 2]] has the inverse [[2, -1], [-1, 3]] / 5; so B has 1/3 from 0 to 1, 1/2 from 1 to 0."""
    scores = all_scores(fitted("ease", of_pairs([(0, 0), (0, 1), (1, 0)], 2, 2), l2=1.0, form=form))
    np.testing.assert_allclose(scores, [[1 / 2, 1 / 3], [0, 1 / 3]], atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("form", FORMS)
def test_ease_is_the_closed_form_in_every_form(form: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout p, EDLAE adds p / (1 - p) times each item's number of users to its penalty."""
    seen = two_tastes()
    dense = seen.matrix().toarray().astype(np.float64)
    gram = dense.T @ dense
    inverse = np.linalg.inv(gram + 50.0 * np.eye(21) + dropout / (1 - dropout) * np.diag(np.diag(gram)))
    weights = np.eye(21) - inverse / np.diag(inverse)
    monkeypatch.setattr(ease_file, "BLOCK", 45)
    model = fitted("ease", seen, l2=50.0, form=form, dropout=dropout)
    np.testing.assert_allclose(all_scores(model), dense @ weights, atol=1e-5)
    model.know(seen)
    np.testing.assert_allclose(all_scores(model), dense @ weights, atol=1e-5)


def test_the_sparse_form_predicts_an_item_from_those_seen_with_it_most() -> None:
    # item 0 stands with item 1 twice and with item 2 once: with one neighbour, w = 2 / (users of item 1 + l2)
    seen = of_pairs([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2), (3, 1)], 4, 3)
    scores = all_scores(fitted("ease", seen, l2=1.0, form="sparse", neighbours=1))
    np.testing.assert_allclose(scores[:, 0], [2 / 4, 2 / 4, 0, 2 / 4], atol=1e-6)


def test_operations_of_one_fit_by_hand() -> None:
    few, many = SimpleNamespace(num_users=3, num_items=10), SimpleNamespace(num_users=30, num_items=10)
    cubes = 27 / torch.get_num_threads(), 1000 / torch.get_num_threads()
    for sizes, form, expected in ((few, "dual", cubes[0]), (many, "primal", cubes[1]), (few, "sparse", 1e8 + 4e4)):
        sizes.form = form
        assert MODELS["ease"].operations(sizes) == expected  # type: ignore[attr-defined]


def ease_of(users: int, items: int, **settings: object) -> FittedItemModel:
    spec = specification(users, items)
    model = on_meta_device(lambda: MODELS["ease"](spec, MODELS["ease"].Settings.model_validate(settings)))
    assert isinstance(model, FittedItemModel)
    return model


def test_ease_inverts_the_cheaper_matrix_that_fits_in_memory_and_else_takes_the_sparse_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recspec.base.machine.total_memory", lambda: 64 * 10**9)
    assert ease_of(943, 1682).how() == "form dual: it inverts 943 x 943 users, in 0.0 GB"
    assert ease_of(6040, 3706).how() == "form primal: it inverts 3,706 x 3,706 items, in 0.2 GB"
    assert ease_of(4_714, 5_820).how().startswith("form primal")  # fewer users, but not by enough
    assert ease_of(5_000, 59_047).how().startswith("form dual: it inverts 5,000 x 5,000 users")
    assert ease_of(138_000, 20_108).how() == "form primal: it inverts 20,108 x 20,108 items, in 6.5 GB"
    told = ease_of(250_000, 59_047).how()
    assert told == (
        "form sparse: a matrix of 59,047 x 59,047 items needs 55.8 GB, and 32.0 GB are free for it (half of memory)"
    )
    monkeypatch.setattr("recspec.base.machine.total_memory", lambda: 10**9)
    assert ease_of(5_000, 5_900).how().startswith("form dual")  # the dearer one fits
    assert ease_of(20_000, 10_000).how() == (
        "form sparse: a matrix of 10,000 x 10,000 items needs 1.6 GB, and 0.5 GB are free for it (half of memory)"
    )


def test_a_form_that_memory_cannot_hold_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recspec.base.machine.total_memory", lambda: 10**9)
    message = r"form is dual: a matrix of 20,000 x 20,000 users needs 6\.4 GB, and 0\.5 GB are free .* take form sparse"
    with pytest.raises(SettingsError, match=message):
        ease_of(20_000, 50_000, form="dual").how()
    model = on_meta_device(lambda: MODELS["ials"](specification(10**6, 10**6), MODELS["ials"].Settings(factors=1000)))
    assert isinstance(model, FittedItemModel)
    with pytest.raises(SettingsError, match=r"ials: weights of 8\.0 GB, and 0\.5 GB are free .* take smaller sizes"):
        model.how()


def test_a_matrix_that_cannot_be_inverted_names_the_setting() -> None:
    twins = of_pairs([(u, i) for u in range(50) for i in range(3)], 50, 3)
    with pytest.raises(SettingsError, match=r"settings\.l2 is too small to invert the items x items matrix"):
        ease_file.fit_primal(twins.matrix(), np.full(3, 1e-300))


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [
        ("ease", "l2", (1e-4, 1e10, 1e300)),
        ("item_knn", "shrink", (-1, 1e7, 1e300)),
        ("ials", "l2", (0, 1e-7, 1e7)),
        ("ials", "unobserved_weight", (0, 1e-7, 1e7)),
        ("ials", "l2_exponent", (-0.1, 1.1)),
        ("logistic_regression", "l2", (0, 1e-7, 1e300)),
    ],
)
def test_settings_beyond_what_numbers_hold_are_refused(name: str, setting: str, values: Sequence[float]) -> None:
    for value in (*values, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match=rf"{setting}.*(greater|less) than or equal to|{setting}.*finite"):
            config.build(MODELS[name].Settings, "settings", {setting: value})


@pytest.mark.parametrize("l2", [1e-3, 1e9])
@pytest.mark.parametrize("form", FORMS)
def test_ease_is_the_closed_form_at_the_limits_of_l2(form: str, l2: float) -> None:
    rng = np.random.default_rng(0)
    seen = of_pairs([(user, int(item)) for user in range(20) for item in rng.permutation(60)[:9]], 20, 60)
    dense = seen.matrix().toarray().astype(np.float64)
    inverse = np.linalg.inv(dense.T @ dense + l2 * np.eye(60))
    expected = dense @ (np.eye(60) - inverse / np.diag(inverse))
    model = fitted("ease", seen, l2=l2, form=form)
    if form == "sparse":  # of 59 neighbours: the same
        model = fitted("ease", seen, l2=l2, form=form, neighbours=60)
    atol = 1e-5 * float(np.abs(expected).max())
    np.testing.assert_allclose(all_scores(model), expected, atol=atol)
    model.know(seen)
    np.testing.assert_allclose(all_scores(model), expected, atol=atol)


def test_ials_tells_of_factors_that_its_penalty_has_left_no_room_for() -> None:
    assert fitted("ials", two_tastes(), factors=4).doubt() == ""
    doubt = fitted("ials", two_tastes(), l2=300.0, factors=4).doubt()
    assert doubt.startswith("l2 300 is too strong on these interactions: every factor is almost 0")


def test_ials_users_solve_their_normal_equations() -> None:
    """(a0 Y'Y + l2 (n + a0 N) I + Y_u'Y_u) x = Y_u' 1, by hand with Y = [1, 2], l2 = .1, a0 = .5: 6.7 x = 2."""
    model = fitted("ials", of_pairs([(0, 0), (1, 1)], 2, 2), factors=1, l2=0.1, unobserved_weight=0.5)
    model.items = torch.tensor([[1.0], [2.0]])
    model.know(of_pairs([(0, 1)], 2, 2))
    np.testing.assert_allclose(model.users.numpy(), [[2 / (0.5 * 5 + 0.1 * (1 + 0.5 * 2) + 4)], [0.0]], atol=1e-6)  # type: ignore[operator]


# --- weights of a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name", "value", "problem"),
    [
        ("primal", "known.items", [0, 99], "'items' holds ids from 0 to 99; expected 0 to 20"),
        ("primal", "known.items", [-1, 3], "'items' holds ids from -1 to 3; expected 0 to 20"),
        ("primal", "known.items", [3], "'offsets' does not rise from 0 to 1, the number of 'items'"),
        ("primal", "known.items", [3, 3], "'items' does not rise within each user's list"),
        ("sparse", "weights.items", 21, "'items' holds ids from 21 to 21; expected 0 to 20"),
        ("dual", "weights.of_items.items", [0, 41], "'items' holds ids from 0 to 41; expected 0 to 40"),
    ],
)
def test_weights_with_ids_out_of_range_are_told(form: str, name: str, value: object, problem: str) -> None:
    pairs = [(0, 2), (0, 5)] if form != "dual" else [(0, 2), (1, 2)]
    stored = fitted("ease", of_pairs(pairs, 41, 21), form=form).state_dict()
    changed = torch.tensor(value, dtype=torch.int32)
    stored[name] = changed.expand(stored[name].shape) if isinstance(value, int) else changed
    problems = ease_of(41, 21, form=form).allocate_buffers(stored)
    assert problems == [f"weight '{name.rpartition('.')[0]}': {problem}"]


def test_lists_may_begin_lower_than_the_list_before_ends() -> None:
    stored = fitted("ease", of_pairs([(1, 5), (1, 9), (3, 0), (3, 2)], 5, 21), form="primal").state_dict()
    model = ease_of(5, 21, form="primal")
    assert model.allocate_buffers(stored) == []
    assert model.state_dict()["known.items"].shape == (4,)


# --- real data --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "hr", "gain"),
    [
        ("popularity", {}, 0.4531, 0.2541),
        ("item_knn", {"k": 100, "shrink": 10.0}, 0.6621, 0.3904),
        ("ease", {"l2": 1010.0}, 0.7182, 0.4511),
        ("ials", {"factors": 64, "l2": 0.005, "unobserved_weight": 0.5}, 0.7207, 0.4454),
    ],
)
def test_the_known_figures_on_ml_1m(
    name: str, settings: dict[str, object], hr: float, gain: float, real_data: Callable[[str], Path]
) -> None:
    folder = real_data("ncf-ml-1m")
    train = np.loadtxt(folder / "ml-1m.train.rating", dtype=np.int64, delimiter="\t", usecols=(0, 1))
    test = np.loadtxt(folder / "ml-1m.test.rating", dtype=np.int64, delimiter="\t", usecols=(0, 1))
    negatives = np.loadtxt(folder / "ml-1m.test.negative", dtype=np.int64, delimiter="\t", usecols=range(1, 100))
    users, candidates = np.repeat(test[:, 0], 100), np.concatenate((test[:, 1:], negatives), axis=1).ravel()
    model = fitted(name, Interactions.from_pairs(train[:, 0], train[:, 1], num_users=6040, num_items=3706), **settings)
    scores = model({"user": torch.from_numpy(users), "item": torch.from_numpy(candidates)}).numpy()
    labels = np.tile(np.arange(100) == 0, len(test))
    ranking = rank_groups(scores, labels, users, candidates=candidates)
    assert ranking.num_duplicates == 156
    # .001 covers how others broke ties
    assert hit_rate(ranking, 10) == pytest.approx(hr, abs=0.001)
    assert ndcg(ranking, 10) == pytest.approx(gain, abs=0.001)


def test_a_line_that_turns_the_order_around_is_no_weight() -> None:
    model = fitted("popularity", two_tastes())
    for slope in (-1.0, 0.0, float("nan")):
        assert "slope is not above 0" in "".join(model.allocate_buffers({"line": torch.tensor([slope, 0.0])}))
    assert model.allocate_buffers({"line": torch.tensor([0.5, -2.0])}) == []
