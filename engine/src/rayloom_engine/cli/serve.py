"""`rayloom-engine serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging

from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.process import set_up_logging


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    add_config_arguments(parser, is_server=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rayloom_engine.supervisor import Supervisor

    config = config_from(args)
    set_up_logging("supervisor", config.log_level)
    supervisor = Supervisor(config)
    logger = logging.getLogger(__name__)
    logger.info(
        "%s as %r: API at %s/v1, admin at %s",
        config.model,
        config.api_model_name,
        supervisor.api_url,
        supervisor.admin_url,
    )
    return supervisor.run()
