#!/usr/bin/env bash
# A group without a relevant item has NDCG 1 in LightGBM, XGBoost and CatBoost: data that say nothing raise the metric.
#
# Version    lightgbm 4.7.0, xgboost-cpu 3.2.0, catboost 1.2.10, scikit-learn 1.9.1, Python 3.11, Linux x86-64.
# Expected   NDCG of a list without anything relevant is 0/0. It is left out, or 0 as in scikit-learn, pytrec_eval and
#            torchmetrics.
# Behaviour  All three count 1, the best there is. MAP is 1 in LightGBM and XGBoost and 0 in CatBoost, recall 1 in
#            CatBoost, AUC without a positive row 1 in LightGBM, 0 in CatBoost and NaN in XGBoost. Impressions without
#            a click are most of a click log, so the NDCG that stops the training is mostly a count of them: below, 0
#            of 1 useful groups are right, and NDCG@3 is 0.9.
# Known      XGBoost documents a minus behind the metric (`ndcg@3-`) that counts 0. Not searched for upstream
#            otherwise.
# What helps Leave such groups out of the validation data, or `ndcg@3-` in XGBoost. recspec leaves them out and reports
#            their number (docs/explanation/metrics.md).
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   lightgbm 4.7.0, xgboost 3.2.0, catboost 1.2.10, scikit-learn 1.9.1
#   one of ten has a relevant row, ranked last: lightgbm NDCG@3, MAP@3 [np.float64(0.9), np.float64(0.9)]; xgboost
#     NDCG@3, MAP@3, NDCG@3- [0.9, 0.9, 0.0];
#     catboost NDCG@3, MAP@3, recall@3 [0.9, 0.0, 0.9]; scikit-learn NDCG@3 0.0
#   none has: lightgbm NDCG@3, MAP@3 [np.float64(1.0), np.float64(1.0)]; xgboost NDCG@3, MAP@3, NDCG@3- [1.0, 1.0,
#     0.0];
#     catboost NDCG@3, MAP@3, recall@3 [1.0, 0.0, 1.0]; scikit-learn NDCG@3 0.0
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightgbm==4.7.0 xgboost-cpu==3.2.0 catboost==1.2.10 scikit-learn==1.9.1 numpy==2.4.6 pandas==3.1.1

cat > "$folder/check.py" <<'PYTHON'
import sys
import warnings

import catboost
import lightgbm
import numpy as np
import sklearn
import xgboost
from catboost.utils import eval_metric
from sklearn.metrics import ndcg_score

warnings.simplefilter("ignore")
versions = lightgbm.__version__, xgboost.__version__, catboost.__version__, sklearn.__version__
print("lightgbm {}, xgboost {}, catboost {}, scikit-learn {}".format(*versions))
# Ten groups of six rows whose score is the row's number: the relevant row of the first group has the lowest.
rows, groups = np.tile(np.arange(6.0), 10)[:, None], np.repeat(np.arange(10), 6)
labels = np.zeros(60)
labels[0] = 1


def by_lightgbm(labels):
    training = lightgbm.Dataset(rows, rows[:, 0], group=[6] * 10, params={"min_data_in_bin": 1, "verbosity": -1})
    valid, told = lightgbm.Dataset(rows, labels, group=[6] * 10, reference=training), {}
    options = {"objective": "lambdarank", "metric": ["ndcg", "map"], "eval_at": [3], "verbosity": -1, "min_data_in_leaf": 1}
    options |= {"label_gain": list(range(6)), "num_threads": 1}
    lightgbm.train(options, training, 20, valid_sets=[valid], valid_names=["v"], callbacks=[lightgbm.record_evaluation(told)])
    return [round(told["v"][name][-1], 3) for name in ("ndcg@3", "map@3")]


def by_xgboost(labels):
    data, told = xgboost.DMatrix(rows, labels, qid=groups), {}
    data.set_base_margin(rows[:, 0])
    options = {"objective": "rank:ndcg", "learning_rate": 0, "eval_metric": ["ndcg@3", "map@3", "ndcg@3-"], "nthread": 1}
    xgboost.train(options, data, 1, evals=[(data, "v")], evals_result=told, verbose_eval=False)
    return [round(told["v"][name][-1], 3) for name in ("ndcg@3", "map@3", "ndcg@3-")]


found = {}
for what, given in (("one of ten has a relevant row, ranked last", labels), ("none has", np.zeros(60))):
    by_catboost = [round(eval_metric(given, rows[:, 0], f"{name}:top=3", group_id=groups)[0], 3) for name in ("NDCG", "MAP", "RecallAt")]
    by_sklearn = round(float(ndcg_score(given.reshape(10, 6), rows.reshape(10, 6), k=3)), 3)
    found[what] = by_lightgbm(given), by_xgboost(given), by_catboost, by_sklearn
    print(f"{what}: lightgbm NDCG@3, MAP@3 {found[what][0]}; xgboost NDCG@3, MAP@3, NDCG@3- {found[what][1]};")
    print(f"  catboost NDCG@3, MAP@3, recall@3 {found[what][2]}; scikit-learn NDCG@3 {found[what][3]}")
described = {
    "one of ten has a relevant row, ranked last": ([0.9, 0.9], [0.9, 0.9, 0.0], [0.9, 0.0, 0.9], 0.0),
    "none has": ([1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0], 0.0),
}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
