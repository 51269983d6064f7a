"""`python -m rayloom_engine.launcher.local_ray`: runs Ray on this machine for this server, if no cluster is configured.

This is a separate process, so that Ray outlives the launcher. Ray's processes end when this process ends. If this
process was killed with SIGKILL, Ray's agents end within about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import NoReturn

import psutil

from rayloom_engine.common.process import end_with_parent, set_up_logging
from rayloom_engine.config import load_config
from rayloom_engine.launcher.lean_ray import leave_out_agents
from rayloom_engine.worker.machine import usable_cores

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; the engine stores nothing in it
_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 5.0
# Ray counts as ended after this many failed connections in a row. One connection may also fail because the backlog of a
# live control store is full.
_MAX_FAILURES = 2


def address_file(run_dir: Path) -> Path:
    """Returns the path of the file with HOST:PORT of the running Ray. The file is absent while no Ray runs."""
    return run_dir / "ray_address"


def use_private_ray(run_dir: Path) -> None:
    """Configures Ray, in this process and its children, so that other users of the machine cannot connect to Ray.

    Call before Ray is imported. By default, Ray's token is in the home folder, where others may be able to read it, and
    Ray's servers listen on every address of the machine. Ranks keep the priority of this process. If memory runs
    out, only the kernel kills ranks, not Ray.
    """
    # This variable may contain the token of another Ray. This server's Ray would use it instead of the file.
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(run_dir / "ray_token"),
            # Despite its name, this variable also has an effect on Linux: the node gets the address 127.0.0.1, so all
            # servers of the node listen on loopback only. `ray.init(_node_ip_address="127.0.0.1")` sets a different
            # address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Added to the niceness of Ray's workers, which read it from the environment of their raylet. With the
            # default of 15, every other process of the machine takes CPU time from the ranks.
            "RAY_worker_niceness": "0",
            # Switches Ray's memory monitor off. The monitor kills ranks when all processes of the machine together use
            # 95 % of the memory, even if most of it belongs to other processes.
            "RAY_memory_monitor_refresh_ms": "0",
        }
    )


def _write_token(run_dir: Path) -> None:
    """Writes a new token for Ray. An existing file stays: the launcher uses its token even after a restart of Ray."""
    path = run_dir / "ray_token"
    if not path.exists():
        draft = run_dir / "ray_token.new"
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        draft.replace(path)


def wait_while_ray_runs() -> None:
    """Returns once Ray's control store or this machine's raylet has ended. This process must have joined this Ray."""
    import ray

    node = ray._private.worker.global_worker.node
    assert node is not None, "this process has joined no Ray"
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    num_failures = 0
    with contextlib.suppress(ConnectionError, FileNotFoundError), socket.socket(socket.AF_UNIX) as raylet:
        raylet.settimeout(_POLL_SECONDS)
        raylet.connect(node.raylet_socket_name)
        while num_failures < _MAX_FAILURES:
            try:
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
                num_failures = 0
            except OSError:
                num_failures += 1
            with contextlib.suppress(TimeoutError):
                if not raylet.recv(1):  # the raylet has ended: it closed the connection
                    return


def _end_with_ray(code: int) -> NoReturn:
    """Kills all processes of Ray, none of which has state to keep, and exits.

    Ray's own shutdown is not used, because this shutdown kills the raylet after a second. On a busy machine the raylet
    then has no time to record that it ends on purpose. Ray's agents would then treat the raylet's end as a fault. For a
    minute, they would try to report the fault to a control store that is gone, too.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(code)  # Ray's exit handlers would wait for the killed processes


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.launcher.local_ray", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--parent", type=int, required=True, help="id of the parent; this process ends with it")
    args = parser.parse_args()
    end_with_parent(args.parent, signal.SIGTERM)
    config = load_config(args.run_dir / "config.json")
    set_up_logging("ray", config.log_level)
    address_file(args.run_dir).unlink(missing_ok=True)
    _write_token(args.run_dir)
    use_private_ray(args.run_dir)
    import ray

    if config.ray_runtime_env is None:
        leave_out_agents()
    try:
        ray.init(
            address="local",
            _temp_dir=str(args.run_dir / "ray"),  # Ray's default is a folder that every user may write to
            num_cpus=max(config.world_size, usable_cores()),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            configure_logging=False,
        )
        signal.signal(signal.SIGTERM, lambda *_: _end_with_ray(0))  # replaces Ray's handler, which only prints a trace
        draft = args.run_dir / "ray_address.new"
        draft.write_text(ray.get_runtime_context().gcs_address)
        draft.replace(address_file(args.run_dir))
        wait_while_ray_runs()
        # removed, so that a launcher that starts now waits for the next Ray
        address_file(args.run_dir).unlink(missing_ok=True)
    except Exception:
        logger.exception("Ray did not start")
    _end_with_ray(1)


if __name__ == "__main__":
    main()
