"""The fields of the engine's `/status` document, version v1 (`schemas/status.v1.json`), that the operator uses.

An engine's image may be hostile, and parts of the document are copied into the LLMService's status. So every list and
text has a length limit, far above the lengths of real engines.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.texts import head, plain

MAX_RANKS = 4096
MAX_ADAPTERS = 1024
_MAX_PHASES = 64
_MAX_EDGES = 64
_MAX_EDGE = 32  # characters of a histogram bucket's upper edge
_MAX_TEXT = 600  # characters
_MAX_NAME = 256  # characters
_ABSENT = "absent"  # a state that no engine reports


def _edge(text: str) -> str:
    """Checks and returns the upper edge of a histogram bucket.

    The text is interned, because thousands of kept statuses have the same few edges.
    """
    if len(text) > _MAX_EDGE or math.isnan(float(text)):
        raise ValueError(f"{text[:_MAX_EDGE]!r} is not a number of seconds")
    return sys.intern(text)


def _bounded(text: str) -> str:
    return head(plain(text), _MAX_TEXT)


Edge = Annotated[str, AfterValidator(_edge)]
Text = Annotated[str, AfterValidator(_bounded)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Rate = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class AnswerPart(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Phase(AnswerPart):
    """A named part of start-up. `done` and `total` are in `unit`; `total` is 0 if the phase counts nothing."""

    name: str = Field(max_length=64)
    seconds: float
    done: Count
    total: Count
    unit: str = Field(max_length=64)
    finished: bool


class ServedModel(AnswerPart):
    architecture: Text
    num_parameters: Count
    dtype: Text
    compute_dtype: Text
    quantization: Text = "none"  # engines of older versions leave it out
    max_model_len: Count  # tokens


class Rank(AnswerPart):
    node: str = Field(max_length=253)


class Requests(AnswerPart):
    """Numbers of HTTP requests and sequences. Engines of older versions leave some of them out."""

    in_flight: Count = 0  # accepted by the engine's own API port and not yet answered in full
    running: Count = 0  # sequences in the core's batch, including those that gateways sent
    waiting: Count = 0  # sequences in the core's queue; in a gateway: sequences that wait for an engine
    finished: Count = 0  # requests that ended since the API server process started, with or without an error
    failed: Count = 0  # the part of `finished` that ended in an error of the engine
    first_token_seconds: dict[Edge, Count] = {}  # upper edge -> requests whose first token took at most this time

    @property
    def unfinished(self) -> int:
        """The larger of two numbers: requests at the API port, and sequences in the core.

        A request that a gateway sends counts only as a sequence. A request whose client still reads the end of the
        answer may count only as a request.
        """
        return max(self.in_flight, self.running + self.waiting)


class ReportedLoad(AnswerPart):
    """The engine's work and measured rates. Engines of older versions do not report them."""

    queued_tokens: Count = 0
    running_tokens: Count = 0
    max_running_tokens: Count = 0  # 0: the engine does not report its load
    mean_output_tokens: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    prefill_tokens_per_second: Rate | None = None
    decode_tokens_per_second: Rate | None = None


class ReportedAdapter(AnswerPart):
    """A LoRA adapter of the last PUT /adapters, or of the configuration with which the engine started."""

    name: str = Field(max_length=_MAX_NAME)
    path: str = Field(max_length=4096)
    state: str = Field(max_length=32)  # loading, loaded or failed
    message: Text = ""  # why the adapter failed
    commit: str = Field("", max_length=64)  # commit of a loaded adapter of the hub; empty for other adapters


class UnusableKeys(AnswerPart):
    """A model's name at a gateway with several models, if the file with the API keys of this name cannot be used."""

    name: str = Field(max_length=_MAX_NAME)
    accepted: Count  # number of keys that were read before and stay in force; 0: the gateway refuses every key


class GatewayReport(AnswerPart):
    """The models file that a gateway with several models has read."""

    models_hash: str  # hash of the file that is in force
    refusal: Text  # why the gateway cannot use a newer file; empty if no newer file was refused
    problems: tuple[Text, ...]  # a sentence for each entry of the file that the gateway does not serve
    unusable_keys: tuple[UnusableKeys, ...]


