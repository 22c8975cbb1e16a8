"""Trees as one node of ONNX: TreeEnsemble of ai.onnx.ml 5, in doubles, with sets of categories as members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LESS_OR_EQUAL, MEMBER = 0, 6  # BRANCH_LEQ and BRANCH_MEMBER of `nodes_modes`


def translations(program: torch.export.ExportedProgram) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What torch's exporter writes for the operators of recspec."""
    names = {**program.graph_signature.inputs_to_buffers, **program.graph_signature.inputs_to_parameters}
    weights = {given: program.state_dict.get(name, program.constants.get(name)) for given, name in names.items()}

    def trees(x: Any, *nodes: Any) -> Any:
        from onnxscript.onnx_opset import opset18, opset_ai_onnx_ml5

        named = ("feature", "threshold", "branches", "set_start", "set_words", "sets", "value", "roots")
        held = {name: weights[each.name].numpy() for name, each in zip(named, nodes, strict=False)}
        sums = opset_ai_onnx_ml5.TreeEnsemble(x, **attributes(held))  # (B, 1)
        return opset18.Reshape(sums, opset18.Constant(value_ints=[-1]))

    return {torch.ops.recspec.tree_sums.default: trees}


def attributes(held: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The node's attributes from the tensors of `Trees`. Inner nodes and leaves are numbered apart.

    A tree of one leaf becomes a node with this leaf on both sides. The members of a set are its categories in order,
    ended by NaN, and sets lie in the order of the nodes that have one.
    """
    from onnx import numpy_helper

    branches, own = held["branches"].reshape(-1, 2), np.arange(len(held["feature"]))
    leaf = branches[:, 0] == own
    split = ~leaf
    split[held["roots"]] = True  # a root must be a node
    number = np.where(leaf, np.cumsum(leaf), np.cumsum(split)) - 1
    first, second = branches[split].T
    words = held["set_words"][split]
    members: list[NDArray[np.float64]] = []
    for node in np.flatnonzero(split)[words > 0]:
        start = held["set_start"][node]
        bits = held["sets"][start : start + held["set_words"][node]].astype("<i4").view(np.uint8)
        members += [np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.float64), np.array([np.nan])]

    def tensor(name: str, values: NDArray[Any]) -> Any:
        return numpy_helper.from_array(np.ascontiguousarray(values), name)

    made: dict[str, Any] = {
        "n_targets": 1,
        "aggregate_function": 1,  # the sum
        "post_transform": 0,
        "tree_roots": (np.cumsum(split) - 1)[held["roots"]].tolist(),
        "nodes_featureids": held["feature"][split].tolist(),
        "nodes_modes": tensor("modes", np.where(words > 0, MEMBER, LESS_OR_EQUAL).astype(np.uint8)),
        "nodes_splits": tensor("splits", held["threshold"][split]),
        "nodes_truenodeids": number[first].tolist(),
        "nodes_trueleafs": leaf[first].astype(int).tolist(),
        "nodes_falsenodeids": number[second].tolist(),
        "nodes_falseleafs": leaf[second].astype(int).tolist(),
        "leaf_targetids": [0] * int(leaf.sum()),
        "leaf_weights": tensor("weights", held["value"][leaf]),
    }
    if members:
        made["membership_values"] = tensor("members", np.concatenate(members))
    return made
