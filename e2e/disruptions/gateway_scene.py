"""A service with gateways, on which tests cause disturbances, and the undisturbed answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients.gateways import GatewayedService, uids
from clients.mixed_load import Load
from disruptions.gateway_under_load import GatewayRecord, disturb_gateway


@dataclass(frozen=True)
class GatewayScene:
    """A service with its undisturbed answers."""

    service: GatewayedService
    load: Load
    show: Callable[[GatewayRecord], None]

    def expect_unnoticed(
        self, what: str, strike: Callable[[], object], is_over: Callable[[], bool], **settings: Any
    ) -> GatewayRecord:
        """Disturbs the service, and expects that no request failed and that no answer changed."""
        seen = disturb_gateway(self.service, self.load, what, strike, is_over=is_over, **settings)
        self.show(seen)
        assert [failure.what for failure in seen.failures] == []
        return seen

    def is_recreated(self, head: dict[str, Any], number: int) -> Callable[[], bool]:
        """Returns a predicate that is true when the pod `head` is gone and exactly `number` engines serve."""
        uid = head["metadata"]["uid"]

        def is_over() -> bool:
            # Right after the deletion, the status still describes the old engine, so the pods are counted, too.
            heads = uids(self.service.pods("head"))
            return uid not in heads and len(heads) == number and self.service.has(number)

        return is_over
