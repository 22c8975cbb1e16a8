"""Pipelines: what `pipeline build` writes, the candidates that retrievers bring, and what is answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from recspec.base import config
from recspec.base.errors import BundleError, DataError, SettingsError
from recspec.base.files import manifest
from recspec.bundle import folder as bundle
from recspec.bundle import run_record
from recspec.cli.app import app
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.evaluation import EvaluateSettings, EvaluationTask, evaluate
from recspec.feature_spec import FeatureSpec
from recspec.inference import (
    Candidates,
    ItemIndex,
    Pipeline,
    PipelineRanker,
    Predictor,
    RecommendRequest,
    build_pipeline,
)
from recspec.inference.merging import joined
from recspec.inference.pipeline import Retriever
from recspec.models import MODELS, Interactions, ItemModel
from recspec.training import TrainSettings, train
from tests import made_up
from tests.film_runs import film_runs

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ease": {"l2": 5.0},
    "ials": {"factors": 4, "l2": 0.01},
    "wide_deep": {"hidden": (8,), "dropout": 0.0},
    "two_tower": {"dim": 4, "embedding_dim": 4},
    "sasrec": {"dim": 4, "heads": 1, "blocks": 1},
    "bert4rec": {"dim": 4, "heads": 1, "blocks": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Runs on interactions of 40 users with 30 items, numbered from 100, of three kinds."""
    pytest.importorskip("implicit")
    return film_runs(tmp_path_factory.mktemp("pipeline"), SETTINGS)


