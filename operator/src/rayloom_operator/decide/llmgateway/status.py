"""The status of an LLMGateway. Pure."""

from __future__ import annotations

from rayloom_operator.api.llmgateway.stored import (
    MAX_LISTED,
    AliasStatus,
    GatewayPodStatus,
    LLMGatewayStatus,
    ModelStatus,
    stored_status,
)
from rayloom_operator.decide.llmgateway.conditions import gateway_conditions
from rayloom_operator.decide.llmgateway.route import route_status
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.objects.llmgateway.identity import endpoint


def gateway_status(situation: GatewaySituation, refusal: str = "") -> LLMGatewayStatus:
    """Returns the status. `refusal`: the API server's message if it refused an object, and empty otherwise."""
    conditions = gateway_conditions(situation, refusal)
    gateway, ready = situation.gateway, situation.num_ready
    if gateway is None:
        # The names stay as they were last written: the gateway pods serve the names of the last readable spec.
        kept = stored_status(situation.previous)
        changes = {
            "observed_generation": situation.generation,
            "conditions": conditions,
            # Empty if no spec could ever be read: then the wanted number of gateway pods is unknown.
            "ready": f"{ready}/{kept.replicas}" if kept.ready else "",
            "ready_replicas": ready,
        }
        return kept.model_copy(update=changes)
    wanted = gateway.spec.replicas
    num_serving = sum(each.state == "Serving" for each in situation.members)
    return LLMGatewayStatus(
        observed_generation=situation.generation,
        conditions=conditions,
        endpoint=endpoint(gateway),
        route=route_status(situation),
        ready=f"{ready}/{wanted}",
        replicas=wanted,
        ready_replicas=ready,
        models_hash=situation.models_hash,
        pods=tuple(
            GatewayPodStatus(name=each.name, models=each.state, models_hash=each.models_hash, message=each.message)
            for each in situation.pod_models
        ),
        serving=f"{num_serving}/{len(situation.members)}",
        models=tuple(
            ModelStatus(
                name=each.name, service=each.service, state=each.state, reason=each.reason, message=each.message
            )
            for each in situation.members[:MAX_LISTED]
        ),
        aliases=tuple(
            AliasStatus(name=each.name, state=each.state, reason=each.reason, message=each.message)
            for each in situation.aliases
        ),
    )
