"""A run that blends the models of other runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from recspec.base.errors import BundleError, SettingsError
from recspec.base.files import local, locked_inside
from recspec.bundle import MOST_MEMBERS, Blend, Bundle, Card, DataRecord, Member, blend_of, meaning_digest, run_record
from recspec.bundle import folder as bundle
from recspec.evaluation import check_same_features, choose_weights
from recspec.feature_spec import FeatureSpec
from recspec.models import ItemModel
from recspec.training import run_folder

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True)
class Blended:
    """A blend and how it was chosen."""

    bundle: Path
    runs: Sequence[Path]
    members: Sequence[Member | None]
    """The part of each run; None for one that was left out."""
    metric: str
    value: float | None
    """None where nothing was chosen."""
    alone: Sequence[float]
    """The metric of each run alone."""
    users: int

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        found = [
            {
                "run": str(run),
                "alone": self.alone[place] if self.alone else None,
                **({} if part is None else part.model_dump(include={"model", "weight", "form", "floor"})),
                "left_out": part is None,
            }
            for place, (run, part) in enumerate(zip(self.runs, self.members, strict=True))
        ]
        return {
            "bundle": str(self.bundle),
            "metric": self.metric,
            "value": self.value,
            "users": self.users,
            "members": found,
        }

    def lines(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Run, model, metric alone, form and weight of each run, for people."""
        for place, (run, part) in enumerate(zip(self.runs, self.members, strict=True)):
            alone = f"{self.alone[place]:.4f}" if self.alone else ""
            form = "" if part is None else part.form if part.form == "score" else f"log, floor {part.floor:g}"
            model = "left out" if part is None else part.model
            yield str(run), model, alone, form, "" if part is None else f"{part.weight:g}"


def blend_runs(
    target: Path,
    runs: Sequence[Path],
    *,
    spec: FeatureSpec | None = None,
    like: Path | None = None,
    metric: str = "full/ndcg@10",
    users: int | None = None,
    device: torch.device | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
    enough: Callable[[], bool] = lambda: False,
) -> Blended:
    """Blend trained models of one dataset into `target/bundle`.

    Args:
        target: folder of the new run.
        runs: runs or bundles, at least two to choose from.
        spec: the dataset whose split valid chooses the weights.
        like: a blend of the same models, in the same order, whose forms and weights are taken instead.
        metric: PROTOCOL/METRIC on valid.
        users: most users of valid that are ranked; by default as many as memory takes.
        device: where scores are computed.
        progress: called with a stage, the amount done and the whole amount.
        enough: called after each trial; ends the choice with the best blend so far.

    Raises:
        SettingsError: if the models can't be blended, or have learned from valid and are to be chosen on it.
        BundleError: if a run holds no bundle.
        DataError: if another process writes a run in `target`.
    """
    started = time.monotonic()
    if like is None and len(runs) < 2:
        raise SettingsError(f"pipeline blend: {len(runs)} run is given; a blend takes two or more")
    if len(runs) > MOST_MEMBERS:
        raise SettingsError(f"pipeline blend: {len(runs)} runs are given; a blend takes {MOST_MEMBERS} at most")
    with locked_inside(local(target, "OUT"), "blending in", holds=run_folder.BUNDLE):
        run_folder.refuse_another(target)
        trained = [bundle.load(run, device=device) for run in runs]
        _check_together(runs, trained)
        if like is not None:
            members: Sequence[Member | None] = _as_in(like, trained)
            value, alone, users, metrics = None, [], 0, {}
        else:
            assert spec is not None
            _check_valid(spec, runs, trained)
            chosen = choose_weights(trained, spec, metric=metric, users=users, progress=progress, enough=enough)
            members, value, alone, users = chosen.members, chosen.value, list(chosen.alone), chosen.users
            metrics = chosen.metrics
        kept = [(part, each) for part, each in zip(members, trained, strict=True) if part is not None]
        blend = blend_of(trained[0].spec, [(part, cast(ItemModel, each.model)) for part, each in kept], Blend)
        card = Card(
            model=Blend.name,
            settings=blend.settings.model_dump(mode="json"),
            trained={
                "splits": sorted({str(name) for each in trained for name in _splits(each)}),
                "seconds": round(time.monotonic() - started, 3),
                "valid_metric": metric if value is not None else None,
                "valid_users": users or None,
                "runs": [str(run) for run in runs],
                "torch": torch.__version__,
            },
            metrics=metrics,
        )
        card = card.model_copy(update={"train": {"train_splits": card.trained["splits"]}})
        data = DataRecord.of(spec) if spec is not None else run_record.common_data(each.folder for each in trained)
        parts = [run for run, part in zip(runs, members, strict=True) if part is not None]
        record = run_record.begin(target, "blend", Blend.name, data, made_of=parts)
        events = next((each.events for each in trained if each.events is not None), None)
        where = bundle.save(target / run_folder.BUNDLE, blend, card, seen=trained[0].seen, events=events)
        record.finish(target, time.monotonic() - started)
        return Blended(where, runs, members, metric, value, alone, users)


