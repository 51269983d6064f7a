"""A poller that runs in a pod as the text of `python -c`: requests /status of engines, each twice a second.

stdin has a JSON object for each engine: {"group": name, "ip": address, "token": token of its admin port}. stdout has an
object for each request: {"group": name, "at": Unix time, "status": document, or null without an answer}.
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
            pass  # the engine does not listen
        print(json.dumps({"group": engine["group"], "at": time.time(), "status": said}), flush=True)
        await asyncio.sleep(_PAUSE_S)


async def main() -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0)) as session:
        tasks = set()
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.add(asyncio.create_task(follow(session, json.loads(line))))


if __name__ == "__main__":
    asyncio.run(main())
