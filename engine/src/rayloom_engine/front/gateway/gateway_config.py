"""GatewayConfig: the settings of `rayloom-engine gateway`, from a JSON document or flags.

A gateway has settings of its own, and those engine settings that concern HTTP and text (FRONT_FIELDS). The
document's JSON schema is `schemas/gateway-config.v1.json`, written by `make schemas`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from rayloom_engine.config import EngineConfig, parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.tls_settings import TlsMode, TlsPaths, tls_paths

FRONT_FIELDS = (
    *("served_model_name", "host", "port", "admin_host", "admin_port", "admin_token_file", "api_key_file"),
    *("cors_allowed_origins", "ui", "max_body_bytes", "max_output_tokens", "max_queued_requests", "enable_priority"),
    *("max_logprobs", "enable_force_include_usage", "return_tokens_as_token_ids", "enable_prompt_embeds"),
    *("generation_config", "root_path", "metrics_prefix", "tool_parser", "reasoning_parser", "drain_seconds"),
    *("repeat_seconds", "log_level"),
)
# Settings of a gateway with one model. `models_file` replaces these settings.
SINGLE_MODEL_FIELDS = (
    *("engines", "engines_file", "engines_dns", "key_file", "tls_server_name", "served_model_name", "api_key_file"),
)


class GatewaySettings(BaseModel):
    """The settings that only a gateway has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal["v1"] = Field("v1", description="Version of this document.")
    engines: dict[str, str] = Field(
        default_factory=dict, description="Engines: name -> HOST:PORT of the engine's front_port."
    )
    engines_file: str | None = Field(
        None, description="JSON file with an object as `engines`, read again when it changes; it adds to `engines`."
    )
    engines_dns: str | None = Field(
        None,
        description="DNS name and port of all engines, HOST:PORT, in place of `engines` and `engines_file`: each "
        "address of the name is an engine. It is looked up every second.",
    )
    key_file: str | None = Field(None, description="File with the key of the engines, as their front_key_file.")
    tls_cert_file: str | None = Field(
        None,
        description="File with the gateway's certificate for connections to engines, PEM. Needs tls_key_file and "
        "tls_ca_file; all three are read again when they change.",
    )
    tls_key_file: str | None = Field(None, description="File with the private key of tls_cert_file, PEM.")
    tls_ca_file: str | None = Field(
        None, description="File with the certificates of the CA that signs the engines' certificates, PEM."
    )
    tls_server_name: str | None = Field(
        None,
        min_length=1,
        description="The name that the engines' certificates must have. Default: the host of each engine's address, "
        "with engines_dns that name.",
    )
    tls_server_suffix: str = Field(
        "",
        description="Added to a default name that comes from engines_dns: .default.svc if that name is short, and the "
        "certificates have the namespace.",
    )
    tls_mode: TlsMode = Field(
        "strict",
        description="With tls_cert_file. strict: engines without TLS get no requests; permissive: they are used.",
    )
    models_file: str | None = Field(
        None,
        description="JSON file with several models and their engines, in place of `engines`, `engines_file`, "
        "`engines_dns`, `key_file`, `tls_server_name`, `served_model_name` and `api_key_file`. It is read again when "
        "it changes.",
    )
    cache_dir: str = Field(
        description="Folder for tokenizers that engines hand over, so that the gateway starts without an engine."
    )
    hold_seconds: float = Field(
        300.0, ge=0, strict=False, description="Seconds for which a request waits while no engine serves."
    )
    max_held_tokens: int = Field(
        2_000_000, ge=1, description="Tokens of all requests that wait for an engine, at most; further ones get 429."
    )

    @property
    def tls_paths(self) -> TlsPaths | None:
        """The files for TLS to the engines; None: clear text. Raises ConfigError if only some are given."""
        return tls_paths("tls", self.tls_cert_file, self.tls_key_file, self.tls_ca_file)


class GatewayConfig(BaseModel):
    """All settings of a gateway. Frozen: built once at start."""

    model_config = ConfigDict(frozen=True)

    gateway: GatewaySettings
    front: EngineConfig  # only FRONT_FIELDS are set


