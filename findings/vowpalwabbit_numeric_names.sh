#!/usr/bin/env bash
# Vowpal Wabbit takes a feature's name of digits for a number: ids 007, 7 and 16777223 are one feature.
#
# Version    vowpalwabbit 9.11.9, numpy 2.4.6, Python 3.11, Linux x86-64.
# Expected   Names of features are texts and are hashed, so that ids 7 and 007 have a weight each, but for
#            a chance collision of 1 in 2^24.
# Behaviour  A name of digits is not hashed but read as a number and cut to the bits of the table. Leading
#            zeros vanish, and two whole numbers collide exactly if they agree in their low bits: with `-b
#            24`, 7 and 16777223 always do. Ids that count up from 16777216 so share all their weights with
#            those from 0.
# Known      Upstream closed a report (its issue 4915).
# What helps `--hash all`, or a letter before each id. recspec hashes numbers as their digits, and writes
#            no files for this tool.
#
# Output seen, 2026-11-28, Intel Xeon:
#
#   vowpalwabbit 9.11.9
#   -b 24: learned 1 for 007; predicted 007: 1.0, 7: 1.0, 16777223: 1.0, 8: 0.0
#   -b 24 --hash all: learned 1 for 007; predicted 007: 1.0, 7: 0.0, 16777223: 0.0, 8: 0.0
#   as described
#
# Exit status: 0 as described; 1 if the behaviour changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vowpalwabbit==9.11.9 numpy==2.4.6

cat > "$folder/check.py" <<'PYTHON'
import sys

import vowpalwabbit

print(f"vowpalwabbit {vowpalwabbit.__version__}")
found = {}
for options in ("-b 24", "-b 24 --hash all"):
    model = vowpalwabbit.Workspace(f"--quiet --noconstant {options}")
    for _ in range(200):
        model.learn("1 |item 007")
    names = "007", "7", "16777223", "8"
    found[options] = [round(model.predict(f"|item {name}"), 3) for name in names]
    print(f"{options}: learned 1 for 007; predicted", ", ".join(f"{a}: {b}" for a, b in zip(names, found[options])))
described = {"-b 24": [1.0, 1.0, 1.0, 0.0], "-b 24 --hash all": [1.0, 0.0, 0.0, 0.0]}
if found != described:
    print("the behaviour has CHANGED")
    sys.exit(1)
print("as described")
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
