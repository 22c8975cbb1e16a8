"""Models by name and version: opened, replaced while they answer, and kept when what comes is broken."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recspec.base.errors import BundleError, RequestError, SettingsError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.export.exporter import ExportSettings, export
from recspec.feature_spec import FeatureSpec
from recspec.inference.catalogue_updates import update_catalogue
from recspec.inference.lookup import Directory
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.models import MODELS
from recspec.serving.inference_protocol import metadata_of
from recspec.serving.model_folders import PrivateCopy, Source, find_versions, sources_of
from recspec.serving.opened_model import open_version
from recspec.serving.repository import Repository
from recspec.serving.server import application
from recspec.serving.settings import Limits, RepositorySettings
from recspec.serving.tensors import DATATYPES, Tensor
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from recspec.training.updating import Learning, next_version, update
from tests.asking import ask, total
from tests.closeness import assert_close
from tests.made_up import clicks, interactions
from tests.made_up_events import prepared, shop_events, written
from tests.made_up_models import made_up_bundle, made_up_rows


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("data")
    return {"neumf": interactions(folder / "interactions"), "wide_deep": clicks(folder / "clicks", num_rows=500)}


@pytest.fixture
def model(tmp_path: Path, specs: dict[str, FeatureSpec]) -> Path:
    return made_up_bundle(tmp_path / "ctr", specs["wide_deep"], "wide_deep")


@asynccontextmanager
async def repository(*sources: Source, limits: Limits | None = None, start: bool = True) -> AsyncIterator[Repository]:
    kept = Repository(sources, settings=RepositorySettings(watch=0), limits=limits)
    if start:
        await kept.start()
    try:
        yield kept
    finally:
        await kept.close()


def tensors_of(kept: Repository, name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    ports = {port.name: port for port in kept.endpoint(name).inputs}
    return {key: Tensor(key, DATATYPES[ports[key].dtype], values) for key, values in arrays.items()}


def expected(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The bundle's own probabilities (B, 1)."""
    predictor = Predictor.open(folder, device="cpu")
    features = predictor.spec.features
    batch = {
        name: torch.from_numpy(values if features[name].is_list else values[:, 0]) for name, values in arrays.items()
    }
    batch = {name: each.long() if features[name].is_categorical else each for name, each in batch.items()}
    with torch.inference_mode():
        return torch.sigmoid(predictor.model(batch)).numpy()[:, None]


# --- names and folders -----------------------------------------------------------------------------------------------


def test_a_model_is_called_as_its_folder_or_as_the_user_says(tmp_path: Path) -> None:
    found = sources_of([str(tmp_path / "runs" / "neumf"), "ctr=somewhere", str(tmp_path / "x" / "bundle"), "./a=b/c"])
    assert [source.name for source in found] == ["neumf", "ctr", "x", "c"]
    assert found[1].path == Path("somewhere")


def test_names_that_are_none_or_taken_are_refused_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        sources_of(["a b=x", "ctr=x", "ctr=y", "ctr_raw=z"])
    assert str(refused.value) == (
        "models: 3 problems\n"
        "  - 'a b': expected a model name of letters, digits, _ . and -; write NAME=x\n"
        "  - 'ctr_raw' is the name of the raw form of 'ctr'; write NAME=z\n"
        "  - two models are called 'ctr'; write NAME=y"
    )
    with pytest.raises(SettingsError, match="no model was named; name a run, a bundle, or NAME=PATH"):
        sources_of([])


def test_a_folder_is_a_bundle_a_run_or_holds_versions(tmp_path: Path) -> None:
    for place in ("run/bundle", "bundle", "many/2", "many/10/bundle", "many/old"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "bundle.json").touch()
    (tmp_path / "many/3").mkdir()
    assert find_versions(tmp_path / "bundle") == {1: tmp_path / "bundle"}
    assert find_versions(tmp_path / "run") == {1: tmp_path / "run/bundle"}
    assert find_versions(tmp_path / "many") == {2: tmp_path / "many/2", 10: tmp_path / "many/10"}
    with pytest.raises(BundleError, match=r"neither bundle\.json nor bundle/bundle\.json is there"):
        find_versions(tmp_path / "many/3")


