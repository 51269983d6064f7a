"""The Job that inspects a service's model before any engine replica is created.

The Job's pod uses the engine's image. The pod reads only the model's configuration, in seconds and without an
accelerator, and writes the facts as its termination message. The pod does not mount the model's cache. Otherwise, a
claim that is not bound yet could be bound to the node of this small pod. The engine may not fit on that node.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from rayloom_operator import names
from rayloom_operator.api.spec import LLMService
from rayloom_operator.names import Manifest
from rayloom_operator.objects.engine_config import engine_draft, engine_model
from rayloom_operator.objects.pod import (
    container_basics,
    environment,
    model_mounts,
    model_variables,
    model_volumes,
    pod_basics,
)
from rayloom_operator.objects.pod_template import with_inspection_template
from rayloom_operator.resolve.resolved import Hub

# Most of this time is for the pull of the engine's image; `inspect` itself waits for the hub at most a minute for
# each of the two models.
DEADLINE_SECONDS = 1800
# Seconds in which an admin can read the log of a finished Job. The Job must outlive the wait for the next attempt,
# because the number of that attempt is computed from this Job's name.
_KEEP_SECONDS = 900
# Memory, measured: 50 MiB, or 90 MiB with the hub's library. To compare two tokenizers of 150,000 tokens that are not
# equal takes 100 MiB more. A model of the transformers backend is measured with torch, which takes about 700 MiB.
_REQUESTED, _REQUESTED_WITH_DRAFT = "128Mi", "256Mi"
_LIMIT = "2Gi"


@dataclass(frozen=True, slots=True)
class Commits:
    """The commits to inspect of a model and its draft model. None: the revision in the spec."""

    model: str | None = None
    draft: str | None = None


def inspect_job(service: LLMService, image: str, hub: Hub, attempt: int, commits: Commits = Commits()) -> Manifest:
    """The Job of attempt `attempt`, counted from 0."""
    model = service.spec.model
    command = ["rayloom-engine", "inspect", "--model", engine_model(model)]
    if revision := commits.model or model.revision:
        command += ["--revision", revision]
    if backend := service.spec.engine.args.model_backend:
        command += ["--model-backend", backend]
    if model.draft is not None:
        command += ["--draft-model", engine_draft(model, model.draft)]
        if revision := commits.draft or model.draft.revision:
            command += ["--draft-revision", revision]
    variables: dict[str, Manifest] = {"RAYLOOM_TERMINATION_LOG": {"value": "/dev/termination-log"}}
    variables |= model_variables(service, hub, serves=False)
    memory = _REQUESTED if model.draft is None else _REQUESTED_WITH_DRAFT
    container = container_basics(service, names.INSPECT_CONTAINER, image) | {
        "command": command,
        "env": environment(service, variables),
        "resources": {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": _LIMIT}},
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}, *model_mounts(service, hub, serves=False)],
    }
    pod = pod_basics(service) | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 3,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}, *model_volumes(service, hub, serves=False)],
    }
    spec: Manifest = {
        # The operator decides when to retry.
        "backoffLimit": 0,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "ttlSecondsAfterFinished": _KEEP_SECONDS,
        "template": {
            "metadata": {"labels": names.labels(service)},
            "spec": with_inspection_template(service, pod, hub),
        },
    }
    inputs = json.dumps([spec, service.metadata.uid], sort_keys=True)
    name = f"{service.metadata.name}-inspect-{hashlib.sha256(inputs.encode()).hexdigest()[:8]}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": names.metadata(service, f"{name}-{attempt}"),
        "spec": spec,
    }


def attempt_of(name: str) -> int:
    """Returns the number of the attempt, read from the Job's name."""
    return int(name.rsplit("-", 1)[1])
