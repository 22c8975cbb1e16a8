"""A run's model as a target policy: what its lists, drawn by chance as it would draw them, would earn.

The model answers each logged request again, with the user's events as of the answer, and so says with which chance it
would have shown what was shown. Rewards of other items come from clicks of other users (`ClickRates`).

Shapes: N lists, K slots, P items of a pool, B bands of ranks, F folds; R lists answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from recspec.base.config import Duration, Settings, micros_in
from recspec.base.errors import DataError, RequestError, SettingsError, how_many
from recspec.base.files import manifest
from recspec.bundle import DataRecord
from recspec.evaluation import Asked, Evaluation, Groups, Interval, Progress, Report, compare, silent
from recspec.inference import LiveEvents, Predictor, RecommendRequest
from recspec.loop import off_policy
from recspec.loop.exploration import Exploration, slot_chances
from recspec.loop.histories import Histories
from recspec.loop.journal import Journal, now_us
from recspec.loop.off_policy import OF_CHOICES, OF_LISTS, Estimate, LoggedLists, estimate
from recspec.loop.shown_lists import ShownLists, read_shown_lists
from recspec.models import UserEvents

Rows = NDArray[np.int64]
Array = NDArray[np.float64]

SPLIT, PROTOCOL = "journal", "off_policy"
LOGGED = "as logged"
"""Name of what the lists earned, beside what the model's would."""
DRAWS = 1_000
FOLDS = 5
PRIOR = 5.0
"""Expected clicks at the mean rate that join those of an item or a band of ranks."""
AT_ONCE = 512
"""Lists that a model answers at once."""
SHORTEST_DIGEST = 8
BANDS = 10
"""Bands of ranks in a pool: 1, 2 to 3, 4 to 7 and so on; the last one also holds what is not in the pool."""


class LoggedListSettings(Settings):
    """Settings of an evaluation from a journal."""

    event: str = Field("click", min_length=1, description="type of the events that are the reward")
    window: Duration = Field("30m", description="time after an answer in which an event on its items counts")
    ks: tuple[int, ...] | None = Field(None, description="numbers of slots, from the top; by default whole lists")
    explore_temperature: float | None = Field(
        None, description="temperature of the model's lists; by default as logged"
    )
    explore_floor: float | None = Field(None, description="share of even draws; by default as logged")
    explore_pool: int | None = Field(None, description="best items that may be shown; by default as logged")
    explore_last: int | None = Field(None, description="slots at the end that are drawn; by default as logged")
    draws: int = Field(DRAWS, ge=1, description="bootstrap draws of a comparison")

    def policy(self, logged: Exploration | None) -> Exploration:
        """How the model's lists are drawn."""
        names = {"explore_temperature", "explore_floor", "explore_pool", "explore_last"}
        own = {name.removeprefix("explore_"): of for name in names if (of := getattr(self, name)) is not None}
        if logged is None and not {"temperature", "floor"} <= own.keys():
            raise SettingsError(
                "evaluate: another system drew the newest list; say how the model would draw, with explore_temperature "
                "and explore_floor"
            )
        return replace(logged or Exploration(), **own)


