"""The same ONNX program in fewer nodes: a call of one row spends its time on nodes, not on arithmetic.

torch's exporter writes a Squeeze, an Add and an Unsqueeze for every feature; here features are laid side by side first.
Products with one column take ONNX Runtime's fast way. Small probabilities stay apart from each other, and a request
without rows is answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


SMALL_CONSTANT = 64  # numbers of a constant that may be a shape


def simplify(model: ModelProto) -> ModelProto:
    """A program of fewer nodes with the same inputs and outputs; changes `model`."""
    _lay_columns_first(model)
    _join_once(model)
    _single_columns_first(model)
    _keep_small_probabilities(model)
    _reduce_no_rows(model)
    drop_unused(model)
    return model


# --- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A value (B, 1) of an input, cast and shifted by a constant."""

    source: str
    cast: int | None
    added: NDArray[Any] | None


def _lay_columns_first(model: ModelProto) -> None:
    """Stack (B, 1) values first and shift all by constants at once, instead of squeezing and shifting each."""
    from onnx import numpy_helper

    makers = {name: node for node in model.graph.node for name in node.output}
    types = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    small = (each for each in model.graph.initializer if int(np.prod(each.dims)) == 1)
    single = {each.name: numpy_helper.to_array(each) for each in small}
    made: list[NodeProto] = []
    for node in model.graph.node:
        joins = node.op_type == "Concat" and len(node.input) > 1 and _attribute(node, "axis") == 1
        names = node.input if joins else node.output if node.op_type == "Unsqueeze" else ()
        columns = [_column(name, makers, types, single) for name in names]
        found = [column for column in columns if column is not None]
        if not found or len(found) < len(columns):
            made.append(node)
            continue
        own, casts = node.output[0], {(column.cast, types[column.source]) for column in found}
        last = next(iter(casts))[0] if len(casts) == 1 else None
        sources = []
        for place, column in enumerate(found):
            if column.cast is None or last is not None:
                sources.append(column.source)
                continue
            sources.append(f"{own}.cast{place}")
            made.append(make_node("Cast", [column.source], sources[-1], to=column.cast))
        if len(sources) == 1:  # a Concat of one is that one
            made.append(make_node("Identity", sources, f"{own}.columns"))
        else:
            made.append(make_node("Concat", sources, f"{own}.columns", axis=1))
        if last is not None:
            made.append(make_node("Cast", [f"{own}.columns"], f"{own}.cast", to=last))
        added = [column.added for column in found]
        if any(each is not None for each in added):
            kind = next(each.dtype for each in added if each is not None)
            row = np.array([0 if each is None else each for each in added], kind)
            model.graph.initializer.append(numpy_helper.from_array(row, f"{own}.added"))
            made.append(make_node("Add", [made[-1].output[0], f"{own}.added"], own, name=node.name or own))
        else:
            made[-1].output[0] = own
    refill(model.graph.node, made)


def _join_once(model: ModelProto) -> None:
    """Merge a Concat into the only Concat that reads it, except a Concat of raw columns; remove Identity nodes.

    A Concat of raw numbers is then an input of the one that joins them with embeddings, by which `int8` finds them.
    """
    given = {each.name for each in model.graph.input}
    made = {name: node for node in model.graph.node for name in node.output}
    outputs = {each.name for each in model.graph.output}
    readers = Counter(name for node in model.graph.node for name in node.input)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            while (maker := made.get(name)) is not None and maker.op_type == "Identity" and name not in outputs:
                name = maker.input[0]
            node.input[place] = name
        if node.op_type != "Concat":
            continue
        inputs: list[str] = []
        for name in node.input:
            maker = made.get(name)
            same = maker is not None and maker.op_type == "Concat" and maker.attribute == node.attribute
            if maker is not None and same and readers[name] == 1 and not set(maker.input) <= given:
                inputs += maker.input
            else:
                inputs.append(name)
        refill(node.input, inputs)


# --- probabilities ---------------------------------------------------------------------------------------------------


def _keep_small_probabilities(model: ModelProto) -> None:
    """Write a sigmoid that is an output as 1 / (1 + exp(-x)).

    ONNX Runtime's own sigmoid is 0 for every x below -18 or so, which would give the same rank to items that the model
    tells apart.
    """
    from onnx import numpy_helper

    outputs = {each.name for each in model.graph.output}
    made: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "Sigmoid" or node.output[0] not in outputs:
            made.append(node)
            continue
        own = node.output[0]
        model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), f"{own}.one"))
        made += [
            make_node("Neg", [node.input[0]], f"{own}.negative"),
            make_node("Exp", [f"{own}.negative"], f"{own}.odds"),
            make_node("Add", [f"{own}.odds", f"{own}.one"], f"{own}.inverse"),
            make_node("Reciprocal", [f"{own}.inverse"], own, name=node.name),
        ]
    refill(model.graph.node, made)


# --- no rows ---------------------------------------------------------------------------------------------------------


