"""The built-in page and its status on the API port. engine_real/test_page.py opens the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import pytest

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.ui.page import page_headers, page_html
from rt_front import FrontUnderTest, running_front

KEY = "key-for-tests"
MOST_BYTES = 40_000


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), api_keys=(KEY,)) as running:
        yield running


def with_key(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_page_needs_no_key_and_is_small(front: FrontUnderTest) -> None:
    answer = front.http.get("/ui")

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!doctype html>")
    assert len(answer.content) < MOST_BYTES


def test_the_policy_names_the_hashes_of_style_and_script_and_no_other_source(front: FrontUnderTest) -> None:
    answer = front.http.get("/ui")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))

    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_host_and_has_no_inline_style_or_handler() -> None:
    html = page_html()

    assert re.findall(r"https?://|//[a-z]+\.", html) == []
    assert re.findall(r"<[^>]*\s(?:style|on\w+)=", html) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html) == []


def test_other_content_has_another_hash() -> None:
    html = page_html()

    assert page_headers(html) != page_headers(html.replace("</script>", " </script>"))


def test_every_field_of_the_page_has_a_label() -> None:
    html = page_html()
    fields = set(re.findall(r'<(?:input|textarea|select) id="(\w+)"', html))

    assert len(fields) == 8
    assert set(re.findall(r'<label[^>]* for="(\w+)"', html)) == fields


@pytest.mark.parametrize("headers", [{}, with_key("another")])
def test_the_status_needs_a_key_if_the_server_has_keys(front: FrontUnderTest, headers: dict[str, str]) -> None:
    answer = front.http.get("/ui/status", headers=headers)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_status_has_the_figures_of_the_strip_and_no_place_of_the_engine(front: FrontUnderTest) -> None:
    answer = front.http.get("/ui/status", headers=with_key())

    assert answer.headers["cache-control"] == "no-store"
    assert answer.json() == {
        "state": "serving",
        "epoch": 1,
        "num_ranks": 1,
        "requests": {"running": 1, "waiting": 0, "failed": 0},  # FakeCore says so
        "recoveries": [],
    }


def serving_epoch(front: FrontUnderTest) -> int:
    """The epoch of the status, or 0 if the state is not serving."""
    status = front.service.status()
    return status.epoch if status.state == "serving" else 0


def test_the_newest_recoveries_come_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        for epoch in range(2, 9):
            front.do(front.core.die)
            front.wait_until(lambda: serving_epoch(front) == epoch, f"epoch {epoch}")  # noqa: B023
        document = front.http.get("/ui/status").json()

    assert document["epoch"] == 8
    assert [recovery["process"] for recovery in document["recoveries"]] == ["core"] * 5
    times = [recovery["at"] for recovery in document["recoveries"]]
    assert times == sorted(times, reverse=True)
    assert all(0 < recovery["seconds"] < 20 for recovery in document["recoveries"])


@pytest.mark.parametrize("path", ["/ui", "/ui/status"])
def test_there_is_no_page_if_it_is_off(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    with running_front(tmp_path_factory.mktemp("front"), ui=False) as front:
        assert front.http.get(path).status_code == 404


@pytest.mark.parametrize(
    ("host", "ui", "expected"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("10.1.2.3", None, False),
        ("engine.example", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_the_page_is_on_where_only_this_machine_reaches_the_port(host: str, ui: bool | None, expected: bool) -> None:
    assert EngineConfig(host=host, ui=ui).has_ui is expected
