"""Processes that the bench starts: the bench measures their memory and stops all of them.

The real engine is started in test_bench_own_engine.py.
"""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rayloom_bench.server import Server, ServerFailed, free_ports, stop_tree, tree_cpu_seconds, tree_pss_bytes

CHILD = "import signal, time; {ignore}; print('ready', flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["polite", "deaf to SIGTERM"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process and the pid of its child."""
    source = PARENT.format(child=CHILD.format(ignore=request.param))
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child_pid = int(process.stdout.readline())
    yield process, child_pid
    stop_tree(process, grace_s=0)
    process.stdout.close()


def test_memory_is_summed_over_the_whole_tree(family: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child_pid = family
    sizes = tree_pss_bytes(process.pid)
    assert sorted(int(name.rsplit(" ", 1)[1]) for name in sizes) == sorted([process.pid, child_pid])
    assert min(sizes.values()) > 1_000_000  # a Python process holds some megabytes


def test_cpu_time_of_a_child_counts_while_it_lives_and_after_its_end() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)"
    source = (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {work!r}]);"
        f"child = subprocess.Popen([sys.executable, '-c', {work!r} + chr(10) + 'time.sleep(600)']); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline(), process.stdout.readline()] == [b"done\n", b"done\n"]
        assert tree_cpu_seconds(process.pid) >= 0.55  # psutil counts in hundredths of a second
    finally:
        stop_tree(process, grace_s=0)
        process.stdout.close()


def test_the_model_of_another_program_is_not_its_name() -> None:
    process = subprocess.Popen(["bash", "-c", "read", "-m", "/folder/model.gguf"], stdin=subprocess.PIPE)
    try:
        assert list(tree_pss_bytes(process.pid)) == [f"bash {process.pid}"]
    finally:
        process.communicate(timeout=30)


def test_no_process_of_the_tree_is_left(family: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child_pid = family
    child = psutil.Process(child_pid)
    stop_tree(process, grace_s=0.5)
    assert process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_server_that_ends_is_reported_with_its_log(tmp_path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("line one\nno such model\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(78)"])
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    server = Server(process=process, started_s=0.0, url=url, admin_url=url, log=log)
    with pytest.raises(ServerFailed, match=r"exit code 78:\nline one\nno such model"):
        server.wait_ready(timeout_s=60)


def test_server_that_is_never_ready_is_reported(tmp_path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("loading\n")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.raises(ServerFailed, match=r"not ready after 0 s"):
            Server(process=process, started_s=0.0, url=url, admin_url=url, log=log).wait_ready(timeout_s=0)
    finally:
        stop_tree(process)