def _reduce_no_rows(model: ModelProto) -> None:
    """Count the axes of reductions from the front.

    ONNX Runtime 1.31 leaves an axis that is counted from the end in place if a tensor is empty: a sum over the last
    axis of (0, 8) has the shape (0, 8), and a request without rows fails further on.
    """
    from onnx import numpy_helper

    ranks, held = ranks_of(model), {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        named = node.op_type.startswith("Reduce") and len(node.input) > 1 and node.input[1] in held
        if not named or node.input[0] not in ranks:
            continue
        axes = numpy_helper.to_array(held[node.input[1]])
        if (axes < 0).any():
            counted = np.where(axes < 0, axes + ranks[node.input[0]], axes)
            node.input[1] = f"{node.output[0]}.axes"
            model.graph.initializer.append(numpy_helper.from_array(counted, node.input[1]))


# --- products with one column ----------------------------------------------------------------------------------------


def _single_columns_first(model: ModelProto) -> None:
    """Multiply a constant row by the rows, w x', instead of the rows by a constant column, x w.

    ONNX Runtime multiplies (512, 1024) by (1024,) in 1.19 ms and by (1024, 1) in .21 ms, and takes .03 ms the other way
    round (one thread of an AMD EPYC, Zen 4).
    """
    from onnx import numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    ranks = ranks_of(model)
    made: list[NodeProto] = []
    for node in model.graph.node:
        column = _single_column(node, weights)
        rank = 0 if column is None else ranks.get(node.input[0], 0)
        if column is None or rank < 2:
            made.append(node)
            continue
        own, x, keeps_last = node.output[0], node.input[0], len(weights[node.input[1]].dims) == 2
        constants, shape = {"row": column.reshape(1, -1)}, f"{own}.shape"
        if rank == 2:
            constants["shape"] = np.array([-1, 1] if keeps_last else [-1])
        else:
            constants |= {"rows": np.array([-1, column.size]), "last": np.array([-1])}
            made.append(make_node("Shape", [x], shape, end=-1))
            made.append(make_node("Reshape", [x, f"{own}.rows"], f"{own}.flat"))
            x = f"{own}.flat"
        bias = [name for name in node.input[2:] if name]
        made.append(make_node("Gemm", [f"{own}.row", x, *bias], f"{own}.turned", name=node.name, transB=1))
        if rank > 2 and keeps_last:
            made.append(make_node("Reshape", [f"{own}.turned", shape], f"{own}.leading", allowzero=1))
            made.append(make_node("Unsqueeze", [f"{own}.leading", f"{own}.last"], own))
        else:
            made.append(make_node("Reshape", [f"{own}.turned", shape], own, allowzero=int(rank > 2)))
        model.graph.initializer.extend(
            numpy_helper.from_array(each, f"{own}.{name}") for name, each in constants.items()
        )
    refill(model.graph.node, made)


def _single_column(node: NodeProto, weights: Mapping[str, TensorProto]) -> NDArray[Any] | None:
    """The constant column (K,) that a product multiplies rows by; None for any other node."""
    from onnx import TensorProto, numpy_helper

    if not is_plain_product(node) or node.input[1] not in weights:
        return None
    weight, bias = weights[node.input[1]], [weights.get(name) for name in node.input[2:] if name]
    is_column = len(weight.dims) == 1 or (
        len(weight.dims) == 2 and weight.dims[0 if _attribute(node, "transB") else 1] == 1
    )
    # A bias that differs from row to row would have to be turned, too.
    fits = weight.data_type == TensorProto.FLOAT and all(each is not None and np.prod(each.dims) == 1 for each in bias)
    return numpy_helper.to_array(weight).reshape(-1) if is_column and fits else None


def is_plain_product(node: NodeProto) -> bool:
    """Whether a node multiplies its first input by its second (which may be turned), without another factor."""
    if node.op_type not in ("MatMul", "Gemm"):
        return False
    factors = {each.name: each.f for each in node.attribute if each.name in ("alpha", "beta")}
    return all(factor == 1.0 for factor in factors.values()) and not _attribute(node, "transA")


def ranks_of(model: ModelProto) -> dict[str, int]:
    """The number of dimensions of each tensor, where ONNX can infer it."""
    from onnx import ModelProto as Program
    from onnx import helper, shape_inference

    bare = Program(ir_version=model.ir_version, opset_import=model.opset_import)  # without large weights
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    bare.graph.input.extend(model.graph.input)
    bare.graph.output.extend(model.graph.output)
    for each in model.graph.initializer:
        if int(np.prod(each.dims)) <= SMALL_CONSTANT:
            bare.graph.initializer.append(each)
        else:
            bare.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    found = shape_inference.infer_shapes(bare).graph
    kinds = {each.name: each.type.tensor_type for each in (*found.value_info, *found.input, *found.output)}
    return {name: len(kind.shape.dim) for name, kind in kinds.items() if kind.HasField("shape")}


# --- numbers ---------------------------------------------------------------------------------------------------------


def numbers_apart(model: ModelProto, products: Collection[str]) -> ModelProto:
    """Split products (by name) of embeddings joined with raw numbers into the sum of two; changes `model`.

    Numbers are orders of magnitude larger than embeddings, so one step for both would leave an embedding few digits.
    """
    from onnx import numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    shapes = {each.name: each.type.tensor_type.shape.dim for each in model.graph.input}
    inputs = {name for name, dims in shapes.items() if len(dims) == 2 and dims[1].dim_value == 1}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        joined = made.get(node.input[0]) if node.name in products else None
        last, first = (0, 0) if joined is None else _numbers_around(joined, made, inputs)
        if joined is None or not (last or first):
            nodes.append(node)
            continue
        matrix = numpy_helper.to_array(weights[node.input[1]])
        matrix = matrix.T if _attribute(node, "transB") else matrix
        own, cut = node.output[0], len(matrix) - last if last else first
        numbers, rest = (joined.input[-1], joined.input[:-1]) if last else (joined.input[0], joined.input[1:])
        raw, embedded = (matrix[cut:], matrix[:cut]) if last else (matrix[:cut], matrix[cut:])
        for name, part in (("embedded", embedded), ("raw", raw)):
            model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(part), f"{own}.{name}"))
        if len(rest) > 1:
            joint = make_node("Concat", rest, f"{own}.vectors")
            joint.attribute.extend(joined.attribute)
            nodes.append(joint)
            rest = joint.output
        bias = [name for name in node.input[2:] if name]
        nodes += [
            make_node("MatMul", [numbers, f"{own}.raw"], f"{own}.apart"),
            make_node("Gemm" if bias else "MatMul", [rest[0], f"{own}.embedded", *bias], f"{own}.rest", name=node.name),
            make_node("Add", [f"{own}.rest", f"{own}.apart"], own, name=f"{own}.sum"),
        ]
    refill(model.graph.node, nodes)
    drop_unused(model)
    return model


