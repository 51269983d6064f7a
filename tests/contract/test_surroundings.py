"""The routes and autoscalers in examples/ name objects that the operator creates for the service.

e2e/api/surroundings/test_surroundings.py tests that the API server accepts each of these objects. KEDA's CRD is not
used: the fields of its object are listed below.
"""

import re

import pytest
import yaml

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import API_VERSION, KIND
from rayloom_operator.names import API_PORT, NODE_TYPE_LABEL, SERVICE_LABEL
from rayloom_operator.objects.companions import client_service
from rayloom_operator.objects.guards import network_policy
from rayloom_operator.resolve.resolved import resolve
from rt_examples import FOLDER, of_others
from rt_operator import turn

SERVICE = load_service(FOLDER / "smollm2-two-replicas.yaml")
TARGET = {"apiVersion": API_VERSION, "kind": KIND, "name": SERVICE.metadata.name}
METRICS = {family.name for family in Metrics("").families}
# Fields of a ScaledObject (keda.sh/v1alpha1) that the example uses, and their types.
SCALED_OBJECT = {
    "scaleTargetRef": dict,
    "minReplicaCount": int,
    "maxReplicaCount": int,
    "cooldownPeriod": int,
    "advanced": dict,
    "triggers": list,
}


def example(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def test_these_are_all():
    assert [path.stem for path in of_others()] == ["hpa", "httproute", "ingress-tls", "keda"]


@pytest.mark.parametrize("name", ["hpa", "httproute", "ingress-tls", "keda"])
def test_each_is_named_after_the_service_and_says_what_it_needs(name):
    document = example(name)
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")

    assert document["metadata"]["name"] == SERVICE.metadata.name
    assert "namespace" not in document["metadata"]  # like the service, it belongs to the namespace of `kubectl apply`
    assert text.startswith("# ")


def test_the_hpa_scales_the_service_by_metrics_that_its_engines_have():
    spec = example("hpa")["spec"]
    names = [each["pods"]["metric"]["name"] for each in spec["metrics"]]
    page = (FOLDER.parent / "docs" / "expose.md").read_text(encoding="utf-8")
    rule = re.search(r"seriesQuery: '\{__name__=~\"(.*?)\"", page).group(1)

    assert spec["scaleTargetRef"] == TARGET
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 4)
    # The adapter's rule on the page gives each metric a name. The HPA uses exactly these names.
    given = {re.sub("^rayloom:(.*)$", r"rayloom_\1", each) for each in METRICS if re.fullmatch(rule, each)}
    assert set(names) == given


def test_an_engine_can_take_what_the_autoscalers_leave_it():
    running = float(example("hpa")["spec"]["metrics"][0]["pods"]["target"]["averageValue"])
    (trigger,) = example("keda")["spec"]["triggers"]

    assert running == float(trigger["metadata"]["threshold"]) == 24
    assert running < EngineConfig(model="m").max_num_seqs


def test_keda_scales_the_service_by_the_same_numbers():
    spec = example("keda")["spec"]
    (trigger,) = spec["triggers"]
    query = trigger["metadata"]["query"]
    (pattern,) = re.findall(r'__name__=~"(.*?)"', query)

    assert {name: type(value) for name, value in spec.items()} == SCALED_OBJECT
    assert spec["scaleTargetRef"] == TARGET
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], trigger["type"]) == (1, 4, "prometheus")
    assert {each for each in METRICS if re.fullmatch(pattern, each)} == {
        "rayloom:num_requests_running",
        "rayloom:num_requests_waiting",
    }
    # This is the metric label that the chart's PodMonitor makes from the pods' label.
    assert f'{re.sub("[^a-z]", "_", SERVICE_LABEL)}="{SERVICE.metadata.name}"' in query
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_the_routes_lead_to_the_service_and_let_nothing_but_the_api_out():
    (port,) = client_service(SERVICE)["spec"]["ports"]
    (rule,) = example("httproute")["spec"]["rules"]
    (http,) = example("ingress-tls")["spec"]["rules"]
    (path,) = http["http"]["paths"]

    assert rule["backendRefs"] == [{"name": SERVICE.metadata.name, "port": port["port"]}]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert path["backend"] == {"service": {"name": SERVICE.metadata.name, "port": {"number": port["port"]}}}
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")


def test_streams_outlive_the_time_outs_on_the_way():
    (rule,) = example("httproute")["spec"]["rules"]
    annotations = example("ingress-tls")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"

    assert rule["timeouts"] == {"request": "0s"}
    assert int(annotations[f"{prefix}proxy-read-timeout"]) > 600
    assert annotations[f"{prefix}proxy-buffering"] == "off"
    mebibytes = int(annotations[f"{prefix}proxy-body-size"].removesuffix("m"))
    assert mebibytes << 20 >= EngineConfig(model="m").max_body_bytes


def test_the_certificate_is_of_the_host():
    spec = example("ingress-tls")["spec"]

    assert spec["tls"][0]["hosts"] == [spec["rules"][0]["host"]]


def test_an_ingress_controller_of_any_namespace_reaches_the_engines():
    rules = network_policy(SERVICE)["spec"]["ingress"]

    assert {"ports": [{"port": API_PORT, "protocol": "TCP"}]} in rules


def test_the_autoscalers_count_engines_by_their_head_pods():
    selector = turn(resolve(SERVICE, "rayloom/engine", builtin_facts(SERVICE.spec.model))).status.selector

    assert selector == f"{SERVICE_LABEL}={SERVICE.metadata.name},{NODE_TYPE_LABEL}=head"
