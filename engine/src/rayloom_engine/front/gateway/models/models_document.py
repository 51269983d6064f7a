"""ModelsDocument: the models and aliases of a gateway, as listed in the JSON file `models_file`.

The document's JSON schema is `schemas/gateway-models.v1.json`, written by `make schemas`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from rayloom_engine.common.json_words import shown
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.gateway_config import is_place
from rayloom_engine.front.gateway.models.document_problems import explain
from rayloom_engine.protocol.front_key import MIN_KEY_CHARS

# The settings of `rayloom-engine serve` that may differ among models. All other settings belong to the gateway.
MODEL_SETTINGS = (
    *("generation_config", "tool_parser", "reasoning_parser", "max_output_tokens", "max_logprobs"),
    *("max_body_bytes", "max_queued_requests", "enable_priority", "enable_force_include_usage", "repeat_seconds"),
    *("return_tokens_as_token_ids", "enable_prompt_embeds"),
)
NAME = r"[\x21-\x7e]{1,256}"  # names are written into an HTTP header, so they are visible ASCII
_NAME = re.compile(NAME)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _settings_model() -> type[BaseModel]:
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in _fields().items()}
    return create_model("ModelSettings", __base__=_Part, __doc__="Settings of one model.", **fields)


def _fields() -> dict[str, Any]:
    return {name: EngineConfig.model_fields[name] for name in MODEL_SETTINGS}


ModelSettings = _settings_model()


class ModelEntry(_Part):
    """The addresses and the key of a model's engines, and the settings for its requests."""

    engines_dns: str | None = Field(
        None, description="DNS name and port of all engines, HOST:PORT: each address of the name is an engine."
    )
    engines: dict[str, str] | None = Field(
        None, description="In place of `engines_dns`, the engines: name -> HOST:PORT of the engine's front_port."
    )
    key: str = Field(min_length=MIN_KEY_CHARS, description="The key of the engines, as in their front_key_file.")
    previous_key: str | None = Field(
        None,
        min_length=MIN_KEY_CHARS,
        description="The key before `key`, which is tried at engines that do not have `key`.",
    )
    tls_server_name: str | None = Field(
        None,
        min_length=1,
        description="With the gateway's tls_cert_file: the name that the engines' certificates must have. Default: the "
        "name of engines_dns, or the host of each engine's address.",
    )
    api_key_file: str | None = Field(
        None, description="File with the API keys for this model, one a line. null: requests need no key."
    )
    settings: ModelSettings = Field(  # type: ignore[valid-type]
        default_factory=ModelSettings, description="Settings of this model, in place of those of the gateway."
    )

    @property
    def given_settings(self) -> dict[str, Any]:
        """The settings that the document sets."""
        given: dict[str, Any] = self.settings.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
        return given


class TargetEntry(_Part):
    """A model behind an alias."""

    model: str = Field(description="Name of a model.")
    weight: int = Field(ge=0, le=1_000_000, description="Its share of the requests, relative to the other weights.")


class AliasEntry(_Part):
    """A further name, whose requests go to the models behind it."""

    targets: tuple[TargetEntry, ...] = Field(min_length=1, strict=False, description="The models behind the name.")
    sticky_by: Literal["user"] | None = Field(
        None, description="`user`: all requests of one user go to the same model while the weights stay."
    )
    api_key_file: str | None = Field(
        None, description="File with the API keys for this name. null: the keys of the model that a request goes to."
    )

    @property
    def weights(self) -> tuple[tuple[str, int], ...]:
        """The models with their weights."""
        return tuple((target.model, target.weight) for target in self.targets)


DeclaredAdapters: TypeAlias = dict[str, Annotated[tuple[str, ...], Field(strict=False)]]


class _Adapters(_Part):
    adapters: DeclaredAdapters | None = None


class ModelsDocument(_Part):
    """All names that clients may put into `model`."""

    version: Literal["v1"] = Field(description="Version of this document.")
    models: dict[str, ModelEntry] = Field(description="The models by the names that clients use.")
    aliases: dict[str, AliasEntry] = Field(default_factory=dict, description="Further names.")
    adapters: DeclaredAdapters | None = Field(
        None,
        description="The LoRA adapters that the engines of each model are to have: model -> names. Left out: engines "
        "may have any, and unknown names get 503 until they have reported theirs.",
    )

    def declared_adapters(self, model: str) -> tuple[str, ...] | None:
        """Returns the names of the LoRA adapters that engines of `model` are to have; None if unknown."""
        return None if self.adapters is None else self.adapters.get(model, ())


def without_models(document: ModelsDocument, names: Collection[str]) -> ModelsDocument:
    """Returns a document without these models. An alias is left out if no other target has a weight above 0."""
    models = {name: entry for name, entry in document.models.items() if name not in names}
    aliases = {}
    for name, alias in document.aliases.items():
        if (cut := _with_targets_in(alias, models)) is not None:
            aliases[name] = cut
    return document.model_copy(update={"models": models, "aliases": aliases})


def _with_targets_in(alias: AliasEntry, models: Collection[str]) -> AliasEntry | None:
    """Returns the alias with only its targets in `models`; None if no such target has a weight above 0."""
    targets = tuple(target for target in alias.targets if target.model in models)
    return alias.model_copy(update={"targets": targets}) if any(target.weight for target in targets) else None


