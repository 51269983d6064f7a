"""`rayloom-engine gateway`: one API port in front of several engines. A stream outlives the engine that began it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from rayloom_engine.cli.arguments import add_fields
from rayloom_engine.common.process import set_up_logging
from rayloom_engine.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from rayloom_engine.front.gateway.gateway_config import GatewaySettings, front_fields

    parser = commands.add_parser(
        "gateway",
        help="serve several engines at one port",
        usage="rayloom-engine gateway --engine NAME=HOST:PORT ... | --engines-dns HOST:PORT\n"
        "                              --key-file FILE --cache-dir DIR [flags]\n"
        "       rayloom-engine gateway --models-file FILE --cache-dir DIR [flags]",
        description="Serves the API in front of several engines of one model, or of the models in a file. A stream "
        "whose engine ends continues on another one, or waits for one.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON file with these settings; flags win over it")
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engine",
        action="append",
        metavar="NAME=HOST:PORT",
        help="an engine, by the host and port of its --front-host and --front-port; may be given several times",
    )
    own = {name: field for name, field in GatewaySettings.model_fields.items() if name not in ("version", "engines")}
    add_fields(group, own)
    front = parser.add_argument_group("ports, keys, limits and text, as of `rayloom-engine serve`")
    add_fields(front, front_fields())
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
    from rayloom_engine.front.gateway.process import run_gateway
    from rayloom_engine.supervisor.sockets import bind_sockets, url_of

    config = parse_gateway_config(_document(args))
    set_up_logging("gateway", config.front.log_level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    api, admin = bind_sockets(config.front)
    logger = logging.getLogger(__name__)
    subject = config.gateway.models_file or repr(config.front.served_model_name)
    logger.info("gateway for %s: API at %s/v1, admin at %s", subject, url_of(api), url_of(admin))
    return run_gateway(config, api, admin)


def _document(args: argparse.Namespace) -> dict[str, Any]:
    from rayloom_engine.front.gateway.gateway_config import FRONT_FIELDS, GatewaySettings, load_gateway_document

    document = {} if args.config is None else load_gateway_document(args.config)
    for name in (*GatewaySettings.model_fields, *FRONT_FIELDS):
        value = getattr(args, name, None)
        if value is not None:
            document[name] = value
    if args.engine is not None:
        document["engines"] = {**document.get("engines", {}), **_engines(args.engine)}
    return document


def _engines(given: list[str]) -> dict[str, str]:
    engines = {}
    for item in given:
        name, equals, place = item.partition("=")
        if not name or not equals:
            raise ConfigError(f"--engine {item!r}: write NAME=HOST:PORT, such as first=10.0.0.7:8002")
        engines[name] = place
    return engines
