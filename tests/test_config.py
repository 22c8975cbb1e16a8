"""Settings from recipes and from --set; what is said about those that are wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field, ValidationError, model_validator

from recspec.base import config
from recspec.base.config import Recipe, Settings, assign, build, load_recipe, parse_assignments
from recspec.base.errors import SettingsError


class Model(Settings):
    """A made-up model's settings."""

    factors: int = Field(8, ge=1)
    layers: tuple[int, ...] = (64, 32)
    dropout: float = Field(0.5, ge=0, lt=1)
    use_bias: bool = True
    name: str = "x"
    seed: int = 0
    limit: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _something_left(self) -> Model:
        if not self.layers and self.factors == 1:
            raise ValueError("layers and factors: nothing is left to learn")
        return self


class Shares(Settings):
    """Made-up settings of a dataset."""

    test: float = 0.1


class Train(Settings):
    """Made-up settings of training."""

    epochs: int = 1
    learning_rate: float = 0.1
    seed: int = 0
    needed: str = Field(default="given")


SECTIONS = {"settings": Model, "train": Train}


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return folder / "recipe.yaml"


def refused(folder: Path, text: str) -> str:
    file = write(folder, text)
    with pytest.raises(SettingsError) as caught:
        load_recipe(file)
    message = str(caught.value)
    assert message.startswith(f"recipe {file}: ")
    return message.removeprefix(f"recipe {file}: ")


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_a_published_recipe_is_found_by_its_name_where_no_clone_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "RECIPES", tmp_path / "installed" / "recipes")
    config.RECIPES.mkdir(parents=True)
    (config.RECIPES / "best.yaml").write_text("model: neumf\n")
    assert load_recipe("recipes/best.yaml") == load_recipe("best") == load_recipe(Path("best")) == Recipe(model="neumf")
    with pytest.raises(SettingsError, match=r"^recipe recipes/bst.yaml: no such file \(did you mean 'best.yaml'\?\)$"):
        load_recipe("recipes/bst.yaml")
    by_name = r"^recipe bst: no such file, and no published recipe of this name \(did you mean 'best'\?\)$"
    with pytest.raises(SettingsError, match=by_name):
        load_recipe("bst")
    for elsewhere in ("other/best.yaml", "best.yaml", "recipes/../recipes/best.yaml", "/recipes/best.yaml", "./best"):
        with pytest.raises(SettingsError, match="no such file"):
            load_recipe(elsewhere)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "best.yaml").write_text("model: dlrm\n")
    assert load_recipe("recipes/best.yaml") == Recipe(model="dlrm")  # the user's own


def test_a_wheel_holds_the_recipes_and_a_source_archive_what_a_clone_holds() -> None:
    root = Path(__file__).parents[1]
    targets = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["force-include"] == {"recipes": "recspec/recipes"}
    assert root / "src" / "recspec" / "recipes" == config.RECIPES
    assert load_recipe("neumf-ml-1m").model == "neumf"  # in a clone
    held = {name.strip("/") for name in targets["sdist"]["include"]}
    there = {each.name for each in root.iterdir() if not each.name.startswith(".")}
    assert {each for each in there if (root / each).suffix == ".md"} <= held
    assert {"src", "tests", "docs", "recipes", "benchmarks", "deploy", "findings", "scripts"} <= held
    assert held <= there


