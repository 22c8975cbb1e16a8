"""Settings that were not given, proposed from the data, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from pydantic import ValidationError

from recspec.base import config
from recspec.base.errors import SpecError
from recspec.data.storage import Ragged, open_split, preparation
from recspec.evaluation import list_metric
from recspec.feature_spec import FeatureSpec, Role
from recspec.loading import holds_negatives, negatives_by_default
from recspec.models import (
    DataFacts,
    IdFacts,
    Model,
    PreparedNegatives,
    Proposals,
    Task,
    TrainedItemModel,
    on_meta_device,
)
from recspec.models.layers import number_widths
from recspec.training.choices import Choice, pick_valid
from recspec.training.settings import OptimizerSettings, TrainSettings

MOST_LABELS = 1 << 20
"""Rows whose labels are read to estimate the share of positives."""

MOST_EPOCHS = 1000
"""Passes over the data after which an open-ended run stops in any case."""

PLATEAU_CUTS = 2
"""Cuts of the learning rate before training on labelled rows stops, as in BARS (Zhu et al., SIGIR 2022)."""
PATIENCE, FALLING_PATIENCE = 10, 2
"""Evaluations without improvement, and clearly below the best one, after which an open-ended run stops.

Of 210 recorded runs on 19 datasets, the slowest waited 6 evaluations for its next best value, and a patience of 4
stopped slow starts for good.
"""

HELD_OUT_SHARE, MOST_HELD_OUT, FEWEST_ROWS_TO_DIVIDE = 0.1, 1_000_000, 200
"""Share of train held out where there is no valid split, the most rows of it, and the smallest dataset to divide."""

PAIRS_PER_SAMPLE, FEW_PAIRS = 4, 2_000_000
"""Pairs of user and item that an evaluation between epochs scores, for each sample of an epoch: about half of the
epoch's cost, as scoring a pair costs a ninth of training on a sample (NeuMF on a CPU). So many cost little anyway."""

PAIRS_BY_PRODUCT = 300_000_000
"""Pairs of user and item that an evaluation scores for a model whose scores are a product of matrices: two seconds, at
5 to 7 ns a pair (NeuMF's factors and two towers, one thread of an EPYC)."""

FEWEST_USERS, MOST_PAIRS = 500, 10_000_000
"""The fewest users that a ranking of all items is worth it for, and the most pairs that they may cost."""

FEWEST_ROWS_TO_CALIBRATE = 1000
"""Rows of valid to which a calibration is fitted. Log loss on test, none / temperature / isotonic: DLRM on Adult (3,327
rows of valid) .2741 / .2729 / .2750, on labelled ml-latest-small (9,958) .6092 / .5999 / .5994, DCNv2 there .5679 /
.5613 / .5607: the line never loses, the isotonic map needs more rows."""

FEW_CANDIDATES = 10
"""A list of no more candidates says little about a ranking."""


def resolve(
    model: type[Model],
    spec: FeatureSpec,
    settings: TrainSettings,
    model_settings: config.Settings,
    device: torch.device,
    resumed_settings: Mapping[str, Mapping[str, object]] | None = None,
) -> Resolved:
    """Propose settings that were not given: those in no recipe, no `--set` and no argument.

    `resumed_settings` holds the sections `train` and `settings` of the run that continues, whose settings stay as they
    are.
    """
    found = Resolved(settings, model_settings)
    if resumed_settings is not None:
        found.apply_defaults(dict(_as_at_the_start(resumed_settings, found)))
        return found
    of_rows, facts = not issubclass(model, TrainedItemModel), gather_facts(spec, settings, device)
    found.apply_defaults(found.drop_for_other_optimizer(model.defaults(facts)))
    found.leave_out_absent_parts(lambda: model(spec, found.model_settings))
    # Each step depends on what the ones before have chosen.
    if of_rows:
        found.apply_defaults(_held_out(found.settings, facts))
    if pick_valid(facts.splits, found.settings).value:
        found.apply_defaults(_metric(model, found, facts))
    found.apply_defaults(_length(model, found.settings, facts))
    if of_rows:
        found.apply_defaults(_calibration(found.settings, facts))
    return found


