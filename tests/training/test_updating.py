"""New events into trained models: each registered model keeps what it knows and takes what is new."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from recspec import api
from recspec.base import config
from recspec.base.errors import BundleError, DataError, Interrupted, SpecError, TrainingError
from recspec.bundle import folder as bundle
from recspec.bundle import run_record, versions
from recspec.cli import app as cli
from recspec.data.encoding import Encoders
from recspec.data.storage import open_split
from recspec.datasets import append_events
from recspec.evaluation import evaluate
from recspec.feature_spec import FeatureSpec
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.loading.blocks import HeldOutShare, NewRowsAndReplay
from recspec.models import MODELS, FittedModel, WideDeep
from recspec.models.layers import Embeddings
from recspec.training import updating
from recspec.training.loop import train
from recspec.training.optimizers import Optimizers
from recspec.training.settings import TrainSettings
from recspec.training.updating import UpdateSettings, update
from tests.made_up_events import NEW_ITEM, NEW_USER, prepared, shop_events, written
from tests.model_cases import MODEL_CASES, OF_LABELLED_ROWS, kind_of_data
from tests.processes import Running

UPDATED = sorted(set(MODEL_CASES) - set(OF_LABELLED_ROWS))
"""Models that learn from interactions."""
LONG = {"history": 6}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Datasets of known events, with histories and without, and a file of new ones."""
    folder = tmp_path_factory.mktemp("shop")
    known, new = shop_events()
    prepared(folder / "plain", known)
    prepared(folder / "sequences", known, **LONG)
    return {
        "interactions": folder / "plain" / "data",
        "clicks": folder / "plain" / "data",
        "sequences": folder / "sequences" / "data",
        "new": written(folder / "new.csv", new),
    }


def trained(name: str, data: Path, run: Path, **settings: object) -> Path:
    """A run of a model at small sizes."""
    asked = (
        TrainSettings(threads=1)
        if issubclass(MODELS[name], FittedModel)
        else TrainSettings(
            epochs=1,
            threads=1,
            tensorboard=False,
            batch_size=128,
            **settings,  # type: ignore[arg-type]
        )
    )
    own = config.build(MODELS[name].Settings, "settings", MODEL_CASES[name].tiny)
    train(name, FeatureSpec.load(data), run, settings=asked, model_settings=own)
    return run


def recommended(run: Path, user: str, **wanted: object) -> list[object]:
    """The items that a run recommends to a user."""
    (answer,) = Predictor.open(run, device="cpu").recommend(RecommendRequest(users=(user,), **wanted))  # type: ignore[arg-type]
    assert answer.known
    return [each.item for each in answer.items]


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATED)
def test_an_update_keeps_ids_and_recommends_new_items_to_new_users(
    name: str, shop: Mapping[str, Path], tmp_path: Path
) -> None:
    run = trained(name, shop[kind_of_data(name)], tmp_path / "run")
    before = bundle.load(run)
    made = update(run, shop["new"])
    after = bundle.load(run)
    assert after.folder == made.bundle == run / "updates" / "0001" / "bundle"
    assert made.counts == {"events": 90, "users": 2, "items": 1, "left_out": 0}
    users, items = (Encoders.load(after.folder).vocabularies[of] for of in ("user_id", "item_id"))
    old = Encoders.load(before.folder).vocabularies
    assert users.values.slice(0, len(old["user_id"])).equals(old["user_id"].values)
    assert items.values.slice(0, len(old["item_id"])).equals(old["item_id"].values)
    found = recommended(run, NEW_USER, k=30)
    known = after.seen.of(int(users.encode([NEW_USER])[0])) if after.seen is not None else []
    seen = {items.values[int(each) - 1].as_py() for each in known}
    assert set(found) == set(items.values.to_pylist()) - seen
    assert NEW_ITEM in {*found, *seen}
    assert {NEW_ITEM} <= {each for user in ("user00", "user01", "aaron") for each in recommended(run, user, k=30)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in UPDATED if not issubclass(MODELS[name], FittedModel)])
