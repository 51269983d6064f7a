"""Where pods of the stand-ins are: each at an address of its own, which leads to this machine's loopback.

Kubernetes lists no endpoint on a loopback address, and without root no other address leads here. So pods are told to
have 198.18.0.0/15, a range that is nobody's (https://www.rfc-editor.org/rfc/rfc2544), and an operator that calls
`redirect()` finds 198.X.Y.Z at 127.X.Y.Z, as does one that is started as `python FILE -m MODULE ...` or `python FILE -c
CODE ...` with this file.
Whatever port it asks at, it gets that of the variable PORT, so that several stand-ins can run side by side.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

PORT = "RAYLOOM_STAND_IN_PORT"
_PODS, _LOOPBACK = ("198.18.", "198.19."), ("127.18.", "127.19.")
_NUM = 2 * 240 * 250


def pod_ip(number: int) -> str:
    """The address of the pod with this number; after 120,000 of them the first comes again."""
    number %= _NUM
    return f"{_PODS[number // 60000]}{number // 250 % 240}.{1 + number % 250}"


def pod_ip_at(address: str) -> str:
    """The pod's address that an address of this machine stands for; empty when it is no such."""
    return f"198{address.removeprefix('127')}" if address.startswith(_LOOPBACK) else ""


def redirect() -> None:
    """From here on this process's operator finds the stand-ins."""
    status_request = importlib.import_module("rayloom_operator.engines.request")
    ask = status_request.ask

    async def ask_here(ip: str, port: int, *more: Any, **options: Any) -> Any:
        if ip.startswith(_PODS):
            ip, port = f"127{ip.removeprefix('198')}", int(os.environ[PORT])
        return await ask(ip, port, *more, **options)

    # In the modules, too, that have it from there already.
    for module in [module for name, module in sys.modules.items() if name.startswith("rayloom_operator.")]:
        if vars(module).get("ask") is ask:
            vars(module)["ask"] = ask_here


def _main(kind: str, what: str, *arguments: str) -> None:
    # The folder of this file is no place for anybody's modules.
    del sys.path[0]
    redirect()
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<command>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main(*sys.argv[1:])
