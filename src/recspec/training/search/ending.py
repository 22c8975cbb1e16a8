"""The end of a search: the winner is trained again on train and valid, and test is opened.

Each step is written down when it is done, so that a stopped or killed end goes on where it was.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from recspec.base import latency
from recspec.base.errors import Interrupted, SettingsError
from recspec.base.files import put_in_place, staging
from recspec.bundle import Card, run_record
from recspec.bundle import folder as bundle
from recspec.evaluation import Question
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.training import Event, TrackedSearch, blend_runs, has_checkpoint, train
from recspec.training.search import candidates
from recspec.training.search import candidates as cost
from recspec.training.search.blend import blended, offered, time_judging
from recspec.training.search.leaderboard import AGAIN, NOT_BEGUN, Leaderboard, second_of, write_again, write_blend
from recspec.training.search.state import BEST, RUNS, Blending, Ending, Judged, Line, Place, State, judge, question_of

SPLITS = ["train", "valid"]


@dataclass(frozen=True)
class SecondTraining:
    """The training of the winner on train and valid, up to its best epoch."""

    spec: FeatureSpec
    state: State
    out: Path
    ranks: Ranks
    on_event: Callable[[str, Event], None]
    stop_requested: Callable[[], bool]
    save: Callable[[], None]
    """Writes the state down, after each member of a blend."""
    tracked: TrackedSearch

    def seconds(self, line: Line) -> tuple[float, str]:
        """Seconds that it takes; or why it can't be done."""
        if "valid" not in self.spec.splits:
            return 0.0, "the dataset has no split valid"
        if members := self.state.members(line):
            return sum(self.seconds(self.state.line(name))[0] for name in members), ""
        if not candidates.is_fitted(line.model):
            return 1.5 * line.seconds * line.best_epoch / max(1.0, line.epoch), ""
        tried = self._card(line).trained.get("tried")
        return line.seconds / max(1, len(tried) if isinstance(tried, Sequence) else 1), ""

    def forget(self, line: Line) -> None:
        """Delete what an earlier second training left."""
        for name in (line.name, *self.state.members(line)):
            shutil.rmtree(self._again(name), ignore_errors=True)

    def run(self, line: Line, ending: Ending) -> None:
        """Train the winner, or all members of a blend, again; note what was done or why not.

        Raises:
            Interrupted: if `stop_requested` says so; the same call goes on.
        """
        members = self.state.members(line)
        try:
            for name in members or (line.name,):
                if name not in ending.members_again:
                    self._train(self.state.line(name))
                    ending.members_again.append(name)
                    self.save()
            if members:
                self._blend(line, members)
        except Interrupted:
            raise
        except candidates.FAILURES as error:
            ending.not_again = candidates.told(error)
        else:
            ending.trained_again = True

    def _train(self, line: Line) -> None:
        run, again, card = self.out / RUNS / line.name, self._again(line.name), self._card(line)
        fitted = candidates.is_fitted(line.model)
        asked = {**line.train}
        if not fitted:
            # Nothing is left to calibrate on.
            asked = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "calibration": "none"}
            asked |= {"minutes": None, "patience": None, "valid_share": 0.0}
        asked["train_splits"] = SPLITS
        own, train_settings = candidates.built(line.model, {"settings": card.settings, "train": asked})
        resume = has_checkpoint(again) and not fitted
        if not resume:
            shutil.rmtree(again, ignore_errors=True)
        train(
            spec=self.spec,
            model_name=line.model,
            run=again,
            settings=train_settings,
            model_settings=own,
            ranks=self.ranks,
            resume=resume,
            part_of=self.tracked,
            stop_requested=self.stop_requested,
            on_event=lambda event: self.on_event(f"{line.name}, again", event),
        )
        write_again(run, again, asked)

    def _blend(self, line: Line, members: Sequence[str]) -> None:
        first, again = self.out / RUNS / line.name, self._again(line.name)
        runs = {name: self._again(name) for name in members}
        shutil.rmtree(again, ignore_errors=True)
        blend_runs(again, list(runs.values()), like=first, device=self.ranks.device)
        write_blend(again, runs, self.state.dataset, like=first)

    def _again(self, name: str) -> Path:
        return self.out / RUNS / f"{name}-{AGAIN}"

    def _card(self, line: Line) -> Card:
        return bundle.read_card(bundle.find(self.out / RUNS / line.name))


LEAST = 20.0
"""Seconds that the end may take even if the time is over."""
JUDGED = 5
"""Best candidates that are measured again for standard errors, and on test."""
SECONDS = 0.3
"""Time for each latency."""


