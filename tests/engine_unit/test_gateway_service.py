"""The gateway's tokenizer: fetched from an engine, cached for a start without engines, and replaced with the model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from rayloom_engine.errors import QueueFull
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.gateway_service import GatewayService
from rayloom_engine.front.gateway.text_cache import TextCache
from rayloom_engine.front.generation.admission import check_room
from rayloom_engine.front.operations.engines_document import engines_document
from rayloom_engine.protocol.messages import FetchFile, FrontMessage, ServedModel
from rayloom_engine.protocol.text_files import text_files
from rayloom_engine.sampling_params import ContextTooLong, SamplingParams
from rt_byte_model import byte_model
from rt_engine_pool import sequence
from rt_fake_core import FINGERPRINT, TOKEN, FakeCore


def engine(folder: Path, name: str, max_model_len: int = 512) -> FakeCore:
    """A fake core with the model `name`, which has its own chat template."""
    model_folder = byte_model(folder / f"model-{name}", template=f"{name}: {{{{ messages[0]['content'] }}}}")
    core = FakeCore(model_folder, max_model_len=max_model_len)
    assert core.model is not None
    fingerprint = msgspec.structs.replace(FINGERPRINT, content_hash=name)
    core.model = msgspec.structs.replace(core.model, fingerprint=fingerprint, text_files=text_files(model_folder))
    return core


@contextlib.asynccontextmanager
async def running(folder: Path, cores: dict[str, FakeCore], **settings: object) -> AsyncIterator[GatewayService]:
    """A gateway in front of these engines. The gateway's cache is in `folder`."""
    document: dict[str, object] = {
        "served_model_name": "m",
        "engines": {"x": "h:1"},
        "key_file": "/none",
        "cache_dir": str(folder),
    }
    document |= settings
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
    async with asyncio.timeout(60.0):
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


def test_a_gateway_that_has_served_can_start_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, may_record = threading.Event(), threading.Event()
    use = TextCache.use

    def slow_use(cache: TextCache, model: ServedModel) -> None:
        entered.set()
        assert may_record.wait(20.0)
        use(cache, model)

    monkeypatch.setattr(TextCache, "use", slow_use)

    async def story() -> None:
        async with running(tmp_path, {"a": engine(tmp_path, "first")}) as service:
            await until(entered.is_set)
            assert service.text is None, "the gateway would serve before its cache knows the text"
            may_record.set()
            await until(lambda: service.lifecycle.was_ready)
        async with running(tmp_path, {}) as service:
            await until(lambda: service.lifecycle.accepts)

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


async def sample(service: GatewayService, name: str) -> list[str]:
    """The lines of a metric."""
    return [line for line in (await service.metrics_text()).splitlines() if line.startswith(name)]


class DyingCore(FakeCore):
    """A core that dies when a part of a text file is requested, and then restarts, at most `most_deaths` times."""

    most_deaths = 1000

    def _take(self, message: FrontMessage, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, FetchFile) and self.epoch <= self.most_deaths:
            self.die()
        else:
            super()._take(message, writer)


def test_an_engine_that_dies_while_it_hands_over_files_delays_no_other_engine(tmp_path: Path) -> None:
    async def story() -> None:
        good = engine(tmp_path, "m")
        dying = DyingCore(tmp_path / "model-m")
        dying.model = good.model
        async with running(tmp_path, {"a": dying}) as service:
            await until(lambda: dying.epoch >= 3)  # asked again as soon as it is back
            assert service.text is None
        async with running(tmp_path, {"a": dying, "b": good}) as service, asyncio.timeout(10.0):
            await until(lambda: service.text is not None)

    asyncio.run(story())


def test_an_engine_that_died_is_asked_again_while_another_engine_still_loads_its_model(tmp_path: Path) -> None:
    async def story() -> None:
        loading = FakeCore(tmp_path)
        loading.state = "starting"
        dying = DyingCore(tmp_path)
        dying.model = engine(tmp_path, "m").model
        dying.most_deaths = 1
        dying.state = "starting"
        async with running(tmp_path, {"a": dying, "b": loading}) as service, asyncio.timeout(10.0):
            await until(lambda: all(link.is_connected for link in service.client.pool.links.values()))
            dying.state = "serving"
            dying.send_status()
            await until(lambda: service.text is not None)
            assert dying.epoch == 2

    asyncio.run(story())


def test_running_sequences_block_no_new_one_and_held_ones_count_against_the_queue(tmp_path: Path) -> None:
    async def story() -> None:
        core = engine(tmp_path, "m")
        core.is_silent = True
        async with running(tmp_path, {"a": core}, max_queued_requests=2) as service:
            client = service.client
            await until(lambda: service.text is not None and client.is_core_serving)
            client.submit([sequence(f"s{number}") for number in range(100)])
            check_room(service.config, client, 1, "")  # 100 run, more than max_queued_requests and max_num_seqs
            assert await sample(service, "rayloom:num_requests_running{") == [
                'rayloom:num_requests_running{model_name="m"} 100.0'
            ]
            assert await sample(service, "rayloom:num_requests_waiting{") == [
                'rayloom:num_requests_waiting{model_name="m"} 0.0'
            ]
            core.is_draining = True
            core.send_status()
            await until(lambda: not client.is_core_serving)
            client.submit([sequence("held 1")])
            check_room(service.config, client, 1, "")
            client.submit([sequence("held 2")])
            assert client.num_held() == 2
            with pytest.raises(QueueFull, match="2 sequences wait for an engine"):
                check_room(service.config, client, 1, "")
            with pytest.raises(QueueFull, match="2 sequences wait for one"):
                client.submit([sequence("held 3")])
            assert await sample(service, "rayloom:num_requests_waiting{") == [
                'rayloom:num_requests_waiting{model_name="m"} 2.0'
            ]
            requests = service.status().requests
            assert (requests.running, requests.waiting) == (100, 2)
            assert await sample(service, "rayloom:rank_") == [], "a gateway has no ranks"

    asyncio.run(story())