async def test_every_model_that_can_t_be_opened_is_named(tmp_path: Path, model: Path) -> None:
    (model / "weights.safetensors").write_bytes(b"no")

    async with repository(Source("ctr", model), Source("gone", tmp_path / "gone"), start=False) as kept:
        with pytest.raises(BundleError, match="models: 2 problems") as refused:
            await kept.start()
        assert "no such folder" in str(refused.value)
        assert "weights.safetensors" in str(refused.value)


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_no_row_is_answered_with_no_row(model: Path) -> None:
    async with repository(Source("ctr", model)) as kept:
        rows = made_up_rows(kept.endpoint("ctr").inputs, 0)
        _, outputs = await kept.infer("ctr", "", tensors_of(kept, "ctr", rows))
        assert {name: values.shape for name, values in outputs.items()} == {"probability": (0, 1), "logit": (0, 1)}


async def test_inputs_so_large_that_the_answer_is_no_number_are_refused(
    model: Path, specs: dict[str, FeatureSpec]
) -> None:
    made_up_bundle(model, specs["wide_deep"], "wide_deep", scale=100)

    async with repository(Source("ctr", model)) as kept:
        rows = made_up_rows(kept.endpoint("ctr").inputs, 3)
        for port in kept.endpoint("ctr").inputs:
            if port.dtype == "float32":
                rows[port.name][1] = 3e38
        with pytest.raises(
            RequestError,
            match=r"row 2 \(logit\[1\]\): the model's answer is no finite number; its inputs are too large",
        ):
            await kept.infer("ctr", "", tensors_of(kept, "ctr", rows))


async def test_names_and_versions_that_are_not_there_are_404(model: Path) -> None:
    async with repository(Source("ctr", model)) as kept:
        for name, version, message in (
            ("ctx", "", "no model 'ctx' .did you mean 'ctr'"),
            ("ctr", "2", "model 'ctr' has no version '2'; loaded: 1"),
            ("ctr", "x", "model 'ctr' has no version 'x'"),
            ("ctr", "1" * 5000, "has no version"),
            ("ctr", "²", "has no version"),
            ("x_raw", "", "no model 'x_raw'"),
        ):
            with pytest.raises(RequestError, match=message) as refused:
                await kept.infer(name, version, {})
            assert refused.value.status == 404


# --- versions, loading, reloading ------------------------------------------------------------------------------------


async def test_the_newest_version_answers_and_older_ones_where_asked(
    tmp_path: Path, specs: dict[str, FeatureSpec]
) -> None:
    for version in (1, 2, 10):
        made_up_bundle(tmp_path / "many" / str(version), specs["neumf"], "neumf", version)

    async with repository(Source("many", tmp_path / "many")) as kept:
        assert kept.versions("many") == ("1", "2", "10")
        rows = made_up_rows(kept.endpoint("many").inputs, 4)
        for asked, version in (("", "10"), ("2", "2"), ("10", "10"), ("1", "1")):
            used, outputs = await kept.infer("many", asked, tensors_of(kept, "many", rows))
            assert used.version == version
            assert_close(outputs["sigmoid"], expected(tmp_path / "many" / version, rows))
        made_up_bundle(tmp_path / "many" / "11", specs["neumf"], "neumf", 11)
        await kept.look()
        assert kept.endpoint("many").model.version == "11"
        shutil.rmtree(tmp_path / "many" / "1")
        await kept.load("many")
        assert kept.versions("many") == ("2", "10", "11")


async def test_a_request_under_way_is_answered_by_the_model_it_began_with(
    model: Path, specs: dict[str, FeatureSpec]
) -> None:
    gate = threading.Event()

    async with repository(Source("ctr", model)) as kept:
        rows = made_up_rows(kept.endpoint("ctr").inputs, 5)
        before = expected(model, rows)
        with kept.use("ctr") as endpoint:
            old = endpoint.model
            blocked = asyncio.ensure_future(old.batcher.call(lambda: gate.wait(600)))
            waiting = asyncio.ensure_future(kept.infer("ctr", "", tensors_of(kept, "ctr", rows)))
            await asyncio.sleep(0)
            made_up_bundle(model, specs["wide_deep"], "wide_deep", 1)
            await kept.look()
            assert kept.endpoint("ctr").model is not old
            _, outputs = await kept.infer("ctr", "", tensors_of(kept, "ctr", rows))
            after = expected(model, rows)
            assert_close(outputs["probability"], after)
            assert not np.allclose(before, after)
            assert not waiting.done()
            gate.set()
            await blocked
            used, outputs = await waiting
            assert used is old
            assert_close(outputs["probability"], before)
            assert_close((await old.batcher.infer(rows, 5))["probability"], before)  # as long as it is in use
        assert total(kept.metrics, "recspec_loads_total", outcome="reloaded") == 1


