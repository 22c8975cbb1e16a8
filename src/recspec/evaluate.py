"""Scores of a split and their metrics, each under a named protocol.

    rows      every row of the split is scored: AUC, log loss, accuracy, GAUC
    sampled   each group's candidates are ranked against each other: those the split lists, groups of any size, or n
              drawn ones where it lists positives only
    full      each user's positives are ranked among all items that the user has not acted on before

A number means something only under its protocol: HR@10 among 100 candidates and among all items differ sevenfold for
the same model (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020). So every result carries
the protocol's name and `Evaluation.protocols` says what exactly was ranked.

A model and a classic baseline are evaluated alike: a `Ranker` scores pairs, or all items of some users. With several
ranks each scores its share of the groups, and all of them get the numbers that one process gets.

Shapes: R users or requests; N items; P positives or pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from recspec import config, metrics
from recspec.baselines import BASELINES, ROW_BASELINES, Ids, Interactions, Ranker, Scorer, Scores, count_labels
from recspec.batch import Batch, take, to_device
from recspec.distributed import Ranks
from recspec.errors import DataError, RecspecError, SettingsError, SpecError, listed, unknown
from recspec.feature_spec import FeatureSpec
from recspec.metrics import Ranking, Values
from recspec.models.base import Model
from recspec.sampling import item_features
from recspec.storage import Column, Ragged, SplitReader, open_split
from recspec.tally import Tally

ProtocolName = Literal["rows", "sampled", "full"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)

Metrics = dict[str, dict[str, float]]
"""Protocol -> metric -> value."""

Progress = Callable[[str, float, float | None], None]
"""Called with a stage's name, what is done of it and the whole."""

EARLIER: Mapping[str, tuple[str, ...]] = {
    "train": (),
    "valid": ("train",),
    "validation": ("train",),
    "val": ("train",),
    "test": ("train", "valid", "validation", "val"),
}
"""Split -> the splits whose positives a user is taken to have acted on before it."""

LOWER_IS_BETTER = ("log_loss",)

DEFAULT_KS = (10,)
"""Cut-offs where neither the user nor the dataset names any."""

SHORT_KS = (5, 1)
"""The first of these that is shorter than the longest list takes the place of `DEFAULT_KS` where all are shorter."""

ROWS_PER_BLOCK = 65_536
"""Rows read at once."""

ROWS_PER_FORWARD = 16_384
"""Rows a model scores at once: 64 MB for each layer of 1024."""

SCORES_PER_BLOCK = 1 << 22
"""Scores of users x items held at once: 16 MB in fp32, which a core's caches still help with."""

KEYS_HELD = 1 << 25
"""Pairs of user and item held before repeated ones are dropped: 256 MB, or twice those that differ."""

USERS_PER_DRAW = 4_096
"""Users whose negatives are drawn together: some hundred MB of lookups at most."""


@dataclass(frozen=True)
class Evaluation:
    """What a model or baseline reached on a split."""

    metrics: Metrics
    protocols: dict[str, dict[str, object]] = field(default_factory=dict)  # what each protocol ranked
    values: dict[str, dict[str, Values]] = field(default_factory=dict, repr=False)  # of each group
    left_out: dict[str, str] = field(default_factory=dict)  # protocol -> why it was not used
    fitted: Mapping[str, object] = field(default_factory=dict)  # how a baseline was fitted, where there is a choice

    @property
    def standard_errors(self) -> Metrics:
        """Of the metrics that are means over groups."""
        return {
            protocol: {name: _standard_error(values) for name, values in named.items() if len(values) > 1}
            for protocol, named in self.values.items()
        }


@dataclass(frozen=True)
class Report:
    """A model beside the baselines on one split."""

    split: str
    model: Evaluation
    beside: Mapping[str, Evaluation] = field(default_factory=dict)
    not_fitted: Mapping[str, str] = field(default_factory=dict)  # baseline -> why

    @property
    def metrics(self) -> Metrics:
        """The model's."""
        return self.model.metrics

    @property
    def baselines(self) -> dict[str, Metrics]:
        """Baseline -> protocol -> metric -> value."""
        return {name: evaluation.metrics for name, evaluation in self.beside.items()}

    @cached_property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each baseline and protocol that beats the model."""
        return verdicts(self.model, self.beside)

    @property
    def left_out(self) -> dict[str, str]:
        """Protocol or baseline -> why it is not there."""
        return {**self.model.left_out, **self.not_fitted}

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each reason why something is left out, and for each baseline fitted on a part of the rows."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.not_fitted.items():
            by_reason.setdefault(why, []).append(name)
        absent = [f"protocol {name} left out: {why}" for name, why in self.model.left_out.items()]
        absent += [f"{', '.join(names)} left out: {why}" for why, names in by_reason.items()]
        return tuple(absent) + tuple(
            f"{name} was fitted on an even sample of {_count(found.fitted, 'rows')} of "
            f"{_count(found.fitted, 'of_rows')} rows"
            for name, found in self.beside.items()
            if found.fitted.get("rows") != found.fitted.get("of_rows")
        )

    def described(self, protocol: str) -> str:
        """The protocol's name and what it ranked, in a line."""
        return describe(protocol, self.model.protocols.get(protocol, {}))

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "split": self.split,
            "metrics": self.model.metrics,
            "standard_errors": self.model.standard_errors,
            "protocols": self.model.protocols,
            "baselines": self.baselines,
            "fitted": {name: dict(found.fitted) for name, found in self.beside.items() if found.fitted},
            "verdicts": list(self.verdicts),
            "left_out": self.left_out,
        }


class _TrainedCard(Protocol):
    @property
    def train(self) -> Mapping[str, object]: ...


class Trained(Protocol):
    """A bundle, as far as evaluation knows it."""

    @property
    def model(self) -> Model:
        """The model, rebuilt."""

    @property
    def card(self) -> _TrainedCard:
        """How it was trained."""


