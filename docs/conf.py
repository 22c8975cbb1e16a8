"""The documentation site: `make docs` builds it without a network, and a warning is an error."""

from __future__ import annotations

import html
import json
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from scripts.write_tables import for_site  # sphinx runs in the repository's root
from sphinx.pycode import ModuleAnalyzer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "recspec"
author = "The recspec authors"
release = metadata.version("recspec")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build"]

myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # reference pages begin some sections two levels down, as GitHub shows them
    "ref.python",  # `Model` is both the class of the API and that of the models
]

default_role = "code"  # docstrings write code in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
smartquotes = False  # `--set` stays two hyphens
html_title = "recspec"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Read notebooks as pages, add what the code knows, and let pages link to documents of the repository's root."""
    app.connect("source-read", _as_a_page)
    train = ModuleAnalyzer.for_module("recspec.api.training")
    train.analyze()
    train.overloads.clear()  # they are for type checkers, and hide the parameters


def _as_a_page(app: Sphinx, name: str, source: list[str]) -> None:
    if app.env.doc2path(name).suffix == ".ipynb":
        source[0] = _of_notebook(json.loads(source[0]), name)
    else:
        source[0] = for_site(source[0])
    up = "../" * name.count("/")
    source[0] = re.sub(
        r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING|SECURITY)\.md\b",
        lambda found: f"]({up}project/{found[1].lower()}.md",
        source[0],
    )


def _of_notebook(notebook: dict[str, Any], name: str) -> str:
    """A notebook's cells as Markdown: text as it is, code in a fence, and the outputs that the notebook keeps."""
    file = name.rpartition("/")[2] + ".ipynb"
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_of_output(output) for output in cell.get("outputs", ())]
    parts.insert(1, f"This page is a notebook: {{download}}`{file} <{file}>`.")
    return "\n\n".join(parts) + "\n"


def _of_output(output: dict[str, Any]) -> str:
    shown = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in shown:  # a blank line would end the block of HTML
        view = re.sub(r"\n\s*\n", "\n", "".join(shown["text/html"])).strip()
        return f'<div class="output">\n{view}\n</div>'
    return f'<pre class="output">{html.escape("".join(shown["text/plain"]))}</pre>'
