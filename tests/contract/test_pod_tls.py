"""The operator's certificates and TLS settings work with the TLS code of the engine and the gateway."""

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.link_tls import link_tls, server_name
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.protocol.tls.session import TlsSession
from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.objects.engine_config import pod_engine_config
from rayloom_operator.objects.gateway.config import gateway_config
from rayloom_operator.objects.llmgateway.deployment import gateway_config as llmgateway_config
from rayloom_operator.objects.tls.certificates import PERIOD
from rayloom_operator.objects.tls.tls_secrets import llmgateway_secret, service_secrets
from rt_llmgateway import make_gateway_document
from rt_operator import make_resolved

KEY, OLD_KEY = b"k" * 16, b"o" * 16
NOW = datetime.now(UTC)
RESOLVED = make_resolved(gateway={})
SERVICE = RESOLVED.service
MOUNT = "/etc/rayloom"


def moved(document: dict[str, object], folder: Path) -> dict[str, object]:
    """The document, with paths of TLS files changed to `folder`."""
    return {
        name: str(value).replace(MOUNT, str(folder)) if "tls_" in name and name.endswith("_file") else value
        for name, value in document.items()
    }


def written(secret: dict[str, dict[str, str]], folder: Path) -> Path:
    (folder / "tls").mkdir(parents=True)
    for name, content in secret["data"].items():
        (folder / "tls" / name).write_bytes(base64.b64decode(content))
    return folder


def engine_files(secret, folder: Path) -> TlsFiles:
    config = parse_config(moved(pod_engine_config(replace(RESOLVED, has_tls=True)), written(secret, folder)))
    assert config.front_tls_paths is not None
    return TlsFiles(config.front_tls_paths, is_server=True)


def shake(engine: TlsFiles, gateway: TlsFiles, name: str) -> bytes:
    """Returns the bytes of a gateway's first message that the engine receives."""
    server, client = TlsSession(engine.context()), TlsSession(gateway.context(), name)
    is_complete = False
    while not is_complete:
        client.shake_hands(server.take_outgoing())
        is_complete = server.shake_hands(client.take_outgoing())
    return server.open(client.seal(b"hello"))


@pytest.mark.parametrize(
    ("engine", "gateway"),
    [
        ((KEY, b"", NOW), (KEY, b"", NOW)),
        # Engine and gateway read renewed files at different times.
        ((KEY, b"", NOW - PERIOD), (KEY, b"", NOW)),
        ((KEY, b"", NOW), (KEY, b"", NOW - PERIOD)),
        # During a change of the operator's key, the new key and the previous key are used together.
        ((OLD_KEY, b"", NOW), (KEY, OLD_KEY, NOW)),
        ((KEY, OLD_KEY, NOW), (OLD_KEY, b"", NOW)),
        ((KEY, OLD_KEY, NOW), (KEY, OLD_KEY, NOW)),
    ],
)
def test_engine_and_gateway_pods_accept_each_other(tmp_path: Path, engine, gateway) -> None:
    of_engine = service_secrets(SERVICE, *engine)[0]
    of_gateway = service_secrets(SERVICE, *gateway)[1]
    document = moved(gateway_config(SERVICE, SERVICE.spec.gateway, "strict"), written(of_gateway, tmp_path / "gateway"))
    tls = link_tls(parse_gateway_config(document).gateway)
    assert tls is not None
    assert (tls.server_name, tls.is_strict) == ("chat-engines.team.svc", True)
    assert shake(engine_files(of_engine, tmp_path / "engine"), tls.files, tls.server_name) == b"hello"


def test_the_pods_of_an_llmgateway_name_each_service_with_its_namespace(tmp_path: Path) -> None:
    gateway = parse_gateway(make_gateway_document())
    secret = llmgateway_secret(gateway, KEY, b"", NOW + timedelta(days=1))
    document = moved(llmgateway_config(gateway, "permissive"), written(secret, tmp_path / "gateway"))
    settings = parse_gateway_config(document).gateway
    tls = link_tls(settings)
    assert tls is not None
    name = server_name("chat-engines:8003", settings.tls_server_suffix)
    assert name == "chat-engines.team.svc"
    engine = engine_files(service_secrets(SERVICE, KEY, b"", NOW)[0], tmp_path / "engine")
    assert shake(engine, tls.files, name) == b"hello"
