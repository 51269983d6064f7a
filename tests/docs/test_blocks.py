"""Every shell, Python and YAML block of README.md and docs/ works unchanged.

The block that starts the server runs in the background. Meanwhile other blocks send requests to this server. Then the
server gets Ctrl-C, and all of its processes must end. `make test` inside `make test` would never end. So targets of
make are only expanded by `make -n`, except `run`. Benchmarks only parse their flags (`rt_blocks.runnable`).

Benchmarks and Python clients run in this process. In a process of its own, most of their CPU time would go into
imports.
"""

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from rayloom_engine.cli import commands
from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.api.spec import parse
from rt_blocks import Block, blocks_of, install_stand_in_curl, is_benchmark, runnable
from rt_server import wait_until

ROOT = Path(__file__).resolve().parents[2]
ON_A_CLUSTER = ROOT / "docs" / "quickstart-kubernetes.md"  # its blocks are run by e2e/pods/test_service.py
FILES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ON_A_CLUSTER})]
BLOCKS = [block for path in FILES if path.exists() for block in blocks_of(ROOT, path)]
SHELL = [block for block in BLOCKS if block.language in ("bash", "sh", "shell", "console")]
SERVERS = [block for block in SHELL if block.is_server]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.installs]
CLIENTS = [block for block in SHELL if block.is_client]
START_S = 240  # the first start converts the model; the limit is for a slow machine with other work
STOP_S = 30

# These tests may run inside make. The flags and variables of that make must not affect the make that the tests start.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}


def by_name(block):
    return block.name


def run_shell(block, first_on_path=None):
    script = "\n".join(runnable(command) for command in block.commands if not is_benchmark(command))
    environment = dict(ENVIRONMENT)
    if first_on_path is not None:
        environment["PATH"] = f"{first_on_path}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block.name}:\n{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_quick_start_is_there():
    readme = [block for block in SHELL if block.file == "README.md"]

    assert readme[0].commands == ["make run"]
    assert readme[1].is_client
    assert readme[2].commands == ["make test"]


def test_every_shell_block_is_marked_bash():
    assert [block.name for block in BLOCKS if block.language not in ("bash", "python", "yaml", "text", "json")] == []


@pytest.mark.parametrize(
    "block",
    [block for block in SHELL if not block.is_server and not block.is_client and not block.is_engine],
    ids=by_name,
)
def test_a_shell_block_works(block, capsys):
    if any(not is_benchmark(command) for command in block.commands):
        run_shell(block)
    for command in filter(is_benchmark, block.commands):
        with pytest.raises(SystemExit) as end:
            commands.run(shlex.split(runnable(command))[1:])
        assert end.value.code == 0, capsys.readouterr().err
        assert capsys.readouterr().out.startswith("usage: rayloom-engine bench")


@pytest.mark.parametrize("block", [block for block in PYTHON if not block.is_client], ids=by_name)
def test_a_python_block_works(block):
    run_python(block)


def run_client(block):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})

    check_answer(block, output.getvalue())


def run_python(block):
    done = subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    check_answer(block, done.stdout)


def check_answer(block, output):
    assert "Paris" in output or "Paris" not in block.text


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=by_name)
def test_a_manifest_block_is_valid(block):
    for document in yaml.safe_load_all(block.text):
        (parse_gateway if document["kind"] == "LLMGateway" else parse)(document)


@contextlib.contextmanager
def started(script, log):
    """A server in a session of its own, started by shell commands. The last command keeps running."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_all(process)


def interrupt(process, log):
    """Sends Ctrl-C and waits until all processes have ended. Returns the number of these processes."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    # A terminal sends Ctrl-C to the whole foreground process group, so the test does this, too.
    os.killpg(process.pid, signal.SIGINT)
    started_at = time.monotonic()
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    print(f"gone {time.monotonic() - started_at:.2f} s after Ctrl-C")
    assert alive == [], log.read_text()
    return len(family)


@pytest.mark.parametrize("server", SERVERS, ids=by_name)
def test_the_server_answers_its_blocks_and_ends_on_ctrl_c(server, tmp_path):
    log = tmp_path / "output"
    with started(f"exec {server.commands[0]}", log) as process:
        wait_for("Serving. Press Ctrl-C to stop.", process, log)
        assert "The capital of France is Paris." in log.read_text()
        stand_in = install_stand_in_curl(tmp_path / "bin")
        for block in CLIENTS:
            answer = run_shell(block, stand_in)
            assert answer
            if shutil.which("curl"):  # a machine without curl has only the stand-in
                assert run_shell(block)
        for block in PYTHON:
            if block.is_client:
                run_client(block)
        assert interrupt(process, log) >= 5  # make, local, supervisor, front, core


@pytest.mark.parametrize("block", [block for block in SHELL if block.is_engine], ids=by_name)
def test_an_engine_becomes_ready_and_ends_on_ctrl_c(block, tmp_path):
    *before, last = block.commands
    log = tmp_path / "output"
    with started("\n".join([*before, f"exec {last}"]), log) as process:
        wait_for(" ready: ", process, log)
        assert interrupt(process, log) >= 5  # supervisor, front, core and two ranks


def wait_for(sign, process, log):
    def has_come():
        if sign in log.read_text():
            return True
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        return False

    wait_until(has_come, START_S, lambda: f"not serving after {START_S} s:\n{log.read_text()}")


def end_all(process):
    """Ends all processes of the server, even if the test has failed."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        for member in family:
            if member.is_running():
                member.kill()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_blocks_are_found_with_their_lines(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("a\n\n```bash\n# why\nmake \\\n  lint\nls\n```\ntext\n```yaml\na: 1\n```\n")

    assert blocks_of(tmp_path, path) == [
        Block(file="x.md", line=4, language="bash", text="# why\nmake \\\n  lint\nls\n"),
        Block(file="x.md", line=11, language="yaml", text="a: 1\n"),
    ]
    assert blocks_of(tmp_path, path)[0].commands == ["make lint", "ls"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("make test", "make -n test"),
        ("make run", "make run"),
        (".venv/bin/rayloom-engine bench --scale 0.5", ".venv/bin/rayloom-engine bench --scale 0.5 --help"),
        (".venv/bin/rayloom-engine inspect", ".venv/bin/rayloom-engine inspect"),
    ],
)
def test_only_what_cannot_run_inside_a_test_is_changed(command, expected):
    assert runnable(command) == expected
