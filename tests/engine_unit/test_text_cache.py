"""Text files that a core sends to a gateway, in parts and with hashes. Their folder outlives both processes."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections import deque
from pathlib import Path

import msgspec
import pytest

from rayloom_engine.core_server.sockets import CoreIo, GatewayPort, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.errors import ModelError
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.gateway.text_cache import TextCache
from rayloom_engine.front.gateway.text_fetch import TextFetch
from rayloom_engine.protocol.messages import CoreMessage, FetchFile, FilePart, ServedModel, TextFile, Welcome
from rayloom_engine.protocol.text_files import PART_BYTES, read_part, text_files
from rt_byte_model import byte_model
from rt_fake_core import FakeCore

KEY = "0123456789abcdef"


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    """A model whose tokenizer.json needs three parts."""
    folder = byte_model(tmp_path / "model")
    known = FakeCore(folder).model
    assert known is not None
    (folder / "tokenizer.json").write_bytes(b"{" + b"x" * (2 * PART_BYTES) + b"}")
    return msgspec.structs.replace(known, text_files=text_files(folder))


class Listener:
    def __init__(self, fetch: TextFetch) -> None:
        self.fetch = fetch
        self.has_status = asyncio.Event()

    def connected(self, link: EngineLink, welcome: Welcome) -> None: ...

    def disconnected(self, link: EngineLink, problem: str) -> None: ...

    def received(self, link: EngineLink, message: CoreMessage) -> None:
        if isinstance(message, FilePart):
            self.fetch.receive(message)
        else:
            self.has_status.set()


def test_files_cross_in_parts_and_the_cache_gives_them_back(tmp_path: Path, model: ServedModel) -> None:
    state = CoreState(epoch=1, executor="uni")
    state.model = model
    listener = socket.create_server(("127.0.0.1", 0))
    inbox = Inbox(deque(), threading.Event())
    io = CoreIo(f"unix:{tmp_path}/core.sock", "t", inbox, state.status, gateways=GatewayPort(listener, KEY))
    io.start()

    async def take() -> dict[str, bytes]:
        fetch = TextFetch()
        owner = Listener(fetch)
        link = EngineLink("first", CoreAddress(f"tcp:127.0.0.1:{listener.getsockname()[1]}", KEY), owner)
        task = asyncio.create_task(link.run())
        await asyncio.wait_for(owner.has_status.wait(), 60.0)
        assert link.status is not None
        assert link.status.model == model
        contents = {file.sha256: await fetch.fetch(link, file) for file in model.text_files}
        task.cancel()
        return contents

    contents = asyncio.run(take())
    io.stop()
    cache = TextCache(tmp_path / "cache", "m")
    assert cache.last() is None
    assert cache.find(model) is None
    stored = cache.store(model, contents)
    assert stored.path != model.path
    assert text_files(Path(stored.path)) == model.text_files
    cache.use(stored)
    assert TextCache(tmp_path / "cache", "m").last() == stored
    assert TextCache(tmp_path / "cache", "another service").last() is None
    assert cache.find(msgspec.structs.replace(model, path="/the/folder/in/another/pod")) == stored


def test_a_damaged_copy_is_not_used_and_a_wrong_content_not_stored(tmp_path: Path, model: ServedModel) -> None:
    cache = TextCache(tmp_path / "cache", "m")
    folder = Path(model.path)
    contents = {file.sha256: (folder / file.name).read_bytes() for file in model.text_files}
    stored = cache.store(model, contents)
    cache.use(stored)
    (Path(stored.path) / "tokenizer.json").write_bytes(b"{}")
    assert cache.last() is None
    assert cache.find(model) is None
    again = cache.store(model, contents)
    cache.use(again)
    assert cache.find(model) == cache.last() == again
    assert Path(again.path).name == f"{Path(stored.path).name}-1"
    with pytest.raises(ModelError, match=r"tokenizer.json does not have the hash"):
        cache.store(model, dict.fromkeys(contents, b"{}"))


def test_gateways_that_store_the_same_text_at_once_never_take_it_from_each_other(
    tmp_path: Path, model: ServedModel
) -> None:
    folder = Path(model.path)
    contents = {file.sha256: (folder / file.name).read_bytes() for file in model.text_files}
    gateways = [TextCache(tmp_path / "cache", "m") for _ in range(4)]
    gateways[0].use(gateways[0].store(model, contents))
    tokenizer = Path(gateways[0].store(model, contents).path) / "tokenizer.json"
    before = tokenizer.stat().st_ino
    missing: list[str] = []

    def store(gateway: TextCache) -> None:
        for _ in range(20):
            gateway.use(gateway.store(model, contents))
            if gateway.last() is None or gateway.find(model) is None:
                missing.append("a text that was there")

    threads = [threading.Thread(target=store, args=(gateway,)) for gateway in gateways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert missing == []
    assert tokenizer.stat().st_ino == before, "a whole copy is not written again"
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "config.json"])
def test_an_engine_cannot_choose_where_a_gateway_writes(tmp_path: Path, model: ServedModel, name: str) -> None:
    file = TextFile(name=name, num_bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    hostile = msgspec.structs.replace(model, text_files=(*model.text_files, file))
    with pytest.raises(ModelError, match="is not accepted"):
        TextCache(tmp_path / "cache", "m").store(hostile, {})


def test_only_text_files_are_handed_over(model: ServedModel) -> None:
    (Path(model.path) / "secret").write_bytes(b"secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    assert read_part(model, FetchFile(digest, 0)).data == b""
    assert read_part(model, FetchFile(model.text_files[0].sha256, -1)).data == b""
    assert read_part(None, FetchFile(digest, 0)).data == b""
