"""ARCHITECTURE.md and docs/design/ name files that exist, links between pages work, and ARCHITECTURE.md stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
# Pages name files from the root of the repository, or from the package of a product.
BASES = (ROOT, ROOT / "engine/src/rayloom_engine", ROOT / "operator/src/rayloom_operator")
PATH = re.compile(r"[a-z.][\w.-]*(/[\w.-]+)*(/|/[\w.-]+|\.py)")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
MAX_LINES = 150


def text_of(page):
    """The page without its blocks of code; lines keep their numbers."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)


def named_paths(page):
    """(line number, path below a base) of every repository path in backquotes.

    If a table row begins with a folder, a module name without a path is a module of that folder.
    """
    for number, line in enumerate(text_of(page).splitlines(), 1):
        quoted = re.findall(r"`([^`]+)`", line)
        folder = quoted[0] if line.startswith("| `") and quoted[0].endswith("/") else ""
        for each in filter(PATH.fullmatch, quoted):
            yield number, each if "/" in each else folder + each


def anchors(page):
    """The anchors that GitHub makes for the page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ARCHITECTURE, *DESIGN], ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page):
    missing = [f"{number}: {path}" for number, path in named_paths(page) if not any((b / path).exists() for b in BASES)]

    assert missing == []


def test_the_search_finds_paths_of_every_kind():
    found = {path for _, path in named_paths(ARCHITECTURE)}

    assert {"front/http/body.py", "decide/rollout/", "config.py", "tools/"} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_work(page):
    for name, anchor in LINK.findall(text_of(page)):
        target = page.parent / name if name else page

        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_every_design_page_is_linked_from_the_architecture():
    linked = {name for name, _ in LINK.findall(text_of(ARCHITECTURE))}

    assert [page.name for page in DESIGN if f"docs/design/{page.name}" not in linked] == []


def test_the_architecture_stays_short():
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
