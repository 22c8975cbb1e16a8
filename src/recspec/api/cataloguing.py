"""What became of a shop's items since a model was trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recspec.api.data import staged
from recspec.api.frames import is_frame
from recspec.api.verb_checks import Place, several, verb
from recspec.api.views import View, Viewed, figures
from recspec.base.errors import DataError, SettingsError, how_many, listed

if TYPE_CHECKING:
    from recspec.inference import CatalogueUpdate

SHOWN = 10
"""Items that a note names."""


class CatalogueState(Viewed):
    """The changes of a run's items.

    Attributes:
        found: What changed, which items are blocked, and which ones wait for a training.
    """

    def __init__(self, found: CatalogueUpdate) -> None:
        self.found = found

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return self.found.to_dict()

    def view(self) -> View:
        """What changed, which items are blocked, and which ones wait."""
        found = self.found
        notes = [*found.notes]
        if found.waiting:
            wait = "waits" if len(found.waiting) == 1 else "wait"
            notes.append(
                f"{how_many(len(found.waiting), 'new item')} {wait} for a training, because the model can't score what "
                f"it was not trained on: {_some(found.waiting)}"
            )
        if found.blocked:
            notes.append(f"blocked: {_some(found.blocked)}")
        title = f"Catalogue: {found.file}, version {found.version}" if found.version else "Catalogue: as it was trained"
        return View(title, [figures("items", found.counts)] if found.counts else [], notes)


def _some(items: Sequence[str]) -> str:
    more = len(items) - SHOWN
    return listed(items[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


@verb
def catalogue(
    run: Place,
    products: object = None,
    *,
    block: str | Sequence[str] | None = None,
    unblock: str | Sequence[str] | None = None,
    whole: bool = False,
    most_withdrawn: float = 0.2,
) -> CatalogueState:
    """Change stock, prices and blocked items, without training.

    A running server takes the changes up within seconds; updates of the run keep them. Columns are those of the items'
    file that the dataset was prepared with, and those left out stay as they are. Without a file, it shows what changed.

    Args:
        run: Folder of a run, a blend or a pipeline.
        products: Items with their ids (csv, jsonl or parquet; in Python also a data frame).
        block: Item that is never recommended, or several.
        unblock: Blocked item to recommend again, or several.
        whole: The file is the whole catalogue: items that it lacks are withdrawn.
        most_withdrawn: Largest share of the items that `whole` may withdraw; a file that lacks more is refused, as it
            may be cut off.

    Raises:
        BundleError: if the run holds no model, or one that knows no items.
        DataError: with every problem of the file; nothing has changed then.
        SettingsError: for an item to unblock that is not blocked.
    """
    from recspec.inference import update_catalogue

    if not 0 <= most_withdrawn <= 1:
        raise SettingsError(f"--most-withdrawn is {most_withdrawn:g}; expected a share from 0 to 1")
    asked: dict[str, Any] = {"block": list(map(str, several(block))), "unblock": list(map(str, several(unblock)))}
    asked |= {"whole": whole, "most_withdrawn": most_withdrawn}
    place = Path(run)
    if is_frame(products):
        with staged(place / "products", products, {}) as (file, _):
            return CatalogueState(update_catalogue(place, file, **asked))
    if products is not None and not isinstance(products, (str, os.PathLike)):
        raise DataError(
            f"catalogue: found {type(products).__name__}; expected a data frame of items, or a file of them"
        )
    given = None if products is None else Path(products)
    return CatalogueState(update_catalogue(place, given, **asked))
