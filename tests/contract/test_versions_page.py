"""The version numbers in docs/versions.md equal those in the files that set the versions."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from rayloom_engine import __version__ as engine_version
from rayloom_operator import __version__ as operator_version
from rayloom_operator.objects.ray_cluster import RAY_VERSION
from rayloom_operator.observe.kuberay import _CURE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/versions.md").read_text()
CHART = yaml.safe_load((ROOT / "charts/rayloom-operator/Chart.yaml").read_text())


def row(part):
    """(required, tested, otherwise) of a row of the table."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {part}")]
    return tuple(cell.strip() for cell in line.split("|")[2:5])


def pinned(name):
    found = re.search(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return found[1]


def go_version(package):
    path = ROOT / "tools/local_kubernetes/parts/programs/go.mod"
    found = re.search(rf"{re.escape(package)} v(\S+)", path.read_text())
    return found[1]


def floor(project, name):
    document = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    (requirement,) = [each for each in map(Requirement, document["dependencies"]) if each.name == name]
    (version,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return version


def test_all_parts_have_one_version():
    versions = {CHART["version"], CHART["appVersion"], engine_version, operator_version}
    for project in ("engine", "operator", "bench"):
        versions.add(tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["version"])
    assert len(versions) == 1
    assert f"Rayloom's own version is {engine_version}:" in PAGE


def test_kubernetes():
    required, tested, _ = row("Kubernetes")
    assert CHART["kubeVersion"] == f">={required.removesuffix(' or newer')}.0-0"
    assert tested == go_version("k8s.io/kubernetes")
    # From 1.30 on, the API server validates only the changed parts of a stored object. So a status can be written even
    # if a later rule refuses the spec.
    assert tuple(map(int, required.removesuffix(" or newer").split("."))) >= (1, 30)
    quickstart = (ROOT / "docs/quickstart-kubernetes.md").read_text()
    assert f"Kubernetes {required}" in quickstart


def test_kuberay():
    required, tested, _ = row("KubeRay")
    assert required.partition(" or newer")[0] == re.search(r"KubeRay (\S+) or newer", _CURE)[1]
    assert tested == go_version("github.com/ray-project/kuberay/ray-operator")
    assert f'"--version", "{tested}"' in (ROOT / "tools/local_kubernetes/clusters/kind.py").read_text()


def test_helm():
    _, tested, _ = row("Helm")
    assert pinned("helm-binary").startswith(f"{tested}.post")


def test_ray():
    required, tested, otherwise = row("Ray in the engine's image")
    assert required == tested == RAY_VERSION == pinned("ray")
    assert f"`rayVersion: {RAY_VERSION}`" in otherwise
    required, tested, _ = row("Ray of your own")
    assert f"{floor('engine', 'ray')} or newer" in required
    assert tested == RAY_VERSION


def test_torch_and_its_cuda():
    required, tested, _ = row("torch")
    assert (required, tested) == (f"{floor('engine', 'torch')} or newer", pinned("torch"))
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        assert f"CUDA {torch.version.cuda} of torch {pinned('torch')}" in row("NVIDIA driver")[0]


def test_transformers():
    required, tested, _ = row("transformers")
    assert required == f"{floor('engine', 'transformers')} or newer, below 6"
    assert tested == pinned("transformers")


@pytest.mark.parametrize("project", ["engine", "operator", "bench"])
def test_python(project):
    required, tested, _ = row("Python")
    document = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    assert document["requires-python"] == f">={required.removesuffix(' or newer')}"
    for name in ("engine", "operator"):
        assert f"python:{tested}-slim" in (ROOT / f"docker/{name}.Dockerfile").read_text()


def test_every_row_says_what_is_required_and_tested():
    parts = [line.split("|")[1:4] for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(parts) == 13
    assert all(cell.strip() for cells in parts for cell in cells)
