"""Hostile or broken engines, in another process than the operator, like real engines.

`python rt_hostile_engine.py PORT` serves an engine of each of KINDS at 127.0.1.N, and healthy engines at 127.0.2.N,
until its stdin is closed.
"""

import asyncio
import itertools
import json
import sys

GOOD = {
    "version": "v1",
    "state": "serving",
    "reason": "",
    "startup": [],
    "model": None,
    "last_token_age_seconds": 1.0,
    "ranks": [{"node": "n2"}],
    "requests": {"in_flight": 0, "finished": 9, "failed": 0, "first_token_seconds": {"1": 9, "+Inf": 9}},
}
NUM_WELL = 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PHASE = {"seconds": 1.0, "done": 0, "total": 0, "unit": "", "finished": False}
numbers = itertools.count()


def said(**parts):
    return json.dumps(GOOD | parts, separators=(",", ":")).encode()


def in_chunks(body, size):
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


MEBIBYTE = said(ranks=[{"node": ""}] * 85_000)
BODIES = {
    "a mebibyte of 85,000 ranks": lambda: MEBIBYTE,
    "256 KiB of ranks": lambda: said(ranks=[{"node": ""}] * 21_600),
    "deep": lambda: b"[" * 260_000,
    "deep in a field": lambda: b'{"version":"v1","x":' + b'{"a":' * 50_000,
    "2 MB of reason": lambda: said(reason="x" * 2_000_000),
    "another reason each time": lambda: said(state="recovering", reason=f"{next(numbers)}" + "x" * 250_000),
    "another state each time": lambda: said(state=("serving", "recovering")[next(numbers) % 2]),
    "another node each time": lambda: said(ranks=[{"node": f"n{next(numbers)}"}]),
    "other phases each time": lambda: said(
        state="starting", startup=[PHASE | {"name": f"p{next(numbers)}"} for _ in range(64)]
    ),
    "24,000 edges": lambda: said(requests={"first_token_seconds": {str(number): 1 for number in range(24_000)}}),
}
KINDS = (*BODIES, "drips", "chunks of a byte")


async def answer(kind, reader, writer):
    try:
        await reader.readuntil(b"\r\n\r\n")
        if kind == "drips":
            writer.write(HEAD + b"X-Long: " + b"y" * 60_000)
            while True:
                await writer.drain()
                # Each byte is sent in a TCP segment of its own.
                writer.write(b"y")
                await asyncio.sleep(0)
        elif kind == "chunks of a byte":
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + in_chunks(said(reason="x" * 8000), 1))
        else:
            body = said() if kind is None else BODIES[kind]()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


async def main(port):
    for number, kind in enumerate(KINDS, 1):
        await asyncio.start_server(lambda r, w, kind=kind: answer(kind, r, w), f"127.0.1.{number}", port)
    for number in range(1, NUM_WELL + 1):
        await asyncio.start_server(lambda r, w: answer(None, r, w), f"127.0.2.{number}", port)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
