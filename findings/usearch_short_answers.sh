#!/usr/bin/env bash
# usearch leaves the ends of a batch's short answers unfilled: keys and distances there look like real ones.
#
# Version    usearch 2.26.6, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   Five neighbours are asked of an index of three. Places without a neighbour hold what no key
#            can be, as faiss has -1, or there is an error, as from hnswlib.
# Behaviour  `matches.keys` and `matches.distances` hold what lay in memory, such as key 0 at distance 0,
#            the best there is. Only `matches.counts` tells. Whoever merges the answers of two indexes by
#            distance may put an item on top that is in neither.
# Known      Not searched for upstream.
# What helps Cut each row at its count. recspec searches by matrix products or faiss, and lists every item
#            once (tests/test_peer_reports.py).
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   usearch 2.26.6
#   keys that were added: 7, 8, 9; asked for 5 of each of two queries
#   keys of the first: [7, 8, 9] and then (any value) [0, 0]
#   distances: [0.8999999761581421, 0.8999999761581421, 0.8999999761581421] and then (any value) [nan, nan]
#   shape, type and counts: (2, 5) uint64 ndarray [3, 3]
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check usearch==2.26.6 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import numpy as np
import usearch
from usearch.index import Index

print(f"usearch {usearch.__version__}")
index = Index(ndim=4, metric="ip", dtype="f32")
index.add(np.array([7, 8, 9]), np.eye(3, 4, dtype=np.float32))
matches = index.search(np.full((2, 4), 0.1, np.float32), 5)
print("keys that were added: 7, 8, 9; asked for 5 of each of two queries")
print("keys of the first:", sorted(matches.keys[0, :3].tolist()), "and then (any value)", matches.keys[0, 3:].tolist())
print("distances:", matches.distances[0, :3].round(3).tolist(), "and then (any value)", matches.distances[0, 3:].tolist())
found = matches.keys.shape, matches.keys.dtype.name, type(matches.keys).__name__, matches.counts.tolist()
print("shape, type and counts:", *found)
described = (2, 5), "uint64", "ndarray", [3, 3]
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
