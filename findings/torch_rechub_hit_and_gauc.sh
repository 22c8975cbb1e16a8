#!/usr/bin/env bash
# torch-rechub's Hit@k is a recall over all users together, and one user of one class makes its GAUC NaN.
#
# Version    torch-rechub 0.9.0, scikit-learn 1.9.1, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   Hit@k is the share of users with at least one relevant item among k. GAUC leaves out users whose labels
#            are all alike, as in the DIN paper and FuxiCTR.
# Behaviour  Hit is the number of relevant items found over the number of relevant items of all users: two users, both
#            with a hit, have .2 and not 1. So users with long histories decide it. GAUC takes the AUC of every user;
#            of one class it is NaN, and so is the whole.
# Known      Not searched for upstream.
# What helps Take the mean of `Recall@k > 0` per user, and drop users of one class first. recspec's HR@k and GAUC are
#            those of the papers (docs/explanation/metrics.md).
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   torch-rechub 0.9.0, scikit-learn 1.9.1
#   two users, each with a relevant item among three: Hit@3: 0.2, Recall@3: 0.5556, MRR@3: 0.75
#   GAUC of two users of both classes: 1.0; with one of a single class: nan
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch-rechub==0.9.0 torch==2.13.0 scikit-learn==1.9.1 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys
import warnings

import numpy as np
import sklearn
from importlib.metadata import version
from torch_rechub.basic.metric import gauc_score, topk_metrics

warnings.simplefilter("ignore")
print(f"torch-rechub {version('torch-rechub')}, scikit-learn {sklearn.__version__}")
relevant = {"A": ["a"], "B": list("abcdefghi")}
lists = {"A": ["a", "x", "y"], "B": ["x", "b", "y"]}
told = topk_metrics(relevant, lists, topKs=[3])
users = np.array(["A"] * 3 + ["B"] * 2)
gauc = [gauc_score(np.array(labels), np.array([3.0, 2.0, 1.0, 2.0, 1.0]), users) for labels in ([1, 0, 0, 1, 0], [1, 0, 0, 0, 0])]
found = [*(told[name][0] for name in ("Hit", "Recall", "MRR")), *(float(each) if each == each else "nan" for each in gauc)]
print(f"two users, each with a relevant item among three: {found[0]}, {found[1]}, {found[2]}")
print(f"GAUC of two users of both classes: {found[3]}; with one of a single class: {found[4]}")
described = ["Hit@3: 0.2", "Recall@3: 0.5556", "MRR@3: 0.75", 1.0, "nan"]
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
