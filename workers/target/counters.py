"""What a target worker has done since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Written by the target's loop thread only."""

    steps: int = 0
    rows: int = 0
    shared_steps: int = 0
    preemptions: int = 0
    proposals_used: int = 0
    proposals_rebased: int = 0
    proposals_dropped: int = 0
