"""What was shown: ids and versions of answers, the journal's exposures, drawn lists, experiments, counters."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recspec.base import config
from recspec.base.errors import SettingsError
from recspec.base.files import manifest
from recspec.feature_spec import FeatureSpec
from recspec.inference import Predictor, RecommendRequest, build_pipeline, requests
from recspec.loop import (
    Experiment,
    Exploration,
    Journal,
    ListDraw,
    analyse,
    generator,
    interleave,
    now_us,
    read_outcomes,
)
from recspec.models import MODELS
from recspec.serving.exposure_log import MOST_SHOWN, ExposureLog
from recspec.serving.opened_model import DIGEST
from recspec.serving.server_metrics import ServerMetrics
from recspec.serving.settings import RepositorySettings
from recspec.serving.showing import Showing
from recspec.training import TrainSettings, train
from recspec.training.blend import blend_runs
from tests.asking import Asked, asking, fits, sources, total
from tests.made_up_lists import list_chances
from tests.made_up_models import films_and_clicks, made_up_bundle

USERS = [f"u{number}" for number in range(30)]
NEWS = {"start": "2026-01-01", "days": 366, "metrics": [{"name": "clicks", "event": "click"}]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """EASE and iALS of 30 films and 30 users, their blend, and a pipeline of both with NeuMF."""
    folder = tmp_path_factory.mktemp("shown")
    found = films_and_clicks(folder, "Film")
    spec = FeatureSpec.load(folder / "data")
    settings: dict[str, dict[str, object]] = {"ease": {"l2": 5.0}, "ials": {"factors": 4, "l2": 0.01}}
    for name, own in settings.items():
        of_model = config.build(MODELS[name].Settings, "", own)
        train(name, spec, folder / name, settings=TrainSettings(tensorboard=False), model_settings=of_model)
        found[name] = folder / name
    blend_runs(folder / "blend", [folder / "ease", folder / "ials"], spec=spec)
    build_pipeline(folder / "pipeline", [str(folder / "ials"), str(folder / "ease")], folder / "neumf", candidates=20)
    return found | {"blend": folder / "blend", "pipeline": folder / "pipeline"}


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'journal.db'}"


def shop(runs: Mapping[str, Path], names: str, url: str | None, **showing: Any) -> Any:
    """A server of some runs."""
    settings = RepositorySettings(watch=0, journal=url)
    chosen = sources(**{name: runs[name] for name in names.split()})
    return asking(chosen, settings=settings, showing=Showing(**showing))


def logged(asked: Asked) -> list[dict[str, Any]]:
    """The exposures of the journal, with their JSON read."""
    assert asked.repository.exposures is not None
    assert asked.repository.journal is not None
    asked.runner.run(asked.repository.exposures.flush())
    rows = [row for block in asked.repository.journal.exposures() for row in block.to_pylist()]
    return [
        {
            name: json.loads(value) if name in ("policy", "items", "propensities") and value else value
            for name, value in each.items()
        }
        for each in rows
    ]


def recommended(asked: Asked, **body: Any) -> dict[str, Any]:
    answer = asked("POST", "/recommend", body)
    assert answer.status == 200, answer.data
    data: dict[str, Any] = answer.data
    return data


def items_of(answer: Mapping[str, Any]) -> list[str]:
    return [str(each["item"]) for each in answer["items"]]


# --- ids and versions ------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id_of_its_own_and_says_what_made_it(runs: dict[str, Path]) -> None:
    asked_for = {
        "/recommend": {"user": "u3"},
        "/rank": {"user": "u3", "candidates": [105, 100]},
        "/similar": {"item": 105},
        "/predict": {"rows": [{"user_id": "u3", "item_id": 105}]},
    }
    digest = manifest.digest(runs["films"] / "bundle")[:DIGEST]
    with shop(runs, "films", None) as asked:
        answers = [asked("POST", path, body).data for path, body in asked_for.items()]
        answers.append(asked("POST", "/recommend", {"user": "u3"}).data)
    assert len({each["request_id"] for each in answers}) == 5
    assert all(len(each["request_id"]) == 32 for each in answers)
    assert {(each["model"], each["version"], each["update"], each["digest"]) for each in answers} == {
        ("films", "1", 0, digest)
    }
    assert len(digest) == DIGEST


def test_an_update_says_its_number_and_its_own_digest(runs: dict[str, Path], tmp_path: Path, journal: str) -> None:
    shutil.copytree(runs["ease"], tmp_path / "run")
    shutil.copytree(runs["ials"] / "bundle", tmp_path / "run" / "updates" / "0002" / "bundle")
    with shop({"run": tmp_path / "run"}, "run", journal) as asked:
        answer = recommended(asked, user="u3")
        (row,) = logged(asked)
    digest = manifest.digest(tmp_path / "run" / "updates" / "0002" / "bundle")[:DIGEST]
    assert (answer["version"], answer["update"], answer["digest"]) == ("1", 2, digest)
    assert (row["model"], row["version"]) == ("run", f"2:{digest}")


# --- exposures -------------------------------------------------------------------------------------------------------


def test_a_list_is_logged_with_all_that_made_it(runs: dict[str, Path], url: str) -> None:
    with shop(runs, "ease", url) as asked:
        sent = {"user": "u3", "item": 101, "type": "view", "id": 1}
        assert asked("POST", "/events", sent).data["accepted"] == 1
        answer = recommended(asked, user="u3", k=4, exclude=[105], surface="home", explain=True)
        fits(answer, "Recommendation")
        clicked = {
            "user": "u3",
            "item": answer["items"][0]["item"],
            "type": "impression",
            "request": answer["request_id"],
        }
        assert asked("POST", "/events", clicked).data["accepted"] == 1
        (row,) = logged(asked)
        assert asked.repository.journal is not None
        (event,) = [each for block in asked.repository.journal.events(1) for each in block.to_pylist()]
    policy = row.pop("policy")
    assert policy.pop("milliseconds") == answer["milliseconds"]
    assert policy == {"name": "greedy", "answered_by": "user", "request": {"k": 4, "exclude": [105]}}
    assert abs(row.pop("served_at") - event["received_at"]) < 60_000_000
    assert row == {
        "seq": 1,
        "request_id": answer["request_id"],
        "subject": "u3",
        "surface": "home",
        "model": "ease",
        "version": f"0:{answer['digest']}",
        "experiment": None,
        "variant": None,
        "seed": None,
        "history_seq": answer["history_seq"],
        "items": items_of(answer),
        "propensities": [1.0] * 4,
        "pool_size": 4,
    }
    assert (event["request_id"], row["history_seq"]) == (row["request_id"], 1)


def test_who_has_no_name_is_logged_without_one(runs: dict[str, Path], journal: str) -> None:
    with shop(runs, "ease", journal) as asked:
        basket = recommended(asked, items=[105, 101])
        recommended(asked, user="u3", shown=False)
        recommended(asked, user="u\0", k=2)
        recommended(asked, user=7, k=3)
        rows = logged(asked)
        metrics = asked.repository.metrics
        assert total(metrics, "recspec_exposures_total", outcome="logged", model="ease") == 2
        assert total(metrics, "recspec_exposures_total", outcome="lost") == 1  # no database takes such an id
    assert [each["subject"] for each in rows] == [None, "7"]
    assert (rows[0]["request_id"], rows[0]["history_seq"]) == (basket["request_id"], 0)
    assert rows[0]["policy"]["request"] == {"k": 10, "items": [105, 101]}
    assert (rows[1]["policy"]["answered_by"], len(rows[1]["items"])) == ("popularity", 3)


def test_long_lists_and_long_requests_are_logged_in_part(
    runs: dict[str, Path], journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recspec.serving.recommend_routes.MOST_LOGGED", 5)
    with shop(runs, "ease", journal, exploration=Exploration()) as asked:
        answer = recommended(asked, user="u3", k=8, exclude=["x" * 900] * 10)
        (row,) = logged(asked)
    assert (row["items"], len(row["propensities"])) == (items_of(answer)[:5], 5)
    assert "request" not in row["policy"]


def test_a_bad_surface_is_refused(runs: dict[str, Path]) -> None:
    with shop(runs, "ease", None) as asked:
        answer = asked("POST", "/recommend", {"user": "u3", "surface": "the home page"})
    assert (answer.status, "surface: string should match pattern" in answer.data["error"]) == (400, True)


class Broken:
    """A writer that stores nothing until it is mended."""

    waiting = 0

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.is_mended = False

    async def store(self, _: object, exposures: Any = ()) -> list[Any]:
        if not self.is_mended:
            raise OSError("no disk")
        self.stored.append(len(exposures))
        return []

    async def close(self) -> None:
        """Nothing to do."""


async def test_lists_that_can_t_be_stored_are_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    from recspec.loop import Exposure

    writer, metrics = Broken(), ServerMetrics()
    log = ExposureLog(writer, metrics.shown)
    exposure = Exposure("r", "ann", 1, "m", "0:d", {"name": "greedy"}, 0, ["a", "b"], 2, experiment="news", variant="b")
    for _ in range(3):
        log.add(exposure)
    await log.flush()
    await log.flush()
    log.add(exposure)
    await log.flush()
    assert total(metrics, "recspec_exposures_total", outcome="lost", model="m", variant="news/b") == 4
    assert [each.message for each in caplog.records] == ["lists are not logged now: no disk"]  # once
    writer.is_mended = True
    log.add(exposure)
    await log.flush()
    assert total(metrics, "recspec_exposures_total", outcome="logged", model="m", variant="news/b") == 1
    for _ in range(MOST_SHOWN // 3 + 1):  # sent at once, before the time is over
        log.add(exposure)
    await asyncio.sleep(0)
    assert writer.stored == [1, MOST_SHOWN // 3 + 1]


async def test_lists_are_stored_soon_though_nobody_asks() -> None:
    from recspec.loop import Exposure

    done = asyncio.Event()

    class Noted(Broken):
        async def store(self, *_: object) -> list[Any]:
            done.set()
            return []

    ExposureLog(Noted(), ServerMetrics().shown).add(Exposure("r", None, 1, "m", "0:d", {}, 0, [], 0))
    async with asyncio.timeout(60):
        await done.wait()


# --- drawn lists -----------------------------------------------------------------------------------------------------

DRAWN = Exploration(temperature=1.0, floor=0.1, pool=12)


@pytest.mark.parametrize("name", ["ease", "films", "blend", "pipeline"])
def test_a_drawn_list_can_be_drawn_again_and_its_chances_are_exact(
    runs: dict[str, Path], journal: str, name: str
) -> None:
    with shop(runs, name, journal, exploration=DRAWN) as asked:
        answers = [recommended(asked, user="u3", k=5) for _ in range(4)]
        rows = logged(asked)
    predictor = Predictor.open(runs[name], device="cpu")
    whole = requests.recommend(predictor, RecommendRequest(users=("u3",), k=12))["items"]  # the pool, the best first
    names, scores = [str(each["item"]) for each in whole], np.array([[each["score"] for each in whole]])
    for answer, row in zip(answers, rows, strict=True):
        assert row["items"] == items_of(answer)
        assert (row["seed"], row["pool_size"]) == (answer["request_id"], len(names))
        assert {**row["policy"], "milliseconds": 0} == {
            "name": "plackett-luce",
            "temperature": 1.0,
            "floor": 0.1,
            "pool": 12,
            "last": None,
            "answered_by": "user",
            "request": {"k": 5},
            "milliseconds": 0,
        }
        again = RecommendRequest(users=("u3",), k=5, draw=ListDraw(Exploration.of(row["policy"]), row["seed"]))
        assert [str(each["item"]) for each in requests.recommend(predictor, again)["items"]] == row["items"]
        places = np.array([[names.index(item) for item in row["items"]]])
        # the answer rounds scores to 6 digits
        np.testing.assert_allclose(row["propensities"], list_chances(scores, places, DRAWN)[0], rtol=1e-3)
    assert len({tuple(row["items"]) for row in rows}) > 1


def test_only_the_last_places_are_drawn(runs: dict[str, Path], journal: str) -> None:
    with shop(runs, "ease", journal) as asked:
        best = items_of(recommended(asked, user="u3", k=5, shown=False))
    with shop(runs, "ease", journal, exploration=Exploration(5.0, 0.5, last=2)) as asked:
        for _ in range(5):
            recommended(asked, user="u3", k=5)
        rows = logged(asked)
    assert {tuple(row["items"][:3]) for row in rows} == {tuple(best[:3])}
    assert all(row["propensities"][:3] == [1, 1, 1] and row["propensities"][3] < 1 for row in rows)
    assert len({tuple(row["items"][3:]) for row in rows}) > 1


def test_what_stands_before_the_draw_leaves_chances_exact_and_diversity_does_not(
    runs: dict[str, Path], journal: str
) -> None:
    with shop(runs, "films", journal, exploration=DRAWN) as asked:
        allowed = [*range(100, 110)]
        answer = recommended(asked, user="u3", k=5, exclude=[*range(110, 130)], boosts=["item_id >= 100: 1"])
        assert {each["item"] for each in answer["items"]} <= {str(each) for each in allowed} | set(allowed)
        recommended(asked, user="u3", k=5, diversity=0.5)
        recommended(asked, user="nobody", k=5)
        rows = logged(asked)
    assert all(0 < chance < 1 for chance in rows[0]["propensities"])
    assert rows[0]["pool_size"] <= 10
    assert (rows[1]["propensities"], rows[1]["pool_size"], rows[1]["policy"]["name"]) == (None, 12, "plackett-luce")
    assert (rows[2]["policy"]["answered_by"], len(rows[2]["propensities"])) == ("popularity", 5)


def test_a_popular_list_that_was_drawn_says_so(runs: dict[str, Path], journal: str) -> None:
    with shop(runs, "ease", journal, exploration=DRAWN) as asked:
        answer = recommended(asked, user="nobody", k=3)
    assert answer["notes"][0].startswith("unknown user: these are 3 of the most popular items")


# --- experiments -----------------------------------------------------------------------------------------------------


def news(*variants: Mapping[str, Any], **settings: Any) -> Experiment:
    shares = [{"share": 1 / len(variants), **each} for each in variants]
    return Experiment.model_validate({"name": "news", **NEWS, "variants": shares, **settings})


AB = ({"name": "a", "model": "ease"}, {"name": "b", "model": "ials", "request": {"k": 3}})


def assignments(url: str) -> list[tuple[Any, ...]]:
    import sqlalchemy as sa

    from recspec.loop.journal import assignment

    own = assignment.c
    with Journal(url, read_only=True) as opened:
        asked = sa.select(own.experiment, own.subject, own.variant, own.first_seq).order_by(own.first_seq)
        return [tuple(each) for each in opened.rows(asked)]


def test_a_variant_answers_and_the_first_list_is_the_assignment(runs: dict[str, Path], url: str) -> None:
    experiment = news(*AB)
    with shop(runs, "ease ials", url, experiments=(experiment,)) as asked:
        answers = [recommended(asked, user=user) for user in [*USERS, "u3"]]
        rows = logged(asked)
        listed = asked("GET", "/experiments").data
        fits(listed, "Experiments")
    by_hash = [experiment.variant_of(user) for user in [*USERS, "u3"]]
    assert [each["variant"] for each in answers] == by_hash == [each["variant"] for each in rows]
    assert {(each["variant"], each["model"], len(each["items"])) for each in answers} == {
        ("a", "ease", 10),
        ("b", "ials", 3),
    }
    assert {each["experiment"] for each in rows} == {each["experiment"] for each in answers} == {"news"}
    assert {row["policy"]["request"]["k"] for row in rows if row["variant"] == "b"} == {3}
    assert assignments(url) == [("news", user, by_hash[place], place + 1) for place, user in enumerate(USERS)]
    (told,) = listed["experiments"]
    counts = Counter(by_hash[:-1])
    assert [(each["name"], each["model"], each["users"]) for each in told["variants"]] == [
        ("a", "ease", counts["a"]),
        ("b", "ials", counts["b"]),
    ]
    assert (told["state"], told["start"]) == ("entering", "2026-01-01T00:00:00+00:00")


def test_a_variant_stays_whatever_becomes_of_the_shares(runs: dict[str, Path], journal: str) -> None:
    with shop(runs, "ease ials", journal, experiments=(news(*AB),)) as asked:
        before = {user: recommended(asked, user=user)["variant"] for user in USERS}
    other = news({**AB[0], "share": 0.9}, {**AB[1], "share": 0.1}, traffic=0.01)
    with shop(runs, "ease ials", journal, experiments=(other,)) as asked:
        after = {user: recommended(asked, user=user)["variant"] for user in USERS}
        outside = [recommended(asked, user=f"other{number}") for number in range(20)]
    assert after == before
    assert {*before.values()} == {"a", "b"}
    assert [each["model"] for each in outside if "variant" not in each] == ["ease"] * 20  # as the control


def test_who_names_a_model_or_no_user_is_in_no_experiment(runs: dict[str, Path], journal: str) -> None:
    with shop(runs, "ease ials", journal, experiments=(news(*AB),)) as asked:
        answers = [
            recommended(asked, user="u3", model="ials"),
            recommended(asked, items=[105]),
        ]
        assert [(row["experiment"], row["variant"]) for row in logged(asked)] == [(None, None)] * 2
        assert asked("POST", "/recommend", {"user": "u3", "version": "1"}).status == 400  # of which model
    assert [each["model"] for each in answers] == ["ials", "ease"]
    assert not any("experiment" in each for each in answers)
    assert assignments(journal) == []


def test_two_experiments_meet_in_one_user(runs: dict[str, Path], journal: str) -> None:
    other = Experiment.model_validate(
        {
            "name": "length",
            **NEWS,
            "variants": [{"name": "long", "share": 0.5}, {"name": "drawn", "share": 0.5, "explore": {"floor": 0.2}}],
        }
    )
    both = (news(*AB), other)
    with shop(runs, "ease ials", journal, experiments=both) as asked:
        for user in USERS:
            recommended(asked, user=user)
        rows = logged(asked)
    for row in rows:
        expected = {each.name: each.variant_of(row["subject"]) for each in both}
        assert (row["policy"]["variants"], row["experiment"]) == (expected, "news")
        is_drawn = expected["length"] == "drawn"
        assert row["policy"]["name"] == ("plackett-luce" if is_drawn else "greedy")
        assert row["policy"].get("floor") == (0.2 if is_drawn else None)
    assert len(assignments(journal)) == 2 * len(USERS)


def test_lists_of_two_models_are_interleaved(runs: dict[str, Path], journal: str) -> None:
    experiment = news({"name": "a", "model": "ease"}, {"name": "b", "model": "ials"}, interleave=True)
    with shop(runs, "ease ials", journal, experiments=(experiment,)) as asked:
        one, other = (
            items_of(recommended(asked, user="u3", k=6, model=name, shown=False)) for name in ("ease", "ials")
        )
        answer = recommended(asked, user="u3", k=6)
        fits(answer, "Recommendation")
        (row,) = logged(asked)
        listed = asked("GET", "/experiments").data["experiments"][0]
    seed = answer["request_id"]
    names, teams = interleave(one, other, generator(f"{seed}.teams"), 6)
    assert items_of(answer) == row["items"] == names
    assert [each["rank"] for each in answer["items"]] == [1, 2, 3, 4, 5, 6]
    assert (row["policy"]["name"], row["policy"]["teams"], row["propensities"]) == ("team-draft", teams, None)
    assert (row["seed"], row["variant"], answer["variant"]) == (seed, "interleaved", "interleaved")
    assert (row["model"], row["version"].count("+"), answer["model"]) == ("ease+ials", 1, "ease")
    assert [each["users"] for each in listed["variants"]] == [1, 1]


def test_the_usual_model_answers_for_a_variant_that_fails(
    runs: dict[str, Path], journal: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = news(*AB)
    user = next(each for each in USERS if experiment.variant_of(each) == "b")
    with shop(runs, "ease ials", journal, experiments=(experiment,)) as asked:
        asked.runner.run(asked.repository.unload("ials"))
        answer = recommended(asked, user=user)
        (row,) = logged(asked)
        refused = asked("POST", "/recommend", {"user": user, "filter": "nonsense > 1"})
        metrics = asked.repository.metrics
        assert total(metrics, "recspec_variant_errors_total", model="ease", variant="news/b") == 1
    assert (answer["model"], answer["variant"], row["model"], row["variant"]) == ("ease", "b", "ease", "b")
    assert row["policy"]["error"].startswith("model 'ials' is not loaded")
    assert "the usual model answers for a variant" in caplog.text
    assert (refused.status, "nonsense" in refused.data["error"]) == (400, True)


def test_experiments_that_can_t_be_run_are_refused_at_the_start(
    runs: dict[str, Path], journal: str, tmp_path: Path
) -> None:
    rows = made_up_bundle(tmp_path / "rows", FeatureSpec.load(runs["films"].parent / "data"), "ease")
    served = {"ease": runs["ease"], "rows": rows}
    wrong = news(
        {"name": "a"},
        {"name": "b", "model": "eas"},
        {"name": "c", "model": "ease", "version": "7"},
        {"name": "d", "model": "rows"},
        {"name": "e", "model": "ease", "request": {"user": "me", "k": 3}},
        {"name": "f", "model": "ease", "request": {"diversity": 2}},
    )
    with pytest.raises(SettingsError) as error, shop(served, "ease rows", journal, experiments=(wrong,)):
        pass
    assert list(error.value.problems) == [
        "news, variant 'a': model: expected one of 'ease', 'rows'",
        "news, variant 'b': model: unknown model 'eas' (did you mean 'ease'?); known: 'ease', 'rows'",
        "news, variant 'c': model 'ease' has no version '7'; loaded: 1",
        "news, variant 'd': model 'rows' can't recommend: it knows no users and items",
        "news, variant 'e': user: no variant may set it",
        "news, variant 'f': diversity: input should be less than or equal to 1; found 2",
    ]


def test_a_journal_that_can_t_be_read_stops_no_experiment(
    runs: dict[str, Path], journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = news(*AB)
    with shop(runs, "ease ials", journal, experiments=(experiment,)) as asked:
        from recspec.base.errors import DataError

        def broken(*_: object) -> None:
            raise DataError("no disk")

        monkeypatch.setattr(asked.repository.journal, "rows", broken)
        assert [recommended(asked, user=user)["variant"] for user in USERS] == [*map(experiment.variant_of, USERS)]
        listed = asked("GET", "/experiments").data
    fits(listed, "Experiments")
    assert [each["users"] for each in listed["experiments"][0]["variants"]] == [None, None]


def test_an_experiment_says_what_its_report_says(runs: dict[str, Path], url: str) -> None:
    with shop(runs, "ease ials", url, experiments=(news(*AB),)) as asked:
        early = asked("GET", "/experiments/news")
        assert (early.status, "nobody was assigned" in early.data["error"]) == (400, True)
        recommended(asked, user="u3")
        assert len(logged(asked)) == 1
        told = asked("GET", "/experiments/news").data
        fits(told, "ExperimentVerdict")
        with Journal(url, read_only=True) as journal:
            at = now_us()
            report = analyse(news(*AB), read_outcomes(journal, news(*AB), at), at)
        assert told["verdict"] == report.verdict
        assert abs(datetime.fromisoformat(told["at"]).timestamp() - at / 1e6) < 3600
        assert told["verdict"].startswith("Too early for b")
        unknown = asked("GET", "/experiments/new")
        assert (unknown.status, "unknown experiment 'new' (did you mean 'news'?)" in unknown.data["error"]) == (
            404,
            True,
        )


def test_without_experiments_there_are_none(runs: dict[str, Path]) -> None:
    with shop(runs, "ease", None) as asked:
        assert asked("GET", "/experiments").data == {"experiments": []}


# --- counters --------------------------------------------------------------------------------------------------------


def test_fallbacks_unknown_users_and_short_lists_are_counted(runs: dict[str, Path]) -> None:
    with shop(runs, "ease", None) as asked:
        recommended(asked, user="u3", k=3)
        recommended(asked, user="nobody", k=3)
        recommended(asked, items=[105], k=3)
        recommended(asked, user="u3", k=500)
        recommended(asked, user="u3", filter="item_id < 0")
        metrics = asked.repository.metrics

        def counts(name: str, **labels: str) -> float:
            return total(metrics, f"recspec_{name}", model="ease", variant="-", **labels)

        by = {how: counts("recommendations_total", answered_by=how) for how in ("user", "basket", "popularity")}
        assert by == {"user": 3, "basket": 1, "popularity": 1}
        assert (counts("unknown_users_total"), counts("short_lists_total"), counts("empty_lists_total")) == (1, 1, 1)
        assert total(metrics, "recspec_recommend_seconds_count", variant="-") == 5
        assert counts("exposures_total") == 0


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="workers are tested where /proc shows their memory")
def test_workers_log_their_lists_in_one_journal(runs: dict[str, Path], url: str) -> None:
    from tests.serving.test_workers import Serving

    experiment = news({"name": "a"}, {"name": "b", "explore": {}})
    opening = RepositorySettings(watch=0, control=True, threads=1, journal=url)
    served = Serving(runs["ease"], opening=opening, showing=Showing(experiments=(experiment,)))
    try:
        answers = [json.loads(served.ask("/recommend", {"user": number, "k": 3})) for number in range(12)]
    finally:
        served.stop()
    with Journal(url, read_only=True) as opened:
        rows = [row for block in opened.exposures() for row in block.to_pylist()]
    assert {row["request_id"] for row in rows} == {answer["request_id"] for answer in answers}
    assert len(assignments(url)) == 12
