"""The chart: it lints, and it renders an operator with restricted pod security and leader election."""

import base64
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayloom_operator.__main__ import _parser
from rayloom_operator.api.pod_template.privileges import PRIVILEGES
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.names import NODE_TYPE_LABEL
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.guards import network_policy
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved

CHART = Path(__file__).resolve().parents[2] / "charts" / "rayloom-operator"
HELM = Path(sys.executable).parent / "helm"
LOADER = yaml.CSafeLoader  # yaml.SafeLoader needs a second for the definition alone
SWITCHES = (
    "--set=replicas=2,networkPolicy.enabled=true,logFormat=json,priorityClassName=high,podLabels.a=b,podAnnotations.c=d",
    "--set=metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.release=p,metrics.podMonitor.enabled=true",
    "--set=extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://proxy",
    "--set=networkPolicy.from[0].podSelector.matchLabels.app=prometheus",
    "--set=nodeSelector.disk=ssd,tolerations[0].operator=Exists,imagePullSecrets[0].name=pull",
)
NAMESPACES = ("--set=watchNamespaces={a,b}",)
ENGINES = ("--set=metrics.enginePodMonitor.enabled=true,metrics.enginePodMonitor.labels.release=p",)


def run_helm(*arguments):
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=120, check=False)


def helm(*arguments):
    done = run_helm(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(*flags):
    """Kind -> object, or the last object of a kind with several."""
    return {document["kind"]: document for document in documents(*flags)}


def operators_container(*flags):
    return rendered_without_definitions(*flags)["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def rendered_without_definitions(*flags):
    """Like `rendered`, but without the definitions. They are most of the text, so this takes half of the time."""
    return rendered("--set=crds.install=false", *flags)


@functools.cache
def documents(*flags):
    text = helm("template", "rayloom", CHART, "--namespace", "rayloom-system", *flags)
    return [document for document in yaml.load_all(text, LOADER) if document]


@pytest.fixture(scope="module")
def objects():
    return rendered()


@pytest.fixture(scope="module")
def switched():
    return rendered(*SWITCHES)


@pytest.mark.parametrize(
    "flags", [(), SWITCHES, NAMESPACES, ENGINES], ids=["as it is", "all on", "two namespaces", "engines are scraped"]
)
def test_the_chart_lints(flags):
    helm("lint", "--strict", CHART, *flags)


def test_the_chart_renders_every_object(objects):
    assert set(objects) == {
        "CustomResourceDefinition",
        "ServiceAccount",
        "Secret",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "Deployment",
    }


def test_every_switch_adds_its_object(objects, switched):
    added = {"PodDisruptionBudget", "NetworkPolicy", "Service", "ServiceMonitor", "PodMonitor"}
    assert set(switched) == set(objects) | added
    selector = switched["Deployment"]["spec"]["selector"]["matchLabels"]
    for kind in ("PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
        assert switched[kind]["spec"]["selector"]["matchLabels"] == selector
    policy = switched["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == switched["Service"]["spec"]["selector"] == selector
    ports = [{"port": "health", "protocol": "TCP"}]
    assert policy["ingress"] == [{"ports": ports, "from": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]}]
    assert switched["ServiceMonitor"]["metadata"]["labels"]["release"] == "p"


def test_the_monitor_of_engines_finds_their_head_pods_and_the_port_that_everybody_may_reach():
    monitor = rendered_without_definitions(*ENGINES)["PodMonitor"]
    resolved = make_resolved()
    head = ray_cluster(resolved, "00000000")["spec"]["headGroupSpec"]["template"]
    ports = {
        port["name"]: port["containerPort"] for each in head["spec"]["containers"] for port in each.get("ports", ())
    }
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    open_rules = [rule for rule in network_policy(resolved.service)["spec"]["ingress"] if "from" not in rule]

    assert monitor["metadata"]["labels"]["release"] == "p"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s")
    assert [port["port"] for rule in open_rules for port in rule["ports"]] == [ports[endpoint["port"]]]
    # KubeRay adds the label ray.io/node-type.
    of_service, no_worker = monitor["spec"]["selector"]["matchExpressions"]
    assert no_worker == {"key": NODE_TYPE_LABEL, "operator": "NotIn", "values": ["worker"]}
    assert of_service["key"] in head["metadata"]["labels"]
    assert set(monitor["spec"]["podTargetLabels"]) <= head["metadata"]["labels"].keys()


def test_the_monitor_of_engines_finds_gateway_pods():
    resolved = make_resolved(gateway={})
    template = gateway_deployment(resolved, resolved.service.spec.gateway)["spec"]["template"]
    of_service, _ = rendered_without_definitions(*ENGINES)["PodMonitor"]["spec"]["selector"]["matchExpressions"]
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}

    assert of_service["key"] in template["metadata"]["labels"]
    assert NODE_TYPE_LABEL not in template["metadata"]["labels"]
    assert ports["http"] == 8000


def test_the_monitor_of_engines_selects_the_namespaces_of_the_operator():
    monitor = rendered_without_definitions(*ENGINES, *NAMESPACES)["PodMonitor"]

    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_every_value_for_the_pod_is_rendered(switched):
    deployment = switched["Deployment"]["spec"]
    meta, pod = deployment["template"]["metadata"], deployment["template"]["spec"]
    (container,) = pod["containers"]

    assert deployment["replicas"] == 2
    assert deployment["selector"]["matchLabels"].items() | {("a", "b")} <= meta["labels"].items()
    assert meta["annotations"] == {"c": "d"}
    assert "podAntiAffinity" in pod["affinity"]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"disk": "ssd"})
    assert (pod["tolerations"], pod["imagePullSecrets"]) == ([{"operator": "Exists"}], [{"name": "pull"}])
    assert container["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy"}]


