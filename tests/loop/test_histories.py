"""What the next answer knows: one promise, asked of every registered model.

The answer equals that of a bundle with the same weights whose dataset held the events.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch

from recspec.bundle import Blend, Card, Member, TreeRanker, blend_of
from recspec.bundle import folder as bundle
from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.datasets.table_growth import append_events
from recspec.evaluation import interactions_of
from recspec.feature_spec import FeatureSpec
from recspec.inference import LiveEvents, Predictor, RecommendRequest, build_pipeline, requests
from recspec.loading import item_features
from recspec.loop import Event, Histories, Journal
from recspec.models import MODELS, FittedItemModel, ItemModel, Model, TrainedItemModel, find_model
from recspec.training.result import inform, seen_of
from tests.closeness import assert_close
from tests.model_cases import MODEL_CASES

START, HOUR = 1_700_000_000, 3_600
NEW = [
    ("u1", "i03", 1_000 * HOUR),
    ("u1", "i07", 1_001 * HOUR),
    ("u1", "i03", 1_002 * HOUR),
    ("u2", "i01", 1_000 * HOUR),
    ("u5", "i09", -HOUR),
    ("u5", "i11", 37 * HOUR + 60),
]
"""User, item and time from `START`; those of u5 are late: before all of the dataset, and among its events."""
OF_STRANGER = [("zed", "i02", 1_000 * HOUR), ("zed", "i05", 1_001 * HOUR), ("zed", "i02", 1_002 * HOUR)]


def known_rows() -> pa.Table:
    """Ten events of each of 12 users with 15 items of three kinds, an hour apart."""
    rng = np.random.default_rng(0)
    rows = [(f"u{user}", int(item), user) for user in range(12) for item in rng.permutation(15)[:10]]
    times = START + HOUR * rng.permutation(len(rows))
    return table_of([(user, f"i{item:02d}", int(time)) for (user, item, _), time in zip(rows, times, strict=True)])


def table_of(rows: list[tuple[str, str, int]]) -> pa.Table:
    users, items, times = (list(each) for each in zip(*rows, strict=True))
    kinds = ["abc"[int(item[1:]) % 3] for item in items]
    types = [type_of(time) for time in times]
    return pa.table({"user_id": users, "item_id": items, "timestamp": times, "kind": kinds, "type": types})


def type_of(time: int) -> str:
    return ("view", "cart", "purchase")[time // HOUR % 3]


def prepared(folder: Path, rows: pa.Table, **settings: object) -> FeatureSpec:
    folder.mkdir(parents=True)
    pa_csv.write_csv(rows, folder / "rows.csv")
    table = DATASETS["table"]
    given = {"item_features": ["kind"], "split": "none", "history": 6, "train_negatives": 1, **settings}
    table.prepare(PrepareContext(folder / "rows.csv", folder / "data", threads=1), table.Settings.model_validate(given))
    return FeatureSpec.load(folder / "data")


def grown(base: FeatureSpec, folder: Path, events: list[tuple[str, str, int]]) -> FeatureSpec:
    """The dataset with further events, as an update makes it."""
    (folder / "data").mkdir(parents=True)
    pa_csv.write_csv(table_of([(user, item, START + time) for user, item, time in events]), folder / "new.csv")
    return append_events(base, folder / "new.csv", folder / "data").spec


def trained_to(spec: FeatureSpec, seq: int) -> FeatureSpec:
    made = spec.replace(metadata={**spec.metadata, "trained_to": seq})
    made.save(spec.folder)
    return FeatureSpec.load(spec.folder)


WEIGHTED = {"event": "type", "event_weights": {"view": 1, "cart": 3, "purchase": 5}, "history": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    """A dataset that was made from the journal's first event."""
    return trained_to(prepared(tmp_path_factory.mktemp("base") / "own", known_rows()), 1)


@pytest.fixture(scope="module")
def with_events(base: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return grown(base, tmp_path_factory.mktemp("grown"), NEW)


@pytest.fixture(scope="module")
def with_stranger(base: FeatureSpec, tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return grown(base, tmp_path_factory.mktemp("stranger"), [*NEW, *OF_STRANGER])


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """One event that the dataset holds, then the new ones, in no order of time."""
    made = Journal(f"sqlite:///{tmp_path_factory.mktemp('journal') / 'journal.db'}")
    made.store([event("u1", "i14", 0)])
    made.store([event(*each) for each in reversed([*NEW, *OF_STRANGER])])
    return made


def event(user: str, item: str, time: int, kind: str | None = None, value: float | None = None) -> Event:
    at = (START + time) * 1_000_000
    return Event(f"{user} {item} {time} {kind}", user, kind or type_of(START + time), item, value, at, at)


def made(name: str, spec: FeatureSpec, **settings: object) -> Model:
    """A model that knows the events of its dataset; of one that is trained by steps, the weights are drawn."""
    own = MODELS[name].Settings.model_validate({**MODEL_CASES[name].tiny, **settings})
    model = MODELS[name](spec, own)
    if isinstance(model, FittedItemModel):
        model.fit(interactions_of(model, spec, ["train"]))
        return model.eval()
    if isinstance(model, TrainedItemModel):
        model.learn_from(interactions_of(model, spec, ["train"]))
        model.describe(item_features(spec, ["train"], model.item_inputs))
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=numbers) * 0.5)
    return model.eval()


