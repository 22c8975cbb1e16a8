"""Fewer nodes, the same function."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from recspec.export import onnx_graph
from recspec.export.exported_model import BLOCK, OnnxModel
from recspec.export.onnx_rewrite import numbers_apart, simplify
from recspec.feature_spec.signature import Port, Signature
from tests.closeness import assert_close

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

PORTS = tuple(Port(name, "int64", 1, "row", 5) for name in "ab") + tuple(Port(n, "float32", 1, "row") for n in "xy")


def graph(nodes: list[object], constants: dict[str, np.ndarray], outputs: dict[str, int]) -> object:
    kinds = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(port.name, kinds[port.dtype], ["rows", 1]) for port in PORTS]
    given = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    ends = [helper.make_tensor_value_info(name, kinds["float32"], ["rows", width]) for name, width in outputs.items()]
    made = helper.make_graph(nodes, "made", inputs, ends, given)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def as_exported() -> object:
    """Two ids of one table (the second from row 5 on) beside two numbers, times a weight."""
    table, weight = np.arange(20, dtype=np.float32).reshape(10, 2) / 10, np.arange(24, dtype=np.float32).reshape(4, 6)
    nodes = []
    for name in "abxy":
        nodes.append(helper.make_node("Squeeze", [name, "one"], [f"{name}1"]))
    nodes += [
        helper.make_node("Add", ["b1", "five"], ["b2"]),
        helper.make_node("Unsqueeze", ["a1", "one"], ["a3"]),
        helper.make_node("Unsqueeze", ["b2", "one"], ["b3"]),
        helper.make_node("Concat", ["a3", "b3"], ["ids"], axis=1),
        helper.make_node("Gather", ["table", "ids"], ["vectors"]),
        helper.make_node("Reshape", ["vectors", "flat"], ["wide"]),
        helper.make_node("Unsqueeze", ["x1", "one"], ["x3"]),
        helper.make_node("Unsqueeze", ["y1", "one"], ["y3"]),
        helper.make_node("Concat", ["x3", "y3"], ["numbers"], axis=1),
        helper.make_node("Concat", ["wide", "numbers"], ["joined"], axis=1),
        helper.make_node("Gemm", ["joined", "turned", "bias"], ["probability"], name="product"),
        helper.make_node("Identity", ["probability"], ["logit"]),
    ]
    constants = {
        "one": np.array([1]),
        "five": np.array(5),
        "flat": np.array([-1, 4]),
        "table": table,
        "turned": weight.T,
        "bias": np.array([1, 2, 3, 4], np.float32),
    }
    return graph(nodes, constants, {"probability": 4, "logit": 4})


def answers(model: object, rows: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(rows, 1)).astype(np.float32)
    inputs = {port.name: rng.integers(0, 5, (rows, 1)) if port.num_ids else numbers for port in PORTS}
    program = OnnxModel(model.SerializeToString(), Signature("rows", PORTS), threads=1)  # type: ignore[attr-defined]
    return program.run(inputs)


def kinds(model: object) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [1, 3])
def test_columns_are_joined_first(rows: int) -> None:
    expected = answers(as_exported(), rows)
    made = simplify(as_exported())
    assert kinds(made) == Counter(Concat=3, Add=1, Gather=1, Reshape=1, Gemm=1, Identity=1)
    assert {each.name for each in made.graph.initializer} == {"ids.added", "table", "flat", "turned", "bias"}
    for name, found in answers(made, rows).items():
        assert_close(found, expected[name])


class Turned(torch.nn.Module):
    """A weight (100, 100) that is turned and scaled in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(10_000.0).reshape(100, 100) / 10_000)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.cat(inputs, 1) @ (self.weight.T * 2)
        return made.sum(1, keepdim=True), made


def test_constants_of_any_size_are_computed_once() -> None:
    ports = tuple(Port(name, "float32", 50, "row") for name in "xy")
    signature = Signature("rows", ports)
    traced = onnx_graph.trace(Turned(), signature, [torch.ones(3, 50)] * 2)
    made = onnx_graph.to_onnx(traced, signature)
    assert kinds(made) == Counter(Concat=1, MatMul=1, ReduceSum=1)
    assert [each.dims for each in made.graph.initializer if len(each.dims) == 2] == [[100, 100]]


