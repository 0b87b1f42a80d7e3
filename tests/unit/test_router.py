"""Near workers are preferred, by as many sessions as the penalty says."""

from dataclasses import dataclass
from typing import Any

import pytest

from deployments.router import NearRouter


@dataclass
class Replica:
    replica_id: str
    node_id: str


def router(sessions: dict[str, int], penalty: int) -> Any:
    """A router on node "here" that knows how many sessions each replica holds."""
    made: Any = NearRouter.__new__(NearRouter)
    made._self_node_id = "here"
    made._replica_queue_len_cache = sessions
    made.initialize_state(penalty=penalty)
    return made


@pytest.mark.parametrize(
    ("near", "far", "penalty", "first"),
    [
        (0, 0, 4, "near"),
        (3, 0, 4, "near"),
        (4, 0, 4, "near"),
        (5, 0, 4, "far"),
        (1, 0, 0, "far"),
    ],
)
async def test_the_cheaper_comes_first(near: int, far: int, penalty: int, first: str) -> None:
    made = router({"near": near, "far": far}, penalty)
    replicas: list[Any] = [Replica("near", "here"), Replica("far", "there")]
    ranked = await made.choose_replicas(replicas)
    assert ranked[0][0].replica_id == first
    assert len(ranked) == 2
