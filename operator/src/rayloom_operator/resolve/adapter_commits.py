"""The commits of LoRA adapters of the hub: every engine of a service loads the same files. Pure.

The first engine that has loaded an adapter from a branch or tag reports the commit, and the status stores it. All other
engines, and engines that are created later, load this commit until the spec names another source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayloom_operator.api.adapters import is_commit
from rayloom_operator.api.model import Model


def stored_commits(model: Model, previous: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> commit of those adapters of the hub whose commit is in their source or in the last status."""
    stored = {
        (each.get("name"), each.get("source")): each.get("commit")
        for each in previous.get("adapters") or ()
        if isinstance(each, Mapping)
    }
    found = {}
    for adapter in model.adapters or ():
        commit = adapter.own_commit or stored.get((adapter.name, adapter.source))
        if adapter.is_on_hub and isinstance(commit, str) and is_commit(commit):
            found[adapter.name] = commit
    return found
