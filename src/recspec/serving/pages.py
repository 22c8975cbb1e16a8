"""The pages: one to try models, the routes as a page, and the reports of runs; none loads anything from elsewhere.

The page to try models is put together from the files of the folder `page`. Its Content-Security-Policy allows the
digests of its own script and style. Pictures of other hosts are allowed only at `/?images=on`, because each tells its
host what is looked at; the page asks its user first.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recspec.serving.json_routes import opened
from recspec.serving.openapi import docs_page
from recspec.serving.repository import Repository
from recspec.serving.run_reports import REPORTS, read_report

SCRIPTS = ("server.js", "fields.js", "finder.js", "results.js", "rows.js", "page.js")
"""In the order in which they run."""

OWN_IMAGES, ALL_IMAGES = "data:", "data: https: http:"

_SANDBOX = "sandbox allow-scripts; "
"""A report's script can't read what the page keeps, nor send requests in its name."""


def routes(repository: Repository) -> list[Route]:
    """The pages."""
    text = page_text()
    plain, with_images = (_page(text, images=images) for images in (OWN_IMAGES, ALL_IMAGES))
    docs = _page(docs_page())

    async def page(request: Request) -> Response:
        return with_images if request.query_params.get("images") == "on" else plain

    async def documentation(_: Request) -> Response:
        return docs

    async def report(request: Request) -> Response:
        name = request.path_params["model"]
        with opened(repository, request, name, None) as (_, predictor):
            found = await asyncio.to_thread(read_report, predictor.bundle.folder, name)
        policy = "style-src 'unsafe-inline'; connect-src 'none'; img-src data:; font-src data:"
        return _page(found.decode("utf-8", "replace"), policy=f"{_SANDBOX}{policy}")

    return [Route("/", page), Route("/docs", documentation), Route(f"{REPORTS}{{model}}", report)]


def page_text() -> str:
    """The page to try models as one HTML text."""
    folder = files("recspec.serving").joinpath("page")
    text, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = "'use strict';\n{\n" + "\n".join(scripts) + "}\n"
    parts = {
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js"></script>': f"<script>{script}</script>",
    }
    for place, part in parts.items():
        assert text.count(place) == 1, place
        text = text.replace(place, part)
    return text


def _page(text: str, *, images: str = OWN_IMAGES, policy: str | None = None) -> Response:
    """A page that runs only its own content."""
    allowed = policy or f"style-src {_hashes('style', text)}; connect-src 'self'; img-src {images}"
    headers = {
        "content-security-policy": f"default-src 'none'; script-src {_hashes('script', text)}; {allowed}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html", headers=headers)


def _hashes(tag: str, text: str) -> str:
    """The sources that a policy allows for a tag: the digests of its contents in the page."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