def test_a_single_replica_has_no_disruption_budget(objects):
    assert "PodDisruptionBudget" not in objects
    assert "affinity" not in objects["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replicas=two", "replicas"),
        ("leaderElection.seconds=1", "seconds"),
        ("logFormat=xml", "logFormat"),
        ("watchNamespaces={Team}", "watchNamespaces"),
        ("metrics.enabled=true", "enabled"),
        ("replicaCount=2", "replicaCount"),
        ("allowHostPaths=yes please", "allowHostPaths"),
        ("allowHostPaths={models}", "allowHostPaths"),
        ("podTemplate.allow={hostnetwork}", "podTemplate"),
        *((f"allowHostPaths={{/models,{path}}}", "allowHostPaths") for path in ("/a/../b", "/..", "/a/..", "/a/.. ")),
        ("podTemplate.allow=IPC_LOCK", "podTemplate"),
        ("podTLS.mode=on", "podTLS"),
    ],
)
def test_an_invalid_value_is_refused_by_name(value, named):
    done = run_helm("template", "rayloom", CHART, "--set", value)
    assert (done.returncode != 0, named in done.stderr) == (True, True), done.stderr


def test_the_values_are_those_of_the_schema():
    def compare(values, schema):
        if schema.get("additionalProperties") is False:
            assert set(values) == set(schema["properties"]) - {"global"}
            for name in values:
                assert schema["properties"][name].get("description") or schema["properties"][name]["properties"]
                compare(values[name], schema["properties"][name])

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text()))


def test_the_operator_runs_restricted_and_hands_over_when_it_is_upgraded(objects):
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]

    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]) == (1, {"maxSurge": 1, "maxUnavailable": 0})
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    assert container["image"] == "rayloom/operator:0.1.0"
    assert "--engine-image=rayloom/engine:0.1.0" in container["command"]


@pytest.mark.parametrize("flags", [(), SWITCHES, NAMESPACES], ids=["as it is", "all on", "two namespaces"])
def test_the_operator_accepts_the_command_of_its_pod(flags):
    command = operators_container(*flags)["command"]

    taken = vars(_parser().parse_args(command[1:]))
    assert (taken["lease_namespace"], taken["lease_name"]) == ("rayloom-system", "rayloom-rayloom-operator")
    assert (taken["lease_seconds"], taken["log_format"]) == (6, "json" if flags is SWITCHES else "text")
    assert taken["watch_namespaces"] == (("a", "b") if flags is NAMESPACES else ())


@pytest.mark.parametrize(
    ("value", "folders"),
    [
        ("allowHostPaths=false", ()),
        ("allowHostPaths=true", ("/",)),
        ("allowHostPaths={/models,/data/hub}", ("/models", "/data/hub")),
        ("allowHostPaths={/a..b/..c/d../.e/.../}", ("/a..b/..c/d../.e/.../",)),
    ],
)
def test_host_paths_are_allowed_by_a_value(value, folders):
    command = operators_container("--set", value)["command"]

    assert _parser().parse_args(command[1:]).host_paths == folders


