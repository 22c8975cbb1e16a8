"""The same ONNX program in fewer nodes: a call of one row spends its time on nodes, not on arithmetic.

torch's exporter writes a Squeeze, an Add and an Unsqueeze for every feature; here features are laid side by side first.
What depends on no input is computed once, which makes a weight of what the exporter cut out of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

FOLDED = frozenset(
    {"Add", "Cast", "Concat", "Gather", "GatherND", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operations that are computed here where all that they read is constant."""

SMALL = 1 << 20
"""Bytes of a constant that may be larger than what it is made of."""


def simplify(model: ModelProto) -> ModelProto:
    """A program of fewer nodes with the same inputs and outputs; `model` itself is used up."""
    _fold(model)
    _lay_columns_first(model)
    _join_once(model)
    _drop_unused(model)
    return model


# --- what is constant ------------------------------------------------------------------------------------------------


def _fold(model: ModelProto) -> None:
    """Compute nodes that read constants alone."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    constants = {each.name: each for each in model.graph.initializer}
    outputs = {each.name for each in model.graph.output}
    kept: list[NodeProto] = []
    for node in model.graph.node:
        given = [name for name in node.input if name]
        if node.op_type not in FOLDED or not given or any(name not in constants for name in given):
            kept.append(node)
            continue
        values = {name: numpy_helper.to_array(constants[name]) for name in given}
        (made,) = ReferenceEvaluator(node).run(None, values)
        made = np.ascontiguousarray(made)
        if made.nbytes > max(SMALL, sum(value.nbytes for value in values.values())) or node.output[0] in outputs:
            kept.append(node)
            continue
        constants[node.output[0]] = numpy_helper.from_array(made, node.output[0])
        model.graph.initializer.append(constants[node.output[0]])
    del model.graph.node[:]
    model.graph.node.extend(kept)


# --- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A value (B, 1) of an input, cast and moved by a constant."""

    source: str
    cast: int | None
    added: NDArray[Any] | None


def _lay_columns_first(model: ModelProto) -> None:
    """Where (B, 1) values are squeezed, moved by a constant and stacked: stack them, and move all of them at once."""
    from onnx import helper, numpy_helper

    graph = _Graph(model)
    made: list[NodeProto] = []
    for node in model.graph.node:
        names = node.input if _joins_columns(node) else node.output if node.op_type == "Unsqueeze" else ()
        columns = [graph.column(name) for name in names]
        found = [column for column in columns if column is not None]
        if not found or len(found) < len(columns):
            made.append(node)
            continue
        own, casts = node.output[0], {(column.cast, graph.types[column.source]) for column in found}
        last = next(iter(casts))[0] if len(casts) == 1 else None
        sources = []
        for place, column in enumerate(found):
            if column.cast is None or last is not None:
                sources.append(column.source)
                continue
            sources.append(f"{own}.cast{place}")
            made.append(helper.make_node("Cast", [column.source], [sources[-1]], name=sources[-1], to=column.cast))
        made.append(helper.make_node("Concat", sources, [f"{own}.columns"], name=f"{own}.columns", axis=1))
        if len(sources) == 1:  # a Concat of one is that one
            made.pop()
            made.append(helper.make_node("Identity", sources, [f"{own}.columns"], name=f"{own}.columns"))
        if last is not None:
            made.append(helper.make_node("Cast", [f"{own}.columns"], [f"{own}.cast"], name=f"{own}.cast", to=last))
        added = [column.added for column in found]
        if any(each is not None for each in added):
            kind = next(each.dtype for each in added if each is not None)
            row = np.array([0 if each is None else each for each in added], kind)
            model.graph.initializer.append(numpy_helper.from_array(row, f"{own}.added"))
            made.append(helper.make_node("Add", [made[-1].output[0], f"{own}.added"], [own], name=node.name or own))
        else:
            made[-1].output[0] = own
    del model.graph.node[:]
    model.graph.node.extend(made)


def _join_once(model: ModelProto) -> None:
    """Concat of what another Concat alone made for it, in one, but for that of raw columns; Identity nodes go."""
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
        del node.input[:]
        node.input.extend(inputs)


# --- numbers ---------------------------------------------------------------------------------------------------------