def evaluate(
    trained: Trained,
    spec: FeatureSpec,
    split: str = "test",
    *,
    protocols: Sequence[str] | None = None,
    baselines: bool = False,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate a trained model on a split of a prepared dataset, and the baselines beside it.

    Baselines are fitted on the positives of the splits that the model was trained on, by the first rank alone.

    Raises:
        SpecError: if the dataset is not of the kind the model was trained on, or lacks what a protocol needs.
        SettingsError: an unknown protocol, or a cut-off longer than every list of candidates.
    """
    ranks = ranks or Ranks()
    check_same_features(trained.model, spec)
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=trained.model.features())
    model = _evaluate(_ModelScores(trained.model, question, ranks), question, ranks, progress or _silent)
    beside: dict[str, Evaluation] = {}
    not_fitted: dict[str, str] = {}
    if baselines and ranks.is_first:
        splits = trained.card.train.get("train_splits")
        fitted_on = [str(name) for name in splits] if isinstance(splits, (list, tuple)) else ["train"]
        beside, not_fitted = evaluate_baselines(question, fitted_on, protocols=tuple(model.metrics), progress=progress)
    return Report(split, model, beside, not_fitted)


def evaluate_model(
    model: Model,
    spec: FeatureSpec,
    split: str,
    *,
    protocols: Sequence[str] | None = None,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a model that is at hand, as training does after an epoch."""
    ranks = ranks or Ranks()
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=model.features())
    return _evaluate(_ModelScores(model, question, ranks), question, ranks, progress or _silent)


def evaluate_ranker(
    ranker: Ranker,
    spec: FeatureSpec,
    split: str,
    *,
    protocols: Sequence[str] | None = None,
    settings: EvaluateSettings | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate anything that scores pairs of a user and an item. Its scores are no logits, so it has no log loss."""
    ranks = ranks or Ranks()
    question = Question(spec, split, protocols, settings or EvaluateSettings(), reads=())
    return _evaluate(_RankerScores(ranker, question, ranks), question, ranks, progress or _silent)


def evaluate_baselines(
    question: Question,
    fitted_on: Sequence[str] = ("train",),
    *,
    names: Sequence[str] = (*ROW_BASELINES, *BASELINES),
    protocols: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """Fit baselines and evaluate them under the protocols of a question; with each that could not be, why.

    Those that recommend (`BASELINES`) need users and items; those of rows (`ROW_BASELINES`) are fitted where the rows
    carry both classes, and are evaluated where rows are scored.

    Where rows hold histories, models know at each row what its user did before. So do baselines then: what they learnt
    of items is that of `fitted_on`, but a user's items are all those before the split.
    """
    spec, progress = question.spec, progress or _silent
    question = question if protocols is None else question.under(protocols)
    fits: dict[str, Callable[[], tuple[_Answers, Question, Mapping[str, object]]]] = {}
    missing: dict[str, str] = {}

    def of_rows(name: str, question: Question) -> tuple[_Answers, Question, Mapping[str, object]]:
        scorer = ROW_BASELINES[name](spec, fitted_on)
        return _ScorerScores(scorer, question), question, scorer.facts

    def of_pairs(name: str, interactions: Interactions) -> tuple[_Answers, Question, Mapping[str, object]]:
        baseline = BASELINES[name](interactions)
        if not question.before or history_of_items(spec) is None:
            return _RankerScores(baseline, question, Ranks()), question, {}
        facts = {"users_known_by": f"rows and histories of {' and '.join(question.before)}"}
        return _RankerScores(baseline.knowing(question.seen), question, Ranks()), question, facts

    scored = [protocol for protocol in question.choose()[0] if question.scores_rows(protocol)]
    absent = [split for split in fitted_on if split not in spec.splits]
    if absent:
        reason = f"the dataset has no split {listed(absent)} to fit them on"
        return {}, dict.fromkeys(names, reason)
    if scored and _carry_both_classes(spec, fitted_on):
        fits |= {name: partial(of_rows, name, question.under(scored)) for name in names if name in ROW_BASELINES}
    recommending = [name for name in names if name in BASELINES]
    if not (question.has_users and question.has_items):
        missing = dict.fromkeys(recommending, question.lacks)
    elif recommending:
        interactions = positives(spec, fitted_on)
        fits |= {name: partial(of_pairs, name, interactions) for name in recommending}

    found: dict[str, Evaluation] = {}
    for number, (name, fit) in enumerate(fits.items()):
        progress("baselines", number, len(fits))
        try:
            answers, asked, facts = fit()
        except RecspecError as error:
            missing[name] = str(error)
            continue
        found[name] = replace(_evaluate(answers, asked, Ranks(), _silent), fitted=facts)
    progress("baselines", len(fits), len(fits))
    return found, missing


def _carry_both_classes(spec: FeatureSpec, splits: Sequence[str]) -> bool:
    rows, positive = count_labels(spec, splits)
    return 0 < positive < rows


def positives(spec: FeatureSpec, splits: Sequence[str]) -> Interactions:
    """The (user, item) pairs whose label is positive in some splits, and those of its rows' histories, read in blocks.

    A user's first events, and those before the rows that were kept, stand in histories alone.
    """
    user, item, history = spec.user_id, spec.item_id, history_of_items(spec)
    num_items = spec.num_ids(item)
    keys, most = [np.zeros(0, dtype=np.int64)], KEYS_HELD
    for split in splits:
        held = history if history in spec.columns(split) else None
        names = (user, item, spec.label) if held is None else (user, item, spec.label, held)
        for _, block in _blocks(open_split(spec, split, names)):
            positive = _array(block[spec.label]).astype(np.float32) > 0
            firsts = _array(block[user]).astype(np.int64) * num_items
            keys.append(firsts[positive] + _array(block[item])[positive].astype(np.int64))
            lists = block[held] if held is not None else None
            if isinstance(lists, Ragged):
                keys.append(np.unique(np.repeat(firsts, lists.lengths) + lists.values.astype(np.int64)))
            if sum(map(len, keys)) > most:  # an event stands in the histories of many rows
                keys = [np.unique(np.concatenate(keys))]
                most = max(most, 2 * len(keys[0]))
    pairs = np.concatenate(keys)
    return Interactions.from_pairs(
        pairs // num_items, pairs % num_items, num_users=spec.num_ids(user), num_items=num_items
    )


def history_of_items(spec: FeatureSpec) -> str | None:
    """The history feature that holds the ids of items, if there is one."""
    item = id_feature(spec, "item")
    lists = [n for n in spec.role("history") if spec.features[n].is_list and spec.features[n].is_categorical]
    if item is None or not lists:
        return None
    sharing = [name for name in lists if spec.vocabulary(name) == spec.vocabulary(item)]
    if sharing:
        return sharing[0]
    described = [n for n in spec.role("item") if spec.features[n].is_categorical and not spec.features[n].is_list]
    return lists[described.index(item)] if len(lists) == len(described) else None


def verdicts(model: Evaluation, baselines: Mapping[str, Evaluation]) -> tuple[str, ...]:
    """Where a baseline beats the model, a sentence for each protocol and baseline.

    The difference is put in standard errors of the difference over the same groups, where a metric is a mean of groups.
    """
    sentences = []
    for protocol, reached in model.metrics.items():
        for name, baseline in baselines.items():
            wins: dict[tuple[float, float], str] = {}  # one metric of those that say the same, as HR and recall of one
            for metric, ours in reached.items():
                theirs = baseline.metrics.get(protocol, {}).get(metric, ours)
                if theirs < ours if metric in LOWER_IS_BETTER else theirs > ours:
                    by = _significance(model, baseline, protocol, metric)
                    wins.setdefault((ours, theirs), f"{metric} {theirs:.4f} against {ours:.4f}{by}")
            if wins:
                first, others = list(wins.values())[:2], len(wins) - 2
                more = f" and {others} more" if others > 0 else ""
                sentences.append(f"{protocol}: {name} beats the model: {', '.join(first)}{more}")
    return tuple(sentences)


def describe(protocol: str, facts: Mapping[str, object]) -> str:
    """A protocol's name and what it ranked, in a line."""
    if protocol == "rows":
        return f"rows ({_count(facts, 'rows')} rows, {_count(facts, 'positives')} positive)"
    candidates = facts.get("candidates", "")
    fewest, most = facts.get("fewest_candidates", 0), facts.get("most_candidates", 0)
    many = f"{most}" if fewest == most else f"{fewest} to {most}"
    without = f"; {_count(facts, 'groups_without_positive')} groups without a positive left out"
    if not facts.get("groups_without_positive"):
        without = ""
    certain = facts.get("certain")
    if isinstance(certain, list):
        without += f"; {', '.join(certain)} left out, 1 for any model"
    return f"{protocol} ({_count(facts, 'groups')} groups, {many} candidates each: {candidates}{without})"


# --- what is asked ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What ranking needs of a split's rows, or of candidates drawn for it."""

    labels: NDArray[np.bool_]  # (rows,)
    groups: Ids | None
    users: Ids | None
    items: Ids | None
    leak: NDArray[np.bool_] | None = None  # (rows,) what gives a row's label away, where the dataset names such a flag

    @property
    def has_both_classes(self) -> bool:
        """Whether there are positives and negatives."""
        return bool(self.labels.any() and not self.labels.all())


class EvaluateSettings(config.Settings):
    """What is measured, and how candidates are drawn where a split lists none."""

    ks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="cut-offs, as in HR@10; without, the dataset's metadata.cut_offs, or 10, or 5 or 1 where no list "
        "of candidates is longer",
    )
    num_negatives: int = Field(default=99, ge=1, description="negatives drawn for a user, where the split lists none")
    seed: int = Field(default=0, ge=0, description="of the drawn negatives")
    memory_rows: int = Field(
        default=1 << 26,
        ge=1,
        description="rows whose scores are held in memory; where a split has more, and no users or groups, "
        "scores go through a temporary folder, 4 bytes a row, to the same numbers",
    )