def saved(folder: Path, model: Model, spec: FeatureSpec) -> Predictor:
    """A bundle of these weights on a dataset, opened."""
    known = inform(model, spec) if isinstance(model, ItemModel) else None
    kind, own = bundle.OF_MEMBERS.get(model.name) or find_model(model.name), model.settings
    card = Card(model=model.name, settings=own.model_dump(mode="json"))
    events = None if known is None else known.order
    where = bundle.save(
        folder, kind(spec, own), card, seen=seen_of(spec, known), events=events, weights=model.state_dict()
    )
    return Predictor.open(where, device="cpu")


WITHOUT_ROWS = ["lightgbm", "logistic_regression", "multitask"]
"""Models of labelled rows, which read no events."""


@pytest.mark.parametrize("name", sorted({*MODELS} - {*WITHOUT_ROWS}))
def test_an_answer_is_that_of_a_bundle_whose_dataset_held_the_events(
    name: str, base: FeatureSpec, with_events: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    model = made(name, base)
    now = saved(tmp_path / "now", model, base)
    then = saved(tmp_path / "then", model, with_events)
    users = ["u1", "u2", "u5", "u7"]
    live = Histories(journal, now).of(users)
    assert live.has.tolist() == [True, True, True, False]
    assert_alike(now, then, users, live)


@pytest.mark.parametrize("name", sorted(name for name in MODELS if issubclass(MODELS[name], ItemModel)))
def test_a_user_whom_the_dataset_does_not_know_becomes_known_by_events(
    name: str, base: FeatureSpec, with_stranger: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    model = made(name, base)
    now = saved(tmp_path / "now", model, base)
    then = saved(tmp_path / "then", model, with_stranger)
    users = ["zed", "u1"]
    live = Histories(journal, now).of(users)
    (answer,) = now.recommend(["zed"], live=live.of(np.array([0])))
    assert (answer.known, answer.answered_by) == (False, "history")
    assert answer.notes[0] == "unknown user: answered by the history"
    assert_alike(now, then, users, live)


@pytest.mark.parametrize("name", ["ease", "item_knn", "markov", "gf_cf", "ials", "sasrec"])
def test_weights_of_types_recency_and_times_count_as_in_the_dataset(
    name: str, journal: Journal, tmp_path: Path
) -> None:
    base = trained_to(prepared(tmp_path / "base", known_rows(), **WEIGHTED), 1)
    after = grown(base, tmp_path / "grown", [*NEW, *OF_STRANGER])
    model = made(name, base, **({"time_gaps": True} if name == "sasrec" else {"recency": 0.7}))
    now = saved(tmp_path / "now", model, base)
    then = saved(tmp_path / "then", model, after)
    users = ["u1", "u2", "u5", "u7", "zed"]
    assert_alike(now, then, users, Histories(journal, now).of(users))


def a_tree(column: int, threshold: float) -> dict[str, object]:
    leaves = [{"leaf_value": value, "leaf_count": 1} for value in (-1.0, 1.0)]
    split = {"split_feature": column, "decision_type": "<=", "missing_type": "None", "threshold": threshold}
    return {**split, "left_child": leaves[0], "right_child": leaves[1]}


def blended(kind: type[Blend], spec: FeatureSpec) -> Blend:
    models = [cast(ItemModel, made(name, spec)) for name in ("ease", "sasrec", "ials")]
    parts = [Member(model=each.name, settings=each.settings.model_dump(mode="json"), weight=1.0) for each in models]
    blend = blend_of(spec, [*zip(parts, models, strict=True)], kind)
    if isinstance(blend, TreeRanker):
        blend.add_trees()
        blend.trees.fill([a_tree(column, column / 5) for column in range(len(blend.column_names()))])
    return blend.eval()


@pytest.mark.parametrize("kind", [Blend, TreeRanker])
def test_the_members_of_a_blend_know(
    kind: type[Blend], base: FeatureSpec, with_stranger: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    model = blended(kind, base)
    now, then = saved(tmp_path / "now", model, base), saved(tmp_path / "then", model, with_stranger)
    users = ["u1", "u5", "u7", "zed"]
    assert_alike(now, then, users, Histories(journal, now).of(users))


@pytest.mark.parametrize("ranker", ["din", "wide_deep", "ease", "lambdarank"])
def test_retrievers_and_ranker_of_a_pipeline_know(
    ranker: str, base: FeatureSpec, with_events: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    models = {name: made(name, base) for name in ("ials", "markov")}
    models["ranker"] = blended(TreeRanker, base) if ranker == "lambdarank" else made(ranker, base)
    found = []
    for time, spec in (("now", base), ("then", with_events)):
        for name, model in models.items():
            saved(tmp_path / time / name, model, spec)
        named = [str(tmp_path / time / name) for name in ("ials", "markov")]
        build_pipeline(tmp_path / time / "pipeline", named, tmp_path / time / "ranker", candidates=4)
        found.append(Predictor.open(tmp_path / time / "pipeline", device="cpu"))
    now, then = found
    users = ["u1", "u2", "u5", "u7"]
    live = Histories(journal, now).of([*users, "zed"])
    asked = RecommendRequest(users=tuple(users), k=4)
    for ours, theirs in zip(now.recommend(asked, live=live.of(np.arange(4))), then.recommend(asked), strict=True):
        assert [each.item for each in ours.items] == [each.item for each in theirs.items]
        assert [each.retrieved_by for each in ours.items] == [each.retrieved_by for each in theirs.items]
        assert_close(*(np.array([each.score for each in answer.items], np.float32) for answer in (ours, theirs)))
    (stranger,) = now.recommend(RecommendRequest(users=("zed",), k=4), live=live.of(np.array([4])))
    assert stranger.answered_by == "history"
    assert {"ials", "markov"} <= {name for each in stranger.items for name in each.retrieved_by or ()}
    assert not {each.item for each in stranger.items} & {"i02", "i05"}


@pytest.mark.parametrize("name", ["din", "dien", "sim", "two_tower"])
def test_a_model_of_histories_reads_those_of_users_without_an_id(
    name: str, base: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    now = saved(tmp_path / "now", made(name, base), base)
    live = Histories(journal, now).of(["zed"])
    (answer,) = now.recommend(["zed"], k=20, live=live)
    assert (answer.answered_by, answer.known) == ("history", False)
    days = [HOUR * each / 86_400 for each in (2, 1, 0)]
    row = {"user_id": "zed", "history_item_id": ["i02", "i05", "i02"], "history_gap": days}
    by_hand = requests.rank(now, row, [each.item for each in answer.items])
    found, wanted = ({each.item: each.score for each in items} for items in (answer.items, by_hand.items))
    assert_close(*(np.array([each[item] for item in wanted], np.float32) for each in (found, wanted)))
    assert len(answer.items) == 13


@pytest.mark.parametrize("name", ["din", "ease", "sasrec", "neumf"])
def test_ranking_knows_what_recommending_does(name: str, base: FeatureSpec, journal: Journal, tmp_path: Path) -> None:
    now = saved(tmp_path / "now", made(name, base), base)
    live = Histories(journal, now).of(["u1"])
    (answer,) = now.recommend(["u1"], k=20, live=live)
    ranked = requests.rank(now, {"user_id": "u1"}, [each.item for each in answer.items], live=live)
    without = requests.rank(now, {"user_id": "u1"}, [each.item for each in answer.items])
    assert [each.item for each in ranked.items] == [each.item for each in answer.items]
    found, other = ([round(each.score, 4) for each in items.items] for items in (ranked, without))
    assert found == [round(each.score, 4) for each in answer.items]
    assert (found == other) == (name == "neumf")


def test_a_model_of_users_alone_gives_strangers_the_most_popular_items_that_are_new_to_them(
    base: FeatureSpec, journal: Journal, tmp_path: Path
) -> None:
    now = saved(tmp_path / "now", made("neumf", base), base)
    (answer,) = now.recommend(["zed"], k=20, live=Histories(journal, now).of(["zed"]))
    assert answer.answered_by == "popularity"
    assert answer.notes[:2] == (
        "unknown user: these are the 13 most popular items; score is the number of users",
        "the model can't rank by the user's new events, so their items are only left out",
    )
    assert not {each.item for each in answer.items} & {"i02", "i05"}


def test_the_documents_say_what_every_model_reads() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.partition("### What the next answer knows")[2].partition("\n###")[0]
    assert {name for name in MODELS if f"`{name}`" not in section} == set()


def assert_alike(now: Predictor, then: Predictor, users: list[str], live: LiveEvents) -> None:
    """Scores of all items agree, and the items that are left out."""
    ids, others = now.catalogues.user_ids(users), then.catalogues.user_ids(users)
    asked = RecommendRequest(users=tuple(users), k=20)
    context = now.recommender.check(asked).context
    scores = now.recommender.scores_of_all(ids, context, live)
    expected = then.recommender.scores_of_all(others, then.recommender.check(asked).context)
    assert_close(scores, expected, now.model.name)
    for ours, theirs in zip(now.recommend(asked, live=live), then.recommend(asked), strict=True):
        assert {each.item for each in ours.items} == {each.item for each in theirs.items}, (ours.user, now.model.name)
        found, wanted = ({each.item: each.score for each in answer.items} for answer in (ours, theirs))
        assert_close(*(np.array([each[item] for item in wanted], np.float32) for each in (found, wanted)))
