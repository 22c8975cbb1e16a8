"""Forget a person: in journals, datasets, bundles of all versions, checkpoints, exports, reports and batch answers.

A person's id keeps its slot, blanked, so that the ids of all others stay. Rows of the person are dropped; rows of
tables (embeddings, factors, the state of optimizers) take the values of the unknown user. Weights that many people
shaped stay until the next full fit.

`forget --refit` trains the runs again whose weights the person shaped; see `refits`.

A folder is rewritten beside its place and renamed, so a kill leaves the old or the new one; the same command goes on.
"""

from __future__ import annotations

import codecs
import csv
import html
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recspec.base.errors import DataError, RecspecError
from recspec.base.files import locked, manifest, put_in_place, staging, whole_file
from recspec.bundle import checkpoint, versions
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders, Vocabulary, raw_names
from recspec.data.storage import (
    PREPARE_FILE,
    SEEN_FILE,
    Column,
    Columns,
    Ragged,
    offsets_of,
    open_split,
    ragged_range,
    write_dataset,
)
from recspec.datasets import EVENTS, GROWTH_FILE
from recspec.feature_spec import FILE_NAME, FeatureSpec, find_export_file
from recspec.inference import separator_of
from recspec.loop import journal as tables
from recspec.loop.journal import Journal, now_us
from recspec.loop.refits import mark, refit_runs
from recspec.models import SeenIds, StoredLists
from recspec.models.layers import Embeddings
from recspec.training import Learning

TEXTS = (".csv", ".jsonl", ".json", ".yaml", ".yml", ".html", ".txt", ".md", ".log", ".tsv")
"""Files that are searched as text."""
MOST_SEARCHED = 1 << 30
"""Bytes of a file that are searched; a larger one is named as not searched."""
ANSWERS = ({"user", "rank", "item"}, {"user", "known", "items"})
"""Columns by which a file of batch answers is known."""
SHARED = "Weights that many people shaped are not recomputed at once; `forget --refit` does."


@dataclass
class Forgotten:
    """What was removed, and what stays."""

    counts: Counter[str] = field(default_factory=Counter)
    """Rows, tables and files that are gone, by what they were."""
    changed: list[Path] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    """What may still tell of the person, and until when."""
    refitted: list[Path] = field(default_factory=list)
    """Runs and updates whose models were trained again."""
    found: list[Path] = field(default_factory=list)
    """Files that hold the id after everything; recspec did not make them, and they are left as they are."""


def forget(person: str, under: Path, journal: Journal | None = None, *, learning: Learning | None = None) -> Forgotten:
    """Remove a person, whose raw id is given as text, from a folder and a journal.

    With `learning`, the runs whose weights anybody shaped who was forgotten are trained again on the cleaned data.

    Raises:
        DataError: if a folder is being written by another process, or is damaged; the same command goes on later.
        Interrupted: in a refit, as `learning.stop_requested` says; the same command goes on later.
    """
    done = Forgotten()
    if journal is not None:
        _forget_in_journal(journal, person, done)
    names = {"user"}
    bundles, datasets, others = _places(under)
    for folder in datasets:
        names |= _in_dataset(folder, person, done)
    for folder in bundles:
        names |= _in_bundle(folder, person, done)
    for file in others:
        _in_file(file, person, names, done)
    if learning is not None:
        refits = refit_runs(under, learning)
        done.refitted = refits.done
        done.stays += [f"{home}: was not trained again: {why}" for home, why in refits.failed.items()]
    elif done.counts["bundles"]:
        done.stays.append(SHARED)
    done.found = sorted(_search(under, person, names, done))
    if journal is not None:
        _close_deletion(journal, person, done)
    return done


# --- journal ----------------------------------------------------------------------------------------------------------

OF_PERSONS = (tables.event, tables.exposure, tables.assignment)
"""Tables of a journal with a column of persons."""
SQLITE = b"SQLite format 3\0"
"""How a file of SQLite begins."""


