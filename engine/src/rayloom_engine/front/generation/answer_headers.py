"""Headers and comments with which an answer reports a change of engines and the wait for an engine."""

from __future__ import annotations

from rayloom_engine.front.generation.generation import Generation


def answer_headers(generation: Generation) -> dict[str, str]:
    """Returns headers if engines with different rounding computed the answer, or if it waited for an engine; else none.

    In a stream, X-Rayloom-Continuation reports a change of engines before the stream began; `warnings` reports later
    changes. If a stream's headers are sent during the wait, X-Rayloom-Cold-Start gives only the time so far. Then
    `cold_start_comment` gives the whole time.
    """
    headers = {"X-Rayloom-Continuation": "rounding"} if generation.is_rounded else {}
    if held_s := generation.held_s():
        headers["X-Rayloom-Cold-Start"] = f"{held_s:.3f}"
    return headers


def cold_start_comment(held_s: float) -> bytes:
    """Returns the comment of a stream that waited for an engine after its headers were sent."""
    return f": cold start {held_s:.3f}\n\n".encode()
