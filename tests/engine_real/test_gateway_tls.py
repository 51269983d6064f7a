"""TLS between real gateways and engines: a change from clear text while streams run, renewals, wrong certificates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from rt_faults import breakable, slow_steps
from rt_gateway import Gateway, Program, running_gateway, start, write_key
from rt_ports import free_port
from rt_server import START_EVERY_S, wait_until
from rt_streams import Said, Stream, completion_body, join_streams, said, start_streams
from rt_tls import DAY, Authority, Issued, tls_flags, write_tls

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "512")
ENGINE = "chat-engines.default.svc"
NUM_TOKENS = 64  # steps are slow until an engine is killed, so it is killed before streams of this length end
LONG_TOKENS = 300  # enough that a stream still runs when certificates are read again
BODIES = [completion_body(index, NUM_TOKENS) for index in (0, 1, 3, 4)]
EARLY_TOKENS = 5


@dataclass
class World:
    """Two engines, and the files for TLS.

    The engine "old" has no TLS. The engine "new" accepts TLS and clear text.
    """

    folder: Path
    model: str  # of both engines
    authority: Authority
    ports: dict[str, int]
    programs: dict[str, Program]

    def write_engine(self, issued: Issued) -> list[str]:
        return tls_flags(write_tls(self.folder / "engine", "front_tls", issued, self.authority.cert), "permissive")

    def write_gateway(self, issued: Issued, mode: str) -> list[str]:
        paths = write_tls(self.folder / "gateway", "tls", issued, self.authority.cert)
        return [*tls_flags(paths, mode), "--tls-server-name", ENGINE]

    def for_engine(self) -> Issued:
        return self.authority.issue(ENGINE, is_engine=True)

    def for_gateway(self) -> Issued:
        return self.authority.issue("chat-gateway.default.svc", is_engine=False)

    def start(self, name: str, *flags: str) -> None:
        port, key = str(self.ports[name]), str(write_key(self.folder))
        own = ("--port", "0", "--admin-port", "0", "--front-port", port, "--front-key-file", key)
        self.programs[name] = start(self.folder, name, "serve", "--model", self.model, *ARGUMENTS, *own, *flags)


@pytest.fixture(scope="module")
def world(three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    ports = {name: free_port() for name in ("old", "new")}
    made = World(tmp_path_factory.mktemp("world"), three_layers, Authority(), ports, {})
    with breakable(made.folder):
        try:
            made.start("old")
            made.start("new", *made.write_engine(made.for_engine()))
            yield made
        finally:
            for program in made.programs.values():
                program.kill()


@pytest.fixture(scope="module")
def gateway(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway during the change: it uses TLS only with the engine that supports TLS."""
    flags = world.write_gateway(world.for_gateway(), "permissive")
    with running_gateway(tmp_path_factory.mktemp("gateway"), world.ports, *flags) as running:
        wait_until(lambda: running.serving() == {"old", "new"}, 120.0, running.log_text, START_EVERY_S)
        yield running


@pytest.fixture(scope="module")
def undisturbed(gateway: Gateway) -> list[Said]:
    streams, threads = start_streams(gateway, BODIES)
    join_streams(threads)
    return _complete(streams)


def _complete(streams: list[Stream]) -> list[Said]:
    assert [stream.failure for stream in streams] == [None] * len(streams)
    return [said(stream) for stream in streams]


def _wait_begun(streams: list[Stream]) -> None:
    wait_until(
        lambda: all(len(stream.tokens) >= EARLY_TOKENS or stream.failure for stream in streams),
        120.0,
        lambda: str([(len(stream.tokens), stream.failure) for stream in streams]),
    )


def test_streams_move_from_an_engine_without_tls_to_one_with_it(
    world: World, gateway: Gateway, undisturbed: list[Said]
) -> None:
    engines = gateway.engines()["engines"]
    assert {name: engine["tls"] for name, engine in engines.items()} == {"old": False, "new": True}
    with slow_steps(world.folder):
        streams, threads = start_streams(gateway, BODIES)
        _wait_begun(streams)
        world.programs["old"].kill()
    join_streams(threads)
    assert _complete(streams) == undisturbed


def test_certificates_are_renewed_while_streams_run(
    world: World, gateway: Gateway, undisturbed: list[Said], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        with slow_steps(world.folder):
            streams, threads = start_streams(gateway, [completion_body(0, LONG_TOKENS)])
            _wait_begun(streams)
            world.write_engine(world.for_engine())
            flags = world.write_gateway(world.for_gateway(), "strict")
            places = {"new": world.ports["new"]}
            strict = stack.enter_context(running_gateway(tmp_path, places, *flags, name="strict"))
            wait_until(lambda: strict.serving() == {"new"}, 60.0, strict.log_text, START_EVERY_S)
            assert strict.engines()["engines"]["new"]["tls"]
            assert "tls.crt was read again" in world.programs["new"].log_text()
            later, later_threads = start_streams(strict, BODIES[:2])
            assert threads[0].is_alive()
        join_streams(threads)
        join_streams(later_threads)
    assert _complete(streams)[0].tokens[:NUM_TOKENS] == undisturbed[0].tokens
    assert _complete(later) == undisturbed[:2]


def test_wrong_certificates_are_named_and_the_right_ones_need_no_restart(world: World, tmp_path: Path) -> None:
    past = datetime.now(UTC) - DAY / 2
    world.write_engine(world.authority.issue(ENGINE, is_engine=True, end=past))
    flags = world.write_gateway(world.for_gateway(), "strict")
    api, key = free_port(), str(write_key(tmp_path))
    place = f"new=127.0.0.1:{world.ports['new']}"
    gateway = start(
        *(tmp_path, "gateway", "gateway", "--engine", place, "--key-file", key, "--served-model-name", "m"),
        *("--port", str(api), "--admin-port", "0", "--cache-dir", str(tmp_path / "cache"), *flags),
    )

    def wait_logged(text: str) -> None:
        wait_until(lambda: text in gateway.log_text(), 60.0, gateway.log_text)

    try:
        wait_logged("the engine's certificate is refused: certificate has expired")
        world.write_engine(world.authority.issue("other-engines.default.svc", is_engine=True))
        wait_logged(f"certificate is not valid for '{ENGINE}'")
        world.write_gateway(Authority().issue("chat-gateway.default.svc", is_engine=False), "strict")
        world.write_engine(world.for_engine())
        wait_logged("the engine refuses this gateway's certificate: tlsv1 alert unknown ca")
        world.write_gateway(world.for_gateway(), "strict")
        wait_until(lambda: _answers(api), 60.0, gateway.log_text, START_EVERY_S)
    finally:
        gateway.kill()
    assert "Traceback" not in gateway.log_text() + world.programs["new"].log_text()


def _answers(port: int) -> bool:
    body = {"model": "m", "prompt": "Once", "max_tokens": 1}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60.0).status_code == 200
    except httpx.HTTPError:
        return False