def _begin(file: Path, done: Forgotten) -> bytes | None:
    """The first bytes of a file; None, which is told, if it can't be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(SQLITE))
    except OSError as error:
        done.stays.append(f"{file}: was not searched: {error.strerror}")
        return None


def _in_other_journal(file: Path, person: str, done: Forgotten) -> bool:
    """Whether a SQLite file is a journal that holds the id."""
    try:
        with Journal(f"sqlite:///{file}", read_only=True) as other:
            wanted = (sa.select(sa.literal(1)).where(each.c.subject == person).limit(1) for each in OF_PERSONS)
            return any(other.scalar(each) for each in wanted)
    except RecspecError as error:
        done.stays.append(f"{file}: was not searched: {error}")
        return False


def _forget_in_journal(journal: Journal, person: str, done: Forgotten) -> None:
    """Refuse the person's events from now on, then delete those that are there."""

    def change(connection: sa.Connection) -> None:
        digest = journal.digest_of(person)
        if connection.execute(sa.select(tables.deletion).where(tables.deletion.c.digest == digest)).first() is None:
            connection.execute(sa.insert(tables.deletion).values(digest=digest, requested_at=now_us()))
        for table in OF_PERSONS:
            gone = connection.execute(sa.delete(table).where(table.c.subject == person))
            done.counts[f"{table.name}s of the journal"] += gone.rowcount

    journal.write(change)
    journal.compact()
    if not journal.is_sqlite:
        done.stays.append("PostgreSQL keeps deleted rows on disk until its next VACUUM, and in its write-ahead log")
    done.stays.append("backups of the journal hold the person until they expire")


def _close_deletion(journal: Journal, person: str, done: Forgotten) -> None:
    own = tables.deletion.c.digest == journal.digest_of(person)
    values = {"done_at": now_us(), "counts": json.dumps(dict(done.counts), sort_keys=True)}
    journal.write(lambda connection: connection.execute(sa.update(tables.deletion).where(own).values(values)))


# --- places -----------------------------------------------------------------------------------------------------------