class Question:
    """A split, the protocols under which it is asked about, and what they all need, read once."""

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        protocols: Sequence[str] | None,
        settings: EvaluateSettings,
        *,
        reads: Collection[str] | None = None,
    ) -> None:
        self.spec, self.split, self.settings = spec, split, settings
        self.reads = reads
        """Features that scores depend on, all where nothing is said."""
        self.asked = protocols or None
        self.ks = settings.ks or _cut_offs(spec)
        held = spec.columns(split)  # an unknown split is an error before an unknown protocol is
        if spec.label not in held:
            raise SpecError(
                f"{spec.folder}: split '{split}' does not hold the label '{spec.label}', so it has no metrics; "
                "`recspec predict` writes its probabilities"
            )
        strange = [name for name in protocols or () if name not in PROTOCOLS]
        if strange:
            raise SettingsError(f"protocols: {unknown('protocol', strange, PROTOCOLS)}")
        if protocols and set(protocols) & {"sampled", "full"} and not self._ranks_own_groups(protocols):
            spec.require(("user", "item"), f"protocol {listed(name for name in protocols if name != 'rows')}")

    def under(self, protocols: Sequence[str]) -> Question:
        """The same question under other protocols, without reading again."""
        other = Question(self.spec, self.split, protocols, self.settings, reads=self.reads)
        for name in ("rows", "has_both_classes", "candidates", "candidate_ids", "seen", "truth"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def choose(self) -> tuple[tuple[ProtocolName, ...], dict[str, str]]:
        """The protocols to use, and why each other one is not, where the choice was left to the data."""
        if self.asked is not None:
            return tuple(name for name in PROTOCOLS if name in self.asked), {}
        why: dict[str, str] = {}
        requests = self.spec.role("context") + self.spec.role("history")
        histories = [name for name in self.spec.role("history") if self.reads is None or name in self.reads]
        if not self.has_both_classes:
            why["rows"] = "the split's rows are of one class"
        if not (self.has_users and self.has_items):
            why["full"] = self.lacks
            if self.spec.group is None:
                why["sampled"] = f"{self.lacks}, and no group"
        elif requests and not self.spec.has_series:
            why["full"] = f"requests differ by {listed(requests)}; ask for it with the protocol's name"
            if self.spec.group is None:
                why["sampled"] = "the dataset names no group; ask for it with the protocol's name"
        elif histories:
            why["full"] = (
                f"it weighs every item against {listed(histories)} of each user, which takes long; ask for it with the "
                "protocol's name"
            )
        if "sampled" not in why and not self.lists_candidates and not (self.has_users and self.has_items):
            why["sampled"] = f"the split lists no negatives, and {self.lacks} to draw them for"
        if "sampled" not in why and self.lists_candidates and not self._any_group_of_two:
            why["sampled"] = "every group is a single row, so there is nothing to rank"
        return tuple(name for name in PROTOCOLS if name not in why), why

    @property
    def has_users(self) -> bool:
        """Whether a feature tells users apart."""
        return id_feature(self.spec, "user") is not None

    @property
    def has_items(self) -> bool:
        """Whether a feature tells items apart."""
        return id_feature(self.spec, "item") is not None

    @property
    def lacks(self) -> str:
        """What is missing of users and items, where something is."""
        absent = {"user": not self.has_users, "item": not self.has_items}
        return f"the dataset has no {' and no '.join(role for role in absent if absent[role])}"

    @cached_property
    def has_both_classes(self) -> bool:
        """Whether the split has positives and negatives."""
        if not self.is_streamed:
            return self.rows.has_both_classes
        label, seen = self.spec.label, {False: False, True: False}
        for start, block in _blocks(open_split(self.spec, self.split, (label,))):
            labels = _as_flags(_array(block[label]), start, self.spec, self.split, label)
            seen = {False: seen[False] or not labels.all(), True: seen[True] or bool(labels.any())}
            if all(seen.values()):
                break
        return all(seen.values())

    @cached_property
    def is_streamed(self) -> bool:
        """Whether the split has more rows than may be held, and no groups, whose metrics need all of them at once."""
        num_rows = open_split(self.spec, self.split, (self.spec.label,)).num_rows
        return _group_of(self.spec, self.split) is None and num_rows > self.settings.memory_rows

    @property
    def lists_candidates(self) -> bool:
        """Whether the split's own rows are the candidates of protocol `sampled`."""
        return _group_of(self.spec, self.split) is not None and self.has_both_classes

    @property
    def refuses_long_cut_offs(self) -> bool:
        """Whether a cut-off above every list of `sampled` is an error: the lists are made to one length.

        Groups as they happened, as the 2 to 12 ads of an Outbrain display, are ranked whole below the cut-off.
        """
        return self.spec.has_series or not self.lists_candidates

    def cut_offs(self, ranking: Ranking) -> tuple[int, ...]:
        """The k that are reported of a ranking; those nobody named are made shorter than the longest list."""
        longest = int(ranking.num_candidates.max(initial=0))
        if self.settings.ks is not None or "cut_offs" in self.spec.metadata or max(self.ks) <= longest:
            return self.ks
        return (next((k for k in SHORT_KS if k < longest), 1),)

    @cached_property
    def candidate_ids(self) -> Ids | None:
        """Ids that tell the candidates of a group apart, where a repeated one counts once; None where each row counts.

        Rows that differ by more than the item (by the hour, say) are different candidates. So are unknown items, which
        share id 0.
        """
        items = self.candidates.items
        differ = self.spec.role("context") + self.spec.role("history")
        if items is None or (self.lists_candidates and differ and not self.spec.has_series):
            return None
        unknown_items = np.flatnonzero(items < self.first_item)
        if len(unknown_items):
            items = items.astype(np.int64)
            items[unknown_items] = -1 - np.arange(len(unknown_items))
        return items

    @property
    def _any_group_of_two(self) -> bool:
        groups = self.rows.groups
        return groups is not None and len(np.unique(groups)) < len(groups)

    def scores_rows(self, protocol: str) -> bool:
        """Whether a protocol takes the scores of the split's own rows, and no others."""
        return protocol == "rows" or (protocol == "sampled" and self.lists_candidates)

    @property
    def first_item(self) -> int:
        """The smallest id that is an item: 1 where id 0 means unknown."""
        return int(self.spec.reserves_unknown(self.spec.item_id))

    @cached_property
    def rows(self) -> Rows:
        """Labels and ids of every row of the split."""
        return _read_rows(self.spec, self.split)

    @property
    def before(self) -> tuple[str, ...]:
        """The splits whose rows are taken to come before this one's."""
        return tuple(name for name in EARLIER.get(self.split, ("train",)) if name in self.spec.splits)

    @cached_property
    def seen(self) -> Interactions:
        """What users acted on before the split."""
        return positives(self.spec, self.before)

    @cached_property
    def truth(self) -> Interactions:
        """The split's positives, unknown items left out: no ranking of items can hold them."""
        rows = self.rows
        assert rows.users is not None
        assert rows.items is not None
        known = rows.labels & (rows.items >= self.first_item)
        return Interactions.from_pairs(
            rows.users[known],
            rows.items[known],
            num_users=self.spec.num_ids(self.spec.user_id),
            num_items=self.spec.num_ids(self.spec.item_id),
        )

    @cached_property
    def candidates(self) -> Rows:
        """The rows of protocol `sampled`: the split's own, or drawn for its positives."""
        if self.lists_candidates:
            return self.rows
        self.spec.require(
            ("user", "item"), f"protocol 'sampled' on the split '{self.split}', which lists no negatives,"
        )
        return draw_candidates(
            self.truth,
            self.seen,
            num_negatives=self.settings.num_negatives,
            first_item=self.first_item,
            seed=self.settings.seed,
        )

    def _ranks_own_groups(self, protocols: Sequence[str]) -> bool:
        return "full" not in protocols and self.spec.group is not None


def id_feature(spec: FeatureSpec, role: Literal["user", "item"]) -> str | None:
    """The feature that tells users or items apart, if there is one."""
    try:
        return spec.user_id if role == "user" else spec.item_id
    except SpecError:
        return None


def _read_rows(spec: FeatureSpec, split: str) -> Rows:
    user, item, group = id_feature(spec, "user"), id_feature(spec, "item"), _group_of(spec, split)
    held = spec.columns(split)
    leak = _leak(spec)
    wanted = (spec.label, group, user, item, leak)
    names = tuple(dict.fromkeys(name for name in wanted if name is not None and name in held))
    reader = open_split(spec, split, names)
    columns: dict[str, NDArray[np.generic]] = {}
    for start, block in _blocks(reader):
        for name in names:
            values = _array(block[name])
            if name in (spec.label, leak):
                values = _as_flags(values, start, spec, split, name)
            whole = columns.setdefault(name, np.empty(reader.num_rows, dtype=values.dtype))
            whole[start : start + len(values)] = values

    def column(name: str | None) -> Ids | None:
        return columns.get(name) if name is not None else None  # type: ignore[return-value]

    labels: NDArray[np.bool_] = columns.get(spec.label, np.zeros(0, dtype=bool)).astype(bool)
    flags: NDArray[np.bool_] | None = columns[leak].astype(bool) if leak in columns else None
    return Rows(labels, column(group), column(user), column(item), flags)


def _group_of(spec: FeatureSpec, split: str) -> str | None:
    """The feature whose rows of one value are a group, where the split holds one."""
    group = spec.group if spec.group is not None else id_feature(spec, "user")
    return group if group in spec.columns(split) else None


def _as_flags(values: NDArray[np.generic], start: int, spec: FeatureSpec, split: str, name: str) -> NDArray[np.bool_]:
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "a label" if name == spec.label else "metadata.leak"
        raise DataError(
            f"{spec.folder}, split '{split}', feature '{name}': row {start + row + 1} is {values[row]}; "
            f"{what} is 0 or 1"
        )
    return values.astype(bool)


def _cut_offs(spec: FeatureSpec) -> tuple[int, ...]:
    """The dataset's own cut-offs, where its metadata names them."""
    named = spec.metadata.get("cut_offs")
    return tuple(int(k) for k in named) if isinstance(named, (list, tuple)) else DEFAULT_KS


def _leak(spec: FeatureSpec) -> str | None:
    """The feature that says which rows' labels are known from elsewhere, where the dataset's metadata names one."""
    name = spec.metadata.get("leak")
    return name if isinstance(name, str) else None


def draw_candidates(
    truth: Interactions, seen: Interactions, *, num_negatives: int, first_item: int = 0, seed: int = 0
) -> Rows:
    """Each user's positives and `num_negatives` different items, drawn uniformly from those the user never acted on.

    A user who has fewer of those gets them all. The same seed gives the same draws, whatever the number of ranks.
    """
    asked = np.flatnonzero(np.diff(truth.offsets))
    users, items, labels = [], [], []
    for block in range(0, truth.num_users, USERS_PER_DRAW):
        here = asked[np.searchsorted(asked, block) : np.searchsorted(asked, block + USERS_PER_DRAW)]
        rng = np.random.default_rng([seed, block])
        places, drawn = _draw_unseen(here, truth, seen, num_negatives, first_item, rng)
        rows, positive = truth.of(here)
        users += [here[rows], here[places]]
        items += [positive, drawn.astype(np.int32)]
        labels += [np.ones(len(rows), dtype=bool), np.zeros(len(places), dtype=bool)]
    who = np.concatenate([np.zeros(0, dtype=np.int64), *users])
    which = np.concatenate([np.zeros(0, dtype=np.int32), *items])
    return Rows(np.concatenate([np.zeros(0, dtype=bool), *labels]), who, who, which)


def _draw_unseen(
    users: Ids, truth: Interactions, seen: Interactions, num_negatives: int, first_item: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place in `users`, item) of the negatives. Most users take a few rounds of rejection; full ones a permutation."""
    num_items = truth.num_items
    taken = np.diff(seen.offsets)[users] + np.diff(truth.offsets)[users]
    roomy = num_items - first_item - taken >= 4 * num_negatives
    places, drawn = [], []
    for place in np.flatnonzero(~roomy):
        free = np.ones(num_items, dtype=bool)
        free[:first_item] = False
        for known in (seen, truth):
            free[known.of(users[place : place + 1])[1]] = False
        unseen = np.flatnonzero(free)
        chosen = np.sort(rng.choice(unseen, min(num_negatives, len(unseen)), replace=False))
        places.append(np.full(len(chosen), place))
        drawn.append(chosen)
    rows = np.flatnonzero(roomy)
    picks = np.full((len(rows), num_negatives), -1, dtype=np.int64)
    open_rows, open_columns = np.nonzero(picks < 0)
    while len(open_rows):
        picks[open_rows, open_columns] = rng.integers(first_item, num_items, len(open_rows))
        touched = np.unique(open_rows)
        picks[touched] = np.sort(picks[touched], axis=1)
        here, who = picks[touched], users[rows[touched]][:, None]
        bad = seen.contain(who, here) | truth.contain(who, here)
        bad[:, 1:] |= here[:, 1:] == here[:, :-1]
        where = np.nonzero(bad)
        open_rows, open_columns = touched[where[0]], where[1]
    places.append(np.repeat(rows, num_negatives))
    drawn.append(picks.ravel())
    return np.concatenate(places), np.concatenate(drawn)


# --- what answers ----------------------------------------------------------------------------------------------------


class ModelRanker:
    """A model as a ranker: what is known of each request and of each item, joined into pairs.

    `requests` holds a row for each of `users`; `items` a row for each item id from 0.
    """

    def __init__(self, model: Model, requests: Batch, items: Batch, *, users: Ids, num_users: int) -> None:
        self.model = model
        self.device = model.device
        self.requests, self.items = to_device(requests, self.device), to_device(items, self.device)
        self._row = np.full(num_users, -1, dtype=np.int64)
        self._row[users] = np.arange(len(users))

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) logits, `ROWS_PER_FORWARD` at a time."""
        parts = []
        with _scoring(self.model):
            for start in range(0, len(users), ROWS_PER_FORWARD):
                pairs = slice(start, start + ROWS_PER_FORWARD)
                who, which = self._rows_of(users[pairs]), torch.from_numpy(items[pairs].astype(np.int64))
                batch = {**take(self.requests, who), **take(self.items, which.to(self.device))}
                parts.append(self.model(batch).float().cpu())
        return torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.float32)

    def score_users(self, users: Ids) -> Scores:
        """(R, N) logits of every item, reserved ids included."""
        return self.scores(users).cpu().numpy()

    def scores(self, users: Ids) -> Tensor:
        """`score_users`, left on the model's device."""
        with _scoring(self.model):
            return self.model.score_items(take(self.requests, self._rows_of(users)), self.items).float()

    def _rows_of(self, users: Ids) -> Tensor:
        return torch.from_numpy(self._row[users]).to(self.device)


