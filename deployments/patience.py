"""How long a target should wait for a proposal: no longer than the proposal is worth."""

import time

from workers.rpc import messages as m

_SMOOTHING = 0.2


class Patience:
    """The patience of one session, in milliseconds.

    A proposal is worth the time of the steps that it saves. Where proposals take longer than that, the target
    does not wait at all; a late proposal is still used in a later round if it fits.
    """

    def __init__(self, max_ms: float) -> None:
        self._max_ms = max_ms
        self._delay_ms = 0.0
        self._committed_at: float | None = None
        self._current = 0.0

    def committed(self, committed: m.Committed, worth_s: float | None) -> float | None:
        """A round is over; the new patience if it changed enough to be sent, else None.

        `worth_s` is what the next proposal is worth; a step, as long as it is not known.
        """
        self._committed_at = time.monotonic()
        worth_ms = committed.timings.step_ns / 1e6 if worth_s is None else worth_s * 1000
        worth_ms = min(self._max_ms, worth_ms)
        return self._change(worth_ms if self._delay_ms < worth_ms else 0.0)

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