class EngineStatus(AnswerPart):
    state: str = Field(max_length=32)  # starting, serving, recovering, draining or failed
    reason: Text
    startup: Annotated[tuple[Phase, ...], FailFast()] = Field(strict=False)
    model: ServedModel | None  # None until the model is resolved
    last_token_age_seconds: float | None  # seconds since a token last passed every rank; None until one has
    last_work_age_seconds: float | None = None  # seconds since a rank last made progress in a step; None if unknown
    ranks: Annotated[tuple[Rank, ...], FailFast()] = Field(strict=False)
    uptime_seconds: Annotated[float, Field(ge=0)] = 0.0  # uptime of the API server process
    requests: Requests = Requests()
    load: ReportedLoad = ReportedLoad()
    # None: the engine's list of adapters cannot be set, or the engine's version has no adapters
    adapters: Annotated[tuple[ReportedAdapter, ...], Field(strict=False)] | None = None
    adapters_from_hub: bool = False  # engines of older versions refuse any list that has an adapter of the hub
    gateway: GatewayReport | None = None  # None except for a gateway with several models

    @property
    def is_absent(self) -> bool:
        """Returns whether the gateway does not know the model."""
        return self.state == _ABSENT

    @property
    def is_held(self) -> bool:
        """Returns whether a gateway holds requests. A gateway has no ranks."""
        return not self.ranks and self.requests.waiting > 0

    @property
    def request_counts(self) -> RequestCounts:
        """The counts that the analysis of a rollout compares."""
        counts = self.requests
        return RequestCounts(
            requests=counts.finished,
            errors=counts.failed,
            first_token_seconds=counts.first_token_seconds,
        )

    def has_token_within(self, seconds: float) -> bool:
        """True if in the last `seconds` a token passed every rank, or a rank made progress in a long step."""
        if self.last_token_age_seconds is None:
            return False
        is_working = self.last_work_age_seconds is not None and self.last_work_age_seconds < seconds
        return is_working or self.last_token_age_seconds < seconds

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of each rank's node, in the order of the ranks."""
        return tuple(rank.node for rank in self.ranks)


def absent_model() -> EngineStatus:
    """Returns the status of a model that a gateway with several models does not know. The model has no requests."""
    return EngineStatus(state=_ABSENT, reason="", startup=(), model=None, last_token_age_seconds=None, ranks=())


def engine_status(code: int, body: bytes, max_ranks: int = MAX_RANKS) -> EngineStatus:
    """Parses a response to GET /status.

    Raises EngineUnavailable unless the response is a valid document of version v1 with at most `max_ranks` ranks.
    """
    document = decoded(code, body)
    _check_lengths(document, max_ranks)
    return checked(EngineStatus, document)


def decoded(code: int, body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a response to GET /status. Raises EngineUnavailable unless it has version v1."""
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
        is_scalar = version is None or isinstance(version, str | int | float)
        found = head(repr(version), 32) if is_scalar else f"of type {type(version).__name__}"
        raise EngineUnavailable(
            f"/status has version {found}; this operator reads v1. Install an engine of its version"
        )
    return document


Part = TypeVar("Part", bound=AnswerPart)


def checked(kind: type[Part], document: dict[str, Any]) -> Part:
    """Returns the document as a `kind`. Raises EngineUnavailable with the first wrong field."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = head(".".join(str(part) for part in first["loc"]), 200)
        raise EngineUnavailable(f"/status does not have the schema of version v1: {where}: {first['msg']}") from error


def _check_lengths(document: dict[str, Any], max_ranks: int) -> None:
    """Raises EngineUnavailable if a list is too long. Runs before the validation, whose time grows with the lists."""
    requests = document.get("requests")
    edges = requests.get("first_token_seconds") if isinstance(requests, dict) else None
    for name, found, most in (
        ("ranks", document.get("ranks"), max_ranks),
        ("adapters", document.get("adapters"), MAX_ADAPTERS),
        ("startup", document.get("startup"), _MAX_PHASES),
        ("requests.first_token_seconds", edges, _MAX_EDGES),
    ):
        if isinstance(found, list | dict) and len(found) > most:
            raise EngineUnavailable(f"/status has {len(found)} {name}; this engine can have {most} at most")


def shown(body: bytes) -> str:
    """Returns the first 300 characters of a response on one line, for an error message."""
    return " ".join(body.decode("utf-8", "replace").split())[:300]
