"""100 clients disconnect at random times. Afterwards every block is free, and no error is logged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import httpx

from rt_server import running_server, wait_until

SEED = 20


async def _leave_early(url: str, moment: float, is_stream: bool, number: int) -> None:
    body = {
        "model": "m",
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": is_stream,
        "n": 1 + number % 3,
    }
    async with httpx.AsyncClient(timeout=60.0) as client:
        try:
            await asyncio.wait_for(client.post(f"{url}/v1/completions", json=body), moment)
        except TimeoutError:
            return
        except httpx.HTTPError:
            return


def test_a_hundred_clients_that_leave_take_nothing_with_them(
    quick_model: str, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    rng = random.Random(SEED)
    arguments = ("--model", quick_model, "--dtype", "float32", "--served-model-name", "m")
    arguments += ("--max-model-len", "512", "--num-kv-blocks", "200")

    async def crowd(url: str) -> None:
        await asyncio.gather(
            *(_leave_early(url, rng.uniform(0.05, 2.0), rng.random() < 0.5, number) for number in range(100))
        )

    with running_server(tmp_path, *arguments) as server:
        asyncio.run(crowd(server.api_url))

        def is_idle() -> bool:
            status = server.status()
            kv, requests = status["kv_cache"], status["requests"]
            is_empty = requests["in_flight"] == requests["running"] == requests["waiting"] == 0
            return kv["num_free_blocks"] == kv["num_blocks"] == 200 and is_empty

        wait_until(is_idle, 60.0, lambda: f"seed {SEED}, not idle: {server.status()}")
        load = server.status()["load"]
        assert (load["queued_tokens"], load["running_tokens"], load["max_running_tokens"]) == (0, 0, 200 * 16)
        # The engine has measured its rates.
        assert min(load["prefill_tokens_per_second"], load["decode_tokens_per_second"]) > 1
        answer = server.client.post(
            f"{server.api_url}/v1/completions", json={"model": "m", "prompt": "Hello", "max_tokens": 4}
        )
        assert answer.status_code == 200, answer.text
        log = server.log_text()
    assert [line for line in log.splitlines() if " ERROR " in line or "Traceback" in line] == []
    measured(f"100 clients left at random (seed {SEED}); all 200 blocks free, no error logged")
