"""The table of faults with ranks as processes and as Ray actors: a killed, stopped or stuck process causes a pause.

rt_streams.py has the rules for failed requests. test_ray_faults.py kills Ray's nodes and its control store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from rt_embeds import EmbeddingRows, field_of
from rt_faults import aim, breakable_server, outlive_supervisor, slow_steps
from rt_private_ray import check_private_ray
from rt_server import RunningServer, running_server, wait_until
from rt_streams import (
    NUM_TOKENS,
    Said,
    completion_body,
    disturb,
    join_streams,
    loaded_blocks,
    start_streams,
    undisturbed,
)

ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024", "--num-kv-blocks", "512")
COPIES = ("--kv-host-memory-bytes", str(64 << 20))
HANG_SECONDS = 4


@dataclass(frozen=True)
class Served:
    executor: str
    model: str


@pytest.fixture(scope="module", params=["mp tiny", "ray tiny", pytest.param("mp embedded", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, three_layers: str) -> Served:
    """A server of a tiny model or of the embedded model. Tests on pods cause the same faults with Ray."""
    executor, model = request.param.split()
    if model == "embedded":
        return Served(executor, "builtin://smollm2-135m")
    return Served(executor, three_layers)


@pytest.fixture(scope="module")
def expected(
    served: Served,
    said_by_one_rank: Callable[[int], list[Said]],
    three_layers: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Said]:
    """The tokens of one rank, undisturbed."""
    if served.model == three_layers:
        return said_by_one_rank(NUM_TOKENS)
    with running_server(tmp_path_factory.mktemp("one"), "--model", served.model, *ARGUMENTS) as server:
        return undisturbed(server)


@pytest.fixture(scope="module")
def server(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp(served.executor)
    extra = ("--executor", served.executor, "--pipeline-parallel-size", "2", "--hang-seconds", str(HANG_SECONDS))
    extra += ("--enable-prompt-embeds",)
    model = ("--model", served.model, "--restart-budget", "20")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            if served.executor == "ray":
                patch.setenv("HOME", str(folder))
                patch.setenv("RAY_AUTH_TOKEN", "another-cluster's")
            running = stack.enter_context(breakable_server(folder, *model, *ARGUMENTS, *COPIES, *extra))
        yield running


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        ("rank 0", "killed"),
        ("core", "killed"),
        ("launcher", "killed"),
        pytest.param("rank 1", "stopped", marks=pytest.mark.slow),
        pytest.param("rank 0", "stuck", marks=pytest.mark.slow),
        pytest.param("core", "stopped", marks=pytest.mark.slow),
    ],
)
def test_a_fault_costs_a_pause_and_no_request(
    server: RunningServer,
    served: Served,
    expected: list[Said],
    victim: str,
    fault: str,
    measured: Callable[[str], None],
) -> None:
    """Every token equals that of one rank, also before the fault. The ranks load what they have in host memory."""
    num_loads = loaded_blocks(server)
    pids = {f"rank {rank['rank']}": rank["pid"] for rank in server.status()["ranks"]}
    pids |= {role: child.pid for role, child in server.children().items()}

    seen = disturb(server, expected, aim(server, victim, fault))
    assert seen.failures == []
    ranks = seen.pids(after=True)
    if victim == "launcher":
        assert set(ranks.values()).isdisjoint(pids.values()), "ranks live and die with their launcher"
    else:
        assert [rank for rank in ranks if ranks[rank] != pids[rank]] == [victim] * victim.startswith("rank")
    assert seen.survivors_read_nothing()
    assert loaded_blocks(server) > num_loads
    recovery = seen.after["recoveries"][-1]
    if victim != "launcher":
        assert recovery["process"] == victim
    if victim.startswith("rank") and fault != "killed":
        sentence = {"stopped": "no sign of life for", "stuck": "alive, but it stands still"}[fault]
        assert recovery["cause"].startswith(f"{victim}: {sentence}")
    else:
        assert server.children()["front"].pid == pids["front"]
    times = f"noticed after {seen.noticed_s:.2f} s, tokens again after {seen.seconds:.2f} s"
    measured(f"{seen.after['executor']}: {victim} {fault}; {times}")


@pytest.mark.parametrize("served", ["ray tiny"], indirect=True, scope="module")
def test_nobody_else_can_read_the_token_of_its_ray_or_reach_it(server: RunningServer) -> None:
    check_private_ray(server, home=server.log.parent)


def test_two_stages_are_two_processes_beside_the_core_and_count_their_steps(server: RunningServer) -> None:
    status = server.status()
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in status["ranks"]} | {server.children()["core"].pid}) == 3
    wait_until(
        lambda: all(rank["communication_seconds"] > 0 < rank["advance"] for rank in server.status()["ranks"]),
        30.0,
        lambda: str(server.status()["ranks"]),
    )


@pytest.mark.parametrize("served", ["mp tiny"], indirect=True, scope="module")
def test_a_stream_of_embeddings_pauses_for_the_death_of_the_first_stage(server: RunningServer, served: Served) -> None:
    """The core has kept the embeddings, and the tokens are those of the token ids whose embeddings they are."""
    ids = [5 + 3 * position % 250 for position in range(40)]
    body: dict[str, object] = {"model": "m", "max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    expected, threads = start_streams(server, [{**body, "prompt": ids}])
    join_streams(threads)
    assert expected[0].failure is None
    with slow_steps(server.log.parent):
        streams, threads = start_streams(
            server, [{**body, "prompt_embeds": field_of(EmbeddingRows(served.model).of(ids))}]
        )
        wait_until(lambda: len(streams[0].tokens) >= 4 or streams[0].failure, 60.0, server.log_text)
        assert len(streams[0].tokens) < 24
        aim(server, "rank 0", "killed")()
    join_streams(threads)
    assert (streams[0].failure, streams[0].tokens) == (None, expected[0].tokens)
    assert server.status()["recoveries"][-1]["process"] == "rank 0"


@pytest.mark.parametrize(
    "served",  # the front is the same for all executors, so `make test` has no case with Ray; `make faults` has one
    ["mp tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ray tiny", "mp embedded"))],
    indirect=True,
    scope="module",
)
def test_a_killed_front_costs_its_connections_alone(
    server: RunningServer, served: Served, expected: list[Said], measured: Callable[[str], None]
) -> None:
    before, body = server.status(), completion_body(0)
    kill = aim(server, "front", "killed")
    with slow_steps(server.log.parent):
        streams, threads = start_streams(server, [body])
        wait_until(lambda: len(streams[0].tokens) >= 16, 60.0, server.log_text)
        kill()
    struck_at = time.monotonic()
    join_streams(threads)
    assert streams[0].failure is not None
    # The supervisor keeps the listening socket open. So this request is not refused, but waits for the new front.
    streams, threads = start_streams(server, [body])
    join_streams(threads)
    seconds = streams[0].times[0] - struck_at
    assert (streams[0].failure, streams[0].tokens) == (None, expected[0].tokens)
    assert seconds < 60.0, "2 on a machine that does nothing else"
    after = server.status()
    for key in ("rank", "pid", "weight_bytes_read"):
        assert [rank[key] for rank in after["ranks"]] == [rank[key] for rank in before["ranks"]]
    assert after["epoch"] == before["epoch"]
    measured(f"{after['executor']}: front killed; the next answer began after {seconds:.2f} s")


def test_the_log_holds_no_trace(server: RunningServer) -> None:
    assert "Traceback" not in server.log_text()


def test_nothing_outlives_a_killed_supervisor(server: RunningServer) -> None:
    """The last test here, because it ends the server."""
    assert outlive_supervisor(server) == []
