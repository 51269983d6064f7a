"""Prints the model and its addresses, and the answer to a sample request, once all processes serve."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping

from rayloom_operator.api.spec import LLMService
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.local.client import stream_chat

SAMPLE_PROMPT = "What is the capital of France? Answer in one sentence."
_SAMPLE_MAX_TOKENS = 64


def print_summary(
    service: LLMService,
    status: EngineStatus,
    *,
    url: str,
    environment: Mapping[str, str],
    more: str = "",
) -> None:
    """Prints the model, the API's address `url`, the lines in `more`, and a request to try."""
    facts = service.spec.model.source
    if status.model is not None:
        model = status.model
        computed = "" if model.compute_dtype == model.dtype else f", computed in {model.compute_dtype}"
        weights = model.dtype if model.quantization == "none" else f"{model.quantization} from {model.dtype}"
        facts += f", {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {weights}{computed}, "
        facts += f"{model.max_model_len} tokens of context"
    body = {"model": service.served_name, "messages": [{"role": "user", "content": "Say hello."}], "stream": True}
    draft = service.spec.model.draft
    drafts = "" if draft is None else f"\nDraft:  {draft.source}"
    page = "" if service.spec.engine.args.ui is False else f"\nPage:   {url}/ui"
    print(f"\nModel:  {service.served_name} ({facts}){drafts}\nURL:    {url}/v1{page}{more}")
    print(f"\nTry it:\n  curl -N {url}/v1/chat/completions \\\n    -H 'Content-Type: application/json' \\")
    if api_key(environment) is not None:
        print("    -H 'Authorization: Bearer YOUR_KEY' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)


def show_sample(
    service: LLMService,
    host: str,
    port: int,
    environment: Mapping[str, str],
    on_connect: Callable[[socket.socket], None] | None = None,
) -> None:
    """Prints the answer to a sample request as it arrives. `on_connect` gets the socket of the request.

    If the request fails, the engine keeps running, because other requests may succeed.
    """
    print(f"Sample: {SAMPLE_PROMPT}\n> ", end="", flush=True)
    pieces = stream_chat(
        host,
        port,
        model=service.served_name,
        prompt=SAMPLE_PROMPT,
        max_tokens=_SAMPLE_MAX_TOKENS,
        api_key=api_key(environment),
        on_connect=on_connect,
    )
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except EngineUnavailable as error:
        print(f"\nThe sample request failed: {error}", file=sys.stderr, flush=True)
    print("\n", flush=True)


def api_key(environment: Mapping[str, str]) -> str | None:
    """Returns the first API key that the engine accepts; None if it requires no key."""
    keys = [key.strip() for key in environment.get("RAYLOOM_API_KEYS", "").split(",") if key.strip()]
    return keys[0] if keys else None
