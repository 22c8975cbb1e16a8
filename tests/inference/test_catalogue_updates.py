"""Stock, prices, titles, new, withdrawn and blocked items after training: `recspec catalogue`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import recspec
from recspec.base.errors import BundleError, DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.bundle import versions
from recspec.inference.catalogue_updates import CatalogueUpdate, converted, update_catalogue
from recspec.inference.item_changes import ItemChanges
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from tests import shop

HEAD = "sku,name,price,in_stock\n"
FEATURES = {"item_features": ["category", "price"], "items": "products.csv", "title": "name"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop's data, a run of a model of events, and one of a model that scores items by their features."""
    folder = tmp_path_factory.mktemp("shop")
    shop.write(folder)
    named = {"user": "customer", "item": "sku", "timestamp": "bought_at"}
    recspec.prepare(folder / "purchases.csv", folder / "data", progress=False, **named, **FEATURES)
    recspec.train("item_knn", folder / "data", folder / "knn", progress=False)
    few = {"train.epochs": 1, "dim": 4, "embedding_dim": 4, "hidden": ()}
    recspec.train("two_tower", folder / "data", folder / "towers", progress=False, settings=few)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "knn", tmp_path / "run")
    return tmp_path / "run"


def products(run: Path, *lines: str, head: str = HEAD) -> Path:
    file = run.parent / "products.csv"
    file.write_text(head + "".join(f"{line}\n" for line in lines))
    return file


def changed(run: Path, *lines: str, head: str = HEAD, **asked: object) -> CatalogueUpdate:
    return update_catalogue(run, products(run, *lines, head=head), **asked)  # type: ignore[arg-type]


def items_for(run: Path | Predictor, user: str = "alice", k: int = 40, **asked: object) -> list[str | int]:
    predictor = run if isinstance(run, Predictor) else Predictor.open(run, device="cpu")
    (found,) = predictor.recommend(RecommendRequest(users=(user,), k=k, **asked))  # type: ignore[arg-type]
    return [each.item for each in found.items]


def values(run: Path, name: str, items: Sequence[str]) -> list[object]:
    predictor = Predictor.open(run, device="cpu")
    places = pa.array(predictor.catalogues.item_ids(items) - predictor.items.first_id)
    return pa.chunked_array([predictor.recommender.chooser.raw.column(name)]).take(places).to_pylist()


# --- new values -------------------------------------------------------------------------------------------------------


def test_filters_boosts_and_titles_use_new_values_and_others_stay(run: Path) -> None:
    first, second, *_ = items_for(run, filter="in_stock")
    before = values(run, "price", [str(second)])
    found = changed(run, f"{first},Sold out,99.5,false")
    assert found.counts == {"new": 0, "changed": 1, "unchanged": 0, "withdrawn": 0, "returned": 0}
    assert (found.version, found.waiting, found.blocked) == (1, (), ())
    assert found.notes == ("not in the file, and left as before: 39 known items (--whole withdraws them)",)
    assert first not in items_for(run, filter="in_stock")
    assert first in items_for(run)
    assert items_for(run, filter="price > 99 and title == 'Sold out'") == [first]
    assert items_for(run, boosts=("price > 99: 50",))[0] == first
    assert values(run, "price", [str(first), str(second)]) == [99.5, *before]
    again = changed(run, f"{first},Sold out,99.5,false", f"{second},{second},7,true")
    assert (again.counts["changed"], again.counts["unchanged"], again.version) == (1, 1, 2)


def test_a_column_that_a_file_leaves_out_keeps_its_latest_value(run: Path) -> None:
    changed(run, "sku-1,One,1.5,true", "sku-2,Two,2.5,true")
    changed(run, "sku-1,false", head="sku,in_stock\n")
    changed(run, "sku-2,", head="sku,price\n")  # a missing price is a value too
    assert values(run, "price", ["sku-1", "sku-2"]) == [1.5, None]
    assert values(run, "in_stock", ["sku-1", "sku-2"]) == [0, 1]
    assert values(run, "title", ["sku-1", "sku-2"]) == ["One", "Two"]
    assert items_for(run, filter="price is missing") == ["sku-2"]


def test_text_of_numbers_truths_and_blanks_is_read_as_prepare_reads_it(run: Path) -> None:
    found = changed(run, " sku-1 ,007,+1e1, TRUE ", "sku-2,,n/a,0")
    assert found.counts["changed"] == 2
    assert values(run, "title", ["sku-1", "sku-2"]) == ["007", None]
    assert values(run, "price", ["sku-1", "sku-2"]) == [10, None]
    assert values(run, "in_stock", ["sku-1", "sku-2"]) == [1, 0]