class _Outline(BaseModel):
    """The fields without which no part of a document can be used."""

    model_config = ConfigDict(strict=True)

    version: Literal["v1"]
    models: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableModels:
    """The usable entries of a document, and a sentence for each wrong field of the other entries."""

    document: ModelsDocument
    problems: tuple[str, ...]


def parse_models(document: object) -> UsableModels:
    """Returns the models in a decoded JSON document. An entry with a wrong field is left out, so nobody can use it.

    Raises ConfigError unless the document is an object of version v1 with an object `models`. Neither the error nor a
    problem shows a key.
    """
    try:
        listed = _Outline.model_validate(document).models
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error, _fields_at))) from None  # the chained error would show keys
    assert isinstance(document, dict)
    fields = ", ".join(ModelsDocument.model_fields)
    problems = [
        f"the document: there is no field {field}; the fields are {fields}"
        for field in document
        if field not in ModelsDocument.model_fields
    ]
    models: dict[str, ModelEntry] = {}
    for name, value in listed.items():
        entry = _parsed(ModelEntry, value, ("models", name), problems)
        found = [] if entry is None else _model_problems(name, entry)
        problems += found
        if entry is not None and not found:
            models[name] = entry
    aliases = _usable_aliases(document.get("aliases", {}), listed, models, problems)
    usable = ModelsDocument(version="v1", models=models, aliases=aliases, adapters=_adapters(document, problems))
    return UsableModels(document=usable, problems=tuple(problems))


Part = TypeVar("Part", bound=_Part)


def _parsed(kind: type[Part], value: object, field: tuple[str, str], problems: list[str]) -> Part | None:
    """Returns the entry at `field` of the document. For a wrong entry, returns None and adds to `problems`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems += explain(error, _fields_at, field)
        return None


def _adapters(document: Mapping[str, Any], problems: list[str]) -> DeclaredAdapters | None:
    """Returns the declared adapters of a document; None if no adapters are declared, or a declaration is wrong."""
    try:
        return _Adapters.model_validate({"adapters": document.get("adapters")}).adapters
    except ValidationError as error:
        problems += explain(error, _fields_at)
        return None


def _model_problems(name: str, entry: ModelEntry) -> list[str]:
    field = f"models.{name}"
    problems = _name_problems(field, name)
    if (entry.engines_dns is None) == (not entry.engines):
        problems.append(f"{field}: give either engines_dns or engines, and at least one engine")
    if entry.engines_dns is not None and not is_place(entry.engines_dns):
        problems.append(_no_place(f"{field}.engines_dns", entry.engines_dns, "chat-engines:8003"))
    for engine, place in (entry.engines or {}).items():
        if not is_place(place):
            problems.append(_no_place(f"{field}.engines.{engine}", place, "10.0.0.7:8003"))
    return problems


def _no_place(field: str, place: str, example: str) -> str:
    return f"{field}: {place!r} is not an address; write HOST:PORT, such as {example}"


def _usable_aliases(
    listed: object, all_models: dict[str, Any], models: dict[str, ModelEntry], problems: list[str]
) -> dict[str, AliasEntry]:
    """Returns the aliases that can be used. `all_models`: all entries of models; `models`: the usable entries."""
    if not isinstance(listed, dict):
        problems.append("aliases: must be an object of aliases by their names")
        return {}
    aliases = {}
    for name, value in listed.items():
        alias = _parsed(AliasEntry, value, ("aliases", name), problems)
        if alias is None:
            continue
        found = _alias_problems(name, alias, all_models)
        cut = _with_targets_in(alias, models)
        for target in alias.targets:
            if target.model not in models:
                problems.append(_unusable_target(name, target.model, is_listed=target.model in all_models))
        if not found and cut is None:
            found = [f"aliases.{name}.targets: no target with a weight above 0 can be used"]
        problems += found
        if not found and cut is not None:
            aliases[name] = cut
    return aliases


def _alias_problems(name: str, alias: AliasEntry, all_models: dict[str, Any]) -> list[str]:
    field = f"aliases.{name}"
    problems = _name_problems(field, name)
    # An alias with the name of a model is refused even if the model is left out, because the alias may have other keys
    # than the model.
    if name in all_models:
        problems.append(f"{field}: a model has this name already; choose another one")
    if len({target.model for target in alias.targets}) < len(alias.targets):
        problems.append(f"{field}.targets: a model is named twice; give it one weight")
    if not any(target.weight for target in alias.targets):
        problems.append(f"{field}.targets: every weight is 0; give at least one target a weight above 0")
    return problems


def _unusable_target(alias: str, model: str, *, is_listed: bool) -> str:
    field = f"aliases.{alias}.targets"
    if is_listed:
        return f"{field}: the entry of the model {shown(model)} cannot be used, so the other targets get its requests"
    return f"{field}: there is no model {shown(model)}; name one of `models`"


def _name_problems(field: str, name: str) -> list[str]:
    if _NAME.fullmatch(name):
        return []
    return [f"{field}: {shown(name)} is no name of a model; write 1 to 256 visible ASCII characters without blanks"]


def _fields_at(path: tuple[str, ...]) -> Mapping[str, FieldInfo]:
    """Returns the fields of the object at `path`; empty if the value at `path` has no fixed fields."""
    match path:
        case ():
            return ModelsDocument.model_fields
        case ("models", _):
            return ModelEntry.model_fields
        case ("models", _, "settings"):
            return _fields()
        case ("aliases", _):
            return AliasEntry.model_fields
        case ("aliases", _, "targets", _):
            return TargetEntry.model_fields
    return {}
