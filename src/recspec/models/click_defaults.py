"""Default settings of click models, from the facts of a dataset.

benchmarks/stress/defaults_clicks.py names the datasets and repeats the measurements.

Wide embeddings of ids with few rows learn these rows by heart: without regularisation the log loss on valid is best
after one or two epochs. What helps is weight decay of whole tables under Adam. It shrinks rows that a step does not see
too, and Adam's normalisation makes this strongest for rare ids. Decoupled decay (AdamW), dropout and narrower
embeddings do not replace it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from recspec.models.facts import DataFacts, Proposals

FEWEST_ROWS, MOST_ROWS = 64, 65_536
"""Bounds of the batch size."""

LEARNING_RATE = 1e-3
"""Adam's; the strengths of the decay were fitted with it."""

DECAY = 0.1
"""Weight decay of embeddings for one training row per id."""

MANY_ROWS = 1_000_000
"""Training rows beyond which the decay falls with their number: more rows overfit less in an epoch."""

PUBLISHED_ROWS = 100_000_000
"""Training rows from which a model has its published sizes, and no decay."""

TABLE_NUMBERS_PER_ROW = 20_000
"""Numbers of embedding tables for each row of a batch beyond which a pass over the tables costs more than the batch.

A fused step of Adam takes 0.6 ns for each number on a CPU core; forward and backward of these models about 10
microseconds a row.
"""

ADAGRAD_RATE = 0.02
"""Adagrad's learning rate for large tables, as in the recipes for Criteo."""

DENSE_IDS = 200
"""Rows per id from which products and crosses of pairs of features can be learnt."""


def rows_per_id(facts: DataFacts) -> float:
    """Mean number of training rows, or events in lists, that hold an id, over all tables; 0 without ids."""
    ids = sum(each.num_ids for each in facts.ids.values())
    return sum(each.rows_per_id * each.num_ids for each in facts.ids.values()) / ids if ids else 0.0


def is_published_size(facts: DataFacts) -> bool:
    """Whether there are so many rows that the published sizes fit."""
    return facts.samples >= PUBLISHED_ROWS


def hidden(facts: DataFacts) -> tuple[int, ...]:
    """Widths of the MLP up to `PUBLISHED_ROWS` rows."""
    return (256, 128) if facts.samples <= MANY_ROWS else (512, 256)


def embedding_dim(facts: DataFacts) -> int:
    """Width of embeddings up to `PUBLISHED_ROWS` rows."""
    return 16 if facts.samples <= MANY_ROWS else 32


def batch_size(facts: DataFacts) -> int:
    """The power of two at or below 4 sqrt(samples): steps of an epoch then grow as the root of the rows, too."""
    wanted = 4 * math.sqrt(max(1, facts.samples))
    return 1 << int(math.log2(min(MOST_ROWS, max(FEWEST_ROWS, wanted))))


def decay(facts: DataFacts) -> float:
    """Weight decay of embedding tables, to two digits.

    DECAY / sqrt(rows per id): ids with many rows need less. Fewer rows than ids count as one row per id.
    """
    few = min(1.0, MANY_ROWS / max(1, facts.samples))
    return float(f"{DECAY / math.sqrt(max(1.0, rows_per_id(facts))) * few:.2g}")


def training(facts: DataFacts, tables: Mapping[str, float], *, interactions: bool = False) -> Proposals:
    """Settings of training: batch size, learning rate, and the update of embeddings.

    `tables` gives for each part of the model with embeddings its share of the decay. By default nothing for
    interactions, whose drawn negatives are other data than these rules were fitted on.
    """
    if facts.task == "interactions" and not interactions:
        return {}
    found: dict[str, tuple[object, str]] = {
        "train.batch_size": (batch_size(facts), f"the power of two up to 4 sqrt({facts.samples:,} samples)"),
        "train.learning_rate": (LEARNING_RATE, "the rate of Adam that these rules were fitted with"),
    }
    if not facts.ids or is_published_size(facts):
        return found
    ids, per_id = sum(each.num_ids for each in facts.ids.values()), rows_per_id(facts)
    if ids * embedding_dim(facts) > TABLE_NUMBERS_PER_ROW * batch_size(facts):
        sparse = {"optimizer": "adagrad", "learning_rate": ADAGRAD_RATE}
        why = f"tables of {ids:,} ids are too large to be updated whole at every step; Adagrad updates the rows seen"
        found["train.parts"] = ({part: dict(sparse) for part in tables}, why)
    else:
        strength = decay(facts)
        parts = {part: {"weight_decay": float(f"{strength * share:.2g}")} for part, share in tables.items()}
        found["train.parts"] = (parts, f"{per_id:.3g} training rows per id; rare ids overfit without decay")
    return found


def drawn_anew(facts: DataFacts) -> Proposals:
    """Negatives that were prepared by popularity, but others in every epoch: a few fixed ones are learnt by heart."""
    made = facts.prepared_negatives
    if made is None or not made.by_popularity or facts.task != "interactions" or is_published_size(facts):
        return {}
    same = "as they were prepared"
    return {
        "train.negatives": (made.number, f"in place of the {made.number} prepared, which are learnt by heart"),
        "train.negative_distribution": ("popularity", same),
        "train.popularity_power": (1.0, same),
        "train.reject_positives": (made.reject_seen, same),
    }
