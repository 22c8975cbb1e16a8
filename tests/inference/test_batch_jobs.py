"""Batch jobs: shards, going on after a kill, refusals, engines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recspec.base.errors import DataError, RequestError, SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.inference import batch_jobs, batch_shards
from recspec.inference.answer_files import predict_file, recommend_to_file
from recspec.inference.batch_jobs import Counts, How, predict_shards, recommend_shards
from recspec.inference.batch_shards import (
    Done,
    Job,
    Shard,
    ShardWriter,
    Work,
    count_users,
    read_bytes_of_users,
    rows_of,
    shards_of,
)
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from tests.closeness import assert_close

SMALL = How(shard_size=7)


def whole(out: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted(out.glob("part-*.parquet"))])


def one_file(predictor: Predictor, file: Path, wanted: RecommendRequest, users: list[str] | None = None) -> pa.Table:
    recommend_to_file(predictor, users, file, wanted)
    return pq.read_table(file)


def assert_same(ours: pa.Table, theirs: pa.Table) -> None:
    names = [name for name in theirs.column_names if name != "score"]
    assert ours.select(names).to_pylist() == theirs.select(names).to_pylist()
    assert_close(ours["score"].to_numpy(), theirs["score"].to_numpy())


def quiet(text: str) -> None:
    del text


@pytest.mark.parametrize("name", ["films", "ials", "ease", "past"])
def test_shards_hold_what_one_file_holds(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    predictor: Predictor = request.getfixturevalue(name)
    wanted = RecommendRequest(k=5)
    counts = recommend_shards(predictor, None, tmp_path / "out", wanted, SMALL, note=quiet)
    users = len(predictor.users)
    assert counts == Counts(users, 0, -(-users // 7), 0)
    assert_same(whole(tmp_path / "out"), one_file(predictor, tmp_path / "one.parquet", wanted))
    assert pq.read_table(tmp_path / "out").num_rows == whole(tmp_path / "out").num_rows  # as a folder of Parquet files
    left = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert left == ["_job.json", *(f"part-{number:05}.parquet" for number in range(counts.shards))]


def test_shards_filter_exclude_and_vary_as_recommend_does(ials: Predictor, tmp_path: Path) -> None:
    kind = ials.recommender.chooser.raw.column("kind")[0].as_py()
    for place, wanted in enumerate(
        [
            RecommendRequest(k=4, filter=f"kind == '{kind}'"),
            RecommendRequest(k=4, exclude=("101", "102"), include_seen=True),
            RecommendRequest(k=4, diversity=0.5),
            RecommendRequest(k=4, boosts=(f"kind == '{kind}': 1.5",)),
            RecommendRequest(k=30),
        ]
    ):
        out = tmp_path / f"out{place}"
        recommend_shards(ials, None, out, wanted, SMALL, note=quiet)
        assert_same(whole(out), one_file(ials, tmp_path / f"{place}.parquet", wanted))


def test_users_of_a_file_are_answered_in_its_order_and_unknown_ones_are_counted(
    films: Predictor, tmp_path: Path
) -> None:
    names = [f"u{number}" for number in range(12)] + ["nobody", "né", "u3"]
    (tmp_path / "users.txt").write_text("\n\n".join(names) + "\n\n", encoding="utf-8")
    counts = recommend_shards(films, tmp_path / "users.txt", tmp_path / "out", RecommendRequest(k=3), SMALL, note=quiet)
    assert counts == Counts(15, 2, 3, 0)
    assert_same(whole(tmp_path / "out"), one_file(films, tmp_path / "one.parquet", RecommendRequest(k=3), names))


def test_a_file_without_users_gives_one_shard_with_the_columns(films: Predictor, tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("\n")
    counts = recommend_shards(films, tmp_path / "users.txt", tmp_path / "out", RecommendRequest(), SMALL, note=quiet)
    assert counts == Counts(0, 0, 1, 0)
    assert whole(tmp_path / "out").column_names == ["user", "known", "rank", "item", "title", "score"]


@settings(max_examples=30)
@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"))), size=st.integers(1, 5))
def test_users_of_all_shards_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    file = tmp_path_factory.mktemp("users") / "users.txt"
    file.write_text("\n".join(lines), encoding="utf-8", newline="")
    users = [line.encode().strip().decode() for line in lines if line.encode().strip()]
    job = Job(
        answers="recommendations",
        model="",
        input={"users": str(file)},
        settings={},
        count=count_users(file),
        shard_size=size,
    )
    parts = [read_bytes_of_users(file, shard.start, shard.stop) for shard in shards_of(job)]
    assert [user for part in parts for user in part] == users
    assert len(parts) == job.num_shards
    assert all(len(part) == size for part in parts[:-1])


def test_scores_of_a_parquet_file_and_of_a_split(predictor: Predictor, raw: Path, tmp_path: Path) -> None:
    rows = pa.table({"user_id": [f"u{n % 40}" for n in range(50)], "item_id": [100 + n % 30 for n in range(50)]})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=8)
    counts = predict_shards(predictor, tmp_path / "rows.parquet", tmp_path / "out", How(shard_size=12))
    assert counts == Counts(50, 0, 5, 0)
    predict_file(predictor, tmp_path / "rows.parquet", tmp_path / "one.parquet")
    one = pq.read_table(tmp_path / "one.parquet")
    assert whole(tmp_path / "out").select(["user_id", "item_id"]).equals(one.select(["user_id", "item_id"]))
    assert_close(whole(tmp_path / "out")["score"].to_numpy(), one["score"].to_numpy())
    spec = FeatureSpec.load(raw.parent / "data")
    found = predict_shards(predictor, spec, tmp_path / "split", How(shard_size=100), split="test")
    assert found.count == len(whole(tmp_path / "split"))
    assert found.shards == -(-found.count // 100)


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 30), min_size=2, max_size=2), group=st.integers(1, 9))
def test_rows_of_any_range_are_found(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], group: int) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"n": range(25)}), file, row_group_size=group)
    start, stop = sorted(cuts)
    found = [n for table in rows_of(file, start, stop) for n in table["n"].to_pylist()]
    assert found == list(range(25))[start:stop]


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_with_the_shards_that_are_not_there(films: Predictor, tmp_path: Path) -> None:
    out, notes = tmp_path / "out", list[str]()
    first = recommend_shards(films, None, out, RecommendRequest(k=3), SMALL, note=quiet)
    before = whole(out)
    (out / "part-00002.parquet").unlink()
    (out / ".part-00002.parquet.0123456789abcdef.tmp").write_bytes(b"half")
    kept = {file.name: file.stat().st_mtime_ns for file in out.glob("part-*")}
    again = recommend_shards(films, None, out, RecommendRequest(k=3), SMALL, note=notes.append)
    assert (again.count, again.shards, again.kept) == (first.count, first.shards, first.shards - 1)
    assert notes == [f"{out}: 5 of 6 shards are there; the job goes on with the others"]
    assert whole(out).equals(before)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert not list(out.glob(".part*"))
    assert recommend_shards(films, None, out, RecommendRequest(k=3), SMALL).kept == 6


def test_another_job_is_refused(films: Predictor, ials: Predictor, tmp_path: Path) -> None:
    out = tmp_path / "out"
    recommend_shards(films, None, out, RecommendRequest(k=3), SMALL)
    before = whole(out)
    message = (
        r"(?s)^.*out: holds the answers of another job; name another folder, or remove this one.*"
        r"settings.k is 4, and was 3"
    )
    with pytest.raises(SettingsError, match=message):
        recommend_shards(films, None, out, RecommendRequest(k=4), SMALL)
    with pytest.raises(SettingsError, match=r"shard_size is 8, and was 7"):
        recommend_shards(films, None, out, RecommendRequest(k=3), How(shard_size=8))
    with pytest.raises(SettingsError, match=r"model is '[0-9a-f]{64}', and was '[0-9a-f]{64}'"):
        recommend_shards(ials, None, out, RecommendRequest(k=3), SMALL)
    (tmp_path / "users.txt").write_text("u1\n")
    with pytest.raises(SettingsError, match=r"input.all is not given, and was True"):
        recommend_shards(films, tmp_path / "users.txt", out, RecommendRequest(k=3), SMALL)
    assert whole(out).equals(before)


def test_a_file_of_users_that_was_written_again_is_another_job(films: Predictor, tmp_path: Path) -> None:
    users, out = tmp_path / "users.txt", tmp_path / "out"
    users.write_text("u1\n")
    recommend_shards(films, users, out, RecommendRequest(k=3), SMALL)
    os.utime(users, ns=(1, 1))
    with pytest.raises(SettingsError) as raised:
        recommend_shards(films, users, out, RecommendRequest(k=3), SMALL)
    assert str(raised.value).endswith("the input file was written again since")
    (tmp_path / "others.txt").write_text("u2\nu3\n")
    for another in (tmp_path / "others.txt", None):  # nobody wrote the file again, and nanoseconds tell nothing
        with pytest.raises(SettingsError) as raised:
            recommend_shards(films, another, out, RecommendRequest(k=3), SMALL)
        assert "input.users is " in str(raised.value)
        assert "written again" not in str(raised.value)
        assert "modified" not in str(raised.value)


def test_a_job_that_fails_before_its_first_shard_leaves_the_folder_to_another(
    films: Predictor, ials: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DataError("of the first shard")

    with monkeypatch.context() as broken:
        broken.setattr(batch_jobs, "write_here", fail)
        with pytest.raises(DataError, match="of the first shard"):
            recommend_shards(ials, None, tmp_path / "out", RecommendRequest(k=3), SMALL, note=quiet)
    assert list((tmp_path / "out").glob("[!.]*")) == []
    assert recommend_shards(films, None, tmp_path / "out", RecommendRequest(k=3), SMALL, note=quiet).kept == 0


def test_folders_that_hold_something_else_are_refused(films: Predictor, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SettingsError, match=r"mine: is not empty and holds no _job.json; name a new folder"):
        recommend_shards(films, None, tmp_path / "mine", RecommendRequest(), SMALL)
    with pytest.raises(SettingsError, match=r"letter.txt: is a file; name a folder for the shards"):
        recommend_shards(films, None, tmp_path / "mine" / "letter.txt", RecommendRequest(), SMALL)
    out = tmp_path / "out"
    recommend_shards(films, None, out, RecommendRequest(), SMALL)
    shard = out / "part-00001.parquet"
    content = shard.read_bytes()
    for damaged in (content[:-9], b"", b"PAR1"):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=r"part-00001.parquet: is no whole shard .*remove it, and start"):
            recommend_shards(films, None, out, RecommendRequest(), SMALL)
    pq.write_table(pa.table({"a": [1]}), shard)
    with pytest.raises(DataError, match=r"part-00001.parquet: is no whole shard"):
        recommend_shards(films, None, out, RecommendRequest(), SMALL)
    (out / "_job.json").write_text("{}")
    with pytest.raises(DataError, match=r"(?s)_job.json: damaged; remove the folder.*answers: Field required"):
        recommend_shards(films, None, out, RecommendRequest(), SMALL)


def test_settings_out_of_range_are_refused(films: Predictor, tmp_path: Path) -> None:
    how = How("sprak", 0, 0)  # type: ignore[arg-type]
    message = r"(?s)engine: unknown engine 'sprak' \(did you mean 'spark'\?\).*shard_size is 0.*workers is 0"
    with pytest.raises(SettingsError, match=message):
        recommend_shards(films, None, tmp_path / "out", RecommendRequest(), how)
    with pytest.raises(RequestError, match="k is 0"):
        recommend_shards(films, None, tmp_path / "out", RecommendRequest(k=0), SMALL)
    (tmp_path / "rows.csv").write_text("user_id,item_id\nu1,100\n")
    with pytest.raises(SettingsError, match=r"rows.csv: shards are made of Parquet files"):
        predict_shards(films, tmp_path / "rows.csv", tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(films: Predictor, tmp_path: Path) -> Iterator[tuple[Work, list[Shard]]]:
    """A job whose folder is open, and its shards."""
    job = Job(answers="recommendations", model="", input={"all": True}, settings={"k": 3}, count=40, shard_size=7)
    with batch_shards.opened(tmp_path / "out", job):
        yield Work(str(films.bundle.folder), str(tmp_path / "out")), shards_of(job)


def test_a_killed_process_is_named_and_another_takes_its_shard_up(
    begun: tuple[Work, list[Shard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, shards = begun
    done, notes, killed = list[Done](), list[str](), list[int]()
    ask = batch_jobs._Process.ask

    def murderous(self: batch_jobs._Process, shard: Shard) -> Done | None:
        if shard.number == 2 and not killed:
            killed.append(self._process.pid)
            os.kill(self._process.pid, signal.SIGKILL)
        return ask(self, shard)

    monkeypatch.setattr(batch_jobs._Process, "ask", murderous)
    batch_jobs.write_by_processes(work, shards, 2, done.append, notes.append)
    assert notes == ["a process was killed by signal 9 at part-00002.parquet; another one takes it up"]
    assert sorted(each.number for each in done) == [0, 1, 2, 3, 4, 5]
    assert sum(each.count for each in done) == 40


@pytest.mark.slow
def test_a_shard_that_kills_every_process_ends_the_job_and_a_second_start_completes_it(
    begun: tuple[Work, list[Shard]], films: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, shards = begun
    done = list[Done]()
    with monkeypatch.context() as patched:
        ask = batch_jobs._Process.ask

        def murderous(self: batch_jobs._Process, shard: Shard) -> Done | None:
            if shard.number == 1:
                os.kill(self._process.pid, signal.SIGKILL)
            return ask(self, shard)

        patched.setattr(batch_jobs._Process, "ask", murderous)
        message = r"out: 2 processes died at part-00001.parquet; the last one was killed by signal 9. .*same command"
        with pytest.raises(DataError, match=message):
            batch_jobs.write_by_processes(work, shards, 1, done.append, quiet)
    assert [each.number for each in done] == [0]
    again = list[Done]()
    batch_jobs.write_here(ShardWriter(work, films), shards, again.append)
    assert [each.number for each in again] == [0, 1, 2, 3, 4, 5]


def test_what_a_process_finds_wrong_is_told(begun: tuple[Work, list[Shard]]) -> None:
    work, shards = begun
    lost = Work(work.run + "-lost", work.out)
    with pytest.raises(DataError, match=r"part-0000\d.parquet: .*-lost: no such folder"):
        batch_jobs.write_by_processes(lost, shards, 1, list[Done]().append, quiet)


def test_the_footer_names_the_job(films: Predictor, tmp_path: Path) -> None:
    recommend_shards(films, None, tmp_path / "out", RecommendRequest(), How(shard_size=40))
    told = json.loads(pq.read_metadata(tmp_path / "out" / "part-00000.parquet").metadata[b"recspec"])
    assert told == {"job": batch_shards.read(tmp_path / "out").digest, "count": 40, "unknown": 0}


# --- Spark and Ray ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_engines_write_the_same_shards(engine: str, ials: Predictor, tmp_path: Path) -> None:
    pytest.importorskip("pyspark" if engine == "spark" else "ray.data")
    counts = recommend_shards(ials, None, tmp_path / "out", RecommendRequest(k=5), How(engine, 2, 7))  # type: ignore[arg-type]
    assert counts == Counts(40, 0, 6, 0)
    recommend_shards(ials, None, tmp_path / "local", RecommendRequest(k=5), SMALL, note=quiet)
    assert_same(whole(tmp_path / "out"), whole(tmp_path / "local"))