def test_ci_runs_the_targets_on_every_python_that_is_supported() -> None:
    root = Path(__file__).parents[1]
    (job,) = yaml.safe_load((root / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    classifiers = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    supported = [each.rpartition(" :: ")[2] for each in classifiers if ":: Python :: 3." in each]
    assert job["strategy"]["matrix"]["python"] == supported
    (local,) = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [hook["id"] for hook in local["hooks"]] == ["ruff", "ruff-format", "mypy"]


def test_a_recipe_is_read(tmp_path: Path) -> None:
    text = "about: reaches 0.7\nmodel: neumf\nsettings: {factors: 4}\ntrain:\n  learning_rate: 1e-3\n"
    file = write(tmp_path, text)
    expected = Recipe("neumf", {"factors": 4}, {"learning_rate": "1e-3"}, "reaches 0.7")
    assert load_recipe(str(file)) == expected
    assert build(Train, "here", expected.train).learning_rate == 0.001  # YAML calls 1e-3 text; the setting knows better


def test_aliases_are_read_but_not_more_values_than_a_file_may_have(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "settings: {a: &a [1], b: *a}")).settings == {"a": [1], "b": [1]}
    doubled = "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 29))
    assert refused(tmp_path, f"settings:\n  a0: &a0 [1]\n{doubled}") == (
        "not valid YAML: its aliases stand for 1.61e+09 values; at most 200,000 are read"
    )
    assert "not valid YAML" in refused(tmp_path, "settings: &a {b: *a}")


class Part(Settings):
    size: int = 1


class Whole(Settings):
    parts: tuple[Part, ...] = Field(min_length=2)


def test_problems_inside_a_list_of_settings_say_where_and_what_is_known_there() -> None:
    with pytest.raises(SettingsError) as error:
        build(Whole, "here", {"parts": [{"siz": 2}, {"size": "x"}]})
    assert error.value.problems == (
        "'parts[0]': unknown setting 'siz' (did you mean 'size'?); known: 'size'",
        "setting 'parts[1].size' is 'x': input should be a valid integer, unable to parse string as an integer",
    )
    with pytest.raises(SettingsError, match=r"setting 'parts' is \[\{\}\]: expected a list of at least 2"):
        build(Whole, "here", {"parts": [{}]})


@pytest.mark.parametrize("text", ["", "settings:\n", "train: {}\n", "about:\n"])
def test_a_recipe_may_say_little(text: str, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.model, dict(recipe.settings), dict(recipe.train)) == (None, {}, {})


def test_all_wrong_sections_are_told_at_once(tmp_path: Path) -> None:
    assert refused(tmp_path, "setings: {}\nmodel: [a]\ntrain: 5\n3: x\n") == (
        "4 problems\n"
        "  - section 'model' holds ['a']; expected a model's name\n"
        "  - section 'train' holds 5; expected settings, one `name: value` a line\n"
        "  - unknown section '3'; known: 'about', 'model', 'settings', 'train'\n"
        "  - unknown section 'setings' (did you mean 'settings'?); known: 'about', 'model', 'settings', 'train'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "expected sections about, model, settings, train"),
        ("a: [1\nb: 2\n", "line 2, column 2: not valid YAML: expected ',' or ']', but got ':'"),
        (
            "train:\n  epochs: 1\n  epochs: 2\n",
            "line 3, column 3: not valid YAML: 'epochs' stands twice, first in line 2; remove one",
        ),
        ("about: 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        (
            "a: !!python/name:os.system\n",
            "line 1, column 4: not valid YAML: could not determine a constructor for the ",
        ),
    ],
)
def test_a_file_that_is_no_recipe(text: str, message: str, tmp_path: Path) -> None:
    assert refused(tmp_path, text).startswith(message)


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(
        SettingsError, match=r"recipe .*recipe\.yaml: can't be read as text: 'utf-8' codec can't decode"
    ):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_recipe_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(SettingsError) as caught:
        load_recipe(tmp_path / "recepi.yaml")
    assert str(caught.value) == f"recipe {tmp_path / 'recepi.yaml'}: no such file (did you mean 'recipe.yaml'?)"
    with pytest.raises(SettingsError, match=r"no such file$"):
        load_recipe(tmp_path / "nowhere" / "recipe.yaml")


# --- name=value ------------------------------------------------------------------------------------------------------


def test_values_are_read_as_yaml() -> None:
    assignments = ["a=1", "b=0.5", "c=[64, 32]", "d=true", "e=text", "f=", " g = {x: 1}", "h=a=b", "i='no'"]
    assert parse_assignments(assignments) == {
        "a": 1,
        "b": 0.5,
        "c": [64, 32],
        "d": True,
        "e": "text",
        "f": None,
        "g": {"x": 1},
        "h": "a=b",
        "i": "no",
    }


