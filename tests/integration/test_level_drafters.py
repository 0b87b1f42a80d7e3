"""Medusa heads and mask drafters: whole trees from one pass, checkpoints; and no token changed."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deployments import check
from deployments.app import target_options
from deployments.config import AppConfig
from tests import tiny
from tests.harness import harness
from tests.integration import test_laws
from tests.integration.test_eagle_drafter import as_message, children, target_states
from tests.integration.test_laws import AT_ONCE, FILTERS
from tests.oracles import assert_company_changes_nothing
from tests.unit.test_sampling import SIGNIFICANCE, chi_square
from workers.checkpoint import MASKS_FILE, MODEL_CONFIG, CheckpointError
from workers.draft import drafters, masks, medusa
from workers.draft.config import DrafterConfig, MaskConfig, MedusaConfig
from workers.draft.cut import cut_module, load_cut_module, reduce_head
from workers.draft.drafter import Ask, Drafter
from workers.draft.drafters.level_drafter import LevelDrafter
from workers.draft.levels import ACCURACIES
from workers.engine.loading import load_module
from workers.request import SamplingParams
from workers.sampling import gumbel_noise, noise_key
from workers.training.distill import CutStudent
from workers.tree import ANCHOR, TokenTree

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
KINDS = ["medusa", "mask"]
GREEDY = SamplingParams(temperature=0.0)


def config(kind: str, path: Path, dtype: str = "float32") -> DrafterConfig:
    if kind == "medusa":
        return MedusaConfig("test", str(path), dtype, "cpu", num_threads=0)
    return MaskConfig("test", str(path), dtype, "cpu", num_slots=4096, num_threads=0)


def made(kind: str, path: Path, dtype: str = "float32") -> LevelDrafter[Any]:
    drafter = drafters.make(config(kind, path, dtype), str(tiny.llama()))
    assert isinstance(drafter, LevelDrafter)
    return drafter


def trained(kind: str) -> Path:
    return tiny.trained_medusa() if kind == "medusa" else tiny.trained_mask()


def random_one(kind: str, path: Path) -> Path:
    """A drafter with weights of its own, in a part of the vocabulary."""
    target, generator = tiny.llama(), torch.Generator().manual_seed(1)
    vocabulary = torch.arange(0, 264, 2, dtype=torch.int32)

    def shake(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.data.add_(noise)

    if kind == "medusa":
        heads = medusa.new_heads(3, 2, target, vocabulary)
        shake(heads)
        medusa.save_heads(path, heads, str(target))
    else:
        module = cut_module(load_module(target, "float32", "cpu"), (0, 2))
        reduce_head(module, vocabulary)
        student = CutStudent(module, (0, 2), vocabulary, str(target), 0)
        shake(module)
        student.save(path)
        masks.save_masks(path, torch.randn(2, 64, generator=generator) * 0.3)
    return path


def expected(kind: str, path: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [3, 132] behind `tokens`, written out plainly."""
    if kind == "medusa":
        heads = medusa.load_heads(path, tiny.llama())
        return heads(target_states(tokens, "eagle")[-2])
    module, _ = load_cut_module(path, "float32", "cpu")
    learned = load_file(path / MASKS_FILE)["masks"].float()
    rows = torch.cat([module.get_input_embeddings()(torch.tensor(tokens)), learned])
    visible = torch.ones(len(rows), len(rows)).tril().bool()
    visible[len(tokens) :, len(tokens) :] = True
    logits = module(
        inputs_embeds=rows[None],
        attention_mask=visible[None, None],
        position_ids=torch.arange(len(rows))[None],
        use_cache=False,
    ).logits[0]
    return logits[len(tokens) - 1 :]


def levels(kind: str, path: Path, tokens: list[int], params: SamplingParams) -> list[list[int]]:
    """The best 8 guesses of each depth by logits and noise."""
    ids = torch.arange(0, 264, 2)
    found = []
    with torch.inference_mode():
        for depth, logits in enumerate(expected(kind, path, tokens)):
            values = logits
            if not params.greedy:
                key = noise_key(params.seed, params.choice, len(tokens) + depth)
                values = logits / params.temperature + gumbel_noise(key, ids)
            found.append(ids[values.topk(8).indices].tolist())
    return found


