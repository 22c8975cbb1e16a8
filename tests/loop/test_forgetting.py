"""A forgotten person is gone from every file, and nobody else's answers change."""

from __future__ import annotations

import csv
import html
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

import recspec as rs
from recspec.base.errors import DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle.checkpoint import read_tensors
from recspec.data.encoding import Vocabulary
from recspec.feature_spec import FeatureSpec
from recspec.loop import Event, Exposure, Journal, forget, forgetting
from recspec.loop import journal as tables
from tests.made_up_events import COLUMNS, prepared, shop_events, written

PERSON, OTHER = "user03", "user04"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, runs, an update, an export, an evaluation and answers."""
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("shop")
    known, new = shop_events()
    prepared(raw, known)
    shutil.move(raw / "data", folder / "data")
    rs.transcode(folder / "data", folder / "binary", to="split_binary")
    small = {"train.epochs": 1}
    for name, settings in {"ease": {}, "ials": {}, "neumf": small, "two_tower": small, "sasrec": small}.items():
        rs.train(name, folder / "data", folder / "runs" / name, settings=settings, progress=False)
    rs.update(folder / "runs" / "neumf", written(raw / "new.csv", new), progress=False)
    rs.export(folder / "runs" / "neumf", folder / "exports")
    rs.evaluate(folder / "runs" / "ease", folder / "data")
    answers = _answers(folder / "runs" / "ease")
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in answers))
    flat = [{"user": each["user"], "rank": 1, "item": "i1"} for each in answers]
    pq.write_table(pa.Table.from_pylist(flat), folder / "answers.parquet")
    with (folder / "answers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    (folder / "report.html").write_text(f"<pre>recspec report</pre><td>{PERSON}</td>")
    return folder


@pytest.fixture
def shop(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder to forget in."""
    shutil.copytree(made, tmp_path / "shop")
    return tmp_path / "shop"


def _answers(run: Path, users: tuple[str, ...] = (PERSON, OTHER)) -> list[dict[str, object]]:
    from recspec.inference import Predictor, RecommendRequest

    return [each.to_dict() for each in Predictor.open(run).recommend(RecommendRequest(users, k=3))]


def _holding(folder: Path, person: str) -> Iterator[Path]:
    """Files that hold a text, as bytes or in a column of Parquet."""
    for file in (each for each in folder.rglob("*") if each.is_file()):
        if file.suffix == ".parquet":
            table = pq.read_table(file, partitioning=None)
            if any(person in column.to_pylist() for column in table.columns if pa.types.is_string(column.type)):
                yield file
        elif person.encode() in file.read_bytes():
            yield file


def test_nothing_holds_the_id(shop: Path) -> None:
    before = {file.relative_to(shop) for file in _holding(shop, PERSON)}
    assert {Path("answers.csv"), Path("report.html"), Path("data/raw/events.parquet")} < before
    done = forget(PERSON, shop)
    assert list(_holding(shop, PERSON)) == []
    assert done.found == []
    assert done.counts["datasets"] == 3
    assert done.counts["bundles"] == 6
    assert done.counts["answers"] == 4
    assert done.counts["pages"] == done.counts["exports"] == 1
    assert not (shop / "exports").exists()
    assert any("report.html: removed" in each for each in done.stays)


def test_rows_of_all_others_stay(made: Path, shop: Path) -> None:
    forget(PERSON, shop)
    for data in ("data", "runs/neumf/updates/0001/data", "binary"):
        old, new = FeatureSpec.load(made / data), FeatureSpec.load(shop / data)
        person = int(Vocabulary.load(made / data / "vocabularies/user_id.parquet").encode([PERSON])[0])
        for split in old.splits:
            before, after = (_rows(spec, split) for spec in (old, new))
            kept = before["user_id"] != person
            assert not kept.all()
            for name, values in after.items():
                np.testing.assert_array_equal(values, before[name][kept])
        rs.check(shop / data)