class Resolved:
    """The settings of a run: those that were given, the proposed ones, and the classes' defaults for the others."""

    def __init__(self, settings: TrainSettings, model_settings: config.Settings) -> None:
        self.settings, self.model_settings = settings, model_settings
        self.proposed: dict[str, Choice[object]] = {}
        """What was proposed and took effect, as `train.epochs` or `settings.dropout`."""

    def drop_for_other_optimizer(self, proposals: Proposals) -> Proposals:
        """Without those for another optimizer than the one that was given: a learning rate suits one optimizer."""
        named = {self._named(name): value for name, value in proposals.items()}
        theirs = named.get("train.optimizer", (TrainSettings.model_fields["optimizer"].default, ""))[0]
        if "optimizer" in self.settings.model_fields_set and self.settings.optimizer != theirs:
            return {name: each for name, each in named.items() if name.partition(".")[2] not in _OF_OPTIMIZERS}
        parts = named.get("train.parts", ({}, ""))[0]
        if isinstance(parts, Mapping) and any("weight_decay" in own for own in parts.values()):
            sparse = self.settings.sparse_gradients == "always" or self.settings.embedding_backend == "fbgemm"
            if sparse or "weight_decay" in self.settings.model_fields_set:
                del named["train.parts"]
        return named

    def leave_out_absent_parts(self, make: Callable[[], Model]) -> None:
        """Take back what was proposed for parts that the model, with its given settings, does not have or freezes."""
        if "train.parts" not in self.proposed:
            return
        trained = [
            f"{name}."
            for name, _ in on_meta_device(make).named_parameters()
            if not any(f"{name}.".startswith(f"{part}.") for part in self.settings.frozen)
        ]
        kept = {
            part: own
            for part, own in self.settings.parts.items()
            if any(name.startswith(f"{part}.") for name in trained)
        }
        reason = self.proposed.pop("train.parts").reason
        self.settings = _with(self.settings, {"parts": kept})
        if kept:
            self.proposed["train.parts"] = Choice(kept, reason)

    def apply_defaults(self, proposals: Proposals) -> None:
        """Take each proposal for a setting that has no value yet, unless a given setting does not go with it."""
        given = {f"train.{name}" for name in self.settings.model_fields_set}
        given |= {f"settings.{name}" for name in self.model_settings.model_fields_set}
        named = {self._named(name): each for name, each in proposals.items()}
        free = {name: each for name, each in named.items() if name not in given}
        if not self._take(free):
            for name, each in free.items():
                self._take({name: each})

    def _named(self, name: str) -> str:
        if name.startswith(("train.", "settings.")):
            return name
        return f"{'settings' if name in type(self.model_settings).model_fields else 'train'}.{name}"

    def _take(self, proposals: Proposals) -> bool:
        sections: dict[str, dict[str, object]] = {"train": {}, "settings": {}}
        for name, (value, _) in proposals.items():
            section, _, setting = name.partition(".")
            sections[section][setting] = value
        try:
            own = _with(self.model_settings, sections["settings"])
            train = _with(self.settings, sections["train"])
        except ValidationError:
            return False
        self.settings, self.model_settings = train, own
        self.proposed |= {name: Choice(value, reason) for name, (value, reason) in proposals.items()}
        return True


_OF_OPTIMIZERS = frozenset({*OptimizerSettings.model_fields, "parts"})


def _with(settings: config.SettingsType, values: Mapping[str, object]) -> config.SettingsType:
    """Settings with some more values, checked together."""
    if not values:
        return settings
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    return type(settings).model_validate({**given, **values})


def _as_at_the_start(
    resumed_settings: Mapping[str, Mapping[str, object]], found: Resolved
) -> Iterator[tuple[str, tuple[object, str]]]:
    """The settings of the run that continues which are not the classes' defaults."""
    for section, settings in {"train": type(found.settings), "settings": type(found.model_settings)}.items():
        plain = settings.model_construct().model_dump(mode="json")
        for name, value in resumed_settings.get(section, {}).items():
            if name in plain and value != plain[name]:
                yield f"{section}.{name}", (value, "as at the start of the run")


# --- facts -----------------------------------------------------------------------------------------------------------


