"""`make client-tests`: runs tests/clients against one real server, in an environment that has the clients.

`make client-packages` only installs that environment. It passes the flag `--install` instead of flags for pytest.

The environment is outside of the checkout, in the engine's cache. The name of its folder has a checksum of the pins.
The clients need other versions of packages than the server, so they cannot be in `.venv`.

The server has the built-in model, with the chat template in tests/clients. Unlike the model's own template, this
template can request reasoning. Otherwise both are equal.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pip_or_uv
from rayloom_bench.peers.engines.installation import PeerMissing, installed, make_environment
from rayloom_engine.models.checkpoint.source import cache_folder, resolve
from rt_server import RunningServer, running_server

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "clients"
REQUIREMENTS = FOLDER / "requirements.txt"
CONSTRAINTS = FOLDER / "constraints.txt"
TEMPLATE = FOLDER / "chat_template.jinja"
MODEL = "smollm2"  # the name in docs/clients.md
READY_SECONDS = 600.0  # long, because .ci/run starts this server at a low priority beside tests on clusters
# With these variables no client requests prices from another host, or sends traces there.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
}


def client_environment(cache: Path) -> Path:
    """Returns the interpreter of the environment with the clients. Installs it if it is not in `cache` yet."""
    pins = REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes() + sys.version.encode()
    folder = cache / "clients" / hashlib.sha256(pins).hexdigest()[:16]

    def install(into: Path) -> None:
        python = make_environment(into, print)
        if pip_or_uv.install(python, "--quiet", "-c", CONSTRAINTS, "-r", REQUIREMENTS) != 0:
            raise PeerMissing("the clients could not be installed, see above")

    return installed(folder, install, what="the clients", log=print) / "bin" / "python"


def model_that_reasons(folder: Path) -> Path:
    """Returns `folder` with links to the built-in model's files and the chat template of the tests."""
    folder.mkdir()
    for path in resolve("builtin://smollm2-135m").path.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    (folder / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())
    return folder


def main(arguments: list[str]) -> int:
    python = client_environment(cache_folder(os.environ))
    if arguments == ["--install"]:
        return 0
    with tempfile.TemporaryDirectory(prefix="rayloom-clients-") as name:
        folder = Path(name)
        model = model_that_reasons(folder / "model")
        settings = ["--model", str(model), "--dtype", "bfloat16", "--max-model-len", "4096"]
        settings += ["--served-model-name", MODEL]
        with running_server(folder, *settings, ready_seconds=READY_SECONDS) as server:
            return _run_tests(python, server, arguments)


def _run_tests(python: Path, server: RunningServer, arguments: list[str]) -> int:
    """Returns the exit code of the tests. Prints the end of the server's log if they fail."""
    command: list[str | Path] = [python, "-m", "pytest", "-c", FOLDER / "pytest.ini", FOLDER, *arguments]
    others = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    code = subprocess.run(command, env=environment | QUIET | {"RAYLOOM_URL": server.api_url}).returncode
    if code != 0:
        print(f"the end of the server's log:\n{server.log_text()[-3000:]}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
