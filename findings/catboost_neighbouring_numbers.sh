#!/usr/bin/env bash
# CatBoost cannot part every second pair of neighbouring float32 numbers: their border rounds onto one of them.
#
# Version    catboost 1.2.10, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   Numbers are taken as float32, as in XGBoost: a model told six different float32 numbers, each with a label
#            of its own, learns six labels.
# Behaviour  A border is the middle of two numbers, rounded to float32. The middle of neighbours is halfway between
#            them, and rounds to the even one. If that is the upper one, `x > border` is false for both, and no tree
#            parts them. Half of all neighbours are so. Times in seconds are neighbours at 128 seconds, and counted ids
#            at 1 above 8388608, so every second pair of ids from 8388608 on is one id. XGBoost parts all of them.
# Known      Not searched for upstream.
# What helps Take a fixed number from large numbers, or divide them into two columns. recspec scales numbers by mean
#            and deviation in float64 first (docs/feature_spec.md).
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   catboost 1.2.10, xgboost 3.2.0
#   six numbers from 1 on, 1.19e-07 apart, labels 0 to 5: catboost [0.0, 1.5, 1.5, 3.5, 3.5, 5.0],
#     xgboost [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]; borders [1.0, 1.000000238418579, 1.0000004768371582]
#   six numbers from 8388608 on, 1 apart, labels 0 to 5: catboost [0.0, 1.5, 1.5, 3.5, 3.5, 5.0],
#     xgboost [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]; borders [8388608.0, 8388610.0, 8388612.0]
#   six numbers from 1700000000 on, 128 apart, labels 0 to 5: catboost [0.0, 1.5, 1.5, 3.5, 3.5, 5.0],
#     xgboost [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]; borders [1700000000.0, 1700000256.0, 1700000512.0]
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check catboost==1.2.10 numpy==2.4.6 xgboost-cpu==3.2.0

cat > "$folder/check.py" <<'PYTHON'
import sys

import catboost
import numpy as np
import xgboost

print(f"catboost {catboost.__version__}, xgboost {xgboost.__version__}")
found = {}
for start in (1.0, 8388608.0, 1.7e9):
    numbers = [np.float32(start)]
    while len(numbers) < 6:
        numbers.append(np.nextafter(numbers[-1], np.float32(np.inf)))
    column = np.array(numbers)[:, None]
    rows, labels = np.repeat(column, 10, axis=0), np.repeat(np.arange(6.0), 10)
    options = {"iterations": 100, "learning_rate": 1, "l2_leaf_reg": 0, "thread_count": 1, "allow_writing_files": False}
    model = catboost.CatBoostRegressor(verbose=0, **options).fit(rows, labels)
    options = {"max_depth": 6, "learning_rate": 1, "min_child_weight": 0, "lambda": 0, "base_score": 0, "nthread": 1}
    other = xgboost.train(options, xgboost.DMatrix(rows, labels), 3).predict(xgboost.DMatrix(column))
    found[start] = model.predict(column).round(2).tolist(), other.round(2).tolist()
    print(f"six numbers from {start:.0f} on, {numbers[1] - numbers[0]:.3g} apart, labels 0 to 5: catboost {found[start][0]},")
    print(f"  xgboost {found[start][1]}; borders {model.get_borders()[0]}")
described = dict.fromkeys((1.0, 8388608.0, 1.7e9), ([0.0, 1.5, 1.5, 3.5, 3.5, 5.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