def test_without_steps_old_ids_keep_their_rows(name: str, shop: Mapping[str, Path], tmp_path: Path) -> None:
    """A learning rate near 0: what was there is there, in the rows of the same ids."""
    run = trained(name, shop[kind_of_data(name)], tmp_path / "run", optimizer="sgd", keep_best=False)
    before = bundle.load(run).model
    update(run, shop["new"], settings=UpdateSettings(epochs=1, learning_rate=1e-9))
    after = bundle.load(run).model
    for own, new in zip(before.modules(), after.modules(), strict=True):
        if isinstance(own, Embeddings):
            assert isinstance(new, Embeddings)
            for key, tables in own.tables.items():
                for vocabulary, rows in tables.items():
                    start = new.tables[key][vocabulary].start
                    held = own.stores[key][rows.start : rows.stop]
                    assert torch.allclose(held, new.stores[key][start : start + len(rows)], atol=1e-6)
    stores = {id(each) for part in before.modules() if isinstance(part, Embeddings) for each in part.stores.values()}
    for (label, own_weight), (_, weight) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        if id(own_weight) not in stores:
            part = weight[tuple(slice(0, size) for size in own_weight.shape)]
            assert torch.allclose(own_weight, part, atol=1e-6), label


def test_a_fitted_model_is_the_one_fitted_to_all_events(shop: Mapping[str, Path], tmp_path: Path) -> None:
    run = trained("ease", shop["interactions"], tmp_path / "run")
    made = update(run, shop["new"])
    own = config.build(MODELS["ease"].Settings, "settings", bundle.load(run).card.settings)  # as they were chosen
    grown = FeatureSpec.load(made.folder / "data")
    train("ease", grown, tmp_path / "anew", settings=TrainSettings(threads=1), model_settings=own)
    torch.testing.assert_close(bundle.load(run).model.state_dict(), bundle.load(tmp_path / "anew").model.state_dict())


def test_updates_chain_and_any_version_can_be_opened(shop: Mapping[str, Path], tmp_path: Path) -> None:
    run = trained("sasrec", shop["interactions"], tmp_path / "run")
    _, new = shop_events()
    for number in range(3):
        made = update(run, written(tmp_path / "part.csv", new.slice(30 * number, 30)))
        assert made.folder.name == f"{number + 1:04d}"
    record = run_record.read(run / "updates" / "0003")
    assert record is not None
    assert (record.kind, record.made_of) == ("updated", (str((run / "updates" / "0002").resolve()),))
    assert not (run / "updates" / "0002" / "checkpoints").exists()
    for version in ("bundle", "updates/0001", "updates/0002", "updates/0003"):
        assert recommended(run / version, "user00", k=3), version


def test_the_state_of_the_optimizer_goes_on(shop: Mapping[str, Path], tmp_path: Path) -> None:
    run = trained("neumf", shop["interactions"], tmp_path / "run")
    notes: list[object] = []

    def note(event: Mapping[str, object]) -> None:
        notes.extend([event["message"]] if event["event"] == "note" else [])

    made = update(run, shop["new"], settings=UpdateSettings(learning_rate=1e-9), on_event=note)
    assert not [each for each in notes if "start anew" in str(each)]
    told = made.to_dict()
    assert (told["folder"], set(made.seconds)) == (str(made.folder), {"data", "train", "all"})
    assert made.bundle_bytes == sum(each.stat().st_size for each in made.bundle.rglob("*") if each.is_file())
    kinds = [each.kind for each in made.result.warnings]
    assert "valid_too_small" not in kinds, "its few epochs hardly differ, whatever valid holds"
    shutil.rmtree(run / "updates" / "0001" / "checkpoints")
    new = shop_events()[1].slice(0, 60)
    later = pc.add(new.column("timestamp"), 86_400)  # an exact copy is no new event
    new = new.set_column(new.column_names.index("timestamp"), "timestamp", later)
    update(run, written(tmp_path / "again.csv", new), on_event=note)
    assert [each for each in notes if "no checkpoint with the state of its optimizers, which start anew" in str(each)]


def test_a_failed_update_leaves_the_run_as_it_was(shop: Mapping[str, Path], tmp_path: Path) -> None:
    run = trained("neumf", shop["interactions"], tmp_path / "run")
    (tmp_path / "bad.csv").write_text("user_id,item_id\na,b\n")
    with pytest.raises(DataError, match="no column 'timestamp', the time"):
        update(run, tmp_path / "bad.csv")
    with pytest.raises(Interrupted, match="run: stopped as asked; the run is as it was before, and the same"):
        update(run, shop["new"], stop_requested=lambda: True)
    told = "no room; wait; the same command with --resume goes on"
    there = r"^no room; wait; .*run is as it was before the update$"
    with pytest.raises(TrainingError, match=there), updating._new_version(run):
        raise TrainingError(told)
    assert list(run.glob("updates/[!.]*")) == []
    assert bundle.find(run) == run / "bundle"


