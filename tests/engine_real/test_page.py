"""The built-in page in Debian's chromium: with the real front and a fake core, and with a real server that has faults.

Every test also has three conditions: the browser's console stays empty, no policy is violated, and the page sends no
request to another host.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rt_browser import Page, browser_page, find_chromium
from rt_fake_core import say
from rt_faults import aim, breakable_server, slow_steps
from rt_front import FrontUnderTest, running_front
from rt_server import RunningServer, wait_until

KEY = "key-for-tests"
IS_IDLE = "!document.querySelector('#send').hidden"
ANSWER = "article.answer .text"
HOSTILE = '<img src="x" onerror="console.error(1)"><script>console.error(2)</script>&amp;</div>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("there is no chromium; on Debian: apt-get install chromium")
    with browser_page(tmp_path_factory.mktemp("chromium"), chromium) as page:
        yield page


@pytest.fixture(scope="module")
def front(browser: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as running:
        yield running


@pytest.fixture
def page(browser: Page, front: FrontUnderTest) -> Iterator[Page]:
    """The page of the front with the fake core, ready to send."""
    front.do(front.core.reset)
    with opened(browser, front.api_url):
        browser.wait_for("document.querySelector('#model').value === 'tiny'")
        yield browser


@contextlib.contextmanager
def opened(page: Page, api_url: str, allowed: str | None = None) -> Iterator[None]:
    """Opens the page. Afterwards checks the lines of its console and the addresses that it requested.

    Lines of the console with the text `allowed` are ignored.
    """
    page.complaints.clear()
    page.requested.clear()
    page.open(f"{api_url}/ui")
    yield
    assert [each for each in page.complaints if allowed is None or allowed not in each] == []
    asked = set(page.requested)
    assert {url for url in asked if not url.startswith((f"{api_url}/", "data:"))} == set()
    assert f"{api_url}/ui/status" in asked
    page.evaluate("sessionStorage.clear()")
    page.open("about:blank")  # ends the page's requests for the status


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.click("#send")


def test_an_answer_streams_with_its_figures(page: Page, front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("One line.\n\nAnother line.")))
    front.do(lambda: setattr(front.core, "hold_after", 9))  # else all tokens may arrive at once, which gives no rate
    ask(page, "Say two lines.")
    page.wait_for(f"document.querySelector('{ANSWER}')?.innerText === 'One line.'")
    front.do(front.core.release)
    page.wait_for(f"{IS_IDLE} && document.querySelector('article.answer')")

    assert page.text("article.question .text") == "Say two lines."
    assert page.text(ANSWER) == "One line.\n\nAnother line."
    figures = page.text(".figures").split(" · ")
    assert figures[0] == "25 tokens"  # one for each byte, and the end token
    assert figures[1].endswith(" tokens/s")
    assert re.match(r"first token after \d+\.\d", figures[2])
    page.wait_for("document.querySelector('#state').innerText === 'serving'")
    page.wait_for("document.querySelector('#counts').innerText.startsWith('epoch ')")


def test_the_settings_reach_the_engine_and_stay_in_the_tab(page: Page, front: FrontUnderTest) -> None:
    for field, text in (("system", "Be brief."), ("temperature", "0.3"), ("seed", "7"), ("max_tokens", "4")):
        page.fill(f"#{field}", text)
    ask(page, "Hello")
    page.wait_for(f"{IS_IDLE} && document.querySelector('article.answer')")

    (submit,) = front.do(lambda: list(front.core.submits))
    assert b"Be brief." in bytes(token for token in submit.prompt_ids if token < 256)
    assert page.text(ANSWER) == "Hell"
    assert "cut off at the limit of tokens" in page.text(".figures")
    page.open(f"{front.api_url}/ui")
    assert page.evaluate("document.querySelector('#system').value") == "Be brief."


def test_stop_ends_the_answer_and_the_sequence_and_regenerate_asks_again(page: Page, front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    ask(page, "Hello")
    page.wait_for(f"document.querySelector('{ANSWER}')?.innerText === 'Hello'")
    page.click("#stop")
    page.wait_for(IS_IDLE)
    assert page.text(".figures").endswith("stopped")
    front.wait_until(lambda: len(front.core.aborts) == 1, "the front aborts the sequence")

    front.do(front.core.release)
    page.click("#regenerate")
    page.wait_for(f"{IS_IDLE} && document.querySelector('{ANSWER}').innerText === 'Hello there.'")
    assert page.count("article") == 2, "the new answer takes the place of the stopped one"
    first, second = front.do(lambda: [submit.prompt_ids for submit in front.core.submits])
    assert first == second


def test_escape_stops_and_enter_sends(page: Page, front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    page.fill("#question", "Hello")
    page.press("Enter", 13, "\r")
    page.wait_for(f"document.querySelector('{ANSWER}')?.innerText === 'Hello'")
    page.press("Escape", 27)
    page.wait_for(IS_IDLE)


def test_a_conversation_carries_its_answers(page: Page, front: FrontUnderTest) -> None:
    for number, question in enumerate(("First", "Second"), 1):
        ask(page, question)
        page.wait_for(f"{IS_IDLE} && document.querySelectorAll('article.answer').length === {number}")
    _, second = front.do(lambda: [bytes(t for t in s.prompt_ids if t < 256) for s in front.core.submits])
    assert second.index(b"First") < second.index(b"Hello there.") < second.index(b"Second")

    page.click("#clear")
    assert page.count("article") == 0


def test_markup_of_the_model_is_text(page: Page, front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say(HOSTILE)))
    ask(page, HOSTILE)
    page.wait_for(f"{IS_IDLE} && document.querySelector('article.answer')")

    assert page.text(ANSWER) == HOSTILE
    assert page.text("article.question .text") == HOSTILE
    assert page.count("article img, article script") == 0


def test_the_policy_stops_markup_and_other_hosts(page: Page) -> None:
    refused = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; } })()"
    )
    assert page.evaluate(refused) == "TypeError"
    asked = "fetch('http://127.0.0.2:9/').then(() => 'answered', (error) => error.name)"
    assert page.evaluate(asked) == "TypeError"
    for rule in ("require-trusted-types-for", "connect-src"):
        # `evaluate` makes the browser send all earlier console lines before the result of the expression.
        wait_until(
            lambda rule=rule: page.evaluate("true") and any(f"violated: {rule}" in each for each in page.complaints),
            30.0,
            lambda: str(page.complaints),
        )
    page.complaints.clear()
    page.requested[:] = [url for url in page.requested if "127.0.0.2" not in url]


def stream_of(*deltas: dict[str, object]) -> str:
    """A script that answers the page's next chat with these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, ended]) + "data: [DONE]\n\n"
    return f"""
        window.bodies = [];
        window.realFetch ??= window.fetch;
        window.fetch = (url, options) => {{
          if (!url.endsWith("chat/completions")) return window.realFetch(url, options);
          window.bodies.push(JSON.parse(options.body));
          return Promise.resolve(new Response({json.dumps(text)}));
        }};
        undefined
    """


