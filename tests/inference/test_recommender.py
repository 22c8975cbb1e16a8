"""The best unseen items of users, one by one and in Parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recspec import api
from recspec.base.errors import BundleError, RequestError
from recspec.feature_spec import FeatureSpec
from recspec.inference import ItemIndex, recommender
from recspec.inference.answer_files import read_users, recommend_to_file
from recspec.inference.pipeline import Retriever, item_vectors
from recspec.inference.predictor import Predictor
from recspec.inference.recommendation import RecommendRequest
from recspec.models import MODELS, ItemModel
from recspec.training.loop import train
from recspec.training.settings import TrainSettings


def raw_seen(raw: Path, user: str) -> list[int]:
    lines = [line.split(",") for line in (raw / "rows.csv").read_text().splitlines()[1:]]
    return [int(item) for name, item, _ in lines if name == user]


def test_a_known_user_gets_titled_unseen_items_best_first(predictor: Predictor, raw: Path) -> None:
    (answer,) = predictor.recommend(["u3"], k=5)
    assert (answer.user, answer.known, len(answer.items), answer.notes) == ("u3", True, 5, ())
    seen_in_training = raw_seen(raw, "u3")[:-1]
    assert not {item.item for item in answer.items} & set(seen_in_training)
    assert answer.items[0].title == f"Item, number {answer.items[0].item}"
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("name", ["ease", "item_knn", "markov", "gf_cf", "ials"])
def test_a_known_user_whom_the_model_has_no_event_of_gets_the_most_popular_items(name: str, tmp_path: Path) -> None:
    """u7 clicked on nothing: the scores of all items are 0, and an order by id would mean nothing."""
    rng = np.random.default_rng(0)
    shown = [(user, item) for user in range(30) for item in rng.choice(20, 8, replace=False).tolist()]
    clicks = [int(user != 7 and rng.random() < 0.6) for user, _ in shown]
    rows = {
        "user": [f"u{user}" for user, _ in shown],
        "item": [f"i{item}" for _, item in shown],
        "clicked": clicks,
        "time": [*range(len(shown))],
    }
    api.prepare(rows, tmp_path / "data", label="clicked", progress=False)
    predictor = api.train(name, tmp_path / "data", tmp_path / "run", progress=False).predictor
    flat, other, stranger = predictor.recommend(["u7", "u1", "nobody"], k=4)
    assert (flat.known, flat.answered_by, other.answered_by) == (True, "popularity", "user")
    assert flat.items == stranger.items
    model = predictor.model
    assert isinstance(model, ItemModel)
    if name == "ials":  # its vector of u7 is all zeros, by which an index finds any items
        items = item_vectors(model, predictor.items.features)
        rows = np.arange(predictor.items.first_id, len(items))
        found = ItemIndex.build(items[rows], rows)
        retriever = Retriever("ials", model, found, np.ones(len(items), bool))
        u7, u1 = predictor.catalogues.user_ids(["u7", "u1"])
        request = {model.user_id: torch.tensor([int(u7), int(u1)])}
        brought = retriever.top(model, request, 3, allowed=None, excluded=None)
        assert (brought[0] == -1).all()
        assert (brought[1] > 0).all()
        predictor.recommender.index = found
        assert [each.items for each in predictor.recommend(["u7"], k=4)] == [stranger.items]
    (note,) = flat.notes
    assert note == f"the model scores all items alike for this user: {stranger.notes[0].removeprefix('unknown user: ')}"


def test_rows_of_one_number_alone_are_found() -> None:
    """Also if the ends of another row agree."""
    scores = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    alike = recommender._are_alike(scores)
    assert alike is not None
    assert alike.tolist() == [True, False, False, True]
    assert recommender._are_alike(scores[:, :1]) is None


def test_the_items_are_those_that_a_search_by_hand_finds(predictor: Predictor, raw: Path) -> None:
    items = list(range(100, 130))
    scores, _ = predictor.predict(pa.table({"user_id": ["u9"] * 30, "item_id": items}))
    unseen = [item for item in items if item not in raw_seen(raw, "u9")[:-1]]
    by_hand = [str(item) for item in sorted(unseen, key=lambda item: -scores[item - 100])[:4]]
    assert [item.item for item in predictor.recommend(["u9"], k=4)[0].items] == by_hand


def test_more_than_there_are_gives_all_that_are_left(predictor: Predictor) -> None:
    (answer,) = predictor.recommend(["u3"], k=1000)
    assert len(answer.items) == 30 - 12  # the held-out event of test is seen too
    assert answer.notes == ("only 18 unseen items are left",)
    assert len(predictor.recommend(["u3"], k=1000, include_seen=True)[0].items) == 30


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_finite_numbers_are_told_and_not_left_out(
    value: float, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may be finite and the scores not; such items were left out of the answer, all of them maybe."""
    width = len(predictor.items)
    monkeypatch.setattr(predictor.model, "side_scores", lambda *_: torch.full((1, width), value))
    with pytest.raises(BundleError, match=r"^the model gives no finite score for some items; train it again$"):
        predictor.recommend(["u3"], k=3)


