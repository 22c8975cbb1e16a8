"""Experiments from a file, and who gets which variant."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recspec.base.errors import SettingsError
from recspec.loop.assignment import DAY_US, Experiment, assign, load_experiments, named, position
from recspec.loop.statistics import sample_ratio_p
from tests.documented import ROOT, fences

HOME = {
    "name": "home",
    "start": "2026-12-01",
    "variants": [{"name": "control", "share": 0.5, "model": "ease"}, {"name": "new", "share": 0.5, "model": "sasrec"}],
    "metrics": [{"name": "clicks", "event": "click"}],
}
USERS = [f"user-{number}" for number in range(4_000)]


def of(**changes: object) -> Experiment:
    return Experiment.model_validate(HOME | changes)


def parts(*names: str, share: float | None = None) -> list[dict[str, object]]:
    return [{"name": name, "share": share or 1 / len(names)} for name in names]


def written(folder: Path, data: object) -> Path:
    file = folder / "experiment.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return file


def refused(folder: Path, data: object) -> list[str]:
    with pytest.raises(SettingsError) as error:
        load_experiments(written(folder, data))
    assert str(error.value).startswith(str(folder / "experiment.yaml"))
    return list(error.value.problems)


FIELDS = "'name', 'share', 'model', 'version', 'request', 'explore'"
BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 29))


# --- assignment ------------------------------------------------------------------------------------------------------


def test_the_place_of_a_unit_is_its_hash() -> None:
    number = int.from_bytes(hashlib.sha256(b"home.variant:ann").digest()[:8], "big")
    assert position("home.variant", "ann") == pytest.approx(number / 2**64, abs=1e-15)
    assert position("home.variant", "ann") == 0.481409348847492  # the same on every host, for ever
    assert of().variant_of("ann") == "control"


@given(st.text(max_size=20), st.text(max_size=20))
def test_places_lie_from_0_to_below_1(salt: str, unit: str) -> None:
    assert 0 <= position(salt, unit) < 1


def test_variants_get_their_shares_of_users() -> None:
    variants = [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.3}, {"name": "c", "share": 0.2}]
    got = [assign([of(variants=variants)], user)["home"] for user in USERS]
    assert sample_ratio_p([got.count(name) for name in "abc"], [0.5, 0.3, 0.2]) > 0.01


def test_a_ramp_only_adds_users_and_keeps_their_variants() -> None:
    some, more = ({user: found for user in USERS if (found := assign([of(traffic=t)], user))} for t in (0.1, 0.4))
    assert some.items() <= more.items()
    assert [len(some), len(more)] == pytest.approx([400, 1_600], rel=0.1)


def test_traffic_and_variant_are_independent() -> None:
    """One salt for both would put all users of a small traffic into the first variant."""
    got = [found["home"] for user in USERS if (found := assign([of(traffic=0.2)], user))]
    assert sample_ratio_p([got.count("control"), got.count("new")], [0.5, 0.5]) > 0.01


def test_experiments_of_a_layer_share_no_user_and_others_are_independent() -> None:
    first, second = of(layer="page", slot=[0, 0.5]), of(name="other", layer="page", slot=[0.5, 1], traffic=0.5)
    third = of(name="third", variants=parts("a", "b"))
    got = [assign([first, second, third], user) for user in USERS]
    assert not any({"home", "other"} <= found.keys() for found in got)
    assert sum("home" in found for found in got) == pytest.approx(2_000, rel=0.1)
    assert sum("other" in found for found in got) == pytest.approx(1_000, rel=0.1)
    together = [(found["home"], found["third"]) for found in got if "home" in found]
    counts = [together.count((one, other)) for one in ("control", "new") for other in "ab"]
    assert sample_ratio_p(counts, [0.25] * 4) > 0.01


def test_new_users_enter_while_the_experiment_takes_them() -> None:
    experiment = of(days=2, window_days=1)
    start = experiment.start_us
    assert start == 1_796_083_200 * 1_000_000
    assert (experiment.entry_end_us - start, experiment.end_us - start) == (2 * DAY_US, 3 * DAY_US)
    for at, enters in ((start - 1, False), (start, True), (start + 2 * DAY_US - 1, True), (start + 2 * DAY_US, False)):
        assert bool(assign([experiment], "ann", at=at)) == enters


def test_what_the_journal_recorded_holds() -> None:
    experiment = of(traffic=1e-9)
    assert assign([experiment], "ann", at=0) == {}
    assert assign([experiment], "ann", at=0, recorded={"home": "new", "else": "x"}) == {"home": "new"}
    assert assign([experiment], "ann", at=0, recorded={"home": "gone"}) == {}
    assert assign([of(interleave=True)], "ann", recorded={"home": "interleaved"}) == {"home": "interleaved"}


def test_the_users_of_an_interleaved_experiment_get_both() -> None:
    assert assign([of(interleave=True)], "ann") == {"home": "interleaved"}


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_file_holds_one_experiment_or_several(tmp_path: Path) -> None:
    (one,) = load_experiments(written(tmp_path, HOME))
    assert (one.name, one.start.isoformat(), one.variants[1].model) == ("home", "2026-12-01T00:00:00+00:00", "sasrec")
    second = HOME | {"name": "second", "variants": parts("a", "b"), "start": "2026-12-01T09:00:00+02:00"}
    both = load_experiments(written(tmp_path, {"experiments": [HOME, second]}))
    assert [each.name for each in both] == ["home", "second"]
    assert both[1].start.isoformat() == "2026-12-01T07:00:00+00:00"
    assert named(both, "second") is both[1]
    assert named([one], None) is one
    with pytest.raises(SettingsError, match="holds 2 experiments; choose one with --name: 'home', 'second'"):
        named(both, None)
    with pytest.raises(SettingsError, match=r"--name: unknown experiment 'hom' \(did you mean 'home'\?\)"):
        named(both, "hom")


def test_the_files_of_the_guide_are_valid(tmp_path: Path) -> None:
    shown = [each.text for each in fences(ROOT / "docs" / "guides" / "ab_tests.md") if each.language == "yaml"]
    assert [load_experiments(written(tmp_path, text))[0].name for text in shown] == ["next-item", "page"]


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "name": "ho me",
        "start": "soon",
        "variants": [{"name": "a", "shar": 0.5}, {"name": "b", "share": 0.5}],
        "metrics": [{"name": "clicks", "event": "click", "per": "list"}],
        "slot": [0.0, float("nan")],
        "alpha": 0.5,
    }
    name = "expected 1 to 64 letters, digits, points, hyphens or underscores, a letter or digit first"
    assert refused(tmp_path, wrong) == [
        "'variants[0]': unknown setting 'shar' (did you mean 'share'?); known: " + FIELDS,
        "setting 'alpha' is 0.5: input should be less than or equal to 0.2",
        "setting 'metrics[0].per' is 'list': input should be 'user', 'exposure' or 'impression'",
        f"setting 'name' is 'ho me': {name}",
        "setting 'slot[1]' is nan: input should be a finite number",
        "setting 'start' is 'soon': input should be a valid datetime or date, input is too short",
        "setting 'variants[0].share' is missing",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variants": parts("a", "a")}, "variants: 'a' stands twice"),
        ({"variants": parts("a", "b", share=0.4)}, "variants: the shares sum to 0.8; expected 1"),
        ({"variants": parts("a", "interleaved")}, "variants: the name 'interleaved' is taken; give another one"),
        ({"metrics": HOME["metrics"] * 2}, "metrics: 'clicks' stands twice"),  # type: ignore[operator]
        ({"layer": "page", "slot": [0.5, 0.2]}, "slot: found [0.5, 0.2]; expected [from, to] with 0 <= from < to <= 1"),
        ({"slot": [0, 0.5]}, "slot: needs a layer"),
        ({"variants": parts("a", "b", "c"), "interleave": True}, "interleave: found 3 variants; expected 2"),
        ({"start": "1960-01-01"}, "expected a year from 1971 to 2099"),
        ({"variants": parts("a")}, "expected a list of at least 2"),
        ({"unit": "session"}, "setting 'unit' is 'session': input should be 'user'"),
        ({"guardrails": {"speed": 1}}, "'guardrails': unknown setting 'speed'; known: 'errors', 'empty', 'lat"),
    ],
)
def test_an_experiment_that_does_not_fit_together_is_refused(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    (problem,) = refused(tmp_path, HOME | changes)
    assert expected in problem


def test_experiments_that_would_meet_are_refused(tmp_path: Path) -> None:
    def pair(**changes: object) -> list[str]:
        return refused(tmp_path, {"experiments": [HOME, HOME | changes]})

    assert pair() == [
        "'home' and 'home' both set 'model' and may meet in one user; put them in one layer with a slot each",
        "the experiment 'home' stands twice; give it another name",
    ]
    (salted,) = pair(name="b", salt="home", variants=parts("x", "y"))
    assert salted == "'b' and 'home' have the same salt, so their users fall alike; give each its own" or salted == (
        "'home' and 'b' have the same salt, so their users fall alike; give each its own"
    )
    (drawn,) = pair(name="b", variants=parts("x", "y"), interleave=True)
    assert drawn.startswith("'home' and 'b' both set 'model'")
    layered = [HOME | {"layer": "page", "slot": [0, 0.6]}, HOME | {"name": "b", "layer": "page", "slot": [0.5, 1]}]
    assert refused(tmp_path, {"experiments": layered}) == [
        "'home' and 'b' share a part of the layer 'page'; give them other slots"
    ]
    (shape, *_), faults = refused(tmp_path, {"experiments": [HOME | {"days": 0}, {"name": 3}]}), ("home: ", "3: ")
    assert shape.startswith("experiments[1]: ") or shape.startswith(faults)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected an experiment"),
        ("[1]", "expected an experiment"),
        ("experiments: []", "expected an experiment"),
        ("experiments: [1]", "expected an experiment"),
        ("a: &a [1, *a]", "not valid YAML"),
        (BOMB, "not valid YAML: its aliases stand for 1.61e+09 values; at most 200,000 are read"),
        ("name: [", "not valid YAML"),
        ("name: a\nname: b", "'name' stands twice, first in line 1"),
        ("experiments: [" + "{}," * 101 + "]", "101 experiments; expected at most 100"),
        ("#" * ((1 << 20) + 1), "holds more than 1,048,576 bytes"),
        ("[" * 1_500, "not valid YAML"),
    ],
)
def test_a_file_that_is_no_list_of_experiments_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = refused(tmp_path, text)
    assert expected in problem


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: can't be read as text"):
        load_experiments(tmp_path / "none.yaml")


def test_sizes_are_bounded(tmp_path: Path) -> None:
    many = {
        "variants": parts(*(f"v{number}" for number in range(21))),
        "metrics": [{"name": f"m{number}", "event": "click"} for number in range(51)],
        "name": "x" * 65,
    }
    problems = refused(tmp_path, HOME | many)
    assert len(problems) == 3
    assert any("at most 20 items" in each for each in problems)
    assert any("at most 50 items" in each for each in problems)
    fields = [{"name": "a", "share": 1, "request": {f"f{n}": n for n in range(21)}}, *parts("b")]
    assert "at most 20 items" in refused(tmp_path, HOME | {"variants": fields})[0]


def test_numbers_of_users_are_no_text(tmp_path: Path) -> None:
    assert "setting 'users' is 10: input should be greater than or equal to 200" in refused(
        tmp_path, HOME | {"users": 10}
    )
    assert np.isclose(of(users=200).users, 200)
