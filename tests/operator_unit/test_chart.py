"""The chart: it lints, and what it renders is an operator that holds to restricted security and to few rights."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "rayloom-operator"
HELM = Path(sys.executable).parent / "helm"


def helm(*arguments):
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(*flags):
    text = helm("template", "rayloom", CHART, "--namespace", "rayloom-system", "--include-crds", *flags)
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


@pytest.fixture(scope="module")
def objects():
    return rendered()


def test_the_chart_lints():
    helm("lint", "--strict", CHART)


def test_it_renders_every_object(objects):
    assert set(objects) == {
        "CustomResourceDefinition",
        "ServiceAccount",
        "Secret",
        "ClusterRole",
        "ClusterRoleBinding",
        "Deployment",
    }


def test_the_operator_runs_restricted_and_alone(objects):
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]

    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    assert container["image"] == "rayloom/operator:0.1.0"
    assert "--engine-image=rayloom/engine:0.1.0" in container["command"]


def test_it_can_read_no_secret_and_has_no_wildcard(objects):
    verbs = {}
    for rule in objects["ClusterRole"]["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        for resource in rule["resources"]:
            verbs.setdefault(resource, set()).update(rule["verbs"])

    # The answer to a patch is the whole object.
    assert verbs["secrets"] == {"create", "delete"}
    assert verbs["services"] == {"get", "list", "watch", "create", "patch"}
    assert verbs["llmservices"] == {"list", "watch"}


def test_the_key_stays_when_the_release_goes(objects):
    secret = objects["Secret"]

    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert key_volume(objects) == secret["metadata"]["name"] == "rayloom-rayloom-operator-key"
    assert len(base64.b64decode(secret["data"]["key"])) == 48


def test_a_key_of_the_users_own_is_taken_and_none_is_made():
    found = rendered("--set", "existingKeySecret=own")

    assert "Secret" not in found
    assert key_volume(found) == "own"


def key_volume(objects):
    (volume,) = [each for each in objects["Deployment"]["spec"]["template"]["spec"]["volumes"] if each["name"] == "key"]
    return volume["secret"]["secretName"]
