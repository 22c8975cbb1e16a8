"""Choices of the rows that a run reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recspec.distributed import Ranks
from recspec.errors import SpecError, listed, unknown
from recspec.loading import Loader, Part, holds_negatives, negatives_by_default
from recspec.machine import parse_bytes
from recspec.models import Model
from recspec.spec import NO_FILES, FeatureSpec, Role
from recspec.training.choice import Choice
from recspec.training.settings import TrainSettings

HELD_OUT = "held out"
"""The valid split of a dataset without one: a share of the training rows."""

STEPS_PER_EPOCH = 200
MOST_ROWS = {"cpu": 65536, "cuda": 131072}
FEWEST_ROWS = 256


def check_splits(spec: FeatureSpec, splits: Sequence[str]) -> None:
    """Check that the dataset has the splits to train on.

    Raises:
        SpecError: naming every split that is missing.
    """
    if not spec.splits:
        raise SpecError(f"{spec.folder}: {NO_FILES}")
    problems = [unknown("split", split, spec.splits) for split in splits if split not in spec.splits]
    if problems:
        raise SpecError.of(f"{spec.folder}: train.train_splits", problems)


def pick_valid(spec: FeatureSpec, settings: TrainSettings) -> Choice[str]:
    """The split that picks the best epoch; `HELD_OUT` rows of train where there is none; empty without either."""
    if "valid" in spec.splits:
        if "valid" in settings.train_splits:
            return Choice("", "train.train_splits trains on valid")
        return Choice("valid", "the dataset has this split")
    if settings.valid_share:
        return Choice(HELD_OUT, f"no split valid; train.valid_share is {settings.valid_share}")
    return Choice("", "no split valid, and train.valid_share is 0")


def pick_negatives(spec: FeatureSpec, settings: TrainSettings) -> Choice[int]:
    """Negatives drawn for each positive.

    Raises:
        SpecError: if some are asked for and the dataset has no users or items.
    """
    if settings.negatives is None:
        number = negatives_by_default(spec)
        return Choice(number, "rows are interactions" if number else "rows have their own labels")
    if settings.negatives > 0:
        spec.require(("user", "item"), "drawing negatives (train.negatives)")
    return Choice(settings.negatives, "as asked")


def pick_batch_size(asked: int | None, samples: int, device: torch.device) -> tuple[int, str]:
    """Rows of a step and the reason; `samples` is the number of an epoch."""
    if asked is not None:
        return asked, "as asked"
    most = MOST_ROWS.get(device.type, MOST_ROWS["cpu"])
    wanted = 1 << max(0, (samples // STEPS_PER_EPOCH).bit_length() - 1)
    size = min(most, max(FEWEST_ROWS, wanted))
    if wanted > most:
        return size, f"the most chosen on a {device.type}, for an epoch of {samples:,} samples"
    if wanted < FEWEST_ROWS:
        return size, f"the fewest chosen, for an epoch of {samples:,} samples"
    return size, f"200 to 400 steps for an epoch of {samples:,} samples"


def pick_metric(spec: FeatureSpec, settings: TrainSettings) -> Choice[str]:
    """The metric that picks the best epoch: the rank of the positive among enough candidates, else AUC of all rows."""
    if settings.metric is not None:
        return Choice(settings.metric, "as asked")
    candidates = spec.metadata.get("test_samples_per_series")
    if "valid" in spec.splits and isinstance(candidates, int) and candidates > 10:
        return Choice("sampled/ndcg@10", f"each positive has {candidates} candidates")
    return Choice("rows/auc", "positives have no more than 10 candidates")


def unread(model: Model, spec: FeatureSpec) -> dict[str, list[str]]:
    """Features of each role that the model does not use."""
    roles: tuple[Role, ...] = ("user", "item", "context", "history", "negative_history")
    read = model.loss_features()
    found = {role: [name for name in spec.role(role) if name not in read] for role in roles}
    return {role: names for role, names in found.items() if names}


def open_rows(
    spec: FeatureSpec,
    settings: TrainSettings,
    model: Model,
    ranks: Ranks,
    *,
    negatives: int,
    valid: str,
    fixed_length: bool = False,
    held_out: bool = False,
) -> Loader:
    """The rows to train on, or with `held_out` those that `valid_share` keeps from training, in order.

    Raises:
        SpecError: if there is none.
    """
    share = settings.valid_share if valid == HELD_OUT else 0.0
    used = {*(model.features() if held_out else model.loss_features()), spec.label}
    splits = settings.train_splits
    loader = Loader(
        spec,
        splits,
        batch_size=max(1, (settings.batch_size or 1) // (1 + negatives)),
        features=tuple(name for name in spec.columns(splits[0]) if name in used),
        seed=settings.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        memory_budget=parse_bytes(settings.memory_budget),
        device=ranks.device,
        fixed_length=fixed_length,
        positives_only=negatives > 0 and spec.has_series and ("valid" in splits or holds_negatives(spec)),
        shuffle=not held_out,
        part=Part(share, held_out, settings.seed) if share else None,
    )
    if loader.num_rows == 0:
        raise SpecError(f"{spec.folder}: the training splits {listed(splits)} hold no row")
    return loader
