"""GatewayRequests: the results of the requests that gateways sent to a core. A part of CoreStatus."""

from __future__ import annotations

import msgspec

# Upper bounds of the histogram buckets of the time to first token, in the core and in the API server process.
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_NUM_BUCKETS = len(FIRST_TOKEN_BOUNDS_S) + 1  # the last bucket is for all longer times


class GatewayRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the core's process started."""

    num_finished: int = 0  # requests that ended with or without an error
    num_failed: int = 0  # the part of num_finished that ended in an error of the engine
    first_token_counts: tuple[int, ...] = (0,) * _NUM_BUCKETS  # requests by bucket, not cumulative
    first_token_s: float = 0.0  # sum of the times to the first token