RowBlock = tuple[int, Scores, Mapping[str, Column]]
"""The number of a block's first row, the scores of its rows, and the columns read."""


class _Answers(Protocol):
    """What a protocol asks for."""

    gives_logits: bool

    def of_rows(self, progress: Progress) -> Scores:
        """(rows,) scores of every row of the split."""

    def in_blocks(self, progress: Progress) -> Iterator[RowBlock]:
        """The same of this rank's rows, block by block and kept nowhere; asked only where the split is streamed."""

    def of_candidates(self, progress: Progress) -> Scores:
        """(rows,) scores of the candidates of `sampled`."""

    def ranker(self) -> Ranker:
        """What scores all items of the users in the split's truth."""


class _RankerScores:
    """A ranker's scores, each rank scoring its share."""

    gives_logits = False

    def __init__(self, ranker: Ranker, question: Question, ranks: Ranks) -> None:
        self._ranker, self.question, self.ranks = ranker, question, ranks
        self._rows: Scores | None = None
        question.spec.require(("user", "item"), "a ranker")

    def of_rows(self, progress: Progress) -> Scores:
        """Scores of the rows' pairs, computed once."""
        if self._rows is None:
            self._rows = self._pairs(self.question.rows, "rows", progress)
        return self._rows

    def in_blocks(self, progress: Progress) -> Iterator[RowBlock]:  # noqa: ARG002
        """None: a split with users is never streamed."""
        raise AssertionError("a ranker scores pairs of users and items, and users are groups")

    def of_candidates(self, progress: Progress) -> Scores:
        """Scores of the split's rows where they are the candidates, else of the drawn pairs."""
        if self.question.lists_candidates:
            return self.of_rows(progress)
        return self._pairs(self.question.candidates, "sampled", progress)

    def ranker(self) -> Ranker:
        """The ranker."""
        return self._ranker

    def _pairs(self, rows: Rows, stage: str, progress: Progress) -> Scores:
        assert rows.users is not None
        assert rows.items is not None
        cuts = np.append(np.arange(0, len(rows.labels), ROWS_PER_BLOCK), len(rows.labels))
        share = self.ranks.share(len(cuts) - 1)
        pairs = slice(int(cuts[share.start]), int(cuts[share.stop]))
        progress(stage, 0, 1)
        scores = np.asarray(self._ranker.score_pairs(rows.users[pairs], rows.items[pairs]))
        progress(stage, 1, 1)
        return _gather(scores, self.ranks)


