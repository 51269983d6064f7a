"""Sentences about the scaler's decisions, for the status and Events. Pure.

A sentence about a state contains no figure that changes while the state lasts, so the status is written once.
"""

from __future__ import annotations

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingReason
from rayloom_operator.decide.scaling.inputs import Bounds

# The field managers with which HorizontalPodAutoscalers, including those of KEDA, write replicas.
_AUTOSCALERS = ("kube-controller-manager", "horizontal-pod-autoscaler", "keda-operator")


def change_sentence(reason: ScalingReason, before: int, after: int, inputs: ScalingInputs, bounds: Bounds) -> str:
    """Returns the cause of a change of `replicas`."""
    change = f"replicas {before} -> {after}"
    if reason is ScalingReason.BOUNDED and bounds.is_raised and after == bounds.least:
        return f"{change}: no gateway pod can hold requests for the service, so minReplicas 0 counts as 1."
    if reason is ScalingReason.BOUNDED:
        return f"{change}: minReplicas {bounds.least} and maxReplicas {bounds.most} are the bounds."
    if reason is ScalingReason.SCALED_TO_ZERO:
        return f"{change}: no engine has had a request for {bounds.idle_s:g} s."
    if reason is ScalingReason.WOKEN and not inputs.held_requests:
        return f"{change}: a gateway pod has no tokenizer, or does not answer, so it needs an engine."
    held = f", {inputs.held_requests} requests held" if inputs.held_requests else ""
    limit = f" maxReplicas is {bounds.most}." if after == bounds.most and after > before else ""
    return (
        f"{change}: the load takes {inputs.needed_engines} fully used engines ({inputs.queued_tokens} tokens wait, "
        f"{inputs.running_tokens} run{held}; {inputs.tokens_per_second} tokens of prompts/s).{limit}"
    )


def state_sentence(reason: ScalingReason, replicas: int, bounds: Bounds, writer: str = "") -> str:
    """Returns the reason why `replicas` stays. `writer`: the field manager that set `replicas`, for OtherWriter."""
    if reason is ScalingReason.OTHER_WRITER:
        both = ""
        if writer in _AUTOSCALERS:
            both = (
                " Two autoscalers write replicas: remove the HorizontalPodAutoscaler (or KEDA's ScaledObject), or "
                "spec.autoscaling."
            )
        return f"{writer} set replicas to {replicas}. This stays until the operator's next decision.{both}"
    return _OF_STATES[reason].format(replicas=replicas, most=bounds.most, idle_s=bounds.idle_s)


_OF_STATES = {
    ScalingReason.STEADY: "The operator sets replicas by the load of the engines.",
    ScalingReason.AT_MAXIMUM: "The load takes more engines than maxReplicas {most}: raise it, or send less.",
    ScalingReason.FIGURES_MISSING: "An engine does not report its load, so no engine is removed.",
    ScalingReason.ROLLING_OUT: "A rollout is not complete; replicas stays {replicas} until it is.",
    ScalingReason.WAITING_FOR_CAPACITY: "An engine finds no node, so none is added. Engines that the load does not "
    "take are removed.",
    ScalingReason.SUSPENDED: "replicas is 0, which suspends the service; the operator does not wake it. Set replicas "
    "to 1 or more.",
    ScalingReason.SCALING_TO_ZERO: "No engine has had a request for {idle_s:g} s, so replicas becomes 0.",
    ScalingReason.SCALED_TO_ZERO: "No engine runs. A gateway holds the first request, and the operator then starts "
    "an engine.",
}
