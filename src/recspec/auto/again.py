"""The second training of a search's winner, on train and valid; of a blend, that of its members."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recspec.auto import candidates
from recspec.auto.leaderboard import AGAIN
from recspec.auto.recipes import write_again, write_blend
from recspec.auto.state import RUNS, Ending, Line, State
from recspec.bundle import Card
from recspec.bundle import folder as bundle
from recspec.distributed import Ranks
from recspec.errors import Interrupted
from recspec.spec import FeatureSpec
from recspec.training import Event, TrackedSearch, blend_runs, has_checkpoint, train

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
        train(spec=self.spec, model_name=line.model, run=again, settings=train_settings, model_settings=own,
              ranks=self.ranks, resume=resume, part_of=self.tracked, stop_requested=self.stop_requested,
              on_event=lambda event: self.on_event(f"{line.name}, again", event))  # fmt: skip
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
