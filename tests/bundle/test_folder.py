"""A bundle rebuilds its model with nothing else, or says what is wrong with it; a run is its newest whole version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recspec.base.errors import BundleError
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.bundle.checkpoint import write_tensors
from recspec.bundle.folder import Card, Seen
from recspec.bundle.run_record import without_seen
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.models.base import Model
from tests import made_up


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("bundle") / "data")


def a_model(data: FeatureSpec) -> Model:
    return MODELS["neumf"](data, MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)}))


def seen_by_two(data: FeatureSpec) -> Seen:
    """User 0 acted on items 1 and 2, user 1 on item 2."""
    offsets = torch.full((data.num_ids(data.user_id) + 1,), 3)
    offsets[:2] = torch.tensor([0, 2])
    counts = torch.zeros(data.num_ids(data.item_id), dtype=torch.int64)
    counts[1:3] = torch.tensor([1, 2])
    flags = torch.ones(3, dtype=torch.bool)
    return Seen(offsets, torch.tensor([1, 2, 2], dtype=torch.int32), flags, flags, counts)


def saved(data: FeatureSpec, folder: Path) -> Path:
    model, seen = a_model(data), seen_by_two(data)
    return bundle.save(folder, model, Card(model="neumf", settings=model.settings.model_dump(mode="json")), seen=seen)


def test_it_needs_nothing_but_itself(data: FeatureSpec, tmp_path: Path) -> None:
    made = saved(data, tmp_path / "made")
    endings = {path.suffix for path in made.rglob("*") if path.is_file()}
    assert endings <= {".json", ".yaml", ".safetensors", ".parquet"}, "no pickle"
    moved = tmp_path / "elsewhere" / "bundle"
    shutil.copytree(made, moved)
    shutil.rmtree(made)
    loaded = bundle.load(tmp_path / "elsewhere")  # a run stands for its bundle
    assert loaded.folder == moved
    assert loaded.card.model == "neumf"
    assert "seen" in data.companions  # which `seen.safetensors` holds in the bundle
    assert loaded.spec == without_seen(data).replace(sources={})
    assert not any(parameter.is_meta for parameter in loaded.model.parameters())
    assert not loaded.model.training
    assert loaded.seen is not None
    assert loaded.seen.of(0).tolist() == [1, 2]


def test_saving_again_replaces_it_whole(data: FeatureSpec, tmp_path: Path) -> None:
    made = saved(data, tmp_path / "made")
    (made / "stray").write_text("left from before")
    saved(data, made)
    assert not (made / "stray").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_what_is_missing_is_said(data: FeatureSpec, tmp_path: Path) -> None:
    saved(data, tmp_path / "run" / "bundle")
    with pytest.raises(BundleError, match=r"no such folder \(did you mean 'run'\?\)"):
        bundle.load(tmp_path / "rum")
    with pytest.raises(BundleError, match=r"neither bundle.json nor bundle/bundle.json is there"):
        bundle.load(tmp_path)
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    with pytest.raises(BundleError, match="checkpoints but no bundle yet; finish it with train --resume"):
        bundle.load(tmp_path / "unfinished")


def test_what_is_there_instead_is_said_and_what_to_give(data: FeatureSpec, tmp_path: Path) -> None:
    for name in ("ranking", "ranking_raw"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").touch()
    (tmp_path / "models" / "ranking" / "1" / "export.json").touch()
    (tmp_path / "films" / "run" / "bundle").mkdir(parents=True)
    (tmp_path / "films" / "run" / "bundle" / "bundle.json").touch()
    (tmp_path / "empty").mkdir()
    ranking = str(tmp_path / "models" / "ranking")
    for folder, told in {
        data.folder: "is a prepared dataset; give the run of a model that was trained on it",
        tmp_path / "models": "is a Triton model repository; give the run that it was made of (`recspec serve` and "
        f"`recspec bench infer` take '{ranking}')",
        tmp_path / "models" / "ranking": "is an export, which knows features and no raw values; give the run that it "
        "was made of (`recspec serve` and `recspec bench infer` take exports)",
        tmp_path / "models" / "ranking_raw": "is a model of a Triton repository that holds no program; beside it: "
        f"'{ranking}'",
        tmp_path / "films": "not a trained model: neither bundle.json nor bundle/bundle.json is there; in it there are "
        f"'{tmp_path / 'films' / 'run'}', so name one",
        tmp_path / "empty": "not a trained model: neither bundle.json nor bundle/bundle.json is there",
    }.items():
        with pytest.raises(BundleError) as caught:
            bundle.load(folder)
        assert str(caught.value) == f"{folder}: {told}"


def test_a_damaged_weight_file_is_refused(data: FeatureSpec, tmp_path: Path) -> None:
    made = saved(data, tmp_path / "made")
    weights = made / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(BundleError, match=r"weights.safetensors: damaged or cut off"):
        bundle.load(made, verify=False)


def test_weights_may_come_from_a_file_which_is_read_first(data: FeatureSpec, tmp_path: Path) -> None:
    model, card = a_model(data), Card(model="neumf", settings={"factors": 4, "layers": [8, 4]})
    best = tmp_path / "best.safetensors"
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    write_tensors(best, doubled, {"format": 1})
    loaded = bundle.load(bundle.save(tmp_path / "made", model, card, weights=best)).model.state_dict()
    assert loaded.keys() == doubled.keys()
    assert all(torch.equal(loaded[name], doubled[name]) for name in doubled)
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match=r"could not be written: .*best.safetensors: damaged: its content does not"):
        bundle.save(tmp_path / "made", model, card, weights=best)
    assert all(torch.equal(bundle.load(tmp_path / "made").model.state_dict()[name], doubled[name]) for name in doubled)


def test_weights_of_another_shape_are_named(data: FeatureSpec, tmp_path: Path) -> None:
    made = saved(data, tmp_path / "made")
    card = json.loads((made / "bundle.json").read_text())
    card["settings"]["factors"] = 6
    (made / "bundle.json").write_text(json.dumps(card))
    with pytest.raises(BundleError, match=r"has shape \(.*4\); the model expects \(.*6\)"):
        bundle.load(made, verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "bundle format 99; this recspec reads 1"),
        ({"model": "neumff"}, r"unknown model 'neumff' \(did you mean 'neumf'\?\)"),
        ({"colour": "red"}, "damaged"),
    ],
)
def test_another_format_model_or_key_is_refused(
    data: FeatureSpec, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    made = saved(data, tmp_path / "made")
    card = json.loads((made / "bundle.json").read_text())
    (made / "bundle.json").write_text(json.dumps({**card, **change}))
    with pytest.raises(BundleError, match=message):
        bundle.load(made, verify=False)


def test_a_catalogue_that_is_named_but_gone_is_said(data: FeatureSpec, tmp_path: Path) -> None:
    broken = data.replace(metadata={**data.metadata, "encoders": "gone.json"})
    model = a_model(broken)
    with pytest.raises(BundleError, match=r"metadata names 'gone.json', which does not exist"):
        bundle.save(tmp_path / "made", model, Card(model="neumf", settings={}))
    assert list(tmp_path.iterdir()) == []


# --- versions ---------------------------------------------------------------------------------------------------------


def run_of(folder: Path, updates: int) -> Path:
    """A run with its bundle and some updates."""
    for place in ("bundle", *(f"updates/{number:04d}/bundle" for number in range(1, updates + 1))):
        (folder / place).mkdir(parents=True)
        (folder / place / "bundle.json").touch()
    return folder


def test_a_run_is_its_newest_version_and_each_version_can_be_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2)
    assert bundle.find(run) == run / "updates" / "0002" / "bundle"
    assert bundle.find(run / "bundle") == run / "bundle"
    assert bundle.find(run / "updates" / "0001") == run / "updates" / "0001" / "bundle"
    numbers = [versions.number_of(each) for each in (run / "bundle", bundle.find(run / "updates" / "0001"))]
    assert numbers == [0, 1]


def test_what_a_killed_update_left_is_no_version_and_makes_room_for_the_next(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2)
    (run / "updates" / "0002" / "bundle").rename(run / "updates" / "0002" / ".bundle.7.tmp")
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert versions.next_update(run) == run / "updates" / "0002"
    assert not (run / "updates" / "0002").exists()


def test_links_that_lead_elsewhere_are_no_versions(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run", 1), run_of(tmp_path / "other", 1)
    (run / "updates" / "0002").symlink_to(other / "updates" / "0001")
    assert bundle.find(run) == run / "updates" / "0001" / "bundle"
    assert versions.next_update(run) == run / "updates" / "0002"
    assert bundle.find(other) == other / "updates" / "0001" / "bundle", "only the link was removed"
