"""Reads the Events that say why a pod waits, or why a Job has no pod. Only Events have these reasons."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import MADE_VOLUMES, Manifest, ServiceKey, object_path
from rayloom_operator.observe.pods import pod

logger = logging.getLogger(__name__)


class FailureEvents:
    """Reads the Events about failed Jobs and volumes. Each call sends a request, because Events are not watched."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def mount_failures(self, key: ServiceKey, pods: Sequence[Manifest]) -> dict[str, str]:
        """Returns uid of a waiting pod -> the kubelet's message about a volume that the user has to provide."""
        waiting = [
            each
            for each in pods
            if "deletionTimestamp" not in each["metadata"] and _user_volumes(each) and pod(each).is_mounting
        ]
        if not waiting:
            return {}
        messages = await self._messages(key, "Pod", "FailedMount")
        volumes = {f'"{name}"' for each in waiting for name in _user_volumes(each)}
        return {uid: message for uid, message in messages if any(volume in message for volume in volumes)}

    async def job_failures(self, key: ServiceKey) -> dict[str, str]:
        """Returns uid of a Job -> the reason why no pod could be created for the Job."""
        return dict(await self._messages(key, "Job", "FailedCreate"))

    async def _messages(self, key: ServiceKey, kind: str, reason: str) -> list[tuple[str, str]]:
        """Returns (uid of the object, message) for each Event about an object of this kind, oldest first."""
        selector = {"fieldSelector": f"involvedObject.kind={kind},reason={reason}"}
        try:
            found, _ = await self._kube.list(object_path("v1", "Event", key[0]), selector)
        except OperatorError as error:
            logger.warning("%s/%s: cannot list the Events of reason %s: %s", *key, reason, error)
            return []
        found.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return [(event["involvedObject"]["uid"], event.get("message", "")) for event in found]


def _user_volumes(pod_document: Manifest) -> list[str]:
    """Returns the names of the pod's volumes whose content the user has to provide."""
    volumes = pod_document["spec"].get("volumes", ())
    return [volume["name"] for volume in volumes if volume["name"] not in MADE_VOLUMES]
