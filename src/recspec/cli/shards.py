"""What commands say and ask of folders of shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recspec.cli.console import err
from recspec.errors import how_many

if TYPE_CHECKING:
    from recspec.inference import Counts, How, Predictor, Wanted


def shard_problems(workers: int, engine: str, shard_size: int | None) -> list[str]:
    """Options of shards that are given without a folder."""
    given = {"--workers": workers != 1, "--engine": engine != "local", "--shard-size": shard_size is not None}
    return [f"{name}: goes with --out FOLDER, a name without an ending" for name, is_there in given.items() if is_there]


def how_of(workers: int, engine: str, shard_size: int | None) -> How:
    """How a job is divided."""
    from recspec.inference import SHARD_SIZE, How

    return How(engine, workers, shard_size or SHARD_SIZE)  # type: ignore[arg-type]  # checked when the job begins


def tell(text: str) -> None:
    """Print a note."""
    err.print(f"note: {text}", soft_wrap=True)


def print_counts(out: Path, counts: Counts, seconds: float, what: str) -> None:
    """Print what a job wrote."""
    rate = "" if counts.kept == counts.shards else f", {seconds:,.0f} s"
    err.print(f"{out}: {how_many(counts.count, what)} in {how_many(counts.shards, 'shard')}{rate}", soft_wrap=True)


def print_unknown(predictor: Predictor, wanted: Wanted, users: int) -> None:
    """Print how many users the model does not know, and what they were answered by."""
    from recspec.inference import note_of_unknown_users

    if users:
        tell(note_of_unknown_users(users, predictor.recommender.strangers_answered_by(wanted)))