def numbers_apart(model: ModelProto, products: Collection[str]) -> ModelProto:
    """Products (by name) of embeddings beside raw numbers as the sum of two; `model` itself is used up.

    Numbers are orders of magnitude larger than embeddings, so one step for both would leave an embedding few digits.
    """
    from onnx import helper, numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    inputs = {each.name for each in model.graph.input if _width(each) == 1}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        joined = made.get(node.input[0]) if node.name in products else None
        numbers = _trailing_numbers(joined, made, inputs) if joined is not None else None
        if joined is None or numbers is None:
            nodes.append(node)
            continue
        matrix = numpy_helper.to_array(weights[node.input[1]])
        matrix = matrix.T if _attribute(node, "transB") else matrix
        own, cut = node.output[0], len(matrix) - len(numbers.input)
        for name, part in (("embedded", matrix[:cut]), ("raw", matrix[cut:])):
            model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(part), f"{own}.{name}"))
        rest = joined.input[:-1]
        if len(rest) > 1:
            joint = helper.make_node("Concat", rest, [f"{own}.vectors"], name=f"{own}.vectors")
            joint.attribute.extend(joined.attribute)
            nodes.append(joint)
            rest = joint.output
        bias = [name for name in node.input[2:] if name]
        nodes += [
            helper.make_node("MatMul", [numbers.output[0], f"{own}.raw"], [f"{own}.apart"], name=f"{own}.apart"),
            helper.make_node(
                "Gemm" if bias else "MatMul", [rest[0], f"{own}.embedded", *bias], [f"{own}.rest"], name=node.name
            ),
            helper.make_node("Add", [f"{own}.rest", f"{own}.apart"], [own], name=f"{own}.sum"),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    _drop_unused(model)
    return model


def _width(given: ValueInfoProto) -> int:
    """Numbers in a row of an input; 0 where that is not fixed."""
    dims = given.type.tensor_type.shape.dim
    return int(dims[1].dim_value) if len(dims) == 2 else 0


def _trailing_numbers(joined: NodeProto, made: Mapping[str, NodeProto], inputs: Collection[str]) -> NodeProto | None:
    """The Concat of raw columns that ends what is joined to embeddings; None where nothing does."""
    if joined.op_type != "Concat" or len(joined.input) < 2:
        return None
    last = made.get(joined.input[-1])
    raw = last is not None and last.op_type == "Concat" and set(last.input) <= set(inputs)
    return last if raw else None


def _joins_columns(node: NodeProto) -> bool:
    return node.op_type == "Concat" and len(node.input) > 1 and _attribute(node, "axis") == 1


class _Graph:
    """Who makes what, and which tensors are constant."""

    def __init__(self, model: ModelProto) -> None:
        from onnx import numpy_helper

        self.makers: Mapping[str, NodeProto] = {name: node for node in model.graph.node for name in node.output}
        self.types = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
        self.inputs = {*self.types}
        small = (each for each in model.graph.initializer if int(np.prod(each.dims)) == 1)
        self.single = {each.name: numpy_helper.to_array(each) for each in small}

    def column(self, name: str) -> _Column | None:
        """What `name` is, if it is an input's value (B, 1) that was squeezed, cast, moved and unsqueezed."""
        node = self._made(name, "Unsqueeze")
        if node is None or not self._along_rows(node):
            return None
        cast: int | None = None
        added: NDArray[Any] | None = None
        for step in self._chain(node.input[0]):
            if step.op_type == "Squeeze":
                stands = step.input[0] in self.inputs and self._along_rows(step)
                return _Column(step.input[0], cast, added) if stands else None
            if step.op_type == "Add" and added is None and cast is None:
                added = self.single[self._constant(step)].reshape(())
            elif step.op_type == "Cast" and cast is None:
                cast = _attribute(step, "to")
            else:
                return None
        return None

    def _chain(self, name: str) -> Iterator[NodeProto]:
        """Nodes from one that makes `name` back to where something else than Squeeze, Add and Cast is met."""
        while (node := self.makers.get(name)) is not None:
            if node.op_type == "Add" and self._constant(node):
                yield node
                name = node.input[0] if node.input[1] in self.single else node.input[1]
            elif node.op_type in ("Squeeze", "Cast"):
                yield node
                name = node.input[0]
            else:
                return

    def _constant(self, node: NodeProto) -> str:
        return next((name for name in node.input if name in self.single), "")

    def _made(self, name: str, kind: str) -> NodeProto | None:
        node = self.makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def _along_rows(self, node: NodeProto) -> bool:
        """Whether a Squeeze or Unsqueeze is along the second of two dimensions."""
        axes = self.single.get(node.input[1]) if len(node.input) > 1 else None
        return axes is not None and int(axes.reshape(())) in (1, -1)


def _attribute(node: NodeProto, name: str) -> int | None:
    return next((int(each.i) for each in node.attribute if each.name == name), None)


# --- what nobody reads -----------------------------------------------------------------------------------------------


def _drop_unused(model: ModelProto) -> None:
    """Leave out nodes and constants whose results nobody reads."""
    readers = Counter(name for node in model.graph.node for name in node.input)
    readers.update(each.name for each in model.graph.output)
    kept: list[NodeProto] = []
    for node in reversed(model.graph.node):
        if any(readers[name] for name in node.output):
            kept.append(node)
        else:
            readers.subtract(node.input)
    del model.graph.node[:]
    model.graph.node.extend(reversed(kept))
    constants = [each for each in model.graph.initializer if readers[each.name]]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
