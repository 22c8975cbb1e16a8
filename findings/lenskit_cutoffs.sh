#!/usr/bin/env bash
# LensKit's NDCG, recall and precision at k are not those of other libraries, and its means leave out users without a list.
#
# Version    lenskit 2025.8.1, numpy 2.4.6, ranx 0.3.21 (of another environment), Python 3.11, Linux x86-64.
# Expected   User B has four relevant items, and a list with a relevant item at places 1 and 3. NDCG@3 is .704
#            (discount 1/log2(place + 1)), recall@3 2/4. A list of two, one of them relevant, has precision@3 1/3. A
#            user without a list counts 0. So say ranx, pytrec_eval, RePlay and Cornac.
# Behaviour  NDCG@3 is .620, as places 1 and 2 have the same discount (log2(place), at least 1). Recall@3 is 2/3: it
#            divides by at most k. Precision@3 of two items is 1/2: it divides by the length of the list. `RunAnalysis`
#            averages over the lists it was given, so a user that the model gives none is not counted.
# Known      Not searched for upstream.
# What helps Compare numbers only within one library, and give users without a list an empty one. recspec's metrics are
#            recomputed by ranx and pytrec_eval (docs/explanation/interoperability.md).
#
# Output seen, 2026-11-28, AMD EPYC:
#
#   lenskit 2025.8.1
#   A: list axy, relevant a: NDCG@3, recall@3, precision@3 [1.0, 1.0, 0.333]
#   B: list axb, relevant abcd: NDCG@3, recall@3, precision@3 [0.62, 0.667, 0.667]
#   C: list ax, relevant a: NDCG@3, recall@3, precision@3 [1.0, 1.0, 0.5]
#   mean, with D, who has a relevant item and no list: [0.873, 0.889, 0.5]
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lenskit==2025.8.1 'pyarrow<24' numpy==2.4.6 pandas==2.3.3

cat > "$folder/check.py" <<'PYTHON'
import logging
import sys
import warnings

import lenskit
import numpy as np
from lenskit.data import ItemList, ItemListCollection
from lenskit.metrics import NDCG, Precision, Recall, RunAnalysis

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
print(f"lenskit {lenskit.__version__}")
relevant = {"A": "a", "B": "abcd", "C": "a", "D": "a"}
lists = {"A": "axy", "B": "axb", "C": "ax"}  # none for D
given, test = ItemListCollection(["user_id"]), ItemListCollection(["user_id"])
for user, items in lists.items():
    given.add(ItemList(item_ids=np.array(list(items)), ordered=True), user_id=user)
for user, items in relevant.items():
    test.add(ItemList(item_ids=np.array(list(items))), user_id=user)
analysis = RunAnalysis()
for metric in (NDCG(3), Recall(3), Precision(3)):
    analysis.add_metric(metric)
measured = analysis.measure(given, test)
table = measured.list_metrics().round(3)
found = {user: table.loc[user].tolist() for user in table.index}
for user, values in found.items():
    print(f"{user}: list {lists[user]}, relevant {relevant[user]}: NDCG@3, recall@3, precision@3 {values}")
found["mean"] = measured.list_summary()["mean"].round(3).tolist()
print(f"mean, with D, who has a relevant item and no list: {found['mean']}")
described = {"A": [1.0, 1.0, 0.333], "B": [0.62, 0.667, 0.667], "C": [1.0, 1.0, 0.5], "mean": [0.873, 0.889, 0.5]}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
