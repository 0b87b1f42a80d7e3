"""Steps on several threads: the same bits as on one, whoever else runs steps meanwhile."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests import tiny
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.engine.threads import use_threads
from workers.tree import ANCHOR

ROWS = (1, 2, 7, 40, 200)


def in_threads(*calls: Callable[[], None]) -> None:
    """Run all at once; what any raises is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def steps(model: Model) -> list[torch.Tensor]:
    """A prompt and a tree of siblings behind it, for several numbers of rows."""
    made = []
    for rows in ROWS:
        kv = model.pool(1024).sequence()
        assert kv.reserve(2 * rows + 1)
        made.append(model.forward(RowBatch([SequenceRows(kv, range(1, rows + 1), range(rows))])))
        kv.keep(range(rows))
        parents = [ANCHOR, *[0] * (rows - 1)]
        tree = SequenceRows(kv, range(3, rows + 3), range(rows), parents)
        made.append(model.forward(RowBatch([tree])))
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bit(dtype: str) -> None:
    """Two loops at once, one of them with helpers, against one thread alone."""
    model = load_model(tiny.llama(), dtype)
    made: dict[int, list[torch.Tensor]] = {}

    def run(threads: int) -> None:
        use_threads(threads)
        made[threads] = steps(model)

    in_threads(lambda: run(1))
    in_threads(lambda: run(3), lambda: run(2))
    in_threads(lambda: run(4))
    for threads in (2, 3, 4):
        for alone, helped in zip(made[1], made[threads], strict=True):
            assert torch.equal(alone, helped)


def test_a_thread_keeps_its_number_whatever_others_take() -> None:
    all_set = threading.Barrier(3)

    def run(threads: int) -> None:
        use_threads(threads)
        all_set.wait()
        assert torch.get_num_threads() == threads
        torch.randn(64, 64) @ torch.randn(64, 64)
        assert torch.get_num_threads() == threads

    in_threads(*(lambda threads=threads: run(threads) for threads in (1, 2, 3)))
