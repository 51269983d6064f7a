"""The operator as kopf runs it: each function here is called by kopf.

    startup   read the cluster, take the Lease                  ->  kopf begins to watch LLMServices
    event     put the LLMService into the controller's work queue
    cleanup   let running reconciles end, release the Lease     ->  the process ends

kopf watches LLMServices, keeps its credentials fresh and handles signals. `memo.runtime` is the rest of the operator.
Every change is an `on.event`: kopf's other handlers keep their progress in annotations and finalizers of each object,
whereas all that this operator remembers is in the status.

`/healthz`, `/readyz` and `/metrics` are served by the runtime: kopf's own liveness endpoint answers only after startup,
and a standby spends its life in startup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import kopf

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.login import login
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME

# LLMServices that kopf lists at a time; all of 10,000 at once would be hundreds of megabytes.
_PAGE = 250
# Seconds for which kopf keeps an object's task after the object's last event. A restart creates 10,000 tasks.
_IDLE_S = 0.1


@kopf.on.login()
def log_in(**_: Any) -> kopf.ConnectionInfo:
    """Returns where the API server is, and credentials."""
    return login()


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Returns once this process leads. kopf watches nothing before.

    So every service comes from a list that the leader read. The copy of a standby could lack the last status that the
    former leader wrote, and with it that leader's decisions.
    """
    # Watching namespaces and definitions needs rights that the chart does not grant.
    settings.scanning.disabled = True
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _IDLE_S
    settings.persistence.diffbase_storage = _NoDifferences()
    try:
        await memo.runtime.start()
    except (OperatorError, kopf.LoginError) as error:
        # kopf logs this in one line, and any other error with its traceback.
        raise kopf.PermanentError(str(error)) from error


@kopf.on.event(API_GROUP, API_VERSION_NAME, API_PLURAL)
async def changed(event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    """Hands an LLMService that was listed, created, changed or deleted to the controller."""
    memo.runtime.controller.set_service(dict(event["object"]), event["type"] == "DELETED")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Returns once nothing of the operator runs any more."""
    await memo.runtime.stop()


class _NoDifferences(kopf.DiffBaseStorage):
    """Compares nothing. kopf would copy each document twice for handlers of changed fields: 0.6 ms an event, which is a
    fifth of the time of a restart with 10,000 services."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass
