"""Computes the disk space that a pod's scratch volume needs for model files that the pod downloads or converts. Pure.

The size is computed from the model, so it is not part of the revision. Kubernetes counts emptyDir volumes as
ephemeral storage (https://kubernetes.io/docs/concepts/storage/ephemeral-storage/). So a pod requests the size as
ephemeral storage. The pod is then scheduled to a node with enough disk space, and does not cause evictions of other
pods on that node.
"""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.base import amount
from rayloom_operator.api.model import Model
from rayloom_operator.api.model_source import SourcedModel
from rayloom_operator.names import Manifest
from rayloom_operator.resolve.resolved import Resolved

RESOURCE = "ephemeral-storage"
_MIB = 1 << 20
# Space in addition to the weights, for the tokenizer, tied weights that a checkpoint stores twice, and Ray's logs. An
# estimate, rounded up: a twentieth of the checkpoint, plus 1 GiB.
_CHECKPOINT_FRACTION = 20
_EXTRA_MIB = 1024
# The limit allows a second copy: a repository may store its weights in two formats, and the hub's library may keep
# partial downloads.
_LIMIT_FACTOR = 2
# Variables that choose the folders of the hub's library and of the converter. If the manifest sets one of them, the
# files are expected to be in a volume of the user.
_HUB_FOLDERS = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"})
_CONVERTER_FOLDER = "RAYLOOM_CACHE"


def scratch_mebibytes(resolved: Resolved, *, has_ranks: bool) -> int:
    """Returns the request in MiB; 0 if the pod writes no model files to its scratch volume, or if the size is unknown.

    A pod without ranks (the head pod) downloads only the configuration and the tokenizer of a hub's model. It converts
    a .gguf file, as a worker pod does. The ranks of a pod share downloaded and converted files.
    """
    model, given = resolved.service.spec.model, _given_variables(resolved, has_ranks=has_ranks)
    num_bytes = 0
    if resolved.checkpoint_bytes is not None and _writes(model, model, given, has_ranks=has_ranks):
        num_bytes += resolved.checkpoint_bytes
    # Only the rank that samples reads the draft model.
    draft = model.draft
    if draft is not None and resolved.draft is not None and has_ranks and _writes(draft, model, given, has_ranks=True):
        num_bytes += resolved.draft.costs.checkpoint_bytes
    if num_bytes == 0:
        return 0
    num_bytes += num_bytes // _CHECKPOINT_FRACTION
    return -(-num_bytes // _MIB) + _EXTRA_MIB


def _writes(source: SourcedModel, model: Model, given: set[str], *, has_ranks: bool) -> bool:
    """Returns whether a pod writes the files of `source`, the model or its draft model, to its scratch volume.

    `given`: names of the variables that the manifest sets.
    """
    is_fetched = source.source_kind == "hf" and model.cache is None and has_ranks and not given & _HUB_FOLDERS
    # The .gguf file itself is in another volume. The converter writes its dequantised weights to the scratch volume.
    return is_fetched or (source.is_gguf and _CONVERTER_FOLDER not in given)


def _given_variables(resolved: Resolved, *, has_ranks: bool) -> set[str]:
    """Names of the variables that the manifest sets in the container that reads the model."""
    spec = resolved.service.spec
    head, worker = spec.pod_template.head.spec, spec.pod_template.worker.spec
    container = worker.container(names.WORKER_CONTAINER) if has_ranks else head.container(names.ENGINE_CONTAINER)
    of_template = (container.env if container is not None else None) or ()
    return {each.name for each in spec.engine.env} | {each.name for each in of_template}


def scratch_volume(name: str, mebibytes: int, resources: Manifest) -> Manifest:
    """The emptyDir of a container that requests `mebibytes`. The container's `resources` may raise the size limit."""
    if mebibytes == 0:
        return {"name": name, "emptyDir": {}}
    given = [amount(resources.get(kind, {}).get(RESOURCE, "0")) for kind in ("requests", "limits")]
    limit = max(mebibytes * _LIMIT_FACTOR, *(-(-each // _MIB) for each in given))
    return {"name": name, "emptyDir": {"sizeLimit": f"{limit}Mi"}}