async def test_a_broken_bundle_leaves_the_old_one_serving_and_is_told(
    model: Path, specs: dict[str, FeatureSpec], caplog: pytest.LogCaptureFixture
) -> None:
    async with repository(Source("ctr", model)) as kept:
        old, rows = kept.endpoint("ctr").model, made_up_rows(kept.endpoint("ctr").inputs, 2)
        weights = (model / "weights.safetensors").read_bytes()
        (model / "weights.safetensors").write_bytes(weights[:100])
        with caplog.at_level(logging.WARNING, "recspec.serve"):
            await kept.look()
        assert "model 'ctr' stays as it is" in caplog.text
        caplog.clear()
        await kept.look()  # the same broken content is not tried again
        assert not caplog.text
        with pytest.raises(BundleError, match=r"model 'ctr': .*weights.safetensors"):
            await kept.load("ctr")
        assert kept.endpoint("ctr").model is old
        assert kept.ready
        told = {each["name"]: each for each in kept.index()}["ctr"]
        assert (told["state"], "the older one answers" in told["reason"]) == ("READY", True)
        await kept.infer("ctr", "", tensors_of(kept, "ctr", rows))
        made_up_bundle(model, specs["wide_deep"], "wide_deep", 3)
        await kept.look()
        assert kept.endpoint("ctr").model is not old
        assert {each["reason"] for each in kept.index()} == {""}


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 3.64 TiB"), KeyError("x")])
async def test_whatever_opening_a_folder_raises_is_its_model_s_reason_alone(
    model: Path,
    specs: dict[str, FeatureSpec],
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = made_up_bundle(tmp_path / "other", specs["neumf"], "neumf")

    def opened(copy: PrivateCopy, *rest: Any) -> Any:
        if copy.origin == model:
            raise error
        return open_version(copy, *rest)

    async with repository(Source("ctr", model), Source("other", other)) as kept:
        first, second = kept.endpoint("ctr").model, kept.endpoint("other").model
        monkeypatch.setattr("recspec.serving.repository.open_version", opened)
        made_up_bundle(model, specs["wide_deep"], "wide_deep", 3)
        made_up_bundle(other, specs["neumf"], "neumf", 3)
        await kept.look()
        assert kept.endpoint("ctr").model is first
        assert kept.endpoint("other").model is not second
        assert any(record.exc_info for record in caplog.records)  # the text depends on the formatter of other libraries
        told = {each["name"]: each for each in kept.index()}
        enough = "not enough memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        assert told["ctr"]["reason"].startswith(f"{model}: can't be opened: ")
        assert enough in told["ctr"]["reason"]
        assert told["ctr"]["reason"].endswith("the server's log has the traceback; the older one answers")
        assert told["other"]["reason"] == ""
        with pytest.raises(BundleError, match="can't be opened"):
            await kept.load("ctr")


async def test_a_folder_that_is_gone_for_a_moment_changes_nothing(model: Path) -> None:
    async with repository(Source("ctr", model)) as kept:
        old = kept.endpoint("ctr").model
        model.rename(model.with_name("elsewhere"))
        await kept.look()
        assert kept.endpoint("ctr").model is old
        with pytest.raises(BundleError, match="no such folder"):
            await kept.load("ctr")
        assert kept.endpoint("ctr").model is old


async def test_an_unloaded_model_answers_503_until_it_is_loaded(model: Path) -> None:
    async with repository(Source("ctr", model)) as kept:
        await kept.unload("ctr")
        with pytest.raises(
            RequestError, match="model 'ctr' is not loaded; POST /v2/repository/models/ctr/load"
        ) as told:
            kept.endpoint("ctr")
        assert told.value.status == 503
        assert kept.index() == [{"name": "ctr", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}]
        assert kept.index(only_ready=True) == []
        assert kept.ready
        await kept.look()
        assert kept.names == ()
        await kept.load("ctr")
        assert kept.names == ("ctr", "ctr_raw")
        with pytest.raises(RequestError, match="no model 'x'"):
            await kept.load("x")


async def test_new_content_is_found_by_itself(model: Path, specs: dict[str, FeatureSpec]) -> None:
    kept = Repository([Source("ctr", model)], settings=RepositorySettings(watch=0.01))
    await kept.start()
    old = kept.endpoint("ctr").model
    made_up_bundle(model, specs["wide_deep"], "wide_deep", 5)
    async with asyncio.timeout(600):
        while kept.endpoint("ctr").model is old:
            await asyncio.sleep(0.01)
    await kept.close()


# --- exports ---------------------------------------------------------------------------------------------------------


async def test_an_export_computes_where_it_agrees_with_its_bundle(
    tmp_path: Path, specs: dict[str, FeatureSpec], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    folder = made_up_bundle(tmp_path / "run" / "bundle", specs["neumf"], "neumf").parent
    quickly = ExportSettings(batch_sizes=(1,), seconds=0.01, threads=1)
    export(bundle.load(folder), folder / "export", quickly)
    for name in ("ranker", "program"):
        shutil.copytree(folder / "export", tmp_path / name)
    description = tmp_path / "ranker" / "export.json"
    description.write_text(description.read_text().replace('"form": "rows"', '"form": "ranker"'))
    manifest.write(tmp_path / "ranker")

    caplog.set_level(logging.INFO, "recspec.serve")
    async with repository(Source("both", folder), Source("alone", folder / "export")) as kept:
        computes = f"for requests to infer, {folder / 'export'} (onnx, fp32) computes"
        assert f"model 'both': update 0 (as trained) answers, from {folder / 'bundle'}; {computes}" in caplog.messages
        assert f"model 'alone': version 1 answers, from {folder / 'export'}" in caplog.messages
        rows = made_up_rows(kept.endpoint("both").inputs, 6)
        wanted = expected(folder, rows)
        for name in ("both", "alone"):
            assert metadata_of(kept, kept.endpoint(name))["platform"] == "recspec_onnx"
            _, outputs = await kept.infer(name, "", tensors_of(kept, name, rows))
            assert_close(outputs["sigmoid"], wanted)
        assert kept.names == ("both", "alone", "both_raw")
        told = json.loads((folder / "export" / "export.json").read_text())
        told["difference"]["allowed_largest"] = 1e9  # a description can't allow what it likes
        (folder / "export" / "export.json").write_text(json.dumps(told))
        manifest.write(folder / "export")
        made_up_bundle(folder / "bundle", specs["neumf"], "neumf", 1)  # another model: the export is of the old one
        with caplog.at_level(logging.WARNING, "recspec.serve"):
            await kept.look()
        reason = next(each["reason"] for each in kept.index() if each["name"] == "both")
        assert "torch computes, not the export" in reason
        (told_once,) = [each for each in caplog.messages if "off the bundle's; export it again" in each]
        assert "update 0 (as trained) answers, from" in told_once
        assert "; for requests to infer, torch computes, not the export: " in told_once
        assert metadata_of(kept, kept.endpoint("both"))["platform"] == "recspec_torch"
        told["difference"] = [1]
        (folder / "export" / "export.json").write_text(json.dumps(told))
        manifest.write(folder / "export")
        await kept.load("both")
        reason = next(each["reason"] for each in kept.index() if each["name"] == "both")
        assert reason.startswith("torch computes, not the export: ")
        assert reason.endswith("export.json: damaged: difference: expected an object; found [1]")
        _, outputs = await kept.infer("both", "", tensors_of(kept, "both", rows))
        assert_close(outputs["sigmoid"], expected(folder, rows))
    async with repository(Source("ranker", tmp_path / "ranker"), start=False) as kept:
        with pytest.raises(BundleError, match="exported with --form ranker, which takes one request a call"):
            await kept.start()
    async with repository(Source("program", tmp_path / "program")) as kept:  # which takes no raw values
        answer = await ask(application(kept), "POST", "/recommend", {"user": 1})
        assert (answer.status, "model 'program' is an export" in answer.data["error"]) == (400, True), answer.data
        (listed,) = (await ask(application(kept), "GET", "/models")).data["models"]
        assert (listed["raw"], listed["recommends"], listed["columns"]) == (False, False, [])


async def test_a_version_answers_once_it_is_named_and_after_a_roll_back_the_one_before_does(tmp_path: Path) -> None:
    known, new = shop_events()
    run = tmp_path / "run"
    spec = prepared(tmp_path / "shop", known)
    own = MODELS["popularity"].Settings()
    train("popularity", spec, run, settings=TrainSettings(threads=1), model_settings=own)
    async with repository(Source("run", run)) as kept:

        def answers() -> int:
            return kept.endpoint("run").model.opened.update

        versions.hold(run)
        with versions.updating(run):
            next_version(run, written(tmp_path / "new.csv", new), Learning())
        await kept.look()
        assert answers() == 0, "a version that is not judged yet"
        versions.publish(run, 1, base=0)
        await kept.look()
        assert answers() == 1
        versions.roll_back(run)
        await kept.look()
        assert answers() == 0


async def test_an_update_of_a_run_is_taken_while_requests_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that holds a copy of the run gets the new bundle file by file, and takes it once it is whole."""
    known, new = shop_events()
    spec = prepared(tmp_path / "shop", known)
    own = MODELS["popularity"].Settings()
    run = tmp_path / "run"
    train("popularity", spec, run, settings=TrainSettings(threads=1), model_settings=own)
    served = tmp_path / "served"
    shutil.copytree(run / "bundle", served / "bundle")
    update(run, written(tmp_path / "new.csv", new))
    made, copy = (each / "updates" / "0001" / "bundle" for each in (run, served))

    caplog.set_level("INFO", "recspec.serve")

    async with repository(Source("served", served)) as kept:
        with kept.use("served") as before:
            num_users = before.model.opened.signature
            copy.mkdir(parents=True)
            shutil.copyfile(made / "bundle.json", copy / "bundle.json")
            await kept.look()
            assert kept.endpoint("served").model is before.model
            assert "has no manifest.json" in str(kept.index())
            shutil.copyfile(made / "manifest.json", copy / "manifest.json")
            await kept.look()
            assert kept.endpoint("served").model is before.model
            assert "'weights.safetensors' is missing" in str(kept.index())
            shutil.copytree(made, copy, dirs_exist_ok=True)
            await kept.look()
            after = kept.endpoint("served").model
            assert after is not before.model
            assert (before.model.opened.update, after.opened.update) == (0, 1)
            assert f"model 'served': update 1 answers, from {copy}" in caplog.messages
            assert before.model.opened.signature is num_users  # still open for the request that began with it
            assert after.opened.predictor is not None
            (answer,) = after.opened.predictor.recommend(RecommendRequest(users=("zoe",)))
            assert answer.known
            assert "missing" not in str(kept.index())


# --- what became of items --------------------------------------------------------------------------------------------


def listed(kept: Repository, **asked: object) -> list[str | int]:
    predictor = kept.endpoint("shop").model.opened.predictor
    assert predictor is not None
    (found,) = predictor.recommend(RecommendRequest(users=("user01",), k=40, **asked))  # type: ignore[arg-type]
    return [each.item for each in found.items]


async def test_a_new_catalogue_is_taken_up_without_opening_the_model_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known, new = shop_events()
    spec = prepared(tmp_path / "shop", known)
    run = tmp_path / "run"
    train("popularity", spec, run, settings=TrainSettings(threads=1), model_settings=MODELS["popularity"].Settings())
    caplog.set_level("INFO", "recspec.serve")
    async with repository(Source("shop", run)) as kept:
        before, model = listed(kept), kept.endpoint("shop").model
        opened, search = model.opened, Directory(model.opened.predictor, "item")  # type: ignore[arg-type]
        assert opened.predictor is not None
        opened.predictor.held["item"] = search
        update_catalogue(run, block=[str(before[0])])
        await kept.look()
        assert listed(kept) == before[1:]
        assert kept.endpoint("shop").model is model
        assert model.opened.exported is opened.exported
        assert model.opened.predictor is not None
        assert model.opened.predictor.model is opened.predictor.model
        assert model.opened.predictor.held == {}
        assert f"model 'shop': takes up the catalogue of {run / 'bundle'}" in caplog.messages
        taken = model.opened
        await kept.look()
        assert model.opened is taken  # nothing is new
        (tmp_path / "items.csv").write_text(f"item_id,kind\n{before[1]},rare\n")
        update_catalogue(run, tmp_path / "items.csv")
        await kept.look()
        assert listed(kept, filter="kind == 'rare'") == before[1:2]

        file = run / versions.CHANGES
        whole = file.read_bytes()
        file.write_bytes(b"broken")
        await kept.look()
        assert listed(kept) == before[1:]
        (entry,) = [each for each in kept.index() if each["name"] == "shop"]
        assert entry["reason"].endswith("; the catalogue before it answers")
        assert "damaged" in entry["reason"]
        told = len(caplog.messages)
        await kept.look()  # the same broken file is not tried again
        assert len(caplog.messages) == told
        file.write_bytes(whole)
        await kept.look()
        assert {each["reason"] for each in kept.index()} == {""}

        update(run, written(tmp_path / "new.csv", new))
        await kept.look()
        assert kept.endpoint("shop").model.opened.update == 1
        assert before[0] not in listed(kept)  # the update keeps what was blocked
        file.unlink()
        await kept.look()
        assert before[0] in listed(kept)


async def test_a_damaged_catalogue_keeps_a_server_from_starting_without_its_blocks(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run / "bundle")
    (run / versions.CHANGES).write_bytes(b"broken")
    async with repository(Source("ctr", run), start=False) as kept:
        with pytest.raises(BundleError, match=f"{versions.CHANGES}: damaged: "):
            await kept.start()
