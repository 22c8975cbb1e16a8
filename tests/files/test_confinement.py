"""Nothing outside a folder is read or written because of what a file in it says, whatever its names lead to."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from recspec.base.errors import BundleError, CheckpointError, DataError, RecspecError, SettingsError, SpecError
from recspec.base.files import manifest, outputs, paths
from recspec.base.files.paths import PathError, confined, named_path
from recspec.bundle import checkpoint
from recspec.bundle import folder as bundle
from recspec.bundle.folder import Card
from recspec.data.encoding.encoder_kinds import VocabularyEncoder
from recspec.data.encoding.encoders import Encoders
from recspec.data.encoding.vocabulary import Vocabulary
from recspec.data.prepare import PrepareContext, prepared
from recspec.data.storage import PREPARE_FILE, synthesize, transcode
from recspec.data.storage.check import check
from recspec.datasets import DATASETS
from recspec.evaluation import positives
from recspec.export.exported_model import open_exported_model
from recspec.feature_spec import FILE_NAME, FeatureSpec, json_schema
from recspec.inference.predictor import Predictor
from recspec.models import MODELS
from recspec.training.loop import train
from recspec.training.settings import TrainSettings
from tests import made_up

CANARY = "canary-that-nobody-reads"

_watched: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event in ("open", "os.rename", "os.remove", "os.mkdir", "shutil.copyfile"):
        _watched.extend(str(each) for each in arguments if isinstance(each, (str, os.PathLike)))


sys.addaudithook(_note)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that Python code opens, renames, removes and makes in the block."""
    global _watched
    _watched = touched = []
    try:
        yield touched
    finally:
        _watched = None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("confinement") / "data", num_rows=800)


@pytest.fixture(scope="module")
def trained(data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS["neumf"](data, MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)}))
    known = positives(data, ["train"])
    seen = bundle.Seen.from_interactions(known, known)
    card = Card(model="neumf", settings=model.settings.model_dump(mode="json"))
    return bundle.save(tmp_path_factory.mktemp("bundle") / "made", model, card, seen=seen)


# --- names that lead elsewhere ---------------------------------------------------------------------------------------


def hostile(folder: Path) -> dict[str, str]:
    """Names that must not be followed from `folder`, with what they are; some lead to a canary beside it."""
    outside = folder.parent / CANARY
    outside.mkdir(exist_ok=True)
    (outside / "file").write_text("0\n")
    (folder / "link").symlink_to(outside / "file")
    (folder / "linked").symlink_to(outside)
    (folder / "circle").symlink_to("circle")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "dangling").symlink_to(outside / "gone")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket"))  # an absolute one may be too long
    return {
        f"../{CANARY}/file": "up",
        f"x/../../{CANARY}/file": "in and up",
        str(outside / "file"): "absolute",
        "link": "a link to a file",
        "linked/file": "a linked folder",
        "linked": "the linked folder itself",
        "circle": "a circle",
        "dangling": "a link to nothing",
        "zero": "an endless device",
        "/dev/zero": "a device by its path",
        "pipe": "a pipe",
        "socket": "a socket",
        ".": "the folder itself",
        "": "nothing",
        "a\0b": "a null byte",
        "\ud800": "no character",
        "s3://bucket/file": "a URL",
        "file:/etc/passwd": "a URL of one slash",
        "x" * 5000: "longer than any name",
    }


def test_confined_refuses_whatever_leads_outside_or_never_ends(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in hostile(tmp_path / "in"):
        with pytest.raises(PathError):
            confined(tmp_path / "in", name)


def test_confined_takes_files_inside_by_any_way(tmp_path: Path) -> None:
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "file").write_text("")
    (tmp_path / "in" / "link").symlink_to("file")
    (tmp_path / "also").symlink_to("in")
    for name in ("file", "./file", "below/../file", "link", "new", "below", "below/new", "..a", "a..b", "~", "x" * 200):
        assert confined(tmp_path / "also", name) == tmp_path / "also" / name


