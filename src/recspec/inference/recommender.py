"""The best items for users, baskets and contexts, among all items or a pipeline's candidates; and items like one item.

Shapes: R users; N items of the catalogue; C candidates of a user; k items of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recspec.base.errors import BundleError, RequestError, shortened
from recspec.bundle import Bundle, Seen
from recspec.inference.catalogue import Catalogues
from recspec.inference.explanations import Explainer, Explanation, likeness_vectors
from recspec.inference.index import ItemIndex
from recspec.inference.live_events import LiveEvents, StoredEvents
from recspec.inference.pipeline import Candidates, Pipeline, RetrieverInput, rank, request_vectors
from recspec.inference.ranking import Choice, Chooser, pool_size, ranked
from recspec.inference.recommendation import (
    RawId,
    Recommendation,
    RecommendedItem,
    RecommendRequest,
    SimilarItems,
    described,
    notes_of,
    notes_of_short_list,
)
from recspec.inference.request_features import AnsweredBy, Context, RequestFeatures, RowEncoder
from recspec.models import ItemModel, Model, UserEvents, at_once
from recspec.models.layers import Batch

SCORES = 1 << 24
"""Scores of users x items held at once on a CPU: 64 MB."""
FEW = 16
"""Less than one item in as many is left out place by place; more by a mask, which takes a pass over all scores."""
UNEXPLAINED = "no explanation: there is no history, or the model has neither weights between items nor vectors of them"


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates of R users; ids ascend in each row, and a score of -inf leaves one out."""

    scores: Tensor  # (R, C)
    ids: Tensor  # (R, C); -1 fills a short list
    brought_by: NDArray[np.uint16] | None = None  # (R, C) see `pipeline.Candidates`
    flat: NDArray[np.bool_] | None = None  # (R,) users for whom the model scores all items alike

    def brought(self, items: NDArray[np.int64]) -> NDArray[np.uint16]:
        """(R, k) what brought items (R, k) of the candidates; 0 where nothing did."""
        found = np.zeros(items.shape, np.uint16)
        if self.brought_by is not None:
            for row, ids in enumerate(self.ids.numpy()):
                places = np.searchsorted(ids, items[row]).clip(max=max(0, len(ids) - 1))
                found[row] = np.where(items[row] >= 0, self.brought_by[row, places], 0) if len(ids) else 0
        return found


class Retrieving:
    """Asks the retrievers of a pipeline, and lets the ranker score what they bring."""

    def __init__(
        self, pipeline: Pipeline, trained: Bundle, known: Catalogues, ranker: RequestFeatures, stored: StoredEvents
    ) -> None:
        self.pipeline, self._trained, self._known, self._ranker = pipeline, trained, known, ranker
        models = [each.model for each in pipeline.retrievers]
        self._request_features = [
            RequestFeatures(model, known, RowEncoder(known, model.features()), stored) for model in models
        ]

    def reads_basket(self, context: Context) -> bool:
        """Whether a retriever can answer the request's basket."""
        return any(each.answered_by(context)[1] == "basket" for each in self._request_features)

    def reads_history(self, context: Context) -> bool:
        """Whether a retriever can rank by the new events of a user without an id."""
        return any(each.reads_history(context) for each in self._request_features)

    def scored(self, users: NDArray[np.int64], how: AnsweredBy, checked: CheckedRequest, live: LiveEvents) -> Scored:
        """The candidates of R users, with the ranker's scores.

        Args:
            users: (R,) prepared ids; one below the first is an unknown user's.
            how: what all of them are answered by.
            checked: the request.
            live: the users' new events.

        Raises:
            BundleError: if the ranker gives a score that is not finite; `RequestError` if the context is to blame.
        """
        first, seen = self._known.users.first_id, self._trained.seen
        assert seen is not None
        wanted, choice, context = checked.request, checked.choice, checked.context
        is_known = bool((users >= first).all())
        asked = [self._asked(each, users, how, context, live, known=is_known) for each in self._request_features]
        acted = _seen_by(seen, users, first, live, include_seen=wanted.include_seen)
        hidden = [np.concatenate([items, choice.left_out]) for items in acted]
        found = self.pipeline.candidates(asked, len(users), count=wanted.k, allowed=choice.kept, excluded=hidden)
        made = self._ranked(*self._ranker.batch(users, context, live), found)
        if not bool(made.scores[made.ids >= 0].isfinite().all()):
            raise context.no_finite_score("ranker")
        return made

    def _ranked(self, model: Model, request: Batch, found: Sequence[Candidates]) -> Scored:
        """The ranker's scores of candidates."""
        ordered = [np.argsort(each.ids) for each in found]
        own = [each.ids[order] for each, order in zip(found, ordered, strict=True)]
        values = rank(model, request, self._known.items.features, own)
        shape = (len(found), max((len(ids) for ids in own), default=0))
        scores, ids = np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int64)
        bits = np.zeros(shape, np.uint16)
        for row, (each, order) in enumerate(zip(found, ordered, strict=True)):
            place = slice(shape[1] - len(order), None)
            scores[row, place], ids[row, place], bits[row, place] = values[row], own[row], each.brought_by[order]
        return Scored(torch.from_numpy(scores), torch.from_numpy(ids), bits)

    @staticmethod
    def _asked(
        request_features: RequestFeatures,
        users: NDArray[np.int64],
        how: AnsweredBy,
        context: Context,
        live: LiveEvents,
        *,
        known: bool,
    ) -> RetrieverInput:
        """A retriever's side of the requests; None if it can't answer them."""
        if any(name not in context.features for name in request_features.context_features):
            return None
        reads = how == "history" and request_features.reads_history(context)
        if not known and not reads and request_features.answered_by(context)[1] not in ("basket", "context"):
            return None
        return request_features.batch(users, context, live)


