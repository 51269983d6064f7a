"""Helpers that run a work queue in the test's event loop, turn by turn."""

import asyncio


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def stop(workers):
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def is_at_rest(queue):
    """True if no work is left, except for work that a timer or an event will start."""
    return not queue._working and not queue.depth