def _places(under: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Bundles, datasets and other files below a folder. Links are not followed."""
    if not under.is_dir():
        raise DataError(f"{under}: is no folder; name the one that holds datasets, runs and answers")
    bundles, datasets, others = list[Path](), list[Path](), list[Path]()
    for root, folders, files in os.walk(under):
        folder = Path(root)
        folders.sort()
        if "bundle.json" in files:
            bundles.append(folder)
            folders.clear()
        elif FILE_NAME in files:
            datasets.append(folder)
            folders.clear()
        else:
            others += [folder / name for name in sorted(files) if not (folder / name).is_symlink()]
    return bundles, datasets, others


@dataclass(frozen=True)
class _Person:
    """A person in a dataset or a bundle, by the prepared id."""

    spec: FeatureSpec
    id: int

    @classmethod
    def find(cls, folder: Path, person: str) -> tuple[_Person | None, set[str]]:
        """The person in a dataset or a bundle, None if unknown; and the names of columns of users."""
        spec = FeatureSpec.load(folder)
        if not spec.role("user"):
            return None, set()
        user = spec.user_id
        encoders = Encoders.load(folder) if "encoders" in spec.companions else None
        columns = raw_names(encoders, [user])
        names = {user, *columns}
        vocabulary = encoders.vocabulary_of(user) if encoders is not None else None
        if vocabulary is not None:
            number = int(vocabulary.encode([person])[0])
            return (cls(spec, number) if number else None), names
        shift = spec.shift(user)
        number = int(person) + shift if re.fullmatch(r"[0-9]{1,18}", person) else -1
        return (cls(spec, number) if shift <= number < spec.num_ids(user) else None), names


# --- datasets ---------------------------------------------------------------------------------------------------------


def _in_dataset(folder: Path, person: str, done: Forgotten) -> set[str]:
    found, names = _Person.find(folder, person)
    raw = [file for file in sorted(folder.rglob("*.parquet")) if _holds(file, person, names)]
    if found is None and not raw:
        return names
    with locked(folder, "forgetting a person in"), staging(folder) as staged:
        shutil.copytree(folder, staged, dirs_exist_ok=True, copy_function=_link)
        if found is not None:
            _drop_rows(found, staged, done)
            _blank_companions(found, staged, done)
        for file in raw:
            copied = staged / file.relative_to(folder)
            if copied.is_file() and _holds(copied, person, names):
                gone = _without_rows(copied, person, names)
                done.counts["raw rows"] += gone
                if copied == staged / EVENTS:
                    _fewer_events(staged / GROWTH_FILE, gone)
        _scrub_notes(staged, person)
        put_in_place(staged, folder)
    done.counts["datasets"] += 1
    done.changed.append(folder)
    return names


def _fewer_events(file: Path, gone: int) -> None:
    """Count the copies of raw rows as they are now."""
    rules = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()  # a link to what others hold
    file.write_text(json.dumps({**rules, "events": rules["events"] - gone}, indent=2) + "\n", encoding="utf-8")


def _link(source: str, target: str) -> object:
    """Link a file; what is changed is written anew, so that others who share it keep theirs."""
    try:
        os.link(source, target)
    except OSError:
        return shutil.copy2(source, target)
    return target


def _drop_rows(person: _Person, folder: Path, done: Forgotten) -> None:
    """Write the splits that hold rows of the person again without them."""
    spec, user = FeatureSpec.load(folder), person.spec.user_id
    sources = dict(spec.sources)
    for split in spec.splits:
        if user not in spec.columns(split):
            continue
        stored = person.id - spec.shift(user)
        dropped = sum(int((np.asarray(block[user]) == stored).sum()) for block in _blocks(spec, split, [user]))
        if not dropped:
            continue
        done.counts["prepared rows"] += dropped
        reader = open_split(spec, split, shifted=False)
        others = (_other_rows(block, user, stored) for block in reader.batches())
        kept = (block for block in others if len(_first(block)))
        old = [folder / name for chunk in spec.sources[split] for name in chunk.files]
        with staging(folder / split) as beside:
            written = write_dataset(
                spec, beside, spec.sources[split][0].type, {split: (reader.features, kept)}, reader.num_rows
            )
            for file in old:
                file.unlink()
            shutil.copytree(beside / split, folder / split, dirs_exist_ok=True)
        sources[split] = written.sources[split]
    spec.replace(sources=sources).save(folder)


def _blocks(spec: FeatureSpec, split: str, names: list[str]) -> Iterator[Columns]:
    return open_split(spec, split, names, shifted=False).batches()


def _first(block: Columns) -> NDArray[np.generic]:
    column = next(iter(block.values()))
    return column.lengths if isinstance(column, Ragged) else column


def _other_rows(block: Columns, user: str, stored: int) -> Columns:
    kept = np.flatnonzero(np.asarray(block[user]) != stored)
    return {name: _taken(column, kept) for name, column in block.items()}


def _taken(column: Column, rows: NDArray[np.int64]) -> Column:
    if not isinstance(column, Ragged):
        return column[rows]
    lengths = column.lengths[rows]
    return Ragged(column.values[ragged_range(column.offsets[rows], lengths)], offsets_of(lengths))


def _blank_companions(person: _Person, folder: Path, done: Forgotten) -> None:
    """Blank the person's slot in the vocabulary and the catalogue of users, and drop their seen items."""
    spec, user = FeatureSpec.load(folder), person.spec.user_id
    file = spec.vocabulary_file(spec.vocabulary(user))
    if file is not None and file.is_file():
        blank = Vocabulary.load(file).blanked(np.array([person.id]))
        file.unlink()  # a link to what others hold
        blank.save(file)
    catalogue = spec.catalogue("user")
    if catalogue is not None and catalogue.is_file():
        table = pq.read_table(catalogue, partitioning=None)
        row = pc.index(table[user], pa.scalar(person.id - spec.shift(user), table.schema.field(user).type)).as_py()
        if row >= 0:
            blanks = [
                column if name == user else _with_blank(column, row)
                for name, column in zip(table.column_names, table.columns, strict=True)
            ]
            _write_parquet(catalogue, pa.table(blanks, schema=table.schema))
            done.counts["rows of catalogues"] += 1
    seen = folder / SEEN_FILE
    if seen.is_file():
        table = pq.read_table(seen, partitioning=None)
        _write_parquet(seen, table.filter(pc.not_equal(table["user_id"], person.id)))


def _with_blank(column: pa.ChunkedArray, row: int) -> pa.ChunkedArray:
    """A column with 0, an empty list, or null in a row."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        blank: object = []
    elif pa.types.is_fixed_size_list(kind):
        blank = [0] * kind.list_size
    else:
        blank = 0 if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None
    return pa.chunked_array(
        [*column.slice(0, row).chunks, pa.array([blank], kind), *column.slice(row + 1).chunks], kind
    )


# --- bundles ----------------------------------------------------------------------------------------------------------


def _in_bundle(folder: Path, person: str, done: Forgotten) -> set[str]:
    """Blank a person in a bundle, in those inside it, in its export and in the checkpoints of its run."""
    inside = sorted((file.parent for file in folder.rglob("bundle.json")), key=lambda each: -len(each.parts))
    found = {each: _Person.find(each, person) for each in inside}
    names = set().union(*(each[1] for each in found.values()))
    if not any(each for each, _ in found.values()):
        return names
    own = found[folder][0]
    home = bundle_home(folder)
    tensors = None if own is None else _user_tensors(bundle.load(folder, verify=False).model, own)
    with staging(folder) as staged:
        shutil.copytree(folder, staged, dirs_exist_ok=True, copy_function=_link)
        for each, (there, _) in found.items():
            if there is not None:
                _blank_bundle(staged / each.relative_to(folder), there, person, done)
            if (staged / each.relative_to(folder) / manifest.FILE_NAME).exists():
                manifest.write(staged / each.relative_to(folder))
        _remove_exports(staged, folder, done)
        if home != folder:
            mark(home)
        put_in_place(staged, folder)
    if own is not None and tensors is not None:
        for file in sorted((home / "checkpoints").glob("*.safetensors")):
            _blank_checkpoint(file, tensors)
            done.counts["checkpoints"] += 1
    done.counts["bundles"] += len([each for each, _ in found.values() if each])
    done.changed.append(folder)
    return names


def bundle_home(folder: Path) -> Path:
    """The run, or the update, that a bundle belongs to."""
    return folder.parent if folder.name == versions.BUNDLE else folder


def _blank_bundle(folder: Path, person: _Person, raw_id: str, done: Forgotten) -> None:
    model = bundle.load(folder, verify=False)
    weights = _blanked(model.model, person)
    checkpoint.write_tensors(folder / "weights.safetensors", weights, {"format": bundle.FORMAT})
    for name in ("seen.safetensors", "events.safetensors"):
        if (folder / name).is_file():
            lists, header = checkpoint.read_tensors(folder / name)
            done.counts[f"entries of {name}"] += _drop_list(lists, person.id)
            checkpoint.write_tensors(folder / name, lists, header)
    _blank_companions(person, folder, done)
    _scrub_notes(folder, raw_id)
    done.counts["rows of weights"] += 1


def _user_tensors(model: nn.Module, person: _Person) -> dict[str, tuple[int, int]]:
    """Tensors of the state with a row for each user: name -> the rows of the person and of the unknown user."""
    spec, user = person.spec, person.spec.user_id
    space, count = spec.vocabulary(user), spec.num_ids(user)
    found = dict[str, tuple[int, int]]()
    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        if isinstance(module, Embeddings):
            for key, places in module.tables.items():
                if space in places and len(places[space]) == count:  # else people share its rows by a hash
                    found[f"{at}stores.{key}"] = places[space].start + person.id, places[space].start
        elif isinstance(module, SeenIds) and space in (blocks := getattr(module, "places", {})):
            found[f"{at}known"] = blocks[space].start + person.id, blocks[space].start
    for name, tensor in model.state_dict().items():
        if (
            name not in found
            and tensor.dim()
            and len(tensor) == count
            and "user" in re.split(r"[._]", name.replace("users", "user"))
        ):
            found[name] = person.id, 0
    return found


def _blanked(model: nn.Module, person: _Person) -> dict[str, Tensor]:
    """The state of a model without the person: in tables the unknown user's row, in lists nothing."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, (row, unknown) in _user_tensors(model, person).items():
        state[name][row] = state[name][unknown]
    count = person.spec.num_ids(person.spec.user_id)
    for prefix, module in model.named_modules():
        if (
            isinstance(module, StoredLists)
            and prefix.rpartition(".")[2] == "known"
            and len(module.offsets) == count + 1
        ):
            own = {name: state[name] for name in state if name.startswith(f"{prefix}.")}
            lists = {name.removeprefix(f"{prefix}."): each for name, each in own.items()}
            _drop_list(lists, person.id)
            state |= {f"{prefix}.{name}": each for name, each in lists.items()}
    _blank_dual(state, person.id, count)
    return state


def _drop_list(lists: dict[str, Tensor], row: int) -> int:
    """Empty one list of lists that stand one after the other, in every tensor with a value for each entry."""
    offsets = lists["offsets"]
    gone, total = slice(int(offsets[row]), int(offsets[row + 1])), int(offsets[-1])
    for name, each in lists.items():
        if name not in ("offsets", "counts") and len(each) == total:
            lists[name] = torch.cat([each[: gone.start], each[gone.stop :]])
    lists["offsets"] = offsets.clone()
    lists["offsets"][row + 1 :] -= gone.stop - gone.start
    return gone.stop - gone.start


def _blank_dual(state: dict[str, Tensor], user: int, count: int) -> None:
    """EASE in its dual form holds weights (U, U) of users, and each item's users."""
    weight, items = state.get("weights.weight"), state.get("weights.of_items.items")
    if weight is None or items is None or weight.shape != (count, count):
        return
    weight[user], weight[:, user] = 0.0, 0.0
    offsets, kept = state["weights.of_items.offsets"], items != user
    state["weights.of_items.items"] = items[kept]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    state["weights.of_items.offsets"] = before[offsets]


def _blank_checkpoint(file: Path, places: Mapping[str, tuple[int, int]]) -> None:
    """Blank the person's rows in weights, averages, and the state of optimizers."""
    tensors, header = checkpoint.read_tensors(file)
    for key, tensor in tensors.items():
        name = next((name for name in places if name == key or name in key.split("/")), None)
        if name is None or not tensor.dim() or len(tensor) <= places[name][0]:
            continue
        row, unknown = places[name]
        tensor[row] = 0 if key.startswith("optimizer/") else tensor[unknown]
    checkpoint.write_tensors(file, tensors, header)


def _remove_exports(staged: Path, folder: Path, done: Forgotten) -> None:
    """Remove exports inside a bundle; they hold the person's rows."""
    for export in [each for each in sorted(staged.rglob("*")) if each.is_dir() and find_export_file(each) is not None]:
        shutil.rmtree(export)
        done.counts["exports"] += 1
        place = folder / export.relative_to(staged)
        done.stays.append(f"{place}: removed, because an export holds rows of users; export the model again")


# --- other files ------------------------------------------------------------------------------------------------------


def _in_file(file: Path, person: str, names: set[str], done: Forgotten) -> None:
    """Drop a person from batch answers and evaluations, and remove pages that name them."""
    with suppress(OSError, pa.ArrowException, ValueError, KeyError, TypeError):  # no file of ours
        if file.suffix == ".parquet":
            columns = set(pq.read_schema(file).names)
            of_evaluation = {"protocol", "id"} <= columns and file.parent.name == "evaluations"
            own = {"id"} if of_evaluation else {"user"} if _are_answers(columns) else set[str]()
            if own and _holds(file, person, own):
                done.counts["answers" if not of_evaluation else "rows of evaluations"] += _without_rows(
                    file, person, own
                )
                done.changed.append(file)
        elif file.name == "export.json" and names & _inputs(file):
            shutil.rmtree(file.parent)
            done.counts["exports"] += 1
            done.stays.append(f"{file.parent}: removed, because an export holds rows of users; export the model again")
        elif file.suffix in (".csv", ".jsonl", ".json") and file.stat().st_size <= MOST_SEARCHED:
            _in_text_answers(file, person, done)
        elif file.suffix == ".html" and "recspec " in (text := _text(file)) and _names(text, person):
            file.unlink()
            done.counts["pages"] += 1
            done.stays.append(f"{file}: removed, because the page may show the person; make it again")


def _are_answers(columns: Iterable[str]) -> bool:
    return any(each <= {*columns} for each in ANSWERS)


def _in_text_answers(file: Path, person: str, done: Forgotten) -> None:
    """Drop the answers of a person from a file of batch answers."""
    text = file.read_text(encoding="utf-8")
    rows: list[object]
    if file.suffix == ".csv":
        head, *lines = list(csv.reader(io.StringIO(text, newline="")))
        rows = [dict(zip(head, line, strict=False)) for line in lines]
    elif file.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        rows = json.loads(text)
    answers = [each for each in rows if isinstance(each, dict)]
    kept = [each for each in answers if str(each.get("user")) != person]
    if len(answers) < len(rows) or len(kept) == len(rows) or not _are_answers(answers[0]):
        return
    with whole_file(file) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
        if file.suffix == ".csv":
            writer = csv.DictWriter(out, head, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        elif file.suffix == ".jsonl":
            out.writelines(f"{json.dumps(each, ensure_ascii=False)}\n" for each in kept)
        else:
            out.write(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    done.counts["answers"] += len(rows) - len(kept)
    done.changed.append(file)


def _inputs(description: Path) -> set[str]:
    """Features that an export reads."""
    found = json.loads(description.read_text(encoding="utf-8"))
    return {each["name"] for each in found["signature"]["inputs"]}


def _scrub_notes(folder: Path, person: str) -> None:
    """Blank the id where notes of the preparation name it; a column or a setting of the same name stays."""
    spec = FeatureSpec.load(folder)
    before = spec.metadata.get("summary")
    if (after := _unnamed(before, person)) != before:
        spec.replace(metadata={**spec.metadata, "summary": after}).save(folder)
    file = folder / PREPARE_FILE
    if file.is_file():
        prepared = json.loads(file.read_text(encoding="utf-8"))
        if (unnamed := {**prepared, "summary": _unnamed(prepared.get("summary"), person)}) != prepared:
            file.unlink()  # a link to what others hold
            file.write_text(json.dumps(unnamed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _unnamed(value: Any, person: str) -> Any:
    """A summary whose notes, the texts in its lists, do not name the person."""
    if isinstance(value, Mapping):
        return {name: _unnamed(each, person) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    is_number = re.fullmatch(r"-?[0-9]+", person) is not None  # any number may be meant, unless it is quoted as ids are
    pattern = re.compile(f"(?<='){re.escape(person)}(?=')") if is_number else _pattern(person)
    return [pattern.sub("forgotten", each) if isinstance(each, str) else _unnamed(each, person) for each in value]


# --- search -----------------------------------------------------------------------------------------------------------


def _search(under: Path, person: str, names: set[str], done: Forgotten) -> Iterator[Path]:
    """Files that hold the id: in a column of users, or as a word of a text."""
    is_number = re.fullmatch(r"-?[0-9]+", person) is not None
    for root, _, files in os.walk(under):
        is_ours = FILE_NAME in files  # whose notes are scrubbed; the rest is names of columns and settings
        for file in (Path(root) / name for name in files):
            if file.is_symlink() or not file.is_file() or (is_ours and file.suffix in (".json", ".yaml")):
                continue
            if (begin := _begin(file, done)) is None:
                continue
            if begin == SQLITE:
                if _in_other_journal(file, person, done):
                    yield file
            elif file.suffix == ".parquet":
                with suppress(pa.ArrowException, OSError):
                    if _holds(file, person, names, any_text=not is_number):
                        yield file
            elif file.suffix in TEXTS:
                if file.stat().st_size > MOST_SEARCHED:
                    done.stays.append(f"{file}: larger than {MOST_SEARCHED:,} bytes, and not searched")
                elif _in_columns(file, person, names) if is_number else _names(_text(file), person):
                    yield file


def _text(file: Path) -> str:
    held = file.read_bytes()
    try:
        return held.decode("utf-16" if held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8")
    except UnicodeDecodeError:
        return held.decode("cp1252", errors="replace")


def _in_columns(file: Path, person: str, names: set[str]) -> bool:
    """Whether a column of users of a CSV or JSONL file holds the id."""
    if file.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(_text(file), newline=""), delimiter=separator_of(file))
        own = names & {*(rows.fieldnames or ())}
        return any(str(row[name]) == person for row in rows for name in own) if own else False
    if file.suffix != ".jsonl":
        return False
    pattern = re.compile(rf'"(?:{"|".join(map(re.escape, names))})": ?"?{re.escape(person)}["\s,}}]')
    return pattern.search(_text(file)) is not None


def _pattern(person: str) -> re.Pattern[str]:
    """The id as a word, as it stands in plain text, JSON, CSV, YAML or HTML."""
    forms = {person, json.dumps(person)[1:-1], json.dumps(person, ensure_ascii=False)[1:-1], html.escape(person)}
    forms |= {person.replace('"', '""'), person.replace("'", "''")}
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, sorted(forms, key=len, reverse=True)))})(?![\w-])")


def _names(text: str, person: str) -> bool:
    return _pattern(person).search(text) is not None


def _holds(file: Path, person: str, names: set[str], *, any_text: bool = False) -> bool:
    """Whether a Parquet file holds the raw id in a column of `names`, or in any column of texts."""
    schema = pq.read_schema(file)
    own = [
        each.name
        for each in schema
        if (each.name in names and _is_raw(each.type, file)) or (any_text and _is_text(each.type))
    ]
    if not own:
        return False
    opened = pq.ParquetFile(file)
    return any(
        pc.any(_is_person(block.column(name), person)).as_py()
        for block in opened.iter_batches(columns=own)
        for name in own
    )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_raw(kind: pa.DataType, file: Path) -> bool:
    """Whether a column may hold raw ids; prepared ids, which have 32 bits, lie outside the copies of raw rows."""
    numbers = (
        pa.types.is_integer(kind) if file.parent.name == "raw" else pa.types.is_int64(kind) or pa.types.is_uint64(kind)
    )
    return _is_text(kind) or bool(numbers or pa.types.is_float64(kind))


def _is_person(column: pa.Array, person: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type):
        return pc.fill_null(pc.equal(column, pa.scalar(person, column.type)), False)
    number = int(person) if re.fullmatch(r"-?[0-9]{1,18}", person) else None
    if number is None:
        return pa.array(np.zeros(len(column), bool))
    return pc.fill_null(pc.equal(column, pa.scalar(number).cast(column.type)), False)


def _without_rows(file: Path, person: str, names: set[str]) -> int:
    """Write a Parquet file again without the rows of a person; returns how many there were."""
    table = pq.read_table(file, partitioning=None)
    gone = np.zeros(len(table), bool)
    for name in names & {*table.column_names}:
        if _is_raw(table.schema.field(name).type, file):
            parts = [_is_person(each, person).to_numpy(zero_copy_only=False) for each in table[name].chunks]
            gone |= np.concatenate([*parts, np.zeros(0, bool)])
    _write_parquet(file, table.filter(pa.array(~gone)))
    return int(gone.sum())


def _write_parquet(file: Path, table: pa.Table) -> None:
    with whole_file(file) as temporary:
        pq.write_table(table, temporary)
