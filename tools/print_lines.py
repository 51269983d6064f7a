"""Prints the lines of code of each product and folder, as the last step of `make lint`. No figure is a limit."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCTS = {
    "engine": "engine/src/rayloom_engine",
    "operator": "operator/src/rayloom_operator",
    "bench": "bench",
    "tests": "tests",
    "e2e": "e2e",
    "tools": "tools",
}
_WITHOUT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def lines_of_code(source: str) -> int:
    """Lines of Python source without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
            if docstring is not None and docstring.end_lineno is not None:
                lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def table() -> str:
    """Product, folder, files and lines of code, with a row of sums for each product."""
    rows = [f"{'product':<9} {'folder':<24} {'files':>5} {'lines':>7}"]
    for product, place in PRODUCTS.items():
        files: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        for path in sorted((ROOT / place).rglob("*.py")):
            inside = path.relative_to(ROOT / place).parts
            if "build" in inside:  # copies of source files that a build of a package has left
                continue
            folder = inside[0] if len(inside) > 1 else "."
            files[folder] += 1
            lines[folder] += lines_of_code(path.read_text(encoding="utf-8"))
        rows += [f"{product:<9} {folder:<24} {files[folder]:>5} {lines[folder]:>7}" for folder in sorted(files)]
        rows.append(f"{product:<9} {'total':<24} {files.total():>5} {lines.total():>7}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
