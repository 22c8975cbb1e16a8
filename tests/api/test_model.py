"""What a model answers: frames in and out, with titles, reasons and notes."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from recspec import api
from recspec.base.errors import BundleError, DataError, RequestError, SettingsError
from recspec.bundle import run_record
from recspec.evaluation import compare_values
from recspec.loop import Event, Journal
from tests.api.conftest import USERS, events


def test_recommendations_are_a_frame_of_the_kind_that_was_prepared(model: api.Model) -> None:
    found = model.recommend(["u1", "u2"], k=3)
    assert isinstance(found, pd.DataFrame)
    assert list(found.columns) == ["user", "known", "rank", "item", "title", "score"]
    assert found["user"].tolist() == ["u1"] * 3 + ["u2"] * 3
    assert found["rank"].tolist() == [1, 2, 3] * 2
    assert found["score"].is_monotonic_decreasing or len(set(found["user"])) > 1
    bought = set(model.history("u1")["item"])
    assert not bought & set(found[found["user"] == "u1"]["item"])
    assert bought == set(events().query("customer == 'u1'")["film"].iloc[:11])  # the last one is for test


@pytest.mark.filterwarnings("ignore:ease gives scores")
def test_the_question_decides_the_kind_of_the_answer(model: api.Model) -> None:
    arrow = pa.chunked_array([["u1", "u2"]])
    assert isinstance(model.recommend(arrow, k=1), pa.Table)
    assert isinstance(model.recommend(pd.DataFrame({"customer": ["u1"]}), k=1), pd.DataFrame)
    assert isinstance(model.recommend("u1", k=1, kind="rows"), list)
    assert model.recommend("u1", k=1, kind="dict")["rank"] == [1]
    rows = duckdb.sql("select 'u1' customer, 'f3' film")
    assert isinstance(model.predict(rows), duckdb.DuckDBPyRelation)
    assert isinstance(model.predict({"customer": ["u1"], "film": ["f3"]}), dict)
    assert isinstance(api.open(model).similar("f1", k=1), pa.Table)


@pytest.mark.filterwarnings("ignore:ease gives scores")
def test_answers_are_verbs_of_a_run_too(model: api.Model) -> None:
    rows = {"customer": ["u1"], "film": ["f3"]}
    for run in (model, model.path):
        assert api.recommend(run, ["u1"], k=3, kind="rows") == model.recommend(["u1"], k=3, kind="rows")
        assert api.similar(run, "f1", k=3, kind="dict") == model.similar("f1", k=3, kind="dict")
        assert api.predict(run, rows, device="cpu") == model.predict(rows)
    assert isinstance(api.similar(model, "f1", verify=False), pd.DataFrame)
    with pytest.raises(SettingsError, match=r"similar: unknown keyword 'devise' \(did you mean 'device'\?\)"):
        api.similar(model, "f1", devise="cpu")
    with pytest.raises(SettingsError, match="recommend: run: found int; expected a path"):
        api.recommend(7, "u1")


@pytest.mark.filterwarnings("ignore::recspec.api.model.Note")
def test_answers_know_the_events_of_a_journal(model: api.Model, tmp_path: Path) -> None:
    best = model.recommend(["u1"], k=30, kind="dict")["item"][0]
    url, at = f"sqlite:///{tmp_path / 'journal.db'}", 4_000_000_000_000_000
    sent = [("u1", best), ("zoe", "f1")]
    with Journal(url) as journal:
        journal.store([Event(f"{user} {item}", user, "view", item, None, at, at) for user, item in sent])
    named = model.recommend(["u1", "zoe"], k=30, kind="rows", journal=url)
    own = {user: {row["item"] for row in named if row["user"] == user} for user in ("u1", "zoe")}
    assert best not in own["u1"]
    assert "f1" not in own["zoe"]
    answers = model.recommend(["zoe"], k=3, kind="answers", journal=url)
    assert [each.answered_by for each, _ in answers] == ["history"]
    file = model.recommend(["u1", "zoe"], k=30, out=tmp_path / "some.parquet", journal=url, progress=False)
    assert pq.read_table(file)["item"].to_pylist() == [row["item"] for row in named]
    every = model.recommend(all=True, k=30, kind="rows", journal=url, progress=False)
    assert {row["item"] for row in every if row["user"] == "u1"} == own["u1"]
    with pytest.raises(DataError, match="there is no such journal"):
        model.recommend(["u1"], journal=f"sqlite:///{tmp_path / 'none.db'}")
    with pytest.raises(SettingsError, match="journal: goes with users, in a frame or in one file"):
        model.recommend(items=["f1"], journal=url)


def test_all_users_a_file_and_named_users_get_the_same_answers(model: api.Model, tmp_path: Path) -> None:
    every = model.recommend(all=True, k=4, kind="pyarrow", progress=False)
    users = [f"u{user}" for user in range(USERS)]
    named = model.recommend(users, k=4, kind="pyarrow")
    file = model.recommend(all=True, k=4, out=tmp_path / "all.parquet", progress=False)
    assert every.num_rows == USERS * 4
    written = pq.read_table(file)
    assert written.select(["user", "item", "rank"]).to_pydict() == every.select(["user", "item", "rank"]).to_pydict()
    own = {user: [row["item"] for row in named.to_pylist() if row["user"] == user] for user in users}
    assert own == {user: [row["item"] for row in every.to_pylist() if row["user"] == user] for user in users}
    assert model.recommend([], k=4).shape == (0, 6)


def test_a_basket_a_filter_and_reasons(model: api.Model) -> None:
    basket = model.recommend(items=["f1", "f2"], k=5, exclude="f3", filter="kind = 'a'", kind="rows")
    assert {row["user"] for row in basket} == {None}
    assert not {"f1", "f2", "f3"} & {row["item"] for row in basket}
    assert all(int(row["item"][1:]) % 3 == 0 for row in basket)
    boosted = model.recommend("u1", k=2, boost="kind = 'b': 100", explain=True, kind="rows")
    assert all(int(row["item"][1:]) % 3 == 1 for row in boosted)
    assert all(row["boost"] > 0 and row["because"] for row in boosted)


def test_columns_of_the_catalogue_go_with_an_answer(model: api.Model, tmp_path: Path) -> None:
    rows = model.recommend(["u1", "u2"], k=3, columns=["kind", "title"], kind="rows")
    assert list(rows[0])[-1] == "kind"
    assert {row["kind"] for row in rows} <= {"a", "b", "c"}
    assert all(row["kind"] == "abc"[int(row["item"][1:]) % 3] for row in rows)
    assert model.recommend(all=True, k=1, columns=["kind"], kind="pyarrow", progress=False).column_names[-1] == "kind"
    with pytest.raises(RequestError, match=r"no column 'knid' \(did you mean 'kind'\?\)"):
        model.recommend("u1", columns=["knid"])
    file = model.recommend("u1", k=3, at_most="kind:1", columns=["kind"], out=tmp_path / "a.csv", progress=False)
    assert sorted(csv.read_csv(file).column("kind").to_pylist()) == ["a", "b", "c"]
    with pytest.raises(SettingsError, match="columns: go with a frame or one file"):
        model.recommend(all=True, columns=["kind"], out=tmp_path / "shards")


@pytest.mark.parametrize("like", [" u1", "u1 ", "U1", "u1.0"])
def test_an_unknown_id_is_answered_with_the_known_one_that_it_is_like(model: api.Model, like: str) -> None:
    with pytest.raises(RequestError, match=r"is unknown to the model \(did you mean 'u1'\?\)"):
        model.history(like)
    with pytest.warns(api.Note, match=r"unknown user \(did you mean 'u1'\?\): these are the"):
        model.recommend(like, k=2)
    item = like.replace("u", "f").replace("U", "F")
    with pytest.raises(RequestError, match=r"in the catalogue of the model \(did you mean 'f1'\?\)"):
        model.similar(item)
    with pytest.warns(api.Note, match=r"basket: 1 of 2 items are unknown: '.*' \(did you mean 'f1'\?\)"):
        model.recommend(items=[item, "f2"], k=2)


def test_an_explanation_adds_up_to_the_score(model: api.Model) -> None:
    best = model.recommend("u1", k=1, kind="rows")[0]
    reasons = model.explain("u1", best["item"], kind="dict")
    assert set(reasons["by"]) == {"shares"}
    assert reasons["title"][-1] == "(rest)"
    assert sum(reasons["value"]) == pytest.approx(best["score"], abs=1e-3)
    for user, item, said in (("nobody", "f1", "user 'nobody'"), ("u1", "nothing", "item 'nothing'")):
        with pytest.raises(RequestError, match=f"{said}: is unknown to the model"):
            model.explain(user, item)
    with pytest.raises(RequestError, match="is unknown"):
        model.history("nobody")


def test_a_model_of_sequences_gives_a_history_in_order_of_time(model: api.Model, data: api.Data) -> None:
    ordered = api.train("sasrec", data, model.path.parent / "sasrec", dim=8, epochs=1, progress=False)
    bought = events().query("customer == 'u1'")["film"].tolist()
    assert ordered.history("u1", kind="dict")["item"] == bought[:11]


def test_an_unknown_user_gets_popular_items_and_a_note(model: api.Model) -> None:
    with pytest.warns(api.Note, match="user nobody: unknown user: these are the 2 most popular items"):
        found = model.recommend(["u1", "nobody"], k=2, kind="rows")
    assert [row["known"] for row in found] == [True, True, False, False]


def test_a_note_on_many_users_is_told_once(model: api.Model) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.recommend([f"nobody {number}" for number in range(1234)] + ["u1"], k=2)
        model.recommend(items=["f1", "f999"], k=2)
    first, second = (str(each.message) for each in told)
    assert first.startswith("1,234 users, such as nobody 0: unknown user: these are the 2 most popular items")
    assert second.startswith("basket:")


@pytest.mark.filterwarnings("ignore:ease gives scores")
def test_scores_of_frames_files_and_prepared_rows(model: api.Model, data: api.Data, tmp_path: Path) -> None:
    rows = events()[["customer", "film"]].iloc[:5]
    scored = model.predict(rows)
    assert list(scored.columns) == ["customer", "film", "score"]
    assert scored["score"].notna().all()
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert model.predict(tmp_path / "rows.csv")["score"].tolist() == scored["score"].tolist()
    written = model.predict(rows, out=tmp_path / "scored.jsonl")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["film"] for line in lines] == rows["film"].tolist()
    split = model.predict(data, split="valid", progress=False)
    assert len(split) == data.check()["valid"]
    with pytest.warns(api.Note, match="2 rows|unknown"):
        model.predict({"customer": ["nobody", "u1"], "film": ["f1", "f999"]})
    with pytest.raises(DataError, match="no column 'item_id' or 'film'; found 'customer'"):
        model.predict({"customer": ["u1"]})
    with pytest.raises(SettingsError, match="have no split"):
        model.predict(rows, split="test")
    with pytest.raises(DataError, match="column 'score' already"):
        model.predict(scored)
    with pytest.raises(DataError, match="found int; expected a data frame of raw rows"):
        model.predict(7)


@pytest.mark.filterwarnings("ignore:ease gives scores")
def test_an_empty_frame_has_no_scores(model: api.Model) -> None:
    nothing = pa.table({"customer": pa.array([], pa.string()), "film": pa.array([], pa.string())})
    found = model.predict(nothing)
    assert found.column_names == ["customer", "film", "score"]
    assert found.num_rows == 0


def test_an_opened_run_knows_its_data_and_keeps_its_evaluations(model: api.Model) -> None:
    opened = api.open(model.path, kind="pandas")
    assert opened.data is not None
    result = opened.evaluate(protocol="full", baselines=True, progress=False)
    assert result.file is not None
    assert result.file.is_file()
    frame = result.to_frame()
    assert isinstance(frame, pd.DataFrame)
    ours = frame.query("model == 'ease' and protocol == 'full' and metric == 'ndcg@10'")
    assert ours["value"].tolist() == [result.metrics["full"]["ndcg@10"]]
    assert ours["standard_error"].notna().all()
    assert {"popularity", "item_knn"} <= set(frame["model"])
    theirs = frame.query("model == 'popularity' and metric == 'ndcg@10'").iloc[0]
    paired = result.report.model.values["full"]["ndcg@10"], result.report.beside["popularity"].values["full"]["ndcg@10"]
    assert theirs["difference"] == pytest.approx(theirs["value"] - ours["value"].iloc[0])
    assert theirs["p_value"] == pytest.approx(compare_values(*paired, draws=10).p_value)
    assert ours["p_value"].isna().all()
    listed = api.runs(model.path).to_frame("rows")
    assert listed[0]["model"] == "ease"
    assert listed[0]["test"] is not None


def test_runs_are_compared_and_one_is_refused(model: api.Model, data: api.Data) -> None:
    other = api.train("popularity", data, model.path.parent / "popularity", progress=False)
    result = api.compare([model, other], data, protocol="full", progress=False)
    assert list(result.report.against) == [str(other.path)]
    assert [each.parts[-3] for each in result.files] == ["run", "popularity"]
    alone = other.evaluate(data, protocol="full", progress=False)
    assert alone.file == result.files[1], "as if it had been evaluated alone"
    assert alone.to_dict() == result.report.others[str(other.path)].to_dict()
    pages = api.report([model, other], out=model.path.parent / "both.html")
    assert "no saved evaluation" not in pages.path.read_text()
    assert all(each["test"] is not None for each in api.runs(other.path).to_frame("rows"))
    with pytest.raises(SettingsError, match="expected two runs or more"):
        api.compare([model], data)
    joined = api.pipeline(model.path.parent / "pipeline", retriever={"near": model}, ranker=model, progress=False)
    assert "ease" in repr(joined)
    assert joined.recommend("u1", k=2, kind="rows")[0]["retrieved_by"] == ["near"]
    mixed = api.blend(model.path.parent / "blend", [model, other], data, progress=False)
    assert len(mixed.blended.members) == 2
    assert mixed.data is data
    assert repr(mixed).startswith("Model: ")
    assert len(mixed.plan) == 0
    assert mixed.recommend("u1", k=2).shape == (2, 6)


def test_a_run_of_other_data_is_never_the_better_one(model: api.Model, data: api.Data, tmp_path: Path) -> None:
    other = api.train("popularity", data, tmp_path / "run", progress=False)
    asked: dict[str, Any] = {"protocol": "full", "k": (1, 10), "progress": False}
    result = api.compare([model, other], data, **asked)
    frame = result.comparisons()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == [
        "run",
        "protocol",
        "metric",
        "ours",
        "theirs",
        "difference",
        "standard_error",
        "low",
        "high",
        "p_value",
        "p_permutation",
        "better",
    ]
    compared = result.report.against[str(other.path)]["full"]
    assert frame["metric"].tolist() == list(compared)
    assert frame["difference"].tolist() == [each.difference for each in compared.values()]
    (name, found), *_ = compared.items()
    sure = replace(found, difference=-0.1, p_value=0.0, p_permutation=0.0)
    report = replace(result.report, against={str(other.path): {"full": {name: sure}}})
    clear = api.EvaluationResult(report, "ease", run=str(model.path))
    assert clear.comparisons("dict")["better"] == [str(model.path)]
    assert result.run == str(model.path)
    assert repr(clear).startswith("EvaluationResult of ease")
    record = run_record.read(other.path)
    assert record is not None
    assert record.data is not None
    elsewhere = record.data.model_copy(update={"digest": "0" * 64, "path": "/all"})
    record.model_copy(update={"data": elsewhere}).write(other.path)
    told = api.compare([model, other], data, **asked)
    first = repr(told).splitlines()[0]
    assert first.startswith(f"warning: {other.path} was trained on other data (/all, 000000000000) than it is measured")
    assert "<p><b>warning: " in told.to_html()
    assert [each.parts[-3] for each in told.files] == [model.path.name], "and a report can't call it better"
    assert told.why_not_kept == f"{other.path}: the evaluation is not kept: the run was trained on other data"
    assert told.report.cautions[0] in told.to_dict()["notes"]  # type: ignore[operator]
    for names in ({str(other.path): "/all"}, {"": "/all"}):
        mixed = api.EvaluationResult(replace(report, elsewhere=names), "ease")
        assert mixed.comparisons("dict")["better"] == [""]
    assert repr(mixed).startswith("warning: the model was trained on other data")
    assert api.evaluate(model, data, **asked).comparisons("pyarrow").num_rows == 0


def test_a_wrong_keyword_gets_the_nearest_known_one(model: api.Model, data: api.Data) -> None:
    with pytest.raises(SettingsError, match=r"evaluate: unknown keyword 'baseline' \(did you mean 'baselines'\?\)"):
        model.evaluate(data, baseline=True)
    with pytest.raises(SettingsError, match=r"recommend: unknown keyword 'excludes' \(did you mean 'exclude'\?\)"):
        model.recommend("u1", excludes=["f1"])  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"unknown setting 'recncy' \(did you mean 'recency'\?\)"):
        api.train("ease", data, "nowhere", recncy=1)
    with pytest.raises(SettingsError, match=r"unknown model 'eas' \(did you mean 'ease'\?\)"):
        api.train("eas", data, "nowhere")
    with pytest.raises(BundleError, match="nowhere"):
        api.open("nowhere")
    with pytest.raises(
        SettingsError, match="train: data: found DataFrame; expected a path; prepare a data frame first"
    ):
        api.train("ease", events(), "nowhere")  # type: ignore[call-overload]
    with pytest.raises(SettingsError, match="open: run: found int; expected a path"):
        api.open(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({}, "name users, take all, or give items or a context"),
        ({"users": "u1", "all": True}, "leave users out"),
        ({"users": "u1", "out": "a.xls"}, "ends in .csv, .jsonl or .parquet"),
        ({"users": Path("u.csv"), "out": "shards"}, "reads text files with one id a line"),
        ({"users": "u1", "at_most": "kind"}, "expected COLUMN:N"),
        ({"items": "f1", "out": "a.parquet"}, "names users"),
        ({"all": True, "explain": True}, "goes with named users"),
        ({"users": "u1", "k": 0}, "k is 0; expected a whole number"),
        ({"users": "u1", "filter": "knd = 'a'"}, "did you mean 'kind'"),
    ],
)
def test_a_wrong_request_is_told_before_any_work(model: api.Model, keywords: dict[str, object], said: str) -> None:
    with pytest.raises((SettingsError, RequestError), match=said):
        model.recommend(**keywords)  # type: ignore[arg-type]


def test_nothing_is_printed(model: api.Model, data: api.Data, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", api.Note)
        model.recommend(["u1"])
        model.predict(data)
        model.evaluate(data, protocol="full")
        data.describe()
        model.similar("f1")
        api.train("popularity", data, model.path.parent / "quiet")
    assert capfd.readouterr() == ("", "")


def test_a_model_of_labelled_rows_predicts_and_says_why_it_recommends_nothing(tmp_path: Path) -> None:
    rows = {
        "age": [20 + row % 50 for row in range(300)],
        "job": [f"j{row % 4}" for row in range(300)],
        "label": [int(row % 50 > 25) for row in range(300)],
    }
    data = api.prepare(
        rows, tmp_path / "data", user=None, item=None, label="label", context_features=["age", "job"], progress=False
    )
    model = api.train("logistic_regression", data, tmp_path / "run", progress=False)
    found = model.predict({"age": [20, 69], "job": ["j0", "j1"]}, kind="rows")
    assert found[0]["probability"] < 0.5 < found[1]["probability"]
    assert model.evaluate(progress=False).metrics["rows"]["auc"] > 0.9
    for asked in (lambda: model.recommend("u1"), lambda: model.history("u1"), lambda: model.explain("u1", "i1")):
        with pytest.raises((BundleError, RequestError), match=r"no (item|user)|no users and items"):
            asked()


def test_answers_for_all_users_may_be_a_folder_of_shards(model: api.Model, tmp_path: Path) -> None:
    whole = pq.read_table(model.recommend(all=True, k=3, out=tmp_path / "all.parquet"))
    folder = model.recommend(all=True, k=3, out=tmp_path / "shards", shard_size=2, progress=False)
    parts = sorted(folder.glob("part-*.parquet"))
    assert len(parts) == -(-USERS // 2)
    assert pa.concat_tables(map(pq.read_table, parts)).drop_columns("score") == whole.drop_columns("score")
    with pytest.raises(SettingsError, match="workers: goes with out FOLDER, a name without an ending"):
        model.recommend(all=True, workers=2)
    with pytest.raises(SettingsError, match="users: a folder of shards is for all users, or for a file of users"):
        model.recommend(["u0"], out=tmp_path / "other")
    with pytest.raises(SettingsError, match="is made of a Parquet file or a prepared dataset"):
        model.predict(pa.table({"user": ["u0"]}), out=tmp_path / "other")


@pytest.mark.filterwarnings("ignore:ease gives scores", "ignore:not read")
def test_rows_keep_their_index_and_the_types_of_their_columns(model: api.Model) -> None:
    large = 2**53 + 1  # beside a missing value, pandas would make it a fraction, and so another number
    rows = (
        events()[["customer", "film"]]
        .iloc[[9, 3, 5]]
        .assign(
            order=pd.array([large, None, 7], dtype="Int64"),
            price=[Decimal("0.10")] * 3,
            kind=pd.Categorical(["x", "y", "x"]),
        )
    )
    scored = model.predict(rows)
    pd.testing.assert_frame_equal(scored.drop(columns="score"), rows)
    assert scored["score"].tolist() == model.predict(rows, kind="dict")["score"]
    named = rows.set_index("order", append=True)
    pd.testing.assert_frame_equal(model.predict(named).drop(columns="score"), named)
    assert model.predict(named, columns=["order"])["order"].iloc[0] == large
    arrow = pa.table({**rows[["customer", "film"]].to_dict("list"), "price": [Decimal("0.10")] * 3})
    assert model.predict(arrow).drop_columns("score").equals(arrow)
    assert model.predict(pa.Table.from_pandas(rows), kind="pandas")["order"].iloc[0] == large