def document_model() -> type[BaseModel]:
    """Returns a pydantic model of the whole document, from which the JSON schema is made."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in front_fields().items()}
    return create_model("GatewayConfig", __base__=GatewaySettings, **fields)


def front_fields() -> dict[str, FieldInfo]:
    """Returns FRONT_FIELDS with their types and descriptions; `served_model_name` is described for gateways."""
    name = FieldInfo(
        annotation=str | None,
        default=None,
        min_length=1,
        description="The model's name in the API; needed unless there is a models_file.",
    )
    return {**{each: EngineConfig.model_fields[each] for each in FRONT_FIELDS}, "served_model_name": name}


def parse_gateway_config(document: object) -> GatewayConfig:
    """Returns the settings in a decoded JSON document. Raises ConfigError that names each wrong field."""
    if not isinstance(document, dict):
        raise ConfigError(f"GatewayConfig: the document must be an object, it is {type(document).__name__}")
    own = {name: value for name, value in document.items() if name not in FRONT_FIELDS}
    front = {name: value for name, value in document.items() if name in FRONT_FIELDS}
    try:
        settings = GatewaySettings.model_validate(own)
    except ValidationError as error:
        raise ConfigError("GatewayConfig: " + "; ".join(_sentences(error))) from error
    _ = settings.tls_paths  # raises if only some of the files are given
    if settings.models_file is not None:
        _check_no_single_model(document)
        return GatewayConfig(gateway=settings, front=parse_config({"model": "models_file", **front}))
    if "served_model_name" not in front:
        raise ConfigError(
            "GatewayConfig: served_model_name: missing; set it to the model's name in the API, or give models_file for "
            "several models"
        )
    if settings.key_file is None:
        raise ConfigError("GatewayConfig: key_file: missing; set --key-file to the engines' front_key_file")
    _check_engines(settings)
    # An engine's `model` names the source of its weights. A gateway has no weights, so its `model` is the served name.
    return GatewayConfig(gateway=settings, front=parse_config({"model": front["served_model_name"], **front}))


def check_place(name: str, place: object) -> str:
    """Returns `place`, the address of engine `name`. Raises ConfigError unless it is HOST:PORT."""
    if not is_place(place):
        raise ConfigError(f"engine {name!r}: {place!r} is not an address; write HOST:PORT, such as 10.0.0.7:8002")
    return str(place)


def load_gateway_document(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ConfigError."""
    return gateway_document(read_gateway_document(path), path)


def read_gateway_document(path: Path) -> bytes:
    """Returns the content of a file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def gateway_document(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the object in the JSON text of the file at `path`. Raises ConfigError."""
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: values nested too deeply
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold an object, it holds {type(document).__name__}")
    return document


def _check_no_single_model(document: dict[str, Any]) -> None:
    given = [name for name in SINGLE_MODEL_FIELDS if document.get(name)]
    if given:
        raise ConfigError(
            f"GatewayConfig: models_file cannot be combined with {', '.join(given)}: remove them, and give each model "
            "of the file its engines, key and api_key_file"
        )


def _check_engines(settings: GatewaySettings) -> None:
    for name, place in settings.engines.items():
        check_place(name, place)
    is_listed = bool(settings.engines) or settings.engines_file is not None
    if settings.engines_dns is None:
        if not is_listed:
            raise ConfigError(
                "GatewayConfig: engines: none is given; use --engine NAME=HOST:PORT, --engines-file FILE or "
                "--engines-dns HOST:PORT"
            )
    elif is_listed:
        raise ConfigError(
            "GatewayConfig: engines_dns cannot be combined with engines or engines_file; name the engines in one way"
        )
    elif not is_place(settings.engines_dns):
        raise ConfigError(
            f"GatewayConfig: engines_dns: {settings.engines_dns!r} is not a name with a port; write HOST:PORT, such as "
            "engines.default.svc.cluster.local.:8002"
        )


def is_place(place: object) -> bool:
    """Returns whether `place` has the form HOST:PORT."""
    host, _, port = place.rpartition(":") if isinstance(place, str) else ("", "", "")
    return bool(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536


def _sentences(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            lines.append(f"{field}: missing; set --{field.replace('_', '-')}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"{field}: a gateway has no such setting (remove it, or check its spelling)")
        else:
            lines.append(f"{field}: {item['msg']}, given {item['input']!r}")
    return lines