@pytest.mark.parametrize(("before", "newest"), [("manifest.write", "0001"), ("RunRecord.finish", "0002")])
def test_an_update_that_is_killed_before_or_after_its_bundle_leaves_a_whole_version(
    before: str, newest: str, shop: Mapping[str, Path], tmp_path: Path
) -> None:
    run = trained("popularity", shop["interactions"], tmp_path / "run")
    update(run, shop["new"])
    code = f"""
import os, signal, sys
from pathlib import Path
from recspec.base.files import manifest
from recspec.bundle import RunRecord
from recspec.training.updating import update
{before} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
update(Path(sys.argv[1]), Path(sys.argv[2]))
"""
    _, new = shop_events()
    file = written(tmp_path / "more.csv", new.set_column(0, "user_id", pa.array(["late"] * new.num_rows)))
    assert Running(code, os.fspath(run), os.fspath(file)).ended().returncode == -signal.SIGKILL
    assert (run / "updates" / "0002" / "data").is_dir()
    assert bundle.find(run) == run / "updates" / newest / "bundle"
    if newest == "0002":
        record = run_record.read(run / "updates" / "0002")
        assert record is not None
        assert record.kind == "updated"
    else:
        assert update(run, file).folder == run / "updates" / "0002"
    assert recommended(run, "late")


