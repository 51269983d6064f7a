"""The commands that the operator writes into pods are commands of the engine."""

import subprocess
import sys

from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved


def test_a_pod_with_ranks_that_have_no_engine_may_end_at_once():
    (workers,) = ray_cluster(make_resolved(), "00000000")["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    python, *arguments = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python3"

    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=30)

    assert done.stdout == "the engine has ended\n"
