"""New events into blends and pipelines: their parts first, on one grown dataset, and then what they make."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from recspec import api
from recspec.base.errors import BundleError
from recspec.bundle import folder as bundle
from recspec.bundle import run_record, versions
from recspec.data.encoding import Encoders
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor
from recspec.training import Learning, parts_of, update
from tests.made_up_events import NEW_ITEM, NEW_USER, prepared, shop_events, written

NOW = 1_700_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one dataset, and files of new events; tests make copies of what they change."""
    place = tmp_path_factory.mktemp("parts")
    known, new = shop_events()
    data = prepared(place / "shop", known).folder
    for model in ("ease", "popularity", "item_knn"):
        api.train(model, data, place / model, progress=False)
    api.blend(place / "blend", [place / "ease", place / "popularity"], data, progress=False)
    retrievers = {"ease": place / "ease", "pop": place / "popularity"}
    api.pipeline(place / "pipeline", retriever=retrievers, ranker=place / "item_knn", progress=False)
    written(place / "one.csv", new.slice(0, 45))
    written(place / "two.csv", new.slice(45))
    return place


def copied(folder: Path, name: str, to: Path) -> Path:
    return Path(shutil.copytree(folder / name, to / name, copy_function=os.link))


def knows_all(run: Path) -> None:
    """The version that answers knows what was new, and recommends it."""
    found = Encoders.load(bundle.find(run)).vocabularies
    assert {NEW_USER, "aaron"} <= {*found["user_id"].values.to_pylist()}
    (answer,) = Predictor.open(run, device="cpu").recommend([NEW_USER], k=30)
    assert answer.known
    (other,) = Predictor.open(run, device="cpu").recommend(["user00"], k=30)
    assert NEW_ITEM in {each.item for each in other.items}


def test_a_blend_is_made_of_its_updated_parts_with_weights_chosen_again(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, "blend", tmp_path)
    before = bundle.read_card(run / "bundle")
    parts = run_record.read(run)
    assert parts is not None
    for number, file in enumerate(("one.csv", "two.csv"), 1):
        made = api.update(run, folder / file, progress=False)
        assert made.found is not None
        assert made.found.result is None
        assert made.path == run / "updates" / f"{number:04d}"
    knows_all(run)
    card = bundle.read_card(bundle.find(run))
    assert card.model == before.model
    assert card.trained["valid_metric"] == before.trained["valid_metric"]
    assert card.metrics["full"] != before.metrics["full"], "chosen on the valid of the grown dataset"
    record = run_record.read(run / "updates" / "0002")
    assert record is not None
    assert {Path(each).parent for each in record.made_of} <= {(run / "updates" / "0002" / "parts").resolve()}
    assert len(parts.made_of) == 2
    for each in parts.made_of:
        assert not list(Path(each).glob("updates/*")), "the runs that it was made of stay as they are"


def test_a_blend_goes_on_without_the_runs_that_it_left_out(folder: Path, tmp_path: Path) -> None:
    data = folder / "shop" / "data"
    runs = [folder / name for name in ("ease", "popularity", "item_knn")]
    api.blend(tmp_path / "one", runs, data, progress=False)
    record = run_record.read(tmp_path / "one")
    assert record is not None
    assert [Path(each).name for each in record.made_of] == ["item_knn"], "the best on these events is one model alone"
    api.update(tmp_path / "one", folder / "one.csv", progress=False)
    assert [each.name for each in (tmp_path / "one" / "updates" / "0001" / "parts").iterdir()] == ["1-item_knn"]


def test_weights_stay_where_a_part_has_learned_from_valid(folder: Path, tmp_path: Path) -> None:
    data = FeatureSpec.load(folder / "shop" / "data").folder
    splits = {"train.train_splits": ["train", "valid"]}
    for model in ("ease", "popularity"):
        api.train(model, data, tmp_path / model, settings=splits, progress=False)
    like = bundle.read_card(folder / "blend" / "bundle").settings
    run = tmp_path / "final"
    api.blend(run, [tmp_path / "ease", tmp_path / "popularity"], like=folder / "blend", progress=False)
    api.update(run, folder / "one.csv", progress=False)

    def weights(card: dict[str, object]) -> list[tuple[object, ...]]:
        return [(each["model"], each["weight"], each["form"], each["floor"]) for each in card["members"]]  # type: ignore

    assert weights(bundle.read_card(bundle.find(run)).settings) == weights(like)


def test_a_pipeline_is_built_again_from_its_updated_ranker_and_retrievers(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, "pipeline", tmp_path)
    before = bundle.load(run).pipeline
    for file in ("one.csv", "two.csv"):
        api.update(run, folder / file, progress=False)
    knows_all(run)
    after = bundle.load(run).pipeline
    assert after == before
    assert [each.name for each in sorted((run / "updates" / "0002" / "parts").iterdir())] == [
        "1-item_knn",
        "2-ease",
        "3-popularity",
    ]
    moved = tmp_path / "moved"
    run.rename(moved)
    shutil.rmtree(moved / "bundle")
    base = bundle.find(moved)
    found = parts_of(base, bundle.read_card(base), Learning(build_pipeline=lambda *_, **__: None))
    assert found is not None
    part = found[0]
    assert part == moved / "updates" / "0002" / "parts" / "1-item_knn" / "bundle", "found beside it after a move"


def test_what_lacks_a_part_says_which(folder: Path, tmp_path: Path) -> None:
    run = copied(folder, "pipeline", tmp_path)
    with pytest.raises(BundleError, match="is a pipeline; update its ranker and its retrievers, and make it again"):
        update(run, folder / "one.csv")
    record = run_record.read(run)
    assert record is not None
    other = prepared(tmp_path / "other", shop_events()[0].slice(0, 500)).folder
    api.train("popularity", other, tmp_path / "stranger", progress=False)
    (run / "run.json").unlink()
    gone = str(tmp_path / "gone")
    made_of = (gone, str(tmp_path / "stranger"), record.made_of[2])
    record.model_copy(update={"made_of": made_of}).write(run)
    told = r"its parts can't be updated(?s:.*)gone: holds no model of the data that .* was made on; make it again"
    with pytest.raises(BundleError, match=told) as found:
        api.update(run, folder / "one.csv", progress=False)
    assert len(found.value.problems) == 2
    record.model_copy(update={"made_of": ()}).write(run)
    with pytest.raises(BundleError, match="does not say which runs it was made of; make it again"):
        api.update(run, folder / "one.csv", progress=False)
    assert versions.updates_of(run) == []


@pytest.mark.slow
def test_trees_over_retrievers_are_grown_again(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    runs = [folder / "ease", folder / "item_knn"]
    api.pipeline(tmp_path / "trees", retriever=runs, ranker="lightgbm", progress=False)
    api.update(tmp_path / "trees", folder / "one.csv", progress=False)
    card = bundle.read_card(bundle.find(tmp_path / "trees"))
    assert card.model == bundle.read_card(tmp_path / "trees" / "bundle").model
    record = run_record.read(tmp_path / "trees" / "updates" / "0001")
    assert record is not None
    assert len(record.made_of) == 2