def test_a_file_with_decimal_commas_is_read_as_prepare_read_it(trained: Path, tmp_path: Path) -> None:
    table = pa.csv.read_csv(trained / "products.csv")
    prices = [
        f"{1000 + number}"[:1] + f".{number:03},50" if number % 3 else f"{number},5" for number in range(len(table))
    ]
    table = table.set_column(table.column_names.index("price"), "price", pa.array(prices))
    options = pa.csv.WriteOptions(delimiter=";")
    pa.csv.write_csv(table, tmp_path / "products.csv", options)
    shutil.copy(trained / "purchases.csv", tmp_path)
    named = {"user": "customer", "item": "sku", "timestamp": "bought_at", **FEATURES}
    items = {"file": "products.csv", "decimal": "comma"}
    settings = {**named, "items": items}
    recspec.prepare(tmp_path / "purchases.csv", tmp_path / "data", progress=False, settings=settings)
    recspec.train("popularity", tmp_path / "data", tmp_path / "run", progress=False)
    found = update_catalogue(tmp_path / "run", tmp_path / "products.csv")
    assert found.counts == {"new": 0, "changed": 0, "unchanged": len(table), "withdrawn": 0, "returned": 0}
    (tmp_path / "new.csv").write_text("sku;price\nsku-1;1.234,5\nsku-2;7\n")
    update_catalogue(tmp_path / "run", tmp_path / "new.csv")
    dear = items_for(tmp_path / "run", "nobody", filter="price > 1234 and price < 1235")
    assert dear == ["sku-1"]
    for unclear in ("12.5", "1.234"):
        (tmp_path / "new.csv").write_text(f"sku;price\nsku-1;{unclear}\nsku-2;7\n")
        with pytest.raises(DataError, match=f"row 1 has no number with a decimal comma, as prepared: '{unclear}'"):
            update_catalogue(tmp_path / "run", tmp_path / "new.csv")


def test_a_frame_and_parquet_bring_values_with_types(run: Path, tmp_path: Path) -> None:
    table = pa.table({"item_id": ["sku-1"], "price": [3.25], "is_new": [True]})
    state = recspec.catalogue(run, table)
    assert state.found.counts["changed"] == 1
    assert values(run, "price", ["sku-1"]) == [3.25]
    pq.write_table(table, tmp_path / "p.parquet")
    assert recspec.catalogue(run, tmp_path / "p.parquet").found.counts["unchanged"] == 1
    with pytest.raises(DataError, match="catalogue: found int; expected a data frame of items, or a file of them"):
        recspec.catalogue(run, 7)


# --- withdrawn and blocked --------------------------------------------------------------------------------------------


def test_items_that_a_whole_catalogue_lacks_are_withdrawn_and_may_return(run: Path) -> None:
    first, second, third, *_ = items_for(run)
    cut_off = (
        r"lacks 38 of 40 items, more than a share of 0.2, so it may be cut off; nothing was changed; if it is whole"
    )
    with pytest.raises(DataError, match=cut_off):
        changed(run, f"{first},a,1,true", f"{second},b,1,true", whole=True)
    assert len(items_for(run)) > 2
    found = changed(run, f"{first},a,1,true", f"{second},b,1,true", whole=True, most_withdrawn=1)
    with pytest.raises(SettingsError, match="--most-withdrawn is 20; expected a share from 0 to 1"):
        recspec.catalogue(run, whole=True, most_withdrawn=20)
    assert (found.counts["withdrawn"], found.notes) == (38, ())
    assert set(items_for(run)) == {first, second}
    assert set(items_for(run, "nobody")) == {first, second}  # nor the most popular ones
    back = changed(run, f"{third},c,2,true")
    assert back.counts["returned"] == 1
    assert set(items_for(run)) == {first, second, third}
    predictor = Predictor.open(run, device="cpu")
    assert {each.item for each in predictor.similar(str(first)).items} <= {second, third}
    with pytest.raises(SettingsError, match="--whole: withdraws the items that a file lacks; name the file"):
        update_catalogue(run, whole=True)


def test_a_blocked_item_is_never_recommended_until_it_is_unblocked(run: Path) -> None:
    first, second, *_ = map(str, items_for(run))
    found = update_catalogue(run, block=[first, second, first])
    assert found.blocked == (first, second)
    assert not {first, second} & set(items_for(run, include_seen=True))
    changed(run, f"{first},a,1,true")  # a file does not unblock
    assert first not in items_for(run)
    assert update_catalogue(run, unblock=[first]).blocked == (second,)
    assert first in items_for(run)
    shown = update_catalogue(run)
    assert (shown.blocked, shown.version, shown.counts) == ((second,), 3, {})


