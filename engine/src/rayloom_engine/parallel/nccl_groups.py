"""NcclGroups: aborts the NCCL communicators of a process, even while one of their kernels waits for a peer."""

from __future__ import annotations

import os

from torch.distributed import ProcessGroup

# With this value ("CleanUpOnly"), NCCL's watchdog thread ends the communicator after an error. By default it ends the
# process, and the rank loses its weights.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


def keep_process_after_errors() -> None:
    """Lets this process survive an error of NCCL, unless the environment sets the variable. Call it before a join."""
    os.environ.setdefault(*_ERROR_HANDLING)


class NcclGroups:
    """Implements PeerWaits by ncclCommAbort. Not measured: a measurement needs two GPUs."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        """`groups`: all groups of this process. A group that `new_group` makes has a communicator of its own."""
        self._groups = groups

    def abort(self) -> None:
        for group in self._groups:
            group.abort()

    def release(self) -> None:
        self._groups = []