def test_a_number_of_the_context_that_is_too_large_is_to_blame_and_not_the_model(clicks: Predictor) -> None:
    user = clicks.busiest_user()
    assert len(clicks.recommend(RecommendRequest(users=(user,), k=2, context={"hour": 3, "speed": 0.5}))[0].items) == 2
    with pytest.raises(RequestError) as caught:
        clicks.recommend(RecommendRequest(users=(user,), k=2, context={"hour": 3, "speed": 1e308}))
    assert str(caught.value) == "context: the model gives no finite score for some items; a value is too large"


def test_all_users_go_to_parquet_in_blocks_as_they_do_one_by_one(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommender, "SCORES", 100)  # three users a block
    count, unknown = recommend_to_file(predictor, None, tmp_path / "all.parquet", RecommendRequest(k=3))
    table = pq.read_table(tmp_path / "all.parquet")
    assert (count, unknown) == (40, 0)
    assert table.column_names == ["user", "known", "rank", "item", "title", "score"]
    assert table.num_rows == 120
    for user in ("u0", "u17", "u39"):
        rows = [row for row in table.to_pylist() if row["user"] == user]
        (answer,) = predictor.recommend([user], k=3)
        assert [row["item"] for row in rows] == [item.item for item in answer.items]
        assert [row["title"] for row in rows] == [item.title for item in answer.items]
        assert [row["rank"] for row in rows] == [1, 2, 3]
        np.testing.assert_allclose([row["score"] for row in rows], [i.score for i in answer.items], atol=1e-5)


def test_unknown_users_in_a_file_get_popular_items(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "users.txt").write_text("u1\n\nnobody\n")
    users = read_users(predictor, tmp_path / "users.txt")
    assert users == ["u1", "nobody"]
    assert recommend_to_file(predictor, users, tmp_path / "some.parquet", RecommendRequest(k=2)) == (2, 1)
    rows = pq.read_table(tmp_path / "some.parquet").to_pylist()
    assert [(row["user"], row["known"]) for row in rows] == [
        ("u1", True),
        ("u1", True),
        ("nobody", False),
        ("nobody", False),
    ]
    recommend_to_file(predictor, [], tmp_path / "none.parquet", RecommendRequest(k=2))
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_ids_that_recspec_did_not_make_are_taken_as_they_are(bare: Predictor) -> None:
    (answer,) = bare.recommend([0], k=10)
    assert (answer.user, answer.known) == (0, True)
    assert sorted(item.item for item in answer.items) == [3, 4, 5]
    assert not bare.recommend([8], k=1)[0].known
    assert not bare.recommend(["who"], k=1)[0].known
    assert sorted({item.item for item in bare.recommend([99], k=10)[0].items}) == [0, 1, 2, 3, 4, 5]


def test_liked_items_and_the_busiest_user(predictor: Predictor, raw: Path) -> None:
    titles = predictor.liked("u3", k=4)
    assert len(titles) == 4
    assert {int(title.rsplit(" ", 1)[1]) for title in titles} <= set(raw_seen(raw, "u3"))
    assert str(predictor.busiest_user()).startswith("u")
    assert predictor.liked("nobody") == []


@pytest.mark.parametrize(("role", "lacks"), [("item", "user to recommend to"), ("user", "item to recommend")])
def test_a_model_without_users_or_items_says_to_predict(tmp_path: Path, role: str, lacks: str) -> None:
    (tmp_path / "train.csv").write_text("0,1\n1,0\n2,1\n" * 5)
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"who": {"cardinality": 3}, "y": {}},
            "source_spec": {"train": [{"type": "csv", "features": ["who", "y"], "files": ["train.csv"]}]},
            "channel_spec": {role: ["who"], "label": ["y"]},
        },
        tmp_path,
    )
    wide_deep = MODELS["wide_deep"].Settings.model_validate({"hidden": (4,), "embedding_dim": 2})
    train("wide_deep", spec, tmp_path / "run", settings=TrainSettings(epochs=0), model_settings=wide_deep)
    model = Predictor.open(tmp_path / "run", device="cpu")
    message = rf"run/bundle: this model has no {lacks}; score rows with `recspec predict`$"
    with pytest.raises(BundleError, match=message):
        model.recommend([1])
    for users in (None, [1]):
        with pytest.raises(BundleError, match=message):
            recommend_to_file(model, users, tmp_path / "out.parquet", RecommendRequest())
