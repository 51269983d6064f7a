"""The Deployment of the gateway pods of an LLMGateway, and their configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayloom_operator import names
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.pods import Auth
from rayloom_operator.api.recovery import Recovery
from rayloom_operator.names import Manifest
from rayloom_operator.objects.gateway.config import pod_settings
from rayloom_operator.objects.gateway.pods import GatewayPods, deployment
from rayloom_operator.objects.llmgateway import identity
from rayloom_operator.objects.llmgateway.models_file import MODELS_FOLDER, MODELS_KEY
from rayloom_operator.objects.pod import container_fields, pod_fields
from rayloom_operator.objects.tls.files import TlsMode, gateway_tls, llmgateway_secret_name

_MODELS_VOLUME = "models"


def gateway_config(gateway: LLMGateway, tls: TlsMode = "off") -> dict[str, Any]:
    """The GatewayConfig v1 document. The names and their engines are in the models file."""
    spec = gateway.spec
    models = {"models_file": f"{MODELS_FOLDER}/{MODELS_KEY}"}
    settings = pod_settings(spec.hold_seconds, spec.drain_seconds)
    if spec.root_path:
        settings["root_path"] = spec.root_path
    return settings | models | gateway_tls(tls, gateway.metadata.namespace)


def gateway_deployment(gateway: LLMGateway, default_image: str, keys: Iterable[Auth], tls: TlsMode = "off") -> Manifest:
    """The Deployment. `keys`: the API keys of all names. No other files of the services' Secrets are mounted."""
    spec = gateway.spec
    image = spec.image or default_image
    models: Manifest = {
        "name": _MODELS_VOLUME,
        "secret": {
            "secretName": identity.secret_name(gateway),
            "items": [{"key": MODELS_KEY, "path": MODELS_KEY}],
        },
    }
    labels = {
        **identity.labels(gateway),
        "app.kubernetes.io/name": "rayloom-gateway",
        **names.app_labels_of(gateway.metadata.name, image, "gateway"),
    }
    return deployment(
        GatewayPods(
            metadata=identity.metadata(gateway),
            labels=labels,
            selector=identity.selector(gateway),
            replicas=spec.replicas,
            resources=spec.resources,
            drain_seconds=spec.drain_seconds,
            config=gateway_config(gateway, tls),
            pod=pod_fields(
                identity.object_name(gateway.metadata.name),
                spec.scheduling,
                spec.image_pull_secrets,
                node_loss_seconds=Recovery().node_loss_seconds,
            ),
            container=container_fields(names.GATEWAY_CONTAINER, image),
            secret=identity.secret_name(gateway),
            secret_files=((names.TOKEN_KEY, names.ADMIN_TOKEN_FILE),),
            tls_secret="" if tls == "off" else llmgateway_secret_name(gateway),
            volumes=[(models, MODELS_FOLDER), *((each, names.KEYS_FOLDER) for each in _keys_volumes(keys))],
        )
    )


def _keys_volumes(keys: Iterable[Auth]) -> list[Manifest]:
    """Returns the volume with a folder for each Secret of API keys; an empty list without keys."""
    wanted = sorted({(each.api_key_secret_ref.name, each.api_key_secret_ref.key) for each in keys})
    if not wanted:
        return []
    sources = [
        {
            "secret": {
                "name": name,
                "items": [{"key": key, "path": f"{name}/{key}"} for of, key in wanted if of == name],
                # With `optional`, a missing Secret of one service does not keep new gateway pods from starting. A
                # gateway refuses requests for a name whose key file is missing.
                "optional": True,
            }
        }
        for name in sorted({name for name, _ in wanted})
    ]
    return [{"name": names.KEYS_VOLUME, "projected": {"sources": sources}}]
