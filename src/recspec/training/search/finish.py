"""The end of a search: a blend of its best models, the winner's training on train and valid, and test.

Each step is written down when it is done, so that a stopped or killed end goes on where it was.

A blend holds each model that ranks items by the users' events once, by its best candidate. Its weights are chosen on
the users of valid on whom all candidates are judged, in a share of the time that is left.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml

from recspec.base import config, latency
from recspec.base.errors import Interrupted, SettingsError
from recspec.base.files import put_in_place, staging
from recspec.bundle import Card, as_part, run_record
from recspec.bundle import folder as bundle
from recspec.evaluation import EvaluationTask, seconds_of
from recspec.feature_spec import SIGNALS
from recspec.loading import Ranks
from recspec.models import Model
from recspec.training import RECIPE, Blended, blend_runs
from recspec.training.search import candidates
from recspec.training.search.race import blend_candidates
from recspec.training.search.state import (
    AGAIN,
    BEST,
    BLEND,
    NOT_BEGUN,
    Blending,
    Ending,
    Judged,
    Leaderboard,
    Line,
    Place,
    Search,
    State,
    judge,
    question_of,
    second_of,
    sign_of,
    write_blend,
)

SPLITS = ["train", "valid"]

LEAST = 20.0
"""Seconds that the end may take even if the time is over."""
JUDGED = 5
"""Best candidates that are measured again for standard errors, and on test."""
SECONDS = 0.3
"""Time for each latency."""

SHARE = 0.25
"""Share of the time left for choosing a blend; the rest is for the second training and test."""
FEWEST_USERS = 200
"""Users without which weights are not chosen: fewer are noise."""
LEAST_LEAD = 1.0
"""Standard errors by which a blend must lead its best model, which costs less."""
TRIALS = 60
"""Blends that are tried in a search of two models, and of each further one about as many again."""
TIMED = 1 << 20
"""Scores of users x items of a timed trial."""


class Finish:
    """The end of one search."""

    def __init__(self, search: Search) -> None:
        self.search, self.spec, self.state, self.out = search, search.spec, search.state, search.out
        self.question, self.on_valid = cache(self._question), cache(self._on_valid)
        self._at = time.monotonic()

    def run(self, left: float) -> Leaderboard:
        """Choose the winner on valid and judge the best candidates, with `left` seconds; or go on with that.

        Raises:
            SettingsError: if no candidate was trained.
            Interrupted: if `stop_requested` says so.
        """
        given = self.state.spent + left
        if self.state.ending is None or not (self.state.ending.done and (self.out / BEST).exists()):
            self.state.check_runs(self.out)
        if self.state.ending is None:
            until = time.monotonic() + max(left, LEAST)
            if self.state.blend is None:
                self._blend(max(left, LEAST))
            self.state.ending = self._choose(max(until - time.monotonic(), LEAST / 2))
            self._save()
        ending = self.state.ending
        winner = self.state.line(ending.judged[0])
        if not ending.done:
            if ending.trains_again and not (ending.trained_again or ending.not_again):
                self.search.tell(f"{winner.name} is trained again on train and valid")
                try:
                    retrain_winner(self.search, winner, ending, self._save)
                except Interrupted:
                    self._check()
                    raise
                self._save()
            self._put_in_place(winner, ending)
            for name in (*ending.judged, *((AGAIN,) if ending.trained_again else ())):
                if name not in ending.places:
                    which = f"{winner.name}, trained again" if name == AGAIN else name
                    self.search.tell(f"final evaluation: {which}")
                    ending.places[name] = self._measure(name, ending)
                    self._save()
            ending.done = True
            self._save()
        elif not (self.out / BEST).exists():
            self._put_in_place(winner, ending)
        board = Leaderboard.of(self.state, ending, self.out, given)
        board.save(self.out)
        return board

    def _save(self) -> None:
        now = time.monotonic()
        self.state.spent += now - self._at
        self._at = now
        self.state.save(self.out)

    def _check(self, *_: object) -> None:
        """Stop if asked to."""
        if self.search.stop_requested():
            self._save()
            raise Interrupted(f"{self.out}: stopped as asked; the same command goes on")

    def run_of(self, name: str) -> Path:
        """The run of a candidate, or of the winner's second training."""
        ending = self.state.ending
        assert ending is not None
        return self.search.run_of(f"{ending.judged[0]}-{AGAIN}" if name == AGAIN else name)

    def _blend(self, left: float) -> None:
        """Add the blend of the best candidates, if there is one."""
        found = Blending()
        if "valid" in self.spec.splits and (lines := blend_candidates(self.state)):
            self.search.tell(f"weights of a blend are chosen: {', '.join(line.name for line in lines)}")
            found = choose_blend(self.search, lines, left, self._check)
        self.state.blend = found
        self._save()

    def _choose(self, left: float) -> Ending:
        """What is judged, before test is opened."""
        state, ranked = self.state, self.state.ranked
        if not ranked:
            failed = [f"{line.name}: {line.failed or NOT_BEGUN}" for line in state.lines]
            raise SettingsError.of(f"{self.out}: no model was trained", failed)
        best = ranked[:JUDGED]
        ending = Ending(judged=[line.name for line in best])
        for name in (best[0].name, *state.members(best[0])):
            shutil.rmtree(_again(self.search, name), ignore_errors=True)
        question = question_of(self.spec, "valid" if "valid" in self.spec.splits else "train", state.deciding)
        for line in best:
            self._check()
            time_judging(self.search, line, question)
        needed = 2 * state.size * sum(state.each.get(line.model, 0.0) for line in best)
        ending.users = state.users if needed > left else None  # all of them if the time allows it
        seconds, why = seconds_to_retrain(self.search, best[0])
        if why or seconds > left:
            ending.not_again = why or f"it would take {seconds:.0f} s, and {left:.0f} s are left"
        ending.trains_again = not ending.not_again
        return ending

    def _put_in_place(self, winner: Line, ending: Ending) -> None:
        """Copy the winner to `OUT/best`."""
        run = self.run_of(AGAIN if ending.trained_again else winner.name)
        with staging(self.out / BEST) as copied:
            best = copied / "run"
            shutil.copytree(run, best, ignore=shutil.ignore_patterns("checkpoints", "evaluations", "report.html", ".*"))
            run_record.hand_over(run, best, "auto")
            put_in_place(best, self.out / BEST)

    # --- figures -----------------------------------------------------------------------------------------------------

    def _question(self, split: str) -> EvaluationTask:
        """What a split asks of all candidates alike; it is read once."""
        assert self.state.ending is not None
        return question_of(self.spec, split, self.state.deciding, self.state.ending.users)

    def _measure(self, name: str, ending: Ending) -> Place:
        """The figures of one run."""
        self._check()
        run, place, splits = self.run_of(name), Place(), self.spec.splits
        try:
            folder = bundle.find(run)
            place.size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            model = self._load(name)
            place.parameters = sum(each.numel() for each in model.state_dict().values())
            with torch.inference_mode():
                question = self.question("valid" if "valid" in splits else "train")
                call = candidates.request_of(model, question, 1)
                place.p50_ms = latency.measure(call, 1, seconds=SECONDS, warmup=3, at_least=5).p50
            if "valid" in splits and name != AGAIN:  # the second training has seen valid
                self._note_users(ending, "valid")
                place.valid_error = _known(self.on_valid(name).error)
                self._compare(name, ending)
            if "test" in splits:
                self._note_users(ending, "test")
                test = judge(model, self.question("test"), self.state.deciding, self.search.ranks, self._check)
                place.test, place.test_error = _known(test.value), _known(test.error)
        except Interrupted:
            raise
        except candidates.FAILURES as error:
            place.problem = candidates.problems_of(error)
        return place

    def _load(self, name: str) -> Model:
        return bundle.load(self.run_of(name), device=self.search.ranks.device).model.eval()

    def _note_users(self, ending: Ending, split: str) -> None:
        """Note how many users the figures of a split are of."""
        if not self.state.deciding.startswith("full/"):
            return
        question = self.question(split)
        ranked, known = len(question.ranked_users), int(np.count_nonzero(np.diff(question.truth.offsets)))
        if split == "valid":  # candidates were chosen on the users of the search
            ending.users_of["valid"] = min(self.state.users or known, known), known
            ending.users_of["valid_error"] = ranked, known
        else:
            ending.users_of[split] = ranked, known

    def _on_valid(self, name: str) -> Judged:
        """A candidate on valid."""
        model = self._load(name)
        if model.calibration is not None and len(model.calibration.slopes) > 1:
            model.calibration = None  # steps that were fitted to the rows of valid; a line learns next to nothing there
        return judge(model, self.question("valid"), self.state.deciding, self.search.ranks, self._check)

    def _compare(self, name: str, ending: Ending) -> None:
        """Note the winner's lead over the next model, once that is measured."""
        second = second_of(self.state.ranked, ending.judged)
        if second is None or name != second.name:
            return
        by, error = self.on_valid(ending.judged[0]).lead(self.on_valid(name))
        ending.lead = None if math.isnan(by) or math.isnan(error) else (by, error)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- the second training ---------------------------------------------------------------------------------------------