class _ScorerScores:
    """The logits that a baseline of rows gives a split's rows."""

    gives_logits = True

    def __init__(self, scorer: Scorer, question: Question) -> None:
        self._scorer, self.question = scorer, question
        self._rows: Scores | None = None

    def of_rows(self, progress: Progress) -> Scores:
        """Logits of every row, computed once."""
        if self._rows is None:
            parts = [scores for _, scores, _ in self.in_blocks(progress)]
            self._rows = np.concatenate([np.zeros(0, dtype=np.float64), *parts])
        return self._rows

    def in_blocks(self, progress: Progress) -> Iterator[RowBlock]:  # noqa: ARG002
        """Logits and columns of every row, block by block."""
        spec = self.question.spec
        names = tuple(dict.fromkeys((*self._scorer.features, spec.label)))
        for start, block in _blocks(open_split(spec, self.question.split, names)):
            yield start, self._scorer.logits(block), block

    def of_candidates(self, progress: Progress) -> Scores:
        """The same: it is asked only where the candidates are the rows."""
        assert self.question.lists_candidates, "a baseline of rows can't score drawn pairs"
        return self.of_rows(progress)

    def ranker(self) -> Ranker:
        """None: it is not asked under `full`."""
        raise AssertionError("a baseline of rows can't score all items")


