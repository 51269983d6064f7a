"""What the operator reads of the engine's `/status` document, version v1 (`schemas/status.v1.json`)."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rayloom_operator.api_rollout import Figures
from rayloom_operator.errors import EngineUnavailable


def _edge(text: str) -> str:
    """An upper edge in seconds, as text. It is the same few in every status, and thousands of them are kept."""
    if math.isnan(float(text)):
        raise ValueError(f"{text!r} is no number of seconds")
    return sys.intern(text)


Edge = Annotated[str, AfterValidator(_edge)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Phase(_Part):
    """A named part of start-up. `total` is 0 when the phase cannot be counted; `done` and `total` are in `unit`."""

    name: str
    seconds: float
    done: int
    total: int
    unit: str
    finished: bool


class ServedModel(_Part):
    architecture: str
    num_parameters: int
    dtype: str
    compute_dtype: str
    max_model_len: int  # tokens


class Rank(_Part):
    node: str


class Requests(_Part):
    """HTTP requests. Engines of an older version count fewer of them."""

    in_flight: int = 0  # accepted, and not answered in full
    finished: int = 0  # since the front started, well or not
    failed: int = 0  # of these, in an error of the engine's
    first_token_seconds: dict[Edge, int] = {}  # upper edge -> requests whose first token took no longer


class EngineStatus(_Part):
    state: str  # starting, serving, recovering, draining or failed
    reason: str
    startup: tuple[Phase, ...] = Field(strict=False)
    model: ServedModel | None  # None until the model is resolved
    last_token_age_seconds: float | None  # since a token passed through every rank; None before the first
    ranks: tuple[Rank, ...] = Field(strict=False)
    requests: Requests = Requests()

    @property
    def figures(self) -> Figures:
        """What a roll compares."""
        said = self.requests
        return Figures(requests=said.finished, errors=said.failed, ttft=said.first_token_seconds)

    def has_token_within(self, seconds: float) -> bool:
        """Whether a token passed through every rank so lately."""
        return self.last_token_age_seconds is not None and self.last_token_age_seconds < seconds

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the ranks, in their order."""
        return tuple(rank.node for rank in self.ranks)


def engine_status(code: int, body: bytes) -> EngineStatus:
    """The status in an answer to GET /status. Raises EngineUnavailable when it holds none of version v1."""
    if code != 200:
        raise EngineUnavailable(f"/status answered {code}: {shown(body)}")
    try:
        document = msgspec.json.decode(body)
    except ValueError as error:
        raise EngineUnavailable(f"/status did not answer with JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineUnavailable(f"/status answered with a {type(document).__name__}; a JSON object was expected")
    if document.get("version") != "v1":
        raise EngineUnavailable(
            f"/status has version {document.get('version')!r}; this operator reads v1. Install an engine of its version"
        )
    try:
        return EngineStatus.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineUnavailable(f"/status of version v1 is not as it must be: {where}: {first['msg']}") from error


def shown(body: bytes) -> str:
    """The beginning of an answer, as a line of a message."""
    return " ".join(body.decode("utf-8", "replace").split())[:300]
