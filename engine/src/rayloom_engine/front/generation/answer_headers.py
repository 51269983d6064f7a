"""Headers and comments that tell a client what happened to its answer before it began."""

from __future__ import annotations

from rayloom_engine.front.generation.generation import Generation


def answer_headers(generation: Generation) -> dict[str, str]:
    """Returns headers of an answer that is not sure to be the one of a single engine, or that waited for an engine.

    A stream has the first only if the engine changed before the stream began; later changes are in `warnings`. Its
    headers may be sent while it still waits; `cold_start_comment` then tells the whole time.
    """
    headers = {"X-Rayloom-Continuation": "rounding"} if generation.is_rounded else {}
    if held_s := generation.held_s():
        headers["X-Rayloom-Cold-Start"] = f"{held_s:.3f}"
    return headers


def cold_start_comment(held_s: float) -> bytes:
    """Returns the comment of a stream that waited for an engine after its headers were sent."""
    return f": cold start {held_s:.3f}\n\n".encode()
