"""The CustomResourceDefinitions in `crds/` and in the chart are those that are generated from the typed models."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LOADER = yaml.CSafeLoader  # yaml.SafeLoader needs a second for a definition


def load_tool():
    spec = importlib.util.spec_from_file_location("write_crds", ROOT / "tools" / "write_crds.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the decorator `dataclass` looks its module up
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


crd_text = functools.cache(TOOL.crd_text)


@pytest.fixture(scope="module")
def text():
    return crd_text(TOOL.SERVICES)


@pytest.fixture(scope="module")
def definition(text):
    return yaml.load(text, LOADER)


@pytest.fixture(scope="module")
def version(definition):
    (version,) = definition["spec"]["versions"]
    return version


@pytest.fixture(scope="module")
def schema(version):
    return version["schema"]["openAPIV3Schema"]


def schema_of(either):
    (version,) = yaml.load(either[1], LOADER)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def schemas(schema):
    """The schema and every schema in it."""
    yield schema
    for part in schema.get("properties", {}).values():
        yield from schemas(part)
    for word in ("items", "additionalProperties"):
        if word in schema:
            yield from schemas(schema[word])


@pytest.fixture(scope="module", params=TOOL.KINDS, ids=lambda kind: kind.name)
def either(request):
    """(kind, text of its definition), for each kind."""
    return request.param, crd_text(request.param)


@pytest.mark.parametrize("folder", TOOL.FOLDERS, ids=lambda folder: folder.name)
def test_the_file_is_current(folder, either):
    kind, text = either
    path = folder / kind.file_name

    assert path.read_text(encoding="utf-8") == text, f"{path} is not current; run: make crds"


def test_the_schema_is_structural(either):
    for part in schemas(schema_of(either)):
        assert isinstance(part["type"], str)
        assert not {"$ref", "$defs", "anyOf", "const", "title"} & set(part)
        # A map may have either `properties` or `additionalProperties`. The API server refuses both together, and also
        # `additionalProperties: false`.
        assert not ("properties" in part and "additionalProperties" in part)
        assert part["type"] != "integer" or part["format"] == "int64"


def test_every_field_is_described(either):
    for name in ("spec", "status"):
        for part in schemas(schema_of(either)["properties"][name]):
            assert all(field.get("description") for field in part.get("properties", {}).values())


def test_defaults_and_rules_arrive(schema):
    spec = schema["properties"]["spec"]["properties"]

    assert spec["sizing"]["properties"]["minConcurrentRequests"]["default"] == 1
    assert "default" not in spec["parallelism"]["properties"]["pipeline"]
    assert spec["model"]["required"] == ["source"]
    assert "required" not in spec["accelerator"]  # labels of nodes may name its memory
    assert spec["model"]["properties"]["dtype"]["default"] == "auto"
    assert "default" not in spec["model"]["properties"]["maxModelLen"]
    (rule,) = spec["replicas"]["x-kubernetes-validations"]
    assert (rule["rule"], rule["message"][:22]) == ("self >= 0 && self <= 64", "use 0 to 64 replicas; ")
    assert spec["recovery"]["x-kubernetes-validations"][0]["rule"] == (
        "self.backoffMaxSeconds >= self.backoffBaseSeconds"
    )
    assert len(spec["model"]["x-kubernetes-validations"]) == 6
    assert len(schema["x-kubernetes-validations"]) == 2


def test_kubectl_shows_the_columns_of_the_design(version, definition):
    columns = [column["name"].upper() for column in version["additionalPrinterColumns"]]

    assert columns == ["MODEL", "SHAPE", "READY", "REASON", "LOADING", "ROLLOUT", "URL", "AGE", "SCALING"]
    assert version["subresources"]["status"] == {}
    assert definition["spec"]["names"]["shortNames"] == ["llm", "llms"]


def test_kubectl_scale_and_autoscalers_find_their_numbers(version, schema):
    paths = version["subresources"]["scale"]

    assert paths["specReplicasPath"] == ".spec.replicas" and "replicas" in schema["properties"]["spec"]["properties"]
    status = schema["properties"]["status"]["properties"]
    assert paths["statusReplicasPath"] == ".status.replicas" and status["replicas"]["type"] == "integer"
    assert paths["labelSelectorPath"] == ".status.selector" and status["selector"]["type"] == "string"


def test_kubectl_shows_an_llmgateway_in_a_line():
    definition = TOOL.custom_resource_definition(TOOL.GATEWAYS)
    (version,) = definition["spec"]["versions"]

    columns = [column["name"].upper() for column in version["additionalPrinterColumns"]]
    assert columns == ["MODELS", "READY", "REASON", "DEGRADED", "URL", "AGE"]
    assert (definition["metadata"]["name"], version["subresources"]) == ("llmgateways.rayloom.dev", {"status": {}})