def test_a_named_path_is_a_path_alone_where_something_has_the_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr=0.1", "below/lr=0.1", "=", "a\xa0=b"):
        Path(name).mkdir(parents=True)
        assert named_path(name, "RUN") == ("", Path(name))
        assert named_path(f"mine={name}", "RUN") == ("mine", Path(name))
    Path("gone=1").symlink_to("nowhere")
    assert named_path("gone=1", "RUN") == ("", Path("gone=1"))
    assert named_path("lr=0.2", "RUN") == ("lr", Path("0.2"))
    assert named_path("a/b=c", "RUN") == ("", Path("a/b=c"))
    assert named_path("a\0=b", "RUN") == ("a\0", Path("b"))
    for url in ("s3://a=b", "a=s3://b/c"):
        with pytest.raises(PathError, match=r"RUN: 's3://.*is a URL"):
            named_path(url, "RUN")


def test_with_leave_a_file_may_lie_outside_but_still_must_end(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    refused = set()
    for name in hostile(tmp_path / "in"):
        try:
            confined(tmp_path / "in", name, allow_outside=True)
        except PathError:
            refused.add(name)
    assert {"zero", "/dev/zero", "pipe", "socket", "", "a\0b", "circle", "s3://bucket/file"} <= refused
    assert not {f"../{CANARY}/file", "link", "linked/file"} & refused


# --- every path-valued key of a specification ------------------------------------------------------------------------


def places_of_paths(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Where a schema says `format: path`, as keys to follow; `...` is any name."""
    if "$ref" in schema:
        yield from places_of_paths(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if schema.get("format") == "path":
        yield ()
    for branch in schema.get("anyOf", ()):
        yield from places_of_paths(branch, root)
    for key, below in schema.get("properties", {}).items():
        yield from ((key, *rest) for rest in places_of_paths(below, root))
    if isinstance(below := schema.get("additionalProperties"), dict):
        key = next(iter(schema.get("propertyNames", {}).get("enum", ["train"])))
        yield from ((key, *rest) for rest in places_of_paths(below, root))
    if isinstance(below := schema.get("items"), dict):
        yield from ((0, *rest) for rest in places_of_paths(below, root))


PLACES = sorted(set(places_of_paths(json_schema(), json_schema())), key=str)


def test_the_schema_names_the_keys_that_hold_paths() -> None:
    assert {
        ("source_spec", "train", 0, "files", 0),
        ("metadata", "encoders"),
        ("metadata", "vocabularies"),
        ("metadata", "catalogues", "user"),
    } <= set(PLACES)


def with_value(place: tuple[object, ...], value: str) -> dict[str, Any]:
    """A specification with this value at that place."""
    made: dict[str, Any] = {
        "feature_spec": {"label": {}},
        "source_spec": {"train": [{"type": "csv", "features": ["label"], "files": ["t.csv"]}]},
        "channel_spec": {"label": ["label"]},
        "metadata": {},
    }
    at: Any = made
    for key, following in zip(place, (*place[1:], None), strict=True):
        if following is None:
            at[key] = value
        elif isinstance(at, dict):
            at = at.setdefault(key, [] if isinstance(following, int) else {})
        else:
            at = at[key]
    return made


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_no_key_of_a_specification_leads_outside(place: tuple[object, ...], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "t.csv").write_text("0\n1\n")
    (folder / "fine").write_text("0\n1\n")
    FeatureSpec.from_dict(with_value(place, "fine"), folder)
    for name in hostile(folder):
        (folder / FILE_NAME).write_text(yaml.safe_dump(with_value(place, name)), encoding="utf-8", errors="replace")
        with watched() as touched, pytest.raises(RecspecError):
            FeatureSpec.from_dict(with_value(place, name), folder)
        assert not [path for path in touched if CANARY in path]
        if name not in ("\ud800",):  # which YAML's text can't hold
            with pytest.raises(SpecError, match=r"\." + str(place[-2] if isinstance(place[-1], int) else place[-1])):
                FeatureSpec.load(folder)


def test_only_the_specification_reads_the_keys_that_hold_paths() -> None:
    """Whoever took `metadata["encoders"]` and opened it would go round the check."""
    keys = {place[1] for place in PLACES if place[0] == "metadata"}
    sources = Path(paths.__file__).parents[1]
    for file in sources.rglob("*.py"):
        if file.parent.name == "spec":
            continue
        text = file.read_text(encoding="utf-8")
        for key in keys - {"encoders"}:  # whether there are any is asked by many
            for form in (f'metadata.get("{key}")', f'metadata["{key}"]'):
                assert form not in text, f"{file.name}: ask the specification for what {key} names"


def test_training_on_a_hostile_specification_writes_nothing(tmp_path: Path) -> None:
    """The reproduction: `encoders: ../../.bashrc` of a dataset two folders down wrote home/.bashrc."""
    home, evil = tmp_path / "home", tmp_path / "evil" / "a" / "b"
    home.mkdir()
    spec = made_up.interactions(evil, num_rows=300)
    data = {**spec.to_dict(), "metadata": {**spec.metadata, "encoders": "../../.bashrc"}}
    (evil.parents[1] / ".bashrc").write_text("evil")
    (evil / FILE_NAME).write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match=r"metadata.encoders: '../../.bashrc' leads outside the folder"):
        FeatureSpec.load(evil)
    assert list(home.iterdir()) == []


# --- every file of a folder that is opened ---------------------------------------------------------------------------


def replacements(outside: Path) -> dict[str, Callable[[Path], None]]:
    """What may stand in the place of a file."""

    def moved_out(file: Path) -> None:
        target = outside / file.name
        shutil.move(file, target)
        file.symlink_to(target)

    def gone(file: Path) -> None:
        file.unlink()
        file.symlink_to(outside / "gone")

    def endless(file: Path) -> None:
        file.unlink()
        file.symlink_to("/dev/zero")

    def pipe(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    def folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    return {each.__name__: each for each in (moved_out, gone, endless, pipe, folder)}


def replaced(folder: Path, tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Copies of a folder, in each of which one file is replaced: its name, by what, and the copy."""
    outside = tmp_path / CANARY
    outside.mkdir()
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        name = str(file.relative_to(folder))
        for how, replace in replacements(outside).items():
            copied = tmp_path / "copy"
            shutil.copytree(folder, copied)
            replace(copied / name)
            yield name, how, copied
            shutil.rmtree(copied)
            (outside / file.name).unlink(missing_ok=True)


def test_no_file_of_a_bundle_leads_outside_or_hangs(trained: Path, tmp_path: Path) -> None:
    for name, how, copied in replaced(trained, tmp_path):
        with watched() as touched:
            with pytest.raises(RecspecError):
                bundle.load(copied)
            with suppress(RecspecError):  # a side file that nothing asks for may be anything
                predictor = Predictor.open(copied, device="cpu", verify=False)
                predictor.recommend(["1"], k=3)
                assert name == manifest.FILE_NAME, f"{name} ({how}) was taken"
        assert not [path for path in touched if CANARY in path], (name, how)


def test_no_file_of_a_dataset_leads_outside_or_hangs(data: FeatureSpec, tmp_path: Path) -> None:
    for name, how, copied in replaced(data.folder, tmp_path):
        with watched() as touched, suppress(RecspecError):
            spec = FeatureSpec.load(copied)
            check(spec)
            transcode(spec, tmp_path / "out", "csv")
            assert name == PREPARE_FILE, f"{name} ({how}) was taken"
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert not [path for path in touched if CANARY in path], (name, how)


def test_no_checkpoint_leads_outside_or_hangs(tmp_path: Path) -> None:
    import torch

    saved = checkpoint.Checkpoint({"w": torch.zeros(2)}, {}, {"step": 1})
    checkpoint.save(tmp_path / "run", saved, step=1, keep=1)
    for name, how, copied in replaced(tmp_path / "run", tmp_path):
        with watched() as touched, pytest.raises(CheckpointError):
            checkpoint.load_latest(copied)
        assert not [path for path in touched if CANARY in path], (name, how)


def test_no_file_of_an_export_leads_outside_or_hangs(tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    inputs = [{"name": "a", "dtype": "int32", "width": 1, "level": "row", "num_ids": 3, "is_list": False}]
    (export / "export.json").write_text(json.dumps({"signature": {"form": "rows", "inputs": inputs}}))
    (export / "model.onnx").write_text("no program")
    manifest.write(export)
    for name, how, copied in replaced(export, tmp_path):
        for verify in (True, False):
            with watched() as touched, pytest.raises(BundleError):
                open_exported_model(copied, verify=verify)
            assert not [path for path in touched if CANARY in path], (name, how)


def test_a_folder_of_vocabularies_is_copied_without_what_it_links_to(data: FeatureSpec, tmp_path: Path) -> None:
    copied = tmp_path / "data"
    shutil.copytree(data.folder, copied)
    (tmp_path / "secret").write_text(CANARY)
    (copied / "vocabularies" / "more").symlink_to(tmp_path / "secret")
    with pytest.raises(RecspecError, match="'vocabularies/more' leads outside the folder"):
        transcode(FeatureSpec.load(copied), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- names that become paths -----------------------------------------------------------------------------------------

CLIMBING = ("../../evil", "a/../../../evil", "/tmp/recspec-evil")


@pytest.mark.parametrize("name", CLIMBING)
def test_a_vocabulary_s_name_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    encoders = Encoders({"x": VocabularyEncoder(vocabulary=name)}, {name: Vocabulary(pa.array(["a"]))})
    if name.startswith("/"):  # `vocabularies//tmp/x` lies inside
        encoders.save(folder)
        assert list(Encoders.load(folder).vocabularies) == [name]
    else:
        with pytest.raises(PathError, match="leads outside the folder"):
            encoders.save(folder)
        with pytest.raises(DataError, match="leads outside the folder"):
            Encoders.load(folder)
    assert not list(tmp_path.rglob("evil*"))
    assert not Path("/tmp/recspec-evil.parquet").exists()


@pytest.mark.parametrize("name", CLIMBING)
def test_a_split_s_name_stays_in_the_folder(name: str, tmp_path: Path) -> None:
    sources = {name: [{"type": "csv", "features": ["label"], "files": ["t.csv"]}]}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t.csv").write_text("0\n1\n")
    spec = FeatureSpec.from_dict(
        {"feature_spec": {"label": {}}, "source_spec": sources, "channel_spec": {"label": ["label"]}}, tmp_path / "in"
    )
    for write in (lambda out: transcode(spec, out), lambda out: synthesize(spec, out, 5)):
        with pytest.raises(PathError, match="leads outside the folder"):
            write(tmp_path / "deep" / "er" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"], "nothing is left, no folder either"
    assert not Path("/tmp/recspec-evil").exists()


def test_a_column_of_a_table_may_have_a_climbing_name(tmp_path: Path) -> None:
    rows = "\n".join(f"u{n % 7},i{n % 5},{n},v{n % 3}" for n in range(60))
    (tmp_path / "rows.csv").write_text(f"user,item,time,../../evil\n{rows}\n")
    table = DATASETS["table"]
    with suppress(RecspecError):
        settings = table.Settings.model_validate({"user": "user", "item": "item", "categorical": ["../../evil"]})
        table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "deep" / "out"), settings)
    left = {path.name for path in tmp_path.iterdir()} | {path.name for path in (tmp_path / "deep").glob("*")}
    assert left <= {"rows.csv", "deep", "out"}


def test_a_feature_s_name_is_quoted_in_a_configuration_of_triton() -> None:
    from recspec.export import triton_repository
    from recspec.feature_spec.signature import Port

    name = 'x" } parameters { key: "EXECUTION_ENV_PATH'
    ports = (Port(name, "int32", 1, "row", 3),)
    text = triton_repository._config("m", triton_repository.PYTHON, ports, (), triton_repository.Batching())
    (line,) = [line for line in text.splitlines() if line.startswith("input")]
    assert json.loads(line[line.index('"') : line.rindex('"') + 1]) == name


def test_numbers_beside_a_name_that_climbs_are_not_written(tmp_path: Path) -> None:
    from recspec.export.triton_repository import Beside, _write_encoders
    from recspec.feature_spec.signature import Port, Signature

    beside = {"../../../evil": Beside("items", np.zeros(3, np.int32))}
    encoders = Encoders({"items": VocabularyEncoder(vocabulary="items")}, {"items": Vocabulary(pa.array(["a"]))})
    signature = Signature("rows", (Port("items", "int32", 1, "row", 3),))
    (tmp_path / "to" / "1").mkdir(parents=True)
    with pytest.raises(PathError, match="leads outside"):
        _write_encoders(tmp_path / "to" / "1", (), signature, encoders, beside)
    assert not list(tmp_path.rglob("evil*"))


# --- folders that are written to -------------------------------------------------------------------------------------


Settings = Mapping[str, Mapping[str, object]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that nothing may change, with the names that writers know."""
    folder = tmp_path / CANARY
    (folder / "1").mkdir(parents=True)
    for name in ("file", "config.pbtxt", "step-0000000001.safetensors", ".a.tmp", "1/model.onnx"):
        (folder / name).write_text(CANARY)
    return folder


def planted(place: Path, outside: Path) -> Iterator[Path]:
    """`place` as a link to a file, to a folder, and to what is not there yet."""
    for target in ("file", ".", "new"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(outside / target)
        yield place
        if place.is_symlink():
            place.unlink()


def train_in(run: Path, data: FeatureSpec) -> None:
    values = {"epochs": 1, "batch_size": 500, "tensorboard": False, "valid_share": 0.1}
    own = MODELS["neumf"].Settings.model_validate({"factors": 4, "layers": (8, 4)})
    train("neumf", data, run, settings=TrainSettings.model_validate(values), model_settings=own)


def test_training_follows_no_link_that_lies_in_its_folder(data: FeatureSpec, tmp_path: Path, outside: Path) -> None:
    before = contents(outside)
    train_in(tmp_path / "honest", data)
    names = {str(each.relative_to(tmp_path / "honest").parts[0]) for each in (tmp_path / "honest").rglob("*")}
    assert {"bundle", "checkpoints", "log.jsonl"} <= names
    for name in sorted({*names, ".job", ".lock", "tensorboard", "checkpoints/best.safetensors"}):
        for place in planted(tmp_path / "run" / name, outside):
            with pytest.raises((RecspecError, OSError)):
                train_in(tmp_path / "run", data)
            assert contents(outside) == before, (name, place.readlink())
        shutil.rmtree(tmp_path / "run")


def test_a_search_follows_no_link_that_lies_in_its_folder(data: FeatureSpec, tmp_path: Path, outside: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    from recspec.training.search.search_space import Range
    from recspec.training.search.tune import Tuning

    before = contents(outside)
    values: Settings = {"settings": {"factors": 4, "layers": [8, 4]}, "train": {"epochs": 1, "tensorboard": False}}
    for name in ("study.db", "study.db-journal", "study.db-wal", "study.db-shm", "trials", "best", "best.yaml"):
        for place in planted(tmp_path / "search" / name, outside):
            with pytest.raises(PathError, match="leads outside the folder"):
                Tuning("neumf", data, tmp_path / "search", values, {"dropout": Range(0.0, 0.5)}, 1).run()
            assert contents(outside) == before, (name, place.readlink())
        shutil.rmtree(tmp_path / "search")


def test_a_study_can_not_name_a_folder_elsewhere(data: FeatureSpec, tmp_path: Path, outside: Path) -> None:
    """A trial that an ended process left is made again in the folder that the study names, which is emptied first."""
    pytest.importorskip("optuna", reason="the extra `tune` is not installed")
    from recspec.training.search.search_space import Range
    from recspec.training.search.study import Study
    from recspec.training.search.tune import Tuning

    before = contents(outside)
    values: Settings = {"settings": {"factors": 4, "layers": [8, 4]}, "train": {"epochs": 1, "tensorboard": False}}
    for number, name in enumerate((str(outside), f"../../{CANARY}")):
        search = Tuning("neumf", data, tmp_path / f"s{number}", values, {"train.learning_rate": Range(0.001, 0.1)}, 1)
        search.out.mkdir()
        study = Study(search.out, search._identity(), search.space, trials=1, seed=0)
        with study.opened():
            study.study.enqueue_trial({}, user_attrs={"continues": name})
        with pytest.raises(SettingsError, match=r"study.db: damaged: the folder of a trial: .* leads outside"):
            search.run()
        with study.opened():
            study.study.ask().set_user_attr("folder", name)
        with pytest.raises(SettingsError, match=r"study.db: damaged: the folder of a trial: .* leads outside"):
            search.run()
        assert contents(outside) == before
    (tmp_path / "s0" / "study.db").write_text("no study" * 1000)
    with pytest.raises(SettingsError, match=r"study.db: can't be read: file is not a database; name another folder"):
        Tuning("neumf", data, tmp_path / "s0", values, {"train.learning_rate": Range(0.001, 0.1)}, 1).run()


def test_a_repository_s_model_that_is_a_link_is_not_written_to(tmp_path: Path, outside: Path) -> None:
    from recspec.export import triton_repository

    staged, before = tmp_path / "staged", contents(outside)
    for name in ("m/1", "m/2", "m_raw/1"):
        (staged / name).mkdir(parents=True)
        (staged / name / "model.onnx").write_text("new")
        (staged / name).parent.joinpath("config.pbtxt").write_text("new")
    for name in ("m", "m_raw", "m/1", "m/config.pbtxt", "m/1/model.onnx"):
        for _ in planted(tmp_path / "models" / name, outside):
            with pytest.raises(PathError, match="leads outside the folder"):
                triton_repository.move_into(tmp_path / "models", staged)
            assert contents(outside) == before
        shutil.rmtree(tmp_path / "models")
    (tmp_path / "models" / "m" / "²").mkdir(parents=True)  # a digit, and no number
    assert triton_repository.versions(tmp_path / "models" / "m") == []


def test_a_preparation_goes_on_in_no_folder_that_is_a_link_or_another_s(tmp_path: Path, outside: Path) -> None:
    before = contents(outside)
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished.tmp"
    asked = {"dataset": "x"}
    for name in (".out.unfinished.tmp", ".out.unfinished.tmp/work"):
        for _ in planted(tmp_path / name, outside):
            with prepared._resumed(unfinished, out, asked) as folder:
                assert not folder.is_symlink()
                (folder / "work" / "stage").write_text("written")
            assert (contents(outside), contents(out)) == (before, {})
            shutil.rmtree(out)
    (unfinished / "work").mkdir(parents=True)
    (unfinished / "work" / "job.json").write_text(json.dumps(asked))
    (unfinished / "theirs").write_text("another user's")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with prepared._resumed(unfinished, out, asked) as folder:
            assert not (folder / "theirs").exists()
    for _ in planted(unfinished, outside):
        outputs.removed(unfinished)
        assert (unfinished.is_symlink(), contents(outside)) == (False, before)


def test_nobody_can_lay_a_link_under_a_temporary_name(tmp_path: Path, outside: Path) -> None:
    """In a folder that others can write to, a name that can be guessed would be opened through their link."""
    names = {outputs.temporary_name(tmp_path / "out") for _ in range(100)}
    assert len(names) == 100
    assert not [name for name in names if re.search(rf"\.{os.getpid()}\.", name.name)]
    before = contents(outside)
    with pytest.MonkeyPatch.context() as patched:  # and if somebody could
        patched.setattr(secrets, "token_hex", lambda _: "guessed")
        import torch

        for place in planted(tmp_path / ".out.guessed.tmp", outside):
            with pytest.raises(CheckpointError, match="exists"):
                checkpoint.write_tensors(tmp_path / "out", {"w": torch.zeros(1)}, {})
            assert contents(outside) == before, place.readlink()
