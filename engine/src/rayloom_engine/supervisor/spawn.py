"""Starts a process of the engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


def spawn(module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in a new session, so that Ctrl-C in a terminal reaches only the supervisor."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_ignore_sigint,
    )


def _ignore_sigint() -> None:
    """Ignores SIGINT. Runs in the child process.

    If SIGINT were not ignored, it would print a KeyboardInterrupt trace during the child's imports. The front sets its
    own handler once it can end its requests.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
