"""A pipeline as a ranker of all items, for protocol `full`.

Shapes: R users; N ids of items.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from recspec.bundle import Bundle
from recspec.evaluation import EvaluationTask, ModelRanker, informed
from recspec.inference.pipeline import Pipeline, rank
from recspec.loading import Ranks
from recspec.models import Ids, Scores


class PipelineRanker:
    """Scores by which the candidates come first, in the order that `recommend` gives them.

    The best of C candidates has the score C, the worst 1. The other items follow in the order of popularity, from 0
    down. Items that the ranker, or popularity, does not tell apart are level. Items that the pipeline's filter leaves
    out share the lowest score. Popularity is that of the events that models may know: those of valid, which the bundle
    counts too, would tell what valid asks.
    """

    def __init__(self, trained: Bundle, question: EvaluationTask) -> None:
        self._question, self._trained = question, trained
        counts = question.known_positives.counts
        self._pipeline = Pipeline.open(trained).knowing(lambda model: informed(model, question), counts)
        self._hits = self._positives = 0
        self._others = -np.unique(-counts, return_inverse=True)[1].astype(np.float32)
        if self._pipeline.kept is not None:
            self._others[~self._pipeline.kept] = -len(counts)

    @cached_property
    def _ranker(self) -> ModelRanker:
        """The ranker with the requests of the split, read when items are first ranked."""
        return ModelRanker(informed(self._trained.model, self._question), self._question)

    @cached_property
    def _retrievers(self) -> list[ModelRanker]:
        """Likewise for each retriever."""
        return [ModelRanker(each.model, self._question) for each in self._pipeline.retrievers]

    def score_users(self, users: Ids) -> Scores:
        """(R, N) scores of every item for each user."""
        seen, truth = self._question.excluded, self._question.truth
        hidden = [seen.of(users[row : row + 1])[1].astype(np.int64) for row in range(len(users))]
        asked = [(each.model, each.request_of(users)) for each in self._retrievers]
        found = self._pipeline.candidates(asked, len(users), excluded=hidden)
        scores = np.tile(self._others, (len(users), 1))
        with torch.inference_mode():
            request = self._ranker.request_of(users)
            values = rank(self._ranker.model, request, self._ranker.items, [each.ids for each in found])
        for row, (each, of_each) in enumerate(zip(found, values, strict=True)):
            scores[row, each.ids] = 1 + np.unique(of_each, return_inverse=True)[1]
            targets = truth.of(users[row : row + 1])[1]
            self._hits += int(np.isin(targets, each.ids).sum())
            self._positives += len(targets)
        return scores

    def score_pairs(self, users: Ids, items: Ids) -> Scores:
        """(P,) scores of pairs."""
        return np.array([self.score_users(users[at : at + 1])[0, items[at]] for at in range(len(users))], np.float32)

    def facts(self, ranks: Ranks) -> Mapping[str, object]:
        """What was ranked, and the share of all positives that were among the candidates."""
        mine = torch.tensor([[self._hits, self._positives]])
        hits, positives = ranks.gather(mine).sum(0).tolist()
        recall = hits / max(1, positives)
        stages = (
            f"{self._pipeline.card.described}, ranked by {self._trained.card.model}; then the other items by popularity"
        )
        return {"stages": stages, "candidates_recall": round(recall, 6)}
