"""LoRA adapters of the fake engines behind a gateway, and sequences that use them."""

from __future__ import annotations

from rayloom_engine.core.adapter import Adapter, ServedAdapter
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.front.core_link.sequences import ClientSequence
from rt_engine_pool import World, sequence, until
from rt_fake_core import FakeCore


def served(name: str, content: str = "", folder: str = "/adapters", created: int = 1) -> ServedAdapter:
    """An adapter whose files have this content."""
    digest = (content or name).encode().ljust(16, b"-")
    return ServedAdapter(name=name, adapter=Adapter(f"{folder}/{name}", digest), rank=8, created=created)


SQL, POEMS = served("sql"), served("poems")


def tell(core: FakeCore, *adapters: ServedAdapter) -> None:
    core.adapters = adapters
    core.send_status()


async def told(world: World, **adapters: tuple[ServedAdapter, ...]) -> None:
    for name, each in adapters.items():
        tell(world.cores[name], *each)
    expected = {name: tuple(entry.adapter for entry in each) for name, each in adapters.items()}
    await until(lambda: all(world.client.pool.links[name].adapters == each for name, each in expected.items()))


def with_adapter(entry: ServedAdapter, name: str = "s", prompt_ids: tuple[int, ...] = (1, 2)) -> ClientSequence:
    one = sequence(name, prompt_ids=prompt_ids)
    one.params = DecodingParams(max_tokens=100, adapter=entry.adapter)
    return one
