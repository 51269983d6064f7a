"""Names, labels and metadata of the objects of an LLMGateway.

None of these objects has the label of LLMServices, because an LLMGateway and an LLMService may have the same name.
"""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.llmgateway.spec import KIND, LLMGateway
from rayloom_operator.names import Manifest


def object_name(gateway: str) -> str:
    """Returns the name of the Deployment, the Service, the ServiceAccount and the other objects except the Secret."""
    return f"{gateway}-llmgateway"


def secret_name(gateway: LLMGateway) -> str:
    """Returns the name of the Secret with the models file and the token of the admin port."""
    return names.secret_name(object_name(gateway.metadata.name), gateway.metadata.uid)


def selector(gateway: LLMGateway) -> dict[str, str]:
    """Returns the labels by which the gateway pods are selected."""
    return {names.LLMGATEWAY_LABEL: gateway.metadata.name}


def labels(gateway: LLMGateway) -> dict[str, str]:
    return {names.MANAGED_BY_LABEL: names.FIELD_MANAGER, **selector(gateway)}


def metadata(gateway: LLMGateway, name: str = "") -> Manifest:
    """Returns the metadata of an object that is deleted with its LLMGateway. `name`: by default `object_name`."""
    return names.owned_metadata(KIND, gateway.metadata, name or object_name(gateway.metadata.name), labels(gateway))


def endpoint(gateway: LLMGateway) -> str:
    """Returns the URL of the API inside the cluster."""
    meta = gateway.metadata
    return f"http://{object_name(meta.name)}.{meta.namespace}.svc:{names.API_PORT}"
