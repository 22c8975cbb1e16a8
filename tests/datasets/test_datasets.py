"""The promises of `prepare`, checked for every registered dataset."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ibis
import ibis.expr.operations as ops
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from ibis.expr.types import Table

from recspec.base.errors import DataError
from recspec.data.encoding import raw_columns
from recspec.data.encoding.encoder_kinds import BucketEncoder, CrossEncoder, HashEncoder, VocabularyEncoder
from recspec.data.encoding.encoders import Encoders
from recspec.data.prepare import histories, prepared, tables
from recspec.data.prepare.duckdb_backend import DuckDBBackend
from recspec.data.storage import SEEN_SPLITS as SPLITS
from recspec.data.storage import open_split, read_seen
from recspec.data.storage.check import check
from recspec.datasets import DATASETS, outbrain
from recspec.feature_spec import FeatureSpec
from tests.dataset_cases import CASES, Case, bytes_of, nothing, raw_pairs, run

# --- raw rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    case: Case
    raw: Path
    out: Path
    result: prepared.Prepared
    stages: list[tuple[str, int, int | None]]


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A dataset prepared once, for all that only look."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    raw, stages = case.write(folder / "raw"), []
    result = run(case, raw, folder / "out", progress=lambda *stage: stages.append(stage))
    return Made(case, raw, folder / "out", result, stages)


WITHOUT_IDS = ("adult", "criteo", "outbrain")
"""Datasets of rows that name neither users nor items."""
TAKE_EVENTS = {"movielens", "table"}
"""Datasets that take new events, by the rules in growth.json."""


def with_ids(spec: FeatureSpec) -> list[str]:
    """The roles that have an id."""
    return list(spec.metadata["catalogues"])


def ids_of(spec: FeatureSpec) -> dict[str, str]:
    """The id of each role that has one."""
    return {role: spec.user_id if role == "user" else spec.item_id for role in with_ids(spec)}


# --- what every dataset promises --------------------------------------------------------------------------------------


def test_every_registered_dataset_is_tested() -> None:
    assert {case.dataset for case in CASES.values()} == set(DATASETS)


def test_the_folder_is_a_whole_dataset(made: Made) -> None:
    spec = FeatureSpec.load(made.out)
    assert spec == made.result.spec
    check(spec)
    of_users = made.case.settings.get("split") == "users"
    assert spec.splits == ("train", "valid", "test", *(["fold_in"] if of_users else []))
    assert {path.name for path in made.out.parent.iterdir()} <= {"raw", "out"}
    expected = {"feature_spec.yaml", "prepare.json", "encoders.json", "vocabularies", *spec.splits}
    grows = made.case.dataset in TAKE_EVENTS and not of_users
    expected |= {f"{role}s.parquet" for role in with_ids(spec)} | ({"growth.json", "raw"} if grows else set())
    expected |= {"seen.parquet"} if len(with_ids(spec)) == 2 else set()
    assert {path.name for path in made.out.iterdir()} == expected
    assert with_ids(spec) == ([] if made.case.dataset in WITHOUT_IDS else ["user", "item"])


@pytest.mark.slow
def test_no_row_depends_on_an_order_that_was_not_asked_for(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives rows in random order wherever SQL lets it, as Spark does with a table's parts."""
    ordered: set[str] = set()

    def shuffled(table: Table) -> Table:
        op = table.op()
        if isinstance(op, ops.UnboundTable) and op.name in ordered:
            return table
        while isinstance(op, (ops.Limit, ops.Project, ops.DropColumns)):
            op = op.parent
        return table if isinstance(op, ops.Sort) else table.order_by(ibis.random())

    stage, batches = DuckDBBackend.stage, DuckDBBackend.batches

    def staged(self: DuckDBBackend, table: Table, into: Path | None = None) -> Table:
        found = stage(self, asked := shuffled(table), into)
        ordered.update([found.get_name()] if asked is table else [])
        return found

    monkeypatch.setattr(DuckDBBackend, "stage", staged)
    monkeypatch.setattr(DuckDBBackend, "batches", lambda self, table, *rows: batches(self, shuffled(table), *rows))
    run(made.case, made.raw, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(made.out)


@pytest.mark.parametrize("name", ["amazon", "movielens-histories", "table-clicks", "table-hashed"])
def test_text_beyond_the_limit_of_one_array_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 GiB; here a few bytes stand for it."""
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    run(case, raw, tmp_path / "usual")
    monkeypatch.setattr(raw_columns, "TEXT_BYTES", 20)
    run(case, raw, tmp_path / "large")
    assert bytes_of(tmp_path / "large") == bytes_of(tmp_path / "usual")


def test_id_zero_is_nobodys(made: Made) -> None:
    spec = made.result.spec
    for name in ids_of(spec).values():
        assert np.asarray(open_split(spec, "train", [name]).read(0, 10**9)[name]).min() >= 1
    assert all(spec.reserves_unknown(name) for name, feature in spec.features.items() if feature.is_categorical)
    for name, feature in spec.features.items():
        assert not (feature.is_list and feature.is_categorical) or feature.padding == 0, name


def test_vocabularies_give_the_cardinalities_and_the_way_back(made: Made) -> None:
    encoders = Encoders.load(made.out)
    for name, feature in made.result.spec.features.items():
        encoder = encoders.encoders.get(name)
        if isinstance(encoder, (HashEncoder, BucketEncoder, CrossEncoder)):
            assert encoder.cardinality == feature.cardinality
            with pytest.raises(DataError, match=f"feature '{name}' is encoded by {encoder.kind}; it has no vocabulary"):
                encoders.vocabulary_of(name)
        elif feature.is_categorical and encoder is not None:
            vocabulary = encoders.vocabulary_of(name)
            assert vocabulary.cardinality == feature.cardinality
            ids = np.arange(1, vocabulary.cardinality)
            assert vocabulary.encode(vocabulary.decode(ids)).tolist() == ids.tolist()
            if made.case.dataset != "criteo":  # whose ids follow how often a value stands in train
                assert vocabulary.values.to_pylist() == sorted(vocabulary.values.to_pylist())


def test_catalogues_have_a_row_for_every_id_and_agree_with_the_rows(made: Made) -> None:
    spec = made.result.spec
    columns = open_split(spec, "train").read(0, 10**9)
    for role, identity in ids_of(spec).items():
        catalogue = pq.read_table(made.out / f"{role}s.parquet")
        assert catalogue.column(identity).to_pylist() == list(range(1, spec.num_ids(identity)))
        ids = np.asarray(columns[identity])
        for name in spec.role(role)[1:]:  # type: ignore[arg-type]
            if made.case.dataset == "table" and "label" in made.case.settings:
                continue  # features of a row's own moment
            held, column = catalogue.column(name).to_pylist(), columns[name]
            assert column.tolist()[:500] == [held[number - 1] for number in ids[:500]], name


def test_the_files_hold_what_the_encoders_make_of_raw_values(made: Made) -> None:
    encoders = Encoders.load(made.out)
    spec = made.result.spec
    if not with_ids(spec):
        pytest.skip("no ids; the dataset's own tests compare rows")
    pairs = raw_pairs(spec, "train")
    columns = open_split(spec, "train", [spec.user_id, spec.item_id, spec.label]).read(0, 10**9)
    positive = np.asarray(columns[spec.label]) == 1
    for place, name in enumerate((spec.user_id, spec.item_id)):
        encoder = encoders.encoders[name]
        assert isinstance(encoder, VocabularyEncoder)
        raw = encoder.column or name
        texts = pa.table({raw: [str(pair[place]) for pair in pairs]})
        assert encoders.encode(texts, [name])[name].tolist() == np.asarray(columns[name])[positive].tolist()  # type: ignore[union-attr]


def test_series_are_one_positive_then_negatives_the_user_never_met(made: Made) -> None:
    spec = made.result.spec
    if not spec.has_series:
        pytest.skip("rows as given, no series")
    length = spec.metadata["test_samples_per_series"]
    for split in ("valid", "test"):
        met: dict[int, set[int]] = {}
        for user, item in zip(*read_seen(spec, SPLITS[: SPLITS.index(split) + 1]), strict=True):  # type: ignore[misc]
            met.setdefault(int(user), set()).add(int(item))
        columns = open_split(spec, split).read(0, 10**9)
        users, items, labels = (
            np.asarray(columns[name]).reshape(-1, length) for name in (spec.user_id, spec.item_id, spec.label)
        )
        assert (users == users[:, :1]).all()
        assert (labels[:, 0] == 1).all()
        assert not labels[:, 1:].any()
        if spec.group == spec.user_id and length > 1:
            assert len(np.unique(users[:, 0])) == len(users)
        if made.case.dataset != "ncf" or split == "valid":  # the paper's own negatives are as they are
            for user, negatives in zip(users[:, 0].tolist(), items[:, 1:].tolist(), strict=True):
                assert not met.get(user, set()) & set(negatives)
        for name in (*spec.role("user"), *spec.role("context")):  # one value a request
            values = np.asarray(columns[name]).reshape(-1, length)
            assert (values == values[:, :1]).all()


def test_the_summary_counts_the_rows_of_the_files(made: Made) -> None:
    spec, summary = made.result.spec, made.result.summary
    assert summary["rows"] == {split: open_split(spec, split).num_rows for split in spec.splits}
    for role, identity in ids_of(spec).items():
        assert summary[f"{role}s"] == spec.num_ids(identity) - 1
    assert isinstance(summary["seconds"], float)
    assert made.result.message == f"prepared {made.case.dataset} in {made.out}"


def test_progress_is_told_and_reaches_its_total(made: Made) -> None:
    done = [(done, total) for stage, done, total in made.stages if stage == "writing splits"]
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]


def test_the_same_again_returns_at_once_and_touches_nothing(made: Made) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.out.rglob("*")}
    again = run(made.case, made.raw, made.out)
    assert again.message == f"already prepared: {made.out} holds what was asked for"
    assert again.summary == made.result.summary
    assert again.spec == made.result.spec
    assert {path: path.stat().st_mtime_ns for path in made.out.rglob("*")} == before


@pytest.mark.slow
def test_the_same_elsewhere_is_the_same_byte_for_byte(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders of any name, and in the many small blocks that a low memory limit makes."""
    monkeypatch.setattr(tables, "BYTES_PER_VALUE", 10**9 // 200)
    monkeypatch.setattr(histories, "BYTES_PER_VALUE", 10**9 // 200)
    odd = tmp_path / "userId=1" / "label=0" / "a[1]*?{b} 'c'\\"
    odd.mkdir(parents=True)
    run(made.case, made.case.write(odd / "raw*"), odd / "out?[x]", threads=2, memory_limit="1GB")
    assert bytes_of(odd / "out?[x]") == bytes_of(made.out)


def test_other_settings_are_refused_and_change_nothing(made: Made) -> None:
    before = bytes_of(made.out)
    name, value = next(iter(made.case.other.items()))
    with pytest.raises(
        DataError, match=f"pass --force to replace it, or name another place: settings: {name} was .*, now {value}"
    ):
        run(made.case, made.raw, made.out, settings=made.case.other)
    assert bytes_of(made.out) == before


@pytest.mark.parametrize("name", ["movielens-latest", "table-clicks"])
def test_force_replaces_what_was_prepared_otherwise(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    raw = case.write(tmp_path / "raw")
    run(case, raw, tmp_path / "out")
    run(case, raw, tmp_path / "out", settings=case.other, force=True)
    run(case, raw, tmp_path / "fresh", settings=case.other)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "fresh")
    assert not list(tmp_path.glob(".*"))


def test_preparing_does_not_load_torch() -> None:
    code = "import sys; from recspec.datasets import DATASETS; assert 'torch' not in sys.modules, 'torch is loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["movielens", "outbrain", "adult"])
def test_a_zip_that_takes_far_more_space_unpacked_is_refused(dataset: str, tmp_path: Path) -> None:
    names = {
        "movielens": ["ratings.csv", "movies.csv"],
        "adult": ["adult.data", "adult.test"],
        "outbrain": [f"{name}.csv" for name in outbrain.TABLES],
    }[dataset]
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"0" * 10)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    place = data.index(b"PK\x01\x02")  # the directory says how much there is; no more is read
    data[place + 24 : place + 28] = (3 << 30).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(bytes(data))
    with pytest.raises(
        DataError, match=r"takes [0-9]+ bytes in the zip and 3,221,225,472 unpacked, more than 1,000,000,00"
    ):
        run(Case(dataset, nothing), tmp_path / "a.zip", tmp_path / "out")
