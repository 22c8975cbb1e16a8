"""Several labels in one model: formulas by hand, its views, and the way from a table to predictions and exports."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import recspec
from recspec.base.errors import SettingsError, SpecError
from recspec.export import open_exported_model
from recspec.feature_spec import FeatureSpec
from recspec.metrics import Calibration
from recspec.models import MultiTask, label_views, labels_of, logits_of_labels, probabilities_of_labels
from recspec.models.layers import CalibrationMap
from recspec.models.multitask import MultiTaskSettings

SPEC = FeatureSpec.from_dict(
    {
        "feature_spec": {
            "user": {"dtype": "int32", "cardinality": 5},
            "item": {"dtype": "int32", "cardinality": 7},
            "price": {"dtype": "float32"},
            "click": {"dtype": "float32"},
            "buy": {"dtype": "float32"},
        },
        "channel_spec": {"user": ["user"], "item": ["item", "price"], "label": ["click", "buy"]},
    }
)
BATCH = {
    "user": torch.tensor([1, 2, 3]),
    "item": torch.tensor([1, 6, 0]),
    "price": torch.tensor([0.5, -1.0, 2.0]),
    "click": torch.tensor([1.0, 1.0, 0.0]),
    "buy": torch.tensor([1.0, 0.0, 0.0]),
}


TAKEN = ("label", "item_id", "user_id", "group", "timestamp", "event_weight", "split", "price_bucket")
"""Columns of the raw file whose names prepared rows have for other ones."""

OF_SHOP = {"user": "user", "item": "item", "timestamp": None, "split": "share"}


def model_of(form: str, **settings: object) -> MultiTask:
    torch.manual_seed(0)
    sizes = {"embedding_dim": 4, "experts": 3, "expert": (6,), "tower": (5,)}
    return MultiTask(SPEC, MultiTaskSettings(**{**sizes, "form": form, **settings})).eval()


def test_a_product_of_probabilities_worked_by_hand() -> None:
    model = model_of("esmm")
    with torch.no_grad():
        for out, bias in zip(model.outs, (math.log(3), 0.0), strict=True):
            out.weight.zero_()  # type: ignore[operator, union-attr]
            out.bias.fill_(bias)  # type: ignore[operator, union-attr]
    # p(click) = 3/4, p(buy | click) = 1/2, so p(buy) = 3/8.
    assert torch.sigmoid(model.label_logits(BATCH))[0].tolist() == pytest.approx([0.75, 0.375])
    # The mean over two labels of -(2 ln .75 + ln .25)/3 and -(ln .375 + 2 ln .625)/3.
    click, buy = -(2 * math.log(0.75) + math.log(0.25)) / 3, -(math.log(0.375) + 2 * math.log(0.625)) / 3
    assert model.loss(BATCH).item() == pytest.approx((click + buy) / 2, rel=1e-6)


@pytest.mark.parametrize("logit", [-90.0, -1.0, 0.0, 3.0, 30.0, 200.0])
def test_a_product_stays_finite_at_any_logit(logit: float) -> None:
    model = model_of("esmm")
    with torch.no_grad():
        for out in model.outs:
            out.bias.fill_(logit)  # type: ignore[operator, union-attr]
    loss = model.loss(BATCH)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


def test_a_gate_that_prefers_one_expert_gives_its_output() -> None:
    model = model_of("mmoe")
    with torch.no_grad():
        for gate, chosen in zip(model.gates, (2, 0), strict=True):
            gate.weight.zero_()  # type: ignore[operator, union-attr]
            gate.bias.copy_(torch.eye(3)[chosen] * 1e4)  # type: ignore[operator, union-attr]
    x = torch.cat(model.inputs(BATCH), dim=1)
    by_hand = [
        model.outs[label](model.towers[label](model.experts[expert](x))).squeeze(1)
        for label, expert in ((0, 2), (1, 0))
    ]
    torch.testing.assert_close(model.label_logits(BATCH), torch.stack(by_hand, dim=1))


@pytest.mark.parametrize("form", ["shared", "mmoe", "esmm"])
def test_a_view_has_the_logits_of_its_label_for_rows_and_candidates(form: str) -> None:
    model = model_of(form)
    view = label_views(model)["buy"]
    assert view.spec.labels == ("buy", "click")
    with torch.no_grad():
        logits = model.label_logits(BATCH)
        torch.testing.assert_close(torch.stack([model(BATCH), view(BATCH)], dim=1), logits)
        request = {"user": BATCH["user"][:1]}
        items = {name: BATCH[name] for name in ("item", "price")}
        pairs = model.label_logits({**items, "user": BATCH["user"][:1].expand(3)})
        torch.testing.assert_close(view.score_items(request, items)[0], pairs[:, 1])
        torch.testing.assert_close(model.label_scores(request, items)[0], pairs)


def test_weights_of_labels_weigh_the_losses_and_must_name_labels() -> None:
    of_click = model_of("shared", label_weights={"buy": 0.0}).loss(BATCH).item()
    of_buy = model_of("shared", label_weights={"click": 0.0}).loss(BATCH).item()
    assert model_of("shared").loss(BATCH).item() == pytest.approx(of_click + of_buy)
    with pytest.raises(SettingsError, match="label_weights: unknown label 'cart'"):
        model_of("shared", label_weights={"cart": 1.0})
    with pytest.raises(SettingsError, match="label_weights: all are 0"):
        model_of("shared", label_weights={"click": 0.0, "buy": 0.0})
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        model_of("shared", label_weights={"click": -1.0})


def test_probabilities_of_all_labels_are_those_of_the_views() -> None:
    model = model_of("mmoe")
    line = Calibration(method="temperature", logits=(0.0, 1.0), calibrated=(0.1, 0.6))
    model.calibrations["buy"] = CalibrationMap(line)
    for each in (model, model.of_label("buy")):
        with torch.no_grad():
            found = probabilities_of_labels(each, logits_of_labels(each, BATCH))
            views = [each, *label_views(each).values()]
            assert labels_of(each) == each.spec.labels
            for made, view in zip(found, views, strict=True):
                torch.testing.assert_close(made[:, 0], view.probabilities(view(BATCH)))


# --- from a table to answers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 views: clicks by the parity of user and item, purchases of cheap items among the clicked."""
    folder, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    with (folder / "views.csv").open("w", newline="") as file:
        write = csv.writer(file).writerow
        write(["user", "item", "price", "click", "bought", *TAKEN])
        for _ in range(600):
            user, item = rng.integers(20), rng.integers(12)
            click = int((user + item) % 2 == 0)
            bought = ["no", "yes"][int(click and item < 6)]
            write([f"u{user}", f"i{item}", item, click, bought, *[click] * len(TAKEN)])
    settings = {**OF_SHOP, "label": "click", "other_labels": ["bought"], "context_features": ["price"]}
    recspec.prepare(folder / "views.csv", out=folder / "data", dataset="table", settings=settings)
    return folder