def gather_facts(spec: FeatureSpec, settings: TrainSettings, device: torch.device) -> DataFacts:
    """What the rules look at: counts from the files' own metadata, and the labels of `MOST_LABELS` rows at most."""
    splits = settings.train_splits
    roles: tuple[Role, ...] = ("user", "item", "context", "history")
    in_all = set.intersection(*(set(spec.columns(split)) for split in splits))
    held = {name: _num_ids(spec, name) for role in roles for name in spec.role(role) if name in in_all}
    known = [name for name, number in held.items() if number != UNKNOWN]
    readers = [open_split(spec, split, known) for split in splits]
    rows = sum(reader.num_rows for reader in readers)
    values = {name: sum(reader.num_values[name] for reader in readers) for name in known}
    task = task_of(spec)
    by_default = negatives_by_default(spec)
    negatives = settings.negatives if settings.negatives is not None else by_default
    share = 1.0 if task == "interactions" and not holds_negatives(spec) else _positive_share(spec, splits)
    histories = [name for name in spec.role("history") if name in known]
    return DataFacts(
        task=task,
        rows=rows,
        samples=rows * (1 + negatives),
        positive_share=share / (1 + negatives),
        ids={
            name: IdFacts(number, values[name] / number, spec.features[name].is_list)
            for name, number in held.items()
            if number > 0
        },
        numbers=sum(number_widths(spec, [name for name, number in held.items() if number == 0]).values()),
        users=_num_entities(spec, "user"),
        items=_num_entities(spec, "item"),
        history=max((values[name] / max(1, rows) for name in histories), default=0.0),
        longest_history=max((spec.features[name].length or 0 for name in histories), default=0),
        prepared_negatives=None if settings.negatives == 0 else _prepared_negatives(spec),
        valid_rows=open_split(spec, "valid", ()).num_rows if "valid" in spec.splits else 0,
        splits=tuple(spec.splits),
        candidates=int(str(spec.metadata.get("test_samples_per_series", 1))),
        negatives=by_default,
        list_metric=list_metric(spec),
        device=device.type,
    )


UNKNOWN = -1
"""The number of ids of a feature whose cardinality is `auto`."""


def _num_ids(spec: FeatureSpec, name: str) -> int:
    """Ids of a categorical feature, or `UNKNOWN`; 0 for a number."""
    with suppress(SpecError):
        return spec.num_ids(name) if spec.features[name].is_categorical else 0
    return UNKNOWN


def _num_entities(spec: FeatureSpec, role: Literal["user", "item"]) -> int:
    """Users or items that have an id of their own; 0 without such a feature."""
    name = spec.id_of(role)
    return spec.num_ids(name) - int(spec.reserves_unknown(name)) if name else 0


def _prepared_negatives(spec: FeatureSpec) -> PreparedNegatives | None:
    """The negatives beside train's interactions, if the preparation says how they were drawn."""
    number, how = spec.metadata.get("train_negatives"), _prepare_settings(spec)
    if not isinstance(number, int) or number < 1 or how.get("negatives") not in ("uniform", "popularity"):
        return None
    return PreparedNegatives(number, how["negatives"] == "popularity", how.get("reject_seen") is True)


def task_of(spec: FeatureSpec) -> Task:
    """Interactions if the splits were prepared for ranking: a positive and its candidates."""
    both = spec.id_of("user") and spec.id_of("item")
    return "interactions" if spec.has_series and both else "clicks"