def observe(drafter: Drafter, kind: str, text: list[int], known: int, more: int) -> None:
    """Commit `more` tokens of a text behind `known` ones, as the target does."""
    features = []
    if kind == "medusa":
        states = target_states(text, "eagle")[max(0, known - 1) : known + more - 1]
        features = [as_message(max(0, known - 1), states)]
    drafter.observe(1, text[known : known + more], features)


def by_depth(tree: TokenTree) -> list[dict[int, list[int]]]:
    """For each depth the children of each node there is above it."""
    depths = tree.depths()
    above: list[dict[int, list[int]]] = [{} for _ in range(max(depths))]
    for node in range(ANCHOR, len(tree)):
        depth = 0 if node == ANCHOR else depths[node]
        if found := children(tree, node):
            above[depth][node] = found
    return above


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.9, seed=3)], ids=["0", ".9"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_one_pass(kind: str, params: SamplingParams, tmp_path: Path) -> None:
    """Every parent of a depth has the same children, best first, however the tokens came."""
    path = random_one(kind, tmp_path / "one")
    drafter = made(kind, path)
    text = [*PROMPTS[0], *PROMPTS[2]]
    known = len(PROMPTS[0])
    drafter.open(1, text[:known], params)
    for more in (1, 3, 2, 60):
        observe(drafter, kind, text, known, more)
        known += more
        (tree,) = drafter.propose([Ask(1, 24, 3, False)])
        assert tree is not None
        wanted = levels(kind, path, text[:known], params)
        found = by_depth(tree)
        assert len(found) == 3
        for depth, above in enumerate(found):
            for guesses in above.values():
                assert set(guesses) <= set(wanted[depth])
            assert max(above.values(), key=len)[0] == wanted[depth][0]
        (chain,) = drafter.propose([Ask(1, 24, 3, True)])
        assert chain == TokenTree.chain([guesses[0] for guesses in wanted], chain.scores)
        (shallow,) = drafter.propose([Ask(1, 24, 2, False)])
        assert shallow.depth() == 2
    drafter.close(1)


def test_medusa_waits_for_the_state_before_the_last_token(tmp_path: Path) -> None:
    """The trap: heads that read the state of another position still run."""
    path = random_one("medusa", tmp_path / "one")
    tokens = PROMPTS[0]
    states = target_states(tokens, "eagle")
    drafter = made("medusa", path)
    drafter.open(1, tokens, GREEDY)
    ask = [Ask(1, 24, 3, False)]
    assert drafter.propose(ask) == [None]
    drafter.observe(1, (), [as_message(0, states[:-2])])
    assert drafter.propose(ask) == [None]
    drafter.observe(1, (), [as_message(len(tokens) - 2, states[-2:-1])])
    (tree,) = drafter.propose(ask)
    assert (
        children(tree, ANCHOR)
        == levels("medusa", path, tokens, GREEDY)[0][: len(children(tree, ANCHOR))]
    )
    # Another session beside it, without features, is not ready yet.
    drafter.open(2, tokens, GREEDY)
    assert drafter.propose([Ask(2, 24, 3, False), *ask]) == [None, tree]


def test_a_mask_drafter_that_finds_no_room_drafts_no_more(tmp_path: Path) -> None:
    path = random_one("mask", tmp_path / "one")
    drafter = made("mask", path)
    for session in range(3):
        drafter.open(session, PROMPTS[2] * 5, GREEDY)
    # 512 positions at most: the masks of the last session stand too far out.
    drafter.open(3, (PROMPTS[2] * 6)[:511], GREEDY)
    trees = drafter.propose([Ask(session, 8, 3, False) for session in range(4)])
    assert [bool(tree) for tree in trees] == [True, True, True, False]
    for session in range(4):
        drafter.close(session)
    drafter._pool.check_integrity()
    assert drafter._pool.free_slots == drafter._pool.num_slots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [pytest.param("draft", marks=pytest.mark.slow), "target"])
