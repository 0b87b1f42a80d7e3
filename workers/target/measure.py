"""Measures what a model's steps cost, at load."""

import logging
import time
from typing import Final

import torch

from workers.engine.kv_cache import KVPool
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.pricing import StepTimes
from workers.tree import ANCHOR

logger = logging.getLogger(__name__)

ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 18, 19, 24, 32, 48, 64, 96, 128)
CONTEXTS: Final = (64, 1024)
_TURNS: Final = 6
_BUDGET_S: Final = 5.0


def measure_step_times(model: Model, pool: KVPool, most_rows: int) -> StepTimes:
    """Run steps of 1 to `most_rows` rows behind short and long contexts.

    Takes some seconds at most: with a slow model, the larger numbers of rows are left to extrapolation.
    The contexts hold whatever the memory holds: what a step computes does not change how long it takes.
    """
    rows_tried = [rows for rows in ROWS if rows <= most_rows] or [1]
    room = min(pool.num_slots, model.info.max_model_len) - rows_tried[-1] - 1
    contexts = sorted({max(0, min(context, room)) for context in CONTEXTS})
    times: dict[tuple[int, int], float] = {}
    started = time.monotonic()
    # In turn, and the least of each: whatever else starts on this machine now disturbs single steps.
    for turn in range(_TURNS):
        for rows in rows_tried:
            if time.monotonic() - started > _BUDGET_S and (turn or len(times) >= 2 * len(contexts)):
                break
            for context in contexts:
                seconds = time_step(model, pool, rows, context)
                times[rows, context] = min(seconds, times.get((rows, context), seconds))
    logger.info(
        "steps of %s rows after %d tokens: %s ms",
        [rows for rows, context in times if context == contexts[0]],
        contexts[0],
        [round(1000 * s, 1) for (_, context), s in times.items() if context == contexts[0]],
    )
    return StepTimes(times)


def time_step(model: Model, pool: KVPool, rows: int, context: int) -> float:
    """Seconds of one step of so many rows behind so many tokens, whatever they hold."""
    kv = pool.sequence()
    kv.reserve(context + rows)
    kv.keys.zero_()
    kv.values.zero_()
    kv.length = context
    # A chain would be read as a prompt: siblings under an anchor are what a step verifies.
    parents = [ANCHOR, *[0] * (rows - 1)]
    try:
        began = time.perf_counter()
        model.forward(RowBatch([SequenceRows(kv, [0] * rows, range(rows), parents)]))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter() - began
    finally:
        kv.free()
