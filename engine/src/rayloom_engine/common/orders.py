"""The arguments of a process that was started before they were known (supervisor/prepared.py)."""

from __future__ import annotations

import json
import socket
import sys

ORDERS_FLAG = "--orders-fd"  # socket from which the process reads its arguments; always the first flag
SENDER_FLAG = "--parent"  # process id of the sender; always the second flag
_MOST_FDS = 16
_PART_BYTES = 65536


def sender_of(arguments: list[str]) -> int | None:
    """Returns the process id of the sender of the order; None if no order will come, because the arguments are whole.

    The process ends with its sender from the beginning: the order, which is read after the imports, comes too late.
    """
    return int(arguments[3]) if arguments[:1] == [ORDERS_FLAG] and arguments[2:3] == [SENDER_FLAG] else None


def ordered_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments that the process should run with, which are mostly `arguments` themselves.

    If they begin with ORDERS_FLAG, waits for the order. Exits if none comes, because the sender has ended.
    """
    if arguments[:1] != [ORDERS_FLAG]:
        return arguments
    with socket.socket(fileno=int(arguments[1])) as orders:
        data, fds, _, _ = socket.recv_fds(orders, _PART_BYTES, _MOST_FDS)
        while part := orders.recv(_PART_BYTES):
            data += part
    if not data:
        sys.exit(0)
    order = json.loads(data)
    copies = {str(theirs): str(ours) for theirs, ours in zip(order["fds"], fds, strict=True)}
    flags = ["", *order["arguments"]]
    return [
        copies[value] if flag.endswith("-fd") else value for flag, value in zip(flags, order["arguments"], strict=False)
    ]
