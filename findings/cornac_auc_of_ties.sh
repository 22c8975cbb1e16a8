#!/usr/bin/env bash
# Cornac's AUC counts a tie as a loss: a model that gives every item one score has AUC 0.
#
# Version    cornac 3.0.1, scikit-learn 1.9.1, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   A pair of equal scores counts one half, as in the Wilcoxon statistic, so that a constant model has 0.5.
# Behaviour  `AUC().compute` counts pairs whose relevant item scores strictly higher. Scores that repeat (popularity
#            counts, ratings that are clipped or rounded, models trained to float16) lose what they tie: the counts
#            below have .667 where scikit-learn has .833. Recommenders are compared by this number, and those with many
#            ties look worst.
# Known      Not searched for upstream.
# What helps Add noise below the smallest step of the scores. recspec counts ties by their expected value
#            (docs/explanation/metrics.md).
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   cornac 3.0.1, scikit-learn 1.9.1
#   all equal, the first of four items relevant: AUC and MAP [0.0, 0.25], by scikit-learn [0.5, 0.25]
#   counts, the first of four items relevant: AUC and MAP [0.667, 0.5], by scikit-learn [0.833, 0.5]
#   no ties, the first of four items relevant: AUC and MAP [1.0, 1.0], by scikit-learn [1.0, 1.0]
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cornac==3.0.1 scikit-learn==1.9.1 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import cornac
import numpy as np
import sklearn
from cornac.metrics import AUC, MAP
from sklearn.metrics import average_precision_score, roc_auc_score

print(f"cornac {cornac.__version__}, scikit-learn {sklearn.__version__}")
found = {}
for what, scores in (("all equal", [1.0, 1.0, 1.0, 1.0]), ("counts", [3.0, 3.0, 1.0, 1.0]), ("no ties", [4.0, 3.0, 2.0, 1.0])):
    given = {"item_indices": np.arange(4), "pd_scores": np.array(scores), "gt_pos": np.array([0])}
    relevant = np.array([1, 0, 0, 0])
    found[what] = [round(float(each.compute(**given)), 3) for each in (AUC(), MAP())]
    others = [round(float(each(relevant, scores)), 3) for each in (roc_auc_score, average_precision_score)]
    print(f"{what}, the first of four items relevant: AUC and MAP {found[what]}, by scikit-learn {others}")
described = {"all equal": [0.0, 0.25], "counts": [0.667, 0.5], "no ties": [1.0, 1.0]}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
