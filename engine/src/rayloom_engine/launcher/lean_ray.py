"""`python -m rayloom_engine.launcher.lean_ray start ...`: Ray's command, without the processes that no engine uses.

Ray starts a dashboard beside its head, and two agents beside each raylet. If Ray is installed without its extras, the
dashboard and one agent serve nobody. The other agent prepares runtime environments, which ranks in pods do not have.
Each process takes 0.6 CPU seconds to start, and 80 to 100 MiB of memory.

A raylet does not run without agents: it waits for the files with the ports of the agents, and ends when an agent ends.
So each agent is replaced by a program that only waits, and the files are written before the raylet starts.
"""

from __future__ import annotations

import sys
from typing import Any

# This program runs until the end of its standard input, a pipe that closes when the raylet ends.
_IDLE_PROGRAM = "cat"
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
# Ray's command imports these modules for subcommands other than `start`. The imports take half a second of CPU time.
# Ray's command also works if it cannot import such a module; it then lacks the module's subcommand.
_OTHER_SUBCOMMANDS = ("ray.dashboard.modules.job.cli", "ray.serve.scripts", "ray.util.state.state_cli")


def leave_out_agents() -> None:
    """Makes this process start Ray nodes without a dashboard and without agents.

    Does nothing if Ray is installed with its extras, or if this version of Ray starts its agents in another way.
    """
    from ray import _raylet
    from ray._private import services

    raylet: Any = _raylet  # a compiled module, whose type stubs lack these names
    try:
        persist_port, runtime_envs_port = raylet.persist_port, raylet.RUNTIME_ENV_AGENT_PORT_NAME
        unused = (
            raylet.METRICS_AGENT_PORT_NAME,
            raylet.METRICS_EXPORT_PORT_NAME,
            raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        )
    except AttributeError:
        return
    start_process, start_api_server = services.start_ray_process, services.start_api_server

    def start_lean_process(command: list[str], *args: Any, **kwargs: Any) -> Any:
        flags = dict(word.split("=", 1) for word in command if "=" in word)
        if "--minimal" not in flags.get(_AGENTS[0], "").split():
            return start_process(command, *args, **kwargs)
        ports = dict.fromkeys(unused, -1)  # Ray's sign for a port that nobody serves
        ports[runtime_envs_port] = int(flags["--runtime_env_agent_port"])
        for name, port in ports.items():
            persist_port(flags["--session_dir"], flags["--node_id"], name, port)
        others = [word for word in command if word.partition("=")[0] not in _AGENTS]
        return start_process([*others, *(f"{agent}={_IDLE_PROGRAM}" for agent in _AGENTS)], *args, **kwargs)

    def start_no_api_server(include_dashboard: bool | None, *args: Any, **kwargs: Any) -> Any:
        from ray._private.utils import get_dashboard_dependency_error

        if include_dashboard or get_dashboard_dependency_error() is None:
            return start_api_server(include_dashboard, *args, **kwargs)
        return "", None  # no URL and no process

    services.start_ray_process = start_lean_process
    services.start_api_server = start_no_api_server


def main() -> None:
    # An import of a module that is None raises ImportError.
    sys.modules.update(dict.fromkeys(_OTHER_SUBCOMMANDS))  # type: ignore[arg-type]
    from ray.scripts.scripts import main as ray_command

    leave_out_agents()
    sys.argv[0] = "ray"
    ray_command()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
