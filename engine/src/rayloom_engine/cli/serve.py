"""`rayloom-engine serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os

from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.common.process import set_up_logging
from rayloom_engine.executor_choice import choose_executor, job_place


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="rayloom-engine serve [MODEL] [flags]",
        description="Serves a model by an OpenAI-compatible API until Ctrl-C or SIGTERM.",
        allow_abbrev=False,
    )
    add_config_arguments(parser, is_server=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    if choose_executor(config, os.environ).name == "external" and (rank := job_place(config, os.environ).rank) > 0:
        from rayloom_engine.worker.job import serve_in_job

        if args.core is not None:
            args.core.discard()  # in a job, only the process of rank 0 has a core
        set_up_logging(f"rank{rank}", config.log_level)
        return serve_in_job(config)
    from rayloom_engine.supervisor.supervisor import Supervisor

    set_up_logging("supervisor", config.log_level)
    supervisor = Supervisor(config, args.core)
    logger = logging.getLogger(__name__)
    logger.info(
        "%s as %r: API at %s/v1, admin at %s",
        config.model,
        config.api_model_name,
        supervisor.api_url,
        supervisor.admin_url,
    )
    return supervisor.run()