def test_blocks_that_mean_nothing_are_named_together(run: Path) -> None:
    update_catalogue(run, block=["sku-1"])
    with pytest.raises(SettingsError) as error:
        update_catalogue(run, block=["a", " ", "x" * 1001], unblock=["a", "sku-11"])
    assert [*error.value.problems] == [
        "--block and --unblock: 'a' is in both",
        "--block: an empty id",
        "--block: an id of more than 1,000 characters",
        "--unblock: 'a' is not blocked",
        "--unblock: 'sku-11' is not blocked (did you mean 'sku-1'?)",
    ]
    (note,) = update_catalogue(run, block=["sku-1x"]).notes
    assert note == "'sku-1x' is unknown to the model (did you mean 'sku-1'?); it is blocked once it is known"


# --- new items --------------------------------------------------------------------------------------------------------


def test_a_new_item_waits_if_the_model_can_t_score_it(run: Path) -> None:
    found = changed(run, "sku-90,tea no. 90,mug,5,true", head="sku,name,category,price,in_stock\n")
    assert (found.waiting, found.counts["new"]) == (("sku-90",), 1)
    assert "sku-90" not in items_for(run, filter="in_stock")
    assert "1 new item waits for a training, because the model can't score what it was not trained on: 'sku-90'" in str(
        recspec.catalogue(run)
    )
    assert update_catalogue(run, block=["sku-90"]).waiting == ()


def test_a_model_of_features_recommends_new_items_at_once(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "towers", run)
    before = items_for(run)
    head = "sku,name,category,price,in_stock\n"
    found = changed(run, "sku-90,tea no. 90,tea,12,true", "sku-91,odd,,,true", head=head)
    assert found.waiting == ()
    listed = items_for(run)
    assert set(listed) == {*before, "sku-90", "sku-91"}
    assert items_for(run, filter="title == 'tea no. 90'") == ["sku-90"]
    assert "sku-90" not in items_for(run, exclude=("sku-90",))
    predictor = Predictor.open(run, device="cpu")
    assert "sku-90" not in items_for(predictor, "nobody")  # who gets the most popular items
    similar = predictor.similar("sku-90", k=5)
    assert (similar.title, len(similar.items)) == ("tea no. 90", 5)
    (basket,) = predictor.recommend(RecommendRequest(items=("sku-90", "sku-1"), k=50))
    assert not {"sku-90", "sku-1"} & {each.item for each in basket.items}
    update_catalogue(run, block=["sku-90"])
    assert set(items_for(run)) == {*before, "sku-91"}
    unknown = changed(run, "sku-92,only a title", head="sku,name\n")
    assert unknown.waiting == ("sku-92",)  # nothing tells what it is like


def test_a_new_item_scores_as_a_known_one_of_the_same_features_that_training_never_saw(
    trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "towers", run)
    head = "sku,name,category,price,in_stock\n"
    changed(run, "sku-90,a,tea,12,true", "sku-91,b,tea,12,true", head=head)
    predictor = Predictor.open(run, device="cpu")
    (found,) = predictor.recommend(RecommendRequest(users=("bob",), k=50))
    scores = {each.item: each.score for each in found.items}
    assert scores["sku-90"] == scores["sku-91"]
    batch = {name: each[-1:] for name, each in predictor.items.features.items()}
    assert int(batch["item_id"]) == 0
    request = predictor.recommender.request_features.batch(
        predictor.catalogues.user_ids(["bob"]), predictor.recommender.check(RecommendRequest(users=("bob",))).context
    )[1]
    assert predictor.model.score_items(request, batch)[0].item() == pytest.approx(scores["sku-91"], abs=1e-5)


def test_sasrec_with_side_features_scores_new_items(trained: Path, tmp_path: Path) -> None:
    few = {"train.epochs": 1, "dim": 8, "heads": 1, "side_features": True}
    run = tmp_path / "run"
    recspec.train("sasrec", trained / "data", run, progress=False, settings=few)
    before = items_for(run)
    changed(run, "sku-90,a,tea,12,true", head="sku,name,category,price,in_stock\n")
    predictor = Predictor.open(run, device="cpu")
    assert set(items_for(predictor)) == {*before, "sku-90"}
    assert items_for(predictor.with_changes(None)) == before
    (basket,) = predictor.recommend(RecommendRequest(items=("sku-1",), k=50))
    assert "sku-90" in {each.item for each in basket.items}


