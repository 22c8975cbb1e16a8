#!/usr/bin/env bash
# ONNX Runtime's Sigmoid is exactly 0 from about -18 down, where 1 / (1 + exp(-x)) is not.
#
# Version    onnxruntime 1.31.1 (CPU provider), onnx 1.23.2, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   sigmoid(-20) is 2.06e-9 in float32, as torch, OpenVINO and ONNX's reference compute it. A rare
#            click has such values, and its logarithm is finite.
# Behaviour  Below about -18 the result is 0. The order of rows below -18 is
#            lost, and their log loss is infinite. Written as Neg, Exp, Add and Reciprocal, the same
#            runtime keeps both.
# Known      Not searched for upstream.
# What helps Take the logit, or write the four operators. recspec's exports have both.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   onnxruntime 1.31.1
#   Sigmoid of [-30.0, -25.0, -20.0, -17.0]: 0, 0, 0, 8.94e-08
#   four operators of [-30.0, -25.0, -20.0, -17.0]: 9.36e-14, 1.39e-11, 2.06e-09, 4.14e-08
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

print(f"onnxruntime {onnxruntime.__version__}")
one = numpy_helper.from_array(np.array(1, np.float32), "one")
four = [("Neg", ["x"], "a"), ("Exp", ["a"], "b"), ("Add", ["b", "one"], "c"), ("Reciprocal", ["c"], "y")]
x = np.array([-30, -25, -20, -17], np.float32)
found = {}
for what, steps in (("Sigmoid", [("Sigmoid", ["x"], "y")]), ("four operators", four)):
    nodes = [helper.make_node(operator, takes, [gives]) for operator, takes, gives in steps]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y = session.run(None, {"x": x})[0]
    found[what] = (y == 0).tolist()
    print(f"{what} of {x.tolist()}: {', '.join(f'{value:.3g}' for value in y)}")
described = {"Sigmoid": [True, True, True, False], "four operators": [False] * 4}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