def evaluate_journal(
    runs: Mapping[str, Predictor],
    journal: Journal,
    settings: LoggedListSettings,
    *,
    at: int | None = None,
    progress: Progress = silent,
) -> dict[str, Report]:
    """Estimate what each run's lists would earn; the first report compares its run with the others.

    Args:
        runs: Name -> opened model.
        journal: Where answers were logged, with chances.
        settings: What counts, and how the models draw.
        at: Time in microseconds since 1970; by default now.
        progress: Gets the share of lists.

    Raises:
        DataError: if there are no such lists, or they tell nothing of a run, with every reason.
        SettingsError: for a number of slots that no list has.
    """
    window = micros_in(settings.window)
    learned = [each.spec.trained_to for each in runs.values()]
    shown = read_shown_lists(
        journal, act=settings.event, window=window, at=now_us() if at is None else at, after=max(learned)
    )
    policy, longest = settings.policy(shown.policies[-1]), shown.items.shape[1]
    ks = settings.ks or (longest,)
    if too_long := [k for k in ks if not 1 <= k <= longest]:
        raise SettingsError(f"evaluate: k is {too_long[0]}; expected 1 to {longest}, the longest list of the journal")
    problems, found = list[str](), dict[str, Evaluation]()
    logged = _as_logged(shown, ks)
    intervals: dict[str, dict[str, Interval]] = {}
    for name, predictor in runs.items():
        target = Target(shown, predictor, journal, policy, progress)
        problems += [f"{name}: {problem}" if len(runs) > 1 else problem for problem in target.problems(max(ks))]
        found[name], intervals[name] = target.evaluation(ks, settings)
    DataError.refuse(f"{journal.shown}: its {how_many(len(shown.users), 'list')} can't tell", problems)
    data = DataRecord(path=journal.shown, digest=shown.digest, name=SPLIT)
    first, *others = runs
    asked = Asked(None, settings.model_dump(mode="json"), False, tuple(others))
    notes = tuple(f"{how_many(count, 'answer')} left out: {why}" for why, count in sorted(shown.left_out.items()))
    return {
        name: Report(
            SPLIT,
            found[name],
            beside={LOGGED: logged},
            intervals={PROTOCOL: intervals[name]},
            against={other: compare(found[name], found[other], settings.draws) for other in others}
            if name == first
            else {},
            asked=asked if name == first else replace(asked, against=()),
            data=data,
            data_notes=notes,
        )
        for name in runs
    }


def _as_logged(shown: ShownLists, ks: Sequence[int]) -> Evaluation:
    """What the lists earned themselves, under the name of each estimate."""
    values = dict[str, NDArray[np.floating[Any]]]()
    for k in ks:
        own = estimate(iter([(shown.clicks[:, :k].sum(1), np.ones(len(shown.users)))]), shown.users).values
        values |= dict.fromkeys(_estimators(shown, k), own)
    means = {name: float(each.mean()) for name, each in values.items()}
    return Evaluation({PROTOCOL: means}, values={PROTOCOL: values})


def _estimators(shown: ShownLists, k: int) -> dict[str, off_policy.Estimator]:
    """Estimates by name: of single choices, or of the first k slots of lists."""
    if shown.items.shape[1] == 1:
        return dict(OF_CHOICES)
    return {f"{name}@{k}": of for name, of in OF_LISTS.items()}