def test_numbers_are_multiplied_apart_from_embeddings() -> None:
    expected = answers(as_exported())
    made = numbers_apart(simplify(as_exported()), ["product"])
    shapes = {each.name: tuple(each.dims) for each in made.graph.initializer if each.name.startswith("probability")}
    assert shapes == {"probability.embedded": (4, 4), "probability.raw": (2, 4)}
    for name, found in answers(made).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-6)
    assert numbers_apart(simplify(as_exported()), []) == simplify(as_exported())


def test_numbers_are_found_in_a_concat_of_concats() -> None:
    """A deep part may join embeddings with numbers, and then with more embeddings."""

    def nested() -> object:
        model = as_exported()
        nodes = list(model.graph.node)  # type: ignore[attr-defined]
        at = next(place for place, node in enumerate(nodes) if node.output[0] == "joined")
        nodes[at : at + 1] = [
            helper.make_node("Concat", ["numbers"], ["inner"], axis=1),
            helper.make_node("Concat", ["wide", "inner"], ["outer"], axis=1),
            helper.make_node("Concat", ["outer"], ["joined"], axis=1),
        ]
        del model.graph.node[:]  # type: ignore[attr-defined]
        model.graph.node.extend(nodes)  # type: ignore[attr-defined]
        return model

    made = numbers_apart(simplify(nested()), ["product"])
    assert {each.name for each in made.graph.initializer} >= {"probability.embedded", "probability.raw"}


@pytest.mark.parametrize("numbers", [["x"], ["x", "y"]])
@pytest.mark.parametrize("first", [False, True])
def test_numbers_are_found_on_both_sides_and_alone(numbers: list[str], first: bool) -> None:
    def made(*parts: str) -> object:
        nodes = [
            helper.make_node("Gather", ["table", "a"], ["vectors"]),
            helper.make_node("Reshape", ["vectors", "flat"], ["wide"]),
            helper.make_node("Concat", numbers, ["numbers"], axis=1),
            helper.make_node("Concat", parts, ["joined"], axis=1),
            helper.make_node("MatMul", ["joined", "weight"], ["made"], name="product"),
            helper.make_node("Identity", ["made"], ["probability"]),
            helper.make_node("Identity", ["made"], ["logit"]),
        ]
        rows = len(numbers) + 2 if "wide" in parts else len(parts)
        given = {
            "table": np.arange(10, dtype=np.float32).reshape(5, 2),
            "flat": np.array([-1, 2]),
            "weight": np.arange(3 * rows, dtype=np.float32).reshape(rows, 3),
        }
        return simplify(graph(nodes, given, {"probability": 3, "logit": 3}))

    parts = ("numbers", "wide") if first else ("wide", "numbers")
    expected = answers(made(*parts))["probability"]
    split = numbers_apart(made(*parts), ["product"])
    shapes = {each.name.rpartition(".")[2]: tuple(each.dims) for each in split.graph.initializer}
    assert shapes["embedded"] == (2, 3)
    assert shapes["raw"] == (len(numbers), 3)
    np.testing.assert_allclose(answers(split)["probability"], expected, rtol=1e-6)
    assert numbers_apart(made("x", "y"), ["product"]) == made("x", "y")  # nothing beside numbers


