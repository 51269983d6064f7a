"""Decisions: the conditions of an LLMGateway for each report of its Deployment, and for an unreadable spec.

Not covered: faults of routes (test_llmgateway_route.py) and of names (test_llmgateway_names.py).
"""

import pytest

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.llmgateway.situation import GatewaySituation, names_of
from rayloom_operator.decide.llmgateway.status import gateway_status
from rayloom_operator.observe.observed import DeploymentProgress, Verdict
from rayloom_operator.times import Now
from rt_llmgateway import make_gateway_document, make_service_document
from rt_operator import CLOCK, SETTINGS, conditions, make_pod

UNREADABLE = Verdict(reason=Reason.INVALID_SPEC, message="spec.replicas: 17 is not allowed")
AVAILABLE = ("True", "Serving")
NOT_READY = ("False", "GatewayNotReady")
HEALTHY = ("False", "Healthy")
REFUSED = "ContainerFailed"


def progress(num_pods, num_updated, **facts):
    return DeploymentProgress(num_pods=num_pods, num_updated=num_updated, **{"is_seen": True, **facts})


def status(num_wanted, num_ready, found, *, accepted=VALID, previous=None):
    """The status of an LLMGateway with a serving service and `num_ready` ready gateway pods."""
    gateway = parse_gateway(make_gateway_document(replicas=num_wanted)) if accepted is VALID else None
    members, aliases = ((), ()) if gateway is None else names_of(gateway, (make_service_document(),))
    situation = GatewaySituation(
        now=Now(CLOCK, 0.0),
        settings=SETTINGS,
        generation=1,
        previous=previous or {},
        gateway=gateway,
        accepted=accepted,
        members=members,
        aliases=aliases,
        pods=tuple(make_pod(f"gateway-{index}", is_head=False) for index in range(num_ready)),
        progress=found,
    )
    return gateway_status(situation).model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.mark.parametrize(
    ("wanted", "ready", "found", "progressing", "available", "degraded"),
    [
        (2, 2, progress(2, 2), ("False", "Complete"), AVAILABLE, HEALTHY),
        (2, 2, None, ("True", "Starting"), AVAILABLE, HEALTHY),  # the Deployment is not known yet
        (2, 0, progress(0, 0, is_seen=False), ("True", "Starting"), NOT_READY, HEALTHY),
        (2, 2, progress(2, 2, is_seen=False), ("True", "Replacing"), AVAILABLE, HEALTHY),
        (2, 2, progress(3, 1), ("True", "Replacing"), AVAILABLE, HEALTHY),  # two former pods serve
        (2, 2, progress(3, 1, is_late=True), ("False", "DeadlineExceeded"), AVAILABLE, HEALTHY),
        (2, 1, progress(2, 2), ("True", "Starting"), AVAILABLE, HEALTHY),
        (3, 3, progress(2, 2), ("True", "Starting"), AVAILABLE, HEALTHY),  # the pods' watch is ahead
        (1, 0, progress(0, 0, refusal="quota"), ("True", "Starting"), ("False", REFUSED), ("True", REFUSED)),
        (1, 1, progress(2, 0, refusal="quota"), ("True", "Replacing"), AVAILABLE, ("True", REFUSED)),
        (0, 0, progress(0, 0), ("False", "Suspended"), ("False", "Suspended"), HEALTHY),
        (0, 0, None, ("False", "Suspended"), ("False", "Suspended"), HEALTHY),
        (0, 0, progress(1, 0), ("True", "Replacing"), ("False", "Suspended"), HEALTHY),  # one more pod must end
    ],
)
def test_the_conditions_follow_the_deployment(wanted, ready, found, progressing, available, degraded):
    assert conditions(status(wanted, ready, found)) == {
        "Accepted": ("True", "Valid"),
        "Available": available,
        "Degraded": degraded,
        "Progressing": progressing,
    }


def test_a_spec_that_cannot_be_read_makes_no_progress_and_the_count_of_ready_pods_stays_true():
    before = status(2, 2, progress(2, 2))
    found = status(2, 1, progress(2, 2), accepted=UNREADABLE, previous=before)

    assert conditions(found) == {
        "Accepted": ("False", "InvalidSpec"),
        "Available": ("False", "InvalidSpec"),
        "Degraded": HEALTHY,
        "Progressing": ("False", "InvalidSpec"),
    }
    assert (before["ready"], found["ready"], found["readyReplicas"]) == ("2/2", "1/2", 1)
    assert found["models"] == before["models"]


def test_a_first_spec_that_cannot_be_read_shows_no_count():
    assert status(2, 0, None, accepted=UNREADABLE)["ready"] == ""
