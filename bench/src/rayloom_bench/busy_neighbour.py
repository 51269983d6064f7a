"""A process that keeps one core busy, as another program on the machine would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

# Checks once in a while that the bench still runs, so that a killed bench leaves no busy process behind.
SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_neighbour() -> Iterator[psutil.Process]:
    """Yields a process that computes without a pause until the block ends.

    It has the priority and the cores of this process.
    """
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", SPIN], stdin=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
