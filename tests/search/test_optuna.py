"""What Optuna's own pruners and journal make of our cases: where a test fails, ours can go.

`test_trial_halving.py` has the same traces with ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the extra `tune` is not installed")

import optuna
from optuna.pruners import BasePruner, MedianPruner, PatientPruner, PercentilePruner, SuccessiveHalvingPruner

from recspec.training.search.study import FIRST_RUNG, REDUCTION, quiet
from tests.search.test_trial_halving import GOOD, flat_then_wins, good, loses, trace

HALVING = SuccessiveHalvingPruner(FIRST_RUNG, REDUCTION)
STOPS_SLOW_STARTERS = (HALVING, PercentilePruner(100 / REDUCTION, 4, FIRST_RUNG - 1), MedianPruner(4, FIRST_RUNG - 1))


@pytest.fixture(autouse=True)
def quiet_optuna() -> Iterator[None]:
    with quiet(optuna):
        yield


def stops(pruner: BasePruner, traces: Sequence[dict[int, float]]) -> list[int | None]:
    """The epoch at which each of the trials, one after the other, is stopped."""
    study, found = optuna.create_study(pruner=pruner), []
    for values in traces:
        trial = study.ask()
        for epoch, value in values.items():
            trial.report(value, epoch)
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                found.append(epoch)
                break
        else:
            study.tell(trial, value)
            found.append(None)
    return found


@pytest.mark.parametrize("pruner", STOPS_SLOW_STARTERS, ids=lambda pruner: type(pruner).__name__)
def test_a_slow_starter_that_wins_is_stopped(pruner: BasePruner) -> None:
    *_, slow = stops(pruner, [*(dict(each) for each, _ in GOOD), trace(flat_then_wins, 30)])
    assert slow is not None


@pytest.mark.parametrize("pruner", STOPS_SLOW_STARTERS, ids=lambda pruner: type(pruner).__name__)
def test_a_loser_goes_on_beside_better_trials_that_ended_before_the_rung(pruner: BasePruner) -> None:
    assert stops(pruner, [*[trace(good, 5)] * 4, trace(loses, 30)])[-1] is None


def test_patience_before_halving_stops_nobody() -> None:
    """The best value so far never gets worse, and the value of an epoch alone is noise."""
    assert set(stops(PatientPruner(HALVING, 3), [*[trace(good, 30)] * 5, trace(loses, 30)])) == {None}


def test_halving_judges_the_second_trial_by_the_first_alone() -> None:
    assert stops(HALVING, [trace(good, 30), trace(lambda epoch: good(epoch) - 1e-4, 30)]) == [None, FIRST_RUNG]


def test_a_journal_whose_writer_was_killed_takes_no_more_trials(tmp_path: Path) -> None:
    def journal() -> optuna.storages.JournalStorage:
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))

    optuna.create_study(storage=journal(), study_name="search").ask()
    with (tmp_path / "journal").open("a") as file:
        file.write('{"op_code": 5, "wor')
    with pytest.raises((AttributeError, json.JSONDecodeError)):
        optuna.load_study(storage=journal(), study_name="search").ask()
