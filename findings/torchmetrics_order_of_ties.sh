#!/usr/bin/env bash
# torchmetrics' retrieval metrics of equal scores depend on the order of the rows, and differ between metrics.
#
# Version    torchmetrics 1.9.0, torch 2.13.0 (CPU), Python 3.11, Linux x86-64.
# Expected   Four documents with one score, one of them relevant. Either the relevant one counts at the place where it
#            was given, in every metric, or every metric averages over the orders of ties: HR@1 and NDCG@1 1/4, MRR 25/48.
# Behaviour  NDCG@1 averages (1/4). HR@1 takes the order of the rows: 1 if the relevant row is first, 0 if it is last.
#            MRR sorts by an unstable sort: it is neither of both, and changes with the order of the rows. A model that
#            gives every document one score reaches HR@1 of 1 if the data list positives first, as sampled data often do.
# Known      The sources and docstrings of the package's retrieval metrics mention ties only for NDCG.
# What helps Break ties yourself, by noise or a shuffle of the rows, or use expected values, as recspec does
#            (docs/explanation/metrics.md).
#
# Output seen, 2026-11-27, AMD EPYC:
#
#   torchmetrics 1.9.0, torch 2.13.0+cpu
#   the relevant row first: NDCG@1 0.2500, HR@1 1.0000, MRR 0.3333
#   the relevant row last:  NDCG@1 0.2500, HR@1 0.0000, MRR 0.5000
#   as described
#
# Exit status: 0 as described (MRR may have any value, as its sort is unstable); 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import torch
import torchmetrics
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

print(f"torchmetrics {torchmetrics.__version__}, torch {torch.__version__}")
found = []
for what, labels in (("first:", [1, 0, 0, 0]), ("last: ", [0, 0, 0, 1])):
    asked = torch.full((4,), 0.5), torch.tensor(labels)
    kinds = RetrievalNormalizedDCG(top_k=1), RetrievalHitRate(top_k=1), RetrievalMRR()
    values = [float(kind(*asked, indexes=torch.zeros(4, dtype=torch.long))) for kind in kinds]
    found.append(values)
    print(f"the relevant row {what} NDCG@1 {values[0]:.4f}, HR@1 {values[1]:.4f}, MRR {values[2]:.4f}")
(first_ndcg, first_hit, _), (last_ndcg, last_hit, _) = found
if (first_ndcg, last_ndcg, first_hit, last_hit) != (0.25, 0.25, 1.0, 0.0):
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
