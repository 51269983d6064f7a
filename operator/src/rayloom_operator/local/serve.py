"""`rayloom-operator local -f FILE`: serves one manifest on this machine.

manifest -> LLMService -> EngineConfig file -> rayloom-engine serve -> /status until serving -> a sample -> wait

With `replicas` of 2 or more, several engines run behind a gateway (several.py).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.pod_template.template import has_template
from rayloom_operator.api.spec import LLMService
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.errors import EngineEnded, EngineUnavailable, OperatorError, SpecError
from rayloom_operator.local.client import base_url, read_status
from rayloom_operator.local.display import StartupDisplay
from rayloom_operator.local.plan import LOOPBACK, replicas_problem, sharing_document, visible_devices
from rayloom_operator.local.ports import claimable_port
from rayloom_operator.local.process import LocalProcess, find_engine
from rayloom_operator.local.several import LocalRun, serve_several
from rayloom_operator.local.signals import StopRequested, StopSignals
from rayloom_operator.local.summary import api_key, print_summary, show_sample
from rayloom_operator.objects.engine_config import engine_config

_POLL_INTERVAL_S = 0.1
# After Ctrl-C all processes have ended within 3 s: 2.5 s for the engine to stop, the rest to kill its process group.
_STOP_GRACE_S = 2.5


def serve_local(*, manifest: Path, host: str, port: int, admin_port: int, ranks_per_gpu: int, has_sample: bool) -> int:
    """Serves until a stop signal arrives or the engine exits. Returns the exit code, which is 0 after a stop signal.

    Port 0 picks a free port. `ranks_per_gpu`: the engine's setting, which no manifest has. With `has_sample` one sample
    request is sent once the engine serves. Raises SpecError for a manifest that cannot be served locally, and
    EngineUnavailable if the engine cannot be started.
    """
    signals = StopSignals()
    signals.install()
    service = load_service(manifest)
    environment = {**os.environ, **{variable.name: variable.value for variable in service.spec.engine.env}}
    devices = visible_devices(environment, len(glob.glob("/dev/nvidia[0-9]*")))
    _check(service, environment, devices, ranks_per_gpu)
    if has_template(service.spec.pod_template):
        print("spec.podTemplate has no effect without a cluster: there are no pods.", file=sys.stderr, flush=True)
    command = find_engine()
    if service.spec.replicas > 1:
        run = LocalRun(
            service=service,
            environment=environment,
            devices=devices,
            host=host,
            port=port,
            admin_port=admin_port,
            ranks_per_gpu=ranks_per_gpu,
            has_sample=has_sample,
        )
        return serve_several(run, command, signals)
    port = claimable_port(host, port, "--port")
    admin_port = claimable_port(LOOPBACK, admin_port, "--admin-port", other_than=port)

    folder = Path(tempfile.mkdtemp(prefix="rayloom-local-"))
    config_path = folder / "config.json"
    document = {
        **engine_config(service, host=host, port=port, admin_port=admin_port),
        **sharing_document(ranks_per_gpu),
    }
    config_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    arguments = [str(command), "serve", "--config", str(config_path)]
    engine = LocalProcess("the engine", arguments, folder / "engine.log", environment)
    is_stop_requested = False
    try:
        with signals.raising():
            status = _wait_until_serving(engine, admin_port)
            print_summary(service, status, url=base_url(host, port), environment=environment)
            if has_sample:
                show_sample(service, host, port, environment)
            print("Serving. Press Ctrl-C to stop.", flush=True)
            raise engine.wait("while serving")
    except StopRequested:
        is_stop_requested = True
        print("\nStopping.", file=sys.stderr, flush=True)
        return 0
    except OperatorError as error:
        engine.show_log()
        print(f"rayloom-operator: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, EngineEnded) else 1
    finally:
        if not engine.stop(_STOP_GRACE_S):
            print("The engine did not stop in time and was killed.", file=sys.stderr, flush=True)
        # Unless a stop signal ended the run, the folder is kept: the log in it shows why the engine exited.
        if is_stop_requested:
            shutil.rmtree(folder)


def _check(
    service: LLMService, environment: Mapping[str, str], devices: Sequence[str] = (), ranks_per_gpu: int = 1
) -> None:
    """Raises SpecError if the spec needs a cluster, or more than `devices`.

    tokenSecretRef is accepted: the engine reads HF_TOKEN instead.
    """
    problems = []
    if service.spec.model.source_kind == "pvc":
        problems.append(
            "spec.model.source: claims exist only in a cluster; use a file:// path to serve the model locally"
        )
    draft = service.spec.model.draft
    if draft is not None and draft.claim is not None:
        problems.append(
            "spec.model.draft.source: claims exist only in a cluster; use a file:// path to serve the draft model "
            "locally"
        )
    problems += [
        f"spec.model.adapters[{number}].source: claims exist only in a cluster; use a file:// path to serve the "
        "adapter locally"
        for number, adapter in enumerate(service.spec.model.adapters or ())
        if adapter.claim is not None
    ]
    if service.spec.auth is not None and api_key(environment) is None:
        problems.append(
            "spec.auth: Secrets exist only in a cluster; set RAYLOOM_API_KEYS to the keys, separated by commas"
        )
    if (problem := replicas_problem(service, devices, ranks_per_gpu)) is not None:
        problems.append(problem)
    if problems:
        raise SpecError(tuple(problems))


def _wait_until_serving(engine: LocalProcess, admin_port: int) -> EngineStatus:
    display = StartupDisplay(sys.stderr)
    print("Starting the engine.", file=sys.stderr, flush=True)
    while True:
        status = read_status(LOOPBACK, admin_port)
        if status is not None:
            display.update(status.startup)
            if status.state == "serving":
                return status
            if status.state == "failed":
                raise EngineUnavailable(f"the engine could not start: {status.reason}")
        if engine.has_exited:
            raise engine.wait("before it served")
        time.sleep(_POLL_INTERVAL_S)
