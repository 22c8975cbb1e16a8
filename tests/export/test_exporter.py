"""Programs made of bundles: the same probabilities for any number of rows, narrower ones within their tolerance."""

from __future__ import annotations

import copy
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from _pytest.mark import ParameterSet

import recspec as rs
from recspec.api.exporting import Exported
from recspec.base.errors import BundleError, ExportError, SettingsError
from recspec.bundle import find_export
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Bundle, Card
from recspec.cli import app as cli
from recspec.export import exporter, onnx_graph, triton_repository
from recspec.export.exported_model import (
    Arrays,
    EagerModel,
    Exportable,
    ExportedModel,
    OnnxModel,
    open_exported_model,
    read_description,
    unused_prefix,
)
from recspec.export.exporter import LARGEST, Check, Difference, ExportSettings, drift_message, export, sample_of
from recspec.export.triton_repository import Batching, Staged
from recspec.feature_spec import FORMS, FeatureSpec
from recspec.feature_spec.signature import OUTPUTS, Port, Signature, signature_of
from recspec.metrics.calibration import Calibration
from recspec.models import MODELS
from tests import made_up
from tests.models.test_models import build

if TYPE_CHECKING:
    from onnx import ModelProto

FEW_STEPS: dict[str, dict[str, object]] = {"dien": {"length": 2}, "sim": {"top_k": 2}}
"""Of recurrences, each of which is a part of the program, and fewer events than there are."""
QUICK = ExportSettings(batch_sizes=(1, 3), seconds=0.0, threads=1)
NAMES = sorted(MODELS)
CALIBRATION = Calibration(method="isotonic", logits=(-0.4, -0.1, 0.1, 0.3), calibrated=(-0.5, -0.3, 0.0, 0.1))

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("export") / "clicks")


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.sequences(tmp_path_factory.mktemp("export") / "sequences", num_rows=400, length=6)


@pytest.fixture(scope="module")
def read_by(clicks: FeatureSpec, sequences: FeatureSpec) -> Callable[[str], FeatureSpec]:
    """Data that a model reads."""
    return lambda name: sequences if "history" in MODELS[name].needs else clicks