def _rows(spec: FeatureSpec, split: str) -> dict[str, np.ndarray]:
    from recspec.data.storage import open_split

    names = [name for name in spec.columns(split) if not spec.features[name].is_list]
    reader = open_split(spec, split, names, shifted=False)
    return {name: np.asarray(column) for name, column in reader.read(0, reader.num_rows).items()}


@pytest.mark.parametrize("name", ["ials", "neumf", "two_tower", "sasrec"])
def test_others_get_the_same_answers_and_the_person_those_of_an_unknown_user(made: Path, shop: Path, name: str) -> None:
    forget(PERSON, shop)
    run = shop / "runs" / name
    assert _answers(run, (OTHER,)) == _answers(made / "runs" / name, (OTHER,))
    forgotten, nobody = _answers(run, (PERSON, "nobody"))
    assert not forgotten["known"]
    assert forgotten["items"] == nobody["items"]


@pytest.mark.parametrize("name", ["ials", "sasrec"])
def test_a_bundle_holds_the_events_of_all_others(made: Path, shop: Path, name: str) -> None:
    slot = int(Vocabulary.load(made / "data/vocabularies/user_id.parquet").encode([PERSON])[0])
    before = bundle.load(made / "runs" / name).events
    forget(PERSON, shop)
    after = bundle.load(shop / "runs" / name).events
    assert before is not None
    assert after is not None
    assert (before.lengths[slot], after.lengths[slot]) == (before.lengths[slot].clip(1), 0)
    kept = before.users != slot
    np.testing.assert_array_equal(after.users, before.users[kept])
    for field in ("items", "times"):
        np.testing.assert_array_equal(getattr(after, field), getattr(before, field)[kept])


def test_the_state_of_optimizers_is_blank(made: Path, shop: Path) -> None:
    files = sorted((shop / "runs/neumf/updates/0001/checkpoints").glob("step-*.safetensors"))
    assert files
    slot = int(Vocabulary.load(made / "data/vocabularies/user_id.parquet").encode([PERSON])[0])
    before, _ = read_tensors(files[-1])
    forget(PERSON, shop)
    after, _ = read_tensors(files[-1])
    state = [name for name in before if name.startswith("optimizer/") and "user" in name and before[name].dim()]
    assert state
    for name in state:
        assert before[name][slot].abs().sum() > 0
        assert after[name][slot].abs().sum() == 0
        others = [row for row in range(len(before[name])) if row != slot]
        assert bool((after[name][others] == before[name][others]).all())


def test_a_forgotten_run_takes_new_events(shop: Path, tmp_path: Path) -> None:
    forget(PERSON, shop)
    _, new = shop_events()
    later = new.slice(60).set_column(2, "timestamp", pa.array([2_000_000_000 + row for row in range(30)]))
    for name, data in {"ease": shop / "data", "neumf": shop / "runs/neumf/updates/0001/data"}.items():
        made = rs.update(shop / "runs" / name, written(tmp_path / "new.csv", later), data=data, progress=False)
        assert made.found.counts["events"] == 30


