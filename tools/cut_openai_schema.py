"""Cuts OpenAI's published API description down to the answers that tests check.

`python tools/cut_openai_schema.py openapi.json` writes tests/data/openai-answers.json. openapi.json is the file of
https://github.com/openai/openai-openapi. The output has the schemas of `ROOTS` and all schemas that they reference,
without descriptions and examples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "tests" / "data" / "openai-answers.json"
ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "ListModelsResponse",
    "Model",
    "ErrorResponse",
)
PREFIX = "#/components/schemas/"
# Keywords that only hold prose or options of documentation generators: they have no effect on validation.
_LEFT_OUT = ("description", "example", "examples", "x-oaiMeta", "x-stainless-const")
_NOTICE = """\
MIT License. Copyright (c) OpenAI (https://openai.com). Permission is hereby granted, free of charge, to any person \
obtaining a copy of this software and associated documentation files (the "Software"), to deal in the Software without \
restriction, including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, \
and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the \
following conditions: The above copyright notice and this permission notice shall be included in all copies or \
substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR \
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND \
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER \
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE \
SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""


def cut(document: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema (2020-12) whose `$defs` are the wanted schemas."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    wanted = list(ROOTS)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _without_prose(schemas[name])
            wanted += _references(found[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"From https://github.com/openai/openai-openapi, version {document['info']['version']}; "
        "cut by tools/cut_openai_schema.py",
        "license": _NOTICE,
        "$defs": {name: found[name] for name in sorted(found)},
    }


def _without_prose(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _LEFT_OUT or not _is_prose(key, value)}
    if isinstance(kept.get("$ref"), str):
        kept["$ref"] = kept["$ref"].replace(PREFIX, "#/$defs/")
    return {key: _without_prose(value) for key, value in kept.items()}


def _is_prose(key: str, value: Any) -> bool:
    # If the value of "description" is not a text, it is the schema of a property with the name "description". Such a
    # schema stays.
    return key != "description" or isinstance(value, str)


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for item in schema for name in _references(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in _references(value)]


def main(source: str) -> None:
    document = json.loads(Path(source).read_text(encoding="utf-8"))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(cut(document), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/cut_openai_schema.py openapi.json")
    main(sys.argv[1])
