"""A service with everything decided that its engines are made from."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api import LLMService


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The spec, and what it leaves open: the image, the parallelism, the commit. Equal ones make equal engines."""

    service: LLMService
    image: str
    tensor: int
    pipeline: int
    stages_per_pod: int = 1  # divides `pipeline`
    commit: str = ""  # of a hub's model; empty for other sources

    @property
    def shape(self) -> str:
        """As the status prints it: TP1xPP2."""
        return f"TP{self.tensor}xPP{self.pipeline}"

    @property
    def num_pods(self) -> int:
        """Worker pods of one engine."""
        return self.pipeline // self.stages_per_pod

    @property
    def ranks_per_pod(self) -> int:
        return self.tensor * self.stages_per_pod


def resolve(service: LLMService, image: str) -> Resolved:
    """`image` is the resolved image of the engine's pods."""
    asked = service.spec.parallelism
    return Resolved(service=service, image=image, tensor=asked.tensor, pipeline=asked.pipeline)
