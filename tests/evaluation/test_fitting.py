"""The choice of a fitted model's settings on valid, and the line from scores to logits."""

import math
from pathlib import Path

import numpy as np
import pytest

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.evaluation import Evaluation, evaluate_model, positives
from recspec.evaluation.fitting import Fitted, ItemFit, RowFit, Tried, beats, fit_line
from recspec.evaluation.interactions import tells_order
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics
from recspec.models import MODELS, FittedItemModel, LogisticRegression
from tests import made_up
from tests.evaluation.tables import dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("fitting") / "data", num_users=60, num_rows=1000)


def a_fit(name: str, data: FeatureSpec, valid: str = "valid", settings: dict[str, object] | None = None) -> ItemFit:
    kind = MODELS[name]
    assert issubclass(kind, FittedItemModel)
    return ItemFit(kind, data, config.build(kind.Settings, "", settings or {}), ("train",), valid)


def test_the_best_settings_on_valid_are_taken(data: FeatureSpec) -> None:
    seen: list[Tried] = []
    fit = a_fit("ease", data)
    fit.on_tried = seen.append
    found = fit.run()
    scale = positives(data, ["train"]).scale
    tried = [each.settings["l2"] for each in seen]
    assert tried[:4] == [pytest.approx(factor * scale, rel=0.01) for factor in (30, 10, 100, 3)]
    assert [each.settings["dropout"] for each in seen[:4]] == [0.0, 0.0, 0.0, 0.4]
    best = [each for each in seen if each.best][-1]
    assert (found.value, found.model.settings.model_dump()["l2"]) == (best.value, best.settings["l2"])
    again = evaluate_model(found.model, data, "valid", protocols=("full",)).metrics
    assert again["full"]["ndcg@10"] == pytest.approx(found.value)
    assert found.metrics["full"]["ndcg@10"] == found.value


def test_other_settings_must_lead_by_more_than_chance() -> None:
    """Differences 1, 1, 1, -1 have the mean .5 and the standard error .5; 2, 2, 2, 0 lead by 1.5."""
    model = MODELS["popularity"]
    base = np.zeros(4)

    def of(*values: float) -> Fitted:
        found = Evaluation({}, values={"full": {"mrr": np.array(values)}})
        return Fitted(model, metric="full/mrr", evaluation=found)  # type: ignore[arg-type]

    assert not beats(of(1, 1, 1, -1), of(*base))
    assert beats(of(2, 2, 2, 0), of(*base))
    assert beats(of(-2, -2, -2, 0), of(*base))  # which side is better, the metric says
    assert not beats(of(*base), of(*base))
    assert beats(Fitted(model), of(*base))  # type: ignore[arg-type]  # nothing to tell by


def test_recency_is_tried_only_where_order_means_something(tmp_path: Path) -> None:
    pairs = [(u, i, 1) for u in range(4) for i in (u, u + 1)]
    untimed = dataset(tmp_path, {"train": pairs, "valid": [(u, 5 - u, 1) for u in range(2)]})
    assert not tells_order(untimed)
    assert all("recency" not in each.settings for each in a_fit("item_knn", untimed).run().tried)
    assert tells_order(untimed.replace(metadata={**untimed.metadata, "split": "leave_one_out"}))
    drawn = {"split": "leave_one_out", "ordered": False}
    assert not tells_order(untimed.replace(metadata={**untimed.metadata, **drawn}))


