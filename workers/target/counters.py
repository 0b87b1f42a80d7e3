"""What a target worker has done since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Written by the target's loop thread only."""

    steps: int = 0
    rows: int = 0
    shared_steps: int = 0
    preemptions: int = 0
    resumed: int = 0
    proposals_used: int = 0
    proposals_rebased: int = 0
    proposals_dropped: int = 0
    tokens_committed: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    nodes_priced_out: int = 0
    waits: int = 0
    waits_in_vain: int = 0
    wait_ns: int = 0
    step_ns: int = 0
