"""A module as an ONNX program, and the same program with narrower weights.

`HOW` describes each precision. A narrowed program keeps its inputs and outputs.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from recspec.base.errors import ExportError, require_extra
from recspec.export import tree_ensemble
from recspec.export.exported_model import unused_prefix
from recspec.export.onnx_rewrite import (
    drop_unused,
    is_plain_product,
    make_node,
    numbers_apart,
    ranks_of,
    refill,
    simplify,
)
from recspec.feature_spec import Signature

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto, TensorProto


Precision = Literal["fp32", "bf16", "fp16", "int8"]

HOW: dict[Precision, str] = {
    "fp32": "weights and products in fp32",
    "bf16": "weights stored in bf16 and widened to fp32 when the program is loaded; products in fp32, since ONNX "
    "Runtime multiplies no bf16 on this kind of CPU (format pt2 does)",
    "fp16": "weights in fp16; matrix products in fp16 where the device has them (a GPU), in fp32 on a CPU, which "
    "widens both factors",
    "int8": "matrix products with at least 64 inputs and outputs in int8, with sums exact on every CPU: weights "
    "with a step for each output, inputs with a step for each row, found as it comes; raw numbers beside embeddings, "
    "and all else, in fp32",
}

MOST_ROWS = 1 << 24  # upper end of the dynamic number of rows
LARGEST_FILE = 1 << 30  # bytes of weights up to which a program is one file: protobuf ends at 2 GiB
NARROWEST = 64  # products with fewer inputs or outputs stay in fp32 under int8: they cost little and err most


def trace(module: nn.Module, signature: Signature, examples: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """A module as torch's graph, with any number of rows (or candidates)."""
    rows = torch.export.Dim("rows", min=1, max=MOST_ROWS)
    dynamic = tuple({} if port.level == "request" else {0: rows} for port in signature.inputs)
    try:
        with torch.no_grad(), quietly():
            return torch.export.export(module, tuple(examples), dynamic_shapes=(dynamic,))
    except Exception as error:  # torch raises many kinds, some of them private
        raise ExportError(f"torch.export can't trace the model: {short(error)}") from error


