"""A draft that learns while it serves: it gets better, what harms is taken back, and no token changes."""

import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.harness import harness
from tests.integration.test_model_drafter import PROMPTS, SAMPLING, cut_of
from tests.oracles import assert_company_changes_nothing
from workers.draft import drafters, models
from workers.draft.config import ModelConfig
from workers.draft.drafter import Ask, Learning
from workers.draft.drafters.online import OnlineDrafter
from workers.draft.updates import learnable, updated
from workers.engine.loading import load_module
from workers.engine.model import Model
from workers.request import SamplingParams
from workers.training import online
from workers.training.__main__ import main
from workers.training.corpus import Text
from workers.training.online import OnlineStudent, ServedAnswer
from workers.training.rehearsal import rehearse
from workers.tree import ANCHOR

GREEDY = SamplingParams(temperature=0.0)


def config(folder: Path, **options: Any) -> ModelConfig:
    defaults = {"dtype": "float32", "device": "cpu", "shared_vocabulary": False, "num_threads": 0}
    tree = {"width": 4, "steps": 4, "floor": 0.0, "num_slots": 8192}
    return ModelConfig("draft", str(folder), **{"online": True, **defaults, **tree, **options})


def stream(count: int, length: int = 64) -> list[Text]:
    """Greedy answers of `tiny.llama()` about one thing: a few prompts come again and again."""
    samples, _ = tiny.known_answers()
    texts = [
        Text(sample.tokens[: sample.answer_from + length].numpy(), sample.answer_from)
        for sample in samples[:3]
    ]
    return list(itertools.islice(itertools.cycle(texts), count))


def served(text: Text) -> ServedAnswer:
    tokens = tuple(text.tokens.tolist())
    return ServedAnswer(tokens, len(tokens) - text.answer_from, len(tokens), GREEDY)


@pytest.fixture
def weak(tmp_path: Path) -> Path:
    """A draft that is cut from the target, and is rarely right."""
    return cut_of(tiny.llama(), tmp_path / "draft", (0, 2), noise=0.05, every=1)


def test_a_stream_of_one_domain_raises_acceptance(
    weak: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "_LEARNING_RATE", 4e-3)
    windows, _ = rehearse(str(weak), stream(36, 24), "float32", rows=5, window=12, seed=0)
    first, last = windows[0], windows[-1]
    assert last.fixed == pytest.approx(first.fixed, rel=0.05)
    assert last.online > 1.3 * last.fixed
    assert last.learned.online_updates >= 2
    assert last.learned.online_right > last.learned.online_right_before


def test_an_update_that_harms_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "_LEARNING_RATE", 3.0)
    good = cut_of(tiny.llama(), tmp_path / "draft", (0, 1, 2), noise=0.05, every=1)
    student = OnlineStudent(*models.load_draft_module(str(good), "float32", "cpu"))
    answers = [served(text) for text in stream(3 * online.ANSWERS - 1)]
    first, later = answers[: online.ANSWERS], answers[online.ANSWERS :]
    assert student.learn(first[:-1]).updates is None
    harmful = student.learn(first[-1:])
    assert harmful.updates is not None
    assert any(
        update.abs().sum() > 0 for name, update in harmful.updates.items() if name.endswith(".up")
    )
    lessons = [student.learn([answer]) for answer in later]
    lesson, *others = [made for made in lessons if made.updates is not None]
    # It learns more rarely from then on.
    assert not others
    assert lesson.updates is not None
    # Nothing is left of it.
    assert all(not update.any() for name, update in lesson.updates.items() if name.endswith(".up"))
    done = lesson.learning
    assert (done.online_updates, done.online_reverts) == (1, 1)
    assert done.online_right < done.online_right_before
    assert done.online_compared == 64
    assert lessons[-1].learning == done


def test_what_is_out_of_the_drafts_vocabulary_teaches_nothing(tmp_path: Path) -> None:
    half = cut_of(tiny.llama(), tmp_path / "half", (0, 2), every=2)
    module, ids = models.load_draft_module(str(half), "float32", "cpu")
    student = OnlineStudent(module, ids)
    tokens = tuple(range(1, 40, 2))
    for _ in range(online.ANSWERS):
        lesson = student.learn([ServedAnswer(tokens, 12, 20, SamplingParams(seed=3))])
    assert lesson.updates is not None
    assert all(not update.any() for name, update in lesson.updates.items() if name.endswith(".up"))


@pytest.mark.parametrize("folder", [tiny.llama(), tiny.shaken(1)])
def test_updates_change_a_copy(folder: Path) -> None:
    module = load_module(folder, "float32", "cpu")
    name = "model.layers.1.mlp.up_proj"
    assert name in learnable(module)
    assert not any("lm_head" in layer for layer in learnable(module))
    weight = module.get_submodule(name).weight.clone()
    up, down = torch.randn(128, 4), torch.randn(4, 64)
    made = updated(module, {f"{name}.up": up, f"{name}.down": down})
    torch.testing.assert_close(made.get_submodule(name).weight, weight + up @ down)
    assert torch.equal(module.get_submodule(name).weight, weight)
    assert made.lm_head.weight is module.lm_head.weight
    assert made.model.layers[0].mlp.up_proj.weight is module.model.layers[0].mlp.up_proj.weight


