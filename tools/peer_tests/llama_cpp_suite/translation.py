"""The requests of llama.cpp's tests in the form of OpenAI's and Anthropic's APIs. Pure."""

from __future__ import annotations

from typing import Any

# Paths without the prefix of OpenAI's API -> the same paths with it.
_ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
}
_SHARED = ("/v1/", "/health", "/metrics")
_NOT_SHARED = ("/v1/stream",)


def our_path(path: str) -> str | None:
    """Returns the path on our server; None for the paths of llama.cpp's own API."""
    path = _ALIASES.get(path, path)
    return path if path.startswith(_SHARED) and not path.startswith(_NOT_SHARED) else None


def our_body(server: Any, path: str, data: Any) -> Any:
    """Returns the body of a request to our server.

    llama.cpp's server has one model and a default length of answers, and with `debug` it returns the prompt. Our server
    is asked for the prompt's token ids instead.
    """
    if not isinstance(data, dict):
        return data
    data = {**data, "model": server.model_alias or "model"}
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return data
    if server.n_predict:
        data.setdefault("max_tokens", data.get("max_completion_tokens", server.n_predict))
    if server.debug and path == "/v1/chat/completions":
        data["return_token_ids"] = True
    return data
