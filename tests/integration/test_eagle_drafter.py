"""EAGLE heads: guesses from the target's own states, windows, checkpoints; and no token changed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import harness
from tests.oracles import assert_company_changes_nothing
from workers.checkpoint import CheckpointError, head_features
from workers.draft import eagle
from workers.draft.config import EagleConfig
from workers.draft.drafter import Ask
from workers.draft.drafters.eagle import EagleDrafter
from workers.draft.head_runner import HeadRunner
from workers.engine.features import FeatureTap
from workers.engine.rows import SequenceRows
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import ANCHOR, TokenTree

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
VERSIONS = ["eagle", "eagle3"]
GREEDY = SamplingParams(temperature=0.0)


def random_head(version: str, path: Path, every: int = 1) -> Path:
    """A head with weights of its own for the tiny target, in a part of the vocabulary."""
    target = tiny.llama()
    vocabulary = torch.arange(0, 264, every, dtype=torch.int32)
    head = eagle.new_head(version, target, vocabulary)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    eagle.save_head(path, head, str(target))
    return path


def drafter(path: Path, dtype: str = "float32", **options: Any) -> EagleDrafter:
    target = tiny.llama()
    runner = HeadRunner(
        eagle.load_head(path, target), getattr(torch, dtype), "cpu", options.get("window", 64)
    )
    return EagleDrafter(
        runner,
        "",
        **{"num_slots": 4096, "window": 64, "width": 4, "steps": 3, "floor": 0.0, **options},
    )


def target_states(tokens: list[int], version: str) -> torch.Tensor:
    """What stock transformers computes at every position, [T, F]."""
    model = AutoModelForCausalLM.from_pretrained(tiny.llama(), dtype=torch.float32)
    tap = FeatureTap(model, "last" if version == "eagle" else "three")
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    return tap.take()


def as_message(first: int, states: torch.Tensor) -> Features:
    return Features(first, len(states), states.shape[1], "float32", states.numpy().tobytes())


def reference(
    path: Path, tokens: list[int], features: torch.Tensor, drafted: list[int], window: int = 10**6
) -> list[int]:
    """The head's guesses behind `tokens` and then `drafted`, best first, written out plainly.

    Row t stands for token t + 1 with the state before it: the target's, or for drafted tokens the
    head's own.
    """
    head = eagle.load_head(path, tiny.llama())
    groups = head.config.target.num_attention_heads // head.config.target.num_key_value_heads

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        rows = torch.arange(query.shape[2])
        distance = rows[:, None] - rows[None, :]
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores[..., (distance < 0) | (distance >= window)] = float("-inf")
        return (scores.softmax(-1) @ value).transpose(1, 2)

    with torch.inference_mode():
        states = list(head.states(features)[: len(tokens) - 1])
        rows = tokens[1:] + drafted
        while True:
            fed = torch.tensor([rows[: len(states)]])
            positions = torch.arange(1, len(states) + 1)[None]
            made = head(fed, torch.stack(states)[None], positions, attend)[0]
            if len(states) == len(rows):
                break
            states.append(made[-1])
        best = head.guess(made[-1]).argsort(descending=True)
    return [int(head.vocabulary[place]) for place in best[:8]]


def children(tree: TokenTree, node: int) -> list[int]:
    return [t for t, parent in zip(tree.tokens, tree.parents, strict=True) if parent == node]


def propose(made: EagleDrafter, tokens: list[int], features: torch.Tensor) -> TokenTree:
    made.open(1, tokens, GREEDY)
    made.observe(1, (), [as_message(0, features)])
    return made.propose([Ask(1, 64, 4, False)])[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_guesses_are_the_heads_on_the_targets_states(version: str, tmp_path: Path) -> None:
    path = random_head(version, tmp_path / "head", every=2)
    tokens = PROMPTS[0]
    states = target_states(tokens, version)
    tree = propose(drafter(path), tokens, states[:-1])
    assert children(tree, ANCHOR) == reference(path, tokens, states, [])
    deeper = 0
    for node, token in enumerate(tree.tokens):
        if tree.parents[node] == ANCHOR and children(tree, node):
            assert children(tree, node)[0] == reference(path, tokens, states, [token])[0]
            for below in (i for i, parent in enumerate(tree.parents) if parent == node):
                if children(tree, below):
                    drafted = [token, tree.tokens[below]]
                    assert children(tree, below)[0] == reference(path, tokens, states, drafted)[0]
                    deeper += 1
    assert deeper


@pytest.mark.parametrize("version", VERSIONS)
def test_features_one_position_off_are_noticed(version: str, tmp_path: Path) -> None:
    """The trap: a head that reads the state at a token instead of the one before it still runs."""
    path = random_head(version, tmp_path / "head")
    tokens = PROMPTS[0]
    states = target_states(tokens, version)
    right = children(propose(drafter(path), tokens, states[:-1]), ANCHOR)
    off = children(propose(drafter(path), tokens, states[1:]), ANCHOR)
    assert right == reference(path, tokens, states, [])
    assert off != right


@pytest.mark.parametrize("version", VERSIONS)
def test_commits_and_late_features_lead_to_the_same_guesses(version: str, tmp_path: Path) -> None:
    """Kind: however tokens and features arrive, the guesses are those of all at once."""
    path = random_head(version, tmp_path / "head")
    tokens = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[0]]
    states = target_states(tokens, version)
    cut = len(PROMPTS[0])
    made = drafter(path)
    made.open(1, tokens[:cut], GREEDY)
    ask = [Ask(1, 64, 4, False)]
    # Without features nothing is guessed; a part of them does not help.
    assert not made.propose(ask)[0]
    made.observe(1, (), [as_message(0, states[:5])])
    assert not made.propose(ask)[0]
    made.observe(1, (), [as_message(5, states[5 : cut - 1])])
    assert (
        made.propose(ask)[0].tokens
        == propose(drafter(path), tokens[:cut], states[: cut - 1]).tokens
    )
    # Commits of one and of several tokens; of the last there are no features yet.
    known = cut
    for count in (1, 3, 2, 5):
        features = as_message(known - 1, states[known - 1 : known + count - 1])
        made.observe(1, tokens[known : known + count], [features])
        known += count
        tree = made.propose(ask)[0]
        fresh = drafter(path)
        fresh._softness = made._softness
        assert tree.tokens == propose(fresh, tokens[:known], states[: known - 1]).tokens
    made.close(1)
    made._pool.check_integrity()
    assert made._pool.free_slots == made._pool.num_slots


def test_a_head_looks_as_far_back_as_its_window(tmp_path: Path) -> None:
    path = random_head("eagle3", tmp_path / "head")
    tokens = PROMPTS[2]
    states = target_states(tokens, "eagle3")
    made = drafter(path, window=12)
    # Only the window's features are needed.
    first = len(tokens) - 1 - 12
    made.open(1, tokens, GREEDY)
    made.observe(1, (), [as_message(first, states[first:-1])])
    guessed = children(made.propose([Ask(1, 64, 2, False)])[0], ANCHOR)
    assert guessed == reference(path, tokens, states, [], window=12)
    assert guessed != reference(path, tokens, states, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("place", [pytest.param("draft", marks=pytest.mark.slow), "target"])
async def test_k1_k6_with_a_trained_head(place: str, version: str, dtype: str) -> None:
    path = tiny.trained_head(version)
    made = {"head": drafter(path, dtype)}
    there, here = (made, {}) if place == "draft" else ({}, made)
    features = head_features(str(path))
    async with harness(tiny.llama(), there, beside=here, dtype=dtype, features=features) as h:
        together = await assert_company_changes_nothing(h, PROMPTS * 3, SAMPLING)
        # Of the long prompt, too, which is beyond the window.
        assert len(PROMPTS[2]) > 64
        assert all(answer.stats.draft_tokens > 50 for answer in together)
        # The prompts were cached by then: their features with them.
        assert h.target._prefix_cache is not None
        assert h.target._prefix_cache.hits
        rounds = sum(answer.stats.rounds for answer in together)
        assert sum(answer.stats.committed_tokens for answer in together) > 1.2 * rounds
        await h.idle()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_native_pass_says_what_the_modules_say(version: str) -> None:
    """In bfloat16: states as close as its rounding, guesses but for those that are about equal."""
    path = tiny.trained_head(version)
    native, modules = drafter(path, "bfloat16")._runner, drafter(path, "bfloat16")._runner
    assert native._native is not None
    modules._native = None
    tokens = PROMPTS[2]
    states = target_states(tokens, version)
    made = []
    for runner in (native, modules):
        before = runner.tensor(as_message(0, states))[:-1]
        kv = runner.pool(4096).sequence()
        assert kv.reserve(len(tokens) + 8)
        head = SequenceRows(kv, tokens[1:], range(len(tokens) - 1))
        logits, read = runner.run([head], before)
        kv.keep(range(len(tokens) - 1))
        # Then a tree of its own states: two siblings, and a child of the second.
        parents = [ANCHOR, ANCHOR, 1]
        more, drafted = runner.run(
            [SequenceRows(kv, [5, 6, 7], range(3), parents)], read[-1].expand(3, -1)
        )
        made.append((torch.cat([logits, more]), torch.cat([read, drafted]).float()))
    (logits, read), (expected, wanted) = made
    assert torch.allclose(read, wanted, atol=0.03 * float(wanted.abs().max()))
    assert torch.allclose(logits, expected, atol=0.05 * float(expected.abs().max()))
    assert (logits.argmax(1) == expected.argmax(1)).float().mean() > 0.9


@pytest.mark.parametrize("place", ["draft", "target"])
async def test_a_head_that_was_not_asked_for_a_while_catches_up(place: str) -> None:
    """Under a high price nothing is drafted and no feature is sent; then the head goes on."""
    made = {"head": drafter(tiny.trained_head("eagle3"))}
    there, here = (made, {}) if place == "draft" else ({}, made)
    async with harness(tiny.llama(), there, beside=here, features="three", dtype="float32") as h:
        request = h.request(PROMPTS[0], max_tokens=120, auto=True)
        off = await h.generate(request, speculate=False)
        policy = h.target._scheduler.policy
        price, committed = policy.price, []

        def changing(sessions: int) -> tuple[float, float]:
            dear = 20 < h.target._counters.steps - begun < 45
            return (1.0, 0.0) if dear else price(sessions)

        policy.price = changing  # type: ignore[method-assign]
        begun = h.target._counters.steps
        generation = h.generation(request)
        stats = generation.stats
        tokens = []
        async for piece in generation.pieces():
            tokens += piece.tokens
            committed.append((stats.draft_tokens, stats.accepted_tokens, h.target._counters.steps))
        assert tokens == off.tokens
        quiet = [drafted for drafted, _, steps in committed if 25 < steps - begun < 45]
        assert len(quiet) > 5
        assert quiet[0] == quiet[-1]
        before = max(accepted for drafted, accepted, _ in committed if drafted == quiet[0])
        assert stats.accepted_tokens > before
        await h.idle()


async def test_k3_a_head_of_another_mind_changes_nothing(tmp_path: Path) -> None:
    made = drafter(random_head("eagle3", tmp_path / "head"))
    async with harness(tiny.llama(), made, features="three") as h:
        for sampling in SAMPLING:
            request = h.request(PROMPTS[1], max_tokens=40, seed=1, **sampling)
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.draft_tokens > 50
            assert on.stats.mean_accepted_length < 1.7


async def test_weights_are_reloaded_while_answers_run(tmp_path: Path) -> None:
    """An answer keeps the weights that it began with; the next one has the new ones."""
    target = tiny.llama()
    useless = random_head("eagle3", tmp_path / "head")
    config = EagleConfig("test", str(useless), "float32", "cpu", 64, 4, 3, 0.0, 4096, num_threads=0)
    async with harness(target, config, features="three", dtype="float32") as h:
        request = h.request(PROMPTS[0], max_tokens=60)
        off = await h.generate(request, speculate=False)
        pieces = h.generation(request)
        stats, tokens = pieces.stats, []
        group = h.drafts.workers[0]._group
        begun = group._loops["test"]
        async for piece in pieces.pieces():
            if not tokens:
                await h.drafts.workers[0].reload({"test": str(tiny.trained_head("eagle3"))})
            tokens += piece.tokens
        assert tokens == off.tokens
        assert stats.draft_tokens > 50
        assert stats.mean_accepted_length < 1.5
        await h.idle()
        assert not begun.alive
        after = await h.generate(request)
        after.same_as(off)
        assert after.stats.mean_accepted_length > 1.5
        # The same again is no change; what does not fit is refused and changes nothing.
        same = group._loops["test"]
        await h.drafts.workers[0].reload({"test": str(tiny.trained_head("eagle3"))})
        for weights, reason in (
            ({"other": "x"}, "'other' is no drafter"),
            ({"test": str(tiny.trained_head("eagle"))}, "other features"),
            ({"test": str(tmp_path / "nothing")}, "not found"),
        ):
            with pytest.raises(ValueError, match=reason):
                await h.drafts.workers[0].reload(weights)
        assert group._loops["test"] is same
        again = await h.generate(request)
        assert again.stats.mean_accepted_length > 1.5
        await h.idle()


def published(path: Path, version: str, target: Path) -> dict[str, torch.Tensor]:
    """The same head under the names of published checkpoints."""
    ours = load_file(path / eagle.WEIGHTS_FILE)
    layer = "midlayer." if version == "eagle3" else "layers.0."
    theirs = {
        name.replace("layer.", layer, 1) if name.startswith("layer.") else name: tensor.float()
        for name, tensor in ours.items()
        if name != "vocabulary"
    }
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    theirs["embed_tokens.weight"] = base.model.embed_tokens.weight.detach().clone()
    if version == "eagle3":
        vocabulary = ours["vocabulary"].long()
        theirs["d2t"] = vocabulary - torch.arange(len(vocabulary))
        theirs["t2d"] = torch.zeros(264, dtype=torch.bool).index_fill(0, vocabulary, True)
        theirs["lm_head.weight"] = base.lm_head.weight.detach()[vocabulary].clone()
    return theirs


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("version", VERSIONS)
def test_published_checkpoints_load(version: str, prefix: str, tmp_path: Path) -> None:
    path = random_head(version, tmp_path / "head", every=1 if version == "eagle" else 2)
    other = tmp_path / "published"
    other.mkdir()
    tensors = published(path, version, tiny.llama())
    save_file(
        {prefix + name: tensor for name, tensor in tensors.items()}, other / "model.safetensors"
    )
    (other / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle"]}))
    assert head_features(str(other)) == head_features(str(path))
    ours, theirs = eagle.load_head(path, tiny.llama()), eagle.load_head(other, tiny.llama())
    for (name, a), (other_name, b) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(a, b), name


def test_a_checkpoint_that_is_no_head_is_refused(tmp_path: Path) -> None:
    path = random_head("eagle3", tmp_path / "head")
    tensors = load_file(path / eagle.WEIGHTS_FILE)
    del tensors["layer.mlp.up_proj.weight"]
    save_file(tensors, path / eagle.WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"missing \['layer.mlp.up_proj.weight'\]"):
        eagle.load_head(path, tiny.llama())
    with pytest.raises(CheckpointError, match="no EAGLE head"):
        head_features(str(tiny.llama()))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors"):
        eagle.load_head(tmp_path / "pickled", tiny.llama())
