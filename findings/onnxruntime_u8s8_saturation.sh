#!/usr/bin/env bash
# ONNX Runtime's MatMulInteger of uint8 by int8 is wrong on x86 CPUs without VNNI.
#
# Version    onnxruntime 1.31.1 (CPU provider), onnx 1.23.2, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   ONNX, MatMulInteger: "The production MUST never overflow. The accumulation may overflow if and only if in
#            32 bits." So 255 * 127 + 255 * 127 is 64770.
# Behaviour  Without AVX-512 VNNI and AVX-VNNI, the kernel adds the products of inputs 2i and 2i + 1 in 16 bits
#            (VPMADDUBSW), and the sum stops at 32767 or -32768. There is no error and no warning. With VNNI the result is
#            exact, so one program gives two answers. MatMulIntegerToFloat uses the same kernel.
# Known      Upstream describes it (its guide to quantization, issues 6004 and 7524) and offers 7-bit weights
#            (`reduce_range`) or the session option `session.x64quantprecision`, which is off by default.
# What helps uint8 weights, that option, and int8 weights of which two neighbours 2i and 2i + 1 of one sign have a sum of
#            at most 128. recspec's int8 exports use the last (src/recspec/export/onnx_graph.py, `_weight_steps`).
#
# Output seen, 2026-11-27, AMD EPYC (Zen 3: AVX2, no AVX-512):
#
#   onnxruntime 1.31.1, VNNI: no
#   [255 255] x [127 127]: 32767, exact 64770
#   [255 255] x [-127 -127]: -32768, exact -64770
#   64 x 256 x 64, weights from -127 to 127: 99 % of the outputs differ, by at most 62615
#   the same with session.x64quantprecision=1: 0 % differ
#   the same weights as uint8: 0 % differ
#   weights whose neighbours of one sign have sums of at most 128: 0 % differ
#   as described
#
# Exit status: 0 as described, or the CPU has VNNI or is no x86; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import platform
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def product(a, b, **options):
    """a (M, K) times a constant b (K, N) by MatMulInteger."""
    kind = TensorProto.UINT8
    inputs = [helper.make_tensor_value_info("a", kind, ["m", b.shape[0]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT32, ["m", b.shape[1]])]
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    graph = helper.make_graph([node], "g", inputs, outputs, [numpy_helper.from_array(b, "b")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    settings = onnxruntime.SessionOptions()
    for name, value in options.items():
        settings.add_session_config_entry(f"session.{name}", value)
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return session.run(None, {"a": a})[0]


def differs(what, a, b, **options):
    found, exact = product(a, b, **options), a.astype(np.int64) @ b.astype(np.int64)
    share = (found != exact).mean()
    most = f", by at most {np.abs(found - exact).max()}" if share else ""
    print(f"{what}: {share:.0%}".replace("%", " %"), f"{'of the outputs ' if share else ''}differ{most}")
    return share > 0


cpuinfo = Path("/proc/cpuinfo")
flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
if platform.machine() not in ("x86_64", "AMD64") or not flags:
    print(f"not an x86-64 CPU under Linux ({platform.machine()}): nothing to show")
    sys.exit(0)
vnni = bool(flags & {"avx512_vnni", "avx_vnni"})
print(f"onnxruntime {onnxruntime.__version__}, VNNI: {'yes' if vnni else 'no'}")

ends = {}
for weight in (127, -127):
    a, b = np.full((1, 2), 255, np.uint8), np.full((2, 1), weight, np.int8)
    ends[weight] = int(product(a, b)[0, 0])
    print(f"{a[0]} x {b[:, 0]}: {ends[weight]}, exact {2 * 255 * weight}")

random = np.random.default_rng(0)
a = random.integers(0, 256, (64, 256)).astype(np.uint8)
b = random.integers(-127, 128, (256, 64)).astype(np.int8)
pairs = np.abs(b[::2].astype(int) + b[1::2])
fitting = np.rint(b * (127 / np.maximum(pairs, 127).repeat(2, axis=0))).astype(np.int8)
wrong = differs("64 x 256 x 64, weights from -127 to 127", a, b)
remedies = [
    differs("the same with session.x64quantprecision=1", a, b, x64quantprecision="1"),
    differs("the same weights as uint8", a, (b.astype(int) + 128).astype(np.uint8)),
    differs("weights whose neighbours of one sign have sums of at most 128", a, fitting),
]
if vnni:
    print("this CPU has VNNI, where products are exact: nothing to show")
    sys.exit(0)
if not wrong or ends != {127: 32767, -127: -32768} or any(remedies):
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
