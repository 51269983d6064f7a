"""A gateway's core client with two fake engines, for tests of the choice between engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence
from rt_fake_core import FINGERPRINT, TOKEN, FakeCore, say

TEXT = "Hello there."
IDS = [*TEXT.encode(), 257]


class World:
    """A client, and its engines by name, in one event loop."""

    def __init__(self, folder: Path, hold_s: float, names: tuple[str, ...] = ("a", "b")) -> None:
        self.folder = folder
        self.cores = {name: FakeCore(folder) for name in names}
        for core in self.cores.values():
            assert core.model is not None
            core.model = msgspec.structs.replace(core.model, fingerprint=FINGERPRINT)
            core.script = say(TEXT)
        self.client = CoreClient(
            {name: self.address(name) for name in self.cores},
            on_status=lambda link, status: None,
            on_change=lambda: None,
            on_recovery=lambda recovery: None,
            rules=PoolRules(is_gateway=True, hold_s=hold_s, max_held_tokens=1000),
        )
        self.client.pool.model = FINGERPRINT

    def address(self, name: str) -> CoreAddress:
        return CoreAddress(f"unix:{self.folder}/{name}.sock", TOKEN)

    def change_model(self, name: str, **changes: object) -> None:
        core = self.cores[name]
        assert core.model is not None
        fingerprint = msgspec.structs.replace(FINGERPRINT, **changes)
        core.model = msgspec.structs.replace(core.model, fingerprint=fingerprint)
        core.send_status()

    def hold(self, num_tokens: int) -> None:
        for core in self.cores.values():
            core.hold_after = num_tokens

    def is_known(self, name: str) -> bool:
        """True if the engine is usable and its first report has replaced the estimated load."""
        link = self.client.pool.links[name]
        return link in self.client.pool.usable() and link.estimate.load == self.cores[name].load

    def place_of(self, sequence: ClientSequence) -> str:
        """The name of the engine that has the sequence now."""
        assert sequence.place.engine is not None
        return sequence.place.engine


def run(
    folder: Path,
    story: Callable[[World], Awaitable[None]],
    *,
    engines: tuple[str, ...] = ("a", "b"),
    hold_s: float = 60.0,
) -> None:
    """Runs `story` with these engines, when they are connected."""

    async def play() -> None:
        world = World(folder, hold_s, tuple(sorted({"a", "b", *engines})))
        tasks = [asyncio.create_task(world.cores[name].serve(folder / f"{name}.sock")) for name in engines]
        tasks.append(asyncio.create_task(world.client.run()))
        await until(lambda: all(world.is_known(name) for name in engines))
        try:
            await asyncio.wait_for(story(world), 30.0)
        finally:
            for task in reversed(tasks):
                task.cancel()

    asyncio.run(play())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.005)


def sequence(name: str = "s", max_tokens: int = 100, prompt_ids: tuple[int, ...] = (1, 2)) -> ClientSequence:
    return ClientSequence(
        sequence_id=name,
        request_id=name,
        lane=0,
        mailbox=Mailbox(),
        prompt_ids=prompt_ids,
        params=DecodingParams(max_tokens=max_tokens),
        priority=0,
        arrival=0.0,
    )


async def ids_of(one: ClientSequence) -> list[int]:
    """All token ids that the client receives until the sequence ends."""
    ids: list[int] = []
    while True:
        for _lane, output in await one.mailbox.take(20.0):
            ids += output.token_ids
            if output.finish_reason is not None:
                return ids
