"""The packages' declared dependencies: no version has a known vulnerability, no dependency is unused or missing."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("engine", "operator", "bench")

# The first version without known vulnerabilities, and the vulnerability of earlier versions.
SAFE = {
    "aiohttp": "3.14.1",  # compressed bodies fill the memory (PYSEC-2026-2111)
    "jinja2": "3.1.6",  # a template leaves the sandbox (CVE-2024-56326, CVE-2025-27516)
    "ray": "2.54",  # versions below 2.52 have no token; a web page deletes jobs (CVE-2026-27482)
    "setuptools": "78.1.1",  # files are written anywhere (CVE-2025-47273)
    "starlette": "1.3",  # Range headers take quadratic time (CVE-2025-62727), hosts are forged (PYSEC-2026-248)
    "torch": "2.10",  # checkpoints run code (CVE-2025-32434, CVE-2026-24747)
    "tqdm": "4.66.3",  # arguments run code (CVE-2024-34062)
}
# Import name -> distribution, where these differ.
DISTRIBUTIONS = {"pydantic_core": "pydantic", "yaml": "pyyaml"}
# Used, but not imported by our code.
BY_NAME = {
    "engine": {"httptools"},  # uvicorn imports it for http="httptools"
    "operator": set(),
    "bench": set(),
}
# Imported only if it is installed.
OPTIONAL = {"engine": {"triton"}, "operator": {"kubernetes"}, "bench": {"matplotlib", "ray"}}


def pyproject(project):
    return tomllib.loads((ROOT / project / "pyproject.toml").read_text())


def requirements(project):
    document = pyproject(project)
    lines = [*document["build-system"]["requires"], *document["project"]["dependencies"]]
    return [Requirement(line) for line in lines]


def pinned():
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def imported(project):
    """Third-party packages that the source imports, by the names of their distributions."""
    found = set()
    for path in (ROOT / project / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            found |= {name.partition(".")[0] for name in names}
    found = {name for name in found - sys.stdlib_module_names if name != f"rayloom_{project}"}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in found}


@pytest.mark.parametrize("project", PROJECTS)
def test_the_versions_that_are_tested_are_allowed(project):
    versions = pinned()
    for requirement in requirements(project):
        if not requirement.name.startswith("rayloom-"):
            assert requirement.specifier.contains(versions[requirement.name]), requirement


@pytest.mark.parametrize("project", PROJECTS)
def test_no_version_with_a_known_hole_is_allowed(project):
    for requirement in requirements(project):
        if requirement.name in SAFE:
            floors = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
            assert floors and max(floors) >= Version(SAFE[requirement.name]), requirement


@pytest.mark.parametrize("project", PROJECTS)
def test_what_is_declared_is_what_is_used(project):
    document = pyproject(project)["project"]
    declared = {Requirement(line).name for line in document["dependencies"]}
    assert imported(project) - OPTIONAL[project] == declared - BY_NAME[project]