def _splits(trained: Bundle) -> Sequence[object]:
    found = trained.card.trained.get("splits")
    return found if isinstance(found, (list, tuple)) else []


def _check_together(runs: Sequence[Path], trained: Sequence[Bundle]) -> None:
    """Refuse models that rank no items by events, nested blends, and models of other users or items."""
    problems = [
        f"{run}: {each.card.model} scores rows by their features; a blend holds models that rank items by the users' "
        "events"
        for run, each in zip(runs, trained, strict=True)
        if not isinstance(each.model, ItemModel)
    ]
    problems += [
        f"{run}: is a blend; name the runs that it was made of"
        for run, each in zip(runs, trained, strict=True)
        if isinstance(each.model, Blend)
    ]
    SettingsError.refuse("pipeline blend", problems)
    meanings = [meaning_digest(each.spec) for each in trained]
    if problems := [
        f"{run}: was trained on other data than {runs[0]}; train both on one prepared folder"
        for run, meaning in zip(runs, meanings, strict=True)
        if meaning != meanings[0]
    ]:
        raise SettingsError.of("pipeline blend", problems)


def _check_valid(spec: FeatureSpec, runs: Sequence[Path], trained: Sequence[Bundle]) -> None:
    """Refuse a choice on a split that is absent, or that a model has learned from."""
    if "valid" not in spec.splits:
        raise SettingsError(
            f"{spec.folder}: there is no split valid to choose weights on; prepare a dataset with one, or take over "
            "the weights of a blend with --like"
        )
    for each in trained:
        check_same_features(each.model, spec, each.folder)
    problems = [
        f"{run}: was trained on valid too, so weights can't be chosen on it; choose them with runs that were trained "
        "on train alone, and pass that blend as --like"
        for run, each in zip(runs, trained, strict=True)
        if "valid" in _splits(each)
    ]
    SettingsError.refuse("pipeline blend", problems)


def _as_in(like: Path, trained: Sequence[Bundle]) -> list[Member | None]:
    """The parts of another blend, for the same models in the same order."""
    folder = bundle.find(local(like, "--like"))
    card = bundle.read_card(folder)
    if card.model != Blend.name:
        raise BundleError(f"{folder}: holds {card.model}, not a blend")
    model = bundle.load(folder).model
    assert isinstance(model, Blend)
    theirs = model.settings.members
    names, ours = [each.model for each in theirs], [each.card.model for each in trained]
    if names != ours:
        raise SettingsError(
            f"--like {like}: blends {', '.join(names)}, and the runs hold {', '.join(ours)}; name runs of the same "
            "models in the same order, without those that the blend left out"
        )
    return [
        part.model_copy(update={"settings": each.card.settings}) for part, each in zip(theirs, trained, strict=True)
    ]
