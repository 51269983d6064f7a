"""The statuses of errors, with their meanings.

In the document, all errors of a route have the model `ApiRoute.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        400: "The request cannot be used; the message says what to change, `param` names the field.",
        401: "API keys are set, and the request has none or a wrong one.",
        403: "The request is not allowed.",
        404: "`model` is neither the served model nor one of its LoRA adapters.",
        408: "Headers or body did not arrive in time.",
        413: "The body is larger than the setting `max_body_bytes`.",
        415: "The body's Content-Type is not JSON.",
        422: "The request has the Idempotency-Key of an earlier one and another body.",
        429: "The queue is full, or the key's share of it; `Retry-After` has the seconds to wait.",
        431: "The headers are larger than 64 KiB or have more than 256 lines.",
        500: "A fault of the engine. `code` is `poisonous_request`, `corrupt_logits` or null.",
        503: "The engine starts, drains or has failed, cannot load the LoRA adapter, or has too many connections or "
        "bodies; try again after `Retry-After` seconds.",
    }
)
# statuses of every path: BoundedProtocol can answer most of them before a route is chosen
OF_ALL = frozenset((400, 408, 431, 500, 503))
OF_BODIES = frozenset((413, 415))
OF_MODEL_REQUESTS = OF_BODIES | {404}  # statuses of paths whose body names a model
OF_GENERATION = OF_MODEL_REQUESTS | {422, 429}
