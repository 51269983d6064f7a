"""`rayloom-operator local -f FILE`: serves one manifest on this machine with one `rayloom-engine` process.

manifest -> LLMService -> EngineConfig file -> rayloom-engine serve -> /status until serving -> a sample -> wait
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.pod_template.template import has_template
from rayloom_operator.api.spec import LLMService
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.errors import EngineEnded, EngineUnavailable, OperatorError, SpecError
from rayloom_operator.local.client import base_url, read_status, stream_chat
from rayloom_operator.local.display import StartupDisplay
from rayloom_operator.local.process import EngineProcess, find_engine
from rayloom_operator.objects.engine_config import engine_config

SAMPLE_PROMPT = "What is the capital of France? Answer in one sentence."
_SAMPLE_MAX_TOKENS = 64
_ADMIN_HOST = "127.0.0.1"
_POLL_INTERVAL_S = 0.1
_LOG_LINES_SHOWN = 30
# After Ctrl-C all processes have ended within 3 s: 2.5 s for the engine to stop, the rest to kill its process group.
_STOP_GRACE_S = 2.5
# The stop signals. SIGHUP is one of them: the engine has its own session, so a closed terminal alone does not end it.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_local(*, manifest: Path, host: str, port: int, admin_port: int, has_sample: bool) -> int:
    """Serves until a stop signal arrives or the engine exits. Returns the exit code, which is 0 after a stop signal.

    Port 0 picks a free port. With `has_sample` one sample request is sent once the engine serves. Raises SpecError for
    a manifest that cannot be served locally, and EngineUnavailable if the engine cannot be started.
    """
    signals = _StopSignals()
    signals.install()
    service = load_service(manifest)
    environment = {**os.environ, **{variable.name: variable.value for variable in service.spec.engine.env}}
    _check(service, environment)
    if has_template(service.spec.pod_template):
        print("spec.podTemplate has no effect without a cluster: there are no pods.", file=sys.stderr, flush=True)
    command = find_engine()
    port = _claimable_port(host, port, "--port")
    admin_port = _claimable_port(_ADMIN_HOST, admin_port, "--admin-port", other_than=port)

    folder = Path(tempfile.mkdtemp(prefix="rayloom-local-"))
    config_path = folder / "config.json"
    config_path.write_text(
        json.dumps(engine_config(service, host=host, port=port, admin_port=admin_port), indent=2) + "\n",
        encoding="utf-8",
    )
    engine = EngineProcess(command, config_path, folder / "engine.log", environment)
    is_stop_requested = False
    try:
        with signals.raising():
            status = _wait_until_serving(engine, admin_port)
            _print_summary(service, status, host, port, environment)
            if has_sample:
                _show_sample(service, host, port, environment)
            print("Serving. Press Ctrl-C to stop.", flush=True)
            raise engine.wait("while serving")
    except _StopRequested:
        is_stop_requested = True
        print("\nStopping.", file=sys.stderr, flush=True)
        return 0
    except OperatorError as error:
        _show_log(engine)
        print(f"rayloom-operator: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, EngineEnded) else 1
    finally:
        if not engine.stop(_STOP_GRACE_S):
            print("The engine did not stop in time and was killed.", file=sys.stderr, flush=True)
        if is_stop_requested:  # After any other end the folder is kept: the log in it shows why the engine exited.
            shutil.rmtree(folder)


def _check(service: LLMService, environment: dict[str, str]) -> None:
    """Raises SpecError if the spec needs a cluster. tokenSecretRef is accepted: the engine reads HF_TOKEN instead."""
    problems = []
    if service.spec.model.source_kind == "pvc":
        problems.append(
            "spec.model.source: claims exist only in a cluster; use a file:// path to serve the model locally"
        )
    if service.spec.auth is not None and _api_key(environment) is None:
        problems.append(
            "spec.auth: Secrets exist only in a cluster; set RAYLOOM_API_KEYS to the keys, separated by commas"
        )
    if problems:
        raise SpecError(tuple(problems))


def _claimable_port(host: str, port: int, flag: str, other_than: int | None = None) -> int:
    """Returns `port`, or a free port if `port` is 0. Raises EngineUnavailable if the port cannot be bound."""
    if port == other_than:
        raise EngineUnavailable(f"port {port} is given twice; choose another one with {flag} PORT")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Servers set this option too. Without it, closed connections of an earlier run would make the port look busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineUnavailable(
                f"port {port} on {host} cannot be used ({error.strerror}); stop the process that uses it, or choose "
                f"another one with {flag} PORT (0 picks a free one)"
            ) from error
        bound = int(probe.getsockname()[1])
    # For port 0 the system picks a free port, possibly the port of the other flag. Then the system picks again.
    return bound if bound != other_than else _claimable_port(host, port, flag, other_than)


def _wait_until_serving(engine: EngineProcess, admin_port: int) -> EngineStatus:
    display = StartupDisplay(sys.stderr)
    print("Starting the engine.", file=sys.stderr, flush=True)
    while True:
        status = read_status(_ADMIN_HOST, admin_port)
        if status is not None:
            display.update(status.startup)
            if status.state == "serving":
                return status
            if status.state == "failed":
                raise EngineUnavailable(f"the engine could not start: {status.reason}")
        if engine.has_exited:
            raise engine.wait("before it served")
        time.sleep(_POLL_INTERVAL_S)


def _print_summary(
    service: LLMService, status: EngineStatus, host: str, port: int, environment: dict[str, str]
) -> None:
    url = base_url(host, port)
    facts = service.spec.model.source
    if status.model is not None:
        model = status.model
        computed = "" if model.compute_dtype == model.dtype else f", computed in {model.compute_dtype}"
        weights = model.dtype if model.quantization == "none" else f"{model.quantization} from {model.dtype}"
        facts += f", {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {weights}{computed}, "
        facts += f"{model.max_model_len} tokens of context"
    body = {"model": service.served_name, "messages": [{"role": "user", "content": "Say hello."}], "stream": True}
    print(f"\nModel:  {service.served_name} ({facts})\nURL:    {url}/v1\nPage:   {url}/ui\n\nTry it:")
    print(f"  curl -N {url}/v1/chat/completions \\\n    -H 'Content-Type: application/json' \\")
    if _api_key(environment) is not None:
        print("    -H 'Authorization: Bearer YOUR_KEY' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)


def _show_sample(service: LLMService, host: str, port: int, environment: dict[str, str]) -> None:
    """Prints the answer to a sample request as it arrives.

    If the request fails, the engine keeps running, because other requests may succeed.
    """
    print(f"Sample: {SAMPLE_PROMPT}\n> ", end="", flush=True)
    pieces = stream_chat(
        host,
        port,
        model=service.served_name,
        prompt=SAMPLE_PROMPT,
        max_tokens=_SAMPLE_MAX_TOKENS,
        api_key=_api_key(environment),
    )
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except EngineUnavailable as error:
        print(f"\nThe sample request failed: {error}", file=sys.stderr, flush=True)
    print("\n", flush=True)


def _api_key(environment: dict[str, str]) -> str | None:
    """Returns the first API key that the engine accepts; None if it requires no key."""
    keys = [key.strip() for key in environment.get("RAYLOOM_API_KEYS", "").split(",") if key.strip()]
    return keys[0] if keys else None


def _show_log(engine: EngineProcess) -> None:
    lines = engine.log_tail(_LOG_LINES_SHOWN)
    print(f"The last {len(lines)} lines of the engine's log ({engine.log_path}):", file=sys.stderr)
    for line in lines:
        print(f"  {line}", file=sys.stderr)


class _StopRequested(BaseException):
    """A stop signal arrived. Not an Exception, so that no error handler catches it."""


class _StopSignals:
    """Raises _StopRequested inside `raising()` at the first stop signal, or on entry if the signal came earlier.

    So no signal interrupts the start of the child process. After an interrupted start, the child could keep running.
    Further signals are ignored: the time of a stop is limited in any case, and wrappers such as `timeout` and some
    shells repeat the terminal's Ctrl-C.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._raises = False

    def install(self) -> None:
        for number in _SIGNALS:
            # nohup sets SIGHUP to ignored. It stays ignored, so that the engine outlives the terminal.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside this context a stop signal raises _StopRequested. An earlier signal raises it on entry."""
        self._raises = True
        try:
            if self._is_requested:
                raise _StopRequested
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
        if self._raises:
            self._raises = False
            raise _StopRequested
