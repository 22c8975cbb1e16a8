"""The OpenAPI document as a page of plain HTML, which loads nothing from elsewhere and has no script."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import orjson

from recspec.serving.openapi import REFUSALS, document

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
code,pre{font:14px/1.45 ui-monospace,monospace}pre{background:#f3f3f3;padding:.8rem;overflow:auto;border-radius:4px}
h2 code{font-size:1.1rem}
h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #ddd}
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}pre{background:#242424}a{color:#8ab4f8}
h2,td,th{border-color:#444}}
"""

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "/rank": {"user": 42, "candidates": [1, 50, 181], "top_k": 2},
    "/recommend": {"user": 42, "k": 10, "liked": 5},
    "/predict": {"rows": [{"user_id": 42, "item_id": 50}]},
}


def docs_page() -> str:
    """The page."""
    described = document()
    links = "<a href=/openapi.json>openapi.json</a>, <a href=/>try it</a>"
    parts = [f"<h1>Routes</h1><p>{escape(described['info']['description'])} {links}</p>"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>")
            parts.append(_fields(operation, described["components"]["schemas"]))
            if path in EXAMPLES:
                example = escape(orjson.dumps(EXAMPLES[path]).decode())
                parts.append(f"<pre>curl -H 'Content-Type: application/json' -d '{example}' localhost:8000{path}</pre>")
    codes = "".join(f"<tr><td>{code}<td>{escape(text)}" for code, text in REFUSALS.items())
    parts.append(f'<h2>Refusals</h2><p>Each is <code>{{"error": text}}</code>.</p><table>{codes}</table>')
    head = f"<meta charset=utf-8><title>recspec serve: routes</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The fields of a route's request, as a table."""
    rows = [(each["name"], each["schema"], each["description"]) for each in operation.get("parameters", ())]
    body = operation.get("requestBody")
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        required = schemas[name].get("required", ())
        rows += [
            (field, schema, f"{schema.get('description', '')}{' (required)' if field in required else ''}")
            for field, schema in schemas[name]["properties"].items()
        ]
    cells = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(schema))}<td>{escape(text)}"
        for field, schema, text in rows
    )
    return f"<table>{cells}</table>" if cells else ""


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = [each["type"] for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return " or ".join(map(str, kinds or [schema.get("type", "")]))
