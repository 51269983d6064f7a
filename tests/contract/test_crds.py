"""The CustomResourceDefinition in `crds/` and in the chart is what the typed models say, in the form allowed."""

import importlib.util
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("write_crds", ROOT / "tools" / "write_crds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
DEFINITION = yaml.safe_load(TOOL.crd_text())
(VERSION,) = DEFINITION["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def schemas(schema):
    """The schema and every schema in it."""
    yield schema
    for part in schema.get("properties", {}).values():
        yield from schemas(part)
    for word in ("items", "additionalProperties"):
        if word in schema:
            yield from schemas(schema[word])


@pytest.mark.parametrize("folder", TOOL.FOLDERS, ids=lambda folder: folder.name)
def test_the_file_is_current(folder):
    written = (folder / TOOL.FILE_NAME).read_text(encoding="utf-8")

    assert written == TOOL.crd_text(), f"{folder / TOOL.FILE_NAME} is not current; run: make crds"


def test_the_schema_is_structural():
    for schema in schemas(SCHEMA):
        assert isinstance(schema["type"], str)
        assert not {"$ref", "$defs", "anyOf", "const", "title"} & set(schema)
        # The API server takes a map's fields or the schema of all its values, not both, and no closed map.
        assert not ("properties" in schema and "additionalProperties" in schema)
        assert schema["type"] != "integer" or schema["format"] == "int64"


def test_every_field_is_described():
    for part in ("spec", "status"):
        for schema in schemas(SCHEMA["properties"][part]):
            assert all(field.get("description") for field in schema.get("properties", {}).values())


def test_defaults_and_rules_arrive():
    spec = SCHEMA["properties"]["spec"]["properties"]

    assert spec["sizing"]["properties"]["minConcurrentRequests"]["default"] == 1
    assert "default" not in spec["parallelism"]["properties"]["pipeline"]
    assert spec["model"]["required"] == ["source"]
    assert "required" not in spec["accelerator"]  # nodes may say how much memory it has
    assert spec["model"]["properties"]["dtype"]["default"] == "auto"
    assert "default" not in spec["model"]["properties"]["maxModelLen"]
    (rule,) = spec["replicas"]["x-kubernetes-validations"]
    assert (rule["rule"], rule["message"][:22]) == ("self >= 0 && self <= 64", "use 0 to 64 replicas; ")
    assert spec["recovery"]["x-kubernetes-validations"][0]["rule"] == (
        "self.backoffMaxSeconds >= self.backoffBaseSeconds"
    )
    assert len(spec["model"]["x-kubernetes-validations"]) == 2
    assert len(SCHEMA["x-kubernetes-validations"]) == 1


def test_kubectl_shows_the_columns_of_the_design():
    columns = [column["name"].upper() for column in VERSION["additionalPrinterColumns"]]

    assert columns == ["MODEL", "SHAPE", "READY", "REASON", "LOADING", "ROLLOUT", "URL", "AGE", "SCALING"]
    assert VERSION["subresources"]["status"] == {}
    assert DEFINITION["spec"]["names"]["shortNames"] == ["llm", "llms"]


def test_kubectl_scale_and_autoscalers_find_their_numbers():
    paths = VERSION["subresources"]["scale"]

    assert paths["specReplicasPath"] == ".spec.replicas" and "replicas" in SCHEMA["properties"]["spec"]["properties"]
    status = SCHEMA["properties"]["status"]["properties"]
    assert paths["statusReplicasPath"] == ".status.replicas" and status["replicas"]["type"] == "integer"
    assert paths["labelSelectorPath"] == ".status.selector" and status["selector"]["type"] == "string"
