"""The image's program `ray` answers KubeRay's check quickly, and starts Ray without agents in the operator's pods.

It passes all other subcommands to the `ray` program of the package Ray.
"""

import os
import socket
import subprocess
from pathlib import Path

import pytest

IMAGE_RAY = Path(__file__).parents[2] / "docker" / "ray"
RAYS_OWN = """#!/bin/sh
echo "$@"
cat
exit 7
"""


@pytest.fixture
def image(tmp_path):
    """A PATH with the image's command, then a stand-in for Ray's command, and a `sleep` that reports its first use."""
    nap = f"""#!/bin/sh
if [ -p {tmp_path}/first_nap ]; then echo asleep > {tmp_path}/first_nap; rm -f {tmp_path}/first_nap; fi
exec /bin/sleep "$@"
"""
    for name, text in {"ray": RAYS_OWN, "sleep": nap}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "ray").symlink_to(IMAGE_RAY)
    os.mkfifo(tmp_path / "first_nap")
    return {"PATH": f"{tmp_path}/first:{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def head():
    """The head's port, which refuses connections until `listen` is called."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def check(image, head, host="localhost", **variables):
    command = ["ray", "health-check", "--address", f"{host}:{head.getsockname()[1]}"]
    return subprocess.Popen(command, env=image | variables, stderr=subprocess.PIPE, text=True)


def test_an_address_may_stand_in_brackets_as_those_of_ipv6_do(image, head):
    head.listen()
    with check(image, head, "[127.0.0.1]") as running:
        assert running.wait(timeout=20) == 0


def test_the_check_is_answered_as_soon_as_the_head_listens(image, head, tmp_path):
    with check(image, head) as running:
        assert (tmp_path / "first_nap").read_text() == "asleep\n"  # the script's first connection was refused
        head.listen()
        assert running.wait(timeout=20) == 0


def test_the_check_gives_up_after_half_a_minute_with_the_reason(image, head):
    with check(image, head, SECONDS="30") as running:
        assert running.wait(timeout=20) == 1
        assert "has not answered at localhost:" in running.stderr.read()


@pytest.mark.parametrize(
    "arguments", ["start --head --port=6379", "health-check --address a:1 --component b", "", "a  b"]
)
def test_everything_else_is_rays_own(image, arguments):
    command = ["ray", *arguments.split(" ")] if arguments else ["ray"]
    done = subprocess.run(command, env=image, input="typed", capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.returncode) == (f"{' '.join(command[1:])}\ntyped", 7)


@pytest.mark.parametrize(
    ("variables", "arguments", "is_lean"),
    [
        ({"RAYLOOM_LEAN_RAY": "1"}, "start --head", True),
        ({"RAYLOOM_LEAN_RAY": "1"}, "status --head", False),
        ({"RAYLOOM_LEAN_RAY": ""}, "start --head", False),
    ],
)
def test_in_the_operators_pods_ray_starts_without_agents(image, tmp_path, variables, arguments, is_lean):
    (tmp_path / "python3").symlink_to(tmp_path / "ray")
    command = ["ray", *arguments.split()]
    done = subprocess.run(command, env=image | variables, input="typed", capture_output=True, text=True, timeout=20)
    python = "-P -m rayloom_engine.launcher.lean_ray " if is_lean else ""
    assert (done.stdout, done.returncode) == (f"{python}{arguments}\ntyped", 7)


def test_without_ray_the_command_names_the_searched_paths(image, tmp_path):
    (tmp_path / "ray").unlink()
    path = f"{tmp_path}/first:/usr/bin:/bin"
    done = subprocess.run(["ray", "start"], env={"PATH": path}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (127, f"the image has no Ray: PATH is {path}\n")
