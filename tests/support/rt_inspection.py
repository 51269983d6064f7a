"""Jobs that inspect a model, as objects of the API server, and the inspection that the operator derives from them."""

import json
from datetime import UTC, datetime, timedelta

from rayloom_operator.decide.inspection import Tried, inspect
from rayloom_operator.objects.inspect_job import Commits, inspect_job
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
# A layer has 8 x (8 + 8) + 8 x 8 + 3 x 8 x 16 + 2 x 8 weights. Embedding and head have 32 x 8 each, and the last norm
# has 8.
COSTS = {
    "tensor": [1, 2],
    "embedding": {"elements": [256, 128]},
    "head": {"elements": [264, 136]},
    "both": {"elements": [520, 264]},
    "kinds": [{"weights": {"elements": [592, 336]}, "kv": {"elements": [8, 8]}}],
    "layers": "2a",
    "head_layers": 0.21621621621621623,
    "step": {"token": {"elements": [72, 48]}, "sequence_bytes": 384},
    "checkpoint_bytes": 3408,
}


DRAFT_COMMIT = "f" * 40
# A draft model with 100 weights.
DRAFT = {
    "commit": DRAFT_COMMIT,
    "architecture": "LlamaForCausalLM",
    "num_parameters": 100,
    "checkpoint_dtype": "bfloat16",
    "costs": {
        "weights": {"elements": [100]},
        "kv": {"elements": [8]},
        "step": {"token": {"elements": [40]}, "sequence_bytes": 384},
        "checkpoint_bytes": 200,
    },
}


def facts(commit=COMMIT, shape=SHAPE, costs=COSTS, draft=None):
    """The termination message of a Job that found the model, and its draft model if there is one."""
    document = {"version": "v2", "commit": commit, "shape": shape, "num_parameters": 1688, "costs": costs}
    return json.dumps(document if draft is None else document | {"draft": draft})


def old_facts(commit=COMMIT, shape=SHAPE):
    """The facts that an engine of an earlier version returns."""
    return json.dumps({"version": "v1", "commit": commit, "shape": shape, "num_parameters": 1688})


def failure(reason, message="it is so"):
    return json.dumps({"version": "v2", "error": {"reason": reason, "message": message}})


def at(seconds):
    """The time `seconds` seconds after noon, in Kubernetes' format."""
    return (NOON + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_job(attempt=0, service=None, conditions=(), commit=None):
    job = inspect_job(service or make_service(model=HUB_MODEL), SETTINGS.engine_image, Hub(), attempt, Commits(commit))
    job["metadata"] |= {"uid": f"uid-job-{attempt}", "creationTimestamp": at(0)}
    return job | {"status": {"conditions": list(conditions)}}


def make_job_pod(job, state, volumes=()):
    """The Job's pod, whose container has the state `state`."""
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
    """The state of a container that ended `seconds` seconds after noon."""
    return {"terminated": {"exitCode": code, "reason": "Error", "message": words, "finishedAt": at(seconds)}}


def look(*attempts, seconds=0, stored=None, mount_failures=None, commit=None, may_refresh=False, **spec):
    """The inspection `seconds` seconds after noon. `attempts`: states of containers, oldest first; None: no pod.

    `commit`: the commit that the Jobs inspect; None: the Jobs name no commit.
    """
    service = make_service(**({"model": HUB_MODEL} | spec))
    jobs = [make_job(number, service, commit=commit) for number in range(len(attempts))]
    pods = [make_job_pod(job, state) for job, state in zip(jobs, attempts, strict=True) if state is not None]
    clock = NOON + timedelta(seconds=seconds)
    tried = Tried(jobs, pods, mount_failures or {})
    return inspect(service, SETTINGS.engine_image, Hub(), stored or {}, tried, clock, may_refresh)
