"""API keys: who may call, and how much at once; the same at both front doors.

A key file holds hashes, so that it is no secret itself:

    keys:
      - id: team-a                       # names the key in refusals and in the target's fair sharing
        sha256: 2bb80d537b1da3e38bd3…    # python -m deployments.keys prints one for a new key
        max_concurrent: 16               # answers at once over all coordinators; left out: no limit
        requests_per_minute: 600         # requests, with bursts of as many
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import yaml
from pydantic import Field

from deployments.config import Strict
from workers.rpc.errors import RateLimited, Unauthenticated

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 5.0
FORGET_SECONDS: Final = 30.0


class Key(Strict):
    """One key of a file."""

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the key itself")
    max_concurrent: int | None = Field(None, ge=1, description="answers at once")
    requests_per_minute: int | None = Field(None, ge=1)


class KeyFile(Strict):
    """What a key file holds."""

    keys: tuple[Key, ...] = Field(min_length=1)


class Counts(Protocol):
    """Where the answers of all coordinators are counted."""

    async def enter(self, coordinator: str, key: Key, answers: int) -> str:
        """Count a request for so many answers; if the key's limits forbid it, the reason instead, else ""."""

    async def leave(self, coordinator: str, key_id: str, answers: int) -> None:
        """They are over."""

    async def report(self, coordinator: str, running: Mapping[str, int]) -> None:
        """What runs on a coordinator now, by key: corrects whatever got lost."""


def bearer(authorization: str) -> str | None:
    """The key of an Authorization header or its like in gRPC's metadata, if it is of the kind Bearer."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


class Gate:
    """Lets callers in by their keys. Without keys everybody may enter."""

    def __init__(self, counts: Counts, coordinator: str) -> None:
        self._counts = counts
        self._coordinator = coordinator
        self._keys: tuple[Key, ...] = ()
        self._running: Counter[str] = Counter()
        self._reporting: asyncio.Task[None] | None = None

    @property
    def guarded(self) -> bool:
        """Whether there are keys."""
        return bool(self._keys)

    def read(self, file: str | None) -> None:
        """Take the keys of a file. Raises OSError or ValueError, and changes nothing, if it is unusable."""
        if file is None:
            self._keys = ()
            return
        self._keys = KeyFile.model_validate(yaml.safe_load(Path(file).read_text())).keys

    def identify(self, presented: str | None) -> Key | None:
        """The key that was presented, None if nobody needs one; takes as long for a wrong one.

        Raises Unauthenticated.
        """
        if not self._keys:
            return None
        digest = hashlib.sha256((presented or "").encode()).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise Unauthenticated(
                "no valid API key: send one of this server's keys as 'Authorization: Bearer …'"
            )
        return found

    @contextlib.asynccontextmanager
    async def admit(self, key: Key | None, answers: int) -> AsyncIterator[None]:
        """Count a request for so many answers against its key while the block runs.

        Raises RateLimited if the key's limits are reached.
        """
        if key is None or not (key.max_concurrent or key.requests_per_minute):
            yield
            return
        if reason := await self._counts.enter(self._coordinator, key, answers):
            raise RateLimited(f"key {key.id!r}: {reason}; try again later")
        self._running[key.id] += answers
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._report())
        try:
            yield
        finally:
            self._running[key.id] -= answers
            with contextlib.suppress(Exception):
                await self._counts.leave(self._coordinator, key.id, answers)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            # A report that gets lost is followed by the next.
            with contextlib.suppress(Exception):
                await self._counts.report(self._coordinator, +self._running)


@dataclass(slots=True)
class _Bucket:
    """Requests that a key may still make, refilled with time."""

    left: float
    at: float


class Limits:
    """Counts over all coordinators; see Counts. `clock` gives seconds.

    A coordinator that is not heard of any more has taken its answers with it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, Counter[str]] = {}
        self._heard: dict[str, float] = {}
        self._buckets: dict[str, _Bucket] = {}

    async def enter(self, coordinator: str, key: Key, answers: int) -> str:
        """See Counts."""
        now = self._hear(coordinator)
        running = sum(counts[key.id] for counts in self._running.values())
        if key.max_concurrent is not None and running + answers > key.max_concurrent:
            return (
                f"{running} answers run and this request wants {answers}, but it may have "
                f"{key.max_concurrent} at once"
            )
        if key.requests_per_minute is not None:
            rate = key.requests_per_minute / 60
            bucket = self._buckets.setdefault(key.id, _Bucket(key.requests_per_minute, now))
            bucket.left = min(key.requests_per_minute, bucket.left + rate * (now - bucket.at))
            bucket.at = now
            if bucket.left < 1:
                return f"it may make {key.requests_per_minute} requests a minute"
            bucket.left -= 1
        self._running[coordinator][key.id] += answers
        return ""

    async def leave(self, coordinator: str, key_id: str, answers: int) -> None:
        """See Counts."""
        self._hear(coordinator)
        counts = self._running[coordinator]
        counts[key_id] = max(0, counts[key_id] - answers)

    async def report(self, coordinator: str, running: Mapping[str, int]) -> None:
        """See Counts."""
        self._hear(coordinator)
        self._running[coordinator] = Counter(running)

    def _hear(self, coordinator: str) -> float:
        now = self._clock()
        self._heard[coordinator] = now
        self._running.setdefault(coordinator, Counter())
        for silent in [c for c, at in self._heard.items() if now - at > FORGET_SECONDS]:
            del self._heard[silent], self._running[silent]
        return now


def main() -> None:
    """Make a key: print it, and the lines for a key file."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    print(f"key (keep it, it is shown only now): {key}")
    print(f"  - id: name\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