def _numbers_around(joined: NodeProto, made: Mapping[str, NodeProto], inputs: Collection[str]) -> tuple[int, int]:
    """How many raw columns are joined after and before something else: inputs, or a Concat of inputs."""

    def raw_columns(name: str) -> int:
        if name in inputs:
            return 1
        maker = made.get(name)
        raw = maker is not None and maker.op_type == "Concat" and set(maker.input) <= set(inputs)
        return len(maker.input) if maker is not None and raw else 0

    counts = [raw_columns(name) for name in joined.input] if joined.op_type == "Concat" else [0]
    return (0, 0) if all(counts) else (counts[-1], counts[0])


def _column(
    name: str, makers: Mapping[str, NodeProto], inputs: Collection[str], single: Mapping[str, NDArray[Any]]
) -> _Column | None:
    """What `name` is, if it is an input's value (B, 1) that was squeezed, shifted, cast and unsqueezed.

    `makers` holds the node that makes each tensor, `single` the constants of one number.
    """

    def along_rows(node: NodeProto) -> bool:
        """Whether a Squeeze or Unsqueeze is along the second of two dimensions."""
        axes = single.get(node.input[1]) if len(node.input) > 1 else None
        return axes is not None and int(axes.reshape(())) in (1, -1)

    node = makers.get(name)
    if node is None or node.op_type != "Unsqueeze" or not along_rows(node):
        return None
    cast: int | None = None
    added: NDArray[Any] | None = None
    source = node.input[0]
    while (node := makers.get(source)) is not None and node.input:
        source = node.input[0]
        if node.op_type == "Squeeze":
            return _Column(source, cast, added) if source in inputs and along_rows(node) else None
        constants = [single[each] for each in node.input if each in single]
        if node.op_type == "Cast" and cast is None:
            cast = _attribute(node, "to")
        elif node.op_type == "Add" and constants and added is None and cast is None:
            added = constants[0].reshape(())
            source = source if node.input[1] in single else node.input[1]
        else:
            return None
    return None


def _attribute(node: NodeProto, name: str) -> int | None:
    return next((int(each.i) for each in node.attribute if each.name == name), None)


# --- programs as a whole ---------------------------------------------------------------------------------------------


def drop_unused(model: ModelProto) -> None:
    """Remove nodes and constants whose results are never read."""
    readers = Counter(name for node in model.graph.node for name in node.input)
    readers.update(each.name for each in model.graph.output)
    kept: list[NodeProto] = []
    for node in reversed(model.graph.node):
        if any(readers[name] for name in node.output):
            kept.append(node)
        else:
            readers.subtract(node.input)
    refill(model.graph.node, reversed(kept))
    refill(model.graph.initializer, [each for each in model.graph.initializer if readers[each.name]])


def make_node(kind: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> NodeProto:
    """A node of one output, which names it by default."""
    from onnx import helper

    return helper.make_node(kind, inputs, [output], name=name or output, **attributes)


def refill(held: Any, values: Iterable[Any]) -> None:
    """Replace the content of a repeated field of a protobuf message."""
    values = list(values)
    del held[:]
    held.extend(values)