def test_privileges_of_pod_templates_are_allowed_by_a_value():
    found = operators_container("--set", "podTemplate.allow={hostNetwork,IPC_LOCK}")

    taken = _parser().parse_args(found["command"][1:])
    assert taken.allowed_in_pod_templates == {"hostNetwork", "IPC_LOCK"}


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ((), "off"),
        (("--set", "podTLS.mode=strict"), "off"),
        (("--set", "podTLS.enabled=true"), "permissive"),
        (("--set", "podTLS.enabled=true", "--set", "podTLS.mode=strict"), "strict"),
    ],
)
def test_tls_between_pods_is_switched_on_by_a_value(values, mode):
    found = operators_container(*values)

    assert _parser().parse_args(found["command"][1:]).pod_tls == mode


@pytest.mark.parametrize("allow", [True, False])
def test_routes_are_switched_off_by_a_value(allow):
    value = f"routes.allow={str(allow).lower()}"
    found = operators_container("--set", value)

    assert _parser().parse_args(found["command"][1:]).routes is allow


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ((), Permissions().route_annotations),
        (("--set", "routes.annotations={example.com/*,a.b/c}"), ("example.com/*", "a.b/c")),
        (("--set-json", "routes.annotations=[]"), ()),
    ],
)
def test_annotations_of_routes_are_allowed_by_a_value(flags, keys):
    command = operators_container(*flags)["command"]

    assert _parser().parse_args(command[1:]).route_annotations == keys


def test_the_schema_has_every_privilege_of_the_operator():
    words = ",".join(PRIVILEGES)
    found = operators_container("--set", f"podTemplate.allow={{{words}}}")

    taken = _parser().parse_args(found["command"][1:])
    assert taken.allowed_in_pod_templates == set(PRIVILEGES)


def test_the_cluster_can_assign_the_user_of_the_operators_pod():
    keys = ("runAsUser", "runAsGroup", "fsGroup")
    flags = [word for key in keys for word in ("--set", f"podSecurityContext.{key}=null")]
    security = rendered_without_definitions(*flags)["Deployment"]["spec"]["template"]["spec"]["securityContext"]

    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_by_default_no_privilege_beyond_restricted_pods_is_allowed(objects):
    command = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"]
    taken = _parser().parse_args(command[1:])

    assert (taken.host_paths, taken.hub_endpoints, taken.allowed_in_pod_templates) == ((), False, frozenset())
    command = operators_container("--set", "hub.allowOwnEndpoints=true")["command"]
    assert _parser().parse_args(command[1:]).hub_endpoints is True


def test_the_definition_is_upgraded_with_the_release_and_kept_when_it_is_uninstalled():
    definitions = [each for each in documents() if each["kind"] == "CustomResourceDefinition"]

    files = sorted((CHART.parents[1] / "crds").glob("*.yaml"), reverse=True)
    assert [path.name for path in files] == ["llmservices.rayloom.dev.yaml", "llmgateways.rayloom.dev.yaml"]
    assert definitions == [yaml.load(path.read_text(), LOADER) for path in files]
    for each in definitions:
        assert each["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    # Helm installs definitions in the folder crds/ once, and never upgrades them. So this folder must be empty.
    assert list(CHART.glob("crds/*")) == []
    assert "CustomResourceDefinition" not in rendered_without_definitions()


def test_the_key_is_kept_when_the_release_is_uninstalled(objects):
    secret = objects["Secret"]

    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert key_volume(objects) == secret["metadata"]["name"] == "rayloom-rayloom-operator-key"
    assert len(base64.b64decode(secret["data"]["key"])) == 48


def test_an_existing_key_is_used_and_none_is_created():
    found = rendered_without_definitions("--set", "existingKeySecret=own")

    assert "Secret" not in found
    assert key_volume(found) == "own"


def key_volume(objects):
    (volume,) = [each for each in objects["Deployment"]["spec"]["template"]["spec"]["volumes"] if each["name"] == "key"]
    return volume["secret"]["secretName"]


def test_a_mirror_of_the_hub_is_passed_to_the_operator():
    flags = ("--set", "hub.endpoint=https://mirror", "--set", "hub.caConfigMap=ca")
    command = operators_container(*flags)["command"]

    assert {"--hub-endpoint=https://mirror", "--hub-ca-config-map=ca"} <= set(command)
    parsed = _parser().parse_args(command[1:])
    assert (parsed.hub_endpoint, parsed.hub_ca_config_map) == ("https://mirror", "ca")


def test_the_number_of_reconciles_is_a_value():
    assert rendered_number() == 4
    assert rendered_number("--set", "maxReconciles=8") == 8


def rendered_number(*flags):
    command = operators_container(*flags)["command"]
    return _parser().parse_args(command[1:]).max_reconciles
