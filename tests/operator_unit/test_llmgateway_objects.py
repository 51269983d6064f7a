"""The objects of an LLMGateway, and the rule by which its pods reach engines."""

import base64
import json
from dataclasses import replace

from rayloom_operator.names import object_path, path_of
from rayloom_operator.objects.gateway.companions import gateway_secret
from rayloom_operator.objects.guards import network_policy
from rayloom_operator.observe.applied_fields import SHAPES, digest
from rt_llmgateway import make_gateway_document, make_service_document, objects_of_gateway
from rt_operator import SETTINGS, make_service

KEYS = {"apiKeySecretRef": {"name": "keys", "key": "all"}}
MORE_KEYS = {"apiKeySecretRef": {"name": "keys", "key": "more"}}
OTHER_KEYS = {"apiKeySecretRef": {"name": "other", "key": "all"}}


def wanted(*services, settings=SETTINGS, **spec):
    """Kind -> object."""
    return {each["kind"]: each for each in objects_of_gateway(*services, settings=settings, **spec)}


def models_file(*services, **spec):
    return json.loads(base64.b64decode(wanted(*services, **spec)["Secret"]["data"]["models.json"]))


def pod_of(made):
    return made["Deployment"]["spec"]["template"]["spec"]


def test_the_models_file_has_all_that_a_gateway_needs():
    args = {"toolParser": "hermes", "maxOutputTokens": 9, "threads": 3, "logLevel": "debug"}
    adapters = [{"name": name, "source": f"pvc://a/{name}"} for name in ("sql", "poems")]
    model = {"source": "builtin://smollm2-135m", "adapters": adapters}
    document = make_service_document(model=model, engine={"args": args}, auth=KEYS)
    alias = {"name": "assistant", "targets": [{"service": "chat", "weight": 3}], "auth": OTHER_KEYS}

    made = models_file(document, aliases=[alias])
    key = made["models"]["chat"].pop("key")
    assert made == {
        "version": "v1",
        "models": {
            "chat": {
                "engines_dns": "chat-engines:8003",
                "api_key_file": "/etc/rayloom-keys/keys/all",
                "settings": {"tool_parser": "hermes", "max_output_tokens": 9},
            }
        },
        "aliases": {
            "assistant": {
                "targets": [{"model": "chat", "weight": 3}],
                "sticky_by": "user",
                "api_key_file": "/etc/rayloom-keys/other/all",
            }
        },
        "adapters": {"chat": ["poems", "sql"]},
    }
    # The engines of the service read the same key. It is in the Secret that the operator creates for these engines.
    service = make_service(gateway={"replicas": 0})
    service = service.model_copy(update={"metadata": service.metadata.model_copy(update={"uid": "uid-chat"})})
    assert base64.b64decode(gateway_secret(service, SETTINGS.operator_key)["data"]["key"]).decode() == key


def test_after_a_rotation_the_models_file_has_the_key_of_running_engines_too():
    before = models_file(make_service_document())["models"]["chat"]["key"]
    rotated = replace(SETTINGS, operator_key=b"the new key", previous_key=SETTINGS.operator_key)

    made = models_file(make_service_document(), settings=rotated)["models"]["chat"]
    assert made["previous_key"] == before != made["key"]
    assert "previous_key" not in models_file(make_service_document())["models"]["chat"]


def test_the_keys_of_the_gateway_are_those_of_every_name():
    alias = {"name": "assistant", "targets": [{"service": "chat"}]}
    made = models_file(make_service_document(auth=KEYS), aliases=[alias], auth=OTHER_KEYS)

    assert made["models"]["chat"]["api_key_file"] == "/etc/rayloom-keys/other/all"
    assert made["aliases"]["assistant"]["api_key_file"] == "/etc/rayloom-keys/other/all"