class Target:
    """The logged lists as a model's policy sees them."""

    def __init__(
        self, shown: ShownLists, predictor: Predictor, journal: Journal, policy: Exploration, progress: Progress
    ) -> None:
        self._shown, self._predictor, self._policy = shown, predictor, policy
        self._histories, self._rates = Histories(journal, predictor), ClickRates(shown)
        num_ids, self._first_id = predictor.spec.num_ids(predictor.spec.item_id), predictor.items.first_id
        ids = predictor.catalogues.item_ids(shown.names)
        self._shown_ids = np.where(shown.items >= 0, np.where(ids >= self._first_id, ids, -1)[shown.items], -1)
        self._name_of = np.full(num_ids, len(shown.names))  # beside the last one, of items that were never shown
        self._name_of[ids] = np.where(ids >= self._first_id, np.arange(len(ids)), len(ids))
        shape = shown.items.shape
        self._chances, self._bands, self._masses = np.ones(shape), np.zeros(shape, int), np.zeros((*shape, BANDS))
        self._due, self._own = np.zeros((len(ids) + 1, shape[1])), np.zeros(len(shown.users), bool)
        digest = manifest.digest(predictor.bundle.folder)
        for place, (version, drawn) in enumerate(zip(shown.versions, shown.policies, strict=True)):
            own = version.rpartition(":")[2]
            self._own[place] = drawn == policy and len(own) >= SHORTEST_DIGEST and digest.startswith(own)
        for number, rows in enumerate(blocks := [*self._blocks()]):
            progress(PROTOCOL, number, len(blocks))
            self._answer(rows)
        progress(PROTOCOL, len(blocks), len(blocks))
        predicted, expected = self._rates.predictions(self._bands, self._masses)
        self.lists = LoggedLists(shown.chances, self._chances, shown.clicks, shown.users, predicted, expected)

    def problems(self, k: int) -> list[str]:
        """Why the first k slots tell nothing of the model."""
        found = off_policy.refusals(self.lists.first(k))
        if self._own.any():
            counts = np.zeros_like(self._due)
            rows, slots = np.nonzero((self._shown.items >= 0) & self._own[:, None])
            np.add.at(counts, (self._shown.items[rows, slots], slots), 1)
            if (p := off_policy.counts_p(counts[:, :k], self._due[:, :k])) < off_policy.LEAST_P:
                found.append(
                    f"of {how_many(int(self._own.sum()), 'list')} by this very model, items stand at their slots more "
                    f"or less often than its chances say (p {p:.1g}); the lists were changed, or the model was"
                )
        return found

    def evaluation(self, ks: Sequence[int], settings: LoggedListSettings) -> tuple[Evaluation, dict[str, Interval]]:
        """The estimates, with their intervals."""
        found, told, shown = dict[str, Estimate](), list[str](), self._shown
        for k in ks:
            cut = self.lists.first(k)
            found |= {name: estimate(of(cut), cut.users) for name, of in _estimators(shown, k).items()}
            weights = cut.weights[:, -1]
            told.append(
                f"{off_policy.effective_size(weights):,.0f} in effect"
                + (f" for {how_many(k, 'slot')}" if len(ks) > 1 or shown.items.shape[1] > 1 else "")
            )
        policy = self._policy
        drawn = f"temperature {policy.temperature:g}, floor {policy.floor:g}, pool {policy.pool:,}"
        told.append(f"{settings.event} within {settings.window}; drawn with {drawn}")
        facts: dict[str, object] = {
            "groups": len(shown.subjects),
            "lists": len(shown.users),
            "described": f"{how_many(len(shown.users), 'list')} to {how_many(len(shown.subjects), 'user')}: "
            + ", ".join(told),
        }
        spec = self._predictor.spec
        ids = self._predictor.catalogues.user_ids(shown.subjects)
        evaluation = Evaluation(
            {PROTOCOL: {name: each.value for name, each in found.items()}},
            protocols={PROTOCOL: facts},
            values={PROTOCOL: {name: each.values for name, each in found.items()}},
            groups={PROTOCOL: Groups(spec.user_id, ids)},
        )
        return evaluation, {name: Interval(each.value, each.low, each.high) for name, each in found.items()}

    def _blocks(self) -> Iterator[Rows]:
        """Lists of one length and one request, answered at once."""
        alike: dict[tuple[str, int], list[int]] = {}
        for place, key in enumerate(zip(self._shown.requests, self._shown.lengths.tolist(), strict=True)):
            alike.setdefault(key, []).append(place)
        for places in alike.values():
            yield from (np.array(places[start : start + AT_ONCE]) for start in range(0, len(places), AT_ONCE))

    def _answer(self, rows: Rows) -> None:
        """The policy's chances of some lists, at each slot given the items above."""
        ids, scores = self._pools(rows)
        shown = self._shown_ids[rows, : int(self._shown.lengths[rows[0]])]
        places = np.full(shown.shape, -1)
        for slot, own in enumerate(shown.T):
            here = (ids == own[:, None]) & (own >= 0)[:, None]
            places[:, slot] = np.where(here.any(1), here.argmax(1), -1)
        bands = np.minimum(np.log2(np.arange(1, ids.shape[1] + 1)).astype(int), BANDS - 1)
        starts = np.flatnonzero(np.diff(bands, prepend=-1))
        names = np.where(ids >= 0, self._name_of[ids], len(self._shown.names))
        likings = self._rates.likings[self._rates.folds[rows, None], names]
        self._bands[rows, : places.shape[1]] = np.where(places >= 0, bands[places], BANDS - 1)  # type: ignore[misc]
        own_lists = self._own[rows]
        for slot, chances in enumerate(slot_chances(scores, places, self._policy)):
            at = places[:, slot]
            self._chances[rows, slot] = np.where(at >= 0, chances[np.arange(len(rows)), at], 0.0)
            self._masses[rows, slot, : len(starts)] = np.add.reduceat(chances * likings, starts, axis=1)
            np.add.at(self._due[:, slot], names[own_lists], chances[own_lists])

    def _pools(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Prepared ids and scores (R, P) of the items that the model may show, the best first; -1 and -inf fill up."""
        shown = self._shown
        asked, users = json.loads(shown.requests[rows[0]]), [shown.subjects[user] for user in shown.users[rows]]
        fields = {name: asked[name] for name in ("context", "filter") if name in asked}
        fields |= {name: tuple(asked[name]) for name in ("items", "exclude", "boosts") if name in asked}
        seen, pool = not asked.get("exclude_seen", True), self._policy.pool
        live = [self._histories.as_of(shown.history_seq[row]).of([user]) for row, user in zip(rows, users, strict=True)]
        events, known = _joined([each.events for each in live]), _joined([each.seen for each in live])
        recommender = self._predictor.recommender
        try:
            checked = recommender.check(RecommendRequest(tuple(users), k=pool, include_seen=seen, **fields))
            ids = self._predictor.catalogues.user_ids(users)
            top = recommender.top_items(ids, checked, LiveEvents(events, known))
        except RequestError as error:
            raise DataError(f"a logged request can't be answered: {error}") from None
        return top.items, np.where(top.items >= 0, top.scores, -np.inf).astype(np.float64)


class ClickRates:
    """Clicks as other users' lists predict them.

    q = rate of the slot * liking of the item * liking of its band of ranks in the model's pool. Likings of items and
    bands with few clicks to expect are close to 1. Users of a fold are predicted by those of the others.
    """

    def __init__(self, shown: ShownLists) -> None:
        self._items, self._clicks = shown.items, shown.clicks
        self.folds = shown.users % FOLDS
        """(N,) the fold of each list."""
        self._slots = np.zeros((FOLDS, shown.items.shape[1]))
        self.likings = np.ones((FOLDS, len(shown.names) + 1))
        """(F, items of the log and any other one)."""
        for fold, there in self._others():
            self._slots[fold] = (self._clicks * there).sum(0) / np.maximum(there.sum(0), 1)
            clicks, due = (
                np.bincount(self._items[there], each[there], len(shown.names))
                for each in (self._clicks, np.broadcast_to(self._slots[fold], self._clicks.shape))
            )
            self.likings[fold, :-1] = (clicks + PRIOR) / (due + PRIOR)

    def predictions(self, bands: NDArray[np.int64], masses: NDArray[np.float64]) -> tuple[Array, Array]:
        """(N, K) predicted clicks on shown items, and their expectation over the policy's items.

        Args:
            bands: (N, K) band of ranks of each shown item.
            masses: (N, K, B) the policy's chance of the items of each band, times their liking.
        """
        own = self._slots[self.folds] * self.likings[self.folds[:, None], self._items]
        of_bands = np.ones((FOLDS, BANDS))
        for fold, there in self._others():
            clicks, due = (np.bincount(bands[there], each[there], BANDS) for each in (self._clicks, own))
            of_bands[fold] = (clicks + PRIOR) / (due + PRIOR)
        expected = self._slots[self.folds] * (masses * of_bands[self.folds][:, None]).sum(2)
        predicted = own * of_bands[self.folds[:, None], bands]
        return np.where(self._items >= 0, predicted, 0.0), np.where(self._items >= 0, expected, 0.0)

    def _others(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Each fold, and the items (N, K) of the other folds' lists."""
        for fold in range(FOLDS):
            yield fold, (self._items >= 0) & (self.folds != fold)[:, None]


def _joined(parts: Sequence[UserEvents]) -> UserEvents:
    """The events of several requests as those of one; each holds one user."""
    offsets = np.cumsum([0, *(int(each.offsets[-1]) for each in parts)])
    held = [each for each in parts if len(each.items)] or parts[:1]
    times, weights = ([getattr(each, name) for each in held] for name in ("times", "weights"))
    return UserEvents(
        offsets,
        np.concatenate([each.items for each in held]),
        None if any(each is None for each in times) else np.concatenate(times),
        None if any(each is None for each in weights) else np.concatenate(weights),
    )
