"""What a search remembers between calls: `OUT/auto.json`.

A search lives in a folder and outlasts the process:

    OUT/auto.json           the candidates, their slices and values
    OUT/runs/NAME/          the run of each candidate, with the recipe that repeats it
    OUT/best/               the run of the winner
    OUT/leaderboard.json    the leaderboard
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.errors import SettingsError, unknown
from recspec.files import PathError, confined, read_json, whole_file
from recspec.models import MODELS

STATE, RUNS, BEST, BOARD, RECIPE = "auto.json", "runs", "best", "leaderboard.json", "recipe.yaml"
WRITTEN = (STATE, RUNS, BEST, BOARD)
"""Files and folders that a search writes."""


class Line(BaseModel):
    """A candidate: a model, what was set of it, and how far its training came."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    model: str
    settings: dict[str, object] = {}
    train: dict[str, object] = {}
    values: list[float] = Field([], max_length=64, description="the best value so far after each slice; more is better")
    began: int = Field(0, description="number of its latest slice, counted over all candidates")
    seconds: float = Field(0.0, ge=0)
    epoch: float = Field(0.0, ge=0)
    best_epoch: float = Field(0.0, ge=0)
    ended: str = Field("", description="why training ended by itself; empty while it waits")
    failed: str = Field("", description="the message of its failure")

    @property
    def is_over(self) -> bool:
        """Whether its training has ended by itself, or failed."""
        return bool(self.ended or self.failed)

    @property
    def best(self) -> float:
        """The best value so far; more is better."""
        return self.values[-1] if self.values and not self.failed else float("-inf")


class State(BaseModel):
    """A search: what it is about, the time spent, and its candidates."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    dataset: str
    metric: str
    seed: int
    shorter: str = Field("", description="the metric that decides instead, if all lists are shorter than its cut-off")
    spent: float = Field(0.0, ge=0)
    users: int | None = Field(None, ge=1, description="users ranked on valid, with protocol full; null: all")
    each: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="seconds to judge a model on one user or row, by model"
    )
    size: int = Field(0, ge=0, description="users or rows of valid")
    lines: list[Line] = []
    left_out: dict[str, str] = {}

    @property
    def deciding(self) -> str:
        """The metric that decides."""
        return self.shorter or self.metric

    @classmethod
    def load(cls, out: Path) -> State | None:
        """The state in a folder; None if there is none.

        Raises:
            SettingsError: if the file is damaged, or names a run outside the folder.
        """
        file = out / STATE
        if not file.is_file():
            return None
        try:
            found = cls.model_validate(read_json(file))
            if len({line.name for line in found.lines}) < len(found.lines) or not found.lines:
                raise ValueError("two candidates of one name, or none at all")
            for line in found.lines:
                confined(out / RUNS, line.name)
                if line.model not in MODELS:
                    raise ValueError(unknown("model", line.model, MODELS))
        except (ValidationError, PathError, ValueError) as error:
            problem = str(error).splitlines()[0]
            raise SettingsError(f"{file}: damaged: {problem}; name another folder, or delete this one") from None
        return found

    def save(self, out: Path) -> None:
        """Write the state, whole or not at all."""
        with whole_file(out / STATE) as temporary:
            temporary.write_text(json.dumps(self.model_dump(mode="json"), indent=1), encoding="utf-8")
