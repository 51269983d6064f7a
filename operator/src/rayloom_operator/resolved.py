"""A service with everything decided that its engines are made from."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api import LLMService
from rayloom_operator.model_facts import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """How pods reach the models' hub. Running engines keep what they were made with."""

    endpoint: str = ""  # URL of a mirror; empty for the hub itself
    ca_config_map: str = ""  # in each service's namespace, with the certificates to trust; empty for the image's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The spec, and what it leaves open: the image, the parallelism, the commit. Equal ones make equal engines."""

    service: LLMService
    image: str
    tensor: int
    pipeline: int
    stages_per_pod: int = 1  # divides `pipeline`
    commit: str = ""  # of a hub's model; empty for other sources
    hub: Hub = Hub()

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


def resolve(service: LLMService, image: str, facts: ModelFacts | None = None, hub: Hub = Hub()) -> Resolved:
    """`image` is the resolved image of the engine's pods, `facts` None where nobody looked at the model."""
    asked = service.spec.parallelism
    commit = (facts.commit if facts is not None else None) or ""
    return Resolved(service=service, image=image, tensor=asked.tensor, pipeline=asked.pipeline, commit=commit, hub=hub)
