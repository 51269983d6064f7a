"""The built-in page: one HTML document with its style and scripts inside, and the headers that confine it.

The page comes from the files of this folder. The page loads nothing else: its Content-Security-Policy names the hashes
of the style and of the script, and forbids all other sources. Trusted Types also forbid every way of turning text into
markup.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent
_SCRIPTS = ("settings.js", "answer.js", "chat.js", "recoveries.js")  # the order in which the browser runs them


def page_html() -> str:
    """Returns the document with its style and scripts."""
    scripts = "\n".join(_text(name) for name in _SCRIPTS)
    return (
        _text("page.html")
        .replace("/* page.css */", f"\n{_text('page.css')}")
        .replace("/* scripts */", f'\n"use strict";\n{scripts}')
    )


def page_headers(html: str) -> dict[str, str]:
    """Returns the headers of the answer with the document `html`."""
    policy = (
        "default-src 'none'",
        f"script-src '{_hash(html, 'script')}'",
        f"style-src '{_hash(html, 'style')}'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon, without which browsers request /favicon.ico
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(html: str, tag: str) -> str:
    """Returns the hash of the text in the document's only element `tag`, in the form of Content-Security-Policy."""
    content = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
