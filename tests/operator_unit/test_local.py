"""`rayloom-operator local` as a process with a fake engine: its start, its sample request, and all ways to end it.

The tests of the README's blocks run it with the real engine.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from rayloom_operator.errors import SpecError
from rayloom_operator.local.serve import _check
from rt_local import Local, install_fake_engine, wait_until_gone, write_manifest
from rt_operator import make_service


@pytest.fixture
def start(tmp_path):
    """Starts `local` with a scenario of the fake engine. Processes that still run after the test are killed."""
    started = []

    def start_local(scenario="", *flags, spec="", python=None, **environment):
        if scenario:
            environment["FAKE_ENGINE"] = scenario
        environment["FAKE_ENGINE_PIDS"] = str(tmp_path / "pids")
        manifest = write_manifest(tmp_path, environment, spec)
        started.append(Local(tmp_path, manifest, *flags, python=python))
        return started[-1]

    yield start_local
    for local in started:
        local.kill()
    pids = tmp_path / "pids"
    for pid in pids.read_text().split() if pids.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def engine_pids(tmp_path):
    """The process ids of the fake engine and of its child, once it serves."""
    return lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def test_local_shows_the_start_then_a_sample_then_serves(start):
    local = start()
    local.wait_for("Serving. Press Ctrl-C to stop.")

    for text in (
        "import: done in 0.5 s\n",
        "load: done in 0.5 s (270.0 MB)\n",
        "Model:  tiny (builtin://smollm2-135m, LlamaForCausalLM, 134.5 M parameters, bfloat16, computed in float32, "
        "8192 tokens of context)\n",
        "> The capital of France is Paris.\n",
        """    -d '{"model": "tiny", "messages": [{"role": "user", "content": "Say hello."}], "stream": true}'\n""",
    ):
        assert text in local.output
    url = local.output.split("URL:")[1].split()[0]
    assert f"  curl -N {url}/chat/completions \\\n" in local.output
    assert f"Page:   {url.removesuffix('/v1')}/ui\n" in local.output


def test_local_shows_that_weights_are_quantised(start):
    local = start(spec="  engine: {args: {quantization: int8}}")
    local.wait_for("Serving.")

    assert "134.5 M parameters, int8 from bfloat16, computed in float32, " in local.output


def test_the_engine_gets_the_manifest_as_its_config_and_environment(start):
    local = start(spec="  drainSeconds: 7", RAYLOOM_API_KEYS="first, second")
    local.wait_for("Serving.")
    (folder,) = local.temporary.glob("rayloom-*")
    log = (folder / "engine.log").read_text()

    assert '"drain_seconds": 7' in log
    assert '"ui": true' in log
    assert '"served_model_name": "tiny"' in log
    assert '"temperature": 0' in log
    assert log.rstrip().endswith("Bearer first")
    assert "-H 'Authorization: Bearer YOUR_KEY'" in local.output


def test_a_pod_template_has_no_effect_and_a_warning(start):
    local = start(spec="  podTemplate: {worker: {spec: {runtimeClassName: nvidia}}}")
    local.wait_for("Serving.")

    assert "spec.podTemplate has no effect without a cluster: there are no pods.\n" in local.output


def test_without_a_sample_no_request_is_sent(start):
    local = start("", "--no-sample")
    local.wait_for("Serving.")
    (folder,) = local.temporary.glob("rayloom-*")

    assert "Sample" not in local.output
    assert "asked:" not in (folder / "engine.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_leaves_no_process_and_no_file(start, engine_pids, number):
    local = start()
    local.wait_for("Serving.")
    local.signal(number)

    assert local.exit_code() == 0
    wait_until_gone(*engine_pids())
    assert list(local.temporary.iterdir()) == []
    assert "killed" not in local.output


def test_an_engine_that_ignores_the_stop_is_killed_with_its_children(start, engine_pids):
    local = start("stubborn")
    local.wait_for("Serving.")
    local.signal(signal.SIGINT)

    assert local.exit_code() == 0
    wait_until_gone(*engine_pids())
    assert "The engine did not stop in time and was killed." in local.output


def test_a_stop_during_the_start_is_a_clean_stop(start, engine_pids):
    local = start("hangs")
    local.wait_for("load: done")
    local.signal(signal.SIGINT)

    assert local.exit_code() == 0
    wait_until_gone(*engine_pids())
    assert "Traceback" not in local.output


def test_an_engine_whose_operator_is_killed_ends_too(start, engine_pids):
    local = start()
    local.wait_for("Serving.")
    engine, _ = engine_pids()
    local.kill()

    wait_until_gone(engine)  # this file does not test that the engine's child ends with the engine


def test_an_engine_that_cannot_start_is_shown_with_the_end_of_its_log(start):
    local = start("crash")

    assert local.exit_code() == 3
    assert "rayloom-operator: the engine exited with code 3 before it served" in local.output
    assert "  line 11\n" in local.output
    assert "  line 40\n" in local.output
    assert "  line 10\n" not in local.output


def test_a_failed_status_is_shown_with_its_reason(start, engine_pids):
    local = start("failed")

    assert local.exit_code() == 1
    wait_until_gone(*engine_pids())
    assert "rayloom-operator: the engine could not start: the weights are broken" in local.output


@pytest.mark.parametrize(
    ("scenario", "code", "reason"),
    [("dies", 7, "exited with code 7"), ("killed", 137, "was killed by SIGKILL")],
)
def test_the_exit_code_is_that_of_an_engine_that_exits(start, engine_pids, scenario, code, reason):
    local = start(scenario)

    assert local.exit_code() == code
    wait_until_gone(*engine_pids())
    assert f"rayloom-operator: the engine {reason} while serving" in local.output


def test_a_failed_sample_is_printed_and_the_engine_keeps_serving(start):
    local = start("bad_sample")
    local.wait_for("Serving.")

    assert "The sample request failed: the engine sent an error: out of luck" in local.output


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_busy_port_is_refused_with_the_cure(start, flag):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        local = start("", flag, str(port))
        code = local.exit_code()

    assert code == 1
    assert f"rayloom-operator: port {port} on 127.0.0.1 cannot be used (Address already in use)" in local.output
    assert f"choose another one with {flag} PORT" in local.output


def test_one_port_cannot_be_used_twice(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    local = start("", "--port", port, "--admin-port", port)

    assert local.exit_code() == 1
    assert f"port {port} is given twice; choose another one with --admin-port PORT" in local.output


def test_an_invalid_manifest_is_refused_before_any_process_starts(start):
    local = start(spec="  replicas: two")

    assert local.exit_code() == 2
    assert "  spec.replicas: 'two' is not allowed; this must be a whole number\n" in local.output
    assert list(local.temporary.iterdir()) == []


def test_a_spec_that_needs_a_cluster_is_refused_before_any_process_starts(start):
    local = start(spec="  auth: {apiKeySecretRef: {name: keys, key: keys}}")

    assert local.exit_code() == 2
    assert "  spec.auth: Secrets exist only in a cluster; set RAYLOOM_API_KEYS to the keys, " in local.output
    assert list(local.temporary.iterdir()) == []


def test_a_model_in_a_claim_is_refused_with_the_cure():
    with pytest.raises(SpecError, match="use a file:// path to serve the model locally"):
        _check(make_service(model={"source": "pvc://claim"}), {})


def test_a_missing_engine_is_an_error_with_the_cure(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    local = start(python=tmp_path / "elsewhere" / "python")

    assert local.exit_code() == 1
    assert f"rayloom-engine is not installed: it is neither in {tmp_path / 'elsewhere'} nor on PATH" in local.output


def test_a_second_ctrl_c_does_not_disturb_the_stop(start, engine_pids):
    local = start()
    local.wait_for("Serving.")
    local.signal(signal.SIGINT)
    local.signal(signal.SIGINT)

    assert local.exit_code() == 0
    wait_until_gone(*engine_pids())
    assert "killed" not in local.output
    assert "Traceback" not in local.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_signal_that_arrives_while_python_exits_does_not_change_the_exit_code(number):
    program = f"""
import os
from rayloom_operator.local.signals import StopSignals

class LastObject:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, {number:d})

StopSignals().install()
last = LastObject()
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


def test_a_page_that_the_manifest_turns_off_is_not_printed(start):
    local = start(spec="  engine: {args: {ui: false}}")
    local.wait_for("Serving.")

    assert "URL:" in local.output
    assert "Page:" not in local.output


def test_local_ends_without_a_traceback_if_the_reader_of_its_output_ends(tmp_path):
    manifest = write_manifest(tmp_path, {"FAKE_ENGINE_PIDS": str(tmp_path / "pids")})
    arguments = ["local", "-f", str(manifest), "--port", "0", "--admin-port", "0"]
    program = (
        f"import sys; sys.executable = {str(install_fake_engine(tmp_path))!r}; "
        f"from rayloom_operator.__main__ import main; sys.exit(main({arguments}))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    os.close(writing)

    assert ended.returncode == 1
    assert "the reader of the output has ended, so local has ended, too" in ended.stderr
    assert "Traceback" not in ended.stderr
    wait_until_gone(*(int(pid) for pid in (tmp_path / "pids").read_text().split()))
