"""The commands that the operator writes into pods are commands of the engine."""

import subprocess
import sys

from rayloom_engine.linger import RAY_PORT
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved


def test_a_pod_with_ranks_that_have_no_engine_may_end_at_once():
    (workers,) = ray_cluster(make_resolved(), "00000000")["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    python, *arguments = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python3"

    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=30)

    assert done.stdout == "the engine has ended\n"


def test_a_pod_with_ranks_looks_for_the_engine_at_the_port_of_rays_head():
    head = ray_cluster(make_resolved(), "00000000")["spec"]["headGroupSpec"]["template"]["spec"]
    (address,) = [
        each["value"] for container in head["containers"] for each in container["env"] if each["name"] == "RAY_ADDRESS"
    ]

    assert address == f"127.0.0.1:{RAY_PORT}"
