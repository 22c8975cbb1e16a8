"""Every block of code in the documents is checked: commands parse, Python runs, YAML and JSON load, filters parse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.write_tables import SETTINGS
from typer.main import get_command

from recspec.base import config
from recspec.cli import app as cli
from recspec.data.prepare import columns_schema
from recspec.datasets import DATASETS
from recspec.inference import Filter
from recspec.models import MODELS
from recspec.serving import event_routes, json_routes, recommend_routes
from tests.documented import PAGES, ROOT, Fence, fences

FENCES = [fence for page in PAGES for fence in fences(page)]

OTHERS = {
    ".",
    "[",
    "cd",
    "cp",
    "curl",
    "docker",
    "systemctl",
    "echo",
    "kubectl",
    "make",
    "mkdir",
    "mlflow",
    "openssl",
    "pip",
    "python",
    "python3",
    "rsync",
    "spark-submit",
    "srun",
    "torchrun",
    "tritonserver",
    "useradd",
}
"""Programs, besides recspec, that a block may begin a command with; `_BESIDES` checks what we know of them."""


def of_language(*languages: str) -> pytest.MarkDecorator:
    """A case for each block of these languages."""
    return pytest.mark.parametrize("fence", [each for each in FENCES if each.language in languages], ids=str)


def test_no_block_is_without_a_check() -> None:
    """A new language gets a test here; what is only shown, such as output or a tree of files, is `text`."""
    checked = {"sh", "python", "yaml", "json", "toml", "sql", "text"}
    for fence in FENCES:
        directive = re.fullmatch(r"\{[a-z-]+\}.*", fence.language)  # of the site, whose build takes no warning
        assert fence.language in checked or directive, f"{fence} is {fence.language!r}: one of {sorted(checked)}"


@of_language("yaml")
def test_yaml_loads(fence: Fence) -> None:
    """Files of column types are also valid ones; specifications are checked in test_docs.py."""
    jsonschema = pytest.importorskip("jsonschema")
    for value in yaml.safe_load_all(fence.text):
        assert value
        if any(isinstance(each, dict) and "type" in each for each in value.values()):
            jsonschema.validate(value, columns_schema())


@of_language("toml")
def test_toml_loads(fence: Fence) -> None:
    assert tomllib.loads(fence.text)


@of_language("json")
def test_json_loads(fence: Fence) -> None:
    assert json.loads(fence.text)


@of_language("sql")
def test_filters_parse(fence: Fence) -> None:
    for line in fence.text.splitlines():
        Filter.parse(line)


@of_language("text")
def test_what_is_only_shown_is_no_command(fence: Fence) -> None:
    for line in fence.text.splitlines():
        command = re.match(r"(\$ )?([A-Z_]+=\S+ )*(recspec|pip|make|python|torchrun) ", line)
        assert not command, f"{fence}: {line}"


@of_language("python")
def test_python_compiles(fence: Fence) -> None:
    """It also runs; see `test_docs_python.py`."""
    compile(fence.text, str(fence), "exec")


# --- commands --------------------------------------------------------------------------------------------------------


@of_language("sh")
def test_commands_parse_with_their_options(fence: Fence) -> None:
    done = subprocess.run(["bash", "-n"], input=fence.text, text=True, capture_output=True)
    assert done.returncode == 0, f"{fence}: {done.stderr}"
    is_script = fence.text.startswith("#!")
    for words in lines_of(fence.text):
        program = words[0]
        for check in _BESIDES.get(program, ()):
            check(words)
        at = next((at for at, word in enumerate(words) if word in ("recspec", "recspec_main.py")), None)
        if at is not None:
            check_command(words[at + 1 :])
        assert at is not None or program in OTHERS or is_script, f"{fence}: {words}"


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each command of a block, without variables that are set before it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


@cache
def recspec_command() -> Any:
    """`recspec`; it takes .03 s to make, and the documents hold hundreds of commands."""
    return get_command(cli.app)


def check_command(words: Sequence[str]) -> None:
    """Parse the words after `recspec`; all after `&` or `|` is left out."""
    end = next((at for at, word in enumerate(words) if word in ("&", "|", "&&")), len(words))
    given = [word for word in words[:end] if not word.startswith("$RESUME")]
    command = recspec_command()
    name = given[0]
    while hasattr(command, "commands"):
        name, given = given[0], given[1:]
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    context = command.make_context(name, list(given))
    check_settings(name, context.params)
    recipe = context.params.get("recipe")
    assert (
        recipe is None or str(recipe) == "FILE" or config.recipe_file(Path(recipe)).resolve().parent == ROOT / "recipes"
    )


def check_settings(command: str, given: dict[str, object]) -> None:
    """Names of `--set` are settings of the dataset or model that the command names."""
    owner = str(given.get("dataset") or given.get("model"))
    assigned = given.get("set") or ()
    assert isinstance(assigned, (list, tuple))
    for assignment in assigned:
        name = assignment.partition("=")[0].removeprefix("settings.")
        kind, _, inner = name.partition(".")
        if kind == "train":
            assert inner.split(".")[0] in SETTINGS["training"].model_fields, assignment
        elif owner in DATASETS or owner in MODELS:
            assert kind in SETTINGS[owner].model_fields, f"{command} {owner}: {assignment}"


def check_target(words: Sequence[str]) -> None:
    """`make TARGET`."""
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert words[1] in targets[1].split(), words


def check_extras(words: Sequence[str]) -> None:
    """`pip install 'recspec[EXTRA]'`."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if found := re.fullmatch(r"(?:recspec|\.)\[(.+)\]", word):
            assert set(found[1].split(",")) <= set(known), word


def check_route(words: Sequence[str]) -> None:
    """`curl HOST:PORT/ROUTE`."""
    known = {route.path for each in (json_routes, event_routes, recommend_routes) for route in each.routes(None)}  # type: ignore[arg-type]
    (url,) = (word for word in words if re.match(r"(http://)?(localhost|127\.0\.0\.1):\d+/", word))
    path = "/" + url.split("//")[-1].partition("/")[2].partition("?")[0]
    assert path in known or path.startswith("/v2"), url


_BESIDES: dict[str, Sequence[Callable[[Sequence[str]], None]]] = {
    "make": [check_target],
    "pip": [check_extras],
    "curl": [check_route],
}


def test_a_wrong_command_is_found() -> None:
    for wrong in (
        "recspec trian neumf data run",
        "recspec train neumf data",
        "recspec train neumf data run --sett x",
        "recspec train neumf data run --set dim=3",
        "recspec recommend run -k many",
        "recspec prepare table a.csv out --set usr=customer",
        "recspec train neumf d r --set train.epoch=3",
        "recspec train neumf d r --recipe recipes/none.yaml",
    ):
        with pytest.raises(Exception, match=r"\S") as caught:
            check_command(shlex.split(wrong)[1:])
        assert not isinstance(caught.value, KeyError), wrong
    for words, check in (
        (["make", "dem"], check_target),
        (["pip", "recspec[srve]"], check_extras),
        (["curl", "localhost:8000/recomend"], check_route),
    ):
        with pytest.raises(AssertionError):
            check(words)
