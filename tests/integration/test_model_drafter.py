"""The draft model: its tree, its cache, its limits; and that nothing it does changes a token."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import harness
from tests.oracles import assert_company_changes_nothing, assert_drafts_until_full
from workers.draft import cut, models
from workers.draft.calibration import Softness
from workers.draft.drafter import Ask
from workers.draft.drafters.model import ModelDrafter
from workers.draft.growth import UNEXPANDED, Grown
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams
from workers.tree import ANCHOR

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]


def drafter(folder: Path, dtype: str = "float32", **options: Any) -> ModelDrafter:
    draft = models.load(str(folder), dtype, "cpu", options.pop("target", None))
    return ModelDrafter(
        draft, **{"num_slots": 8192, "width": 4, "steps": 4, "floor": 0.0, **options}
    )


def cut_of(
    folder: Path, path: Path, layers: tuple[int, ...], noise: float = 0.0, every: int = 2
) -> Path:
    """A cut draft whose weights are the target's own, but for some noise, in a part of the vocabulary."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = base.get_parameter(name)
    tensors = {
        "vocabulary": torch.arange(0, base.config.vocab_size, every, dtype=torch.int32),
        f"{name}.up": torch.randn(weight.shape[0], 4, generator=generator) * noise,
        f"{name}.down": torch.randn(4, weight.shape[1], generator=generator),
        "model.norm.weight": base.model.norm.weight.detach().clone(),
    }
    cut.save_cut(path, cut.CutConfig(str(folder), layers), tensors)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_k2_a_draft_that_is_the_target_is_always_right(dtype: str) -> None:
    folder = tiny.llama()
    async with harness(folder, drafter(folder, dtype), dtype=dtype) as h:
        for sampling in SAMPLING:
            request = h.request(PROMPTS[0], max_tokens=60, seed=4, **sampling)
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            # The best path is the target's own; only wrong siblings are rejected.
            assert all(rate == 1.0 for rate in on.stats.acceptance_by_depth)
            chain = await h.generate(
                h.request(PROMPTS[0], max_tokens=60, seed=4, tree=False, **sampling)
            )
            chain.same_as(off)
            assert chain.stats.accepted_tokens == chain.stats.draft_tokens > 40
        await h.idle()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_k1_k6_with_a_draft_that_is_sometimes_right(dtype: str, tmp_path: Path) -> None:
    folder = tiny.llama()
    path = cut_of(folder, tmp_path / "draft", (0, 1, 2), noise=0.05, every=1)
    async with harness(folder, drafter(path, dtype), dtype=dtype) as h:
        await assert_company_changes_nothing(h, PROMPTS * 3, SAMPLING)
        assert h.target._counters.shared_steps > 0
        await h.idle()


async def test_k3_a_draft_of_another_mind_changes_nothing() -> None:
    async with harness(tiny.llama(0), drafter(tiny.llama(1))) as h:
        for sampling in SAMPLING:
            request = h.request(PROMPTS[1], max_tokens=40, seed=1, **sampling)
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.draft_tokens > 50
            assert on.stats.mean_accepted_length < 1.7


def test_the_cache_follows_the_answer_through_hits_and_misses() -> None:
    """Whatever was committed, the draft's guesses are those of a cache that was filled afresh."""
    folder = tiny.llama()
    rng = random.Random(3)
    grown = drafter(folder, steps=3)
    tokens = list(PROMPTS[0])
    sampling = SamplingParams(temperature=1.0, seed=2)
    grown.open(1, tokens, sampling)
    ask = Ask(1, 16, 6, False, "multibranch")
    recalled = 0

    def guessed(made: ModelDrafter, node: int) -> list[int]:
        held = made._sessions[1].tree
        return [t for t, parent in zip(held.tokens, held.parents, strict=True) if parent == node]

    for _ in range(25):
        grown._usual_worth = 0.0  # Whatever is known is good enough.
        hit = grown.recall(ask)
        tree = hit or grown.propose([ask])[0]
        fresh = drafter(folder, steps=3)
        fresh._softness = grown._softness
        fresh.open(1, tokens, sampling)
        expected = fresh.propose([ask])[0]
        if hit is None:
            assert expected == tree
        else:
            recalled += 1
            roots = {t for t, p in zip(hit.tokens, hit.parents, strict=True) if p == ANCHOR}
            assert roots == set(guessed(fresh, ANCHOR))
        # A tree that was grown before holds more, but says the same where both have looked.
        assert guessed(fresh, ANCHOR) == guessed(grown, ANCHOR)
        assert guessed(grown, 0) in ([], guessed(fresh, 0))
        session = grown._sessions[1]
        assert session.kv.length == len(tokens)
        for _ in range(rng.randrange(4)):
            grown.grow([ask])
        # Commit a path of the tree, and often a token that it does not hold.
        held = session.tree
        news, node = [], ANCHOR
        while len(news) < 4 and node in held.parents:
            node = rng.choice([i for i, parent in enumerate(held.parents) if parent == node])
            news.append(held.tokens[node])
            if held.rows[node] != UNEXPANDED and rng.random() < 0.8:
                break
        if rng.random() < 0.2:
            news.append(rng.choice([token for token in range(256) if token not in held.tokens]))
        grown.observe(1, news, ())
        tokens += news
    assert 4 < recalled < 20
    grown.close(1)
    grown._pool.check_integrity()
    assert grown._pool.free_slots == grown._pool.num_slots