@dataclass
class Finish:
    """The end of one search."""

    spec: FeatureSpec
    state: State
    out: Path
    ranks: Ranks
    on_event: Callable[[str, Event], None]
    tell: Callable[[str], None]
    stop_requested: Callable[[], bool]
    tracked: TrackedSearch
    _at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.question, self.on_valid = cache(self._question), cache(self._on_valid)
        self.again = SecondTraining(
            self.spec, self.state, self.out, self.ranks, self.on_event, self.stop_requested, self._save, self.tracked
        )

    def run(self, left: float) -> Leaderboard:
        """Choose the winner on valid and judge the best candidates, with `left` seconds; or go on with that.

        Raises:
            SettingsError: if no candidate was trained.
            Interrupted: if `stop_requested` says so.
        """
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
                self.tell(f"{winner.name} is trained again on train and valid")
                try:
                    self.again.run(winner, ending)
                except Interrupted:
                    self._check()
                    raise
                self._save()
            self._put_in_place(winner, ending)
            for name in (*ending.judged, *((AGAIN,) if ending.trained_again else ())):
                if name not in ending.places:
                    self.tell(
                        f"final evaluation: {winner.name}, trained again"
                        if name == AGAIN
                        else f"final evaluation: {name}"
                    )
                    ending.places[name] = self._measure(name, ending)
                    self._save()
            ending.done = True
            self._save()
        elif not (self.out / BEST).exists():
            self._put_in_place(winner, ending)
        board = Leaderboard.of(self.state, ending, self.out)
        board.save(self.out)
        return board

    def _save(self) -> None:
        now = time.monotonic()
        self.state.spent += now - self._at
        self._at = now
        self.state.save(self.out)

    def _check(self, *_: object) -> None:
        """Stop if asked to."""
        if self.stop_requested():
            self._save()
            raise Interrupted(f"{self.out}: stopped as asked; the same command goes on")

    def run_of(self, name: str) -> Path:
        """The run of a candidate, or of the winner's second training."""
        ending = self.state.ending
        assert ending is not None
        return self.out / RUNS / (f"{ending.judged[0]}-{AGAIN}" if name == AGAIN else name)

    def _blend(self, left: float) -> None:
        """Add the blend of the best candidates, if there is one."""
        found = Blending()
        if lines := offered(self.state, self.spec):
            self.tell(f"weights of a blend are chosen: {', '.join(line.name for line in lines)}")
            found = blended(self.spec, self.state, self.out, self.ranks, left, self._check)
        self.state.blend = found
        self._save()

    # --- what is judged ----------------------------------------------------------------------------------------------

    def _choose(self, left: float) -> Ending:
        """What is judged, before test is opened."""
        state, ranked = self.state, self.state.ranked
        if not ranked:
            failed = [f"{line.name}: {line.failed or NOT_BEGUN}" for line in state.lines]
            raise SettingsError.of(f"{self.out}: no model was trained", failed)
        best = ranked[:JUDGED]
        ending = Ending(judged=[line.name for line in best])
        self.again.forget(best[0])
        split = "valid" if "valid" in self.spec.splits else "train"
        question = question_of(self.spec, split, state.deciding)
        for line in best:
            self._check()
            time_judging(state, line, self.out, self.ranks, question)
        needed = 2 * state.size * sum(state.each.get(line.model, 0.0) for line in best)
        ending.users = state.users if needed > left else None  # all of them if the time allows it
        seconds, why = self.again.seconds(best[0])
        if why or seconds > left:
            ending.not_again = why or f"it would take {seconds:.0f} s, and {left:.0f} s are left"
        ending.trains_again = not ending.not_again
        return ending

    # --- the winner --------------------------------------------------------------------------------------------------

    def _put_in_place(self, winner: Line, ending: Ending) -> None:
        """Copy the winner to `OUT/best`."""
        run = self.run_of(AGAIN if ending.trained_again else winner.name)
        with staging(self.out / BEST) as copied:
            best = copied / "run"
            shutil.copytree(run, best, ignore=shutil.ignore_patterns("checkpoints", "evaluations", "report.html", ".*"))
            run_record.hand_over(run, best, "auto")
            put_in_place(best, self.out / BEST)

    # --- figures -----------------------------------------------------------------------------------------------------

    def _question(self, split: str) -> Question:
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
            model = bundle.load(run, device=self.ranks.device).model.eval()
            place.parameters = sum(each.numel() for each in model.state_dict().values())
            with torch.inference_mode():
                call = cost.one_request(model, self.question("valid" if "valid" in splits else "train"))
                place.p50_ms = latency.measure(call, 1, seconds=SECONDS, warmup=3, at_least=5).p50
            if "valid" in splits and name != AGAIN:  # the second training has seen valid
                self._note_users(ending, "valid")
                place.valid_error = _known(self.on_valid(name).error)
                self._compare(name, ending)
            if "test" in splits:
                self._note_users(ending, "test")
                test = judge(model, self.question("test"), self.state.deciding, self.ranks, self._check)
                place.test, place.test_error = _known(test.value), _known(test.error)
        except Interrupted:
            raise
        except candidates.FAILURES as error:
            place.problem = candidates.told(error)
        return place

    def _note_users(self, ending: Ending, split: str) -> None:
        """Note how many users the figures of a split are of."""
        if not self.state.deciding.startswith("full/"):
            return
        ranked, known = cost.users_of(self.question(split))
        if split == "valid":  # candidates were chosen on the users of the search
            ending.users_of["valid"] = min(self.state.users or known, known), known
            ending.users_of["valid_error"] = ranked, known
        else:
            ending.users_of[split] = ranked, known

    def _on_valid(self, name: str) -> Judged:
        """A candidate on valid."""
        model = bundle.load(self.run_of(name), device=self.ranks.device).model.eval()
        model.calibration = None  # it was fitted to the rows of valid
        return judge(model, self.question("valid"), self.state.deciding, self.ranks, self._check)

    def _compare(self, name: str, ending: Ending) -> None:
        """Note the winner's lead over the next model, once that is measured."""
        winner, second = self.state.line(ending.judged[0]), second_of(self.state.ranked, ending.judged)
        if second is None or name != second.name:
            return
        by, error = self.on_valid(winner.name).lead(self.on_valid(name))
        ending.lead = None if math.isnan(by) or math.isnan(error) else (by, error)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
