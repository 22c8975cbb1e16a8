"""The choice of a blend's members, forms and weights on valid.

It begins with the best member. Then the member, form and weight that improve the metric most join, one member at a
time, and after each of them the forms and weights of all members are tried again. Weights are tried in units of a
part's spread: the mean over users of the standard deviation of its scores.

Shapes: R users; N items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recspec.base.errors import SettingsError, unknown
from recspec.bundle import Bundle, Form, Member, as_part
from recspec.evaluation.protocols import run_protocols
from recspec.evaluation.report import Metrics
from recspec.evaluation.scoring import Progress, scores_of, silent
from recspec.evaluation.task import EvaluateSettings, EvaluationTask
from recspec.feature_spec import FeatureSpec
from recspec.models import Ids, ItemModel, Scores

MOST_SCORES = 1 << 25
"""Scores of users x items of a member that are held: more users are sampled. 128 MB."""

FLOORS = (3e-5, 3e-4, 3e-3)
"""Values of `Member.floor` that are tried."""

WEIGHTS = (0.1, 0.3, 1.0, 3.0)
"""Weights of a new member that are tried, beside that of the first one, 1."""

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Factors by which the weight of a member is changed when it is tried again."""


@dataclass(frozen=True)
class Chosen:
    """The best blend on valid."""

    members: Sequence[Member | None]
    """Each model's part; None for one that does not help."""
    metric: str
    value: float
    alone: Sequence[float]
    """The metric of each model alone."""
    metrics: Metrics
    users: int
    """Users whose items were ranked."""


def choose_weights(
    trained: Sequence[Bundle],
    spec: FeatureSpec,
    *,
    split: str = "valid",
    metric: str = "full/ndcg@10",
    users: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    enough: Callable[[], bool] = lambda: False,
) -> Chosen:
    """Choose on a split that none of the models has learned from; with `enough`, the best of what was tried so far.

    Raises:
        SettingsError: if the split has nothing to rank, or the metric is not one of the ranking of all items.
    """
    protocol, _, name = metric.partition("/")
    cut_off = name.rpartition("@")[2]
    most = max(1, MOST_SCORES // spec.num_ids(spec.item_id))
    settings = EvaluateSettings(
        users=min(users or most, most), seed=seed, ks=(int(cut_off),) if cut_off.isdecimal() and int(cut_off) else None
    )
    task = EvaluationTask(spec, split, ["full"], settings, reads=(spec.user_id, spec.item_id))
    if protocol != "full" or not task.truth.num_pairs:
        why = f"{metric} is no metric of protocol full" if protocol != "full" else f"{split} has no positive to rank"
        raise SettingsError(f"a blend is chosen by a ranking of all items, and {why}")
    search = _Search(task, name, [_scores(each, task) for each in trained], progress, enough)
    parts, value, alone = search.run()
    members: list[Member | None] = [None] * len(trained)
    unit = parts[0].weight / search.spread(parts[0])
    for part in parts:
        card, weight = trained[part.model].card, float(f"{part.weight / search.spread(part) / unit:.6g}")
        members[part.model] = Member(
            model=card.model, settings=card.settings, weight=weight, form=part.form, floor=part.floor
        )
    return Chosen(members, metric, value, alone, search.metrics, len(task.ranked_users))


def _scores(trained: Bundle, task: EvaluationTask) -> Tensor:
    """(R, N) scores of the ranked users, each with the events before the split."""
    assert isinstance(trained.model, ItemModel)
    model = trained.model.knowing(task.known_interactions(trained.model))
    who = torch.from_numpy(task.ranked_users.astype(np.int64))
    step = max(1, (1 << 22) // task.truth.num_items)
    with torch.inference_mode():
        parts = [model.score_users(each.to(model.device)).float().cpu() for each in torch.split(who, step)]
    return torch.cat(parts)


class _Held:
    """A ranker of scores that are held in memory."""

    def __init__(self, users: Ids, scores: Tensor, num_users: int) -> None:
        self.scores, self.row = scores, np.full(num_users, -1, np.int64)
        self.row[users] = np.arange(len(users))

    def score_users(self, users: Ids) -> Scores:
        return self.scores[torch.from_numpy(self.row[users])].numpy()

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        return self.scores[torch.from_numpy(self.row[users]), torch.from_numpy(items.astype(np.int64))].numpy()


@dataclass(frozen=True)
class _Part:
    """A model in a form, and its weight in units of the form's spread."""

    model: int
    form: Form
    floor: float
    weight: float


class _Search:
    """The search among members, forms and weights."""

    def __init__(
        self,
        task: EvaluationTask,
        name: str,
        scores: Sequence[Tensor],
        progress: Progress,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self.task, self.name, self.scores, self.progress = task, name, scores, progress
        self.enough = enough
        self.metrics: Metrics = {}
        self.done = 0
        self.spreads: dict[tuple[int, Form, float], float] = {}

    def run(self) -> tuple[list[_Part], float, list[float]]:
        """The parts of the best blend, its metric, and that of each model alone."""
        alone = [self.value([_Part(model, "score", FLOORS[1], 1.0)]) for model in range(len(self.scores))]
        best = [_Part(int(np.argmax(alone)), "score", FLOORS[1], 1.0)]
        value = max(alone)
        while len(best) < len(self.scores) and not self.enough():
            absent = [model for model in range(len(self.scores)) if model not in {part.model for part in best}]
            more = [[*best, part] for model in absent for part in _forms(model, WEIGHTS)]
            found, blend = self._best(more)
            for place, part in enumerate(blend if found > value else []):
                others = [*blend[:place], *blend[place + 1 :]]
                tried = [[*others, each] for each in _forms(part.model, [part.weight * by for by in FACTORS])]
                found, blend = max((found, blend), self._best(tried), key=lambda each: each[0])
            if found <= value:
                break
            value, best = found, blend
        self.value(best)  # for its other metrics
        self.progress("weights", 1, 1)
        return best, value, alone

    def _best(self, blends: Sequence[list[_Part]]) -> tuple[float, list[_Part]]:
        found = [(self.value(blends[0]), blends[0])]
        found += ((self.value(each), each) for each in blends[1:] if not self.enough())
        return max(found, key=lambda each: each[0])

    def value(self, parts: Sequence[_Part]) -> float:
        """The metric of a blend."""
        scores = torch.stack([part.weight / self.spread(part) * self.scores_of(part) for part in parts]).sum(0)
        ranker = _Held(self.task.ranked_users, scores, self.task.truth.num_users)
        self.metrics = run_protocols(scores_of(ranker, self.task)).metrics
        self.done += 1
        self.progress("weights", self.done, None)
        if self.name not in self.metrics["full"]:
            raise SettingsError(f"a blend: {unknown('metric', self.name, self.metrics['full'])}")
        return self.metrics["full"][self.name]

    def scores_of(self, part: _Part) -> Tensor:
        """(R, N) scores of a part without its weight."""
        return as_part(self.scores[part.model], part.form, part.floor)

    def spread(self, part: _Part) -> float:
        """The unit of a part's weight."""
        key = part.model, part.form, part.floor
        if key not in self.spreads:
            self.spreads[key] = float(self.scores_of(part).std(1).mean()) or 1.0
        return self.spreads[key]


def _forms(model: int, weights: Sequence[float]) -> Iterator[_Part]:
    for weight in weights:
        yield _Part(model, "score", FLOORS[1], weight)
        yield from (_Part(model, "log", floor, weight) for floor in FLOORS)
