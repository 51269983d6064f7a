"""`status.autoscaling`: the state of the scaler in the form that the API server stores."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingState
from rayloom_operator.api.base import Message

_TIME: dict[str, JsonValue] = {"format": "date-time"}
_MOST = 1 << 53


class _StoredPart(BaseModel):
    # Unknown fields are ignored: an operator of another version may have written the object.
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ScalingInputsStatus(_StoredPart):
    engines: int = Field(0, ge=0, le=_MOST, description="Engines that reported their load.")
    queued_tokens: int = Field(0, ge=0, le=_MOST, description="Tokens of prompts that waited to be computed.")
    running_tokens: int = Field(0, ge=0, le=_MOST, description="Tokens in the KV caches that running requests held.")
    held_tokens: int = Field(0, ge=0, le=_MOST, description="Tokens of requests that a gateway held.")
    held_requests: int = Field(0, ge=0, le=_MOST, description="Requests that a gateway held.")
    tokens_per_second: int = Field(
        0, ge=0, le=_MOST, description="Tokens of prompts that these engines compute per second, as they measured."
    )
    needed_engines: str = Field(
        "0", max_length=16, description="Number of fully loaded engines that this load takes, such as 1.42."
    )


class AutoscalingStatus(_StoredPart):
    """The last decision of the operator's scaler, and the data that the scaler needs in later reconciles."""

    desired_replicas: int = Field(0, ge=0, le=_MOST, description="Number of engines that the scaler asks for.")
    writer: str = Field(
        "",
        max_length=128,
        description="Field manager that last set spec.replicas: rayloom-operator-scaler, or the name of another "
        "client, such as kubectl.",
    )
    reason: str = Field("", max_length=64, description="Cause of desiredReplicas, as one word.")
    message: Message = Field("", description="Cause of desiredReplicas, as sentences.")
    inputs: ScalingInputsStatus = Field(
        default_factory=ScalingInputsStatus, description="The figures from which the last change was decided."
    )
    last_scale_time: str | None = Field(
        None, description="Time at which spec.replicas last changed, by any client.", json_schema_extra=_TIME
    )
    starting_since: str | None = Field(
        None,
        description="Time at which engines were last added; absent once all of them serve.",
        json_schema_extra=_TIME,
    )
    start_seconds: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="Seconds that the last added engines took until they served; 0 before it was measured. The window "
        "for scaling down is at least twice as long.",
    )
    idle_since: str | None = Field(
        None,
        description="Time since which no engine has had a request. Absent unless minReplicas is 0.",
        json_schema_extra=_TIME,
    )

    @classmethod
    def of(cls, state: ScalingState) -> AutoscalingStatus:
        return cls(
            desired_replicas=state.desired,
            writer=state.writer,
            reason=state.reason,
            message=state.message,
            inputs=ScalingInputsStatus(**asdict(state.inputs)),
            last_scale_time=state.last_scale_time or None,
            starting_since=state.starting_since or None,
            start_seconds=state.start_seconds,
            idle_since=state.idle_since or None,
        )

    def state(self) -> ScalingState:
        return ScalingState(
            desired=self.desired_replicas,
            writer=self.writer,
            reason=self.reason,
            message=self.message,
            inputs=ScalingInputs(**self.inputs.model_dump()),
            last_scale_time=self.last_scale_time or "",
            starting_since=self.starting_since or "",
            start_seconds=self.start_seconds,
            idle_since=self.idle_since or "",
        )