def test_no_character_of_a_plain_value_has_a_meaning() -> None:
    texts = [
        *"%@`#*&!|>:;,-?=",
        *(f"{mark}name" for mark in "%@`#*&!|>-?:"),
        "%d.%m.%Y %H:%M",
        "order #",
        "a: b",
        "- a",
        "<<",
        "a [b]",
        "# a",
        "\\t",
    ]
    for text in texts:
        assert parse_assignments([f"a={text}"]) == {"a": text}
    assert parse_assignments(["a= x ", "b=~", "c=null", "d=-1.5", "e=''"]) == {
        "a": "x",
        "b": None,
        "c": None,
        "d": -1.5,
        "e": "",
    }


def test_every_entry_that_is_no_assignment_is_told() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_assignments(["epochs", "=3", "layers=[64", "day=2020-13-45", "good=1"])
    assert caught.value.problems == (
        "'=3' is not of the form name=value",
        "'day=2020-13-45': the value is not valid YAML: month must be in 1..12",
        "'epochs' is not of the form name=value",
        "'layers=[64': the value is column 4: not valid YAML: expected ',' or ']', but got '<stream end>'",
    )
    assert str(caught.value).startswith("--set: 4 problems\n")


def test_a_setting_goes_to_the_section_that_owns_it() -> None:
    assert assign({"factors": 4, "epochs": 2, "train.seed": 7, "settings.seed": 8}, SECTIONS) == {
        "settings": {"factors": 4, "seed": 8},
        "train": {"epochs": 2, "seed": 7},
    }
    assert assign({}, SECTIONS) == {"settings": {}, "train": {}}


def test_every_name_that_can_not_be_assigned_is_told() -> None:
    with pytest.raises(SettingsError) as caught:
        assign({"seed": 1, "epoch": 2, "train.factors": 3, "trian.epochs": 4, "zzz": 5}, SECTIONS)
    assert caught.value.problems == (
        "'seed' is a setting of settings and of train; say settings.seed",
        "unknown setting 'epoch' (did you mean 'epochs'?); see `recspec models`",
        "unknown setting 'train.factors' (did you mean 'settings.factors'?); see `recspec models`",
        "unknown setting 'trian.epochs' (did you mean 'train.epochs'?); see `recspec models`",
        "unknown setting 'zzz'; see `recspec models`",
    )


def test_a_hint_has_the_form_of_the_name_and_the_listing_of_its_command() -> None:
    with pytest.raises(SettingsError) as caught:
        assign({"learning_rat": 1, "prepare.factors": 2}, {"prepare": Model, "train": Train})
    assert caught.value.problems[0].startswith("unknown setting 'learning_rat' (did you mean 'learning_rate'?); see")
    for name, hint in (("lr", "learning_rate"), ("train.lr", "train.learning_rate")):
        with pytest.raises(SettingsError, match=rf"unknown setting '{name}' \(did you mean '{hint}'\?\)"):
            assign({name: 1}, {"train": Train, "settings": Settings})
    with pytest.raises(SettingsError, match="unknown setting 'repeats'; see `recspec datasets`"):
        assign({"repeats": "keep"}, {"prepare": Shares})
    hints = {"factor": " (did you mean 'factors'?)", "prepare.factor": " (did you mean 'prepare.factors'?)", "zzz": ""}
    for name, hint in hints.items():
        with pytest.raises(SettingsError) as caught:
            assign({name: 1}, {"prepare": Model})
        assert caught.value.problems == (f"unknown setting '{name}'{hint}; see `recspec datasets`",)


# --- settings --------------------------------------------------------------------------------------------------------


def test_later_layers_win() -> None:
    settings = build(Model, "here", {"factors": 1, "dropout": 0.1}, {}, {"factors": 2})
    assert (settings.factors, settings.dropout, settings.layers) == (2, 0.1, (64, 32))


def test_all_wrong_settings_are_told_at_once() -> None:
    values: dict[str, object] = {"factor": 3, "dropout": 1, "layers": [64, "wide"], "factors": "many", "limit": []}
    with pytest.raises(SettingsError) as caught:
        build(Model, "recipe r.yaml and --set", values)
    assert str(caught.value).startswith("recipe r.yaml and --set: 6 problems\n")
    assert caught.value.problems == (
        "setting 'dropout' is 1: input should be less than 1",
        "setting 'factors' is 'many': input should be a valid integer, unable to parse string as an integer",
        "setting 'layers[1]' is 'wide': input should be a valid integer, unable to parse string as an integer",
        "setting 'limit' is []: input should be 'auto'",
        "setting 'limit' is []: input should be a valid integer",
        (
            "unknown setting 'factor' (did you mean 'factors'?); known: 'factors', 'layers', 'dropout', 'use_bias', "
            "'name', 'seed', 'limit'"
        ),
    )


