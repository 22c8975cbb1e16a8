"""Labelled rows of ten columns of ids that act in pairs and triples, as text.

    python benchmarks/stress/columns_in_pairs.py ROWS.csv
    recspec prepare table ROWS.csv DATA --set label=label
    recspec train wide_deep DATA RUN          # and finalnet, dcnv2, lightgbm; --set crosses=[] for none
    recspec evaluate RUN DATA

A logit is the sum of a normal effect for each id (deviation .5), and for each combination of ids of the chosen pairs
and triples (1.2), scaled to a deviation of 4 around -2.2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROWS = 200_000
SIZES = (4, 6, 8, 12, 20, 30, 50, 80, 150, 400)
LONG_TAILED = 50
"""Ids of a column from which few of them are frequent."""
TOGETHER = ((0, 3), (1, 4), (2, 5), (3, 6), (4, 5), (1, 7), (0, 8), (0, 1, 2), (1, 2, 3), (0, 2, 4))
DEVIATION, SHIFT = 4.0, -2.2


def main(out: Path) -> None:
    """Write the rows, and print the least possible log loss."""
    random = np.random.default_rng(7)

    def column(size: int) -> NDArray[np.int64]:
        if size < LONG_TAILED:
            return random.integers(0, size, ROWS)
        tail: NDArray[np.int64] = (random.pareto(1.2, ROWS) * size / 6).astype(np.int64)
        return tail.clip(max=size - 1)

    ids, logits = [column(size) for size in SIZES], np.zeros(ROWS)
    for columns in (*((place,) for place in range(len(SIZES))), *TOGETHER):
        sizes = [SIZES[place] for place in columns]
        effects = random.normal(size=sizes) * (0.5 if len(columns) == 1 else 1.2)
        logits += effects[tuple(ids[place] for place in columns)]
    logits = logits / logits.std() * DEVIATION + SHIFT
    chance = 1 / (1 + np.exp(-logits))
    labels = random.random(ROWS) < chance
    with out.open("w", encoding="utf-8") as file:
        file.write(",".join([*(f"c{place}" for place in range(len(SIZES))), "label"]) + "\n")
        for row in zip(*ids, labels.astype(int), strict=True):
            file.write(",".join([*(f"v{each}" for each in row[:-1]), str(row[-1])]) + "\n")
    least = -(chance * np.log(chance) + (1 - chance) * np.log1p(-chance)).mean()
    print(f"{labels.mean():.3f} positive; the least possible log loss is {least:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
