"""EngineConfig's fields as flags: `max_model_len` is `--max-model-len`, with the same names, checks and help."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from rayloom_engine.config import EngineConfig, load_config, parse_config

_SERVING_ONLY = ("host", "port", "admin_host", "admin_port", "admin_token_file", "api_key_file", "cors_allowed_origins")


def add_config_arguments(parser: argparse.ArgumentParser, *, is_server: bool) -> None:
    """A flag for every field, and --config for the whole document. Flags win over the document."""
    parser.add_argument("--config", type=Path, help="JSON file with an EngineConfig document; flags win over it")
    for name, field in EngineConfig.model_fields.items():
        if name == "version" or (not is_server and name in _SERVING_ONLY):
            continue
        kind, choices, is_list = _kind(field.annotation)
        flag = f"--{name.replace('_', '-')}"
        text = f"{field.description or ''} [{field.default}]".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(
                flag,
                dest=name,
                type=kind,
                choices=choices,
                nargs="*" if is_list else None,
                default=None,
                help=text,
                metavar=None if choices else name.rsplit("_", 1)[-1].upper(),
            )


def config_from(args: argparse.Namespace, skip: Collection[str] = ()) -> EngineConfig:
    """The EngineConfig of parsed flags. Raises ConfigError."""
    document: dict[str, Any] = {}
    if args.config is not None:
        document = load_config(args.config).model_dump(mode="json", exclude_unset=True)
    for name in EngineConfig.model_fields:
        value = getattr(args, name, None)
        if value is not None and name not in skip:
            document[name] = value
    return parse_config(document)


def _kind(annotation: Any) -> tuple[Callable[[str], Any], list[str] | None, bool]:
    """(type of one value, choices, whether it is a list) of a field's annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str, list(get_args(annotation)), False
    if get_origin(annotation) is dict:
        return _json_object, None, False
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], None, True
    return annotation, None, False


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)  # that it is an object is checked with the rest of the document
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
