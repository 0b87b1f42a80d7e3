"""The ranks of a target, from their start to their end."""

import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from workers import checkpoint
from workers.engine.loading import load_model
from workers.engine.tensor_parallel import Follower, Place, Ranks
from workers.engine.threads import use_threads
from workers.target.config import TargetConfig

logger = logging.getLogger(__name__)

STEP_SECONDS: Final = 30.0
"""A step that takes longer hangs: one of the ranks has stopped."""


def follow(config: TargetConfig, rank: int, folder: Path) -> None:
    """Be a rank other than 0 of a target's model, which meets the others in `folder`, until rank 0 ends.

    Raises RuntimeError if a rank is lost.
    """
    use_threads(config.num_threads)
    ranks = Ranks(Place(rank, config.tensor_parallel_size, folder), config.device)
    model = load_model(checkpoint.resolve(config.model), config.dtype, config.device, ranks)
    Follower(model, ranks).run()


class Watchdog:
    """Ends the process when a step of several ranks fails, or hangs: they cannot find together again.

    What ran here goes on on another target, and whoever runs the process starts it anew. Entered for each
    step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = float("inf")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> Self:
        self._until = time.monotonic() + self._seconds
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._until = float("inf")
        if error is not None:
            _end_process(f"a step failed: {error!r}")

    def _watch(self) -> None:
        while time.monotonic() < self._until:
            time.sleep(self._seconds / 30)
        _end_process(f"a step hung for {self._seconds:g} s")


def _end_process(reason: str) -> None:
    logger.critical("this target ends, with all its ranks: %s", reason)
    logging.shutdown()
    os._exit(1)
