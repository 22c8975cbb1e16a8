"""The documents say what there is: every key, channel, message, command and setting; and what they show runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import BaseModel
from scripts.write_tables import SETTINGS, commands, documents, for_site, in_step, reference
from typer.testing import CliRunner

from recspec.base import config
from recspec.base.config import build, load_recipe
from recspec.base.errors import DataError, SpecError
from recspec.cli.app import app
from recspec.data.storage import check as dataset_check
from recspec.datasets import DATASETS
from recspec.feature_spec import CHUNK_TYPES, SPLITS, Chunk, Feature, FeatureSpec, json_schema
from recspec.feature_spec.sections import CHANNELS, DTYPES, LIST_LENGTH_SPELLINGS, ROLES
from recspec.models import MODELS
from recspec.training.settings import TrainSettings
from tests.documented import PAGES, ROOT, anchors, links, name_of
from tests.feature_spec.files import BROKEN, EXAMPLE, refused

DOCUMENTS = documents()


@cache
def text_of(name: str) -> str:
    """A document; one that is not written yet is skipped."""
    path = ROOT / name
    if not path.is_file():
        pytest.skip(f"{name} is not there yet")
    return path.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of its depth."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {title!r}"
    return found[2]


def table_rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row, without the backquotes of code; heads and rules are left out."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and re.fullmatch(r"\|[-| ]+\|", lines[number + 1])
        if line.startswith("|") and not is_head and not re.fullmatch(r"\|[-| ]+\|", line):
            cells = re.split(r"(?<!\\)\|", line.removeprefix("|").removesuffix("|"))
            yield [cell.strip().strip("`").strip().replace("\\|", "|") for cell in cells]


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks of some languages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in fenced if language in languages]


# --- docs/feature_spec.md --------------------------------------------------------------------------------------------

FEATURE_SPEC = "docs/feature_spec.md"


def test_its_example_is_the_worked_example_and_loads() -> None:
    shown = blocks(text_of(FEATURE_SPEC), "yaml")[0]
    assert FeatureSpec.from_dict(yaml.safe_load(shown)) == FeatureSpec.from_dict(yaml.safe_load(EXAMPLE))


def test_every_yaml_block_of_it_is_yaml_of_the_format() -> None:
    for block in blocks(text_of(FEATURE_SPEC), "yaml")[1:]:
        for name, feature in yaml.safe_load(block)["feature_spec"].items():
            Feature.model_validate(feature or {}), name


def test_every_section_and_key_is_documented() -> None:
    text = text_of(FEATURE_SPEC)
    sections = {row[0] for row in table_rows(section(text, "Sections"))}
    assert sections == set(json_schema()["properties"])  # type: ignore[call-overload]
    keys = {row[0] for row in table_rows(section(text, "feature_spec"))}
    assert set(Feature.model_fields) <= keys
    assert {row[0] for row in table_rows(section(text, "source_spec"))} >= set(Chunk.model_fields)
    for spelling in (*LIST_LENGTH_SPELLINGS, *DTYPES, *SPLITS):
        assert f"`{spelling}`" in text, spelling


def test_every_chunk_type_is_documented_to_the_letter() -> None:
    layouts = section(text_of(FEATURE_SPEC), "Chunk types")
    for kind in CHUNK_TYPES:
        assert f"\n**{kind}.** " in layouts, kind


def test_every_channel_is_documented_with_its_role_and_rule() -> None:
    documented = {row[0]: row[1:] for row in table_rows(section(text_of(FEATURE_SPEC), "channel_spec"))}
    assert list(documented) == [*ROLES, *(name for name in CHANNELS if name not in ROLES)]
    for name, rule in CHANNELS.items():
        if name in ROLES:
            continue
        role, needs = documented[name]
        words = [{True: "ids", False: "numbers", None: ""}[rule.categorical]]
        words += [{True: "lists", False: "scalars" if rule.categorical else "a scalar", None: ""}[rule.is_list]]
        assert (role, needs) == (rule.role, ", ".join(filter(None, words)) or "anything"), name


def test_every_metadata_key_that_is_read_is_documented() -> None:
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        name = r"\bmetadata" if path.parent.name == "feature_spec" else r"spec\.metadata"
        read |= set(re.findall(name + r"(?:\.get\(|\[)\"(\w+)\"", path.read_text(encoding="utf-8")))
    documented = {
        key for row in table_rows(section(text_of(FEATURE_SPEC), "metadata")) for key in re.findall(r"\w+", row[0])
    }
    assert {"test_samples_per_series", "catalogues", "leak"} <= read
    assert read | {"user_id", "item_id"} <= documented


def test_documented_messages_are_those_that_are_given(tmp_path: Path) -> None:
    given = {re.sub(r"; known: .*", "; known: ...", re.sub(r"^line \d+: ", "", each[2])) for each in BROKEN.values()}
    given.add(refused(tmp_path, "a: [1, 2\nb: 3\n")[0].split(": ", 1)[1])
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"user": {"cardinality": "auto"}, "label": {}},
            "channel_spec": {"context": ["user"], "label": ["label"]},
        }
    )
    with pytest.raises(SpecError) as caught:
        spec.num_ids("user")
    given.add(str(caught.value))
    with pytest.raises(SpecError) as caught:
        spec.require(["user"], "NeuMF")
    given.add(caught.value.problems[0])
    described = section(text_of(FEATURE_SPEC), "What is checked").partition("`recspec check DATA`")[0]
    documented = {row[1] for row in table_rows(described)}
    assert documented
    assert documented <= given


FILES: dict[str, tuple[Mapping[str, str], str, str]] = {
    "missing file": ({}, "b.csv", "b.csv: no such file (did you mean 'a.csv'?)"),
    "unequal chunks": (
        {"a.csv": "1\n2\n", "b.csv": "1\n0\n1\n"},
        "",
        (
            "split 'train': its chunks must hold the same number of rows; found 2 rows of 'item' in 'a.csv'; 3 rows of "
            "'label' in 'b.csv'"
        ),
    ),
    "empty split": (
        {"a.csv": "", "b.csv": ""},
        "",
        "split 'train' holds no row (files 'a.csv', 'b.csv'); fill it, or leave it out of source_spec",
    ),
    "id beyond its cardinality": (
        {"a.csv": "1\n4\n"},
        "",
        "a.csv, column 'item', row 2: 4 is too large for an id: the cardinality is 4, so ids are 0 to 3",
    ),
    "negative id": (
        {"a.csv": "-1\n2\n"},
        "",
        "a.csv, column 'item', row 1: -1 is negative; an id lies in [0, cardinality): 0 to 3",
    ),
    "not an integer": ({"a.csv": "1.5\n2\n"}, "", "a.csv, column 'item', row 1: '1.5' is not an integer (int64)"),
    "empty cell": ({"a.csv": "1\n \n"}, "", "a.csv, column 'item', row 2: is empty; every row needs a value"),
    "number that is none": ({"b.csv": "nan\n1\n"}, "", "b.csv, column 'label', row 1: nan is not a finite number"),
    "label other than 0 and 1": (
        {"b.csv": "0\n3\n"},
        "",
        (
            "b.csv, column 'label', row 2: 3.0 is not a label; a label is 0 or 1: convert the column, or name another "
            "one in channel_spec.label"
        ),
    ),
    "header line": (
        {"a.csv": "item\n1\n"},
        "",
        "a.csv, row 1: is a header line; a csv chunk has none, its columns are 'item' in order",
    ),
    "wrong number of cells": ({"a.csv": "1,2\n3\n"}, "", "a.csv, row 1: has 2 cells; expected 1: 'item'"),
    "line break in a cell": (
        {"a.csv": '"1\n2"\n'},
        "",
        "a.csv, row 1: has a double quote that none closes; a cell may not contain a line break",
    ),
    "carriage return alone": (
        {"a.csv": "1\r2\n"},
        "",
        (
            "a.csv: row 1 holds a carriage return (\\r) without a line feed (\\n) after it; end every row with "
            "\\n or \\r\\n"
        ),
    ),
    "row that is too long": (
        {"a.csv": " " * (21 << 20)},
        "",
        "a.csv: row 1 is longer than 16,777,216 bytes, the most that are read of one row; rows end with \\n or \\r\\n",
    ),
    "text that is not UTF-8": (
        {"a.csv": "\udcff\n1\n"},
        "",
        "a.csv, row 1: holds bytes that are not UTF-8 text, near b'\\xff'; save the file as UTF-8",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_every_check_of_the_files_has_its_message(case: str, tmp_path: Path) -> None:
    broken, missing, message = FILES[case]
    for name, content in {"a.csv": "1\n2\n", "b.csv": "0\n1\n", **broken}.items():
        if name != missing:
            (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    (tmp_path / "feature_spec.yaml").write_text(
        "feature_spec: {item: {cardinality: 4}, label: {}}\n"
        "source_spec: {train: [{type: csv, features: [item], files: [a.csv]}, "
        "{type: csv, features: [label], files: [b.csv]}]}\n"
        "channel_spec: {item: [item], label: [label]}\n"
    )
    with pytest.raises(DataError) as caught:
        dataset_check.check(FeatureSpec.load(tmp_path))
    assert message in caught.value.problems


def test_documented_messages_about_files_are_those_that_are_given() -> None:
    described = section(text_of(FEATURE_SPEC), "What is checked").partition("`recspec check DATA`")[2]
    documented = {row[0]: row[1] for row in table_rows(described)}
    assert documented
    assert documented == {case: FILES[case][2] for case in documented}


# --- commands, datasets, models, settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_what_the_code_knows_stands_in_the_document_as_it_is(path: Path) -> None:
    """Tables of settings and the list of commands; `make docs` writes them."""
    text = path.read_text(encoding="utf-8")
    assert in_step(text) == text, "run `make docs`"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_documented_with_its_default(name: str) -> None:
    document = "datasets" if name in DATASETS else "models" if name in MODELS else "guides/ab_tests"
    document = "training" if name == "training" else document
    text = for_site(text_of(f"docs/{document}.md"))
    documented: dict[str, str] = {}
    for row in table_rows(text if name == "training" else section(text, name)):
        own = dict.fromkeys(re.findall(r"\w+", row[0]), row[1])
        if elsewhere := re.fullmatch(r"as in \[([\w ]+)\]\(#[\w-]+\)", row[-1]):
            rows = [*table_rows(section(text, elsewhere[1]))]
            there = {each: found[1] for found in rows for each in re.findall(r"\w+", found[0])}
            own = {setting: there[setting] for setting in own}
        documented |= own
    for setting, field in SETTINGS[name].model_fields.items():
        assert setting in documented
        default = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
        shown = "must be given" if field.is_required() else json.dumps(default).strip('"')
        assert documented[setting].strip('"') in ("none" if shown == "[]" else shown, shown), setting


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_documented_with_its_needs(name: str) -> None:
    described = section(text_of("docs/models.md"), name)
    for role in MODELS[name].needs:
        assert re.search(rf"`{role}`|\b{role}\b", described), role


COMMANDS = {command.name: command for command in commands()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_is(name: str) -> None:
    command = COMMANDS[name]
    assert section(reference(), name)
    assert command.about
    assert command.about[0].isupper()
    assert command.about.endswith(".")
    for parameter in command.parameters:
        assert re.fullmatch(r"(?s)([A-Z`]|python |gRPC ).+\.", parameter.help), (
            f"{name} {parameter.shown}: {parameter.help}"
        )


@pytest.mark.parametrize("group", [(), ("bench",), ("pipeline",)])
def test_help_lists_whole_sentences(group: tuple[str, ...]) -> None:
    listed = CliRunner().invoke(app, [*group, "--help"], terminal_width=80).output.partition("Commands:\n")[2]
    assert listed
    assert "..." not in listed


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_says_what_it_is(name: str) -> None:
    for setting, field in SETTINGS[name].model_fields.items():
        assert field.description, f"{name}: {setting}"


@pytest.mark.parametrize("guide", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda guide: guide.stem)
def test_a_guide_begins_with_its_command(guide: Path) -> None:
    assert re.match(r"# .+\n\n```sh\n", guide.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"(https?|mailto):", target):
            continue
        linked = (page.parent / target) if target else page
        assert linked.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(linked), f"{name_of(page)} links to {link}, a heading that is not there"


def test_the_lines_that_make_a_submission_rank_each_displays_ads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (found for found in blocks(text_of("docs/serving.md"), "python") if "submission.csv" in found)
    monkeypatch.chdir(tmp_path)
    scores = {"display_id": [8, 7, 8, 7, 8], "ad_id": [100, 20, 3, 3, 20], "probability": [0.2, 0.1, 0.9, 0.4, 0.2]}
    pq.write_table(pa.table(scores), "scores.parquet")
    duckdb.sql("".join(re.findall(r'^    "(.*)"$', block, re.M)))
    assert Path("submission.csv").read_text() == "display_id,ad_id\n7,3 20\n8,3 20 100\n"


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_one_of_a_model_and_says_what_it_reached(path: Path) -> None:
    from recspec.training.settings import TrainSettings

    recipe = config.load_recipe(path)
    assert recipe.model in MODELS
    config.build(MODELS[str(recipe.model)].Settings, path.name, recipe.settings)
    config.build(TrainSettings, path.name, recipe.train)
    assert recipe.about, "the number it reached, where and when"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_fits_its_model_and_says_what_it_reached(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert loaded.model in MODELS
    build(MODELS[loaded.model].Settings, str(recipe), loaded.settings)
    build(TrainSettings, str(recipe), loaded.train)
    assert isinstance(loaded.about, dict)
    assert {"dataset", "reached"} <= set(loaded.about)