class _ModelScores:
    """A model's logits: of a split's rows as they stand, and of users and items joined by a `ModelRanker`."""

    gives_logits = True

    def __init__(self, model: Model, question: Question, ranks: Ranks) -> None:
        self.model, self.question, self.ranks = model, question, ranks
        self._rows: Scores | None = None

    def of_rows(self, progress: Progress) -> Scores:
        """Logits of every row, computed once."""
        if self._rows is None:
            question = self.question
            self._rows = score_rows(self.model, question.spec, question.split, self.ranks, progress)
        return self._rows

    def in_blocks(self, progress: Progress) -> Iterator[RowBlock]:
        """Logits of this rank's rows, block by block."""
        question = self.question
        names = tuple(dict.fromkeys((*self.model.features(), question.spec.label)))
        return _scored_blocks(self.model, open_split(question.spec, question.split, names), self.ranks, progress)

    def of_candidates(self, progress: Progress) -> Scores:
        """Logits of the split's rows where they are the candidates, else of the drawn pairs."""
        if self.question.lists_candidates:
            return self.of_rows(progress)
        return _RankerScores(self.ranker(), self.question, self.ranks).of_candidates(progress)

    def ranker(self) -> Ranker:
        """The model with one request a user: the features of the user's first positive row."""
        spec, split, names = self.question.spec, self.question.split, self.model.features()
        item_names = tuple(name for name in names if name in spec.role("item"))
        request_names = tuple(name for name in names if name not in item_names)
        users, requests = _read_requests(self.question, request_names)
        splits = [name for name in (*EARLIER.get(split, ("train",)), split) if name in spec.splits]
        items = item_features(spec, splits, [name for name in item_names if name != spec.item_id])
        if spec.item_id in item_names:
            items[spec.item_id] = torch.arange(spec.num_ids(spec.item_id))
        return ModelRanker(self.model, requests, items, users=users, num_users=spec.num_ids(spec.user_id))