@pytest.mark.parametrize("name", ["factors", "dropout", "name"])
def test_yes_is_neither_a_number_nor_text(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(Model, "--set", parse_assignments([f"{name}=yes"]))
    assert str(caught.value) == (
        f"--set: setting '{name}' is True: YAML reads yes, no, on and off as true and false; put text in quotes"
    )
    assert build(Model, "--set", parse_assignments(["use_bias=no"])).use_bias is False


def test_a_number_is_no_text() -> None:
    with pytest.raises(SettingsError, match="--set: setting 'name' is 5: expected text; put it in quotes"):
        build(Model, "--set", {"name": 5})
    assert build(Model, "--set", parse_assignments(["name='5'"])).name == "5"


def test_a_rule_of_several_settings_is_told_in_its_own_words() -> None:
    with pytest.raises(SettingsError) as caught:
        build(Model, "--set", {"layers": [], "factors": 1})
    assert str(caught.value) == "--set: layers and factors: nothing is left to learn"


def test_a_setting_without_a_default_is_asked_for() -> None:
    class Needs(Settings):
        path: str

    with pytest.raises(SettingsError, match="here: setting 'path' is missing"):
        build(Needs, "here")


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Model().factors = 3  # type: ignore[misc]


class Tables(Settings):
    """Settings that are tables."""

    widths: dict[str, int] = Field({})
    parts: dict[str, dict[str, object]] = Field({})
    crosses: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[int, ...] = Field((8,), min_length=1)


def test_one_entry_of_a_table_is_set_and_the_others_stay() -> None:
    recipe = {"widths": {"a": 1, "b": 2}, "parts": {"wide": {"optimizer": "ftrl", "rate": 1}, "deep": {"rate": 2}}}
    assigned = assign({"widths.b": 5, "train.parts.wide.rate": 3, "parts.deep.mlp.rate": 4}, {"train": Tables})["train"]
    made = build(Tables, "here", recipe, assigned)
    assert made.widths == {"a": 1, "b": 5}
    assert made.parts == {"wide": {"optimizer": "ftrl", "rate": 3}, "deep": {"rate": 2}, "deep.mlp": {"rate": 4}}


def test_a_whole_table_takes_the_place_of_another() -> None:
    assigned = assign({"widths": {"c": 7}}, {"train": Tables})["train"]
    assert build(Tables, "here", {"widths": {"a": 1}}, assigned).widths == {"c": 7}


def test_what_is_no_table_has_no_entries() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'hidden\.0'"):
        assign({"hidden.0": 7}, {"train": Tables})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crosses": ["a", "b"]}, r"setting 'crosses\[0\]' is 'a': expected a list, as \[a, b\]; a list of lists is"),
        ({"hidden": []}, r"setting 'hidden' is \[\]: expected a list of at least 1"),
        (
            {"parts": {"wide": "ftrl"}},
            r"setting 'parts\.wide' is 'ftrl': expected names and values, as \{name: value\}",
        ),
    ],
)
def test_a_value_of_the_wrong_shape_is_answered_in_yaml(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build(Tables, "here", values)


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**40, [1, 2**63], {"item_id": 2**63}])
def test_a_whole_number_beyond_64_bits_is_refused(value: object) -> None:
    class Sizes(Settings):
        one: int = 0
        several: tuple[int, ...] = ()
        by_name: dict[str, int] = Field({})

    name = "several" if isinstance(value, list) else "by_name" if isinstance(value, dict) else "one"
    with pytest.raises(SettingsError, match=f"(?s)'{name}'.*the largest whole number is 9,223,372,036,854,775,807"):
        build(Sizes, "settings", {name: value})


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    class Sizes(Settings):
        rate: float = 0.0

    with pytest.raises(SettingsError, match=r"'rate' is .*finite"):
        build(Sizes, "settings", parse_assignments([f"rate={value}"]))