@pytest.fixture(scope="module")
def run(shop: Path) -> Path:
    recspec.train(
        "multitask", shop / "data", shop / "run", settings={"train.epochs": 3, "form": "esmm"}, progress=False
    )
    return shop / "run"


def test_the_dataset_holds_both_labels_and_no_model_reads_them(shop: Path) -> None:
    spec = FeatureSpec.load(shop / "data")
    assert spec.labels == ("label", "bought")
    assert "bought" not in spec.inputs()


def test_predictions_have_a_column_of_each_label(run: Path) -> None:
    rows = pa.table({"user": ["u1", "u2"], "item": ["i1", "i1"], "price": [1, 1]})
    found = recspec.Model(run).predict(rows)
    assert found.column_names[3:] == ["probability", "probability_bought"]
    click, bought = (found.column(name).to_numpy() for name in found.column_names[3:])
    assert (bought <= click + 1e-3).all()


def test_a_split_is_predicted_beside_both_labels(run: Path, shop: Path) -> None:
    found = recspec.Model(run).predict(shop / "data", split="test")
    assert found.column_names[-4:] == ["label", "bought", "probability", "probability_bought"]


def test_each_label_is_measured_by_its_own_rows(run: Path, shop: Path) -> None:
    auc = {
        label: recspec.evaluate(run, shop / "data", label=label, progress=False).metrics["rows"]["auc"]
        for label in (None, "label", "bought")
    }
    assert auc[None] == auc["label"] != auc["bought"]
    with pytest.raises(SettingsError, match="evaluate: unknown label 'cart'"):
        recspec.evaluate(run, shop / "data", label="cart", progress=False)


