"""Each Python block of docs/clients.md that begins with `# pip install` runs as it is printed, on this server."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from rt_blocks import Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PRINTED_URL = "http://127.0.0.1:8000"
SNIPPETS = [
    block for block in blocks_of(ROOT, ROOT / "docs" / "clients.md") if block.installs and block.language == "python"
]


@pytest.mark.feature("as printed")
@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: f"{block.text.split()[3]}-{block.line}")
def test_a_snippet_works(block: Block, server_url: str) -> None:
    assert PRINTED_URL in block.text
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Without dont_inherit, the `annotations` import of this file would also apply to the snippet, and turn its
        # annotations into text.
        code = compile(block.text.replace(PRINTED_URL, server_url), block.name, "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})
    assert printed.getvalue().strip()
    assert "Paris" in printed.getvalue() or "Answer in one sentence." not in block.text
