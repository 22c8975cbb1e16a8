"""Items that an update retired are in no answer, not even of a model that scores items without interactions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from recspec import api
from recspec.inference import Predictor
from tests.made_up_events import prepared, shop_events, written

LIVE = {f"i{number:02d}" for number in range(12)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-tower model and a pipeline of it, after half of the items had no event for a year."""
    folder = tmp_path_factory.mktemp("retired")
    known, _ = shop_events()
    data = prepared(folder / "shop", known, split="none", num_negatives=0).folder
    settings = {"train.epochs": 1, "dim": 8, "hidden": []}
    api.train("two_tower", data, folder / "towers", settings=settings, progress=False)
    api.train("popularity", data, folder / "popularity", progress=False)
    runs = {"retriever": folder / "towers", "ranker": folder / "popularity"}
    api.pipeline(folder / "pipeline", **runs, progress=False)  # type: ignore[arg-type]
    late = known.filter(pc.is_in(known.column("item_id"), pa.array(sorted(LIVE))))
    later = pc.add(late.column("timestamp"), 365 * 86_400)
    file = written(folder / "late.csv", late.set_column(2, "timestamp", later))
    for name in ("towers", "pipeline"):
        made = api.update(folder / name, file, retire_after="200d", progress=False)
        assert made.found is not None
        assert "12 items without an event for 200d retired" in made.found.notes
    return folder


@pytest.mark.parametrize("name", ["towers", "pipeline"])
def test_a_retired_item_is_not_recommended(name: str, shop: Path) -> None:
    predictor = Predictor.open(shop / name, device="cpu")
    assert predictor.catalogues.retired is not None
    assert predictor.catalogues.retired.sum() == 12
    for user in ("user00", "user01", "nobody"):
        (answer,) = predictor.recommend([user], k=24, include_seen=True)
        assert {each.item for each in answer.items} == LIVE
    assert predictor.catalogues.item_ids(["i20"]).tolist() == [0], "nobody finds it by its raw id"