@pytest.fixture(scope="module")
def pipeline(runs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "both"
    build_pipeline(folder, [str(runs["ease"]), f"factors={runs['ials']}"], runs["wide_deep"], candidates=8)
    return folder


def opened(path: Path) -> Pipeline:
    return Pipeline.open(bundle.load(path))


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


# --- candidates ------------------------------------------------------------------------------------------------------


def test_lists_are_joined_by_their_ranks_and_filled_up_by_popularity() -> None:
    """1st of A, 1st of B, 2nd of A, ...; 7 and 9 come from both, and the popular 7 is there already."""
    found = Candidates(*joined([ids(7, 3, 9), ids(9, 7, -1)], ids(7, 4, 5, 6), 6, ids(4)))
    assert found.ids.tolist() == [7, 9, 3, 5, 6]
    assert found.brought_by.tolist() == [0b11, 0b11, 0b01, 0b100, 0b100]
    assert joined([ids(7, 3, 9), ids(9, 7, -1)], ids(7), 2, ids())[0].tolist() == [7, 9]
    assert [each.tolist() for each in joined([ids(), ids()], ids(3, 1), 5, ids())] == [[3, 1], [4, 4]]
    assert len(joined([ids()], ids(), 5, ids())[0]) == 0


def test_candidates_are_the_best_of_each_retriever(pipeline: Path, runs: Mapping[str, Path]) -> None:
    made, users = opened(pipeline), torch.arange(1, 6)
    asked = [(each.model, {"user_id": users}) for each in made.retrievers]
    found = made.candidates(asked, 5)
    with torch.inference_mode():
        for place, name in enumerate(("ease", "ials")):
            scores = bundle.load(runs[name]).model.score_users(users)  # type: ignore[operator]
            scores[:, 0] = -torch.inf  # nobody's id
            for row, own in enumerate(found):
                best = scores[row].argsort(descending=True)[:4].tolist()
                brought = own.ids[own.brought_by >> place & 1 == 1].tolist()
                assert set(best) <= set(brought), name
    assert all(len(each.ids) == len(set(each.ids.tolist())) == 8 for each in found)
    assert made.names_of(0b11) == ("ease", "factors")
    assert made.names_of(0b100) == ("popularity",)


def test_no_candidate_is_excluded_or_forbidden(pipeline: Path) -> None:
    made, users = opened(pipeline), torch.arange(1, 41)
    allowed = np.zeros(31, bool)
    allowed[3:12] = True
    hidden = [ids(3, 4, 5)] * 20 + [np.arange(31)] * 20
    found = made.candidates(
        [(each.model, {"user_id": users}) for each in made.retrievers], 40, allowed=allowed, excluded=hidden
    )
    assert [sorted(each.ids.tolist()) for each in found] == [[6, 7, 8, 9, 10, 11]] * 20 + [[]] * 20


def test_items_that_share_a_score_with_items_beyond_the_list_are_no_candidates(runs: Mapping[str, Path]) -> None:
    """An empty basket scores 0 everywhere: nothing is brought, unless there is room for all."""
    ease = bundle.load(runs["ease"])
    assert isinstance(ease.model, ItemModel)
    basket = Interactions.from_pairs(ids(0, 0), ids(3, 9), num_users=2, num_items=31)
    retriever = Retriever("x", ease.model, None, np.arange(31) > 0)
    found = retriever.top(ease.model.knowing(basket), {"user_id": torch.arange(2)}, 5, allowed=None, excluded=None)
    assert (found[0] > 0).all()
    assert found[1].tolist() == [-1] * 5
    of_all = retriever.top(ease.model.knowing(basket), {"user_id": torch.arange(2)}, 40, allowed=None, excluded=None)
    assert of_all[1].tolist() == [*range(1, 31), *[-1] * 10]


@pytest.mark.parametrize("name", ["two_tower", "sasrec", "bert4rec", "ials"])
def test_models_with_vectors_are_searched_by_an_index_and_scored_by_the_same_numbers(
    runs: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    build_pipeline(tmp_path / "one", [str(runs[name])], runs["wide_deep"], candidates=7)
    made, predictor = opened(tmp_path / "one"), Predictor.open(runs[name])
    (retriever,) = made.retrievers
    assert retriever.index is not None
    for user in ("u1", "u7"):
        answer = Predictor.open(tmp_path / "one").recommend([user], k=7)[0]
        best = predictor.recommend([user], k=7)[0]
        assert {item.item for item in answer.items} == {item.item for item in best.items}
        assert {item.retrieved_by for item in answer.items} == {(name,)}


# --- build -----------------------------------------------------------------------------------------------------------


def test_a_pipeline_is_its_ranker_with_the_retrievers_in_it(pipeline: Path, runs: Mapping[str, Path]) -> None:
    trained = bundle.load(pipeline)
    assert trained.card == bundle.load(runs["wide_deep"]).card
    assert trained.pipeline is not None
    assert trained.pipeline.described == "8 candidates of ease and factors"
    assert [each.has_index for each in trained.pipeline.retrievers] == [False, True]
    assert bundle.load(runs["wide_deep"]).pipeline is None
    nested = {name for name in manifest.names(pipeline / "bundle") if name.startswith("retrievers/factors/")}
    assert {"retrievers/factors/index.safetensors", "retrievers/factors/weights.safetensors"} <= nested
    assert not any("seen" in name or "manifest" in name for name in nested)
    record, ranker = run_record.read(pipeline), run_record.read(runs["wide_deep"])
    assert record is not None
    assert ranker is not None
    assert (record.kind, record.model, record.data) == ("pipeline", "wide_deep", ranker.data)
    assert record.made_of == tuple(str(runs[name].resolve()) for name in ("wide_deep", "ease", "ials"))


def test_the_command_builds_and_tells_what_it_built(runs: Mapping[str, Path], tmp_path: Path) -> None:
    asked = ["--retriever", f"{runs['ials']}", "--retriever", f"{runs['ials']}", "--retriever", f"ials={runs['ease']}"]
    asked += ["--ranker", f"{runs['wide_deep']}", "--candidates", "5", "--filter", "kind in ('a', 'b')"]
    found = CliRunner().invoke(app, ["pipeline", "build", str(tmp_path / "a"), *asked, "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert [(each["name"], each["model"], each["items"]) for each in told["retrievers"]] == [
        ("ials_2", "ials", 30),
        ("ials_3", "ials", 30),
        ("ials", "ease", 30),
    ]
    assert (told["items"], told["kept_by_the_filter"], told["candidates"]) == (30, 20, 5)
    assert told["retrievers"][0]["search"].startswith("exact search of 30 items")
    shown = CliRunner().invoke(app, ["pipeline", "build", str(tmp_path / "b"), *asked])
    assert "the filter keeps 20 of 30 items" in shown.stdout
    made = opened(tmp_path / "a")
    assert made.kept is not None
    assert made.kept.sum() == 20


def test_one_process_at_a_time_builds_a_pipeline_in_a_folder(runs: Mapping[str, Path], tmp_path: Path) -> None:
    def second(_stage: str, _done: float, _total: float | None) -> None:
        with pytest.raises(DataError, match="run: another process is building a pipeline in it; wait for it"):
            build_pipeline(tmp_path / "run", [str(runs["ials"])], runs["wide_deep"], candidates=9)

    built = build_pipeline(tmp_path / "run", [str(runs["ease"])], runs["wide_deep"], candidates=8, progress=second)
    assert opened(tmp_path / "run").card == built.card
    with pytest.raises(SettingsError, match="run: holds a run already; name another folder"):
        build_pipeline(tmp_path / "run", [str(runs["ials"])], runs["wide_deep"])


def test_all_problems_are_named_before_anything_is_written(runs: Mapping[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs["ease"] / "bundle", other)
    encoders = json.loads((other / "encoders.json").read_text())
    (other / "encoders.json").write_text(json.dumps(encoders, indent=7))
    manifest.write(other)
    with pytest.raises(SettingsError) as caught:
        build_pipeline(tmp_path / "out", [str(runs["wide_deep"]), str(other)], runs["wide_deep"])
    told = str(caught.value)
    assert "wide_deep finds no candidates, because it scores rows by their features" in told
    assert f"{other}: was trained on other data than" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("filter_text", "told"),
    [
        ("x" * 10_001, "the filter has 10,001 characters; expected at most 10,000"),
        ("kind == '\udcff'", "is no UTF-8 text"),
        ("knd == 'a'", "filter: character 1: no column 'knd' (did you mean 'kind'?)"),
        ("kind == 'none'", "keeps none of the 30 items"),
        ("kind ==", "filter"),
    ],
)
def test_a_filter_that_keeps_nothing_or_cannot_be_read_is_refused(
    runs: Mapping[str, Path], tmp_path: Path, filter_text: str, told: str
) -> None:
    with pytest.raises(SettingsError, match="pipeline build") as caught:
        build_pipeline(tmp_path / "out", [str(runs["ease"])], runs["wide_deep"], filter=filter_text)
    assert told in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_twice_strange_names_and_pipelines_in_pipelines_are_refused(
    runs: Mapping[str, Path], pipeline: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="two retrievers are called 'a'"):
        build_pipeline(tmp_path / "out", [f"a={runs['ease']}", f"a={runs['ials']}"], runs["wide_deep"])
    with pytest.raises(SettingsError, match="expected a name of letters"):
        build_pipeline(tmp_path / "out", [f"..={runs['ease']}"], runs["wide_deep"])
    with pytest.raises(SettingsError, match="is a pipeline; name the runs that it was made of"):
        build_pipeline(tmp_path / "out", [str(runs["ease"])], pipeline)
    with pytest.raises(SettingsError, match="holds a run already"):
        build_pipeline(pipeline, [str(runs["ease"])], runs["wide_deep"])
    with pytest.raises(SettingsError, match="is a bundle, whose files must stay as they are"):
        build_pipeline(pipeline / "bundle", [str(runs["ease"])], runs["wide_deep"])


# --- damaged pipelines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "pipeline.json"),
        ("[]", "damaged"),
        ('{"format": 2}', "pipeline format 2; this recspec reads 1"),
        ('{"format": 1, "candidates": 0, "retrievers": []}', "candidates: Input should be greater"),
        ('{"format": 1, "candidates": 5, "retrievers": [{"name": "../x", "has_index": true}]}', "retrievers.0.name"),
        ('{"format": 1, "candidates": 5, "retrievers": [{"name": "gone", "has_index": true}]}', "no such folder"),
        ('{"format": 1, "candidates": 5, "retrievers": [{"name": "ease", "has_index": true}]}', "finds no candidates"),
        (
            '{"format": 1, "candidates": 5, "filter": "x ==", "retrievers": [{"name": "ease", "has_index": false}]}',
            "pipeline.json: filter",
        ),
    ],
)
def test_a_damaged_pipeline_is_refused(pipeline: Path, tmp_path: Path, content: str, told: str) -> None:
    shutil.copytree(pipeline / "bundle", tmp_path / "bundle")
    (tmp_path / "bundle" / "pipeline.json").write_text(content)
    with pytest.raises(BundleError) as caught:
        Pipeline.open(bundle.load(tmp_path / "bundle", verify=False))
    assert told in str(caught.value)


def test_an_index_that_is_missing_or_of_another_width_is_refused(runs: Mapping[str, Path], tmp_path: Path) -> None:
    build_pipeline(tmp_path / "run", [str(runs["two_tower"])], runs["wide_deep"], candidates=8)
    folder = tmp_path / "run" / "bundle" / "retrievers" / "two_tower"
    index = ItemIndex.load(folder)
    ItemIndex.build(index.flat.vectors[:, :3], index.ids).save(folder)
    says = f"the index of retriever 'two_tower' holds vectors of 3 numbers; its model's have {index.dim}"
    with pytest.raises(BundleError, match=says):
        Pipeline.open(bundle.load(tmp_path / "run", verify=False))
    card = tmp_path / "run" / "bundle" / "pipeline.json"
    card.write_text(card.read_text().replace('"has_index": true', '"has_index": false'))
    says = "holds two_tower, which searches an index of item vectors; pipeline.json says that it has none"
    with pytest.raises(BundleError, match=says):
        Pipeline.open(bundle.load(tmp_path / "run", verify=False))


def test_a_catalogue_without_the_features_of_items_is_refused(runs: Mapping[str, Path], tmp_path: Path) -> None:
    shutil.copytree(bundle.find(runs["two_tower"]), tmp_path / "bundle")
    path = tmp_path / "bundle" / "items.parquet"
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([f"{name}_" if name == "kind" else name for name in table.column_names]), path)
    predictor = Predictor.open(tmp_path / "bundle", device="cpu", verify=False)
    says = r"items\.parquet: lacks 'kind', which the model reads of every item; score rows with `recspec predict`"
    with pytest.raises(BundleError, match=says):
        predictor.recommend(["u1"])
    with pytest.raises(BundleError, match=says):
        predictor.similar("100")


