"""The documentation site: it is built without a warning, and its pages load nothing from the network.

Building it takes about ten seconds, so the tests of the built pages are slow ones.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recspec
import recspec.api
from tests.documented import PAGES, ROOT, prose_of

LOADED = re.compile(
    r"<(?:script|img|source|iframe|audio|video|embed)\b[^>]*\bsrc(?:set)?=[\"']?(?:https?:)?//"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|license))[^>]*\bhref=[\"']?(?:https?:)?//",
    re.IGNORECASE,
)
"""What makes a browser ask another machine: anything but a link that a person follows."""


def test_every_page_is_in_the_list_of_contents() -> None:
    index = prose_of(ROOT / "docs" / "index.md")
    listed = {
        line
        for entries in re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
        for line in entries.splitlines()
        if line and not line.startswith(":")
    }
    inside = (page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs"))
    assert listed == {page.with_suffix("").as_posix() for page in inside} - {"index"}


def test_the_reference_holds_every_name_of_the_api() -> None:
    text = prose_of(ROOT / "docs" / "reference" / "api.md")
    errors = {"Interrupted", "RecspecError"}  # of recspec.base.errors, which stands there as a whole
    shown = set(re.findall(r"^\.\. auto(?:class|function):: recspec\.api\.(\w+)$", text, re.MULTILINE))
    assert shown == set(recspec.__all__) - errors
    assert "automodule:: recspec.base.errors" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", out / "html"]
    done = subprocess.run([*command, "-d", out / "trees"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


@pytest.mark.slow
def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not (found := LOADED.search(page.read_text(encoding="utf-8"))), f"{page.name}: {found and found[0]}"
    for style in site.rglob("*.css"):
        found = re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8"))
        assert not found, f"{style.name}: {found and found[0]}"
    for script in site.rglob("*.js"):
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"(?:fetch|import|importScripts)\(\s*[\"'](?:https?:)?//", text), script.name


@pytest.mark.slow
def test_the_reference_shows_every_parameter(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    heads = [re.sub(r"<[^>]+>|\s+", "", head) for head in re.findall(r'<dt class="sig.*?</dt>', page, re.DOTALL)]
    shown = {head.partition("(")[0]: head for head in heads}
    for name in ("prepare", "train", "tune", "evaluate", "predict", "recommend", "similar", "serve"):
        function = getattr(recspec.api, name)
        missing = [each for each in inspect.signature(function).parameters if f"{each}:" not in shown[name]]
        assert not missing, f"{name}: {missing}"
    assert not [head for head in heads if "&lt;function" in head]


def test_what_is_loaded_is_recognised() -> None:
    for loads in (
        '<script src="https://cdn.example/a.js">',
        "<img alt=x src='//a.example/i.png'>",
        '<link rel="stylesheet" href="http://fonts.example/f.css">',
    ):
        assert LOADED.search(loads), loads
    for followed in (
        '<a href="https://example.org">',
        '<img src="_images/a.png">',
        '<link rel="canonical" href="https://example.org/">',
    ):
        assert not LOADED.search(followed), followed


@pytest.mark.slow
def test_the_search_finds_commands_settings_and_functions(site: Path) -> None:
    """The index is a script, so it also works from file://, where a page may not fetch."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    documents = index["docnames"]

    def found(term: str) -> set[str]:
        places = (index[kind].get(term, []) for kind in ("terms", "titleterms"))
        return {documents[each] for at in places for each in (at if isinstance(at, list) else [at])}

    assert "commands" in found("torchrun")
    assert "models" in found("sasrec")
    assert "Calibration" in index["alltitles"]
    assert "recspec recommend" in index["alltitles"]
