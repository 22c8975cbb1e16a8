"""Copies of what lies in stores, and uploads, on a file system of pyarrow that stands for a store."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

import recspec as rs
from recspec.base.errors import DataError
from recspec.base.stores import copies, fetched, parse, shown, store, url_resolver, with_local_paths
from recspec.base.stores.store import STATE, Entry, Store
from recspec.base.stores.url_resolver import Writing
from tests.made_up_events import shop_events, written


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the store `hdfs://host/`; the cache is empty."""
    root = tmp_path / "store"
    root.mkdir()
    monkeypatch.setenv("RECSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_filesystem", lambda _: fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()))
    monkeypatch.setattr(url_resolver, "LOOK", 0.02)
    return root


def put(base: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {name: file.read_text() for name, file in copies.files_of(folder).items()}


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that are read from now on."""
    names: list[str] = []
    before = Store.download

    def download(self: Store, found: dict[str, Entry], *rest: Any) -> None:
        names.extend(found)
        before(self, found, *rest)

    monkeypatch.setattr(Store, "download", download)
    return names


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_folder_is_copied_once_and_under_its_own_name(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(base, {"run/a": "1", "run/below/b.gz": "22", f"run/{STATE}/writers/x": "{}"})
    read_names = reads(monkeypatch)
    first = fetched("hdfs://host/run")
    assert (first.name, read(first)) == ("run", {"a": "1", "below/b.gz": "22"})
    assert fetched("hdfs://host/run/") == first
    assert sorted(read_names) == ["a", "below/b.gz"]
    assert read(fetched("hdfs://host/run/a")) == {"": "1"}
    assert shown(f"{first}/a: damaged, see {first}") == "hdfs://host/run/a: damaged, see hdfs://host/run"


def test_changed_content_makes_another_copy_and_the_old_one_stays_while_it_is_used(base: Path) -> None:
    put(base, {"run/a": "1", "run/b": "2"})
    first = fetched("hdfs://host/run")
    put(base, {"run/a": "new"})
    (base / "run/b").unlink()
    second = fetched("hdfs://host/run")
    assert (read(first), read(second)) == ({"a": "1", "b": "2"}, {"a": "new"})


def test_a_copy_that_nobody_uses_makes_room_for_a_newer_one(base: Path) -> None:
    put(base, {"run/a": "1"})
    old = copies.place_of(parse("hdfs://host/run", "x")) / "0123456789abcdef"
    put(old, {"run/a": "0", "origin.json": json.dumps({"objects": {"a": [1, "0"]}}), "uses/1-0": ""})
    fetched("hdfs://host/run")
    assert not old.exists()


def test_what_an_earlier_try_read_is_not_read_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(base, {"run/a": "1", "run/b": "2"})
    before = Store._reading
    failing = {"b"}

    def reading(self: Store, name: str) -> Any:
        if name in failing:
            raise OSError("the connection is lost")
        return before(self, name)

    monkeypatch.setattr(Store, "_reading", reading)
    monkeypatch.setattr(store, "AT_ONCE", 1)
    with pytest.raises(DataError, match=r"hdfs://host/run: can't be read: the connection is lost; check the name"):
        fetched("hdfs://host/run")
    failing.clear()
    names = reads(monkeypatch)
    assert read(fetched("hdfs://host/run")) == {"a": "1", "b": "2"}
    assert names == ["b"]


def test_processes_that_want_the_same_copy_make_it_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(base, {"run/a": "1" * 1000})
    names, found = reads(monkeypatch), set[Path]()
    threads = [threading.Thread(target=lambda: found.add(fetched("hdfs://host/run"))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(found), names) == (1, ["a"])


def test_nothing_and_half_of_something_are_refused(base: Path) -> None:
    with pytest.raises(DataError, match=r"DATA: hdfs://host/none holds nothing; check the name"):
        fetched("hdfs://host/none", "DATA")
    put(base, {"run/bundle/a": "1", f"run/{STATE}/unfinished.json": "[]"})
    for name in ("run", "run/bundle", "run/bundle/a"):
        with pytest.raises(DataError, match=r"hdfs://host/run: its writer has not finished; wait for it, or repeat"):
            fetched(f"hdfs://host/{name}")


def test_a_folder_that_changes_all_the_time_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(base, {"run/a": "1"})
    before, times = Store.download, iter(range(10))

    def download(self: Store, *given: Any) -> None:
        before(self, *given)
        put(base, {"run/a": f"{next(times)} again"})

    monkeypatch.setattr(Store, "download", download)
    with pytest.raises(DataError, match="changed while it was read, 3 times"):
        fetched("hdfs://host/run")


def test_a_full_disk_is_told_before_anything_is_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(base, {"run/a": "1" * 100})
    monkeypatch.setattr(copies, "free_bytes", lambda _: 99)
    with pytest.raises(DataError, match=r"hdfs://host/run: takes 100 bytes, and the disk of .* has 99; name a larger"):
        fetched("hdfs://host/run")


# --- content that changes during a read ------------------------------------------------------------------------------


class Opened(io.BytesIO):
    """An object with the entity tag that it had when it was opened."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.tag = hashlib.md5(content, usedforsecurity=False).hexdigest().encode()

    def metadata(self) -> dict[bytes, bytes]:
        return {b"ETag": self.tag}


class Tagged:
    """A store of objects with entity tags, whose times have a second's resolution; `steps` happen at each read."""

    def __init__(self, objects: dict[str, bytes], *steps: Callable[[Tagged], None]) -> None:
        self.objects, self.steps, self.time = objects, list(steps), 1

    def get_file_info(self, asked: Any) -> list[fs.FileInfo]:
        if isinstance(asked, list):
            return [fs.FileInfo(each, fs.FileType.NotFound) for each in asked]
        return [
            fs.FileInfo(f"bucket/x/{name}", fs.FileType.File, size=len(content), mtime_ns=self.time * 10**9)
            for name, content in self.objects.items()
        ]

    def open_input_file(self, path: str) -> Any:
        return Opened(self.objects[path.removeprefix("bucket/x/")])

    def open_input_stream(self, path: str, **_: None) -> Any:
        before, self.steps = self.steps, []
        for step in before:
            step(self)
        found = self.open_input_file(path)
        for step in self.steps:
            step(self)
        self.steps = []
        return found


def wrong_for_a_moment(held: Tagged) -> None:
    """Other content of the same size, until it was opened."""
    held.objects["a"] = b"wrong"
    held.steps.append(lambda held: held.objects.update(a=b"right"))


def of_tagged(held: Tagged) -> dict[str, str]:
    return read(copies.copied(Store(parse("s3://bucket/x", "x"), held), "DATA"))


@pytest.mark.usefixtures("base")
def test_content_that_was_there_for_a_moment_is_not_kept_as_what_was_listed() -> None:
    assert of_tagged(Tagged({"a": b"right"}, wrong_for_a_moment)) == {"a": "right"}
    assert of_tagged(Tagged({"a": b"right"})) == {"a": "right"}


@pytest.mark.usefixtures("base")
def test_a_copy_is_whole_only_if_a_second_look_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = Store.download, Tagged({"a": b"right"})

    def download(self: Store, *given: Any) -> None:
        before(self, *given)
        held.objects["a"] = b"wrong"  # and what was read may have been of either

    monkeypatch.setattr(Store, "download", download)
    assert of_tagged(held) == {"a": "wrong"}
    monkeypatch.setattr(Store, "download", before)
    held.objects["a"] = b"right"
    names = reads(monkeypatch)
    assert of_tagged(held) == {"a": "right"}
    assert names == ["a"], "nothing of the first look is kept"


def test_content_that_is_put_back_has_another_time(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = Store.download, Tagged({"a": b"right"})

    def download(self: Store, *given: Any) -> None:
        before(self, *given)
        monkeypatch.undo()
        held.time += 1

    monkeypatch.setattr(Store, "download", download)
    monkeypatch.setenv("RECSPEC_CACHE", str(base.parent / "cache"))
    assert of_tagged(held) == {"a": "right"}
    (copy,) = [each for each in copies.place_of(parse("s3://bucket/x", "x")).iterdir() if each.is_dir()]
    listed = copies.listing_of(copy)
    assert listed is not None
    assert listed["a"].version.endswith(" time 2000000000")


@pytest.mark.usefixtures("base")
def test_an_object_whose_tag_is_never_the_listed_one_is_refused() -> None:
    held = Tagged({"a": b"right"})
    held.open_input_stream = lambda *_, **__: Opened(b"wrong")  # type: ignore[method-assign]
    with pytest.raises(DataError, match="s3://bucket/x: the object 'a' was replaced while it was read: try again"):
        of_tagged(held)


# --- hostile stores --------------------------------------------------------------------------------------------------


class Hostile:
    """A store that lists what it likes; every object holds four bytes."""

    def __init__(self, *named: tuple[str, int | None]) -> None:
        self.named = named

    def get_file_info(self, asked: Any) -> list[fs.FileInfo]:
        if isinstance(asked, list):
            return [fs.FileInfo(each, fs.FileType.NotFound) for each in asked]
        kind = fs.FileType.File
        return [fs.FileInfo(f"bucket/x/{name}", kind, size=size, mtime_ns=1) for name, size in self.named]

    def open_input_file(self, _: str) -> Any:
        import pyarrow as pa

        return pa.BufferReader(b"four")

    def open_input_stream(self, path: str, **_: None) -> Any:
        return self.open_input_file(path)


def hostile(*named: tuple[str, int | None]) -> Store:
    return Store(parse("s3://bucket/x", "x"), Hostile(*named))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["../../etc/passwd"], r"the object '\.\./\.\./etc/passwd' holds the part '\.\.'"),
        (["a", "b/../../c"], r"the object 'b/\.\./\.\./c' holds the part '\.\.'"),
        (["/etc/passwd"], "holds the part ''"),
        (["a//b"], "holds the part ''"),
        (["a\\..\\b"], "holds a backslash"),
        (["a\0b"], "can't be printed"),
        (["a\x1b[2Jb"], "can't be printed"),
        (["x" * 300], "a part longer than 255 bytes"),
        (["/".join(["x" * 100] * 20)], "is longer than 1,024 bytes"),
        (["a", "a/b"], "'a' is an object and a folder at once"),
        (["../a"] * 1, "s3://bucket/x: can't be copied"),
    ],
)
def test_names_that_lead_elsewhere_are_refused_before_anything_is_read(
    base: Path, names: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        copies.copied(hostile(*((name, 4) for name in names)), "DATA")
    assert not list(base.parent.rglob("passwd"))


@pytest.mark.usefixtures("base")
def test_sizes_that_lie_are_refused() -> None:
    for size in (3, 5, 1 << 30):
        with pytest.raises(DataError, match=rf"the object 'a' is not {size:,} bytes, as the store says"):
            copies.copied(hostile(("a", size)), "DATA")
    for unknown in (-1, None):
        with pytest.raises(DataError, match="the object 'a' has no size"):
            copies.copied(hostile(("a", unknown)), "DATA")
    assert read(copies.copied(hostile(("a", 4)), "DATA")) == {"a": "four"}


@pytest.mark.usefixtures("base")
def test_very_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_OBJECTS", 3)
    with pytest.raises(DataError, match=r"holds 4 objects; at most 3 are read: name a folder in it"):
        copies.copied(hostile(*((str(each), 4) for each in range(4))), "DATA")


@pytest.mark.usefixtures("base")
def test_an_error_of_the_store_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    failing = hostile()
    monkeypatch.setattr(Hostile, "get_file_info", lambda *_: (_ for _ in ()).throw(OSError("bad key very-secret!")))
    with pytest.raises(DataError, match=r"s3://bucket/x: can't be listed: bad key \*\*\*!; check .* credentials"):
        failing.listing()


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to stores and removed, in order."""
    done: list[str] = []
    writing_, delete = Store._writing, Store.delete

    def write(self: Store, name: str) -> Any:
        done.append(name)
        return writing_(self, name)

    def remove(self: Store, name: str) -> None:
        done.append(f"-{name}")
        delete(self, name)

    monkeypatch.setattr(Store, "_writing", write)
    monkeypatch.setattr(Store, "delete", remove)
    return done


def test_readers_see_a_dataset_when_all_of_it_is_there(base: Path, order: list[str]) -> None:
    put(base, {"data/train/old": "0", "data/prepare.json": "{}"})
    with with_local_paths("prepare", {"out": "hdfs://host/data", "engine": "duckdb"}) as changed:
        out = Path(str(changed["out"]))
        assert read(out) == {"train/old": "0", "prepare.json": "{}"}
        (out / "train/old").unlink()
        put(out, {"prepare.json": '{"a": 1}', "feature_spec.yaml": "x", "train/part": "1", "zzz": "1"})
        with pytest.raises(DataError, match=r"hdfs://host/data: process \d+ on .* is writing there; wait for it"):
            with_local_paths("prepare", {"out": "hdfs://host/data"}).__enter__()
    assert list(changed) == ["out"]
    kept = [each for each in order if "writers" not in each]
    unfinished = f"{STATE}/unfinished.json"
    assert kept == [
        unfinished,
        "train/part",
        "zzz",
        "feature_spec.yaml",
        "prepare.json",
        "-train/old",
        f"-{unfinished}",
    ]
    assert not [each for each in (base / "data" / STATE).rglob("*") if each.is_file()]


def test_a_writer_that_failed_leaves_the_store_as_it_was(base: Path) -> None:
    put(base, {"data/a": "1"})

    def prepare() -> None:
        with with_local_paths("prepare", {"out": "hdfs://host/data"}) as changed:
            out = Path(str(changed["out"]))
            put(out, {"a": "2"})
            raise DataError(f"{out}/a: is wrong")

    with pytest.raises(DataError, match=r"hdfs://host/data/a: is wrong"):
        prepare()
    assert read(fetched("hdfs://host/data")) == {"a": "1"}


def test_a_dataset_that_was_half_written_is_written_anew_and_foreign_objects_stay(base: Path) -> None:
    put(base, {"data/a": "half", f"data/{STATE}/unfinished.json": '["a", "b"]'})
    with with_local_paths("prepare", {"out": "hdfs://host/data"}) as changed:
        out = Path(str(changed["out"]))
        assert not out.exists()
        put(out, {"b": "2"})
    assert read(fetched("hdfs://host/data")) == {"b": "2"}
    put(base, {"other/mine": "!", f"other/{STATE}/unfinished.json": '["a"]'})
    with pytest.raises(DataError, match=r"hdfs://host/other: holds 'mine', which no writer of recspec left"):
        with_local_paths("prepare", {"out": "hdfs://host/other"}).__enter__()


def test_a_run_goes_up_while_it_grows_and_another_machine_continues_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import sys, time
from pathlib import Path
from pyarrow import fs
from recspec.base.stores import store, url_resolver, with_local_paths
store._filesystem = lambda _: fs.SubTreeFileSystem(sys.argv[1], fs.LocalFileSystem())
url_resolver.LOOK = 0.02
with with_local_paths("train", {"run": "hdfs://host/run"}) as changed:
    out = Path(str(changed["run"]))
    (out / "checkpoints").mkdir(parents=True)
    (out / "log.jsonl").write_text("1")
    (out / "checkpoints/step-1").write_text("one")
    time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(base)])
    wait_for(base / "run/checkpoints/step-1")
    wait_for(base / "run/log.jsonl")
    process.kill()
    process.wait()
    with pytest.raises(DataError, match="its writer has not finished"):
        fetched("hdfs://host/run")
    monkeypatch.setenv("RECSPEC_CACHE", str(tmp_path / "another machine"))
    with with_local_paths("train", {"run": "hdfs://host/run"}) as changed:  # the first writer is known to be dead
        out = Path(str(changed["run"]))
        assert read(out) == {"log.jsonl": "1", "checkpoints/step-1": "one"}
        put(out, {"checkpoints/step-2": "two"})
        (out / "checkpoints/step-1").unlink()
        wait_for(base / "run/checkpoints/step-2")
        put(out, {"bundle/manifest.json": "{}"})
    assert set(read(fetched("hdfs://host/run"))) == {"log.jsonl", "checkpoints/step-2", "bundle/manifest.json"}


def wait_for(file: Path) -> None:
    """Until a file is there and whole."""
    for _ in range(6000):
        if file.is_file() and file.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{file} did not come")


def test_a_writer_that_stood_still_while_another_one_took_over_writes_no_more(
    base: Path,
) -> None:
    slow = Writing(Store(parse("hdfs://host/run", "x")), keeps=True)
    slow.lock()
    put(slow.path, {"a": "slow"})
    lock = base / "run" / STATE / "writers" / slow.token
    os.utime(lock, (1, 1))  # it was not renewed for long
    other = Writing(Store(parse("hdfs://host/run", "x")), keeps=True)
    other.lock()
    assert not lock.exists()
    slow._beaten -= 1000
    with pytest.raises(DataError, match="this process stood still for 90 s, and another one writes there now"):
        slow.finish()
    with pytest.raises(DataError, match="another one writes there now"):
        slow.finish()
    assert not (base / "run/a").exists()


def test_what_an_evaluation_adds_to_a_run_goes_to_the_store(base: Path) -> None:
    put(base, {"run/bundle/a": "1", "run/run.json": "{}"})
    copy = fetched("hdfs://host/run")
    with with_local_paths(
        "evaluate", {"run": "hdfs://host/run", "data": "here", "against": ["hdfs://host/run"]}
    ) as changed:
        assert [Path(each).name for each in changed["against"]] == ["run"]  # type: ignore[attr-defined]
        put(Path(str(changed["run"])), {"evaluations/test.json": "x"})
    assert (base / "run/evaluations/test.json").read_text() == "x"
    assert read(copy) == {"bundle/a": "1", "run.json": "{}"}  # copies do not change


def test_a_file_is_written_as_one_object(base: Path, order: list[str]) -> None:
    with with_local_paths("predict", {"run": "here", "out": "hdfs://host/x/scores.csv"}) as changed:
        Path(str(changed["out"])).write_text("a,b")
    assert ((base / "x/scores.csv").read_text(), order) == ("a,b", [""])


def test_a_served_model_follows_the_store(base: Path) -> None:
    put(base, {"run/bundle/a": "1", "plain/a": "0"})
    with with_local_paths(
        "serve", {"models": ["mine=hdfs://host/run", "hdfs://host/run/bundle"], "watch": 0}
    ) as changed:
        assert [each.partition("=")[0] for each in changed["models"]] == ["mine", "run"]  # type: ignore[attr-defined]
    target, end = base.parent / "served", threading.Event()
    source = Store(parse("hdfs://host/run", "x"))
    copy = copies.copied(source, "x")
    copies.clone(copy, target, linked=True)
    put(base, {"run/bundle/a": "first"})  # before anyone looks
    url_resolver.follow(source, target, copy, 0.02, end.is_set)
    put(base, {"run/bundle/a": "second"})
    for _ in range(6000):
        if (target / "bundle/a").is_file() and (target / "bundle/a").read_text() == "second":
            break
        time.sleep(0.01)
    end.set()
    assert read(target) == {"bundle/a": "second"}


@pytest.mark.usefixtures("base")
def test_secrets_of_a_machine_are_local() -> None:
    with pytest.raises(DataError, match=r"token_file: hdfs://host/t is a URL; expected a local file"):
        with_local_paths("serve", {"models": [], "token_file": "hdfs://host/t"}).__enter__()


def test_a_specification_is_read_with_the_files_beside_it(base: Path) -> None:
    put(base, {"data/feature_spec.yaml": "x", "data/train/a": "1"})
    with with_local_paths("train", {"data": "hdfs://host/data/feature_spec.yaml"}) as changed:
        spec = Path(str(changed["data"]))
        assert (spec.name, (spec.parent / "train/a").read_text()) == ("feature_spec.yaml", "1")


def test_a_url_of_this_machine_is_its_path(tmp_path: Path) -> None:
    with with_local_paths("train", {"data": f"file://{tmp_path}/a", "run": f"file://{tmp_path}/run"}) as changed:
        assert changed == {"data": str(tmp_path / "a"), "run": str(tmp_path / "run")}


def test_local_arguments_change_nothing(tmp_path: Path) -> None:
    with with_local_paths(
        "train", {"data": tmp_path, "run": "C:\\x", "recipe": None, "models": ["a=b", "s3:/x"]}
    ) as changed:
        assert changed == {}


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Let go of the copies that a test used."""
    yield
    while copies._USED:
        copies._USED.pop().release()


def test_a_run_is_updated_from_the_dataset_in_the_store_that_it_was_trained_on(base: Path, tmp_path: Path) -> None:
    known, new = shop_events()
    events = [written(tmp_path / f"{at}.csv", new.slice(at, 45)) for at in (0, 45)]
    columns = {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "item_features": ["kind"]}
    rs.prepare(written(tmp_path / "rows.csv", known), "hdfs://host/data", settings=columns, progress=False)
    rs.train("popularity", "hdfs://host/data", "hdfs://host/run", progress=False)
    for number, file in enumerate(events, 1):
        assert rs.update("hdfs://host/run", file, progress=False).to_dict()["counts"]["events"] == 45
        assert (base / f"run/updates/000{number}/bundle/bundle.json").is_file()
    model = rs.open("hdfs://host/run")
    again = shop_events()[1].slice(0, 1).set_column(0, "user_id", pa.array(["a new one"]))
    assert model.update(again, progress=False).to_dict()["counts"]["users"] == 1
    assert model.recommend(["a new one"], k=3).num_rows
    assert (base / "run/updates/0003/bundle/bundle.json").is_file()
    with pytest.raises(DataError, match="holds the events of this file already"):
        rs.update("hdfs://host/run", events[0], progress=False)
    assert not (base / "run/updates/0004").exists()
    data = rs.open("hdfs://host/run").data
    assert data is not None
    assert data.spec.num_ids("user_id") > 40