@pytest.fixture(scope="module")
def bundled(read_by: Callable[[str], FeatureSpec], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Saves and opens a bundle of a model, which is calibrated."""

    def made(name: str, **settings: object) -> Bundle:
        model = build(name, read_by(name), **settings)
        folder = tmp_path_factory.mktemp("bundles") / name
        own = model.settings.model_dump(mode="json")
        bundle.save(folder, model, Card(model=name, settings=own, calibration=CALIBRATION))
        return bundle.load(folder)

    return made


@pytest.fixture(scope="module")
def wide(bundled: Callable[..., Bundle]) -> Bundle:
    """A Wide & Deep with products wide enough for int8."""
    return bundled("wide_deep", hidden=(64, 64, 64, 16), embedding_dim=16)


@pytest.fixture(scope="module")
def exported(wide: Bundle, clicks: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(wide, tmp_path_factory.mktemp("exported") / "onnx", QUICK, clicks).folder


@pytest.fixture
def traced_once(wide: Bundle, exported: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """The wide model, of which every further export narrows, checks and writes the program that was made before."""
    import onnx

    monkeypatch.setattr(onnx_graph, "trace", lambda *_: None)
    monkeypatch.setattr(onnx_graph, "to_onnx", lambda *_: onnx.load(exported / "model.onnx"))
    return wide


# --- every model -----------------------------------------------------------------------------------------------------


RANKERS = ("din", "ease")
"""Models of which a ranker is asked in the quick tests too: of a history, and of a basket."""
SLOW_ROWS = [name for name in NAMES if name not in ("wide_deep", "lightgbm", "popularity", "two_tower", "multitask")]
"""Of the others, one of each kind is asked quickly: clicks, trees, fitted items, towers, several labels."""
SLOW = [(name, "ranker") for name in NAMES if name not in RANKERS] + [(name, "rows") for name in SLOW_ROWS]


def slow_if(slow: bool, *given: object) -> ParameterSet:
    """One case of a test, one of the slow ones or not."""
    return pytest.param(*given, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("name", "form"), [slow_if((name, form) in SLOW, name, form) for name in NAMES for form in ("rows", "ranker")]
)
def test_every_model_answers_any_number_of_rows_as_an_onnx_program(
    name: str,
    form: str,
    bundled: Callable[..., Bundle],
    read_by: Callable[[str], FeatureSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained, data = bundled(name, **FEW_STEPS.get(name, {})), read_by(name)
    made = export(trained, tmp_path / "out", replace(QUICK, form=form), data)  # type: ignore[arg-type]
    program = open_exported_model(made.folder, threads=1)
    assert [port.name for port in program.signature.inputs] == list(trained.model.features())
    check = Check(trained.model, program.signature, sample_of(trained, data))
    found = check.of(program)
    assert found.largest < 2e-6  # of sigmoids of some units, in another order of summing
    outputs = program.run(check.call(range(7)))
    mapped = 1 / (1 + np.exp(-CALIBRATION(outputs["logit"])))
    np.testing.assert_allclose(outputs[trained.outputs[0]], mapped, atol=1e-6)
    assert made.description["calibration"] == "isotonic"
    assert {len(rows) for rows, _ in check.calls} >= {1, 2, 7, 64}
    assert made.description["difference"]["largest"] <= LARGEST * made.description["difference"]["allowed_mean"]
    if form == "rows":
        assert made.description["auc"]["after"] == pytest.approx(made.description["auc"]["before"], abs=1e-3)
        nothing = program.run({port: values[:0] for port, values in check.call(range(7)).items()})
        assert {values.shape for values in nothing.values()} == {(0, 1)}
    assert json.loads((made.folder / "export.json").read_text()) == made.description
    assert_ids_outside_their_range_are_unknown(program, check.call(range(7)))
    monkeypatch.setattr(onnx_graph, "NARROWEST", 2)  # every product of these small models
    for precision in ("int8", "bf16", "fp16"):
        assert_it_can_be_narrowed(made.folder / "model.onnx", precision, check)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neumf", "wide_deep", "dlrm"])
def test_small_probabilities_keep_their_order(
    name: str, bundled: Callable[..., Bundle], read_by: Callable[[str], FeatureSpec], tmp_path: Path
) -> None:
    trained = bundled(name)
    trained.model.calibration = None
    last = [each for each in trained.model.parameters() if each.shape == (1,)][-1]
    with torch.no_grad():
        last -= 50  # ONNX Runtime's sigmoid is 0 below -18
    made = export(trained, tmp_path / "out", QUICK, read_by(name))
    program = open_exported_model(made.folder, threads=1)
    check = Check(trained.model, program.signature, sample_of(trained, read_by(name)))
    inputs = check.call(range(check.rows))
    found, expected = (each.run(inputs) for each in (program, EagerModel(trained.model, program.signature)))
    assert -60 < expected["logit"].max() < -40
    first = trained.outputs[0]
    np.testing.assert_allclose(found[first], expected[first], rtol=1e-4)
    order = np.argsort(found["logit"][:, 0], kind="stable")
    assert (np.diff(found[first][order, 0]) >= 0).all()
    assert len(np.unique(found[first])) > check.rows / 10


def assert_ids_outside_their_range_are_unknown(program: ExportedModel, inputs: Arrays) -> None:
    """As id 0 in the first place of each feature; without a number where id 0 is a real value."""
    for port in program.signature.inputs:
        ends = np.iinfo(port.dtype) if port.num_ids is not None else None
        for wrong in () if ends is None else (-1, port.num_ids, ends.max, ends.min):
            unknown, given = (inputs[port.name].copy() for _ in range(2))
            unknown[:, 0], given[:, 0] = 0, wrong
            expected, found = (program.run({**inputs, port.name: each}) for each in (unknown, given))
            for name in expected:
                if port.has_unknown:
                    np.testing.assert_array_equal(found[name], expected[name], f"{port} at {wrong}")
                else:
                    assert np.isnan(found[name]).all(), f"{port} at {wrong}"


def assert_it_can_be_narrowed(file: Path, precision: onnx_graph.Precision, check: Check) -> None:
    """The program runs with narrower weights, on calls of every size; that it keeps digits is asked elsewhere."""
    import onnx

    model = onnx.load(file)
    if precision == "int8":
        narrowed = onnx_graph.with_int8_products(model, onnx_graph.wide_products(model))
    else:
        narrowed = onnx_graph.narrow(model, precision)
    found = check.of(OnnxModel(narrowed.SerializeToString(), check.signature, threads=1))
    assert found.finite
    assert found.largest < 0.05


OF_HISTORIES: dict[str, tuple[str, dict[str, object]]] = {
    "din, dot": ("din", {"attention": "dot", "softmax": True}),
    "dien": ("dien", {"length": 2, "softmax": False}),
    "sim, hard": ("sim", {"search": "hard", "exact": "din", "short": "none", "top_k": 2}),
    "sim, dien": ("sim", {"short": "dien", "search_dim": 4, "top_k": 2}),
}


class Traced:
    """A program as torch traced it."""

    def __init__(self, program: torch.export.ExportedProgram, signature: Signature) -> None:
        self._run, self.signature = program.module(), signature

    def run(self, inputs: Arrays) -> Arrays:
        """Its outputs."""
        made = self._run(*(torch.from_numpy(inputs[port.name]) for port in self.signature.inputs))
        names = self.signature.outputs
        return {name: tensor.detach().numpy() for name, tensor in zip(names, made, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [slow_if(case == "sim, dien", case) for case in OF_HISTORIES])
def test_a_ranker_reads_a_history_once_and_answers_as_rows_do(
    case: str, bundled: Callable[..., Bundle], sequences: FeatureSpec
) -> None:
    name, settings = OF_HISTORIES[case]
    trained = bundled(name, **settings)
    signature = signature_of(sequences, trained.model.features(), "ranker")
    assert {port.level for port in signature.inputs if port.name.startswith("history")} == {"request"}
    check = Check(trained.model, signature, sample_of(trained, sequences))
    traced = onnx_graph.trace(Exportable(trained.model, signature).eval(), signature, check.examples)
    assert check.of(Traced(traced, signature)).largest < 1e-6
    assert np.concatenate(check.expected).std() > 0.01


def test_a_ranker_needs_an_item(clicks: FeatureSpec) -> None:
    users = [name for name in clicks.inputs() if name not in clicks.role("item")]
    with pytest.raises(SettingsError, match="reads no feature of the role 'item', so candidates can't differ"):
        signature_of(clicks, users, "ranker")


def test_inputs_are_two_dimensional_and_of_the_stored_type(clicks: FeatureSpec) -> None:
    ports = {port.name: port for port in signature_of(clicks, clicks.inputs(), "ranker").inputs}
    assert (ports["tags"].width, ports["tags"].is_list, ports["tags"].level) == (4, True, "item")
    assert (ports["age"].dtype, ports["age"].width, ports["age"].level) == ("float32", 1, "request")
    assert ports["user_id"].dtype == ("int32" if clicks.features["user_id"].dtype == "int32" else "int64")
    signature = Signature("ranker", tuple(ports.values()))
    assert Signature.from_dict(json.loads(json.dumps(signature.to_dict()))) == signature


# --- names of features -----------------------------------------------------------------------------------------------


def with_numbers(names: Sequence[str], folder: Path) -> Bundle:
    """A model of a user, an item and a number of each name."""
    features = {"user": ("int64", 9), "item": ("int64", 9), "label": ("float32", None)}
    columns = {**features, **dict.fromkeys(names, ("float32", None))}
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {
                name: {"dtype": dtype} if cardinality is None else {"dtype": dtype, "cardinality": cardinality}
                for name, (dtype, cardinality) in columns.items()
            },
            "source_spec": {},
            "channel_spec": {"user": ["user"], "item": ["item"], "context": [*names], "label": ["label"]},
            "metadata": {},
        }
    )
    model = build("wide_deep", spec, hidden=(64, 64))
    bundle.save(folder, model, Card(model="wide_deep", settings=model.settings.model_dump(mode="json")))
    return bundle.load(folder)


def programs(trained: Bundle, form: str) -> tuple[dict[str, ModelProto], Check]:
    """A program at every precision, and the model to compare them with."""
    signature = signature_of(trained.spec, trained.model.features(), form)  # type: ignore[arg-type]
    check = Check(trained.model, signature, sample_of(trained, None))
    traced = onnx_graph.trace(Exportable(trained.model, signature).eval(), signature, check.examples)
    plain = onnx_graph.to_onnx(traced, signature)
    made = {precision: onnx_graph.narrow(copy.deepcopy(plain), precision) for precision in ("fp32", "bf16", "fp16")}
    products = onnx_graph.wide_products(plain)
    assert products
    return {**made, "int8": onnx_graph.with_int8_products(plain, products)}, check


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_feature_may_have_any_name_that_a_program_uses_inside(form: str, tmp_path: Path) -> None:
    plain, _ = programs(with_numbers(["price"], tmp_path / "plain"), form)
    used: set[str] = set()
    for program in plain.values():
        used |= {each.name for each in program.graph.initializer}
        used |= {name for node in program.graph.node for name in node.output}
    used |= {name.lstrip("_") for name in used}  # as torch named them
    names = sorted(used - {*OUTPUTS})[::9]
    assert len(names) > 9
    made, check = programs(with_numbers(names, tmp_path / "made"), form)
    for precision, program in made.items():
        assert {each.name for each in program.graph.input} == {"user", "item", *names}
        found = check.of(OnnxModel(program.SerializeToString(), check.signature, threads=1))
        assert found.finite
        assert found.largest < (2e-6 if precision == "fp32" else 0.1), precision


def test_a_feature_with_the_name_of_an_output_is_refused_before_the_work(tmp_path: Path) -> None:
    trained = with_numbers(["probability", "logit", "price"], tmp_path / "run")
    told: list[str] = []
    for settings in (QUICK, replace(QUICK, form="ranker"), replace(QUICK, format="triton")):
        with pytest.raises(ExportError) as caught:
            export(trained, tmp_path / "out", settings, tell=told.append)
        assert "feature 'logit': an output of the exported model has this name; rename the column" in str(caught.value)
        assert "feature 'probability': an output" in str(caught.value)
    assert not told
    assert not (tmp_path / "out").exists()


def test_a_prefix_that_no_name_has() -> None:
    assert unused_prefix([]) == unused_prefix(["a", "b_"]) == "_"
    assert unused_prefix(["_", "a"]) == unused_prefix(["_x"]) == "__"
    assert unused_prefix(["__x", "_"]) == "___"


# --- export.json, and what is refused --------------------------------------------------------------------------------


def test_export_json_says_what_was_measured(exported: Path) -> None:
    description = json.loads((exported / "export.json").read_text())
    assert [line["batch_size"] for line in description["latency"]] == [1, 3]
    assert {"p50_ms", "p90_ms", "p95_ms", "p99_ms", "rows_per_second"} <= set(description["latency"][0])
    assert description["size_bytes"] == (exported / "model.onnx").stat().st_size
    assert {"torch", "onnx", "onnxruntime", "recspec"} <= set(description["versions"])
    assert description["checked_on"].startswith("the first ")
    assert description["difference"]["drifts"] is False


def test_without_data_it_is_checked_on_made_up_rows(wide: Bundle) -> None:
    sample = sample_of(wide, None)
    assert sample.origin == "4,096 made-up rows"
    assert sample.labels is None
    assert set(sample.batch) == set(wide.model.features())


def test_rows_of_many_events_are_checked_in_smaller_number(
    bundled: Callable[..., Bundle], sequences: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    din = bundled("din")  # reads 6 events a row
    monkeypatch.setattr(exporter, "MOST_EVENTS", 60)
    monkeypatch.setattr(exporter, "FEWEST_ROWS", 3)
    assert sample_of(din, None).origin == "10 made-up rows"
    assert sample_of(din, sequences).origin == "the first 10 rows of test"
    monkeypatch.setattr(exporter, "MOST_EVENTS", 1)
    assert sample_of(din, None).origin == "3 made-up rows"
    sasrec = bundled("sasrec", length=5)  # knows the events of its users, and reads the last 5
    monkeypatch.setattr(exporter, "MOST_EVENTS", 45)
    assert sample_of(sasrec, None).origin == "9 made-up rows"


@pytest.mark.parametrize(
    ("mean", "largest", "drift", "broken"),
    [
        (0.00029, 0.01004, "0.00029 (allowed: 0.0005) on average and 0.01004", "largest difference"),
        (0.0006, 0.002, "0.0006 (allowed: 0.0005) on average and 0.002", "mean"),
        (0.000501, 0.02, "0.000501 (allowed: 0.0005) on average and 0.02", "mean and the largest difference"),
    ],
)
def test_the_error_names_the_bound_that_was_broken_with_digits_that_show_it(
    mean: float, largest: float, drift: str, broken: str
) -> None:
    told = drift_message(Difference(largest, mean, 7, True), 0.0005, "int8")
    assert f"drift by {drift} (allowed: 0.01) at most over 7 rows. The {broken} exceeded what is allowed." in told


def test_a_program_that_drifts_is_refused_and_leaves_nothing(
    traced_once: Bundle, clicks: FeatureSpec, tmp_path: Path
) -> None:
    wide, settings = traced_once, replace(QUICK, precision="bf16", tolerance=1e-9)
    with pytest.raises(ExportError, match=r"bf16: probabilities drift by .* on average .* Nothing was written; take"):
        export(wide, tmp_path / "out", settings, clicks)
    assert list(tmp_path.iterdir()) == []
    made = export(wide, tmp_path / "out", replace(settings, allow_drift=True), clicks)
    assert made.description["difference"]["drifts"] is True


def test_it_replaces_an_older_export_and_nothing_else(wide: Bundle, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="holds something that is no export"):
        export(wide, tmp_path / "mine", QUICK)
    with pytest.raises(ExportError, match=r"thesis\.txt: is a file; expected a folder"):
        export(wide, tmp_path / "mine" / "thesis.txt", QUICK)
    assert find_export(exported) == exported
    assert find_export(tmp_path / "mine") is None


def test_settings_are_checked_all_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        ExportSettings(format="pt2", precision="int8", tolerance=-1.0, batch_sizes=(0,))
    text = str(caught.value)
    assert "format pt2 has the precisions 'fp32', 'bf16'; take --format onnx for int8" in text
    assert "tolerance is -1.0; expected 0 or more" in text
    assert "batch sizes are [0]; expected whole numbers from 1" in text
    with pytest.raises(SettingsError, match=r"unknown format 'onx' \(did you mean 'onnx'\?\)"):
        ExportSettings(format="onx")  # type: ignore[arg-type]


def test_a_folder_that_is_no_export_is_told(tmp_path: Path, exported: Path) -> None:
    with pytest.raises(BundleError, match=r"export\.json: no such file; not an export"):
        open_exported_model(tmp_path / "nothing")
    (tmp_path / "export.json").write_text("{")
    with pytest.raises(BundleError, match=r"export\.json: damaged"):
        open_exported_model(tmp_path, verify=False)
    (tmp_path / "export.json").write_text((exported / "export.json").read_text())
    with pytest.raises(BundleError, match=r"neither model\.onnx nor model\.pt2; export it again"):
        open_exported_model(tmp_path, verify=False)
    (tmp_path / "model.onnx").write_bytes(b"not a program")
    with pytest.raises(BundleError, match=r"model\.onnx: "):
        open_exported_model(tmp_path, verify=False)


# --- precisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "share", "allowed"), [("fp16", 0.62, 1e-3), ("bf16", 0.62, 4e-3)])
def test_half_the_bits_take_half_the_bytes(
    precision: onnx_graph.Precision, share: float, allowed: float, wide: Bundle, exported: Path, clicks: FeatureSpec
) -> None:
    import onnx

    model = onnx.load(exported / "model.onnx")
    before = onnx_graph.num_weight_bytes(model)
    narrowed = onnx_graph.narrow(model, precision)
    assert onnx_graph.num_weight_bytes(narrowed) < share * before
    program = OnnxModel(narrowed.SerializeToString(), open_exported_model(exported).signature, threads=1)
    found = Check(wide.model, program.signature, sample_of(wide, clicks)).of(program)
    assert 0 < found.mean < allowed


def one_product(weight: np.ndarray) -> ModelProto:
    """ReLU(x) W, named "wide", with a weight (inputs, outputs)."""
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("MatMul", ["positive", "w"], ["probability"], name="wide"),
        helper.make_node("Identity", ["probability"], ["logit"]),
    ]

    def info(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])

    width, units = weight.shape
    outputs = [info(name, units) for name in ("probability", "logit")]
    graph = helper.make_graph(nodes, "g", [info("x", width)], outputs, [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    checker.check_model(model)
    return model


def of_numbers(model: ModelProto, width: int) -> OnnxModel:
    """A program that reads one vector of numbers, "x"."""
    return OnnxModel(model.SerializeToString(), Signature("rows", (Port("x", "float32", width, "row"),)), threads=1)


def test_int8_products_have_a_step_for_each_row_and_output() -> None:
    """x W with whole numbers in W: what is rounded is x (2, 64), to 255ths of its row's largest."""
    random = np.random.default_rng(0)
    weight = random.integers(-63, 64, (64, 64)).astype(np.float32)
    weight[0], weight[1] = 127.0, 0.0  # so that a column's step is 1
    model = one_product(weight)
    assert onnx_graph.wide_products(model) == ["wide"]
    program = of_numbers(onnx_graph.with_int8_products(model, ["wide"]), 64)
    x = random.random((2, 64)).astype(np.float32)
    x[1] *= 1000  # a row of another size takes no digit from the first
    found = program.run({"x": x})["probability"]
    step = x.max(axis=1, keepdims=True) / np.float32(255)
    expected = (np.rint(x / step) * step) @ weight
    assert (np.abs(found - expected) <= 1e-5 * np.abs(x).sum(axis=1, keepdims=True) * 127).all()
    assert np.abs(found[0] - x[0] @ weight).max() > 0


def stored(model: ModelProto, name: str) -> np.ndarray:
    """A constant of the product's int8 form."""
    from onnx import numpy_helper

    (found,) = [each for each in model.graph.initializer if each.name == f"probability.{name}"]
    return np.asarray(numpy_helper.to_array(found))


def test_two_neighbouring_weights_of_one_sign_have_an_int8_sum_of_at_most_128() -> None:
    """By hand, with one column each: neighbours are inputs 0 and 1, and 2 and 3."""
    columns = {
        "unlike signs": ([127, -127, 3, 0], 1, [127, -127, 3, 0]),
        "of two pairs": ([0, 127, 127, 0], 1, [0, 127, 127, 0]),
        "one sign": ([127, 127, 3, 0], 2, [64, 64, 2, 0]),
        "both below 0": ([0, 1, -100, -154], 2, [0, 0, -50, -77]),
        "a last input alone": ([64, 63, 0, 0, 127], 1, [64, 63, 0, 0, 127]),
    }
    for what, (weight, step, expected) in columns.items():
        made = onnx_graph.with_int8_products(one_product(np.array([weight], np.float32).T.repeat(2, 1)), ["wide"])
        assert stored(made, "weight")[:, 0].tolist() == expected, what
        assert stored(made, "steps") == pytest.approx([step, step]), what


@pytest.mark.parametrize("width", [64, 67, 400])
def test_int8_products_are_exact_on_every_cpu(width: int) -> None:
    """Inputs of 0 and the row's largest become 0 and 255, beside which two products overflow 16 bits most easily."""
    random = np.random.default_rng(width)
    made = onnx_graph.with_int8_products(one_product(random.normal(size=(width, 64)).astype(np.float32)), ["wide"])
    weight, steps = stored(made, "weight").astype(np.int64), stored(made, "steps").astype(np.float64)
    for sign in (1, -1):
        one_sign = np.maximum(sign * weight, 0)
        assert (one_sign[:-1:2] + one_sign[1::2]).max() <= 128
    program = of_numbers(made, width)
    for rows in (1, 2, 7, 64):
        digits = 255 * (weight.T[:rows] > 0)  # every product of a row's own column is above 0
        found = program.run({"x": digits.astype(np.float32)})["probability"]
        np.testing.assert_allclose(found, digits @ weight * steps, rtol=1e-5, atol=1e-2)


def test_int8_keeps_to_its_tolerance_by_leaving_products_out(
    traced_once: Bundle, clicks: FeatureSpec, tmp_path: Path
) -> None:
    wide = traced_once
    loose = export(wide, tmp_path / "all", replace(QUICK, precision="int8", allow_drift=True), clicks).description
    assert "in fp32, without which" not in loose["computed"]
    assert loose["difference"]["mean"] > 0
    tolerance = 0.9 * loose["difference"]["mean"]
    stages: list[str] = []
    tighter = replace(QUICK, precision="int8", tolerance=tolerance)
    tight = export(wide, tmp_path / "some", tighter, clicks, tell=stages.append).description
    assert "1 product stays in fp32, without which the export would drift too far" in tight["computed"]
    assert tight["difference"]["mean"] <= tolerance
    assert [stage for stage in stages if "int8" in stage] == [
        "tracing the model in int8",
        "comparing int8 with the model",
        *(f"it drifts too far: measuring product {place} of 3 in int8 alone" for place in (1, 2, 3)),
        "comparing int8 without 1 of 3 products",
    ]


def test_a_model_too_narrow_for_int8_says_so(
    traced_once: Bundle, clicks: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_graph, "NARROWEST", 65)
    with pytest.raises(ExportError, match="no matrix product with 65 inputs and outputs or more"):
        export(traced_once, tmp_path / "out", replace(QUICK, precision="int8"), clicks)


# --- pt2 -------------------------------------------------------------------------------------------------------------


def test_pt2_without_a_compiler_says_what_to_install(
    wide: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ExportError, match="compiles the model with 'no-such-compiler', which is not installed; install"
    ):
        export(wide, tmp_path / "out", replace(QUICK, format="pt2"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_model_is_compiled_ahead_of_time(
    name: str,
    precision: onnx_graph.Precision,
    bundled: Callable[..., Bundle],
    read_by: Callable[[str], FeatureSpec],
    tmp_path: Path,
) -> None:
    settings = replace(QUICK, format="pt2", precision=precision, tolerance=None if precision == "fp32" else 1e-2)
    made = export(bundled(name), tmp_path / "out", settings, read_by(name))
    assert {path.name for path in made.folder.iterdir()} == {"manifest.json", "model.pt2", "export.json"}
    program = open_exported_model(made.folder)
    check = Check(bundled(name).model, program.signature, sample_of(bundled(name), read_by(name)))
    assert_ids_outside_their_range_are_unknown(program, check.call(range(7)))


# --- Triton ----------------------------------------------------------------------------------------------------------

PORTS = (Port("user id", "int64", 1, "request", 5), Port("tags", "int32", 3, "item", 9, is_list=True))

ROWS = """\
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 100
input { name: "user id" data_type: TYPE_INT64 dims: [ 1 ] }
input { name: "tags" data_type: TYPE_INT32 dims: [ 3 ] }
output { name: "probability" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "logit" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching {
  preferred_batch_size: [ 8, 64 ]
  max_queue_delay_microseconds: 50
}
"""

RANKER = """\
name: "m"
backend: "python"
max_batch_size: 0
input { name: "user id" data_type: TYPE_INT64 dims: [ 1, 1 ] }
input { name: "tags" data_type: TYPE_INT32 dims: [ -1, 3 ] }
output { name: "probability" data_type: TYPE_FP32 dims: [ -1, 1 ] }
output { name: "logit" data_type: TYPE_FP32 dims: [ -1, 1 ] }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def test_the_configuration_is_what_triton_reads_to_the_letter(tmp_path: Path) -> None:
    batching = Batching(max_batch_size=100, preferred=(8, 64), max_queue_delay_microseconds=50)
    Staged(tmp_path / "a", 1).write_model("m", Signature("rows", PORTS), "onnxruntime", batching)
    assert (tmp_path / "a" / "m" / "config.pbtxt").read_text() == ROWS
    Staged(tmp_path / "b", 1).write_model("m", Signature("ranker", PORTS), "python", batching)
    assert (tmp_path / "b" / "m" / "config.pbtxt").read_text() == RANKER
    assert (tmp_path / "b" / "m" / "1" / "model.py").is_file()


def test_a_repository_holds_models_versions_and_the_ensemble_of_raw_values(
    traced_once: Bundle, clicks: FeatureSpec, tmp_path: Path
) -> None:
    wide, settings = traced_once, replace(QUICK, format="triton")
    first, second = (export(wide, tmp_path / "models", settings, clicks) for _ in range(2))
    assert (first.folder, second.folder) == (
        tmp_path / "models" / "wide_deep" / "1",
        tmp_path / "models" / "wide_deep" / "2",
    )
    assert second.description["triton"] == {
        "model": "wide_deep",
        "version": 2,
        "backend": "onnxruntime",
        "raw": "wide_deep_raw",
    }
    for name in ("wide_deep", "wide_deep_encode", "wide_deep_raw"):
        assert triton_repository.versions(tmp_path / "models" / name) == [1, 2]
    assert find_export(tmp_path / "models" / "wide_deep") == second.folder
    with pytest.raises(ExportError, match=r"takes other inputs or another backend .* give this one another --name"):
        export(wide, tmp_path / "models", replace(settings, triton_backend="python"), clicks)
    assert triton_repository.versions(tmp_path / "models" / "wide_deep") == [1, 2]
    with pytest.raises(SettingsError, match="--name 'a/b': expected letters, digits"):
        export(wide, tmp_path / "models", replace(settings, name="a/b"), clicks)


# --- tracing ---------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_traced_is_told_with_torchs_reason() -> None:
    class Stubborn(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    signature = Signature("rows", (Port("x", "float32", 1, "row"),))
    with pytest.raises(ExportError, match=r"torch\.export can't trace the model: "):
        onnx_graph.trace(Stubborn(), signature, [torch.randn(7, 1)])


def test_the_same_model_can_be_used_after_it_was_traced(bundled: Callable[..., Bundle]) -> None:
    trained = bundled("dlrm")
    signature = signature_of(trained.spec, trained.model.features(), "rows")
    check = Check(trained.model, signature, sample_of(trained, None))
    for _ in range(2):  # nothing of the first tracing is left over for the second
        onnx_graph.trace(Exportable(trained.model, signature).eval(), signature, check.examples)
    assert check.of(EagerModel(trained.model, signature)).largest < 1e-6


# --- the command -----------------------------------------------------------------------------------------------------

TRITON = "tritonserver --model-repository=out --model-control-mode=explicit --load-model="


@pytest.mark.parametrize(
    ("form", "triton", "following"),
    [
        ("rows", None, "recspec serve out"),
        ("ranker", None, "recspec bench infer run out --form ranker"),
        ("rows", {"model": "ctr", "raw": "none: unknown"}, f"{TRITON}ctr"),
        ("rows", {"model": "ctr", "raw": "ctr_raw"}, f"{TRITON}ctr_raw"),
        ("ranker", {"model": "ctr", "raw": "ctr_raw", "recommend": "ctr_recommend"}, f"{TRITON}ctr_recommend"),
    ],
)
def test_the_next_command_is_one_that_takes_the_export(
    form: str,
    triton: dict[str, str] | None,
    following: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    description = {"signature": {"form": form}, **({"triton": triton} if triton else {})}
    monkeypatch.setattr("recspec.api.export", lambda *_, **__: Exported(Path("out"), description))
    monkeypatch.setattr(sys, "argv", ["recspec", "export", "run", "out", "--json"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert capsys.readouterr().err == f"next: {following}\n"


def test_the_command_writes_a_program_and_refuses_one_that_drifts(
    traced_once: Bundle,
    clicks: FeatureSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["recspec", "export", str(traced_once.folder), *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1
        return 0

    data = ("--data", clicks.folder, "--batch-sizes", "1", "--threads", "1")
    assert run(tmp_path / "out", *data, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["precision"] == "fp32"
    assert printed.err.splitlines() == [
        "reading rows to check the export on ...",
        "tracing the model in fp32 ...",
        "comparing the export with the model on the first 398 rows of test ...",
        "measuring latency of batches of size 1 ...",
        f"next: recspec serve {shlex.quote(str(tmp_path / 'out'))}",
    ]
    assert run(tmp_path / "drifts", *data, "--precision", "int8", "--tolerance", "0") == 2
    assert "error: int8: probabilities drift by" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "drifts").exists()
    assert run(tmp_path / "drifts", *data, "--precision", "int8", "--tolerance", "0", "--allow-drift") == 0
    printed = capsys.readouterr()
    assert "int8: matrix products with at least 64 inputs" in printed.out
    assert "note: the program drifts beyond its tolerance" in printed.err.replace("\n", " ")
    assert run(tmp_path / "sizes", "--batch-sizes", "1,x") == 2
    assert "--batch-sizes '1,x': expected whole numbers from 1 between commas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("signature.outputs", None, "signature.outputs: Input should be a valid list; found None"),
        ("signature.outputs", ["x"], "signature: outputs is ['x']; expected ['probability', 'logit'] or ['sigmoid',"),
        ("signature.inputs", [], "signature.inputs: List should have at least 1 item after validation, not 0"),
        ("signature.inputs.0.width", 0, "signature.inputs.0.width: Input should be greater than or equal to 1"),
        ("signature.inputs.0.num_ids", None, "signature.inputs.0: dtype is int64 and num_ids None; ids have num_ids"),
        ("signature.inputs.0.dtype", "string", "signature.inputs.0.dtype: Input should be 'int32'"),
        ("signature.form", "x", "signature.form: Input should be 'rows' or 'ranker'; found 'x'"),
        ("signature", [1], "signature: expected an object; found [1]"),
        ("difference.allowed_largest", "x", "difference.allowed_largest: Input should be a valid number; found 'x'"),
        ("precision", 3, "precision: Input should be a valid string; found 3"),
    ],
)
def test_a_description_that_is_not_as_written_is_refused_by_file_and_field(
    tmp_path: Path, place: str, value: object, told: str
) -> None:
    port = {"name": "item_id", "dtype": "int64", "width": 1, "level": "row", "num_ids": 9, "is_list": False}
    description: Any = {
        "signature": {"form": "rows", "inputs": [port], "outputs": ["probability", "logit"]},
        "difference": {"allowed_largest": 0.1},
        "precision": "fp32",
    }
    file = tmp_path / "export.json"
    file.write_text(json.dumps(description))
    assert read_description(tmp_path) == description
    *path, last = place.split(".")
    within = description
    for name in path:
        within = within[int(name) if name.isdigit() else name]
    within[last] = value
    file.write_text(json.dumps(description))
    with pytest.raises(BundleError) as caught:
        read_description(tmp_path)
    assert f"{file}: damaged: {told}" in str(caught.value)


def test_trees_on_numbers_beside_their_buckets_are_exported(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=1000), "y": rng.normal(size=1000), "clicked": rng.integers(0, 2, 1000)}
    data = rs.prepare(pa.table(rows), tmp_path / "data", label="clicked", progress=False)
    assert {"x", "x_bucket"} <= {*data.spec.inputs()}
    model = rs.train("lightgbm", data, tmp_path / "run", trees=2, progress=False)
    model.export(tmp_path / "onnx")  # which compares it with the model
    assert read_description(tmp_path / "onnx")["signature"]["form"] == "rows"