def test_a_kill_at_any_step_leaves_what_the_same_command_ends(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = forgetting.put_in_place, 0

    def killed(folder: Path, out: Path) -> None:
        nonlocal steps
        steps += 1
        if steps % 2:
            raise KeyboardInterrupt
        real(folder, out)

    monkeypatch.setattr(forgetting, "put_in_place", killed)
    for _ in range(30):
        try:
            forget(PERSON, shop)
        except KeyboardInterrupt:
            continue
        break
    assert list(_holding(shop, PERSON)) == []
    for name in ("ease", "neumf", "sasrec"):
        rs.verify(shop / "runs" / name)
    assert not list(shop.rglob(".*tmp"))


def test_a_journal_forgets_and_refuses_late_events(url: str, tmp_path: Path) -> None:
    event = Event("e1", PERSON, "view", "i1", None, 1, 1)
    shown = Exposure("r1", PERSON, 5, "shop", "0:a", {}, 0, ["i1"], 10)
    with Journal(url) as journal:
        journal.store([event, Event("e2", OTHER, "view", "i1", None, 1, 1)])
        journal.store((), [shown])
        own = {"experiment": "x", "subject": PERSON, "variant": "a", "first_at": 0, "first_seq": 0}
        journal.write(lambda connection: connection.execute(sa.insert(tables.assignment).values(own)))
        done = forget(PERSON, tmp_path, journal)
        assert done.counts == {
            "events of the journal": 1,
            "exposures of the journal": 1,
            "assignments of the journal": 1,
        }
        assert journal.store([Event("e3", PERSON, "view", "i1", None, 2, 2)]) == ["forgotten"]
        assert [name for block in journal.events() for name in block["subject"].to_pylist()] == [OTHER]
        (row,) = journal.rows(sa.select(tables.deletion))
        assert row.done_at >= row.requested_at
        assert PERSON not in str(row)
        assert forget(PERSON, tmp_path, journal).counts["events of the journal"] == 0
    for file in tmp_path.glob("journal.db*"):
        assert PERSON.encode() not in file.read_bytes()


def test_whole_numbers_are_ids_in_columns_of_users_alone(tmp_path: Path) -> None:
    known, _ = shop_events()
    users = pa.array([int(each[4:]) for each in known["user_id"].to_pylist()], pa.int32())
    pq.write_table(known.set_column(0, "user_id", users), tmp_path / "rows.parquet")
    rs.prepare(tmp_path / "rows.parquet", tmp_path / "data", settings=COLUMNS)
    (tmp_path / "rows.parquet").unlink()
    (tmp_path / "list.csv").write_text("user,rank,item\n3,1,i1\n13,3,i3\n")
    done = forget("3", tmp_path)
    assert (tmp_path / "list.csv").read_text() == "user,rank,item\n13,3,i3\n"
    assert done.found == []
    numbers = pq.read_table(tmp_path / "data/vocabularies/user_id.parquet")["value"]
    assert {"3", "13"} & {*map(str, numbers.to_pylist())} == {"13"}
    assert 3 not in pq.read_table(tmp_path / "data/raw/events.parquet")["user_id"].to_pylist()


def test_files_of_others_are_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "crm.csv").write_text("customer,mail\nuser03,a@b\n")
    (tmp_path / "user03.txt").write_text("user031 and xuser03")
    done = rs.forget(PERSON, under=tmp_path)
    assert done.found.found == [tmp_path / "crm.csv"]
    assert "crm.csv: still holds the id, or the same word; look into it" in str(done)
    assert done.to_dict()["found"] == [str(tmp_path / "crm.csv")]


def test_a_file_that_can_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.csv", "b.parquet", "c.db"):
        (tmp_path / name).write_text(PERSON)
    opened = Path.open

    def refused(file: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if mode == "rb" and file.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, mode, *more, **named)

    monkeypatch.setattr(forgetting, "_in_file", lambda *_: None)
    monkeypatch.setattr(Path, "open", refused)
    stays = rs.forget(PERSON, under=tmp_path).found.stays
    assert sorted(each for each in stays if each.endswith(": was not searched: Permission denied")) == [
        f"{tmp_path / name}: was not searched: Permission denied" for name in ("a.csv", "b.parquet", "c.db")
    ]


