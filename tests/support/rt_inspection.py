"""What a Job that looks at a model leaves in a cluster, and how a test asks what follows from it."""

import json
from datetime import UTC, datetime, timedelta

from rayloom_operator.decide.inspection import inspect
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.resolve.resolved import Hub
from rt_operator import SETTINGS, make_service

HUB_MODEL = {"source": "hf://acme/tiny"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SHAPE = {
    "architecture": "LlamaForCausalLM",
    "num_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "checkpoint_dtype": "bfloat16",
}


def facts(commit=COMMIT):
    """The last words of a Job that found the model."""
    return json.dumps({"version": "v1", "commit": commit, "shape": SHAPE, "num_parameters": 1688})


def failure(reason, message="it is so"):
    return json.dumps({"version": "v1", "error": {"reason": reason, "message": message}})


def at(seconds):
    """So many seconds after noon, as Kubernetes writes it."""
    return (NOON + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_job(attempt=0, service=None, conditions=()):
    job = inspect_job(service or make_service(model=HUB_MODEL), SETTINGS.engine_image, Hub(), attempt)
    job["metadata"] |= {"uid": f"uid-job-{attempt}", "creationTimestamp": at(0)}
    return job | {"status": {"conditions": list(conditions)}}


def make_job_pod(job, state, volumes=()):
    """The Job's pod, its container in `state`."""
    meta = job["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-pod",
            "namespace": "team",
            "uid": f"pod-of-{meta['uid']}",
            "labels": {"rayloom.dev/service": "chat"},
            "ownerReferences": [{"uid": meta["uid"]}],
        },
        "spec": {"nodeName": "n1", "volumes": [{"name": name} for name in volumes]},
        "status": {"containerStatuses": [{"name": "inspect", "image": "i", "ready": False, "state": state}]},
    }


def ended(words, seconds=0, code=0):
    """A container's state after it ended so many seconds after noon."""
    return {"terminated": {"exitCode": code, "reason": "Error", "message": words, "finishedAt": at(seconds)}}


def look(*attempts, seconds=0, stored=None, mount_failures=None, **spec):
    """What is to be done so many seconds after noon. `attempts`: states of containers, oldest first; None: no pod."""
    service = make_service(**({"model": HUB_MODEL} | spec))
    jobs = [make_job(number, service) for number in range(len(attempts))]
    pods = [make_job_pod(job, state) for job, state in zip(jobs, attempts, strict=True) if state is not None]
    clock = NOON + timedelta(seconds=seconds)
    return inspect(service, SETTINGS.engine_image, Hub(), stored or {}, jobs, pods, mount_failures or {}, clock)
