"""What a search varies: the notation is read, every model names a space that holds, and the defaults lie inside."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS
from recspec.models.base import on_meta_device
from recspec.training.loop import plan_run
from recspec.training.plan import Plan
from recspec.training.search.search_space import (
    Around,
    OneOf,
    Range,
    default_of,
    parse_space,
    search_space,
    sections_of,
    spread,
)
from recspec.training.settings import TrainSettings
from tests import made_up
from tests.model_cases import kind_of_data

SECTIONS: dict[str, type[BaseModel]] = {"settings": MODELS["neumf"].Settings, "train": TrainSettings}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("space")
    return {
        "interactions": made_up.interactions(folder / "interactions", num_rows=600),
        "clicks": made_up.clicks(folder / "clicks", num_rows=400),
        "sequences": made_up.sequences(folder / "sequences", num_rows=300),
    }


def plan_of(
    name: str,
    spec: FeatureSpec,
    *,
    settings: Mapping[str, object] | None = None,
    train: Mapping[str, object] | None = None,
) -> Plan:
    own, common = MODELS[name].Settings(**(settings or {})), TrainSettings(**(train or {}))  # type: ignore[arg-type]
    return plan_run(name, spec, Path("unused"), common, own, Ranks(), resume=False)


# --- the notation ----------------------------------------------------------------------------------------------------


def test_ranges_and_lists_are_read() -> None:
    entries = {
        "learning_rate": "x0.1..x10 log",
        "dropout": "0.0..0.5",
        "settings.factors": "4..16",
        "batch_size": [1, 2],
        "settings.l2": "0 or 1e-4..1 log",
        "factors,layers": [[4, [8, 4]], [8, [16, 8]]],
    }
    read = parse_space(entries, SECTIONS)
    assert read == {
        "train.learning_rate": Around(0.1, 10, log=True),
        "settings.dropout": Range(0.0, 0.5),
        "settings.factors": Range(4, 16),
        "train.batch_size": OneOf((1, 2)),
        "settings.l2": Range(1e-4, 1, log=True, or_zero=True),
        "settings.factors,settings.layers": OneOf(([4, [8, 4]], [8, [16, 8]])),
    }
    assert parse_space({name: each.written() for name, each in read.items()}, SECTIONS) == read


def test_all_that_is_wrong_is_told_at_once() -> None:
    entries = {
        "learning_rat": "1..2",
        "dropout": 0.5,
        "factors": "16..4",
        "epochs": "0..4 log",
        "seed": [1],
        "momentum": "a..b",
        "average": "0.1..0.9 linear",
        "settings.l2": "0 or 1..2",
        "weight_decay": "x0..x2",
        "eps": "1e-9..inf log",
        "factors,layers": [[4, [8, 4]], 8],
        "factors,dropout": "1..2",
    }
    with pytest.raises(SettingsError) as caught:
        parse_space(entries, SECTIONS)
    told = str(caught.value)
    assert "unknown setting 'learning_rat' (did you mean 'learning_rate'?)" in told
    assert "'dropout' is 0.5: expected a list of values or a range; write '[16, 32, 64]'" in told
    assert "'factors' is '16..4': the first number is not below the second" in told
    assert "'epochs' is '0..4 log': magnitudes need a lowest number above 0" in told
    assert "'seed' is [1]: expected at least two values" in told
    assert "'momentum' is 'a..b': the ends of the range are no numbers" in told
    assert "'linear' behind the range; expected 'log' or nothing" in told
    assert "'settings.l2' is '0 or 1..2': '0 or' stands before a range of magnitudes" in told
    assert "'weight_decay' is 'x0..x2': magnitudes need a lowest number above 0" in told
    assert "'eps' is '1e-9..inf log': the ends of the range are no numbers" in told
    assert "'factors,layers' is [[4, [8, 4]], 8]: expected a list of 2 values in each place" in told
    assert "'factors,dropout' is '1..2': settings that vary together need a list of lists" in told


def test_values_that_are_no_settings_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"'dropout' is .*: expected numbers, text, true or false, or lists"):
        parse_space({"dropout": [object(), 1]}, SECTIONS)


def test_what_a_study_holds_stands_for_the_nearest_value() -> None:
    decay = Range(1e-4, 1.0, log=True, or_zero=True)
    assert decay.lowest == 1e-5
    assert decay.value(9e-5) == 0.0
    assert decay.value(1e-4) == 1e-4
    assert decay.stored(0.0) == pytest.approx(1e-4 / math.sqrt(10))
    assert decay.value(decay.stored(0.0)) == 0.0
    assert decay.stored(5.0) == 1.0
    whole = Range(4, 16)
    assert (whole.stored(3), whole.stored(8), whole.stored(99)) == (4, 8, 16)
    assert (whole.stored(None), whole.stored("8"), whole.stored(True), whole.stored(math.nan)) == (None,) * 4
    some = OneOf(([8, 4], [16, 8]))
    assert some.value(some.stored([16, 8])) == [16, 8]
    assert some.stored([1, 2]) is None


def test_a_range_around_a_default_is_whole_if_the_default_is() -> None:
    assert Around(0.25, 4, log=True).of(2048) == Range(512, 8192, log=True)
    assert Around(0.25, 4, log=True).of(1) == Range(1, 4, log=True)
    assert Around(0.9, 1.1).of(1) == Range(1, 2)
    assert Around(0.1, 10, log=True).of(0.02) == Range(0.002, 0.2, log=True)
    with pytest.raises(ValueError, match=r"the default is 0.0, and a range around it needs a number above 0"):
        Around(0.1, 10).of(0.0)


# --- the space of a search -------------------------------------------------------------------------------------------


def test_what_is_asked_for_joins_or_replaces_the_model_s_own_space(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = plan_of("neumf", datasets["interactions"])
    own = search_space("neumf", plan, {})
    asked = parse_space({"dropout": [0.1, 0.2], "average": "0.5..0.9"}, SECTIONS)
    both = search_space("neumf", plan, asked)
    assert set(both) == {*own, "train.average"}
    assert both["settings.dropout"] == OneOf((0.1, 0.2))
    assert both["settings.factors"] == own["settings.factors"]
    assert search_space("neumf", plan, asked, only=True) == asked


def test_what_is_given_is_not_searched_unless_asked_for(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = plan_of("neumf", datasets["interactions"])
    asked = parse_space({"factors": [8, 16]}, SECTIONS)
    found = search_space("neumf", plan, asked, fixed=["settings.dropout", "settings.factors"])
    assert "settings.dropout" not in found
    assert found["settings.factors"] == OneOf((8, 16))


def test_settings_that_vary_together_go_if_one_of_them_is_given(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = plan_of("dlrm", datasets["clicks"])
    together = "settings.embedding_dim,settings.bottom"
    assert together in search_space("dlrm", plan, {})
    assert together not in search_space("dlrm", plan, {}, fixed=["settings.bottom"])
    assert spread({together: [8, [64, 8]]}) == {"settings.embedding_dim": 8, "settings.bottom": [64, 8]}


def test_negatives_are_searched_only_where_they_are_drawn(datasets: Mapping[str, FeatureSpec]) -> None:
    assert "train.negatives" in search_space("neumf", plan_of("neumf", datasets["interactions"]), {})
    assert "train.negatives" not in search_space("wide_deep", plan_of("wide_deep", datasets["clicks"]), {})


def test_a_part_that_the_model_lacks_is_not_searched(datasets: Mapping[str, FeatureSpec]) -> None:
    found = search_space("wide_deep", plan_of("wide_deep", datasets["clicks"], settings={"use_wide": False}), {})
    assert "train.parts.deep.embeddings.weight_decay" in found
    assert "train.parts.wide.tables.weight_decay" not in found


def test_the_decay_of_tables_that_are_updated_by_row_is_not_searched(datasets: Mapping[str, FeatureSpec]) -> None:
    parts = {"deep.embeddings": {"optimizer": "adagrad"}}
    found = search_space("wide_deep", plan_of("wide_deep", datasets["clicks"], train={"parts": parts}), {})
    assert "train.parts.deep.embeddings.weight_decay" not in found
    assert "train.parts.wide.tables.weight_decay" in found


def test_a_default_outside_the_model_s_space_joins_it(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = plan_of("neumf", datasets["interactions"], settings={"dropout": 0.9, "factors": 24})
    found = search_space("neumf", plan, {})
    assert found["settings.dropout"] == Range(0.0, 0.9)
    assert found["settings.factors"] == OneOf((24, 8, 16, 32, 64, 128))
    asked = parse_space({"dropout": "0.1..0.2"}, SECTIONS)
    assert search_space("neumf", plan, asked)["settings.dropout"] == Range(0.1, 0.2), "what is asked for stays"


def test_a_part_s_setting_is_the_shared_one_by_default(datasets: Mapping[str, FeatureSpec]) -> None:
    parts = {"deep.embeddings": {"learning_rate": 0.5}}
    plan = plan_of("wide_deep", datasets["clicks"], train={"weight_decay": 1e-5, "parts": parts})
    assert default_of("train.parts.deep.embeddings.weight_decay", plan) == 1e-5
    assert default_of("train.parts.wide.tables.weight_decay", plan) == 1e-5
    assert default_of("train.parts.deep.embeddings.learning_rate", plan) == 0.5
    assert default_of("train.batch_size", plan) == plan.settings.batch_size


def test_nothing_to_search_is_an_error(datasets: Mapping[str, FeatureSpec]) -> None:
    plan = plan_of("neumf", datasets["interactions"])
    with pytest.raises(SettingsError, match="there is nothing to search"):
        search_space("neumf", plan, {}, only=True)
    asked = parse_space({"settings.l2": "x0.1..x10"}, SECTIONS)
    with pytest.raises(SettingsError, match=r"'settings.l2' is 'x0.1..x10': the default is 0.0, and a range around"):
        search_space("neumf", plan, asked)


# --- every model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_space_of_a_model_holds_its_defaults_and_builds(name: str, datasets: Mapping[str, FeatureSpec]) -> None:
    """Each value alone beside the defaults makes settings, and a model on made-up data."""
    spec = datasets[kind_of_data(name)]
    plan = plan_of(name, spec)
    if not MODELS[name].Settings.model_fields:
        pytest.skip("it has no settings")
    assert MODELS[name].space, "a model names what is worth searching"
    written = parse_space(MODELS[name].space, sections_of(name))
    space = search_space(name, plan, {})
    assert set(space) <= set(written)
    for setting, drawn in space.items():
        default = default_of(setting, plan)
        stored = drawn.stored(default)
        assert drawn.holds(stored), f"{setting}: the default {default!r} lies outside {drawn.written()}"
        assert json.dumps(drawn.value(stored)) == json.dumps(default), setting
        ends = drawn.values if isinstance(drawn, OneOf) else (drawn.low, drawn.high)
        for value in (*ends, *([0.0] if isinstance(drawn, Range) and drawn.or_zero else [])):
            own, train = _sections(name, {setting: value})
            made = plan_of(name, spec, settings=own, train=train)
            on_meta_device(lambda made=made: made.make(None))


def _sections(name: str, drawn: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    from recspec.training.search.search_space import assigned

    found = assigned(drawn, sections_of(name))
    return found["settings"], found["train"]


def test_values_are_drawn_evenly_within_their_ends() -> None:
    rng = np.random.default_rng(0)
    assert {OneOf((1, "a", None)).drawn(rng) for _ in range(99)} == {1, "a", None}
    whole = [Range(1, 4).drawn(rng) for _ in range(99)]
    assert set(whole) == {1, 2, 3, 4}
    assert all(isinstance(each, int) for each in whole)
    magnitudes = np.array([Range(1e-4, 1.0, log=True).drawn(rng) for _ in range(999)])
    assert ((magnitudes >= 1e-4) & (magnitudes <= 1)).all()
    assert 0.4 < (magnitudes < 1e-2).mean() < 0.6, "as many below the middle magnitude as above"
    drawn = [Range(1e-3, 1.0, log=True, or_zero=True).drawn(rng) for _ in range(999)]
    assert 0.2 < drawn.count(0.0) / 999 < 0.3, "zero is one decade of four"
