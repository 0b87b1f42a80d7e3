"""A draft that learns while it serves: its student is a process of the lowest priority."""

import logging
import multiprocessing
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from safetensors.torch import load

from workers.draft.drafter import Learning
from workers.draft.updates import updated
from workers.engine.model import Model
from workers.training.online import ServedAnswer, study

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 64
_POLL_SECONDS: Final = 0.2


class ProcessLearner:
    """Lets the draft of a reference learn from answers, and makes models of what it has learned.

    `model` is the one to draft with now. The student begins with the first answer; should it come to an end,
    drafting goes on with the last model.
    """

    def __init__(self, reference: str, module: Any, model: Model) -> None:
        """`module` is the one of transformers that `model` was made from."""
        self.model = model
        self.learning = Learning()
        self._reference = reference
        self._module = module
        self._waiting: deque[ServedAnswer] = deque(maxlen=_MOST_WAITING)
        self._stopping = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    def learn(self, answer: ServedAnswer) -> None:
        """Learn from an answer some time; of too many that wait the oldest are left out."""
        with self._condition:
            self._waiting.append(answer)
            self._condition.notify()
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the student, whatever it does."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        student = context.Process(target=study, args=(self._reference, theirs), daemon=True)
        student.start()
        theirs.close()
        try:
            while answers := self._next():
                if not self._teach(ours, answers):
                    return
        except (EOFError, OSError):
            logger.error("the student of %s has ended: nothing more is learned", self._reference)
        finally:
            student.terminate()
            student.join()

    def _next(self) -> list[ServedAnswer]:
        """All answers that wait, once there are any; none at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._stopping)
            answers = [] if self._stopping else list(self._waiting)
            self._waiting.clear()
            return answers

    def _teach(self, student: Connection, answers: Sequence[ServedAnswer]) -> bool:
        """Have answers learned, and draft with what comes of it; False at the end."""
        student.send(answers)
        while not student.poll(_POLL_SECONDS):
            if self._stopping:
                return False
        updates, learning = student.recv()
        if updates is not None:
            self.model = self.model.renewed(updated(self._module, load(updates)))
            logger.info("answers that begin now are drafted with other weights: %s", learning)
        self.learning = learning
        return True
