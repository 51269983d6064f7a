"""The list of engines from a DNS name: each answer of the resolver updates the list, and a failure does not."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.front.gateway.engines_dns import EnginesDns, engines_after

KNOWN = {"10.0.0.7": "10.0.0.7:8002"}


def test_each_address_is_an_engine_named_by_it() -> None:
    assert engines_after({}, ["10.0.0.10", "fd00::7", "10.0.0.9", "10.0.0.9"], 8002) == {
        "10.0.0.9": "10.0.0.9:8002",
        "10.0.0.10": "10.0.0.10:8002",
        "fd00::7": "[fd00::7]:8002",
    }
    assert list(engines_after({}, ["10.0.0.10", "10.0.0.9"], 8002)) == ["10.0.0.9", "10.0.0.10"]


def test_a_pod_with_another_address_is_a_new_engine() -> None:
    assert engines_after(KNOWN, ["10.0.0.8"], 8002) == {"10.0.0.8": "10.0.0.8:8002"}


def test_an_answer_without_addresses_changes_nothing() -> None:
    assert engines_after(KNOWN, [], 8002) == KNOWN


@given(st.lists(st.ip_addresses()), st.randoms())
def test_the_order_of_an_answer_does_not_matter(found: list[ipaddress._BaseAddress], random: object) -> None:
    addresses = [str(each) for each in found]
    shuffled = sorted(addresses, key=lambda _: random.random())  # type: ignore[attr-defined]
    engines = engines_after({}, addresses, 1)
    assert list(engines.items()) == list(engines_after({}, shuffled, 1).items())
    assert set(engines) == set(addresses)


@pytest.mark.parametrize(
    "failure",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        TimeoutError("timed out"),
        UnicodeError("label too long"),
    ],
)
def test_a_failed_lookup_keeps_the_list_and_is_logged_once(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [["10.0.0.7"], failure, failure, [], ["10.0.0.7"], ["10.0.0.8"]]
    asked: list[tuple[str, int]] = []
    seen: list[dict[str, str]] = []

    async def watch() -> None:
        ended = asyncio.Event()

        async def answer(host: str, port: int) -> list[str]:
            asked.append((host, port))
            if len(asked) > len(answers):
                ended.set()
                await asyncio.Event().wait()
            next_one = answers[len(asked) - 1]
            if isinstance(next_one, Exception):
                raise next_one
            return next_one  # type: ignore[return-value]

        def changed(engines: Mapping[str, str]) -> None:
            seen.append(dict(engines))

        task = asyncio.create_task(EnginesDns("engines.local:8002", answer, lookup_s=0.0).watch(changed))
        await asyncio.wait_for(ended.wait(), 60.0)
        task.cancel()

    asyncio.run(watch())
    assert seen == [{"10.0.0.7": "10.0.0.7:8002"}, {"10.0.0.8": "10.0.0.8:8002"}]
    assert set(asked) == {("engines.local", 8002)}
    assert len([record for record in caplog.records if "cannot resolve engines.local" in record.message]) == 1


def test_the_resolver_of_the_system_is_asked() -> None:
    async def first() -> Mapping[str, str]:
        found: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(EnginesDns("localhost:8002").watch(found.set_result))
        engines = await asyncio.wait_for(found, 60.0)
        task.cancel()
        return engines

    engines = asyncio.run(first())
    assert engines
    assert set(engines.items()) <= {("127.0.0.1", "127.0.0.1:8002"), ("::1", "[::1]:8002")}


def test_an_unexpected_error_of_the_watch_ends_the_gateway_so_that_it_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of sixteen characters or more")
    arguments = ["gateway", "--engines-dns", "localhost:1", "--key-file", str(tmp_path / "key")]
    arguments += ["--cache-dir", str(tmp_path), "--served-model-name", "m", "--port", "0", "--admin-port", "0"]
    program = (
        "from rayloom_engine.cli.commands import run\n"
        "from rayloom_engine.front.gateway import engines_dns\n"
        "engines_dns.engines_after = None\n"
        f"run({arguments})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == 1
    assert "a background task failed, so this process ends" in ended.stderr
    assert "TypeError: 'NoneType' object is not callable" in ended.stderr
