"""The entry points that kopf calls: startup, LLMService events, cleanup.

    startup   read the cluster, take the Lease                  ->  kopf begins to watch LLMServices
    event     put the LLMService into the controller's work queue
    cleanup   wait for running reconciles, release the Lease    ->  the process exits

kopf watches LLMServices, renews its credentials and handles signals. `memo.runtime` is the rest of the operator.
Only kopf's `on.event` is used for changes. kopf's other handlers store their progress in annotations and finalizers of
each object, but this operator stores its state in the status alone.

The runtime serves `/healthz`, `/readyz` and `/metrics` itself, because kopf's own liveness endpoint answers only after
startup. A standby stays in the startup handler until it gets the Lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import kopf

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.login import login
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME

# Page size of kopf's lists of LLMServices. A single page of 10,000 would take hundreds of megabytes.
_PAGE = 250
# kopf creates a task for each object and ends it this many seconds after the object's last event. With 10,000 services,
# a restart creates 10,000 such tasks.
_IDLE_S = 0.1


@kopf.on.login()
def log_in(**_: Any) -> kopf.ConnectionInfo:
    """Returns the address of the API server, and credentials for it."""
    return login()


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Returns once this process holds the Lease and reconciles. kopf begins to watch LLMServices only after the return.

    So a leader lists all services after it got the Lease. An earlier list could lack the former leader's last status,
    and the decisions in that status.
    """
    # kopf's scanning watches namespaces and CRDs, for which the chart grants no rights.
    settings.scanning.disabled = True
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _IDLE_S
    settings.persistence.diffbase_storage = _NoDifferences()
    try:
        await memo.runtime.start()
    except (OperatorError, kopf.LoginError) as error:
        # kopf logs a PermanentError in one line, and any other error with its traceback.
        raise kopf.PermanentError(str(error)) from error


@kopf.on.event(API_GROUP, API_VERSION_NAME, API_PLURAL)
async def changed(event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    """Passes each LLMService that was listed, created, changed or deleted to the controller."""
    memo.runtime.controller.set_service(dict(event["object"]), event["type"] == "DELETED")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stops the operator, and returns once no part of it runs any more."""
    await memo.runtime.stop()


class _NoDifferences(kopf.DiffBaseStorage):
    """Switches off kopf's comparison of old and new documents, for which kopf copies each document twice.

    Only handlers of changed fields need the comparison, and the operator has none. The comparison takes 0.6 ms per
    event. With 10,000 services, it would take a fifth of the time of a restart.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass
