"""What the operator reads of the engine's `/status` document, version v1 (`schemas/status.v1.json`)."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.errors import EngineUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A named part of start-up. `total` is 0 when the phase cannot be counted; `done` and `total` are in `unit`."""

    name: str
    seconds: float
    done: int
    total: int
    unit: str
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    architecture: str
    num_parameters: int
    dtype: str
    compute_dtype: str
    max_model_len: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    state: str  # starting, serving, recovering, draining or failed
    reason: str
    startup: tuple[Phase, ...]
    model: ServedModel | None  # None until the model is resolved
    last_token_age_seconds: float | None  # since a token passed through every rank; None before the first
    nodes: tuple[str, ...]  # of the ranks, in their order


def engine_status(document: object) -> EngineStatus:
    """The status in a decoded `/status` document. Raises EngineUnavailable when it is not one of version v1."""
    if not isinstance(document, dict):
        raise EngineUnavailable(f"/status answered with a {type(document).__name__}; a JSON object was expected")
    if document.get("version") != "v1":
        raise EngineUnavailable(
            f"/status has version {document.get('version')!r}; this operator reads v1. Install an engine of its version"
        )
    try:
        model = document["model"]
        return EngineStatus(
            state=document["state"],
            reason=document["reason"],
            startup=tuple(
                Phase(
                    name=phase["name"],
                    seconds=phase["seconds"],
                    done=phase["done"],
                    total=phase["total"],
                    unit=phase["unit"],
                    finished=phase["finished"],
                )
                for phase in document["startup"]
            ),
            model=None
            if model is None
            else ServedModel(
                architecture=model["architecture"],
                num_parameters=model["num_parameters"],
                dtype=model["dtype"],
                compute_dtype=model["compute_dtype"],
                max_model_len=model["max_model_len"],
            ),
            last_token_age_seconds=document["last_token_age_seconds"],
            nodes=tuple(rank["node"] for rank in document["ranks"]),
        )
    except (KeyError, TypeError) as error:
        raise EngineUnavailable(f"/status of version v1 lacks what it must have: {error}") from error