def _positive_share(spec: FeatureSpec, splits: tuple[str, ...]) -> float:
    """The share of positive labels among evenly spread rows."""
    positive = read = 0
    for split in splits:
        reader = open_split(spec, split, (spec.label,))
        cuts = reader.blocks(MOST_LABELS // 16).tolist()
        step = max(1, math.ceil(reader.num_rows * len(splits) / MOST_LABELS))
        for start, stop in list(pairwise(cuts))[::step]:
            labels = reader.read(start, min(stop, start + MOST_LABELS // 16))[spec.label]
            assert not isinstance(labels, Ragged)
            positive += int(np.count_nonzero(np.greater(labels, 0)))
            read += len(labels)
    return positive / max(1, read)


# --- the path --------------------------------------------------------------------------------------------------------


def pick_path(spec: FeatureSpec, model: type[Model] = Model) -> Choice[str]:
    """The kind of data, which decides the negatives and the metric, and whether its splits are by time."""
    prepared = _prepare_settings(spec)
    threshold = prepared.get("positive_from", prepared.get("min_rating"))
    if issubclass(model, TrainedItemModel):
        kind, why = "implicit", "the positives of each user are learned as a list; ranking judges"
    elif task_of(spec) == "clicks":
        kind, why = "labelled", "rows have labels of their own: no negatives are drawn, log loss and AUC judge"
        if threshold is not None:
            kind, why = "rated", f"labels are ratings from {threshold} on: no negatives are drawn"
    elif holds_negatives(spec):
        kind, why = "implicit", "rows are interactions, with negatives from the preparation; ranking judges"
    else:
        kind, why = "implicit", "rows are interactions without labels: negatives are drawn, ranking judges"
        if threshold is not None:
            kind, why = "rated", f"rows are ratings from {threshold} on, taken as interactions: negatives are drawn"
    if any(each.get("split") == "time" for each in (prepared, spec.summary, spec.metadata)):
        return Choice(f"{kind}, split by time", f"{why}; valid and test are the latest rows")
    return Choice(kind, why)


def _prepare_settings(spec: FeatureSpec) -> Mapping[str, object]:
    """The settings that the dataset was prepared with, if they are known."""
    found = preparation(spec.folder).get("settings")
    return found if isinstance(found, dict) else {}


# --- the metric and the length of a run ------------------------------------------------------------------------------


def _held_out(settings: TrainSettings, facts: DataFacts) -> Proposals:
    """A share of train to validate on, if nothing else says when to stop."""
    stops = "valid" in facts.splits or "epochs" in settings.model_fields_set
    if stops or facts.task != "clicks" or settings.negatives or facts.rows < FEWEST_ROWS_TO_DIVIDE:
        return {}
    share = min(HELD_OUT_SHARE, MOST_HELD_OUT / facts.rows)
    return {"train.valid_share": (share, "the dataset has no split valid, so rows of train choose the epoch")}


def _metric(model: type[Model], found: Resolved, facts: DataFacts) -> Proposals:
    """The metric that suits the data, and a sample of users if all would cost too much."""
    settings, of_users = found.settings, issubclass(model, TrainedItemModel)
    if (facts.task == "clicks" and not of_users) or "valid" not in facts.splits:
        return {"train.metric": ("rows/log_loss", "rows have labels; AUC alone would not see overconfidence")}
    users = max(1, min(facts.users, facts.valid_rows // max(1, facts.candidates)))
    cost = max(1, facts.longest_history if "history" in model.needs else 1)  # of a pair, in events
    by_product = of_users or model.traits.scores_by_product(found.model_settings)
    pairs = PAIRS_BY_PRODUCT if by_product else max(PAIRS_PER_SAMPLE * facts.samples, FEW_PAIRS // cost)
    ranked = max(pairs // max(1, facts.items), min(FEWEST_USERS, MOST_PAIRS // cost // max(1, facts.items)))
    described = f"{users:,} users x {facts.items:,} items"
    too_much, metric = f"ranking {described} after every epoch would cost too much", facts.list_metric
    sample: Proposals = {}
    if settings.valid_users is not None and "valid_users" in settings.model_fields_set:
        why = "rows are interactions; train.valid_users says how many users are ranked"
    elif users <= ranked:
        why = f"rows are interactions; ranking {described} costs little"
    elif ranked >= FEWEST_USERS:
        why = f"rows are interactions; of {described}, a sample of users is ranked"
        sample = {"train.valid_users": (ranked, too_much)}
    elif facts.candidates > FEW_CANDIDATES or facts.candidates == 1:
        metric, why = "sampled/ndcg@10", too_much
    else:
        metric, why = "rows/auc", f"rows are interactions, whose order counts; {described} are too many to rank"
    return {"train.metric": (metric, why), **sample}


def _calibration(settings: TrainSettings, facts: DataFacts) -> Proposals:
    """A line through the logits of labelled rows, if enough of them are not trained on."""
    held_out = round(facts.rows * settings.valid_share) if "valid" not in facts.splits else facts.valid_rows
    draws = facts.negatives if settings.negatives is None else settings.negatives
    trains_on_all = "valid" in settings.train_splits
    if facts.task != "clicks" or draws or trains_on_all or held_out < FEWEST_ROWS_TO_CALIBRATE:
        return {}
    why = f"probabilities of labelled rows should come true; a line is fitted to {held_out:,} rows"
    return {"train.calibration": ("temperature", why)}


def _length(model: type[Model], settings: TrainSettings, facts: DataFacts) -> Proposals:
    """Passes over the data, and when to stop before; nothing if the number of epochs was given."""
    if "epochs" in settings.model_fields_set:
        return {}
    fixed = TrainSettings.model_fields["epochs"].default
    scheduled = [each.schedule for each in (settings, *settings.part_settings.values())]
    decaying = next((each for each in scheduled if each in ("linear", "polynomial")), None)
    if decaying:
        return {"train.epochs": (fixed, f"train.schedule {decaying} needs a length")}
    if not (valid := pick_valid(facts.splits, settings)).value:
        return {"train.epochs": (fixed, f"{valid.reason}, so nothing says when to stop")}
    cuts: Proposals = {}
    if facts.task == "clicks" and not settings.negatives and not issubclass(model, TrainedItemModel):
        cuts = {"train.plateau_cuts": (PLATEAU_CUTS, "where valid stops improving, a smaller rate often goes on")}
    return {
        **cuts,
        "train.epochs": (MOST_EPOCHS, "until valid stops improving (train.patience), at most"),
        "train.patience": (PATIENCE, "a metric may be flat for several epochs and then climb"),
        "train.falling_patience": (FALLING_PATIENCE, "evaluations clearly below the best one"),
    }
