"""Whether drafting pays at some load: steps with it and steps without, in turn.

Predictions know rows and waits. They do not know what drafting takes from a target that shares a processor, a
memory bus or a process with it: that shows only where steps are measured with and without.
"""

from typing import Final

FIRST_OFF: Final = 12
OFF: Final = 8
FIRST_ON: Final = 64
ON: Final = 256
_UNSETTLED: Final = 3
_PAUSE: Final = 128
_LONGEST_PAUSE: Final = 2048
_LOSING: Final = 0.98
_RATE: Final = 0.3


class Trial:
    """One load's turns; `on` says whether drafting is to be asked for now.

    It begins off, for a few steps, goes on, and is off again for a few steps now and then. Where a turn with
    drafting committed fewer tokens a second than those without, it stays off for 128, 256, … 2048 steps. Of
    many `sessions` few steps say enough.
    """

    def __init__(self, sessions: int) -> None:
        self.on = False
        self._first_on = max(8, FIRST_ON // sessions)
        self._left = FIRST_OFF
        self._has_won = False
        self._unsettled = 0
        self._pause = _PAUSE
        self._plain: float | None = None
        self._tokens = self._time = 0.0

    def stepped(self, tokens: float, time: float) -> None:
        """A step committed so many tokens a session, in `time`, whose unit is a plain step's prediction."""
        self._left -= 1
        if self._unsettled:
            # What was asked for before the turn is still on its way.
            self._unsettled -= 1
        elif self.on:
            self._tokens += tokens
            self._time += time
        else:
            self._plain = (
                time if self._plain is None else self._plain + _RATE * (time - self._plain)
            )
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        won = True
        if self.on and self._plain is not None and self._time:
            won = self._tokens / self._time * self._plain >= _LOSING
        if self.on:
            self._has_won = won
            self._left = OFF if won else self._pause
            self._pause = _PAUSE if won else min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._left = ON if self._has_won else self._first_on + _UNSETTLED
        self.on = not self.on
        self._unsettled = _UNSETTLED
        self._tokens = self._time = 0.0
