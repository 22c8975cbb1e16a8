"""A server answers from private copies: nothing that happens to a model's files afterwards changes an answer."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from recspec.base.errors import BundleError
from recspec.bundle import folder as bundle
from recspec.inference import Predictor, RecommendRequest
from recspec.serving import model_folders
from recspec.serving.model_folders import LinkedCopies, OwnCopies, PrivateCopy, SharedCopies, Source, copy_version
from recspec.serving.opened_model import open_version
from recspec.serving.repository import Repository
from recspec.serving.settings import RepositorySettings
from tests.film_runs import film_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return film_runs(tmp_path_factory.mktemp("copies"), {"ease": {"l2": 5.0}})["ease"]


@pytest.fixture
def films(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.find(run), tmp_path / "films"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which servers make their copies."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(model_folders.tempfile, "gettempdir", lambda: str(folder))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def zeros(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(0)


@pytest.mark.parametrize("change", [zeros, cut, Path.unlink])
async def test_changed_files_change_no_answer_also_where_they_are_read_late(
    films: Path, temporary: Path, change: Callable[[Path], None]
) -> None:
    wanted = RecommendRequest(
        users=("u3",), k=5, filter="kind == 'a' or title contains '1'"
    )  # columns are read when asked for
    expected = Predictor.open(films).recommend(wanted)

    kept = Repository([Source("films", films)], settings=RepositorySettings(watch=0))
    await kept.start()
    try:
        for file in [each for each in films.rglob("*") if each.is_file()]:
            change(file)
        await kept.look()
        predictor = kept.endpoint("films").model.opened.predictor
        assert predictor is not None
        assert predictor.recommend(wanted) == expected
    finally:
        await kept.close()
    assert list(temporary.iterdir()) == []


def test_what_is_compared_is_what_was_copied(films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_version(films, tmp_path / "copy", verify=True)
    assert content(copy.folder) == content(films)
    assert (copy.origin, copy.export) == (films, None)
    compared = model_folders.manifest._digest

    def changing(file: Path, to: Path | None = None) -> str:
        found = compared(file, to)
        if file.name == "weights.safetensors":
            cut(file)  # right after it was read
        return found

    monkeypatch.setattr(model_folders.manifest, "_digest", changing)
    whole = content(films)
    assert content(copy_version(films, tmp_path / "second", verify=True).folder) == whole
    with pytest.raises(BundleError, match=r"films: .*'weights.safetensors' was changed"):
        copy_version(films, tmp_path / "third", verify=True)
    assert not (tmp_path / "third").exists()


def test_without_a_comparison_files_are_copied_as_they_are(films: Path, tmp_path: Path) -> None:
    (films / "bundle.json").write_text("{}")
    (films / "manifest.json").unlink()
    assert content(copy_version(films, tmp_path / "copy", verify=False).folder) == content(films)


def test_a_disk_without_room_is_named(films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=17))
    told = r"films: its copy takes [\d,]+ bytes, and .* has 17; name a larger TMPDIR"
    with pytest.raises(BundleError, match=told):
        copy_version(films, tmp_path / "copy", verify=True)


def test_messages_name_the_files_that_were_copied(films: Path, temporary: Path) -> None:
    (films / "bundle.json").write_text("[")
    settings = RepositorySettings(watch=0, verify=False)

    async def body() -> str:
        kept = Repository([Source("films", films)], settings=settings)
        with pytest.raises(BundleError) as caught:
            await kept.start()
        return str(caught.value)

    told = asyncio.run(body())
    assert str(films / "bundle.json") in told
    assert str(temporary) not in told


def test_a_copy_is_removed_with_the_last_use_of_what_was_opened(films: Path, tmp_path: Path) -> None:
    copy = copy_version(films, tmp_path / "copy", verify=True)
    opened = open_version(copy, (), RepositorySettings())
    gc.collect()
    assert copy.folder.is_dir()
    del opened
    gc.collect()
    assert not copy.place.exists()


async def test_the_supervisor_copies_content_once_and_keeps_the_last_good_one(films: Path, temporary: Path) -> None:
    held = SharedCopies(verify=True)
    first = await held.answer("films", 1, films, is_new=True)
    assert await held.answer("films", 1, films, is_new=False) == first
    weights = (films / "weights.safetensors").read_bytes()
    cut(films / "weights.safetensors")
    with pytest.raises(BundleError, match="was changed"):
        await held.answer("films", 1, films, is_new=False)
    stale = await held.answer("films", 1, films, is_new=True)
    assert stale["place"] == first["place"]
    assert "'weights.safetensors' was changed" in str(stale["problem"])
    (films / "weights.safetensors").write_bytes(weights)
    third = await held.answer("films", 1, films, is_new=False)
    assert third["place"] != first["place"]
    assert third["problem"] == ""
    assert not Path(str(first["place"])).exists()
    films.rename(films.with_name("gone"))
    with pytest.raises(BundleError, match="no such folder"):
        await held.answer("films", 1, films, is_new=True)
    assert not Path(str(third["place"])).exists()
    held.close()
    assert list(temporary.iterdir()) == []


def test_a_copy_that_is_replaced_while_a_worker_links_its_files_is_asked_for_again(films: Path, tmp_path: Path) -> None:
    whole = copy_version(films, tmp_path / "second", verify=True)
    gone = {**whole.to_dict(), "place": str(tmp_path / "gone"), "problem": ""}

    async def of(*answers: dict[str, object]) -> PrivateCopy:
        left = list(answers)

        async def ask(what: str, _: object = None) -> dict[str, object]:
            assert what == "copy"
            return left.pop(0)

        copies = LinkedCopies(ask, 1)
        return (await copies.of("films", 1, films, is_new=True))[0]

    found = asyncio.run(of(gone, gone, {**whole.to_dict(), "problem": ""}))
    assert (content(found.folder), found.origin) == (content(films), films)
    with pytest.raises(FileNotFoundError):
        asyncio.run(of(gone, gone, gone))
    assert sorted(each.name for each in tmp_path.glob("gone*")) == []


async def test_folders_of_killed_servers_are_removed_and_those_of_others_stay(films: Path, temporary: Path) -> None:
    (temporary / "recspec-serve-killed" / "x").mkdir(parents=True)
    (temporary / ".recspec-serve-killed.lock").touch()  # which no process holds
    (temporary / "recspec-serve-file").write_text("of somebody else")

    one, two = OwnCopies(verify=True), OwnCopies(verify=True)
    first, _ = await one.of("films", 1, films, is_new=True)
    second, _ = await two.of("films", 1, films, is_new=True)
    assert first.folder.is_dir()
    assert second.folder.is_dir()
    one.close()
    two.close()
    assert [each.name for each in temporary.iterdir()] == ["recspec-serve-file"]
