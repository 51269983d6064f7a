"""The gateway's text: taken from an engine, kept for a start without one, replaced with the engines' model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.gateway_service import GatewayService
from rayloom_engine.front.gateway.text_cache import TextCache
from rayloom_engine.protocol.text_files import text_files
from rt_byte_model import byte_model
from rt_engine_pool import sequence
from rt_fake_core import FINGERPRINT, TOKEN, FakeCore


def engine(folder: Path, name: str) -> FakeCore:
    """A fake core with the model `name`, which has its own chat template."""
    model_folder = byte_model(folder / f"model-{name}", template=f"{name}: {{{{ messages[0]['content'] }}}}")
    core = FakeCore(model_folder)
    assert core.model is not None
    fingerprint = msgspec.structs.replace(FINGERPRINT, content_hash=name)
    core.model = msgspec.structs.replace(core.model, fingerprint=fingerprint, text_files=text_files(model_folder))
    return core


@contextlib.asynccontextmanager
async def running(folder: Path, cores: dict[str, FakeCore]) -> AsyncIterator[GatewayService]:
    """A gateway in front of these engines, whose cache is in `folder`."""
    document = {"served_model_name": "m", "engines": {"x": "h:1"}, "key_file": "/none", "cache_dir": str(folder)}
    addresses = {name: CoreAddress(f"unix:{folder}/{name}.sock", TOKEN) for name in cores}
    cache = TextCache(folder / "cache", "m")
    service = GatewayService(parse_gateway_config(document), addresses, cache, api_url="http://none")
    tasks = [asyncio.create_task(core.serve(folder / f"{name}.sock")) for name, core in cores.items()]
    tasks.append(asyncio.create_task(service.run()))
    try:
        yield service
    finally:
        for task in reversed(tasks):
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


def rendered(service: GatewayService) -> str:
    assert service.text is not None
    assert service.text.template is not None
    return service.text.template.render([{"role": "user", "content": "Hi"}])


def test_the_text_is_taken_once_and_serves_a_start_without_an_engine(tmp_path: Path) -> None:
    async def story() -> None:
        core = engine(tmp_path, "first")
        async with running(tmp_path, {"a": core}) as service:
            await until(lambda: service.lifecycle.was_ready)
            assert service.state() == ("serving", "")
            assert rendered(service) == "first: Hi"
        num_fetches = core.num_fetches
        assert num_fetches == len(core.model.text_files) == 2  # type: ignore[union-attr]
        async with running(tmp_path, {"a": core}) as service:
            await until(lambda: service.client.is_core_serving)
            assert core.num_fetches == num_fetches
        async with running(tmp_path, {}) as service:
            await until(lambda: service.lifecycle.accepts)
            assert rendered(service) == "first: Hi"
            assert service.state() == ("recovering", "waiting for the core")

    asyncio.run(story())


def test_the_status_has_the_sequences_that_wait_for_an_engine(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, {}) as service:
            assert (service.status().requests.waiting, service.status().load.queued_tokens) == (0, 0)
            service.client.submit([sequence("a", prompt_ids=(1, 2, 3)), sequence("b", prompt_ids=(4, 5))])
            status = service.status()
            assert (status.requests.waiting, status.load.queued_tokens) == (2, 5)
            assert (status.state, status.ranks) == ("starting", [])

    asyncio.run(story())


def test_the_text_changes_only_when_no_engine_has_the_old_model(tmp_path: Path) -> None:
    async def story() -> None:
        cores = {"a": engine(tmp_path, "old"), "b": engine(tmp_path, "new")}
        cores["b"].state = "starting"
        async with running(tmp_path, cores) as service:
            await until(lambda: service.text is not None)
            first = rendered(service)
            cores["b"].state = "serving"
            cores["b"].send_status()
            await until(lambda: service.client.pool.links["b"].is_serving)
            assert rendered(service) == first
            old = "a" if first.startswith("old") else "b"
            service.client.set_engines(
                {name: link.core for name, link in service.client.pool.links.items() if name != old}
            )
            for core in cores.values():
                core.send_status()
            await until(lambda: rendered(service) != first)
            assert {first, rendered(service)} == {"old: Hi", "new: Hi"}
            assert service.client.pool.model is not None
            assert service.client.pool.model.content_hash == rendered(service).partition(":")[0]

    asyncio.run(story())


def test_a_new_context_length_of_all_engines_is_taken_over(tmp_path: Path) -> None:
    async def story() -> None:
        cores = {"a": engine(tmp_path, "old")}
        async with running(tmp_path, cores) as service:
            await until(lambda: service.text is not None)
            assert service.text is not None
            before = service.text.model.max_model_len
            assert cores["a"].model is not None
            cores["a"].model = msgspec.structs.replace(cores["a"].model, max_model_len=before // 2)
            cores["a"].send_status()
            await until(lambda: service.text is not None and service.text.model.max_model_len == before // 2)

    asyncio.run(story())


def test_an_engine_that_hands_over_broken_files_is_no_source(tmp_path: Path) -> None:
    async def story() -> None:
        broken, whole = engine(tmp_path, "same"), engine(tmp_path, "same")
        assert broken.model is not None
        damaged = byte_model(tmp_path / "damaged")
        (damaged / "tokenizer.json").write_text("{}")
        broken.model = msgspec.structs.replace(broken.model, path=str(damaged))
        async with running(tmp_path, {"a": broken}) as service:
            await until(lambda: broken.num_fetches > 0)
            broken.send_status()
            await until(lambda: service._changing is None)
            assert service.text is None
            assert not service.lifecycle.accepts
        async with running(tmp_path, {"a": broken, "b": whole}) as service:
            for _ in range(100):
                if service.text is not None:
                    break
                broken.send_status()
                whole.send_status()
                await asyncio.sleep(0.02)
            assert rendered(service) == "same: Hi"

    asyncio.run(story())