def test_an_export_has_an_output_of_each_label(run: Path, shop: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for form in ("rows", "ranker"):
        recspec.export(run, tmp_path / form, form=form, data=shop / "data", batch_sizes=[1])
        exported = open_exported_model(tmp_path / form)
        assert exported.signature.outputs == ("probability", "logit", "probability_bought")
        inputs = {
            port.name: np.zeros((1 if port.level == "request" else 2, port.width), port.dtype)
            for port in exported.signature.inputs
        }
        outputs = exported.run(inputs)
        assert outputs["probability_bought"].shape == (2, 1)
        batch = {
            port.name: torch.zeros(2, dtype=torch.int64 if port.num_ids else torch.float32)
            for port in exported.signature.inputs
        }
        model = recspec.Model(run).predictor.model
        with torch.inference_mode():
            view = label_views(model)["bought"]
            expected = view.probabilities(view(batch)).numpy()
        np.testing.assert_allclose(outputs["probability_bought"][:, 0], expected, atol=1e-5)


def test_a_model_of_one_label_learns_the_one_that_is_asked_for(shop: Path, tmp_path: Path) -> None:
    settings = {"train.epochs": 1, "train.label": "bought"}
    trained = recspec.train("dlrm", shop / "data", tmp_path / "run", settings=settings, progress=False)
    assert trained.predictor.spec.label == "bought"
    report = recspec.evaluate(tmp_path / "run", shop / "data", progress=False)
    own = FeatureSpec.load(shop / "data").of_label("bought")
    assert (
        report.metrics["rows"]["auc"]
        == recspec.evaluate(tmp_path / "run", own.folder, label="bought", progress=False).metrics["rows"]["auc"]
    )
    with pytest.raises(SettingsError, match=r"evaluate: unknown label 'label'; .*bought"):
        recspec.evaluate(tmp_path / "run", shop / "data", label="label", progress=False)
    with pytest.raises(SettingsError, match=r"train\.label: unknown label 'cart'"):
        recspec.train("dlrm", shop / "data", tmp_path / "other", settings={"train.label": "cart"}, progress=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"label": "click", "other_labels": ["click"]}, "'click': named as a label more than once"),
        ({"label": "click", "other_labels": ["user"], "user": "user"}, "'user': a label; as a feature, an id"),
        ({"label": None, "other_labels": ["bought"], "split": None}, "other_labels are beside a label"),
        ({"label": "click", "other_labels": ["sold"]}, "no column 'sold'"),
        *(
            ({"label": "click", "other_labels": [name]}, f"prepared rows have a column '{name}' of their own")
            for name in TAKEN[:-1]
        ),
        (
            {
                "label": "click",
                "other_labels": ["price_bucket"],
                "buckets": {"price": [3]},
                "context_features": ["price"],
            },
            "two columns would be named 'price_bucket'",
        ),
        ({"label": "click", "other_labels": ["price"]}, "expected 0 or 1, true or false, yes or no"),
    ],
)
def test_labels_that_are_none_are_refused(shop: Path, tmp_path: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(recspec.RecspecError, match=says):
        recspec.prepare(shop / "views.csv", out=tmp_path / "data", dataset="table", settings={**OF_SHOP, **settings})


def test_a_specification_without_a_label_is_refused() -> None:
    with pytest.raises(SpecError, match="expected a label feature; found none"):
        SPEC.replace(channels={"user": ("user",)})


def test_labels_in_another_order_than_a_funnels_are_refused(shop: Path, tmp_path: Path) -> None:
    settings = {"form": "esmm", "train.label": "bought"}
    says = r"order of a funnel.*\n?.*'label' is 1 and 'bought' is 0 in [0-9]+ of [0-9]+ rows"
    with pytest.raises(SettingsError, match=says):
        recspec.train("multitask", shop / "data", tmp_path / "run", settings=settings, progress=False)


def test_a_label_that_is_always_the_same_is_told(tmp_path: Path) -> None:
    rows = [f"{row},{row % 2},0" for row in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["price,click,bought", *rows]))
    settings = {"label": "click", "other_labels": ["bought"], "split": "share", "context_features": ["price"]}
    made = recspec.prepare(tmp_path / "a.csv", out=tmp_path / "data", dataset="table", settings=settings)
    assert any("every row of train has the label 'bought' 0" in str(each) for each in made.prepared["warnings"])


def test_a_feature_that_gives_any_label_away_is_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(int(a), int(b), b + rng.random() / 2, rng.random()) for a, b in rng.integers(2, size=(400, 2))]
    (tmp_path / "a.csv").write_text("click,bought,paid,size\n" + "\n".join(",".join(map(str, row)) for row in rows))
    settings = {"label": "click", "other_labels": ["bought"]}
    made = recspec.prepare(tmp_path / "a.csv", out=tmp_path / "data", dataset="table", settings=settings)
    assert "paid" not in made.spec.inputs()
    assert any("'paid' (AUC 1.0000)" in each for each in made.prepared["dropped"])
