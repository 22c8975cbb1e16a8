#!/usr/bin/env bash
# CatBoost's export to Python sends missing values the wrong way if they count as largest.
#
# Version    catboost 1.2.10, onnxruntime 1.31.1, onnx 1.23.2, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   `nan_mode='Max'` is a part of the model, so the exported function and the ONNX file give what `predict`
#            gives.
# Behaviour  The Python file compares `x > border`, which is false for NaN: a missing value counts as the smallest.
#            With `nan_mode='Min'` this is right, with 'Max' a row gets another prediction without a word. The ONNX
#            file is right in both.
# Known      Upstream has an open report of another version (its issue 2104) and an open change.
# What helps Replace NaN by a number beyond all others before the exported function. recspec does not use CatBoost.
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   catboost 1.2.10, onnxruntime 1.31.1
#   nan_mode Min, rows 1, 2, 3, NaN: model [0.0, 1.0, 2.0, 5.0], ONNX [0.0, 1.0, 2.0, 5.0], Python [0.0, 1.0, 2.0,
#     5.0]
#   nan_mode Max, rows 1, 2, 3, NaN: model [0.0, 1.0, 2.0, 5.0], ONNX [0.0, 1.0, 2.0, 5.0], Python [0.0, 1.0, 2.0,
#     0.0]
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check catboost==1.2.10 onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import runpy
import sys

import catboost
import numpy as np
import onnxruntime

print(f"catboost {catboost.__version__}, onnxruntime {onnxruntime.__version__}")
rows = np.array([[1.0], [2.0], [3.0], [np.nan]], np.float32)
found = {}
for mode in ("Min", "Max"):
    model = catboost.CatBoostRegressor(nan_mode=mode, iterations=20, verbose=0, thread_count=1, allow_writing_files=False)
    model.fit(np.tile(rows, (20, 1)), np.tile([0.0, 1.0, 2.0, 5.0], 20))
    model.save_model("model.onnx", format="onnx")
    model.save_model("model.py", format="python")
    exported = runpy.run_path("model.py")["apply_catboost_model"]
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession("model.onnx")
    found[mode] = [
        model.predict(rows).round(1).tolist(),
        session.run(None, {"features": rows})[0].ravel().round(1).tolist(),
        [round(exported([float(row[0])]), 1) for row in rows],
    ]
    print(f"nan_mode {mode}, rows 1, 2, 3, NaN: model {found[mode][0]}, ONNX {found[mode][1]}, Python {found[mode][2]}")
right = [0.0, 1.0, 2.0, 5.0]
described = {"Min": [right, right, right], "Max": [right, right, [0.0, 1.0, 2.0, 0.0]]}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
cd "$folder" && "$folder/venv/bin/python" "$folder/check.py"
