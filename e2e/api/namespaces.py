"""Namespaces and LLMServices of tests on an API server without real nodes."""

from __future__ import annotations

import itertools
from typing import Any

from real_api_server.world import World

_numbers = itertools.count()


def new_namespace(world: World, purpose: str) -> str:
    """The name of a new namespace. It is deleted at the end of the session, even after a failed test."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in purpose.lower())[:40].strip("-")
    name = f"api-{slug}-{next(_numbers)}"
    world.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": {"rayloom.dev/e2e": "true"}}})
    return name


def llm_service(namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    """The manifest of an LLMService with the embedded model and these fields of the spec."""
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": "builtin://smollm2-135m"}, **spec},
    }