def test_a_fit_beyond_the_grid_must_not_be_much_dearer(data: FeatureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MODELS["ials"]
    monkeypatch.setattr(kind, "operations", lambda self: float(self.settings.l2))
    affords = a_fit("ials", data)._affords([{"l2": 1.0}, {"l2": 5.0}])
    assert affords({"l2": 20.0})
    assert not affords({"l2": 20.1})


def test_combinations_that_differ_in_given_settings_alone_are_tried_once(data: FeatureSpec) -> None:
    found = a_fit("ials", data, settings={"unobserved_weight": 0.3, "factors": 4, "iterations": 1}).run()
    assert [each.settings for each in found.tried[:3]] == [{"l2": l2} for l2 in (0.01, 0.005, 0.03)]


def test_settings_that_were_given_are_kept_and_still_measured(data: FeatureSpec) -> None:
    found = a_fit("ease", data, settings={"l2": 7.0, "dropout": 0.0, "recency": 1.0}).run()
    assert [each.settings for each in found.tried] == [{}]
    assert found.model.settings.model_dump()["l2"] == 7.0
    assert found.value is not None


def test_settings_of_scoring_are_chosen_for_the_best_fit_which_is_not_repeated(data: FeatureSpec) -> None:
    fit = a_fit("ease", data, settings={"l2": 7.0, "dropout": 0.0})
    values = iter([4.0, 5.0, 6.0, 7.0, 6.5])
    fit._value = lambda _: next(values)  # type: ignore[method-assign]
    fitted = []
    original = fit._fitted
    fit._fitted = lambda *of: fitted.append(of) or original(*of)  # type: ignore[method-assign, func-returns-value]
    found = fit.run()
    beyond = [{"recency": value} for value in (0.9, 0.7, 0.544, 0.423)]
    assert [dict(each.settings) for each in found.tried] == [{}, *beyond]
    assert len(fitted) == 1
    assert found.model.settings.model_dump()["recency"] == 0.544
    monotone = evaluate_model(found.model, data, "valid", protocols=("full",)).metrics
    assert monotone["full"] == found.metrics["full"]


def test_without_valid_the_first_values_are_taken(data: FeatureSpec) -> None:
    found = a_fit("ease", data, valid="").run()
    assert found.tried == ()
    assert found.value is None
    assert found.logits_from == "nothing"
    assert found.model.settings.model_dump()["l2"] == pytest.approx(30 * positives(data, ["train"]).scale, rel=0.01)


def test_a_model_fitted_on_valid_too_has_its_settings_chosen_without_it(data: FeatureSpec) -> None:
    fit, both = a_fit("popularity", data), a_fit("popularity", data)
    both.splits = ("train", "valid")
    alone, found = fit.run(), both.run()
    assert found.value == alone.value
    assert found.num_pairs == positives(data, ["train", "valid"]).num_pairs > alone.num_pairs
    counts = found.model.state_dict()["counts"].numpy()
    np.testing.assert_array_equal(counts, positives(data, ["train", "valid"]).counts)
    assert found.model.state_dict()["line"].tolist() == alone.model.state_dict()["line"].tolist()


def test_valid_without_a_new_positive_chooses_by_rows_alone(tmp_path: Path) -> None:
    spec = dataset(tmp_path, {"train": [(0, 1, 1), (1, 2, 1)], "valid": [(0, 2, 0)]})
    assert a_fit("ease", spec).run().value is None
    pairs = [(u, i, 1) for u in range(4) for i in (u, u + 1)]
    spec = dataset(tmp_path, {"train": pairs, "valid": [*pairs, (0, 5, 0)]})
    assert a_fit("ease", spec).run().value is None
    by_rows = a_fit("ease", spec)
    by_rows.metric = "rows/auc"
    assert by_rows.run().value is not None


def test_a_metric_that_valid_does_not_give_is_told(data: FeatureSpec) -> None:
    fit = a_fit("popularity", data)
    fit.metric = "full/ndgc@5"
    with pytest.raises(SettingsError, match=r"metric: unknown metric 'full/ndgc@5' \(did you mean 'full/ndcg@5'\?\)"):
        fit.run()


def test_a_chosen_metric_of_rows_and_candidates_is_measured(data: FeatureSpec) -> None:
    for metric in ("rows/auc", "sampled/ndcg@5"):
        fit = a_fit("item_knn", data, settings={"k": 5, "shrink": 1.0})
        fit.metric = metric
        protocol, _, name = metric.partition("/")
        assert fit.run().metrics[protocol][name] > 0.3


def test_no_more_users_are_ranked_than_asked_for(data: FeatureSpec) -> None:
    fit = a_fit("popularity", data)
    fit.users = 10
    few, many = fit.run(), a_fit("popularity", data).run()
    asked = EvaluateSettings(users=10)
    found = evaluate_model(few.model, data, "valid", protocols=("full",), settings=asked).metrics
    assert few.value == found["full"]["ndcg@10"] != many.value


def test_scores_become_probabilities_that_fit_valid(data: FeatureSpec) -> None:
    found = a_fit("ease", data).run()
    assert found.logits_from == "the rows of valid"
    reached = evaluate_model(found.model, data, "valid", protocols=("rows",)).metrics["rows"]
    rows = EvaluationTask(data, "valid", ["rows"], EvaluateSettings()).rows
    share = rows.labels.mean()
    assert reached["log_loss"] < -(share * math.log(share) + (1 - share) * math.log(1 - share))


def test_valid_of_positives_alone_is_calibrated_beside_drawn_negatives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    taken = [(user, 15 * (user % 2) + rng.permutation(15)[:8]) for user in range(40)]
    train = [(user, int(item), 1) for user, items in taken for item in items[1:]]
    data = dataset(
        tmp_path, {"train": train, "valid": [(user, int(items[0]), 1) for user, items in taken]}, users=40, items=30
    )
    found = a_fit("ease", data).run()
    assert found.logits_from == "the positives of valid, with 4 drawn negatives each"
    assert found.model.gives_logits


def test_a_line_is_that_of_logistic_regression() -> None:
    """Scores 0 and 2 with 1 of 4 and 3 of 4 positive: logits -ln 3 and ln 3, so the slope is ln 3."""
    scores, labels = np.repeat([0.0, 2.0], 40), np.array([1, 0, 0, 0] * 10 + [1, 1, 1, 0] * 10, dtype=bool)
    line = fit_line(scores, labels)
    assert line is not None
    assert line == (pytest.approx(math.log(3), abs=1e-2), pytest.approx(-math.log(3), abs=1e-2))
    # a negative row that counts for two: 1 of 7 and 3 of 5
    weighted = fit_line(scores, labels, 2.0)
    assert weighted is not None
    assert weighted[1] == pytest.approx(math.log(1 / 6), abs=1e-2)
    assert 2 * weighted[0] + weighted[1] == pytest.approx(math.log(3 / 2), abs=1e-2)


@pytest.mark.parametrize(
    ("scores", "labels"),
    [([1.0, 1.0], [1, 0]), ([0.0, 1.0], [1, 1]), ([0.0, 1.0], [0, 0]), ([1.0, 0.0], [0, 1])],
    ids=["constant", "positives", "negatives", "falling"],
)
def test_no_line_is_given_where_none_rises_or_for_a_handful_of_rows(scores: list[float], labels: list[int]) -> None:
    assert fit_line(np.array(scores * 50), np.array(labels * 50, dtype=bool)) is None
    assert fit_line(np.arange(18.0), np.arange(18) > 8) is None
    assert fit_line(np.arange(20.0), np.arange(20) > 9) is not None
    assert fit_line(np.arange(20, dtype=np.float32) * 1e25, np.arange(20) > 9) is not None


def test_a_line_through_separated_scores_is_finite() -> None:
    scores = np.concatenate([np.full(50, 1e6), np.full(50, -1e6)])
    line = fit_line(scores, scores > 0)
    assert line is not None
    assert np.isfinite(line).all()
    assert metrics.log_loss(line[0] * scores + line[1], scores > 0) < 0.1
    far = np.append(np.repeat([0.0, 1.0], 5000), 1e9)
    line = fit_line(far, np.append(np.arange(10_000) % 10 < 3 + 4 * (np.arange(10_000) >= 5000), False))
    assert line is None or np.isfinite(line).all()


def test_a_fit_without_time_for_a_second_strength_keeps_the_first(tmp_path: Path) -> None:
    kind = MODELS["logistic_regression"]
    assert issubclass(kind, LogisticRegression)
    clicks = made_up.clicks(tmp_path / "data", num_rows=600)
    found = RowFit(kind, clicks, kind.Settings(), ("train",), "valid", enough=lambda: True).run()
    assert len(found.tried) == 1
    assert found.value == found.tried[0].value