def test_what_takes_no_new_events_says_so(shop: Mapping[str, Path], tmp_path: Path) -> None:
    run = trained("popularity", shop["interactions"], tmp_path / "run")
    with pytest.raises(BundleError, match="is a bundle, whose files must stay as they are; name the run that holds it"):
        update(run / "bundle", shop["new"])
    with pytest.raises(BundleError, match="no such folder"):
        update(tmp_path / "nowhere", shop["new"])
    with pytest.raises(DataError, match=r"is not the dataset that .* was trained on: features, vocabularies or"):
        update(run, shop["new"], data=FeatureSpec.load(shop["sequences"]))
    made = update(run, shop["new"])
    grown = re.escape(str(made.folder / "data"))
    with pytest.raises(SpecError, match=f"not the dataset that the model was trained on, which is .*{grown}"):
        evaluate(bundle.load(made.bundle), FeatureSpec.load(shop["interactions"]), protocols=["full"])
    with pytest.raises(BundleError, match=r"is a version of .*run; name that run, whose newest version is updated"):
        update(made.folder, shop["new"])
    (made.folder / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(
        BundleError, match=r"no such file or folder.*; if the dataset of .* has moved, name it with --data"
    ):
        update(run, shop["new"])
    (run / "updates" / "0001" / "run.json").unlink()
    (run / "updates" / "0001" / "log.jsonl").unlink()
    with pytest.raises(BundleError, match="does not say which dataset it was trained on; name it"):
        update(run, shop["new"])


def test_a_run_that_moved_with_its_dataset_beside_it_or_inside_is_updated(
    shop: Mapping[str, Path], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(shop["interactions"], here / "data")
    run = trained("popularity", here / "data", here / "run")
    shutil.copytree(run, tmp_path / "inside" / "data")
    shutil.copytree(here / "data", tmp_path / "inside" / "data" / "data")
    here.rename(there)
    update(tmp_path / "inside" / "data", shop["new"])  # the run has the dataset's name, as on a shared volume
    new = shop_events()[1]
    first, more = (
        written(tmp_path / name, part)
        for name, part in (("first.csv", new.slice(0, len(new) // 2)), ("more.csv", new.slice(len(new) // 2)))
    )
    assert update(there / "run", first).folder == there / "run" / "updates" / "0001"
    there.rename(here)
    (here / "data").rename(tmp_path / "elsewhere")
    assert update(here / "run", more).folder.name == "0002", "whose dataset was recorded at the other place"


def test_updates_that_lead_out_of_the_run_are_refused_and_nothing_there_is_removed(
    shop: Mapping[str, Path], tmp_path: Path
) -> None:
    run, kept = trained("popularity", shop["interactions"], tmp_path / "run"), tmp_path / "mine" / "0001" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    (run / "updates").symlink_to(tmp_path / "mine")
    with pytest.raises(DataError, match="'updates' leads outside the folder"):
        update(run, shop["new"])
    assert [each.name for each in kept.parent.parent.iterdir()] == ["0001"]
    assert kept.read_text() == "mine"


def test_the_replayed_rows_are_a_share_of_the_old_ones() -> None:
    newest = NewRowsAndReplay([900], 0.25, seed=3)
    mask = newest.mask(0, 0, 1000)
    assert mask[900:].all()
    assert 175 < mask[:900].sum() < 275
    assert (mask[:900] == HeldOutShare(0.25, held_out=True, seed=3).mask(0, 0, 900)).all()
    assert NewRowsAndReplay([900], 1.0).mask(0, 0, 1000).all()
    assert NewRowsAndReplay([900], 0.0).mask(0, 0, 1000).sum() == 100


def test_an_update_that_ends_while_another_waits_is_its_base(
    shop: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, (_, new) = trained("ease", shop["interactions"], tmp_path / "run"), shop_events()
    first, second = (written(tmp_path / f"{at}.csv", new.slice(at, 45)) for at in (0, 45))
    before, others = versions.locked_inside, [first]

    def waiting(folder: Path, doing: str) -> AbstractContextManager[None]:
        if others:
            update(run, others.pop())
        return before(folder, doing)

    monkeypatch.setattr(versions, "locked_inside", waiting)
    made = update(run, second)
    assert made.folder.name == "0002"
    whole = append_events(FeatureSpec.load(shop["interactions"]), shop["new"], new_folder(tmp_path / "whole")).spec
    for split in whole.splits:
        assert open_split(FeatureSpec.load(made.folder / "data"), split).num_rows == open_split(whole, split).num_rows
    with pytest.raises(DataError, match="holds the events of this file already"):
        update(run, first)


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_new_item_is_found_by_its_own_columns_and_has_its_title(tmp_path: Path) -> None:
    known, new = shop_events()
    names = [f"i{number:02d}" for number in range(24)]
    (tmp_path / "shop").mkdir()
    items = pa.table(
        {
            "item_id": names,
            "name": names,
            "sort": ["abc"[n % 3] for n in range(24)],
            "price in EUR": [n + 0.25 for n in range(24)],
        }
    )
    written(tmp_path / "shop" / "items.csv", items)
    spec = prepared(tmp_path / "shop", known, items="items.csv", title="name", item_features=["sort", "price in EUR"])
    told = {"name": "New thing", "sort": "odd", "price in EUR": "99.5"}
    for name, value in told.items():
        new = new.append_column(name, pa.array([value] * len(new)))
    run = trained("popularity", spec.folder, tmp_path / "run")
    assert update(run, written(tmp_path / "new.csv", new)).notes == ()
    for told_by in ("sort = 'odd'", "`price in EUR` > 99", "title = 'New thing'"):
        (answer,) = Predictor.open(run, device="cpu").recommend(
            RecommendRequest(users=("user00",), k=30, filter=told_by)
        )
        assert [(each.item, each.title) for each in answer.items] == [(NEW_ITEM, "New thing")], told_by


def test_new_items_that_lack_values_are_told_of_by_the_command_and_in_python(
    shop: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("popularity", shop["interactions"], tmp_path / "run")
    events = shop_events()[1].drop_columns(["kind"])
    file = written(tmp_path / "new.csv", events)
    monkeypatch.setattr(sys, "argv", ["recspec", "update", str(run), str(file), "--json"])
    with contextlib.suppress(SystemExit):
        cli.main()
    said = capsys.readouterr()
    assert f"note: 1 new item, such as '{NEW_ITEM}', lacks values in 'kind': an update" in " ".join(said.err.split())
    (note,) = json.loads(said.out)["notes"]
    assert note.startswith(f"1 new item, such as '{NEW_ITEM}', lacks values in 'kind'")
    shutil.rmtree(run / "updates")
    assert f"note: {note}" in " ".join(repr(api.update(run, events, progress=False)).split())


@pytest.mark.parametrize("buckets", [20, 12, 5])
def test_combinations_of_old_ids_keep_their_weights_in_crosses(buckets: int) -> None:
    """All combinations fit before and after, before alone, or never."""

    def made(ids: tuple[int, int]) -> WideDeep:
        features = {name: {"cardinality": count} for name, count in zip("ab", ids, strict=True)}
        channels = {"user": ["a", "b"], "label": ["label"]}
        spec = FeatureSpec.from_dict({"feature_spec": {**features, "label": {}}, "channel_spec": channels})
        own = {"crosses": [["a", "b"]], "cross_buckets": buckets, "use_deep": False}
        return WideDeep(spec, WideDeep.Settings.model_validate(own))  # type: ignore[arg-type]

    old, new = made((3, 4)), made((4, 5))
    with torch.no_grad():
        old.wide.cross_weights.copy_(torch.arange(1.0, buckets + 1).unsqueeze(1))
    settings = TrainSettings(optimizer="sgd")
    updating.warm_start(new, old, Optimizers(new.named_parameters(), settings), {})
    places = {"a": torch.tensor([0, 2, 1]), "b": torch.tensor([3, 1, 0])}
    before, after = (model.wide.part(places) for model in (old, new))
    if buckets == 12:  # they share weights by hash now
        assert set(new.wide.cross_weights.flatten().tolist()) <= {0.0, *range(1, 13)}
    else:
        assert after.tolist() == before.tolist()
