"""Turns EngineConfig's fields into flags: `max_model_len` becomes `--max-model-len`, with the same checks and help."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rayloom_engine.config import EngineConfig, load_config, parse_config
from rayloom_engine.errors import ConfigError

_SERVING_ONLY = (
    *("host", "port", "admin_host", "admin_port", "admin_token_file", "api_key_file", "cors_allowed_origins"),
    *("root_path", "metrics_prefix", "ui", "front_host", "front_port", "front_key_file"),
    *("front_tls_cert_file", "front_tls_key_file", "front_tls_ca_file", "front_tls_mode"),
    *("adapters", "max_loras", "max_lora_rank", "allow_runtime_lora_updating", "managed_adapters"),
    "enable_prompt_embeds",
)
_ALIASES = {"adapters": ("--lora", "--lora-modules")}  # field -> further names of its flag
_METAVARS = {"adapters": "NAME=PATH"}  # field -> placeholder of its value; by default the last word of the field
# Field -> advice for a value that is none of the field's choices.
_CHOICE_HINTS = {
    "quantization": "auto reads AWQ, GPTQ, fp8 and compressed-tensors from the checkpoint, so leave it out",
}
# Field -> title of the help group that begins with this field. Fields are in the order of EngineConfig.
_GROUPS = {
    "version": "model",
    "adapters": "LoRA adapters",
    "tensor_parallel_size": "ranks: how many, and where they run",
    "heartbeat_seconds": "loss of ranks",
    "async_scheduling": "steps and KV cache",
    "host": "ports, keys and limits",
    "drain_seconds": "life of the processes",
}


def add_config_arguments(parser: argparse.ArgumentParser, *, is_server: bool) -> None:
    """Adds to `parser` a flag for each field of EngineConfig, the flag --config, and the positional argument MODEL.

    --config names a JSON file with an EngineConfig; the other flags override it.
    """
    add_model_argument(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON file with an EngineConfig; flags win over it")
    group = parser.add_argument_group("model")
    for name, field in EngineConfig.model_fields.items():
        if name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[name])
        if name == "version" or (not is_server and name in _SERVING_ONLY):
            continue
        _add_flag(group, name, field)


def add_fields(group: argparse._ArgumentGroup, fields: Mapping[str, FieldInfo]) -> None:
    """Adds a flag for each of these fields of a configuration."""
    for name, field in fields.items():
        _add_flag(group, name, field)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the model as a positional argument. `model_of` combines it with the flag --model."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def model_of(args: argparse.Namespace) -> str | None:
    """Returns the model that a command line names, by flag or position. Raises ConfigError if it names two models."""
    positional: str | None = args.positional_model
    by_flag: str | None = args.model
    if positional is not None and by_flag is not None and positional != by_flag:
        raise ConfigError(f"model: given as {positional!r} and as --model {by_flag!r}; give one of them")
    return positional if by_flag is None else by_flag


def config_from(args: argparse.Namespace, skip: Collection[str] = ()) -> EngineConfig:
    """Returns the EngineConfig that the flags describe. Raises ConfigError."""
    document: dict[str, Any] = {}
    if args.config is not None:
        document = load_config(args.config).model_dump(mode="json", exclude_unset=True)
    given = {**vars(args), "model": model_of(args)}
    for name in EngineConfig.model_fields:
        value = given.get(name)
        if value is not None and name not in skip:
            document[name] = value
    return parse_config(document)


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = flag_of(name)
    text = _help(field).replace("%", "%%")
    kind, choices, is_list = _kind(field.annotation)
    if kind is bool:
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if kind in (int, float):
        kind = _Number(kind, f"without {flag}: {text.rpartition('Default: ')[2]}")
    elif choices is not None and name in _CHOICE_HINTS:
        kind = _ChoiceType(choices, _CHOICE_HINTS[name])
    group.add_argument(
        flag,
        *_ALIASES.get(name, ()),
        dest=name,
        type=kind,
        choices=choices,
        nargs="*" if is_list else None,
        default=None,
        help=text,
        metavar=None if choices else "JSON" if kind is _json_object else _metavar(name),
    )


def _metavar(name: str) -> str:
    return _METAVARS.get(name, name.rsplit("_", 1)[-1].upper())


def _help(field: FieldInfo) -> str:
    """Returns the field's description and its default. A default that explains nothing by itself is given in words."""
    description = field.description or ""
    if field.is_required():
        return f"{description} Required."
    if field.default is None and "Default: " in description:
        return description
    if field.default is None or field.default == ():
        return f"{description} Default: none."
    if isinstance(field.default, bool):
        return f"{description} Default: {'on' if field.default else 'off'}."
    shown = f"{field.default:.15g}" if isinstance(field.default, float) else field.default
    return f"{description} Default: {shown}."


class _Number:
    """A type for argparse. `otherwise`: advice at the end of the error message for a word such as `auto`."""

    def __init__(self, kind: Callable[[str], Any], otherwise: str) -> None:
        self._kind = kind
        self._otherwise = otherwise

    def __call__(self, text: str) -> Any:
        try:
            return self._kind(text)
        except ValueError as error:
            wanted = "a whole number" if self._kind is int else "a number"
            hint = f"; {self._otherwise.rstrip('.')}" if text in ("auto", "none", "None", "") else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}{hint}") from error


class _ChoiceType:
    """A type for argparse. Its error message names the choices. `otherwise`: advice at the end of the message."""

    def __init__(self, choices: Collection[str], otherwise: str) -> None:
        self._choices = choices
        self._otherwise = otherwise

    def __call__(self, text: str) -> str:
        if text not in self._choices:
            raise argparse.ArgumentTypeError(
                f"invalid choice: {text!r} (choose from {', '.join(self._choices)}); {self._otherwise}"
            )
        return text


def _kind(annotation: Any) -> tuple[Callable[[str], Any], list[str] | None, bool]:
    """Returns (type of one value, choices, whether the field is a list) for a field's annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return str, list(get_args(annotation)), False
    if get_origin(annotation) is dict:
        return _json_object, None, False
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], None, True
    return annotation, None, False


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)  # parse_config checks whether it is an object
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