@dataclass(frozen=True, eq=False)
class CheckedRequest:
    """A checked request: what may be recommended, and what the model reads beside the users."""

    request: RecommendRequest
    choice: Choice
    context: Context


@dataclass(frozen=True, eq=False)
class TopItems:
    """The best items of R users; -1 and -inf fill short lists."""

    items: NDArray[np.int64]  # (R, k)
    scores: NDArray[np.float32]  # (R, k)
    boosts: NDArray[np.float32] | None  # (R, k)
    answered_by: tuple[AnsweredBy, ...]
    brought_by: NDArray[np.uint16] | None = None  # (R, k) of a pipeline; see `pipeline.Candidates`
    chances: NDArray[np.float64] | None = None  # (R, k) of drawn lists, unless diversity changed them
    pool_sizes: NDArray[np.int64] | None = None  # (R,) of drawn lists


class Recommender:
    """Recommends items to users, baskets and contexts.

    One class because each method is a step from a request to its list, over the same model and catalogues.
    """

    def __init__(self, trained: Bundle, known: Catalogues, rows: RowEncoder, pipeline: Pipeline | None = None) -> None:
        self._bundle, self._known, self._device = trained, known, known.device
        stored = StoredEvents(trained, known)
        self.request_features = own = RequestFeatures(trained.model, known, rows, stored)
        self.retrieving = None if pipeline is None else Retrieving(pipeline, trained, known, own, stored)
        self.index: ItemIndex | None = None
        """Vectors of all items that the model can recommend, in place of its scores of all items."""

    @property
    def seen(self) -> Seen:
        """Which items each user acted on."""
        if self._bundle.seen is None:
            lacks = "item to recommend" if self._bundle.spec.id_of("user") else "user to recommend to"
            raise BundleError(f"{self._bundle.folder}: this model has no {lacks}; score rows with `recspec predict`")
        return self._bundle.seen

    @cached_property
    def chooser(self) -> Chooser:
        """Reads filters, excluded items and boosts; items without interactions are for models that can score them."""
        counts = self.seen.counts.numpy()
        scores_all = self._bundle.model.traits.scores_unseen_items
        changes = self._known.changes
        kept = None if changes is None else changes.available
        kept = kept if self.retrieving is None else self.retrieving.pipeline.kept
        scorable = np.ones(len(counts), bool) if scores_all else counts > 0
        if self._known.retired is not None:
            scorable &= ~self._known.retired
        return Chooser(self._known, scorable, kept)

    @cached_property
    def vectors(self) -> Tensor | None:
        """The model's vectors (num_ids, D) of items, of length 1, in host memory; None if it has none."""
        found = likeness_vectors(self._bundle.model, self._known)
        return None if found is None else torch.nn.functional.normalize(found.cpu(), dim=1)

    @cached_property
    def _scorer(self) -> Callable[[Batch], Tensor]:
        """The model's scores of all items for requests, with the items' part computed once."""
        return self._bundle.model.scorer(self._known.items.candidates)

    @cached_property
    def explainer(self) -> Explainer:
        """Explains answers."""
        return Explainer(self._known, self.request_features, self.seen, self.vectors)

    def check(self, wanted: RecommendRequest) -> CheckedRequest:
        """Read a request and look up what it names.

        Raises:
            RequestError: with every problem of the request.
        """
        _ = self.seen  # raises for a model that can't recommend
        if problems := wanted.problems():
            raise RequestError.of("recommend", problems)
        choice = self.chooser.choose(wanted, problems)
        context = self.request_features.context(wanted.context, choice.basket, problems)
        if not problems and not self.request_features.crosses_items:
            self._known.check_items(self._bundle.model.features())
        if wanted.diversity and wanted.diverse_by is None and self.vectors is None:
            problems.append(
                "diversity: the model has no vectors of items; name a column of the catalogue to be diverse by"
            )
        RequestError.refuse("recommend", problems)
        return CheckedRequest(wanted, choice, context)

    def recommend(self, wanted: RecommendRequest, live: LiveEvents | None = None) -> list[Recommendation]:
        """One answer for each user, or one for a basket or context without users; see `Predictor.recommend`."""
        checked = self.check(wanted)
        users: Sequence[RawId | None] = [None] if wanted.is_anonymous else wanted.users
        ids = np.array([self._known.users.first_id - 1]) if wanted.is_anonymous else self._known.user_ids(wanted.users)
        events = LiveEvents.none(len(ids)) if live is None else live
        return [
            answer
            for block in self.blocks(len(ids))
            for answer in self._answers(users[block], ids[block], checked, events.of(np.arange(len(ids))[block]))
        ]

    def fallback_for_unknown_users(self, wanted: RecommendRequest) -> AnsweredBy:
        """What users that the model does not know are answered by, who are all alike to it."""
        return self.top_items(np.array([self._known.users.first_id - 1]), self.check(wanted)).answered_by[0]

    def blocks(self, count: int) -> Iterator[slice]:
        """Users answered at once: users x items within `at_once(SCORES)`."""
        step = max(1, at_once(SCORES, self._device) // max(1, len(self._known.items)))
        return (slice(start, min(count, start + step)) for start in range(0, count, step))

    def liked(self, user: str | int, *, k: int, live: LiveEvents | None = None) -> tuple[RecommendedItem, ...]:
        """Some items the user acted on, the most popular first; their scores are 0."""
        number = int(self._known.user_ids([user])[0])
        items = self.seen.known_of(number).long() if number >= self._known.users.first_id else torch.zeros(0).long()
        if live is not None:
            items = torch.from_numpy(np.union1d(items.numpy(), live.events.items))
        best = items[torch.argsort(self.seen.counts[items], descending=True, stable=True)][:k].numpy()
        return described(self._known, best, np.zeros(len(best), np.float32))

    def busiest_user(self) -> str | int:
        """The raw id of the user who acted on most items."""
        number = int(torch.argmax(self.seen.num_known))
        raw: str | int = self._known.raw_ids("user", np.array([number]))[0].as_py()
        return raw

    # --- candidates and ranking ---------------------------------------------------------------------------------------

    @torch.inference_mode()  # candidates are changed in place
    def top_items(self, users: NDArray[np.int64], checked: CheckedRequest, live: LiveEvents | None = None) -> TopItems:
        """The best items of R users by prepared id; an id below the first is an unknown user's."""
        live = LiveEvents.none(len(users)) if live is None else live
        is_known = users >= self._known.users.first_id
        of_known, of_others = self._answered_by(checked)
        of_new: AnsweredBy = "history" if self._reads_history(checked) else of_others
        answered_by = [
            of_known if known else of_new if has else of_others
            for known, has in zip(is_known.tolist(), live.has.tolist(), strict=True)
        ]
        width = min(checked.request.k, len(self._known.items))
        items = np.full((len(users), width), -1, np.int64)
        scores = np.full((len(users), width), -np.inf, np.float32)
        boosts = np.zeros((len(users), width), np.float32) if checked.choice.boosts is not None else None
        brought = None if self.retrieving is None else np.zeros((len(users), width), np.uint16)
        draw = checked.request.draw
        chances = None if draw is None or checked.request.diversity else np.zeros((len(users), width))
        pool_sizes = None if draw is None else np.zeros(len(users), np.int64)
        waiting = [
            (how, np.array([place for place, each in enumerate(answered_by) if each == how]))
            for how in dict.fromkeys(answered_by)
        ]
        while waiting:  # users whose items the model tells not apart come back for popularity
            how, rows = waiting.pop(0)
            candidates = self._candidates(users[rows], how, checked, live.of(rows))
            if candidates.flat is not None and len(alike := rows[candidates.flat]):
                waiting.append(("popularity", alike))
                for row in alike.tolist():
                    answered_by[row] = "popularity"
            by_vectors = bool(checked.request.diversity) and checked.request.diverse_by is None
            found = ranked(
                candidates.scores,
                candidates.ids,
                width,
                checked.choice,
                diversity=checked.request.diversity,
                vectors=self.vectors if by_vectors else None,
                draw=draw,
            )
            if chances is not None:
                chances[rows] = found.chances
            if pool_sizes is not None and found.pool_sizes is not None:
                pool_sizes[rows] = found.pool_sizes
            items[rows], scores[rows] = found.items, found.scores
            if boosts is not None:
                boosts[rows] = found.boosts
            if brought is not None:
                brought[rows] = candidates.brought(found.items)
        return TopItems(items, scores, boosts, tuple(answered_by), brought, chances, pool_sizes)

    def _answered_by(self, checked: CheckedRequest) -> tuple[AnsweredBy, AnsweredBy]:
        """What known users and others are answered by."""
        of_known, of_others = self.request_features.answered_by(checked.context)
        reads = self.retrieving is not None and self.retrieving.reads_basket(checked.context)
        if reads and of_others in ("basket_vectors", "popularity") and self.request_features.knows_strangers:
            of_others = "basket"
        if of_others == "basket_vectors" and self.vectors is None:
            of_others = "popularity"
        return of_known, of_others

    def _reads_history(self, checked: CheckedRequest) -> bool:
        """Whether the new events of unknown users are what they are answered by."""
        if self.request_features.reads_history(checked.context):
            return True
        retrieved = self.retrieving is not None and self.retrieving.reads_history(checked.context)
        return retrieved and self.request_features.knows_strangers

    def _candidates(
        self, users: NDArray[np.int64], how: AnsweredBy, checked: CheckedRequest, live: LiveEvents
    ) -> Scored:
        """The candidates of R users, all known or none, with the scores by which they are ranked."""
        first, seen, flat = self._known.items.first_id, self.seen, None
        if self.retrieving is not None and how not in ("popularity", "basket_vectors"):
            return self.retrieving.scored(users, how, checked, live)
        if how == "popularity":
            scores = seen.counts[first:].float().repeat(len(users), 1)
            scores[scores == 0] = -torch.inf
        elif how == "basket_vectors":
            assert self.vectors is not None
            mean = self.vectors[torch.from_numpy(checked.context.basket)].mean(0)
            scores = (self.vectors[first:] @ mean).repeat(len(users), 1)  # mean cosines
        elif self.index is not None and checked.choice.boosts is None and checked.choice.cap is None:
            # A boost needs the spread of all scores, a cap whatever comes after the items that it leaves out.
            return self._found(self.index, users, checked, live)
        else:
            scores = self.scores_of_all(users, checked.context, live)
            flat = _are_alike(scores)
        _leave_out(scores, checked.choice.allowed[first:])
        if not checked.request.include_seen:
            if self._known.users.first_id <= int(users.max(initial=-1)):
                rows, columns = _pairs(seen, torch.from_numpy(np.maximum(users, 0)), first)
                known = torch.from_numpy(users >= self._known.users.first_id)[rows]
                scores[rows[known], columns[known]] = -torch.inf
            if len(live.seen.items):
                scores[torch.from_numpy(live.seen.users), torch.from_numpy(live.seen.items).long() - first] = -torch.inf
        brought = None
        if self.retrieving is not None:
            popularity = self.retrieving.pipeline.popularity_bit
            brought = np.full(scores.shape, popularity if how == "popularity" else 0, np.uint16)
        return Scored(scores, torch.arange(first, first + scores.shape[1]).expand(len(users), -1), brought, flat)

    def _found(self, index: ItemIndex, users: NDArray[np.int64], checked: CheckedRequest, live: LiveEvents) -> Scored:
        """The candidates that the index finds for R users."""
        model, request = self.request_features.batch(users, checked.context, live)
        vectors = request_vectors(model, request)
        wanted, seen, first = checked.request, self.seen, self._known.users.first_id
        hidden = _seen_by(seen, users, first, live, include_seen=wanted.include_seen)
        allowed = None if checked.choice.allowed[index.ids].all() else checked.choice.allowed
        count = pool_size(wanted.k) if wanted.diversity else wanted.k
        count = count if wanted.draw is None else max(count, wanted.draw.pool)
        scores, ids = index.search(vectors, count, allowed=allowed, excluded=hidden)
        order = np.argsort(ids, axis=1)
        found = torch.from_numpy(np.take_along_axis(scores, order, 1))
        if isinstance(model, ItemModel):
            found = found * model.line[0].cpu() + model.line[1].cpu()
        return Scored(found, torch.from_numpy(np.take_along_axis(ids, order, 1)), flat=np.asarray(~vectors.any(axis=1)))

    def scores_of_all(self, users: NDArray[np.int64], context: Context, live: LiveEvents | None = None) -> Tensor:
        """The model's scores (R, N) of every item of the catalogue, in a tensor that the caller may change."""
        model, request = self.request_features.batch(users, context, live)
        with torch.inference_mode():
            known = model is self._bundle.model  # not one that knows a basket or new events
            scores = self._scorer(request) if known else model.score_items(request, self._known.items.candidates)
            scores = scores.float().cpu()
        # A sum is finite only if every score is, and takes an eighth of the time of looking at each.
        if not bool(scores.sum().isfinite()) and not bool(scores.isfinite().all()):
            raise context.no_finite_score("model")
        return scores

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answers(
        self, users: Sequence[RawId | None], ids: NDArray[np.int64], checked: CheckedRequest, live: LiveEvents
    ) -> Iterator[Recommendation]:
        top = self.top_items(ids, checked, live)
        has_basket = len(checked.choice.basket) > 0
        is_known = ids >= self._known.users.first_id
        raw = iter(self._known.raw_ids("user", ids[is_known]).to_pylist())
        for row, user in enumerate(users):
            kept, how = top.items[row] >= 0, top.answered_by[row]
            boosts = None if top.boosts is None else top.boosts[row, kept]
            items, scores = top.items[row, kept], top.scores[row, kept]
            because: Sequence[Explanation | None] = ()
            if checked.request.explain:
                own = scores if boosts is None else scores - boosts
                because = self.explainer.explain(
                    int(ids[row]), how, checked.context, items, own, live.of(np.array([row]))
                )
            names = None
            if self.retrieving is not None and top.brought_by is not None:
                names = [self.retrieving.pipeline.names_of(bits) for bits in top.brought_by[row, kept].tolist()]
            found = described(self._known, items, scores, boosts, because, names)
            brings = self.retrieving is not None and self.retrieving.pipeline.brings_unseen
            near = "" if is_known[row] or user is None else self._known.nearest("user", user)
            notes = notes_of(
                how,
                checked.request,
                len(found),
                known=bool(is_known[row]),
                near=near,
                has_basket=has_basket,
                has_events=bool(live.has[row]),
                unseen=0 if brings else checked.choice.unknown,
                drawn=checked.request.draw is not None,
            )
            unexplained = (UNEXPLAINED,) if checked.request.explain and len(found) and not any(because) else ()
            all_notes = (*notes, *unexplained, *checked.choice.notes, *checked.context.notes)
            chances: tuple[float, ...] | None = (1.0,) * len(found)
            pool = len(found)
            if top.pool_sizes is not None:
                chances = None if top.chances is None else tuple(top.chances[row, kept].tolist())
                pool = int(top.pool_sizes[row])
            who = next(raw) if is_known[row] else user
            yield Recommendation(who, bool(is_known[row]), found, all_notes, how, chances, pool)


def _seen_by(
    seen: Seen, users: NDArray[np.int64], first: int, live: LiveEvents, *, include_seen: bool
) -> list[NDArray[np.int64]]:
    """The items that each user acted on, unless they may be recommended."""
    nothing = np.zeros(0, np.int64)
    if include_seen:
        return [nothing] * len(users)
    stored = [nothing if user < first else seen.of(user).numpy().astype(np.int64) for user in users.tolist()]
    return [np.concatenate([items, live.seen_by(row)]) for row, items in enumerate(stored)]


def _are_alike(scores: Tensor) -> NDArray[np.bool_] | None:
    """Which rows of scores (R, N) hold one number alone; None for a single item.

    A row whose ends differ needs no pass over its scores.
    """
    if scores.shape[1] < 2:
        return None
    alike = scores[:, 0] == scores[:, -1]
    for row in alike.nonzero()[:, 0].tolist():
        alike[row] = bool((scores[row] == scores[row, 0]).all())
    return alike.numpy()


def _leave_out(scores: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Set the scores (R, N) of items that are not allowed (N,) to -inf."""
    left_out = np.flatnonzero(~allowed)
    if len(left_out) * FEW > len(allowed):
        scores.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
    elif len(left_out):
        scores[:, torch.from_numpy(left_out)] = -torch.inf


def _pairs(seen: Seen, users: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """The user's row and the item's column of every item that the users acted on."""
    offsets, items = seen.lists
    starts, counts = offsets[users], offsets[users + 1] - offsets[users]
    rows = torch.repeat_interleave(torch.arange(len(users)), counts)
    within = torch.arange(len(rows)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return rows, items[torch.repeat_interleave(starts, counts) + within].long() - first_id


def similar(recommender: Recommender, trained: Bundle, known: Catalogues, wanted: RecommendRequest) -> SimilarItems:
    """The items most like the one item of a request, by cosines of the model's vectors; equal ones by id.

    A model of users' events without vectors of items (EASE, item-kNN) ranks by its scores for a basket of the item
    alone. The request's filter and excluded items hold; the item itself is left out.

    Raises:
        RequestError: with every problem of the request.
    """
    assert len(wanted.items) == 1, "one item"
    _ = recommender.seen  # raises for a model that can't recommend
    if problems := wanted.problems():
        raise RequestError.of("similar", problems)
    choice = recommender.chooser.choose(wanted, problems)
    vectors = recommender.vectors
    item, _ = recommender.chooser.known_items(wanted.items, "item")
    if not len(item):
        hint = known.nearest("item", wanted.items[0])
        problems.append(f"no item '{str(wanted.items[0])[:200]}' in the catalogue of the model{hint}")
    if vectors is None and not isinstance(trained.model, ItemModel):
        problems.append("the model has no vectors of items, so it can't tell which are alike")
    RequestError.refuse("similar", problems)
    first = known.items.first_id
    # cosines: the vectors have length 1
    scores = vectors[torch.from_numpy(item)] @ vectors.T if vectors is not None else _scores(trained, known, item)
    scores = scores[:, first:].masked_fill(~torch.from_numpy(choice.allowed[first:]), -torch.inf)
    ids = torch.arange(first, first + scores.shape[1]).unsqueeze(0)
    found = ranked(scores, ids, min(wanted.k, scores.shape[1]), choice)
    kept = found.items[0] >= 0
    items = described(known, found.items[0, kept], found.scores[0, kept])
    (own,) = described(known, item, np.zeros(1, np.float32))
    is_unseen = not recommender.chooser.scorable[item[0]]
    notes = (
        *choice.notes,
        *_notes_of_ties(scores[0], found.scores[0, kept], own.item, is_unseen=is_unseen),
        *notes_of_short_list(len(items), wanted, "item"),
    )
    return SimilarItems(own.item, own.title, "vectors" if vectors is not None else "scores", items, notes)


def _notes_of_ties(scores: Tensor, best: NDArray[np.float32], item: str | int, *, is_unseen: bool) -> Iterator[str]:
    """What to know of items that are listed by id, because the model scores them like others that are not listed."""
    if not len(best):
        return
    why = f"item '{shortened(str(item))}' has no interactions that the model was trained on, so " if is_unseen else ""
    tied = int((scores == float(best[-1])).sum())
    last = int(np.count_nonzero(best == best[-1]))
    if tied == int(scores.isfinite().sum()) and tied > 1:
        told = f"the model knows no items like it: it scores all {tied:,} items alike, and these are the first by id"
        yield f"{why}{told}"
    elif is_unseen:
        yield f"{why}the model knows little of what is like it"
    elif tied > last > 1:
        yield f"the last {last:,} are no more like it than {tied - last:,} others, and stand here by their ids"


def _scores(trained: Bundle, known: Catalogues, item: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """(1, ids) scores for a basket of one item."""
    model = trained.model
    assert isinstance(model, ItemModel)
    basket = UserEvents(np.array([0, 1], np.int64), item.astype(np.int32))
    return model.score_events(basket.interactions(known.spec.num_ids(known.spec.item_id))).float().cpu()
