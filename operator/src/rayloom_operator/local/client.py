"""HTTP requests to a local engine or gateway: /status, /engines, and a streamed chat.

This module imports only the standard library, so that its import is fast.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator

from rayloom_operator.engines.status import EngineStatus, engine_status, shown
from rayloom_operator.errors import EngineUnavailable

_STATUS_TIMEOUT_S = 5.0
# While a stream has no tokens, the engine sends a comment every 10 s. So after 60 s of silence the engine is gone.
_STREAM_TIMEOUT_S = 60.0


def connect_host(host: str) -> str:
    """Returns the address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def base_url(host: str, port: int) -> str:
    """Returns `http://HOST:PORT` for a client on this machine."""
    reachable = connect_host(host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def read_status(host: str, port: int) -> EngineStatus | None:
    """Reads the engine's status from its admin port; None if the port does not answer.

    Raises EngineUnavailable if the answer is not a status of version v1.
    """
    answer = _get(host, port, "/status")
    return None if answer is None else engine_status(*answer)


def read_engines(host: str, port: int) -> dict[str, str] | None:
    """Returns name of an engine -> its state, from a gateway's admin port; None if the port does not answer.

    Raises EngineUnavailable if the answer is not the document of a gateway.
    """
    answer = _get(host, port, "/engines")
    if answer is None:
        return None
    try:
        return {str(engine["name"]): str(engine["state"]) for engine in json.loads(answer[1])["engines"]}
    except (ValueError, KeyError, TypeError) as error:
        raise EngineUnavailable(f"/engines answered {answer[0]}: {shown(answer[1])}") from error


def _get(host: str, port: int, path: str) -> tuple[int, bytes] | None:
    connection = http.client.HTTPConnection(connect_host(host), port, timeout=_STATUS_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def stream_chat(
    host: str,
    port: int,
    *,
    model: str,
    prompt: str,
    max_tokens: int,
    api_key: str | None,
    on_connect: Callable[[socket.socket], None] | None = None,
) -> Iterator[str]:
    """Yields the answer to one user message at temperature 0, piece by piece as it arrives.

    `on_connect` gets the connection's socket; another thread may shut the socket down to end the request.

    Raises EngineUnavailable if the request fails, or if the stream contains an error or ends before `[DONE]`.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = http.client.HTTPConnection(connect_host(host), port, timeout=_STREAM_TIMEOUT_S)
    try:
        connection.connect()
        if on_connect is not None:
            on_connect(connection.sock)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise EngineUnavailable(f"the engine answered {response.status}: {shown(response.read())}")
        yield from _pieces(response)
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnavailable(f"the stream broke: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data:"):
            continue  # Blank lines end events, and comments only keep the connection open.
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise EngineUnavailable(f"the engine sent an error: {event['error']['message']}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content")
                if piece:
                    yield piece
        except (ValueError, KeyError, TypeError) as error:
            raise EngineUnavailable(f"the engine sent an event that is not a chat chunk: {shown(data)}") from error
    raise EngineUnavailable("the stream ended before [DONE]")
