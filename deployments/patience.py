"""How long a target should wait for proposals: no longer than they are worth."""

_NOTABLE = 0.2


class Patience:
    """The patience of one session, in milliseconds; each change is told once.

    A proposal is worth the time of the steps that it saves. Where proposals take longer than that, the target
    does not wait at all; a late proposal is still used in a later round if it fits.
    """

    def __init__(self, max_ms: float) -> None:
        self._max_ms = max_ms
        self._current = 0.0

    def committed(self, worth_s: float, delay_s: float) -> float | None:
        """A round is over; the new patience if it changed enough to be sent, else None.

        The next proposals are worth `worth_s`, and are expected after `delay_s`.
        """
        worth_ms = min(self._max_ms, worth_s * 1000)
        return self._change(worth_ms if delay_s * 1000 < worth_ms else 0.0)

    def lost(self) -> float | None:
        """There is no drafter any more."""
        return self._change(0.0)

    def _change(self, milliseconds: float) -> float | None:
        if abs(milliseconds - self._current) <= _NOTABLE * self._current:
            return None
        self._current = milliseconds
        return milliseconds