def seconds_to_retrain(search: Search, line: Line) -> tuple[float, str]:
    """Seconds that training the winner on train and valid takes, up to its best epoch; or why it can't be done."""
    if "valid" not in search.spec.splits:
        return 0.0, "the dataset has no split valid"
    if members := search.state.members(line):
        return sum(seconds_to_retrain(search, search.state.line(name))[0] for name in members), ""
    if not line.is_fitted:
        return 1.5 * line.seconds * line.best_epoch / max(1.0, line.epoch), ""
    return line.beside + float(str(_card(search, line).trained["seconds_of_best"])), ""


def retrain_winner(search: Search, line: Line, ending: Ending, save: Callable[[], None]) -> None:
    """Train the winner, or all members of a blend, again; note what was done or why not. `save` follows each member.

    Raises:
        Interrupted: if `stop_requested` says so; the same call goes on.
    """
    members = search.state.members(line)
    try:
        for name in members or (line.name,):
            if name not in ending.members_again:
                _train_again(search, search.state.line(name))
                ending.members_again.append(name)
                save()
        if members:
            first, again = search.run_of(line.name), _again(search, line.name)
            runs = {name: _again(search, name) for name in members}
            shutil.rmtree(again, ignore_errors=True)
            blend_runs(again, list(runs.values()), like=first, device=search.ranks.device)
            write_blend(again, runs, search.state.dataset, like=first)
    except Interrupted:
        raise
    except candidates.FAILURES as error:
        ending.not_again = candidates.problems_of(error)
    else:
        ending.trained_again = True