async def test_k6_company_changes_nothing(place: str, kind: str) -> None:
    drafter = {"test": made(kind, trained(kind), "bfloat16")}
    there, here = (drafter, {}) if place == "draft" else ({}, drafter)
    options: dict[str, Any] = {"dtype": "bfloat16", "features": drafter["test"].feature_kind}
    async with harness(tiny.llama(), there, beside=here, **options) as h:
        together = await assert_company_changes_nothing(h, PROMPTS * 3, SAMPLING)
        assert all(answer.stats.draft_tokens > 50 for answer in together)
        rounds = sum(answer.stats.rounds for answer in together)
        assert sum(answer.stats.committed_tokens for answer in together) > 1.2 * rounds
        await h.idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_drawn_answers_have_the_targets_law(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every parent of a depth has the same draws; only one of them is ever asked for them."""
    monkeypatch.setattr(test_laws, "PROMPT", PROMPTS[0])
    expected = test_laws.exact(tiny.llama(), FILTERS)
    drafter = made(kind, trained(kind))
    options: dict[str, Any] = {"dtype": "float32", "features": drafter.feature_kind}
    async with harness(tiny.llama(), drafter, max_num_seqs=AT_ONCE, **options) as h:
        found = await test_laws.answers(h, 600, verification="rejection", **FILTERS)
        counts = Counter(tuple(answer.tokens) for answer in found)
        observed = np.array([counts.pop(answer, 0) for answer in expected])
        assert not counts
        assert chi_square(observed, np.array(list(expected.values()))) > SIGNIFICANCE
        assert sum(answer.stats.accepted_tokens for answer in found) > 50
        await h.idle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_says_what_it_was_drawn_from(kind: str) -> None:
    drafter = made(kind, trained(kind))
    text = PROMPTS[0]
    drafter.open(1, text[:4], SamplingParams(temperature=1.0, seed=3))
    observe(drafter, kind, text, 4, 3)
    trees = [drafter.propose([Ask(1, 12, 4, False, drawn=True)])[0] for _ in range(2)]
    for tree in trees:
        assert tree is not None
        assert tree.depth() > 1
        tree.check(264, 64)
        for node, (token, law) in enumerate(zip(tree.tokens, tree.laws, strict=True)):
            assert token in law.ids, node
    assert trees[0].tokens != trees[1].tokens


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_are_reloaded(kind: str, tmp_path: Path) -> None:
    """From a drafter that knows nothing to one that does; what does not fit changes nothing."""
    useless = config(kind, random_one(kind, tmp_path / "one"))
    features = "last" if kind == "medusa" else None
    async with harness(tiny.llama(), useless, features=features, dtype="float32") as h:
        request = h.request(PROMPTS[0], max_tokens=60)
        off = await h.generate(request, speculate=False)
        before = await h.generate(request)
        before.same_as(off)
        assert before.stats.draft_tokens > 50
        worker = h.drafts.workers[0]
        with pytest.raises(CheckpointError, match="holds no"):
            await worker.reload({"test": str(tiny.trained_head("eagle"))})
        await worker.reload({"test": str(trained(kind))})
        after = await h.generate(request)
        after.same_as(off)
        assert after.stats.mean_accepted_length > before.stats.mean_accepted_length + 0.3
        await h.idle()


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def publish(folder: Path, prefix: str = "", change: Change = lambda tensors: tensors) -> Path:
    """The trained heads under the names of published checkpoints, with projections of their own."""
    ours = medusa.load_heads(tiny.trained_medusa(), tiny.llama())
    tensors = {}
    for name, tensor in ours.state_dict().items():
        if name.startswith("heads."):
            tensors[name.removeprefix("heads.")] = tensor.clone()
    for head in range(4):
        tensors[f"{head}.2.weight"] = ours.projections[0].weight.detach().clone()
    folder.mkdir()
    content = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}
    (folder / MODEL_CONFIG).write_text(json.dumps(content))
    named = {prefix + name: tensor for name, tensor in change(tensors).items()}
    if prefix:
        named["model.norm.weight"] = torch.ones(64)
    save_file(named, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_load(prefix: str, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", prefix)
    ours = medusa.load_heads(tiny.trained_medusa(), tiny.llama())
    theirs = medusa.load_heads(folder, tiny.llama())
    states = torch.randn(5, 64)
    torch.testing.assert_close(ours(states), theirs(states))
    assert len(theirs.projections) == 4
    drafter = made("medusa", folder)
    drafter.open(1, PROMPTS[0], GREEDY)
    drafter.observe(1, (), [as_message(0, target_states(PROMPTS[0], "eagle")[:-1])])
    (tree,) = drafter.propose([Ask(1, 8, 4, False)])
    assert len(tree) > 8


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    target = tiny.llama()

    def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor[..., :32].contiguous()
            if name.endswith("2.weight")
            else tensor[:32].clone()
            for name, tensor in tensors.items()
        } | {
            f"{head}.{block}.linear.weight": torch.zeros(32, 32)
            for head in range(4)
            for block in (0, 1)
        }

    def small(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {f"{head}.2.weight": torch.zeros(100, 64) for head in range(4)}

    def without(name: str) -> Change:
        return lambda tensors: {other: t for other, t in tensors.items() if other != name}

    for number, (change, reason) in enumerate(
        (
            (narrow, "read 32 values .* states of 64 values"),
            (small, "tokens up to 99; .* 264 tokens"),
            (without("3.2.weight"), "3 lacks the tensors"),
            (without("2.1.linear.bias"), r"lack \['heads.2.1.linear.bias'\]"),
        )
    ):
        folder = publish(tmp_path / str(number), change=change)
        with pytest.raises(CheckpointError, match=reason):
            medusa.load_heads(folder, target)
    ours = shutil.copytree(tiny.trained_medusa(), tmp_path / "ours")
    tensors = load_file(ours / medusa.WEIGHTS_FILE)
    tensors["vocabulary"] += 1
    save_file(tensors, ours / medusa.WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match="tokens up to 264"):
        medusa.load_heads(ours, target)
    (ours / "medusa.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match="format 2"):
        medusa.load_heads(ours, target)


def test_a_mask_drafter_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="another vocabulary"):
        drafters.make(config("mask", tiny.trained_mask()), str(tiny.spelling_llama()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_says_what_to_do(kind: str, tmp_path: Path) -> None:
    def problems(model: Path) -> list[str]:
        drafts = [{"name": "x", "kind": kind, "model": str(model)}]
        args = {"model_id": "tiny", "target": {"model": str(tiny.llama())}, "drafts": drafts}
        return list(check._check_models(AppConfig.model_validate(args), "args"))

    assert problems(trained(kind)) == []
    (problem,) = problems(tiny.llama())
    assert problem.startswith("args.drafts.0.model: ")
    assert f"python -m workers.training {kind}" in problem
    if kind == "medusa":
        folder = publish(tmp_path / "published")
        (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
        (problem,) = problems(folder)
        assert "pickled weights are not loaded" in problem
        (folder / "config.json").write_text("{not JSON")
        (problem,) = problems(folder)
        assert "config.json cannot be read" in problem


def test_a_target_keeps_what_its_heads_read() -> None:
    def features(*heads: tuple[str, Path]) -> str | None:
        drafts = [{"name": f"d{i}", "kind": k, "model": str(p)} for i, (k, p) in enumerate(heads)]
        args = {"model_id": "tiny", "target": {"model": "t"}, "drafts": drafts}
        return target_options(AppConfig.model_validate(args))["features"]

    medusa_heads = ("medusa", tiny.trained_medusa())
    assert features(medusa_heads) == "last"
    assert features(medusa_heads, ("eagle", tiny.trained_head("eagle"))) == "last"
    assert features(("mask", tiny.trained_mask())) is None
    with pytest.raises(ValueError, match="d1 is an EAGLE-3 head, d0 reads"):
        features(medusa_heads, ("eagle", tiny.trained_head("eagle3")))
    drafts = [
        {"name": "a", "kind": "medusa", "model": str(tiny.trained_medusa())},
        {"name": "b", "kind": "eagle", "model": str(tiny.trained_head("eagle3"))},
    ]
    args = {"model_id": "tiny", "target": {"model": str(tiny.llama())}, "drafts": drafts}
    (problem,) = check._check_models(AppConfig.model_validate(args), "args")
    assert problem.startswith("args.drafts: b is an EAGLE-3 head, a reads")


@pytest.mark.parametrize("kind", KINDS)
def test_accuracies_come_with_the_weights(kind: str) -> None:
    kept = json.loads((trained(kind) / ACCURACIES).read_text())
    known = made(kind, trained(kind))._accuracies
    for depth, rates in enumerate(kept):
        assert rates[0] > 0.2
        assert known.at(depth)[0] == rates[0]
        assert list(known.at(depth)) == sorted(known.at(depth), reverse=True)


def test_the_projection_is_shared_and_frozen() -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny.llama(), dtype=torch.float32)
    heads = medusa.new_heads(3, 1, tiny.llama(), torch.arange(264))
    states = target_states(PROMPTS[0], "eagle")
    with torch.inference_mode():
        law = target(torch.tensor([PROMPTS[0]])).logits[0]
        heads.projections.float()
        # Untrained heads say what the target says.
        assert torch.allclose(heads(states), law.expand(3, -1, -1), atol=0.05)
    assert not any(p.requires_grad for p in heads.projections.parameters())
