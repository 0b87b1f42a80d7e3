"""What drafting may cost the answers of a target: a small share of their time, and what it has saved them."""

from typing import Final

SHARE: Final = 0.02
"""Of the elapsed time, what drafting may cost."""

_FIRST_STEPS: Final = 1.0
_MOST_STEPS: Final = 8.0


class Budget:
    """Seconds of each answer in the target's steps; `plain_s` is the time of a plain one.

    It begins with a step's worth. What was saved is kept for a while only: else drafting that has paid for
    an hour could cost the next minutes.
    """

    def __init__(self, plain_s: float) -> None:
        self._left = _FIRST_STEPS * plain_s

    def covers(self, cost_s: float = 0.0, saved_s: float = 0.0) -> bool:
        """Whether what is expected to cost and save so much is affordable."""
        return self._left >= max(0.0, cost_s - saved_s)

    def paid(self, elapsed_s: float, cost_s: float, saved_s: float, plain_s: float) -> None:
        """A step and the wait before it took `elapsed_s`; drafting cost and saved so much of it."""
        left = self._left + SHARE * elapsed_s + saved_s - cost_s
        self._left = min(left, _MOST_STEPS * plain_s)
