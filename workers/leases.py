"""Leases: the right to one session on a worker, held open for the session's whole life.

A lease is granted through the serving layer, which so sees every running session as a running call;
the session itself runs on the data plane. `Open` without a live lease is refused. The lease ends when
its session ends, when its holder lets it go, or when no session claims it in time.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable

from workers import limits
from workers.rpc.errors import FailedPrecondition


class LeaseTable:
    """The leases of one worker; lives on its event loop."""

    def __init__(self, claim_seconds: float = limits.LEASE_CLAIM_SECONDS) -> None:
        self._claim_seconds = claim_seconds
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    async def hold(self) -> AsyncGenerator[str, None]:
        """Yield a lease id, then wait until the lease ends.

        Closing the generator revokes the lease: a session that claimed it is closed.
        """
        lease_id = secrets.token_hex(16)
        lease = self._leases[lease_id] = _Lease()
        try:
            yield lease_id
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._claim_seconds):
                    await lease.claimed.wait()
            if lease.claimed.is_set():
                await lease.released.wait()
        finally:
            del self._leases[lease_id]
            if lease.revoke is not None and not lease.released.is_set():
                lease.revoke()

    def claim(self, lease_id: str, revoke: Callable[[], None]) -> None:
        """Tie a session to its lease; `revoke` is called if the holder lets go.

        Raises FailedPrecondition if the lease is not alive or already claimed.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.claimed.is_set():
            raise FailedPrecondition(
                "no live lease with this id: it expired, was used already, or belongs to another "
                "incarnation of this worker; take a new one"
            )
        lease.revoke = revoke
        lease.claimed.set()

    def release(self, lease_id: str) -> None:
        """The session of this lease is over."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.released.set()


class _Lease:
    def __init__(self) -> None:
        self.claimed = asyncio.Event()
        self.released = asyncio.Event()
        self.revoke: Callable[[], None] | None = None
