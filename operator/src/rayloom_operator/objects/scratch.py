"""The disk that a pod's scratch volume takes of its node: what the pod fetches or converts of the model into it. Pure.

It follows from the model and is in no revision, as the memory that follows from the weights. Kubernetes counts what is
in emptyDir volumes as ephemeral storage (https://kubernetes.io/docs/concepts/storage/ephemeral-storage/): a pod that
asks for it gets a node with room for it, and a node without room is not driven to evict what runs on it.
"""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.base import amount
from rayloom_operator.names import Manifest
from rayloom_operator.resolve.resolved import Resolved

RESOURCE = "ephemeral-storage"
_MIB = 1 << 20
# Beside the weights: tokenizer, what a checkpoint has twice of tied weights, Ray's logs. Estimates, rounded up.
_PARTS, _MORE_MIB = 20, 1024  # one part of so many, and so many MiB
# A second copy: a repository may have its weights in two files, and the hub's library may keep parts of them.
_LIMIT_FACTOR = 2
# Where the hub's library and the converter put what they write, unless the manifest says so.
_HUB_FOLDERS = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"})
_CONVERTER_FOLDER = "RAYLOOM_CACHE"


def scratch_mebibytes(resolved: Resolved, *, has_ranks: bool) -> int:
    """What a pod asks for; 0 where nothing of the model is written into its scratch volume, or its size is not known.

    A pod without ranks reads the configuration and the tokenizer of a hub's model alone, and converts a .gguf file as
    those with ranks do. All ranks of a pod share what one of them fetches or converts.
    """
    model, given = resolved.service.spec.model, _given_variables(resolved, has_ranks=has_ranks)
    is_fetched = model.source_kind == "hf" and model.cache is None and has_ranks and not given & _HUB_FOLDERS
    # The file itself is where the manifest says; what is written are its weights, dequantised.
    is_converted = model.is_gguf and _CONVERTER_FOLDER not in given
    if resolved.checkpoint_bytes is None or not (is_fetched or is_converted):
        return 0
    num_bytes = resolved.checkpoint_bytes + resolved.checkpoint_bytes // _PARTS
    return -(-num_bytes // _MIB) + _MORE_MIB


def _given_variables(resolved: Resolved, *, has_ranks: bool) -> set[str]:
    """Names of the variables that the manifest sets in the container that reads the model."""
    spec = resolved.service.spec
    head, worker = spec.pod_template.head.spec, spec.pod_template.worker.spec
    container = worker.container(names.WORKER_CONTAINER) if has_ranks else head.container(names.ENGINE_CONTAINER)
    of_template = (container.env if container is not None else None) or ()
    return {each.name for each in spec.engine.env} | {each.name for each in of_template}


def scratch_volume(name: str, mebibytes: int, resources: Manifest) -> Manifest:
    """The emptyDir of a pod that asks for so many MiB. `resources` are its container's, which may allow it more."""
    if mebibytes == 0:
        return {"name": name, "emptyDir": {}}
    given = [amount(resources.get(kind, {}).get(RESOURCE, "0")) for kind in ("requests", "limits")]
    limit = max(mebibytes * _LIMIT_FACTOR, *(-(-each // _MIB) for each in given))
    return {"name": name, "emptyDir": {"sizeLimit": f"{limit}Mi"}}
