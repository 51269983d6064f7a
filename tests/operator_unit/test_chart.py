"""The chart: it lints, and what it renders is an operator that holds to restricted security and to few rights."""

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


@pytest.fixture(scope="module")
def objects():
    text = helm("template", "rayloom", CHART, "--namespace", "rayloom-system", "--include-crds")
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


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


def test_it_reads_no_secret_and_has_no_wildcard(objects):
    for rule in objects["ClusterRole"]["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert not {"get", "list", "watch"} & set(rule["verbs"])