# --- hostile files ----------------------------------------------------------------------------------------------------


def test_every_problem_of_a_file_is_named_and_nothing_changes(run: Path) -> None:
    file = products(
        run,
        "sku-1,a,abc,true,1",
        "sku-1,b,1,maybe,1",
        ",c,1,true,1",
        f"{'x' * 1001},d,'5,true,1",
        'sku-5,e,"5,99",true,1',
        "sku-6,f,1e999,2,1",
        head="sku,name,price,in_stock,prise\n",
    )
    with pytest.raises(DataError) as error:
        update_catalogue(run, file)
    assert str(error.value).startswith(f"{file}: 6 problems")
    assert [*error.value.problems] == [
        ("column 'in_stock': row 2 has no number, with a point and without a currency: 'maybe'"),
        "column 'price': rows 1, 4, 5 and 1 more have no number, with a point and without a currency: 'abc'",
        (
            "column 'prise' is none of the items' (did you mean 'price'?); the items have 'item_id', 'title', "
            "'category', 'price', 'in_stock', 'is_new'; leave it out, or prepare with it"
        ),
        "column 'sku': names 'sku-1' more than once; expected one row each",
        "column 'sku': row 3 has no id",
        "column 'sku': row 4 has an id of more than 1,000 characters",
    ]
    assert not (run / versions.CHANGES).exists()
    with pytest.raises(DataError, match=r"no column 'sku' or 'item_id', the item's id; found 'name'"):
        update_catalogue(run, products(run, "a", head="name\n"))
    with pytest.raises(DataError, match="column 'title' is 'title' too, which another column gives; leave one out"):
        update_catalogue(run, products(run, "sku-1,a,b", head="sku,name,title\n"))
    with pytest.raises(DataError, match="holds no row, a header at most; expected one for each item"):
        update_catalogue(run, products(run))
    with pytest.raises(DataError, match="no such file"):
        update_catalogue(run, run / "nothing.csv")


def test_truths_times_and_lists_are_checked(tmp_path: Path) -> None:
    events = pa.table({"user_id": ["a", "a", "b", "b"], "item_id": [2, 1, 1, 3], "timestamp": [1, 2, 3, 4]})
    items = pa.table(
        {
            "item_id": [1, 2, 3],
            "sold": [True, False, None],
            "since": pa.array([0, 1, 2], pa.date32()),
            "tags": [["x"], ["y"], []],
        }
    )
    whole = {"item_id": "integer"}
    recspec.prepare(events, tmp_path / "data", items=items, types=whole, progress=False, num_negatives=1)
    recspec.train("popularity", tmp_path / "data", tmp_path / "run", progress=False)
    with pytest.raises(DataError) as error:
        changed(tmp_path / "run", "x1,perhaps,soon,x", "2,2,1970-01-09,y", head="item_id,sold,since,tags\n")
    problems = [*error.value.problems]
    assert "column 'item_id': row 1 has no whole number, such as 'x1', as all known ids are" in problems
    assert "column 'sold': row 1 has no number, with a point and without a currency: 'perhaps'" in problems
    assert any(each.startswith("column 'since': holds no times such as 2024-01-31: ") for each in problems)
    assert any(each.startswith("column 'tags': holds string; expected list") for each in problems)
    changed(tmp_path / "run", "2,TRUE,1970-01-09", "4,,", head="item_id,sold,since\n")
    assert items_for(tmp_path / "run", "b", filter="sold and since >= '1970-01-09'") == [2]
    file = tmp_path / "items.jsonl"
    file.write_text('{"item_id": 2, "tags": ["z", "y"], "since": null}\n')
    assert update_catalogue(tmp_path / "run", file).counts["changed"] == 1
    assert items_for(tmp_path / "run", "b", filter="tags contains 'z'") == [2]


def test_truths_are_read_from_texts() -> None:
    for texts, expected in ((["true", " 0 ", "", "NA"], [True, False, None, None]), (["1.0", "FALSE"], [True, False])):
        found, problem = converted(pa.array(texts), pa.bool_())
        assert (found.to_pylist(), problem) == (expected, "")
    assert (
        converted(pa.array(["true", "perhaps", "2"]), pa.bool_())[1]
        == "rows 2, 3 have neither true nor false: 'perhaps'"
    )
    assert converted(pa.array([1], pa.timestamp("us")), pa.int64())[1] == "holds timestamp[us]; expected int64"
    whole, _ = converted(pa.array(["9007199254740993", "true"]), pa.int64())
    assert whole.to_pylist() == [9007199254740993, 1]


