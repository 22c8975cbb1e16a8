#!/usr/bin/env bash
# ONNX Runtime leaves an axis in place that is counted from the end, if a tensor is empty.
#
# Version    onnxruntime 1.31.1 (CPU provider), onnx 1.23.2, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   ReduceSum over axis -1 of (0, 8) without keepdims has the shape (0,), as over axis 1, and as
#            in ONNX's reference. A request without rows has an answer without rows.
# Behaviour  The shape stays (0, 8), with a warning on the log; the next operator then fails to broadcast,
#            or a wrong shape reaches the caller. ReduceMean and ReduceMax do the same. torch's exporter
#            writes -1 wherever the model says `sum(-1)`.
# Known      Upstream has reports of reductions of empty tensors (its issues 8146 and 26041), none of axes
#            from the end.
# What helps Count axes from the front. recspec's exports do since this was found
#            (src/recspec/export/onnx_rewrite.py); NeuMF's failed.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   onnxruntime 1.31.1
#   ReduceSum of (0, 8) over axis 1: (0,); reference (0,)
#   ReduceSum of (0, 8) over axis -1: (0, 8); reference (0,)
#   ReduceMean of (0, 8) over axis 1: (0,); reference (0,)
#   ReduceMean of (0, 8) over axis -1: (0, 8); reference (0,)
#   ReduceMax of (0, 8) over axis 1: (0,); reference (0,)
#   ReduceMax of (0, 8) over axis -1: (0, 8); reference (0,)
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
from onnx.reference import ReferenceEvaluator

print(f"onnxruntime {onnxruntime.__version__}")
onnxruntime.set_default_logger_severity(4)
found = {}
for kind in ("ReduceSum", "ReduceMean", "ReduceMax"):
    for axis in (1, -1):
        node = helper.make_node(kind, ["x", "axes"], ["y"], keepdims=0)
        ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", ["n", 8]), ("y", ["n"]))]
        constant = numpy_helper.from_array(np.array([axis]), "axes")
        graph = helper.make_graph([node], "g", ports[:1], ports[1:], [constant])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        given = {"x": np.zeros((0, 8), np.float32)}
        found[kind, axis] = session.run(None, given)[0].shape
        try:
            exact = ReferenceEvaluator(model).run(None, given)[0].shape
        except ValueError:
            exact = "refused"  # the largest of nothing
        print(f"{kind} of (0, 8) over axis {axis}: {found[kind, axis]}; reference {exact}")
described = {(kind, axis): (0,) if axis == 1 else (0, 8) for kind, axis in found}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
