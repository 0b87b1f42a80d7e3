"""Leases: the right to one session on a worker, held open for the session's whole life.

A lease is granted through the serving layer, which so sees every running session as a running call;
the session itself runs on the data plane. `Open` without a live lease is refused. The lease ends when
its session ends, when its holder lets it go, or when no session claims it in time.
"""

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

from workers import limits
from workers.rpc import messages as m
from workers.rpc.connection import Channel
from workers.rpc.errors import FailedPrecondition, ServiceError


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


class LeasedReceiver(ABC):
    """The local end of a session that holds a lease, from its Open to whatever ends it.

    Claims the lease when it is made; raises FailedPrecondition if it cannot.
    """

    def __init__(self, channel: Channel, leases: LeaseTable, lease_id: str) -> None:
        self._channel = channel
        self._leases = leases
        self._lease_id = lease_id
        self._ended = False
        leases.claim(lease_id, self._revoked)

    @abstractmethod
    def handle(self, message: Any) -> None:
        """A message other than Close arrived; raises ProtocolError if it does not belong here."""

    @abstractmethod
    def ended(self) -> None:
        """The session is over, on whichever side: free what it held."""

    def receive(self, message: Any) -> None:
        """See Receiver."""
        if isinstance(message, m.Close):
            self._abandon()
        else:
            self.handle(message)

    def disconnected(self, error: ServiceError) -> None:
        """See Receiver."""
        self._abandon()

    def send(self, message: Any) -> None:
        """Tell the coordinator; a message that ends the session ends the lease too."""
        self._channel.send(message)
        over = isinstance(message, m.Finished | m.Failed)
        if over and not getattr(message, "drafter", ""):
            self._end()

    def _revoked(self) -> None:
        self._channel.send(m.Failed("CANCELLED", "the lease was given up"))
        self._abandon()

    def _abandon(self) -> None:
        if not self._ended:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.ended()
        self._channel.forget()
        self._leases.release(self._lease_id)


class _Lease:
    def __init__(self) -> None:
        self.claimed = asyncio.Event()
        self.released = asyncio.Event()
        self.revoke: Callable[[], None] | None = None