def test_ids_of_two_types_are_cast_one_by_one() -> None:
    nodes: list[object] = []
    for name in "ax":
        nodes += [
            helper.make_node("Squeeze", [name, "one"], [f"{name}1"]),
            helper.make_node("Cast", [f"{name}1"], [f"{name}2"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Unsqueeze", [f"{name}2", "one"], [f"{name}3"]),
        ]
    nodes += [
        helper.make_node("Concat", ["a3", "x3"], ["probability"], axis=1),
        helper.make_node("Identity", ["probability"], ["logit"]),
    ]

    def made() -> object:
        return graph(nodes, {"one": np.array([1])}, {"probability": 2, "logit": 2})

    assert_close(answers(simplify(made()))["probability"], answers(made())["probability"])


def test_what_is_read_twice_or_is_an_output_stays() -> None:
    nodes = [
        helper.make_node("Concat", ["x", "y"], ["numbers"], axis=1),
        helper.make_node("Identity", ["numbers"], ["logit"]),
        helper.make_node("Add", ["numbers", "one"], ["probability"]),
    ]
    made = simplify(graph(nodes, {"one": np.ones(2, np.float32)}, {"probability": 2, "logit": 2}))
    assert_close(answers(made)["probability"], answers(made)["logit"] + 1)


COLUMN = np.array([2.0, -1.0], np.float32)
PRODUCTS = {
    "a vector": (helper.make_node("MatMul", ["numbers", "w"], ["made"]), COLUMN, None),
    "a column": (helper.make_node("MatMul", ["numbers", "w"], ["made"]), COLUMN[:, None], None),
    "a column with a bias": (helper.make_node("Gemm", ["numbers", "w", "bias"], ["made"]), COLUMN[:, None], None),
    "a turned row": (helper.make_node("Gemm", ["numbers", "w", "bias"], ["made"], transB=1), COLUMN[None], None),
    "a vector, three dimensions": (helper.make_node("MatMul", ["numbers", "w"], ["made"]), COLUMN, [1, -1, 1, 2]),
    "a column, three dimensions": (helper.make_node("MatMul", ["numbers", "w"], ["made"]), COLUMN[:, None], [1, -1, 2]),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("what", PRODUCTS)
def test_a_product_with_one_column_is_computed_from_the_column_s_side(what: str, rows: int) -> None:
    node, weight, shape = PRODUCTS[what]

    def made() -> object:
        nodes = [helper.make_node("Concat", ["x", "y"], ["joined"], axis=1)]
        if shape is None:
            nodes.append(helper.make_node("Identity", ["joined"], ["numbers"]))
        else:
            nodes.append(helper.make_node("Reshape", ["joined", "to"], ["numbers"]))
        nodes += [
            node,
            helper.make_node("Reshape", ["made", "rows"], ["probability"]),
            helper.make_node("Shape", ["made"], ["lengths"]),
            helper.make_node("Cast", ["lengths"], ["cast"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["cast", "one"], ["logit"]),  # the shape, too
        ]
        constants = {"w": weight, "rows": np.array([-1, 1]), "one": np.array([1]), "to": np.array(shape or [0])}
        return graph(nodes, {**constants, "bias": np.array([0.5], np.float32)}, {"probability": 1, "logit": 1})

    turned = simplify(made())
    (product,) = [each for each in turned.graph.node if each.op_type in ("Gemm", "MatMul")]  # type: ignore[attr-defined]
    assert product.op_type == "Gemm"
    assert product.input[0] == "made.row"
    expected, found = answers(made(), rows), answers(turned, rows)
    assert_close(found["probability"], expected["probability"])
    assert found["logit"].tolist() == expected["logit"].tolist()
    by_hand = answers(made(), 1)["probability"][0, 0]  # x = y = .1257, so 2 x - y is x
    assert by_hand == pytest.approx(0.12573022 + (0.5 if len(node.input) > 2 else 0))


@pytest.mark.parametrize(
    ("node", "weight"),
    [
        (helper.make_node("MatMul", ["numbers", "w"], ["probability"]), np.ones((2, 3), np.float32)),
        (helper.make_node("Gemm", ["numbers", "w"], ["probability"], alpha=2.0), np.ones((2, 1), np.float32)),
        (helper.make_node("Gemm", ["numbers", "w", "x"], ["probability"], beta=0.5), np.ones((2, 1), np.float32)),
        (helper.make_node("Gemm", ["numbers", "w", "x"], ["probability"]), np.ones((2, 1), np.float32)),
        (helper.make_node("MatMul", ["numbers", "computed"], ["probability"]), np.ones((2, 1), np.float32)),
    ],
    ids=["several columns", "a factor", "a factor of the bias", "a bias for each row", "no constant"],
)
def test_other_products_stay(node: object, weight: np.ndarray) -> None:
    def made() -> object:
        nodes = [
            helper.make_node("Concat", ["x", "y"], ["numbers"], axis=1),
            helper.make_node("Relu", ["w"], ["computed"]),
            node,
            helper.make_node("Identity", ["probability"], ["logit"]),
        ]
        return graph(nodes, {"w": weight}, {"probability": weight.shape[1], "logit": weight.shape[1]})

    found = simplify(made())
    assert [each for each in found.graph.node if each.output[0] == "probability"] == [node]  # type: ignore[attr-defined]
    assert_close(answers(found)["probability"], answers(made())["probability"])


def test_many_rows_are_computed_in_blocks() -> None:
    model = simplify(as_exported())
    whole, rows = answers(model, 2 * BLOCK + 3), 2 * BLOCK + 3
    assert whole["probability"].shape == (rows, 4)
    assert_close(whole["probability"], answers(as_exported(), rows)["probability"])


@pytest.mark.parametrize("positive", [True, False])
def test_a_row_of_zeros_has_int8_products_too_and_no_rows_have_none(positive: bool) -> None:
    """All units off: its step is 0, and what is left is the bias."""
    from recspec.export.onnx_graph import with_int8_products

    nodes = [
        helper.make_node("Concat", ["x", "y"], ["numbers"], axis=1),
        helper.make_node("Relu", ["numbers"], ["positive"]),
        helper.make_node("Max", ["numbers", "zero"], ["unsure"]),  # not known to be positive
        helper.make_node(
            "Gemm", ["positive" if positive else "unsure", "weight", "bias"], ["probability"], name="product"
        ),
        helper.make_node("Identity", ["probability"], ["logit"]),
    ]
    weight, bias = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32), np.array([0.25, -1.0], np.float32)
    constants = {"weight": weight, "bias": bias, "zero": np.zeros((), np.float32)}
    model = graph(nodes, constants, {"probability": 2, "logit": 2})
    program = OnnxModel(
        with_int8_products(model, ["product"]).SerializeToString(),
        Signature("rows", PORTS[2:]),
        threads=1,
    )
    inputs = {"x": np.array([[-1.0], [1.0], [0.0]], np.float32), "y": np.array([[-2.0], [0.0], [0.0]], np.float32)}
    zeros = {port.name: np.zeros((3, 1), np.int64) for port in PORTS[:2]}
    found = program.run(inputs | zeros)["probability"]
    np.testing.assert_array_equal(found[[0, 2]], [bias, bias])
    np.testing.assert_allclose(found[1], weight[0] + bias, atol=0.02)
    nothing = program.run({name: values[:0] for name, values in (inputs | zeros).items()})
    assert {values.shape for values in nothing.values()} == {(0, 2)}


def test_a_sigmoid_that_is_an_output_keeps_small_values_apart() -> None:
    nodes = [
        helper.make_node("Concat", ["x", "y"], ["joined"], axis=1),
        helper.make_node("Mul", ["joined", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "logits"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["probability"]),
    ]
    logits = np.array([-85.0, -40.0, -39.0, -20.7, -18.0, 0.0, 1.0, 40.0, 120.0], np.float32)
    given = {"zero": np.zeros(2, np.float32), "logits": logits[:2]}
    found = []
    for pair in np.resize(logits, 10).reshape(-1, 2):
        given["logits"] = pair
        model = simplify(graph(nodes, given, {"probability": 2, "logit": 2}))
        found += answers(model)["probability"][0].tolist()
    np.testing.assert_allclose(found[: len(logits)], 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("reduction", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"])
def test_reductions_of_any_number_of_rows_have_their_shape(reduction: str, rows: int) -> None:
    nodes = [
        helper.make_node("Concat", ["x", "y"], ["joined"], axis=1),
        helper.make_node(reduction, ["joined", "last"], ["logit"], keepdims=1),
        helper.make_node(reduction, ["joined", "last"], ["flat"], keepdims=0),
        helper.make_node("Unsqueeze", ["flat", "one"], ["probability"]),
    ]
    constants = {"last": np.array([-1]), "one": np.array([1])}
    found = answers(simplify(graph(nodes, constants, {"probability": 1, "logit": 1})), rows)
    assert {name: values.shape for name, values in found.items()} == {"probability": (rows, 1), "logit": (rows, 1)}
    assert_close(found["probability"], found["logit"])