def score_rows(
    model: Model,
    spec: FeatureSpec,
    split: str,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Logits (rows,) of every row of a split in order, on every rank. Memory holds one block and the logits.

    Ranks share whole blocks, so that a row is scored in the same company whatever the number of ranks.
    """
    ranks = ranks or Ranks()
    reader = open_split(spec, split, model.features())
    first, last = _share_of_rows(reader, ranks)
    scores = np.empty(last - first, dtype=np.float32)
    for start, logits, _ in _scored_blocks(model, reader, ranks, progress or _silent):
        scores[start - first : start - first + len(logits)] = logits
    return _gather(scores, ranks)


def _scored_blocks(model: Model, reader: SplitReader, ranks: Ranks, progress: Progress) -> Iterator[RowBlock]:
    """Logits of this rank's blocks, whole blocks in order."""
    cuts = reader.blocks(ROWS_PER_BLOCK)
    share = ranks.share(len(cuts) - 1)
    first, last = _share_of_rows(reader, ranks)
    for start, stop in pairwise(cuts[share.start : share.stop + 1].tolist()):
        progress("rows", start - first, last - first)
        columns = reader.read(start, stop)
        batch = to_device(as_batch({name: columns[name] for name in model.features()}, reader.spec), model.device)
        scores = np.empty(stop - start, dtype=np.float32)
        with _scoring(model):  # left before the block is handed out
            for row in range(0, stop - start, ROWS_PER_FORWARD):
                part = take(batch, slice(row, min(row + ROWS_PER_FORWARD, stop - start)))
                scores[row : row + ROWS_PER_FORWARD] = model(part).float().cpu().numpy()
        yield start, scores, columns
    progress("rows", last - first, last - first)


def _share_of_rows(reader: SplitReader, ranks: Ranks) -> tuple[int, int]:
    """The first row of this rank's blocks, and the one after its last."""
    cuts = reader.blocks(ROWS_PER_BLOCK)
    share = ranks.share(len(cuts) - 1)
    return int(cuts[share.start]), int(cuts[share.stop])


def as_batch(columns: Mapping[str, Column], spec: FeatureSpec) -> Batch:
    """Columns as the tensors a model reads: ids int32 or int64, numbers fp32, lists padded with 0 to their length."""
    batch = {}
    for name, column in columns.items():
        feature = spec.features[name]
        if isinstance(column, Ragged):
            assert feature.length is not None
            column = column.pad(feature.length)
        wanted = np.float32
        if feature.is_categorical:
            wanted = np.int32 if column.dtype == np.int32 else np.int64  # type: ignore[assignment]
        # torch refuses arrays that can't be written to, as Arrow's are
        batch[name] = torch.from_numpy(np.require(column, wanted, ("C", "W")))
    return batch


def _read_requests(question: Question, names: Sequence[str]) -> tuple[Ids, Batch]:
    """The users of the split's truth, and the request features of each one's first positive row."""
    spec, rows, user = question.spec, question.rows, question.spec.user_id
    assert rows.users is not None
    assert rows.items is not None
    chosen = np.flatnonzero(rows.labels & (rows.items >= question.first_item))
    users, first = np.unique(rows.users[chosen], return_index=True)
    if set(names) <= {user}:
        return users, {user: torch.from_numpy(users.astype(np.int64))}
    wanted = chosen[first]  # a row for each user, in the users' order
    order = np.argsort(wanted)
    parts: list[Batch] = []
    reader = open_split(spec, question.split, names)
    for start, block in _blocks(reader):
        batch = as_batch(block, spec)
        stop = start + len(next(iter(batch.values())))
        here = wanted[order[np.searchsorted(wanted[order], start) : np.searchsorted(wanted[order], stop)]]
        parts.append(take(batch, torch.from_numpy(here - start)))
    back = torch.from_numpy(np.argsort(order))
    return users, {name: torch.cat([part[name] for part in parts]).index_select(0, back) for name in names}


# --- the protocols ---------------------------------------------------------------------------------------------------


def _evaluate(answers: _Answers, question: Question, ranks: Ranks, progress: Progress) -> Evaluation:
    chosen, left_out = question.choose()
    result = Evaluation({}, left_out=left_out)
    for protocol in chosen:
        if protocol == "rows":
            streamed = question.is_streamed
            found = (
                _streamed_rows(answers, question, ranks, progress) if streamed else _rows(answers, question, progress)
            )
            result.metrics["rows"], result.protocols["rows"] = found
            continue
        if protocol == "sampled":
            ranking, facts, leaked = _sampled(answers, question, progress)
        else:
            (ranking, facts), leaked = _full(answers, question, ranks, progress), None
        ks = question.ks
        if protocol == "full" or question.refuses_long_cut_offs:
            ks = question.cut_offs(ranking)
            metrics.check_cut_offs(ranking, ks)
        certain = metrics.certain(ranking, ks)
        values = _ranked(ranking, ks, leaked)
        values = {name: of for name, of in values.items() if name not in certain}
        result.values[protocol] = values
        result.metrics[protocol] = {name: float(of.mean()) for name, of in values.items() if len(of)}
        result.protocols[protocol] = {**facts, **_facts(ranking)}
        if certain:
            result.protocols[protocol]["certain"] = list(certain)
    return result


def _rows(answers: _Answers, question: Question, progress: Progress) -> tuple[dict[str, float], dict[str, object]]:
    scores, rows = answers.of_rows(progress), question.rows
    reached = {"auc": metrics.auc(scores, rows.labels)}
    if answers.gives_logits:
        reached["log_loss"] = metrics.log_loss(scores, rows.labels)
        reached["accuracy"] = metrics.accuracy(scores, rows.labels)
    if rows.groups is not None:
        reached["group_auc"] = metrics.group_auc(scores, rows.labels, rows.groups)
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    return defined, {"rows": len(rows.labels), "positives": int(rows.labels.sum())}


def _streamed_rows(
    answers: _Answers, question: Question, ranks: Ranks, progress: Progress
) -> tuple[dict[str, float], dict[str, object]]:
    """The same numbers where scores and labels of all rows are not held."""
    spec, split, label = question.spec, question.split, question.spec.label
    with Tally(max(1, question.settings.memory_rows // 4), gather=partial(_gather, ranks=ranks)) as tally:
        for start, scores, columns in answers.in_blocks(progress):
            tally.add(scores, _as_flags(_array(columns[label]), start, spec, split, label))
        found = tally.finish()
    reached = {"auc": found.auc}
    if answers.gives_logits:
        reached |= {"log_loss": found.log_loss, "accuracy": found.accuracy}
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    return defined, {"rows": found.rows, "positives": found.positives}


def _sampled(
    answers: _Answers, question: Question, progress: Progress
) -> tuple[Ranking, dict[str, object], Ranking | None]:
    """The ranking, what it ranked, and the ranking with the leak, where the dataset names one."""
    rows, ids = question.candidates, question.candidate_ids
    assert rows.groups is not None
    scores = answers.of_candidates(progress)
    ranking = metrics.rank_groups(scores, rows.labels, rows.groups, candidates=ids)
    leaked = None
    if rows.leak is not None:
        leaked = metrics.rank_groups(_with_leak(scores, rows.leak), rows.labels, rows.groups, candidates=ids)
    drawn = f"{question.settings.num_negatives} uniform negatives a user, seed {question.settings.seed}"
    return ranking, {"candidates": "the dataset's own" if question.lists_candidates else drawn}, leaked


def _with_leak(scores: Scores, leak: NDArray[np.bool_]) -> Scores:
    """(rows,) scores that order rows as probability + leak does, without its rounding: leaked first, then by score.

    A probability is in [0, 1], so 1 puts a row above all others; and 1 + probability would merge small ones.
    """
    distinct, places = np.unique(scores, return_inverse=True)
    return np.asarray(places + leak * len(distinct), dtype=np.float64)


def _full(answers: _Answers, question: Question, ranks: Ranks, progress: Progress) -> tuple[Ranking, dict[str, object]]:
    """Ranks the positives of this rank's share of the users among all items, then joins what the ranks found."""
    truth, ranker = question.truth, answers.ranker()
    users = np.flatnonzero(np.diff(truth.offsets))
    step = max(1, SCORES_PER_BLOCK // truth.num_items)
    blocks = range(0, len(users), step)
    share = ranks.share(len(blocks))
    found: list[Tensor] = []
    sizes: list[Tensor] = []
    with torch.inference_mode():
        for number, start in enumerate(blocks[share]):
            progress("full", number, share.stop - share.start)
            here = users[start : start + step]
            positions, of_each = _count_higher(ranker, here, question, step)
            positions[:, 0] += start
            found.append(positions)
            sizes.append(of_each)
    progress("full", 1, 1)
    none = torch.zeros((0, 3), dtype=torch.int64)
    group, higher, tied = ranks.gather(torch.cat([none, *found])).numpy().T
    candidates = ranks.gather(torch.cat([none[:, 0], *sizes])).numpy()
    earlier = " and ".join(question.before)
    if earlier and history_of_items(question.spec) is not None:
        earlier += ", histories included"
    told = f"all items without those of the user in {earlier}" if earlier else "all items"
    return Ranking.of_positives(group, higher, tied, candidates), {"candidates": told}


def _count_higher(ranker: Ranker, users: Ids, question: Question, step: int) -> tuple[Tensor, Tensor]:
    """For each positive of some users its (place of the user, higher, tied), and for each user the candidates.

    Counting what scores higher takes one pass over the scores; sorting them would take many.
    """
    scores = ranker.scores(users) if isinstance(ranker, ModelRanker) else torch.from_numpy(ranker.score_users(users))
    device, truth, seen = scores.device, question.truth, question.seen
    (rows, items), (seen_rows, seen_items) = truth.of(users), seen.of(users)
    excluded = (seen_items >= question.first_item) & ~truth.contain(users[seen_rows], seen_items)
    num_candidates = truth.num_items - question.first_item - np.bincount(seen_rows[excluded], minlength=len(users))

    at = (torch.from_numpy(rows).to(device), torch.from_numpy(items).long().to(device))
    # NaN marks what is no candidate: it is neither higher than anything nor equal to it, itself included.
    out = (torch.from_numpy(seen_rows[excluded]).to(device), torch.from_numpy(seen_items[excluded]).long().to(device))
    scores[out] = torch.nan
    scores[:, : question.first_item] = torch.nan
    if not np.array_equal(_num_true(scores == scores).cpu().numpy(), num_candidates):
        raise DataError("some scores are NaN: the model has diverged, or its weights or inputs hold NaN")
    values = scores[at]
    higher, tied = torch.empty_like(at[0]), torch.empty_like(at[0])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        lists = scores if len(rows) == len(users) else scores[at[0][part]]  # one positive each: no copy
        higher[part] = _num_true(lists > values[part, None])
        tied[part] = _num_true(lists == values[part, None])
    return torch.stack((at[0], higher, tied), dim=1).cpu(), torch.from_numpy(num_candidates)


def _num_true(mask: Tensor) -> Tensor:
    """(R,) how many of each row's values are true; as bytes, which torch sums eight times as fast as booleans."""
    return mask.view(torch.uint8).sum(dim=1, dtype=torch.int32)


def _ranked(ranking: Ranking, ks: Sequence[int], leaked: Ranking | None = None) -> dict[str, Values]:
    values = {f"{name}@{k}": at_k(ranking, k) for k in ks for name, at_k in metrics.AT_K.items()}
    if leaked is not None:
        values |= {f"mean_average_precision_with_leak@{k}": metrics.average_precisions(leaked, k) for k in ks}
    return {**values, "mrr": metrics.reciprocal_ranks(ranking)}


def _facts(ranking: Ranking) -> dict[str, object]:
    return {
        "groups": ranking.num_groups,
        "positives": int(ranking.num_positives.sum()),
        "fewest_candidates": int(ranking.num_candidates.min()) if ranking.num_groups else 0,
        "most_candidates": int(ranking.num_candidates.max(initial=0)),
        "groups_without_positive": ranking.num_left_out,
        "duplicates_counted_once": ranking.num_duplicates,
    }


# --- small things ----------------------------------------------------------------------------------------------------


def check_same_features(model: Model, spec: FeatureSpec) -> None:
    """The dataset must hold what the model reads, with the ids it was built for.

    Raises:
        SpecError: naming every feature that is missing or of another kind.
    """
    absent = [name for name in model.features() if name not in spec.features]
    problems = [unknown("feature", absent, spec.features)] if absent else []
    for name in model.features():
        if name in absent:
            continue
        ours, theirs = model.spec.features[name], spec.features[name]
        if ours.is_categorical != theirs.is_categorical or ours.is_list != theirs.is_list:
            problems.append(f"feature '{name}' is of another kind than the model was trained on")
        elif ours.is_categorical and model.spec.num_ids(name) != spec.num_ids(name):
            problems.append(
                f"feature '{name}' has {spec.num_ids(name)} ids; the model was trained on {model.spec.num_ids(name)}"
            )
    if problems:
        raise SpecError.of(f"{spec.folder}: not the dataset that the model was trained on", problems)


@contextmanager
def _scoring(model: Model) -> Iterator[None]:
    """The model without dropout and gradients, as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def _blocks(reader: SplitReader) -> Iterator[tuple[int, Mapping[str, Column]]]:
    """Every row in order: the number of a block's first row, and the block."""
    cuts = reader.blocks(ROWS_PER_BLOCK)
    for start, stop in pairwise(cuts.tolist()):
        yield start, reader.read(start, stop)


def _array(column: Column) -> NDArray[np.generic]:
    assert not isinstance(column, Ragged), "an id or a label is a scalar"
    return column


def _silent(stage: str, done: float, total: float | None) -> None:
    """Progress that nobody watches."""


def _gather(rows: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    return ranks.gather(torch.from_numpy(rows)).numpy() if ranks.world_size > 1 else rows


def _standard_error(values: Values) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def _significance(model: Evaluation, baseline: Evaluation, protocol: str, metric: str) -> str:
    ours = model.values.get(protocol, {}).get(metric)
    theirs = baseline.values.get(protocol, {}).get(metric)
    if ours is None or theirs is None or len(ours) != len(theirs) or len(ours) < 2:
        return ""
    error = _standard_error(theirs - ours)
    return f" ({(theirs - ours).mean() / error:.1f} standard errors)" if error else ""


def _count(facts: Mapping[str, object], name: str) -> str:
    value = facts.get(name, 0)
    return f"{value:,}" if isinstance(value, int) else str(value)