def test_a_changed_file_of_a_retriever_is_found(pipeline: Path, tmp_path: Path) -> None:
    shutil.copytree(pipeline / "bundle", tmp_path / "bundle")
    with (tmp_path / "bundle" / "retrievers" / "ease" / "weights.safetensors").open("ab") as file:
        file.write(b" ")
    with pytest.raises(BundleError, match=r"retrievers/ease/weights\.safetensors"):
        Predictor.open(tmp_path / "bundle")


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_protocol_full_ranks_the_candidates_first_and_tells_their_recall(
    pipeline: Path, runs: Mapping[str, Path]
) -> None:
    found = CliRunner().invoke(app, ["evaluate", str(pipeline), str(runs["data"]), "--protocol", "full", "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    facts = report["protocols"]["full"]
    assert facts["stages"].startswith("8 candidates of ease and factors, ranked by wide_deep")
    assert 0 < facts["candidates_recall"] < 1
    assert report["metrics"]["full"]["recall@10"] >= facts["candidates_recall"]


def test_with_all_items_as_candidates_a_pipeline_ranks_as_its_ranker(runs: Mapping[str, Path], tmp_path: Path) -> None:
    build_pipeline(tmp_path / "all", [str(runs["ials"])], runs["wide_deep"], candidates=100)
    trained, spec = bundle.load(tmp_path / "all"), FeatureSpec.load(runs["data"])
    ours = evaluate(trained, spec, protocols=["full"], of_all=PipelineRanker)
    alone = evaluate(bundle.load(runs["wide_deep"]), spec, protocols=["full"])
    assert ours.model.metrics == alone.model.metrics
    assert ours.model.protocols["full"]["candidates_recall"] == 1
    assert any("the candidates hold 1.0000 of the positives" in note for note in ours.notes)


def test_rows_measure_the_ranker_alone_and_say_so(pipeline: Path, runs: Mapping[str, Path]) -> None:
    found = CliRunner().invoke(app, ["evaluate", str(pipeline), str(runs["data"])])
    assert "protocol sampled measures the ranker alone" in found.stdout
    assert "protocol full measures 8 candidates of ease and factors" in found.stdout.replace("\n", " ")


def test_items_that_the_filter_leaves_out_come_last_and_level(runs: Mapping[str, Path], tmp_path: Path) -> None:
    build_pipeline(tmp_path / "a", [str(runs["ials"])], runs["wide_deep"], candidates=4, filter="kind == 'a'")
    trained, spec = bundle.load(tmp_path / "a"), FeatureSpec.load(runs["data"])
    made = Pipeline.open(trained)
    question = EvaluationTask(spec, "test", ["full"], EvaluateSettings())
    scores = PipelineRanker(trained, question).score_users(question.ranked_users[:3])
    assert made.kept is not None
    assert (scores[:, ~made.kept] == -31).all()
    assert (np.sort(scores[:, made.kept], axis=1)[:, -4:] == [1, 2, 3, 4]).all()
    assert (np.sort(scores[:, made.kept], axis=1)[:, :-4] <= 0).all()


def test_popularity_does_not_know_what_valid_asks(runs: Mapping[str, Path], tmp_path: Path) -> None:
    """The bundle counts users of train and valid; on valid, only those of train fill lists up and order the rest."""
    build_pipeline(tmp_path / "p", [str(runs["ials"])], runs["wide_deep"], candidates=2)
    trained, spec = bundle.load(tmp_path / "p"), FeatureSpec.load(runs["data"])
    question = EvaluationTask(spec, "valid", ["full"], EvaluateSettings())
    counts = question.known_positives.counts
    assert trained.seen is not None
    assert (trained.seen.counts.numpy() > counts).any()
    scores = PipelineRanker(trained, question).score_users(question.ranked_users[:1])[0]
    others = np.flatnonzero(scores <= 0)
    assert len(others) == len(counts) - 2
    for one, other in pairwise(others[np.argsort(-scores[others])].tolist()):
        assert (scores[one] > scores[other]) == (counts[one] > counts[other])  # items of equally many users are level


# --- recommendations -------------------------------------------------------------------------------------------------


def test_the_best_candidates_are_recommended_and_say_what_brought_them(
    pipeline: Path, runs: Mapping[str, Path]
) -> None:
    predictor, alone = Predictor.open(pipeline), Predictor.open(runs["wide_deep"])
    answer = predictor.recommend(["u3"], k=5)[0]
    scores = {item.item: item.score for item in alone.recommend(["u3"], k=30)[0].items}
    assert len(answer.items) == 5
    assert [item.score for item in answer.items] == sorted((item.score for item in answer.items), reverse=True)
    for item in answer.items:
        assert item.score == pytest.approx(scores[item.item], abs=1e-5)
        assert item.retrieved_by
        assert {*item.retrieved_by} <= {"ease", "factors", "popularity"}
    user = int(predictor.catalogues.user_ids(["u3"])[0])
    made, seen = opened(pipeline), predictor.recommender.seen.of(user).numpy().astype(np.int64)
    asked = [(each.model, {"user_id": torch.tensor([user])}) for each in made.retrievers]
    first = made.candidates(asked, 1, excluded=[seen])[0]
    assert {item.item for item in answer.items} <= {*predictor.raw_ids("item", first.ids).to_pylist()}


def test_filters_excluded_items_and_unknown_users(runs: Mapping[str, Path], tmp_path: Path) -> None:
    build_pipeline(tmp_path / "a", [str(runs["ials"])], runs["wide_deep"], candidates=4, filter="kind != 'a'")
    predictor = Predictor.open(tmp_path / "a")
    kinds = {100 + number: "abc"[(100 + number) % 3] for number in range(30)}
    wanted = RecommendRequest(users=("u1", "nobody"), k=30, filter="kind != 'b'", exclude=(101, 104, 107))
    known, unknown = predictor.recommend(wanted)
    for answer in (known, unknown):
        items = [int(item.item) for item in answer.items]
        assert items
        assert {kinds[item] for item in items} == {"c"}
        assert not {*items} & {101, 104, 107}
    assert {item.retrieved_by for item in unknown.items} == {("popularity",)}
    seen = predictor.recommender.seen.of(int(predictor.catalogues.user_ids(["u1"])[0])).numpy() + 99
    left = {item for item in kinds if kinds[item] == "c"} - {101, 104, 107} - {*seen.tolist()}
    assert {int(item.item) for item in known.items} == left


def test_a_basket_is_answered_by_retrievers_that_read_baskets(pipeline: Path) -> None:
    predictor = Predictor.open(pipeline)
    answer = predictor.recommend(RecommendRequest(items=(100, 103), k=5))[0]
    assert answer.answered_by == "basket"
    assert len(answer.items) == 5
    assert not {item.item for item in answer.items} & {"100", "103", 100, 103}
    assert any("ease" in (item.retrieved_by or ()) for item in answer.items)


def test_files_tables_and_json_name_the_retrievers(pipeline: Path, tmp_path: Path) -> None:
    asked = ["recommend", str(pipeline), "--user", "u3", "-k", "3"]
    shown = CliRunner().invoke(app, asked)
    assert "retrieved by" in shown.stdout
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert all(item["retrieved_by"] for item in told[0]["items"])
    found = CliRunner().invoke(
        app, ["recommend", str(pipeline), "--all", "-k", "3", "--out", str(tmp_path / "a.parquet")]
    )
    assert found.exit_code == 0, found.output
    table = pq.read_table(tmp_path / "a.parquet")
    assert len(table) == 120
    of_user = [row for row in table.to_pylist() if row["user"] == "u3"]
    assert [row["retrieved_by"] for row in of_user] == [item["retrieved_by"] for item in told[0]["items"]]


def test_rows_are_scored_by_the_ranker(pipeline: Path, runs: Mapping[str, Path]) -> None:
    rows = pa.table({"user_id": ["u1"] * 3, "item_id": [100, 101, 102]})
    ours, _ = Predictor.open(pipeline).predict(rows)
    theirs, _ = Predictor.open(runs["wide_deep"]).predict(rows)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.slow
def test_an_export_holds_the_ranker_alone_and_says_so(pipeline: Path, tmp_path: Path) -> None:
    asked = ["export", str(pipeline), str(tmp_path / "out"), "--batch-sizes", "1"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert "of a pipeline the ranker alone is exported" in found.output
    assert "take --format triton --form ranker" in " ".join(found.output.split())
    assert CliRunner().invoke(app, ["verify", str(pipeline)]).exit_code == 0


def test_an_item_model_ranks_what_another_brings_for_users_and_baskets(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    build_pipeline(tmp_path / "one", [str(runs["ials"])], runs["ease"], candidates=6)
    predictor, alone = Predictor.open(tmp_path / "one"), Predictor.open(runs["ease"])
    for wanted in (
        RecommendRequest(users=("u3", "u4"), k=6),
        RecommendRequest(items=(100, 101), k=6),
        RecommendRequest(items=(100,), users=("u1",)),
    ):
        for one, other in zip(predictor.recommend(wanted), alone.recommend(replace(wanted, k=30)), strict=True):
            scores = {item.item: item.score for item in other.items}
            assert [item.score for item in one.items] == pytest.approx([scores[item.item] for item in one.items])
            assert sorted(one.items, key=lambda item: -item.score) == list(one.items)
            assert one.answered_by == other.answered_by


def test_more_items_than_candidates_can_be_asked_for(pipeline: Path) -> None:
    predictor = Predictor.open(pipeline)
    answer = predictor.recommend(RecommendRequest(users=("u3",), k=30, include_seen=True))[0]
    assert len({item.item for item in answer.items}) == 30
    diverse = predictor.recommend(RecommendRequest(users=("u3",), k=3, diversity=0.5, diverse_by="kind"))[0]
    assert len(diverse.items) == 3


def test_boosts_and_reasons_go_with_candidates(pipeline: Path) -> None:
    predictor = Predictor.open(pipeline)
    plain = predictor.recommend(RecommendRequest(users=("u3",), k=8))[0]
    boosted = predictor.recommend(RecommendRequest(users=("u3",), k=8, boosts=("kind == 'a': 50",), explain=True))[0]
    assert {item.item for item in plain.items} == {item.item for item in boosted.items}
    kinds = ["abc"[int(item.item) % 3] for item in boosted.items]
    assert kinds == sorted(kinds, key=lambda kind: kind != "a")
    brought = {item.item: item.retrieved_by for item in plain.items}
    assert {item.item: item.retrieved_by for item in boosted.items} == brought
    assert all(item.boost is not None for item in boosted.items)


def test_items_that_nobody_acted_on_come_from_retrievers_that_read_features(tmp_path: Path) -> None:
    made_up.write_films(tmp_path, 40, "Item, number", kinds=True)
    with (tmp_path / "items.csv").open("a") as file:
        file.write('500,"New one",a\n')
    table = DATASETS["table"]
    asked = {"items": "items.csv", "item_features": ("kind",), "num_negatives": 10, "unseen_items": True}
    table.prepare(PrepareContext(tmp_path / "rows.csv", tmp_path / "data"), table.Settings.model_validate(asked))
    for name in ("two_tower", "wide_deep", "ease"):
        steps = {} if name == "ease" else {"epochs": 1, "batch_size": 500}
        given = TrainSettings.model_validate({"tensorboard": False, **steps})
        own = config.build(MODELS[name].Settings, "", SETTINGS[name])
        train(name, FeatureSpec.load(tmp_path / "data"), tmp_path / name, settings=given, model_settings=own)
    answers = []
    for retriever in ("two_tower", "ease"):
        build_pipeline(tmp_path / f"by_{retriever}", [str(tmp_path / retriever)], tmp_path / "wide_deep")
        answers.append(Predictor.open(tmp_path / f"by_{retriever}").recommend(["u3"], k=40)[0])
    new, old = ([item for item in answer.items if item.title == "New one"] for answer in answers)
    assert [item.retrieved_by for item in new] == [("two_tower",)]
    assert not old
    assert not any("without interactions" in note for note in answers[0].notes)
    assert any("without interactions" in note for note in answers[1].notes)
