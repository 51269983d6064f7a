"""The address of an OpenAI server, and the JSON calls to it that are not measured."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayloom_engine.errors import ConfigError, EngineError

# Requests bypass the environment's proxy, because a proxy cannot reach servers on the loopback address.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EndpointError(EngineError):
    """A call that got an HTTP error, an answer that is not JSON, or no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    base_url: str  # URL without /v1
    model_name: str
    headers: Mapping[str, str] = field(default_factory=dict)


def base_url(url: str) -> str:
    """The server's address without a trailing `/v1`. Raises ConfigError if `url` is no http or https URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--url: {url!r} given; it must start with http:// or https://, such as http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def call_json(
    url: str,
    body: Mapping[str, object] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30,
) -> dict[str, object]:
    """The JSON object in the answer to a GET of `url`, or to a POST if there is a body. Raises EndpointError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **(headers or {})})
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            document = json.load(response)
    except urllib.error.HTTPError as error:
        raise EndpointError(f"{url}: HTTP {error.code} {error.read(300).decode(errors='replace')}") from error
    except OSError as error:
        raise EndpointError(f"{url}: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise EndpointError(f"{url}: the answer is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise EndpointError(f"{url}: the answer is not a JSON object")
    return document


def first_model_name(url: str, headers: Mapping[str, str]) -> str:
    """The first name that the server's `/v1/models` lists. Raises EndpointError."""
    listed = call_json(f"{url}/v1/models", headers=headers).get("data")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
        raise EndpointError(f"{url}/v1/models lists no model; name it with --served-model-name")
    return str(listed[0]["id"])