def test_each_secret_of_keys_is_a_folder_of_the_pod():
    first, second = make_service_document(auth=KEYS), make_service_document("second", auth=MORE_KEYS)
    pod = pod_of(wanted(first, second, make_service_document("third", auth=OTHER_KEYS)))

    (volume,) = [each for each in pod["volumes"] if each["name"] == "api-keys"]
    assert volume["projected"]["sources"] == [
        {
            "secret": {
                "name": "keys",
                "items": [{"key": "all", "path": "keys/all"}, {"key": "more", "path": "keys/more"}],
                "optional": True,
            }
        },
        {"secret": {"name": "other", "items": [{"key": "all", "path": "other/all"}], "optional": True}},
    ]
    (container,) = pod["containers"]
    assert {"name": "api-keys", "mountPath": "/etc/rayloom-keys", "readOnly": True} in container["volumeMounts"]
    assert all(each["name"] != "api-keys" for each in pod_of(wanted(make_service_document()))["volumes"])


def test_only_a_new_secret_of_keys_changes_the_deployment():
    first = wanted(make_service_document())

    assert wanted()["Deployment"] == first["Deployment"]
    served = {"model": {"source": "builtin://smollm2-135m", "servedName": "other"}}
    assert wanted(make_service_document(**served))["Deployment"] == first["Deployment"]
    assert wanted(make_service_document(auth=KEYS))["Deployment"] != first["Deployment"]


def test_the_pods_run_the_gateway_with_the_models_file():
    made = wanted(make_service_document(), holdSeconds=7, drainSeconds=9, replicas=3, image="engine:x")
    template = made["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]

    assert (made["Deployment"]["spec"]["replicas"], container["image"]) == (3, "engine:x")
    assert container["command"] == ["rayloom-engine", "gateway", "--config", "/etc/rayloom/config.json"]
    assert json.loads(template["metadata"]["annotations"]["rayloom.dev/gateway-config"]) == {
        "version": "v1",
        "models_file": "/etc/rayloom-models/models.json",
        "cache_dir": "/tmp/rayloom-gateway",
        "hold_seconds": 7,
        "host": "0.0.0.0",
        "port": 8000,
        "admin_host": "0.0.0.0",
        "admin_port": 8001,
        "admin_token_file": "/etc/rayloom/admin/token",
        "drain_seconds": 9,
    }
    # A file that is mounted with subPath would never be updated.
    assert {"name": "models", "mountPath": "/etc/rayloom-models", "readOnly": True} in container["volumeMounts"]
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": {"rayloom.dev/llmgateway": "public"}}
    assert made["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
    assert template["spec"]["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]


def test_the_default_image_is_the_operators():
    (container,) = pod_of(wanted())["containers"]

    assert container["image"] == SETTINGS.engine_image


def test_no_object_is_taken_for_one_of_a_service():
    made = wanted(make_service_document())

    for each in made.values():
        assert "rayloom.dev/service" not in each["metadata"]["labels"]
        assert each["metadata"]["labels"]["rayloom.dev/llmgateway"] == "public"
    assert "rayloom.dev/gateway" not in made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"] == {"rayloom.dev/llmgateway": "public"}


def test_the_pods_reach_the_front_port_of_services_with_gateways_alone():
    opened = network_policy(make_service(gateway={"replicas": 0}))["spec"]["ingress"]
    closed = network_policy(make_service())["spec"]["ingress"]

    rule = {
        "from": [{"podSelector": {"matchExpressions": [{"key": "rayloom.dev/llmgateway", "operator": "Exists"}]}}],
        "ports": [{"port": 8003, "protocol": "TCP"}],
    }
    assert [each for each in opened if each not in closed] == [rule]


def test_a_change_of_any_field_is_drift():
    for kind, made in wanted(make_service_document(auth=KEYS)).items():
        if kind in SHAPES:
            assert digest(kind, made) == digest(kind, json.loads(json.dumps(made)))
    made = wanted(make_service_document(auth=KEYS))["Deployment"]
    edited = json.loads(json.dumps(made))
    (volume,) = [each for each in edited["spec"]["template"]["spec"]["volumes"] if each["name"] == "api-keys"]
    volume["projected"]["sources"][0]["secret"]["optional"] = False
    assert digest("Deployment", edited) != digest("Deployment", made)


def test_the_path_of_a_kind_that_ends_in_a_vowel_and_y():
    assert path_of(make_gateway_document()) == "/apis/rayloom.dev/v1alpha1/namespaces/team/llmgateways/public"
    assert object_path("networking.k8s.io/v1", "NetworkPolicy").endswith("/networkpolicies")
