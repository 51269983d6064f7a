"""The arguments of a process that was started before its arguments were known (supervisor/prepared.py)."""

from __future__ import annotations

import json
import socket
import sys

ARGUMENTS_FD_FLAG = "--arguments-fd"  # socket from which the process reads its arguments; always the first flag
SENDER_FLAG = "--parent"  # process id of the sender; always the second flag
_MOST_FDS = 16
_PART_BYTES = 65536


def sender_of(arguments: list[str]) -> int | None:
    """Returns the process id of the sender of the late arguments; None if `arguments` are complete.

    The message with the other arguments is read only after the imports. But if the sender ends during the imports, this
    process must end, too. So the id is not in this message, but an argument itself.
    """
    is_late = arguments[:1] == [ARGUMENTS_FD_FLAG] and arguments[2:3] == [SENDER_FLAG]
    return int(arguments[3]) if is_late else None


def late_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments with which the process shall run: `arguments`, unless they begin with ARGUMENTS_FD_FLAG.

    With this flag, waits for the message with the arguments. If the socket closes before the message has arrived, the
    sender has ended, so this process exits.
    """
    if arguments[:1] != [ARGUMENTS_FD_FLAG]:
        return arguments
    with socket.socket(fileno=int(arguments[1])) as receiver:
        data, fds, _, _ = socket.recv_fds(receiver, _PART_BYTES, _MOST_FDS)
        while part := receiver.recv(_PART_BYTES):
            data += part
    if not data:
        sys.exit(0)
    message = json.loads(data)
    copies = {str(theirs): str(ours) for theirs, ours in zip(message["fds"], fds, strict=True)}
    flags = ["", *message["arguments"]]
    return [
        copies[value] if flag.endswith("-fd") else value
        for flag, value in zip(flags, message["arguments"], strict=False)
    ]