def _train_again(search: Search, line: Line) -> None:
    run, again, card = search.run_of(line.name), _again(search, line.name), _card(search, line)
    asked = {**line.train}
    if not line.is_fitted:
        # Nothing is left to calibrate on.
        asked = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "calibration": "none"}
        asked |= {"minutes": None, "patience": None, "valid_share": 0.0}
    asked["train_splits"] = [*SPLITS, *(split for split in SIGNALS[:1] if split in search.spec.splits)]
    candidates.train_candidate(
        line.model,
        search.spec,
        again,
        candidates.build_settings(line.model, card.settings, asked),
        ranks=search.ranks,
        part_of=search.tracked,
        stop_requested=search.stop_requested,
        on_event=lambda event: search.on_event(f"{line.name}, again", event),
    )
    config.write_recipe(again / RECIPE, {**yaml.safe_load((run / RECIPE).read_text(encoding="utf-8")), "train": asked})


def _again(search: Search, name: str) -> Path:
    return search.run_of(f"{name}-{AGAIN}")


def _card(search: Search, line: Line) -> Card:
    return bundle.read_card(bundle.find(search.run_of(line.name)))


# --- the blend -------------------------------------------------------------------------------------------------------


def choose_blend(search: Search, lines: Sequence[Line], left: float, check: Callable[..., None]) -> Blending:
    """The blend of these candidates, with `left` seconds for the whole end; or why there is none.

    `check` is called after each trial and may raise.
    """
    started, state, ranks = time.monotonic(), search.state, search.ranks
    seconds, question = SHARE * left, question_of(search.spec, "valid", state.deciding, state.users)
    for line in lines:
        check()
        time_judging(search, line, question)
    lines, users = affordable(state, lines, len(question.ranked_users), seconds, seconds_of_trial(question))
    if len(lines) < 2:
        return Blending(why_not=f"{seconds:.0f} s are too few to choose its weights; give more --minutes")
    target, until = search.run_of(BLEND), started + seconds
    runs = {line.name: search.run_of(line.name) for line in lines}
    shutil.rmtree(target, ignore_errors=True)
    try:
        made = blend_runs(
            target,
            list(runs.values()),
            spec=search.spec,
            metric=state.deciding,
            users=users,
            device=ranks.device,
            progress=check,
            enough=lambda: time.monotonic() > until,
        )
        members = [name for name, part in zip(runs, made.members, strict=True) if part is not None]
        if len(members) < 2:
            return Blending(why_not=f"no other model improves {members[0]}")
        value, why_not = _judged(made, runs[lines[0].name], question, state.deciding, ranks, check)
        if why_not:
            return Blending(why_not=f"{why_not} against {lines[0].name}, which is cheaper")
    except Interrupted:
        raise
    except candidates.FAILURES as error:
        return Blending(why_not=candidates.problems_of(error))
    write_blend(target, {name: runs[name] for name in members}, state.dataset, metric=state.deciding)
    value *= sign_of(state.deciding)
    line = Line(name=BLEND, model=BLEND, values=[value], ended="blended", seconds=time.monotonic() - started)
    return Blending(members=members, line=line)