def test_other_journals_are_named_and_none_is_made(tmp_path: Path) -> None:
    for name, person in (("other.db", PERSON), ("without.db", OTHER)):
        with Journal(f"sqlite:///{tmp_path / name}") as journal:
            journal.store([Event("e1", person, "view", "i1", None, 1, 1)])
    (tmp_path / "apps.db").write_bytes(b"SQLite format 3\0 of another program")
    done = rs.forget(PERSON, under=tmp_path)
    assert done.found.found == [tmp_path / "other.db"]
    assert any("apps.db: was not searched: " in each for each in done.found.stays)
    with pytest.raises(DataError, match=r"mistyped\.db: there is no such journal"):
        rs.forget(PERSON, under=tmp_path, journal=f"sqlite:///{tmp_path / 'mistyped.db'}")
    assert not (tmp_path / "mistyped.db").exists()


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
def test_a_file_of_any_usual_encoding_that_holds_the_id_is_named(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "kunden.csv").write_bytes("kunde;ort\nMüller;Köln\n".encode(encoding))
    (tmp_path / "orte.csv").write_bytes("user_id;ort\n4711;Köln\n".encode(encoding))
    assert rs.forget("Müller", under=tmp_path).found.found == [tmp_path / "kunden.csv"]
    assert forgetting._in_columns(tmp_path / "orte.csv", "4711", {"user_id"})


def test_what_can_not_be_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected the raw id of a person"):
        rs.forget(" ", under=tmp_path)
    with pytest.raises(DataError, match="none: is no folder; name the one that holds datasets, runs and answers"):
        rs.forget(PERSON, under=tmp_path / "none")


ODD = [
    "user",
    "item",
    "train",
    "customer",
    "sku",
    "parquet",
    "a.c",
    "abc",
    "a%",
    "a_c",
    'q"q',
    "o'q",
    "é",
    " x",
    "(",
    "07",
]


def test_an_id_that_is_a_word_of_the_files_or_a_pattern_takes_nothing_else_with_it(tmp_path: Path) -> None:
    rows = [
        {"customer": user, "sku": f"i{(place * 3 + at * at) % 9}", "at": 1_700_000_000 + 60 * (place + 7 * at)}
        for place, user in enumerate([*ODD, *"bcdefgh"])
        for at in range(5)
    ]
    raw = pa.Table.from_pylist(rows)
    named = {"user": "customer", "item": "sku", "timestamp": "at", "types": {"customer": "text"}}
    rs.prepare(raw, tmp_path / "data", settings=named)
    rs.train("ease", tmp_path / "data", tmp_path / "run", progress=False)
    folders, left = (tmp_path / "data", tmp_path / "run" / "bundle"), [row["customer"] for row in rows]
    specs = [FeatureSpec.load(each) for each in folders]
    assert all("' x'" in str(each.metadata["summary"]) for each in specs), "a note names an id"
    for person in ODD:
        done = forget(person, tmp_path)
        left = [each for each in left if each != person]
        assert pq.read_table(tmp_path / "data" / "raw" / "events.parquet")["customer"].to_pylist() == left
        assert not [each for each in done.found if each.name in ("feature_spec.yaml", "prepare.json")]
    for folder, before in zip(folders, specs, strict=True):
        after = FeatureSpec.load(folder)
        assert (after.channels, after.features) == (before.channels, before.features)
        assert {**after.metadata, "summary": 0} == {**before.metadata, "summary": 0}
        assert "' x'" not in str(after.metadata["summary"])
    assert _answers(tmp_path / "run", ("b",))[0]["known"]


@pytest.mark.parametrize("person", ['a"b', "a'b", "é", "a\\b", "a&b", "日本"])
def test_an_id_is_found_however_a_format_writes_it(tmp_path: Path, person: str) -> None:
    (tmp_path / "crm.json").write_text(json.dumps({"who": person}))
    (tmp_path / "plain.json").write_text(json.dumps({"who": person}, ensure_ascii=False))
    (tmp_path / "note.html").write_text(f"<td>{html.escape(person)}</td>")
    (tmp_path / "note.txt").write_text(person)
    with (tmp_path / "crm.csv").open("w", newline="") as file:
        csv.writer(file).writerow([person, 1])
    (tmp_path / "other.json").write_text(json.dumps({"who": f"x{person}x"}))
    names = [each.name for each in forget(person, tmp_path).found]
    assert names == ["crm.csv", "crm.json", "note.html", "note.txt", "plain.json"]