def test_a_damaged_file_of_changes_is_refused_and_not_ignored(run: Path) -> None:
    update_catalogue(run, block=["sku-1"])
    file = run / versions.CHANGES
    whole = file.read_bytes()
    for content in (whole[:100], b""):
        file.write_bytes(content)
        with pytest.raises(BundleError, match="damaged: "):
            Predictor.open(run, device="cpu")
    for table, told in (
        (pa.table({"item": ["a"]}), "its format is not 1"),
        (ItemChanges().table, "its format is not 1"),
    ):
        pq.write_table(table, file)
        with pytest.raises(
            BundleError, match=f"damaged: {told}; write it again with `recspec catalogue`, or remove it"
        ):
            update_catalogue(run)
    meta = {b"format": b"1", b"version": b"1"}
    twice = pa.table({"item": ["a", "a"], "is_withdrawn": [True, True], "is_blocked": [True, True]})
    pq.write_table(twice.replace_schema_metadata(meta), file)
    with pytest.raises(BundleError, match="an item has two rows"):
        Predictor.open(run, device="cpu")
    missing = pa.table({"item": ["a"], "is_withdrawn": pa.array([None], pa.bool_()), "is_blocked": [True]})
    pq.write_table(missing.replace_schema_metadata(meta), file)
    with pytest.raises(BundleError, match="its columns hold something else"):
        Predictor.open(run, device="cpu")
    file.unlink()
    file.symlink_to("/etc/passwd")  # leads out of the run
    assert Predictor.open(run, device="cpu").catalogues.changes is None


def test_only_the_folder_of_a_run_takes_changes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is a bundle, whose files must stay as they are; name "):
        update_catalogue(run / "bundle", block=["sku-1"])
    shutil.copytree(run / "bundle", tmp_path / "alone")
    with pytest.raises(BundleError, match="must stay as they are; name the run that holds it"):
        update_catalogue(tmp_path / "alone", block=["sku-1"])
    with pytest.raises(BundleError, match="no such folder"):
        update_catalogue(tmp_path / "gone", block=["sku-1"])


# --- updates, blends and pipelines ------------------------------------------------------------------------------------


def test_updates_of_a_run_keep_what_changed_and_a_new_training_begins_without(run: Path, trained: Path) -> None:
    update_catalogue(run, block=["sku-4"])
    changed(run, "sku-1,Renamed,77,false", "sku-90,tea no. 90,5,true")
    new = run.parent / "new.csv"
    new.write_text("customer,sku,bought_at\nalice,sku-90,2026-04-09T12:00:00\nbob,sku-90,2026-04-09T13:00:00\n")
    recspec.update(run, new, data=trained / "data", progress=False)
    newest = bundle.find(run)
    assert versions.number_of(newest) == 1
    assert values(run, "title", ["sku-1", "sku-90"]) == ["Renamed", "tea no. 90"]
    assert update_catalogue(run).waiting == ()  # the model knows it now
    assert "sku-4" not in items_for(run)
    assert "sku-4" not in items_for(newest)
    recspec.train("popularity", trained / "data", run, force=True, progress=False)
    assert not (run / versions.CHANGES).exists()


def test_blends_and_pipelines_follow(trained: Path, tmp_path: Path) -> None:
    recspec.train("popularity", trained / "data", tmp_path / "popular", progress=False)
    recspec.blend(tmp_path / "blend", [trained / "knn", tmp_path / "popular"], trained / "data", progress=False)
    parts = {"retriever": trained / "knn", "ranker": trained / "towers", "progress": False}
    recspec.pipeline(tmp_path / "funnel", filter="in_stock", **parts)
    for run in (tmp_path / "blend", tmp_path / "funnel"):
        first, second, third, *_ = map(str, items_for(run, k=5))
        found = changed(run, f"{second},x,1,false", "sku-90,new,5,true")
        assert found.waiting == ("sku-90",)
        update_catalogue(run, block=[first])
        left = items_for(run, k=5, filter="in_stock")
        assert left[0] == third
        assert not {first, second} & set(left)
        opened = Predictor.open(run, device="cpu")
        assert items_for(opened.with_changes(None), k=5)[0] == first
        assert not {first} & set(items_for(opened.with_changes(ItemChanges.of_bundle(bundle.find(run))), k=5))
    assert second not in items_for(tmp_path / "funnel", k=5)  # the pipeline's own filter reads the new stock
    assert np.isin(items_for(tmp_path / "funnel", "nobody", k=40), [first]).sum() == 0