def _judged(
    made: Blended, best: Path, question: EvaluationTask, metric: str, ranks: Ranks, check: Callable[..., None]
) -> tuple[float, str]:
    """Its value on valid, by the question that all candidates were asked; and why it is no better than the best run."""
    models = [bundle.load(run, device=ranks.device).model.eval() for run in (made.bundle, best)]
    found, other = [judge(model, question, metric, ranks, check) for model in models]
    by, error = found.lead(other)
    enough = by > LEAST_LEAD * error and by > 0
    return found.value, "" if enough else f"it gains {by:.4f}, less than a standard error of {error:.4f},"


def affordable(state: State, lines: Sequence[Line], users: int, seconds: float, trial: float) -> tuple[list[Line], int]:
    """The models and the users for which weights can be chosen in the time; the last models are dropped first.

    `trial` holds the seconds of one trial for one user and one model.
    """
    kept = list(lines)
    while len(kept) > 1:
        once = sum(state.each.get(line.model, 0.0) for line in kept)
        each = 2 * once + trial * sum(TRIALS * number for number in range(1, len(kept)))
        most = int(seconds / each) if each > 0 else users
        if most >= min(users, FEWEST_USERS):
            return kept, min(users, most)
        kept.pop()
    return kept, 0


def seconds_of_trial(question: EvaluationTask) -> float:
    """Seconds to try weights for one user and one model: the logarithm of the shares, the sum, and the order."""
    items = question.truth.num_items
    scores = torch.rand(max(1, TIMED // items), items)

    def trial() -> None:
        (as_part(scores, "log", 1e-3) + scores).topk(min(items, 10)).values.sum()

    return seconds_of(trial) / len(scores)


def time_judging(search: Search, line: Line, question: EvaluationTask) -> None:
    """Note the seconds to judge a model on one user or row, of a fitted one now that it is there."""
    state = search.state
    if line.model not in state.each:
        with suppress(*candidates.FAILURES):  # whoever opens it next tells what is wrong with it
            model = bundle.load(search.run_of(line.name), device=search.ranks.device).model.eval()
            state.each[line.model], state.size = candidates.seconds_each(model, question), candidates.size_of(question)
