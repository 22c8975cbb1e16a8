"""No item is recommended to a user who acted on it: in no split, whatever the rating or weight, by no model or door."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recspec.base import config
from recspec.base.errors import DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders
from recspec.data.prepare import PrepareContext
from recspec.data.storage import check, open_split, read_seen
from recspec.datasets import DATASETS
from recspec.evaluation import EvaluateSettings, EvaluationTask, evaluate, seen_items
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, RecommendRequest, build_pipeline
from recspec.models import MODELS, FittedModel, Interactions
from recspec.training import TrainSettings, train
from recspec.training.updating import UpdateSettings, update
from tests.asking import Asked, asking, sources
from tests.model_cases import MODEL_CASES, kind_of_data

Events = list[dict[str, object]]
ITEMS, USERS, EACH = 20, 12, 9


def shop(seed: int = 0) -> Events:
    """Events of users with nine items each, of which every third is disliked and every fourth hidden."""
    rng, events = np.random.default_rng(seed), Events()
    for user in range(USERS):
        for place, item in enumerate(rng.permutation(ITEMS)[:EACH]):
            events.append(
                {
                    "user_id": f"u{user:02d}",
                    "item_id": f"i{item:02d}",
                    "stars": 1 if place % 3 == user % 3 else 5,
                    "kind": "hide" if place % 4 == user % 4 else "buy",
                    "timestamp": 1_700_000_000 + 1_000 * place + user,
                }
            )
    return events


def written(file: Path, events: Events) -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(events[0]))
        writer.writeheader()
        writer.writerows(events)
    return file


def prepared(folder: Path, events: Events, **settings: object) -> FeatureSpec:
    folder.mkdir(parents=True)
    table = DATASETS["table"]
    asked = config.build(table.Settings, "settings", {"num_negatives": 5, **settings})
    table.prepare(PrepareContext(written(folder / "rows.csv", events), folder / "data"), asked)
    return FeatureSpec.load(folder / "data")


def trained(name: str, data: FeatureSpec, run: Path) -> Path:
    steps = {} if issubclass(MODELS[name], FittedModel) else {"epochs": 1, "batch_size": 64, "tensorboard": False}
    own = config.build(MODELS[name].Settings, "settings", MODEL_CASES[name].tiny)
    train(name, data, run, settings=TrainSettings.model_validate({"threads": 1, **steps}), model_settings=own)
    return run


def acted(events: Events) -> dict[str, set[object]]:
    found: dict[str, set[object]] = {}
    for event in events:
        found.setdefault(str(event["user_id"]), set()).add(event["item_id"])
    return found


def named(data: FeatureSpec, pairs: tuple[np.ndarray, np.ndarray] | None) -> set[tuple[object, object]]:
    """Pairs of ids as pairs of raw ids."""
    assert pairs is not None
    known = Encoders.load(data.folder).vocabularies
    columns = (
        known[name].values.take(ids - 1).to_pylist() for name, ids in zip(("user_id", "item_id"), pairs, strict=True)
    )
    return {*zip(*columns, strict=True)}


def recommended(run: Path, users: list[str], **wanted: object) -> dict[str, set[object]]:
    answers = Predictor.open(run, device="cpu").recommend(RecommendRequest(users=tuple(users), k=ITEMS, **wanted))  # type: ignore[arg-type]
    return {str(each.user): {item.item for item in each.items} for each in answers}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("seen")
    weighted = {"event": "kind", "event_weights": {"buy": 1, "hide": 0}, "rating": "stars", "min_rating": 4}
    return {
        "interactions": prepared(folder / "plain", shop(), train_negatives=1, **weighted),
        "sequences": prepared(folder / "long", shop(), train_negatives=1, history=4, **weighted),
        "rated": prepared(folder / "rated", shop(), rating="stars", min_rating=4),
    }


@pytest.mark.parametrize("name", MODEL_CASES)
def test_no_model_recommends_an_item_with_an_event_of_the_user(
    name: str, data: Mapping[str, FeatureSpec], tmp_path: Path
) -> None:
    """Of users with nine events on 20 items, at most five of which are rows, the other 11 items are left."""
    run = trained(name, data["sequences" if kind_of_data(name) == "sequences" else "interactions"], tmp_path / "run")
    events = acted(shop())
    found = recommended(run, [*events])
    for user, items in events.items():
        assert not found[user] & items, user
        assert found[user], user
    again = recommended(run, [*events], include_seen=True)
    assert any(again[user] & items for user, items in events.items())
    if {"user", "item"} <= {*MODELS[name].needs} and "history" not in MODELS[name].needs:
        assert_it_explains_varies_and_finds_items_like_one(Predictor.open(run, device="cpu"))


def assert_it_explains_varies_and_finds_items_like_one(predictor: Predictor) -> None:
    for asked in ({"users": ("u03",)}, {"items": ("i05", "i19")}, {"users": ("nobody",)}):
        varied = [{"explain": True}, {"diversity": 0.5, "diverse_by": "item_id"}]
        for more in [*varied, *([{"diversity": 0.5}] if predictor.recommender.vectors is not None else [])]:
            (answer,) = predictor.recommend(RecommendRequest(k=3, **asked, **more))  # type: ignore[arg-type]
            assert len(answer.items) == 3
            assert np.isfinite([each.score for each in answer.items]).all()
    assert len(predictor.similar("i05", k=3).items) == 3


@pytest.fixture(scope="module")
def runs(data: Mapping[str, FeatureSpec], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("ease", "two_tower", "wide_deep"):
        trained(name, data["rated"], folder / name)
    build_pipeline(
        folder / "pipeline", [str(folder / "ease"), str(folder / "two_tower")], folder / "wide_deep", candidates=8
    )
    return folder


def test_a_pipeline_recommends_none(runs: Path) -> None:
    events = acted(shop())
    found = recommended(runs / "pipeline", [*events])
    assert all(found[user] and not found[user] & items for user, items in events.items())


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Asked]:
    with asking(sources(ease=runs / "ease", both=runs / "pipeline")) as asked:
        yield asked


@pytest.mark.parametrize("model", ["ease", "both"])
def test_a_server_answers_with_none_and_leaves_out_a_requests_own_history(model: str, served: Asked) -> None:
    for user, items in acted(shop()).items():
        answer = served("POST", "/recommend", {"model": model, "user": user, "k": ITEMS})
        found = [each["item"] for each in answer.data["items"]]
        assert found
        assert not {*found} & items
        history = found[:2]
        answer = served("POST", "/recommend", {"model": model, "user": user, "items": history, "k": ITEMS})
        assert not {each["item"] for each in answer.data["items"]} & (items | {*history})


def test_an_update_knows_new_events_of_any_rating(data: Mapping[str, FeatureSpec], tmp_path: Path) -> None:
    run, events = trained("ease", data["rated"], tmp_path / "run"), shop()
    before = recommended(run, ["u00"])["u00"]
    liked, disliked, *_ = sorted(map(str, before))
    new: Events = [
        {"user_id": "u00", "item_id": liked, "stars": 5, "kind": "buy", "timestamp": 1_700_100_000},
        {"user_id": "u00", "item_id": disliked, "stars": 1, "kind": "buy", "timestamp": 1_700_100_001},
    ]
    made = update(run, written(tmp_path / "new.csv", new), settings=UpdateSettings())
    events += new
    found = recommended(run, [*acted(events)])
    assert all(not found[user] & items for user, items in acted(events).items())
    grown = FeatureSpec.load(made.folder / "data")
    check.check(grown)
    assert named(grown, read_seen(grown)) == {(each["user_id"], each["item_id"]) for each in events}


def test_a_setting_narrows_seen_to_types_of_events(tmp_path: Path) -> None:
    weights = {"buy": 1, "hide": 0.5}
    data = prepared(tmp_path / "bought", shop(), event="kind", event_weights=weights, seen=["buy"], rating=None)
    bought = {(each["user_id"], each["item_id"]) for each in shop() if each["kind"] == "buy"}
    assert named(data, read_seen(data)) == bought
    events = acted(shop())
    found = recommended(trained("ease", data, tmp_path / "run"), [*events])
    for user, items in events.items():
        own = {item for who, item in bought if who == user}
        assert not found[user] & own
        assert found[user] >= items - own  # what was only hidden may come again
    question = EvaluationTask(data, "test", ["full"], EvaluateSettings())
    assert named(data, _pairs(question.excluded)) <= bought
    assert named(data, _pairs(question.seen)) - bought  # the model knows of others


def _pairs(found: Interactions) -> tuple[np.ndarray, np.ndarray]:
    return np.divmod(found.keys, found.num_items)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seen": ["buy"]}, "seen names types of events; name their column with event"),
        ({"event": "kind", "seen": []}, "event names the column 'kind', of which nothing is used"),
    ],
)
def test_types_without_a_column_are_refused(settings: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        prepared(tmp_path / "refused", shop(), **settings)


def test_a_type_that_no_row_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"setting 'seen': no row has the type 'bought' in column 'kind'; found buy \("):
        prepared(tmp_path / "refused", shop(), event="kind", seen=["bought"])


SPLITS: Mapping[str, dict[str, object]] = {
    "leave_one_out": {},
    "time": {"split": "time", "valid": 0.2, "test": 0.2},
    "given": {"splits": "part"},
    "none": {"split": "none"},
}


@pytest.mark.parametrize("split", SPLITS)
def test_each_event_is_known_from_the_split_on_in_which_it_happened(split: str, tmp_path: Path) -> None:
    """Rows have their split. Disliked events before a user's (or the) first held-out row are train's, and so on."""
    events = shop()
    for place, each in enumerate(events):
        each["part"] = ("train", "valid", "test")[max(0, place % EACH - EACH + 3)]
    settings = {"rating": "stars", "min_rating": 4, **SPLITS[split]}
    data = prepared(tmp_path / "data", events, **settings)
    up_to = {name: named(data, read_seen(data, data.splits[: place + 1])) for place, name in enumerate(data.splits)}
    ids = Encoders.load(data.folder).vocabularies
    known = {name: {*ids[name].values.to_pylist()} for name in ("user_id", "item_id")}
    all_events = {
        (e["user_id"], e["item_id"])
        for e in events
        if e["user_id"] in known["user_id"] and e["item_id"] in known["item_id"]
    }
    assert up_to[data.splits[-1]] == all_events
    times = {(e["user_id"], e["item_id"]): int(str(e["timestamp"])) for e in events}
    kinds = {(e["user_id"], e["item_id"]): e["part"] for e in events}
    before: set[tuple[object, object]] = set()
    for name in data.splits:
        rows = open_split(data, name, ("user_id", "item_id", "label")).read(0, 10_000)
        positive = np.asarray(rows["label"]) > 0
        own = named(data, tuple(np.asarray(rows[of])[positive].astype(int) for of in ("user_id", "item_id")))  # type: ignore[arg-type]
        assert own <= up_to[name] - before
        for user, item in up_to[name] - before if split == "given" else ():
            assert kinds[user, item] == name
        if name != "train" and split in ("leave_one_out", "time"):
            begins = {user: times[user, item] for user, item in own}
            for user, item in up_to[name] - before - own:
                assert times[user, item] >= (begins[user] if split == "leave_one_out" else min(begins.values()))
        before = up_to[name]
    check.check(data)


def test_measuring_leaves_out_disliked_items_and_never_a_held_out_one(data: Mapping[str, FeatureSpec]) -> None:
    """The user knows five of 20 items from train and valid and disliked up to three before: as few are left to rank."""
    rated = data["rated"]
    question = EvaluationTask(rated, "test", ["full"], EvaluateSettings())
    assert question.truth.num_pairs == question.positives.num_pairs == USERS
    excluded = named(rated, _pairs(question.excluded))
    assert named(rated, _pairs(question.seen)) < excluded
    assert excluded == named(rated, read_seen(rated, ["train", "valid"]))
    drawn = question.candidates
    assert drawn.users is not None
    assert drawn.items is not None
    seen = seen_items(rated, ["train", "valid"])
    assert not seen.contain(drawn.users[~drawn.labels], drawn.items[~drawn.labels]).any()


def test_a_disliked_item_that_is_liked_later_is_still_a_target(tmp_path: Path) -> None:
    events = [each for each in shop() if each["user_id"] != "u00"]
    for place, (item, stars) in enumerate([("i01", 1), ("i02", 5), ("i03", 5), ("i04", 5), ("i01", 5)]):
        events.append(
            {"user_id": "u00", "item_id": item, "stars": stars, "kind": "buy", "timestamp": 1_700_000_000 + place}
        )
    data = prepared(tmp_path / "data", events, rating="stars", min_rating=4)
    question = EvaluationTask(data, "test", ["full"], EvaluateSettings())
    assert ("u00", "i01") in named(data, _pairs(question.truth))
    assert ("u00", "i01") not in named(data, _pairs(question.excluded))


def test_candidates_of_test_have_no_event_of_the_user_and_those_of_valid_know_no_test_row(tmp_path: Path) -> None:
    events = shop()
    data = prepared(tmp_path / "data", events, rating="stars", min_rating=4, num_negatives=50)

    def candidates(spec: FeatureSpec, split: str) -> dict[object, list[object]]:
        rows = open_split(spec, split, ("user_id", "item_id", "label")).read(0, 100_000)
        known = Encoders.load(spec.folder).vocabularies
        names = [known[of].values.take(np.asarray(rows[of]) - 1).to_pylist() for of in ("user_id", "item_id")]
        found: dict[object, list[object]] = {}
        for user, item, label in zip(*names, np.asarray(rows["label"]), strict=True):
            if not label:
                found.setdefault(user, []).append(item)
        return found

    drawn, own = candidates(data, "test"), acted(events)
    assert all(not {*drawn[user]} & items for user, items in own.items())
    # Other test rows: each user's last two liked items change places, so that valid stays and test has another item.
    last = {user: [e for e in events if e["user_id"] == user and e["stars"] == 5][-1] for user in own}
    free = {user: min({f"i{n:02d}" for n in range(ITEMS)} - items) for user, items in own.items()}
    for user, event in last.items():
        event["item_id"] = free[user]
    other = prepared(tmp_path / "other", events, rating="stars", min_rating=4, num_negatives=50)
    assert candidates(other, "valid") == candidates(data, "valid")
    assert candidates(other, "test") != drawn


def test_kept_targets_of_unknown_items_are_counted_where_they_are_left_out(tmp_path: Path) -> None:
    events = shop()
    events.append({"user_id": "u00", "item_id": "new", "stars": 5, "kind": "buy", "timestamp": 1_800_000_000})
    settings = {"split": "time", "valid": 0.1, "test": 0.1, "unknown_targets": "keep", "rating": None}
    data = prepared(tmp_path / "data", events, **settings)
    report = evaluate(bundle.load(trained("ease", data, tmp_path / "run")), data, protocols=["full"])
    assert report.model.protocols["full"]["of_unknown_items_left_out"] == 1
    assert "1 positives of unknown items left out" in report.described("full")


def test_labelled_rows_made_of_ratings_count_whatever_the_label(tmp_path: Path) -> None:
    """A one-star film is rated too; of clicks, those that were not made are no events."""
    pairs = {(e["user_id"], e["item_id"]) for e in shop()}
    liked = {(e["user_id"], e["item_id"]) for e in shop() if e["stars"] == 5}
    made = prepared(tmp_path / "made", shop(), label="stars", positive_from=4, split="time", num_negatives=100)
    assert named(made, read_seen(made)) == pairs
    events = shop()
    for each in events:
        each["click"] = int(each.pop("stars") == 5)  # type: ignore[call-overload]
    clicks = prepared(tmp_path / "clicks", events, label="click", split="time", num_negatives=100)
    assert named(clicks, read_seen(clicks)) == liked


def test_a_dataset_made_elsewhere_is_read_to_its_last_split(tmp_path: Path) -> None:
    for name, pairs in {"train": [(0, 0), (1, 2)], "valid": [(0, 1)], "test": [(0, 3)]}.items():
        (tmp_path / f"{name}.csv").write_text("".join(f"{user},{item},1\n" for user, item in pairs))
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"u": {"cardinality": 3}, "i": {"cardinality": 6}, "y": {}},
            "source_spec": {
                split: [{"type": "csv", "features": ["u", "i", "y"], "files": [f"{split}.csv"]}]
                for split in ("train", "valid", "test")
            },
            "channel_spec": {"user_ch": ["u"], "item_ch": ["i"], "label_ch": ["y"]},
        },
        tmp_path,
    )
    seen = bundle.load(trained("popularity", spec, tmp_path / "run")).seen
    assert seen is not None
    assert (seen.of(0).tolist(), seen.known_of(0).tolist()) == ([0, 1, 3], [0, 1])
    assert seen.num_known.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.rename_columns(["user", "item_id", "split"]), "expected the columns user_id, item_id,"),
        (lambda table: table.set_column(1, table.schema.field(1), _beyond(table)), "holds ids of 'item_id' from 1000"),
    ],
)
def test_a_damaged_file_of_seen_items_is_refused(
    change: Callable[[pa.Table], pa.Table], told: str, tmp_path: Path
) -> None:
    data = prepared(tmp_path / "data", shop(), rating=None)
    file = data.folder / "seen.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(DataError, match=told):
        check.check(data)


def _beyond(table: pa.Table) -> pa.Array:
    return pa.array(table.column(1).to_numpy() + 999, pa.int32())
