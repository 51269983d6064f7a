"""BodyBudget: limits the memory of request bodies that are being read or wait for the parser, for all tenants."""

from __future__ import annotations

from collections import Counter

from rayloom_engine.front.http.errors import unavailable

FREE_BYTES = 64 * 1024  # smaller bodies are not counted: the connection limit bounds their total


class BodyBudget:
    """Counts the bytes of all bodies in memory. For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenant_to_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """The bytes that all tenants hold."""
        return self._tenant_to_bytes.total()

    def share(self, tenant: str, least_bytes: int) -> Share:
        """Returns the Share of one body: a context manager that gives the body's bytes back at its exit.

        For this body, the limit of the budget is at least `least_bytes`, even if the budget is smaller.
        """
        return Share(self, tenant, max(self._max_bytes, least_bytes))

    def take(self, tenant: str, num_bytes: int, max_bytes: int) -> bool:
        """Adds bytes to the tenant's count. If the sum would exceed the tenant's part, adds nothing and returns False.

        A named tenant may hold at most as many bytes as remain free, so a single tenant gets half. When k tenants hold
        as much as they may, max_bytes / 2**k are still free. The queue has the same rule (`has_room`).
        """
        num_after = self.num_bytes + num_bytes
        num_beside = self._tenant_to_bytes[tenant] + num_bytes if tenant else 0
        if num_after + num_beside > max_bytes:
            return False
        self._tenant_to_bytes[tenant] += num_bytes
        return True

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Subtracts bytes; removes a tenant whose count is 0."""
        self._tenant_to_bytes[tenant] -= num_bytes
        if not self._tenant_to_bytes[tenant]:
            del self._tenant_to_bytes[tenant]


class Share:
    """The part of the budget that one body uses."""

    def __init__(self, budget: BodyBudget, tenant: str, max_bytes: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._num_bytes = 0  # bytes of the body received so far
        self._num_held = 0  # bytes of the body that the budget counts; 0 for a small body

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_error: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Gives the body's bytes back. Safe to call again."""
        if self._num_held:
            self._budget.give_back(self._tenant, self._num_held)
            self._num_held = 0

    def take(self, num_bytes: int) -> None:
        """Counts `num_bytes` more. Raises ApiError 503 if the tenant's part is used up, but never for a small body."""
        self._num_bytes += num_bytes
        if self._num_bytes <= FREE_BYTES:
            return
        num_new = self._num_bytes - self._num_held
        if not self._budget.take(self._tenant, num_new, self._max_bytes):
            busy = "too many large requests are being read at the same time; try again soon"
            raise unavailable(busy, "too_many_bodies", 2)
        self._num_held += num_new


class HeldBody:
    """A whole body that waits for its handler. It counts in the budget until `take` or `drop`."""

    def __init__(self, data: bytes, share: Share) -> None:
        self.data = data  # empty after `take` or `drop`
        self._share = share

    def take(self) -> bytes:
        """Returns the body. From now on, the caller has to count the body's bytes."""
        data = self.data
        self.drop()
        return data

    def drop(self) -> None:
        """Frees the memory of the body. Safe to call again."""
        self.data = b""
        self._share.give_back()
