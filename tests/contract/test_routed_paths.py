"""The default path of routes to gateways covers the whole API for applications. docs/gateway.md names all others."""

from pathlib import Path

from rayloom_engine.front.app import DOCUMENT_PATH, PAGE_PATH
from rayloom_engine.front.routes import ROUTES
from rayloom_operator.api.gateway.route import DEFAULT_PATH

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"


def is_routed(path):
    return path.startswith(f"{DEFAULT_PATH}/")


def test_every_endpoint_that_generates_is_below_the_default_path():
    generating = {each.path for each in ROUTES if each.is_generation}

    assert len(generating) >= 4
    assert all(is_routed(path) for path in generating)


def test_no_path_below_the_default_path_is_open_to_everybody():
    assert all(each.needs_key for each in ROUTES if is_routed(each.path))


def test_the_page_names_every_path_that_the_default_leaves_out():
    (section,) = [each for each in PAGE.read_text().split("**") if each.startswith(" `/v1`, the default,")]
    paths = {each.path for each in ROUTES} | {DOCUMENT_PATH, PAGE_PATH, "/ui"}
    left_out = {path for path in paths if not is_routed(path)}

    assert {path for path in left_out if f"`{path}`" not in section} == set()