class Restless:
    """A learner with another model for every answer."""

    def __init__(self, made: Sequence[Model]) -> None:
        self.learning = Learning()
        self.answers: list[ServedAnswer] = []
        self._models = itertools.cycle(made)

    @property
    def model(self) -> Model:
        return next(self._models)

    def learn(self, answer: ServedAnswer) -> None:
        self.answers.append(answer)

    def stop(self) -> None:
        return


def restless(weak: Path, dtype: str) -> tuple[OnlineDrafter, Restless]:
    module, ids = models.load_draft_module(str(weak), dtype, "cpu")
    draft = models.wrap_draft(str(weak), updated(module, {}), ids)
    torch.manual_seed(1)
    noise = {}
    for name in learnable(module):
        out, inside = module.get_submodule(name).weight.shape
        noise |= {f"{name}.up": 0.02 * torch.randn(out, 4), f"{name}.down": torch.randn(4, inside)}
    learner = Restless([draft.model, draft.model.renewed(updated(module, noise))])
    return OnlineDrafter(draft, learner, num_slots=8192, width=4, steps=4, floor=0.0), learner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_k1_k6_while_weights_are_swapped(dtype: str, tmp_path: Path) -> None:
    """Answers side by side that are drafted with other weights, in one pass of each."""
    draft = cut_of(tiny.llama(), tmp_path / "draft", (0, 1, 2), noise=0.05, every=1)
    made, learner = restless(draft, dtype)
    async with harness(tiny.llama(), made, dtype=dtype) as h:
        answers = await assert_company_changes_nothing(h, PROMPTS * 3, SAMPLING)
        await h.idle()
    # It has heard what was said.
    said = [(*p, *answer.tokens) for p, answer in zip(PROMPTS * 3, answers, strict=True)]
    assert len(learner.answers) == len(said)
    for heard in learner.answers:
        assert any(tokens[: heard.length] == heard.tokens for tokens in said)
        assert 20 < heard.answered <= 40


def test_an_answer_keeps_the_weights_that_it_began_with(weak: Path) -> None:
    made, _ = restless(weak, "float32")
    more = [*PROMPTS[0], 5]

    def guesses(number: int) -> list[int]:
        tree = made._sessions[number].tree
        return [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ANCHOR]

    alone = []
    for number, prompt in ((0, more), (1, PROMPTS[0])):
        made.open(number, prompt, GREEDY)
        made.propose([Ask(number, 16, 6, False)])
        alone.append(guesses(number))
        made.close(number)
    made.open(0, PROMPTS[0], GREEDY)
    made.propose([Ask(0, 16, 6, False)])
    before = guesses(0)
    made.open(1, PROMPTS[0], GREEDY)
    made.observe(0, [5], ())
    made.propose([Ask(0, 16, 6, False), Ask(1, 16, 6, False)])
    assert [guesses(0), guesses(1)] == alone
    assert before != guesses(1)


# The student has the lowest priority: it may take long on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_worker_learns_beside_its_answers(
    weak: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the real process: answers go on, an update is taken, and when the process dies the draft stays."""
    made = drafters.make(config(weak), str(tiny.llama()))
    async with harness(tiny.llama(), made) as h:
        plain = [
            await h.generate(h.request(prompt, max_tokens=40), speculate=False)
            for prompt in PROMPTS
        ]
        deadline = time.monotonic() + 800
        updates: list[int] = []
        while h.drafts.workers[0].status().online_compared < 200:
            assert time.monotonic() < deadline
            together = await asyncio.gather(
                *(h.generate(h.request(prompt, max_tokens=40)) for prompt in PROMPTS)
            )
            for answer, expected in zip(together, plain, strict=True):
                answer.same_as(expected)
                assert answer.stats.draft_tokens > 0
            updates.append(h.drafts.workers[0].status().online_updates)
            # It learns while nobody wants to be answered.
            await asyncio.sleep(1.0)
        assert updates[0] == 0
        assert updates[-1] >= 1
        (student,) = multiprocessing.active_children()
        student.kill()
        student.join()
        for prompt, expected in zip(PROMPTS * 2, plain * 2, strict=True):
            answer = await h.generate(h.request(prompt, max_tokens=40))
            answer.same_as(expected)
            assert answer.stats.draft_tokens > 0
        await h.idle()
    assert "nothing more is learned" in caplog.text
    assert multiprocessing.active_children() == []


def test_a_draft_that_cannot_learn_is_refused(weak: Path) -> None:
    with pytest.raises(ValueError, match="another tokenizer; leave out online"):
        drafters.make(config(tiny.spelling_llama(), shared_vocabulary=True), str(tiny.llama()))


def test_the_rehearsal_of_a_stream(weak: Path, tmp_path: Path) -> None:
    texts = stream(6)
    parts = {
        "prompt": [text.tokens[: text.answer_from] for text in texts],
        "output": [text.tokens[text.answer_from :] for text in texts],
    }
    arrays = {}
    for kind, lists in parts.items():
        arrays[f"{kind}_ids"] = np.concatenate(lists)
        arrays[f"{kind}_offsets"] = np.cumsum([0, *map(len, lists)])
    np.savez(tmp_path / "stream.npz", **arrays)
    command = ["rehearse", "--draft", str(weak), "--corpus", str(tmp_path / "stream.npz")]
    out = tmp_path / "out"
    assert main([*command, "--dtype", "float32", "--window", "3", "--out", str(out)]) == 0
    windows = json.loads((out / "online.json").read_text())["windows"]
    assert [window["answers"] for window in windows] == [3, 6]
    assert all(window["fixed"] == window["online"] for window in windows)
    assert (out / "online.png").stat().st_size > 1000
