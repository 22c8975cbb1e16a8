"""A model trained again from the start, on its dataset as that is now, with the settings that it had.

A model that was fitted keeps the settings that were chosen. An updated one is trained with those of the run that its
updates began with, because an update's own are for a few new rows. A blend or a pipeline is made again of its parts,
which are runs of their own.
"""

from __future__ import annotations

from pathlib import Path

from recspec.base import config
from recspec.base.errors import BundleError
from recspec.bundle import Card, run_record, versions
from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.models import FittedModel, find_model, require_libraries
from recspec.training import run_folder
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from recspec.training.updating import Learning, join_parts, parts_of


def refit(base: Path, spec: FeatureSpec, folder: Path, learning: Learning) -> None:
    """Train a bundle's model again on `spec` into the run `folder`, which holds nothing.

    Raises:
        BundleError: if the settings or the parts of the model are gone.
        RecspecError: what `training.train` raises.
    """
    card = bundle.read_card(base)
    parts = parts_of(base, card, learning)
    if parts is not None:
        join_parts(base, card, parts, spec, folder, learning)  # the bundles, because their runs may be updated since
        before, made = (run_record.read(each) for each in (run_record.home(base), folder))
        if before is not None and made is not None:
            made.model_copy(update={"made_of": before.made_of}).write(folder)
        return
    kind = find_model(card.model)
    require_libraries(kind)
    first = card if issubclass(kind, FittedModel) else _first_card(base, card)
    asked = {**first.train, "mlflow": None}  # the run is tracked already
    train(
        card.model,
        spec,
        folder,
        settings=config.build(TrainSettings, "bundle.json: train", asked),
        model_settings=config.build(kind.Settings, "bundle.json: settings", first.settings),
        on_event=learning.on_event,
        stop_requested=learning.stop_requested,
    )


def _first_card(base: Path, card: Card) -> Card:
    """The card of the run that the updates of a model began with; its own if it was never updated."""
    at, seen = base, set[Path]()
    while at not in seen:
        seen.add(at)
        record = run_record.read(run_record.home(at))
        if record is None or record.kind != "updated":
            return bundle.read_card(at)
        run = versions.run_of(at) if versions.number_of(at) else None
        before = run if run is not None else Path(next(iter(record.made_of), ""))
        at = before / run_folder.BUNDLE
        if not (at / "bundle.json").is_file() or bundle.read_card(at).model != card.model:
            gone = f"the version before, {before}, is gone, and with it the settings of its training"
            raise BundleError(f"{base}: {gone}; train the model again")
    raise BundleError(f"{base}: its versions name each other; train the model again")
