"""What learning online would bring: recorded answers are drafted in their order, with it and without."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from workers import verification
from workers.draft.drafter import Ask, Drafter, Learning
from workers.draft.drafters.model import ModelDrafter
from workers.draft.drafters.online import OnlineDrafter
from workers.draft.models import load_draft_module, wrap_draft
from workers.draft.updates import updated
from workers.engine.model import Model
from workers.request import SamplingParams
from workers.training.corpus import Text
from workers.training.online import OnlineStudent, ServedAnswer

_GREEDY: Final = SamplingParams(temperature=0.0)
_TREE: Final = (8192, 4, 4, 0.05)
"""As in a server's config: slots, width, steps and floor."""


@dataclass(frozen=True, slots=True)
class Window:
    """The last answers of the first so many: tokens a pass of the target, of a draft that learns or not.

    `learned` says what has been done until then.
    """

    answers: int
    fixed: float
    online: float
    learned: Learning


class AtOnce:
    """A learner in this process: the next answer is drafted with what the last one has taught."""

    def __init__(self, module: Any, model: Model, student: OnlineStudent) -> None:
        """`module` is the one of transformers that `model` was made from."""
        self.model = model
        self.learning = Learning()
        self.seconds = 0.0
        self._module = module
        self._student = student

    def learn(self, answer: ServedAnswer) -> None:
        """See Learner."""
        began = time.monotonic()
        lesson = self._student.learn([answer])
        self.seconds += time.monotonic() - began
        self.learning = lesson.learning
        if lesson.updates is not None:
            self.model = self.model.renewed(updated(self._module, lesson.updates))

    def stop(self) -> None:
        """See Learner."""
        return


def rehearse(
    reference: str, texts: Sequence[Text], dtype: str, rows: int, window: int, seed: int
) -> tuple[list[Window], float]:
    """Windows of so many greedy answers, verified with `rows` drafted rows; and the seconds of learning."""
    module, ids = load_draft_module(reference, dtype, "cpu")
    draft = wrap_draft(reference, updated(module, {}), ids)
    student = OnlineStudent(*load_draft_module(reference, "float32", "cpu"), seed)
    learner = AtOnce(module, draft.model, student)
    drafters = (ModelDrafter(draft, *_TREE), OnlineDrafter(draft, learner, *_TREE))
    windows = []
    tokens, passes = 0, [0, 0]
    for number, text in enumerate(tqdm(texts, unit="answer"), 1):
        tokens += len(text.tokens) - text.answer_from - 1
        for place, drafter in enumerate(drafters):
            passes[place] += count_passes(drafter, text, rows)
        if number % window == 0:
            fixed, online = (round(tokens / max(1, count), 4) for count in passes)
            windows.append(Window(number, fixed, online, learner.learning))
            tokens, passes = 0, [0, 0]
    return windows, learner.seconds


def count_passes(drafter: Drafter, text: Text, rows: int) -> int:
    """Passes of a target that writes a text's answer at temperature 0, after its first token."""
    tokens = text.tokens.tolist()
    drafter.open(0, tokens[: text.answer_from], _GREEDY)
    done = text.answer_from + 1
    drafter.observe(0, tokens[text.answer_from : done], ())
    passes = 0
    while done < len(tokens):
        (tree,) = drafter.propose([Ask(0, rows, len(tokens) - done - 1, chain=False)])
        assert tree is not None
        rest: Iterator[int] = iter(tokens[done:])
        verdict = verification.walk(tree.cut(rows, rows), lambda node: next(rest), lambda _: True)  # noqa: B023
        drafter.observe(0, verdict.tokens, ())
        done += len(verdict.tokens)
        passes += 1
    drafter.close(0)
    return passes


def write(folder: Path, windows: Sequence[Window], seconds: float) -> None:
    """Write online.json and online.png, and print a table."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"seconds": round(seconds, 1), "windows": [asdict(window) for window in windows]}
    (folder / "online.json").write_text(json.dumps(content, indent=1) + "\n")
    print("| answers | τ as it is | τ online | updates | taken back |\n|---|---|---|---|---|")
    for window in windows:
        done = window.learned
        cells = (
            str(window.answers),
            f"{window.fixed:.2f}",
            f"{window.online:.2f}",
            str(done.online_updates),
            str(done.online_reverts),
        )
        print(f"| {' | '.join(cells)} |")
    print(f"{seconds:.0f} s of learning")
    _plot(windows, folder / "online.png")


def _plot(windows: Sequence[Window], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    answers = [window.answers for window in windows]
    axes.plot(answers, [window.fixed for window in windows], marker="o", label="as it is")
    axes.plot(answers, [window.online for window in windows], marker="o", label="online")
    axes.set_xlabel("answers of the stream")
    axes.set_ylabel("τ, tokens a pass of the target")
    axes.set_ylim(1.0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
