"""Addresses of simulated pods: each pod has its own address, which the operator reaches on this machine's loopback.

EndpointSlices must not have loopback addresses, and only root could add addresses to this machine. So the status of a
pod has an address in 198.18.0.0/15, a range reserved for benchmarks (https://www.rfc-editor.org/rfc/rfc2544). After a
call of `redirect()`, the operator connects to 127.X.Y.Z instead of 198.X.Y.Z. An operator connects in the same way if
it is started as `python FILE -m MODULE ...` or `python FILE -c CODE ...`, where FILE is this file. The environment
variable PORT replaces the port of each request, so that several sets of engines can run side by side.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

PORT = "RAYLOOM_SIMULATED_ENGINES_PORT"
_PODS, _LOOPBACK = ("198.18.", "198.19."), ("127.18.", "127.19.")
_NUM = 2 * 240 * 250


def pod_ip(number: int) -> str:
    """The address of the pod with this number. Addresses repeat after 120,000 pods."""
    number %= _NUM
    return f"{_PODS[number // 60000]}{number // 250 % 240}.{1 + number % 250}"


def pod_ip_at(address: str) -> str:
    """The pod's address for a loopback address of this machine; empty for any other address."""
    return f"198{address.removeprefix('127')}" if address.startswith(_LOOPBACK) else ""


def redirect() -> None:
    """Makes this process's operator connect to simulated engines from now on."""
    status_request = importlib.import_module("rayloom_operator.engines.request")
    ask = status_request.ask

    async def ask_here(ip: str, port: int, *more: Any, **options: Any) -> Any:
        if ip.startswith(_PODS):
            ip, port = f"127{ip.removeprefix('198')}", int(os.environ[PORT])
        return await ask(ip, port, *more, **options)

    # Modules that have imported the function by name are patched, too.
    for module in [module for name, module in sys.modules.items() if name.startswith("rayloom_operator.")]:
        if vars(module).get("ask") is ask:
            vars(module)["ask"] = ask_here


def _main(kind: str, what: str, *arguments: str) -> None:
    # Python has put the folder of this file first on sys.path. The operator must not import the modules in this folder.
    del sys.path[0]
    redirect()
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<command>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main(*sys.argv[1:])
