"""The settings of torch's threads: their number, and the time for which a thread without work spins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rayloom_engine.config import EngineConfig
from rayloom_engine.worker.start import set_threads

# After a parallel operation, the main thread sleeps, and the program measures the CPU microseconds of the other
# threads. It prints the 28th of 31 sorted figures, because on a busy machine most figures are 0.
MEASURE = """
import time
from rayloom_engine.config import EngineConfig
from rayloom_engine.worker.start import set_threads
set_threads(EngineConfig(model="unused", threads=2))
import torch
torch.set_num_threads(2)
numbers = torch.ones(400_000)
spins = []
for _ in range(31):
    torch.add(numbers, numbers, out=numbers)
    others_s = time.process_time() - time.thread_time()
    time.sleep(0.02)
    spins.append(time.process_time() - time.thread_time() - others_s)
print(1e6 * sorted(spins)[27])
"""


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_threads_are_shared_by_the_ranks_of_a_host_and_spin_briefly(environ: pytest.MonkeyPatch) -> None:
    environ.setattr("rayloom_engine.worker.start.usable_cores", lambda: 5)
    assert set_threads(EngineConfig(model="unused"), ranks_on_host=2) == 2
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("2", "2000")
    assert set_threads(EngineConfig(model="unused", threads=7), ranks_on_host=2) == 7


def test_engines_on_one_host_share_its_cores(environ: pytest.MonkeyPatch) -> None:
    environ.setattr("rayloom_engine.worker.start.usable_cores", lambda: 13)
    assert set_threads(EngineConfig(model="unused", engines_on_host=3)) == 4
    assert set_threads(EngineConfig(model="unused", engines_on_host=3), ranks_on_host=2) == 2
    assert set_threads(EngineConfig(model="unused", engines_on_host=16)) == 1
    assert set_threads(EngineConfig(model="unused", engines_on_host=3, threads=7)) == 7


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "PASSIVE")])
def test_what_the_environment_says_about_spinning_stands(environ: pytest.MonkeyPatch, name: str, value: str) -> None:
    environ.setenv(name, value)
    set_threads(EngineConfig(model="unused"))
    assert os.environ[name] == value
    assert os.environ.get("GOMP_SPINCOUNT") == (value if name == "GOMP_SPINCOUNT" else None)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP library there")
def test_a_waiting_thread_gives_its_core_back_within_a_fraction_of_a_millisecond(environ: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    # The figure is about 50 us. Without GOMP_SPINCOUNT it would be 2,600 us.
    assert float(done.stdout) < 400