def test_a_key_gets_half_of_the_places_for_held_requests(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, {"a": engine(tmp_path, "m")}) as service:
            await until(lambda: service.text is not None)
        async with running(tmp_path, {}, max_queued_requests=4) as service:
            for name in ("1", "2"):
                check_room(service.config, service.client, 1, "flood")
                one = sequence(name)
                one.tenant = "flood"
                service.client.submit([one])
            with pytest.raises(QueueFull, match="2 sequences of this API key wait for an engine"):
                check_room(service.config, service.client, 1, "flood")
            check_room(service.config, service.client, 1, "other")

    asyncio.run(story())


def test_a_key_gets_half_of_the_places_also_while_an_engine_serves_that_cannot_take_its_requests(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with running(tmp_path, {"a": engine(tmp_path, "m", 64)}, max_queued_requests=4) as service:
            await until(lambda: service.text is not None and service.client.is_core_serving)

            def submit(tenant: str, name: str) -> None:
                one = sequence(name, max_tokens=100)  # too long for the engine
                one.tenant = tenant
                check_room(service.config, service.client, 1, tenant)
                service.client.submit([one])

            submit("flood", "1")
            submit("flood", "2")
            with pytest.raises(QueueFull, match="2 sequences of this API key wait for one"):
                submit("flood", "3")
            submit("other", "4")
            assert service.client.num_held() == 3

    asyncio.run(story())


def test_a_connected_engine_without_a_status_is_not_disconnected(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, {"a": engine(tmp_path, "m")}) as service:
            link = service.client.pool.links["a"]
            states = []
            service.client._on_change = lambda: states.append(engines_document(service.client)["engines"][0]["state"])
            await until(lambda: link.status is not None)
            assert states == ["connected"]

    asyncio.run(story())


def test_the_default_length_suits_most_engines_and_the_longest_context_is_the_limit(tmp_path: Path) -> None:
    async def story() -> None:
        cores = {"short": engine(tmp_path, "m", 400), "long": engine(tmp_path, "m", 1000)}
        async with running(tmp_path, cores) as service:
            await until(lambda: service.text is not None and service.text.contexts == (400, 1000))
            text = service.text
            assert text is not None

            def length(prompt_len: int, **given: object) -> int:
                params = SamplingParams(**{"max_tokens": None, **given})  # type: ignore[arg-type]
                return params.decoding(0, prompt_len, text.context_of(params, prompt_len), 300, 0).max_tokens

            assert length(100) == 300
            assert length(300) == 100
            assert length(301) == 699, "the short context would leave less than a quarter for the answer"
            assert length(100, min_tokens=201) == 900
            assert length(100, max_tokens=900) == 900
            with pytest.raises(ContextTooLong, match="context is 1000 tokens, but the prompt has 1000"):
                length(1000)
            service.client.set_engines({"short": service.client.pool.links["short"].core})
            cores["short"].send_status()
            await until(lambda: service.text is not None and service.text.model.max_model_len == 400)
            assert service.text is not None
            assert service.text.contexts == (400,)

    asyncio.run(story())


def test_a_gateway_takes_embeddings_while_one_of_its_engines_does(tmp_path: Path) -> None:
    async def story() -> None:
        cores = {"with": engine(tmp_path, "m"), "without": engine(tmp_path, "m")}
        assert cores["without"].model is not None
        cores["without"].model = msgspec.structs.replace(cores["without"].model, hidden_size=0)
        async with running(tmp_path, cores) as service:
            await until(lambda: service.text is not None and service.text.model.hidden_size == 4)
            service.client.set_engines({"without": service.client.pool.links["without"].core})
            cores["without"].send_status()
            await until(lambda: service.text is not None and service.text.model.hidden_size == 0)

    asyncio.run(story())


def test_an_engine_that_is_lost_for_a_moment_still_counts_for_the_longest_context(tmp_path: Path) -> None:
    async def story() -> None:
        cores = {"short": engine(tmp_path, "m", 400), "long": engine(tmp_path, "m", 1000)}
        async with running(tmp_path, cores) as service:
            await until(lambda: service.text is not None and service.text.contexts == (400, 1000))
            service.client.pool.links["long"].core = CoreAddress(f"unix:{tmp_path}/none.sock", TOKEN)
            cores["long"].die()
            await until(lambda: service.text is not None and service.text.contexts == (400,))
            assert service.text is not None
            assert service.text.model.max_model_len == 1000

    asyncio.run(story())