@pytest.mark.parametrize("max_nodes", [3, 8, 20])
def test_what_is_not_looked_behind_could_not_have_been_sent(
    max_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf below the bar has no child above it: what is verified is the same, with fewer rows."""
    folder = tiny.llama()
    proposals, rows = [], []
    for barred in (True, False):
        if not barred:
            monkeypatch.setattr(Grown, "bar", lambda self, count: 0.0)
        made = drafter(folder, width=64, steps=4)
        made.open(1, PROMPTS[0], SamplingParams(temperature=1.0, seed=2))
        tree = made.propose([Ask(1, max_nodes, 6, False)])[0]
        proposals.append(tree.cut(max_nodes, 6))
        rows.append(len(made._sessions[1].tree.row_parents))
    assert proposals[0] == proposals[1]
    assert rows[0] < rows[1]


async def test_drafting_stops_at_the_drafts_own_limits() -> None:
    """Kind (f): its context, and its cache."""
    short = tiny.llama(0, max_position_embeddings=64)
    for made in (drafter(short), drafter(tiny.llama(), num_slots=64)):
        async with harness(tiny.llama(), made) as h:
            await assert_drafts_until_full(h, h.request(PROMPTS[0], max_tokens=150), 64)


def test_a_cut_draft_is_the_target_with_some_layers_and_its_updates(tmp_path: Path) -> None:
    folder = tiny.llama()
    path = cut_of(folder, tmp_path / "draft", (0, 2), noise=0.2)
    loaded = models.load(str(path), "float32", "cpu", None)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = cut.load_file(path / cut.WEIGHTS_FILE)
    name = "model.layers.0.mlp.down_proj.weight"
    base.get_parameter(name).data += tensors[f"{name}.up"] @ tensors[f"{name}.down"]
    base.model.layers = torch.nn.ModuleList([base.model.layers[0], base.model.layers[2]])
    base.config.num_hidden_layers = 2
    prompt = PROMPTS[0]
    with torch.inference_mode():
        expected = base(torch.tensor([prompt]), use_cache=False).logits[0, -1, ::2]
    kv = loaded.model.pool(256).sequence()
    kv.reserve(64)
    rows = SequenceRows(kv, prompt, [len(prompt) - 1])
    made = loaded.guesses(loaded.model.forward(RowBatch([rows])))[0]
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert loaded.ids is not None
    assert loaded.ids[3] == 6


def test_a_cut_draft_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = cut_of(tiny.llama(), tmp_path / "draft", (0, 2))
    config = json.loads((path / models.checkpoint.DRAFT_CONFIG).read_text())
    (path / models.checkpoint.DRAFT_CONFIG).write_text(json.dumps({**config, "format": 9}))
    with pytest.raises(models.checkpoint.CheckpointError, match="format 9"):
        models.load(str(path), "float32", "cpu", None)
    (path / models.checkpoint.DRAFT_CONFIG).write_text("{")
    with pytest.raises(models.checkpoint.CheckpointError, match="cannot be read"):
        models.load(str(path), "float32", "cpu", None)


def test_softness_makes_scores_what_they_say() -> None:
    """A drafter that is right in 3 of 10 but says 9 learns to say 3, by depth."""
    rng = random.Random(0)
    softness = Softness()

    def tree_saying(value: float) -> Grown:
        tree = Grown(root_known=True)
        tree.add_children(ANCHOR, [1], [value])
        return tree

    for _ in range(3000):
        said = 1 / (1 + 9 ** (1 - 2 / softness.at(1)))  # sharper at low softness
        softness.observe(tree_saying(said), [1 if rng.random() < 0.3 else 2])
    assert said == pytest.approx(0.3, abs=0.07)
    assert softness.at(1) > 1.0 == softness.at(2)
