"""The page /docs: the OpenAPI document as HTML, made on the server. The page loads no script, font or style."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 } code, pre { font: 13px/1.4 ui-monospace, monospace }
td, th { border-top: 1px solid #ddd; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
pre { background: #f5f5f5; padding: .5rem; overflow-x: auto } summary { cursor: pointer } h2 { margin-top: 2rem }
.method { font-weight: 600; display: inline-block; width: 4rem }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } pre { background: #262626 }
td, th { border-color: #444 } a { color: #8bf } }
"""
_SCHEMAS = "#/components/schemas/"


def document_json(document: Mapping[str, Any]) -> bytes:
    """Returns the document as JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def html_page(document: Mapping[str, Any]) -> str:
    """Returns the page: each endpoint with its fields, examples and statuses, then each schema with its fields."""
    info = document["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])} API</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p><a href='openapi.json'>openapi.json</a></p>",
    ]
    tag = ""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                parts.append(f"<h2>{escape(tag)}</h2>")
            parts += _operation(method, path, operation)
    parts.append("<h2>Schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>")
        parts.append(f"<p>{escape(schema.get('description', ''))}</p>{_fields(schema)}</details>")
    return "".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    head = f"<span class=method>{escape(method.upper())}</span> <code>{escape(path)}</code>"
    yield f"<details><summary>{head} {escape(operation['summary'])}</summary>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if body:
        yield f"<p>Body: {kind_of(body['schema'], _link)}</p>"
    for name, example in body.get("examples", {}).items():
        value = json.dumps(example["value"], ensure_ascii=False, indent=1)
        yield f"<p>{escape(name)}:</p><pre>{escape(value)}</pre>"
    yield "<table><tr><th>status<th>body<th>meaning"
    for status, response in operation["responses"].items():
        bodies = ", ".join(
            f"{escape(media)}: {kind_of(content.get('schema', {}), _link)}"
            for media, content in response.get("content", {}).items()
        )
        yield f"<tr><td>{escape(status)}<td>{bodies}<td>{escape(response['description'])}"
    yield "</table></details>"


def _fields(schema: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{kind_of(field, _link)}"
        f"<td>{'required' if name in schema.get('required', ()) else ''}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table><tr><th>field<th>type<th><th>meaning{''.join(rows)}</table>" if rows else ""


def _link(name: str) -> str:
    return f"<a href='#{escape(name)}'>{escape(name)}</a>"


def kind_of(schema: Mapping[str, Any], link: Any = str) -> str:
    """Returns the type of a schema in words. `link` writes the name of another schema."""
    if "$ref" in schema:
        return str(link(schema["$ref"].removeprefix(_SCHEMAS)))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = [kind_of(part, link) for part in schema[key]]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {kind_of(schema.get('items', {}), link)}"
    return str(kind)
