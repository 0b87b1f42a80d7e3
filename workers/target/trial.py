"""Whether drafting pays at some load: steps with it and steps without, in turn.

Predictions know rows and waits. They do not know what drafting takes from a target that shares a processor, a
memory bus or a process with it: that shows only where steps are measured with and without.
"""

import math
from typing import Final

FIRST_OFF: Final = 12
OFF: Final = 8
FIRST_ON: Final = 256
ON: Final = 256
_UNSETTLED: Final = 3
_PAUSE: Final = 128
_LONGEST_PAUSES: Final = (256, 1024, 4096)
_WARM_UP: Final = 32
_LOSING: Final = 0.98
_MAY_COST: Final = 0.01
_LEAST_SAMPLES: Final = 64
_DOUBT: Final = 0.15
_RATE: Final = 0.3


class Trial:
    """One load's turns; `on` says whether drafting is to be asked for now.

    It begins off, for a few steps, goes on, and is off again for a few steps now and then. A turn with
    drafting that commits fewer tokens a second than those without ends, the sooner the clearer that is; then
    it stays off for so long that what the turn lost is a hundredth of it, but no longer than 256 steps the
    first time, 1024 the second, and then 4096. Of many `sessions` few steps say enough. Where drafting
    `loses_below`, at a lower load, it begins with a pause.
    """

    def __init__(self, sessions: int, loses_below: bool = False) -> None:
        self.on = False
        self.loses = loses_below
        self._sessions = sessions
        self._left = _PAUSE if loses_below else FIRST_OFF
        self._has_won = False
        self._unsettled = 0
        self._losses = 0
        self._plain: float | None = None
        self._tokens = self._time = self._steps = 0.0

    def stepped(self, tokens: float, time: float, tells: bool = True) -> None:
        """A step committed so many tokens, `time` after the last one, in predicted times of plain steps.

        One that does not tell of drafting, or of its absence, only passes.
        """
        self._left -= 1
        if self._unsettled:
            # What was asked for before the turn is still on its way.
            self._unsettled -= 1
        elif not tells:
            pass
        elif self.on:
            self._tokens += tokens
            self._time += time
            self._steps += 1
        else:
            rate = tokens / time
            self._plain = (
                rate if self._plain is None else self._plain + _RATE * (rate - self._plain)
            )
        if self._left <= 0 or self._loses_clearly():
            self._turn()

    @property
    def _gain(self) -> float:
        if self._plain is None or not self._time:
            return 1.0
        return self._tokens / self._time / self._plain

    def _loses_clearly(self) -> bool:
        samples = self._steps * self._sessions
        if not self.on or samples < _LEAST_SAMPLES:
            return False
        return self._gain < _LOSING - _DOUBT * math.sqrt(_LEAST_SAMPLES / samples)

    def _turn(self) -> None:
        if self.on:
            self._has_won = self._gain >= _LOSING
            self.loses = not self._has_won
            pause = int((1 - self._gain) * self._time / _MAY_COST)
            longest = _LONGEST_PAUSES[min(self._losses, len(_LONGEST_PAUSES) - 1)]
            self._left = OFF if self._has_won else min(max(_PAUSE, pause), longest)
            self._losses = 0 if self._has_won else self._losses + 1
            kept = 0.5 if self._has_won else 0.0
            self._tokens, self._time = kept * self._tokens, kept * self._time
            self._steps *= kept
        else:
            first = max(16, FIRST_ON // self._sessions)
            self._left = _UNSETTLED + (ON if self._has_won else first)
        self.on = not self.on
        # Drafters that have never run here are slow, and know nothing of their own guesses yet.
        warming_up = self.on and not self._has_won and not self._losses
        self._unsettled = max(_UNSETTLED, _WARM_UP // self._sessions) if warming_up else _UNSETTLED
