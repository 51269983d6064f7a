"""An autoscaled LLMService on the real API server, as the tests of this folder see it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from api.namespaces import llm_service
from operator_processes.process import wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import Document


class ScaledService:
    """The service `chat` of a namespace, which serves when the object is made."""

    def __init__(self, world: World, namespace: str, **spec: Any) -> None:
        self.world = world
        self.namespace = namespace
        # Not by server-side apply: then the API server records no field manager for writes of the scale subresource.
        path = f"{LLM}/namespaces/{namespace}/llmservices"
        world.request("POST", path, llm_service(namespace, "chat", **spec), fieldValidation="Strict")
        world.wait_serving(namespace, "chat", 60)

    @property
    def document(self) -> Document:
        return self.world.request("GET", f"{LLM}/namespaces/{self.namespace}/llmservices/chat")

    @property
    def replicas(self) -> int:
        return int(self.document["spec"]["replicas"])

    @property
    def scaling(self) -> Document:
        found: Document = self.document.get("status", {}).get("autoscaling", {})
        return found

    def wait(self, is_so: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        wait_until(is_so, f"{self.namespace}: {what}", timeout_s, self._story)

    def stays(self, seconds: float) -> bool:
        """Returns whether `replicas` keeps its value for this time. Only time can show that a write does not come."""
        number, end = self.replicas, time.monotonic() + seconds
        while time.monotonic() < end:
            if self.replicas != number:
                return False
            time.sleep(0.5)
        return True

    def _story(self) -> str:
        status = self.document.get("status", {})
        shown = {name: status.get(name) for name in ("autoscaling", "gateway", "rollout")}
        return f"{json.dumps(shown, indent=1)}\n{self.world.story()}"
