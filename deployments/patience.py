"""How long a target should wait for a proposal: no longer than the proposal is worth."""

import time

from workers.rpc import messages as m

_SMOOTHING = 0.2
_FIRST_GUESS = 1.0


class Patience:
    """The patience of one session, in milliseconds.

    A proposal is worth the time of the steps that it saves: the tokens that a round lately accepted,
    times the time of a step. Where proposals take longer than that, the target does not wait at all; a
    late proposal is still used in a later round if it fits.
    """

    def __init__(self, max_ms: float) -> None:
        self._max_ms = max_ms
        self._gain = _FIRST_GUESS
        self._delay_ms = 0.0
        self._committed_at: float | None = None
        self._current = 0.0

    def committed(self, committed: m.Committed) -> float | None:
        """A round is over; the new patience if it changed enough to be sent, else None."""
        self._gain += _SMOOTHING * (committed.accepted - self._gain)
        self._committed_at = time.monotonic()
        worth = min(self._max_ms, self._gain * committed.timings.step_ns / 1e6)
        return self._change(worth if self._delay_ms < worth else 0.0)

    def proposed(self) -> None:
        """The answer to the last commit arrived."""
        if self._committed_at is not None:
            delay = (time.monotonic() - self._committed_at) * 1000
            self._delay_ms += _SMOOTHING * (delay - self._delay_ms)
            self._committed_at = None

    def lost(self) -> float | None:
        """There is no drafter any more."""
        return self._change(0.0)

    def _change(self, milliseconds: float) -> float | None:
        if abs(milliseconds - self._current) <= 0.2 * self._current:
            return None
        self._current = milliseconds
        return milliseconds
