"""Runs inside a pod, by `python -c` of this text: asks engines for their /status, each twice a second.

stdin, a JSON object a line for each engine: {"group": name, "ip": address, "token": of its admin port}.
stdout, one for each answer: {"group": name, "at": Unix time, "status": document, or null when there was none}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

_PAUSE_S = 0.5


async def follow(session: aiohttp.ClientSession, engine: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {engine['token']}"}
    while True:
        said: Any = None
        try:
            async with session.get(f"http://{engine['ip']}:8001/status", headers=headers) as answer:
                said = await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            pass  # it does not listen yet, or not any more
        print(json.dumps({"group": engine["group"], "at": time.time(), "status": said}), flush=True)
        await asyncio.sleep(_PAUSE_S)


async def main() -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0)) as session:
        tasks = set()
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.add(asyncio.create_task(follow(session, json.loads(line))))


if __name__ == "__main__":
    asyncio.run(main())
