"""The end of a search: the winner is trained again on train and valid, test is opened, the leaderboard is written.

Each step is written down when it is done, so that a stopped or killed end goes on where it was.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from recspec import latency
from recspec.auto import candidates, cost
from recspec.auto.judging import Judged, judge, question_of
from recspec.auto.leaderboard import AGAIN, Leaderboard, second_of
from recspec.auto.recipes import write_again
from recspec.auto.state import BEST, RUNS, Ending, Line, Place, State
from recspec.bundle import Card
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted, SettingsError
from recspec.evaluation import Question
from recspec.files import put_in_place, staging
from recspec.spec import FeatureSpec
from recspec.training import Event, has_checkpoint, train

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
    _at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.question, self.on_valid = cache(self._question), cache(self._on_valid)

    def run(self, left: float) -> Leaderboard:
        """Choose the winner on valid and judge the best candidates, with `left` seconds; or go on with that.

        Raises:
            SettingsError: if no candidate was trained.
            Interrupted: if `stop_requested` says so.
        """
        if self.state.ending is None:
            self.state.ending = self._choose(max(left, LEAST))
            self._save()
        ending = self.state.ending
        winner = self.state.line(ending.judged[0])
        if not ending.done:
            if ending.trains_again and not (ending.trained_again or ending.not_again):
                self.tell(f"{winner.name} is trained again on train and valid")
                self._train_again(winner, ending)
                self._save()
            self._put_in_place(winner, ending)
            for name in (*ending.judged, *((AGAIN,) if ending.trained_again else ())):
                if name not in ending.places:
                    self.tell(f"final evaluation: {winner.name}, trained again" if name == AGAIN else
                              f"final evaluation: {name}")  # fmt: skip
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

    # --- what is judged ----------------------------------------------------------------------------------------------

    def _choose(self, left: float) -> Ending:
        """What is judged, before test is opened."""
        state, ranked = self.state, self.state.ranked
        if not ranked:
            failed = [f"{line.name}: {line.failed or 'it did not begin in the time'}" for line in state.lines]
            raise SettingsError.of(f"{self.out}: no model was trained; give more --minutes", failed)
        best = ranked[:JUDGED]
        ending = Ending(judged=[line.name for line in best])
        shutil.rmtree(self.out / RUNS / f"{best[0].name}-{AGAIN}", ignore_errors=True)
        split = "valid" if "valid" in self.spec.splits else "train"
        question = question_of(self.spec, split, state.deciding)
        for line in best:
            self._check()
            if line.model not in state.each:  # of fitted models it is known only now
                with suppress(*candidates.FAILURES):  # `_measure` tells what is wrong with it
                    model = bundle.load(self.out / RUNS / line.name, device=self.ranks.device).model.eval()
                    state.each[line.model], state.size = cost.seconds_each(model, question), cost.size_of(question)
        needed = 2 * state.size * sum(state.each.get(line.model, 0.0) for line in best)
        ending.users = state.users if needed > left else None  # all of them if the time allows it
        seconds, why = self._seconds_again(best[0])
        if why or seconds > left:
            ending.not_again = why or f"it would take {seconds:.0f} s, and {left:.0f} s are left"
        ending.trains_again = not ending.not_again
        return ending

    def _seconds_again(self, line: Line) -> tuple[float, str]:
        """Seconds to train the winner again; or why it can't be."""
        if "valid" not in self.spec.splits:
            return 0.0, "the dataset has no split valid"
        if not candidates.is_fitted(line.model):
            return 1.5 * line.seconds * line.best_epoch / max(1.0, line.epoch), ""
        tried = self._card(line).trained.get("tried")
        return line.seconds / max(1, len(tried) if isinstance(tried, Sequence) else 1), ""

    def _card(self, line: Line) -> Card:
        return bundle.read_card(bundle.find(self.out / RUNS / line.name))

    # --- the winner --------------------------------------------------------------------------------------------------

    def _train_again(self, line: Line, ending: Ending) -> None:
        """Train the winner on train and valid up to its best epoch."""
        run, again, card = self.out / RUNS / line.name, self.run_of(AGAIN), self._card(line)
        fitted = candidates.is_fitted(line.model)
        asked = {**line.train}
        if not fitted:
            # Nothing is left to calibrate on.
            asked = {**card.train, "epochs": max(1, math.ceil(line.best_epoch)), "calibration": "none"}
            asked |= {"minutes": None, "patience": None, "valid_share": 0.0}
        asked["train_splits"] = ["train", "valid"]
        own, train_settings = candidates.built(line.model, {"settings": card.settings, "train": asked})
        resume = has_checkpoint(again) and not fitted
        if not resume:
            shutil.rmtree(again, ignore_errors=True)
        try:
            train(spec=self.spec, model_name=line.model, run=again, settings=train_settings, model_settings=own,
                  ranks=self.ranks, resume=resume, stop_requested=self.stop_requested,
                  on_event=lambda event: self.on_event(f"{line.name}, again", event))  # fmt: skip
        except Interrupted:
            self._check()
            raise
        except candidates.FAILURES as error:
            ending.not_again = candidates.told(error)
            return
        write_again(run, again, asked)
        ending.trained_again = True

    def _put_in_place(self, winner: Line, ending: Ending) -> None:
        """Copy the winner to `OUT/best`."""
        run = self.run_of(AGAIN if ending.trained_again else winner.name)
        with staging(self.out / BEST) as copied:
            best = copied / "run"
            shutil.copytree(run, best, ignore=shutil.ignore_patterns("checkpoints", ".*"))
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
                place.valid_error = _known(self.on_valid(name).error)
                self._compare(name, ending)
            if "test" in splits:
                test = judge(model, self.question("test"), self.state.deciding, self.ranks, self._check)
                place.test, place.test_error = _known(test.value), _known(test.error)
        except Interrupted:
            raise
        except candidates.FAILURES as error:
            place.problem = candidates.told(error)
        return place

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