def test_reasoning_is_folded_and_tool_calls_are_shown_and_answered(page: Page) -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    page.evaluate(
        stream_of(
            {"role": "assistant", "content": ""},
            {"reasoning_content": f"Think {HOSTILE}"},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        )
    )
    page.fill("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
    ask(page, "How is the weather?")
    page.wait_for(f"{IS_IDLE} && document.querySelector('.call')")

    assert page.evaluate("document.querySelector('.reasoning').open") is False
    page.click(".reasoning summary")
    assert page.text(".reasoning .text") == f"Think {HOSTILE}"
    assert page.text(".call") == 'weather\n{"city": "Paris"}'
    assert "waits for the tool's result" in page.text(".figures")

    ask(page, "Sunny.")
    page.wait_for(f"{IS_IDLE} && window.bodies.length === 2")
    asked, answered = page.evaluate("window.bodies")
    assert asked["tools"][0]["function"]["name"] == "weather"
    assert answered["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "Sunny."},
    ]


def test_a_refusal_is_shown_in_the_servers_words(browser: Page, front: FrontUnderTest) -> None:
    front.do(front.core.reset)
    with opened(browser, front.api_url, allowed="400 (Bad Request)"):
        browser.wait_for("document.querySelector('#model').value === 'tiny'")
        browser.fill("#tools", "{")
        ask(browser, "Hello")
        browser.wait_for(f"{IS_IDLE} && document.querySelector('.fault')")
        assert browser.text(".fault").startswith('The setting "Tools" is not JSON: ')
        browser.fill("#tools", "")
        browser.fill("#max_tokens", "100000")
        browser.click("#regenerate")
        browser.wait_for(f"{IS_IDLE} && document.querySelector('.fault')?.innerText.includes('max_tokens')")


def test_on_a_phone_nothing_is_wider_than_the_screen_and_dark_is_dark(page: Page, front: FrontUnderTest) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=780, deviceScaleFactor=2, mobile=True)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        page.open(f"{front.api_url}/ui")
        page.wait_for("document.querySelector('#model').value === 'tiny'")
        ask(page, "x" * 200)
        page.wait_for(f"{IS_IDLE} && document.querySelector('article.answer')")
        assert page.text(ANSWER) == "Hello there."
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelector('#send').getBoundingClientRect().bottom") <= 780
        assert page.evaluate("document.querySelector('#settings').open") is False
        assert page.evaluate(ground) != light
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
        page.call("Emulation.setEmulatedMedia", features=[])


