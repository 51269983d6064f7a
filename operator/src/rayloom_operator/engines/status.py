"""What the operator reads of the engine's `/status` document, version v1 (`schemas/status.v1.json`).

The image that gives it may be anybody's, and what it says comes into a status that all read. So every list and text has
a bound, far above what an engine says.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.texts import head, plain

MAX_RANKS = 4096
_MAX_PHASES = 64
_MAX_EDGES = 64
_MAX_EDGE = 32  # characters
_MAX_WORDS = 600  # characters


def _edge(text: str) -> str:
    """An upper edge in seconds, as text. It is the same few in every status, and thousands of them are kept."""
    if len(text) > _MAX_EDGE or math.isnan(float(text)):
        raise ValueError(f"{text[:_MAX_EDGE]!r} is no number of seconds")
    return sys.intern(text)


def _words(text: str) -> str:
    return head(plain(text), _MAX_WORDS)


Edge = Annotated[str, AfterValidator(_edge)]
Words = Annotated[str, AfterValidator(_words)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Phase(_Part):
    """A named part of start-up. `total` is 0 when the phase cannot be counted; `done` and `total` are in `unit`."""

    name: str = Field(max_length=64)
    seconds: float
    done: Count
    total: Count
    unit: str = Field(max_length=64)
    finished: bool


class ServedModel(_Part):
    architecture: Words
    num_parameters: Count
    dtype: Words
    compute_dtype: Words
    max_model_len: Count  # tokens


class Rank(_Part):
    node: str = Field(max_length=253)


class Requests(_Part):
    """HTTP requests. Engines of an older version count fewer of them."""

    in_flight: Count = 0  # accepted, and not answered in full
    finished: Count = 0  # since the front started, well or not
    failed: Count = 0  # of these, in an error of the engine's
    first_token_seconds: dict[Edge, Count] = {}  # upper edge -> requests whose first token took no longer


class EngineStatus(_Part):
    state: str = Field(max_length=32)  # starting, serving, recovering, draining or failed
    reason: Words
    startup: Annotated[tuple[Phase, ...], FailFast()] = Field(strict=False)
    model: ServedModel | None  # None until the model is resolved
    last_token_age_seconds: float | None  # since a token passed through every rank; None before the first
    last_work_age_seconds: float | None = None  # since a rank showed work in a step; None without one, or not reported
    ranks: Annotated[tuple[Rank, ...], FailFast()] = Field(strict=False)
    requests: Requests = Requests()

    @property
    def request_counts(self) -> RequestCounts:
        """The requests by which a rollout compares revisions."""
        said = self.requests
        return RequestCounts(requests=said.finished, errors=said.failed, first_token_seconds=said.first_token_seconds)

    def has_token_within(self, seconds: float) -> bool:
        """Whether a token passed through every rank so lately, or is on its way: a long step shows work meanwhile."""
        if self.last_token_age_seconds is None:
            return False
        is_working = self.last_work_age_seconds is not None and self.last_work_age_seconds < seconds
        return is_working or self.last_token_age_seconds < seconds

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the ranks, in their order."""
        return tuple(rank.node for rank in self.ranks)


def engine_status(code: int, body: bytes, max_ranks: int = MAX_RANKS) -> EngineStatus:
    """The status in an answer to GET /status. Raises EngineUnavailable when it holds none of version v1, or more ranks
    than `max_ranks`."""
    if code != 200:
        raise EngineUnavailable(f"/status answered {code}: {shown(body)}")
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise EngineUnavailable(f"/status did not answer with JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineUnavailable(f"/status answered with a {type(document).__name__}; a JSON object was expected")
    version = document.get("version")
    if version != "v1":
        is_word = version is None or isinstance(version, str | int | float)
        said = head(repr(version), 32) if is_word else f"of type {type(version).__name__}"
        raise EngineUnavailable(f"/status has version {said}; this operator reads v1. Install an engine of its version")
    _check_lengths(document, max_ranks)
    try:
        return EngineStatus.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = head(".".join(str(part) for part in first["loc"]), 200)
        raise EngineUnavailable(f"/status of version v1 is not as it must be: {where}: {first['msg']}") from error


def _check_lengths(document: dict[str, Any], max_ranks: int) -> None:
    """Before objects are made of what the lists hold."""
    requests = document.get("requests")
    edges = requests.get("first_token_seconds") if isinstance(requests, dict) else None
    for name, found, most in (
        ("ranks", document.get("ranks"), max_ranks),
        ("startup", document.get("startup"), _MAX_PHASES),
        ("requests.first_token_seconds", edges, _MAX_EDGES),
    ):
        if isinstance(found, list | dict) and len(found) > most:
            raise EngineUnavailable(f"/status has {len(found)} {name}; this engine can have {most} at most")


def shown(body: bytes) -> str:
    """The beginning of an answer, as a line of a message."""
    return " ".join(body.decode("utf-8", "replace").split())[:300]