def to_onnx(
    program: torch.export.ExportedProgram, signature: Signature, outputs: Sequence[str] | None = None
) -> ModelProto:
    """A traced program as ONNX, checked.

    Names inside it have a prefix that no feature's name has. Narrowing derives further names from these.

    Raises:
        ExportError: if torch can't express the program, or a feature has the name of an output.
    """
    require_extra("onnx", "onnx")
    optimizer = require_extra("onnxscript.optimizer", "onnx")
    outputs = outputs or signature.outputs
    refuse_output_names(signature, outputs)
    try:
        with quietly():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, custom_translation_table=tree_ensemble.translations(program)
            )
            assert made is not None, "torch.onnx.export gives a program where it is given no file"
            # torch computes small constants alone; a weight that is turned or cut has to be one to be narrowed
            optimizer.fold_constants(made.model, input_size_limit=LARGEST_FILE, output_size_limit=LARGEST_FILE)
    except Exception as error:
        raise ExportError(f"torch.onnx can't express the model: {short(error)}") from error
    model: ModelProto = made.model_proto
    del model.graph.value_info[:]  # shapes inside the graph, which narrowing would make wrong
    model.producer_name, model.doc_string = "recspec", ""
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces, with the paths of the machine that exported
        node.doc_string = ""
    for found in (model.graph, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del found.metadata_props[:]
    del model.functions[:]
    model = _named(simplify(model), [port.name for port in signature.inputs], outputs)
    for found, port in zip(model.graph.input, signature.inputs, strict=True):
        found.doc_string = port.ids
    return model


def refuse_output_names(signature: Signature, outputs: Sequence[str] | None = None) -> None:
    """Refuse features with the name of an output: ONNX keeps inputs and outputs in one list of names.

    Raises:
        ExportError: with every such feature.
    """
    problems = [
        f"feature '{port.name}': an output of the exported model has this name; rename the column of the raw files, "
        "and prepare and train again"
        for port in signature.inputs
        if port.name in (outputs or signature.outputs)
    ]
    ExportError.refuse("export", problems)


def _named(model: ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> ModelProto:
    """Name the inputs and outputs, and put a prefix before all other names; changes `model`."""
    graph, prefix = model.graph, unused_prefix(inputs)
    ends = [*graph.input, *graph.output]
    names = dict(zip((each.name for each in ends), (*inputs, *outputs), strict=True))

    def new(name: str) -> str:
        return names.get(name, f"{prefix}{name}") if name else ""  # an input that is left out has no name

    for node in graph.node:
        refill(node.input, [new(name) for name in node.input])
        refill(node.output, [new(name) for name in node.output])
    for each in (*ends, *graph.initializer):
        each.name = new(each.name)
    return model


def save(model: ModelProto, file: str) -> None:
    """Write a program; weights beyond `LARGEST_FILE` lie beside it in `<file>.data`."""
    onnx = require_extra("onnx", "onnx")
    large = num_weight_bytes(model) > LARGEST_FILE
    beside = f"{file.rsplit('/', 1)[-1]}.data"
    onnx.save_model(model, file, save_as_external_data=large, location=beside if large else None)


def num_weight_bytes(model: ModelProto) -> int:
    """Bytes of all weights."""
    return sum(len(each.raw_data) for each in model.graph.initializer)


# --- narrower --------------------------------------------------------------------------------------------------------


def narrow(model: ModelProto, precision: Precision) -> ModelProto:
    """Store matrices in 16 bits, widened before they are read; in fp16 matrix products too. Changes `model`."""
    from onnx import TensorProto

    assert precision != "int8", "int8 has its own products"
    if precision == "fp32":
        return model
    narrow_type = TensorProto.FLOAT16 if precision == "fp16" else TensorProto.BFLOAT16
    weights = _matrices(model)
    made: list[NodeProto] = []
    for node in model.graph.node:
        product = precision == "fp16" and node.op_type in ("MatMul", "Gemm")
        if product and node.input[1] in weights and node.output:
            made += _narrow_product(node, weights, narrow_type)
        else:
            made.append(node)
    used = {name for node in made for name in node.input}
    widened: list[NodeProto] = []
    for name, weight in weights.items():
        weight.CopyFrom(_converted(weight, narrow_type))
        weight.name = f"{name}.{precision}"
        if name in used:
            widened.append(make_node("Cast", [weight.name], name, name=f"widen {name}", to=TensorProto.FLOAT))
    refill(model.graph.node, [*widened, *made])
    return model


def _narrow_product(node: NodeProto, weights: Collection[str], narrow_type: int) -> list[NodeProto]:
    """A product with a weight in 16 bits: cast its inputs, multiply, cast its output."""
    from onnx import TensorProto

    output, nodes, inputs = node.output[0], [], []
    inside = f"{node.input[1]}.{output}"  # the name of a weight has the prefix, that of an output hasn't
    for place, name in enumerate(node.input):
        if not name or name in weights:
            inputs.append(f"{name}.fp16" if name else name)
            continue
        inputs.append(f"{inside}.in{place}")
        nodes.append(make_node("Cast", [name], inputs[-1], to=narrow_type))
    own = make_node(node.op_type, inputs, f"{inside}.fp16", name=node.name)
    own.attribute.extend(node.attribute)
    return [*nodes, own, make_node("Cast", [f"{inside}.fp16"], output, name=f"{output}.out", to=TensorProto.FLOAT)]


def wide_products(model: ModelProto) -> list[str]:
    """Names of the products with a constant matrix that `int8` narrows, in the order of the program."""
    weights = _matrices(model)
    return [
        node.name
        for node in model.graph.node
        if is_plain_product(node)
        and node.input[1] in weights
        and len(weights[node.input[1]].dims) == 2
        and min(weights[node.input[1]].dims) >= NARROWEST
    ]


def with_int8_products(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The program with some of its `wide_products` in int8; changes `model`.

    Inputs x (B, K) of a product are rounded to multiples of their row's step s = (max - min) / 255, from min on (from 0
    if all are at least 0); weights W (K, N) to multiples of their column's step (`_weight_steps`). With one step for a
    batch, as in ONNX Runtime's own dynamic quantisation, a large value takes digits from all rows: half as much error
    again on an MLP of 5 x 1024.
    """
    from onnx import helper

    model = numbers_apart(model, names)
    weights, positive, ranks = _matrices(model), _never_negative(model), ranks_of(model)
    made: list[NodeProto] = []
    for node in model.graph.node:
        if node.name not in names:
            made.append(node)
            continue
        is_positive, flat = node.input[0] in positive, ranks.get(node.input[0]) == 2
        nodes, tensors = _int8_product(node, weights[node.input[1]], is_positive, flat)
        made += nodes
        model.graph.initializer.extend(tensors)
    refill(model.graph.node, made)
    drop_unused(model)
    if names and not any(each.domain == "com.microsoft" for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _never_negative(model: ModelProto) -> set[str]:
    """Names of tensors that hold the output of a ReLU or sigmoid, in any shape."""
    found: set[str] = set()
    for node in model.graph.node:  # in the order of computing
        reshaped = node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity") and node.input[0] in found
        if reshaped or node.op_type in ("Relu", "Sigmoid"):
            found.update(node.output)
    return found


def _int8_product(
    node: NodeProto, weight: TensorProto, positive: bool, flat: bool
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes and constants of one product, and of the bias that a Gemm adds; some constants may be unused.

    `positive`: no input is below 0. `flat`: inputs have two dimensions; others are laid out as rows.
    """
    from onnx import numpy_helper

    own, columns = node.output[0], numpy_helper.to_array(weight)  # (N, K)
    if not any(each.name == "transB" and each.i for each in node.attribute):
        columns = columns.T
    steps = _weight_steps(columns)
    whole = np.rint(columns / steps[:, None]).astype(np.int8)
    constants = {
        "weight": np.ascontiguousarray(whole.T),
        "steps": steps.astype(np.float32),
        "share": np.array(1 / 255, np.float32),
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.float32),
        "last": np.array([1], np.int64),  # not -1: see `onnx_rewrite.simplify`
        "sums": (whole.sum(axis=1, dtype=np.float32) * steps).astype(np.float32),
        "rows": np.array([-1, columns.shape[1]], np.int64),
        "width": np.array([len(columns)], np.int64),
    }
    nodes: list[NodeProto] = []

    def add(kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        given = [f"{own}.{name}" if name in constants else name for name in inputs]
        nodes.append(make_node(kind, given, f"{own}.{output}", domain=domain, **attributes))
        return f"{own}.{output}"

    x = node.input[0]
    if not flat:
        x = add("Reshape", [x, "rows"], "flat")
    if not positive:
        lowest = add("Min", [add("ReduceMin", [x, "last"], "minimum", keepdims=1), "zero"], "lowest")
        x = add("Sub", [x, lowest], "above")
    # A row of zeros has the step 0 and divides by it; whatever digits come out, they are multiplied by 0 again.
    step = add("Mul", [add("ReduceMax", [x, "last"], "maximum", keepdims=1), "share"], "step")
    digits = add("QuantizeLinear", [x, add("Squeeze", [step, "last"], "row step")], "digits", axis=0)
    product = add("MatMulIntegerToFloat", [digits, "weight", "one", "steps"], "product", domain="com.microsoft")
    product = add("Mul", [product, step], "scaled")
    if not positive:
        product = add("Add", [product, add("Mul", [lowest, "sums"], "moved")], "restored")
    if len(node.input) > 2 and node.input[2]:
        product = add("Add", [product, node.input[2]], "with bias")
    if not flat:
        shape = add("Concat", [add("Shape", [node.input[0]], "lengths", end=-1), "width"], "shape", axis=0)
        add("Reshape", [product, shape], "restored shape", allowzero=1)
    nodes[-1].output[0] = own
    return nodes, [numpy_helper.from_array(value, f"{own}.{name}") for name, value in constants.items()]


def _weight_steps(columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """Steps (N,) of weights (N, K), one for each output, at which int8 products are exact on every CPU.

    On an x86 CPU without VNNI, ONNX Runtime multiplies with VPMADDUBSW: it adds the products of the inputs 2i and
    2i + 1 in 16 bits, and what doesn't fit is cut off without a word. Inputs are at most 255, so two weights of one
    sign may have the sum 128, since 255 * 128 < 2^15. Here their sum is at most 127 before rounding, which adds 1.
    """
    pairs = columns[:, :-1:2] + columns[:, 1::2]  # of unlike signs: less than the larger of the two
    largest = np.maximum(np.abs(columns).max(axis=1), np.abs(pairs).max(axis=1, initial=0))
    steps: NDArray[np.float32] = np.maximum(largest, np.float32(1e-12)) / np.float32(127)
    return steps


def _matrices(model: ModelProto) -> dict[str, TensorProto]:
    """Weights in fp32 with two dimensions or more, and more than one row, by name."""
    from onnx import TensorProto

    floats = (each for each in model.graph.initializer if each.data_type == TensorProto.FLOAT)
    return {each.name: each for each in floats if len(each.dims) >= 2 and each.dims[0] > 1}


def _converted(weight: TensorProto, to: int) -> TensorProto:
    from onnx import TensorProto, helper, numpy_helper

    values = numpy_helper.to_array(weight)
    if to == TensorProto.FLOAT16:
        highest = float(np.finfo(np.float16).max)
        return numpy_helper.from_array(values.clip(-highest, highest).astype(np.float16))
    rounded = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy()
    return helper.make_tensor("", TensorProto.BFLOAT16, weight.dims, rounded.tobytes(), raw=True)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence exporters, which print their progress and warn about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def short(error: object) -> str:
    """The first lines of an exporter's message, which may be a whole graph."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__