@pytest.fixture(scope="module")
def server(browser: Page, quick_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("page-server")
    (folder / "keys").write_text(f"{KEY}\n")
    arguments = ("--model", quick_model, "--dtype", "float32", "--served-model-name", "quick")
    with breakable_server(folder, *arguments, "--api-key-file", str(folder / "keys")) as running:
        yield running


def test_an_answer_survives_a_killed_core_and_the_strip_shows_it(browser: Page, server: RunningServer) -> None:
    with opened(browser, server.api_url, allowed="401 (Unauthorized)"):
        browser.wait_for("document.querySelector('#state').innerText === 'needs an API key'")
        for field, text in (("key", KEY), ("temperature", "0"), ("max_tokens", "600")):
            browser.fill(f"#{field}", text)
        browser.wait_for("document.querySelector('#model').value === 'quick'")
        browser.wait_for("document.querySelector('#counts').innerText === "
                         "'epoch 1 · 1 rank · 0 running · 0 waiting · 0 failed'")  # fmt: skip
        kill = aim(server, "core", "killed")
        with slow_steps(server.log.parent):
            ask(browser, "Write a long story about a village by the sea, with many chapters.")
            browser.wait_for(f"document.querySelector('{ANSWER}')?.innerText.length > 20")
            kill()
        assert browser.evaluate(IS_IDLE) is False, "the core was killed under the stream"
        browser.wait_for("document.querySelector('#recoveries').innerText.includes('back after')", 60.0)
        browser.wait_for(IS_IDLE, 60.0)
        assert browser.count(".fault") == 0
        disturbed = browser.text(ANSWER)
        assert "1 request replayed" in browser.text("#recoveries li")
        assert "core lost" in browser.text("#recoveries li")
        browser.wait_for("document.querySelector('#counts').innerText === "
                         "'epoch 2 · 1 rank · 0 running · 0 waiting · 0 failed'")  # fmt: skip
        assert browser.text("#news").endswith("1 request replayed, 0 failed")

        browser.click("#regenerate")
        browser.wait_for(f"{IS_IDLE} && document.querySelector('article.answer').getAttribute('aria-busy') === 'false'")
        assert browser.text(ANSWER) == disturbed
