"""Every architecture: greedy and seeded answers are those of transformers' generate, however the rows
are cut, and a row has the same bits in any company."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

from tests import tiny_architectures as zoo
from tests.integration.test_surface import SharedNoise
from workers import sampling, verification
from workers.engine.kv_cache import KVPool
from workers.engine.loading import load_model
from workers.engine.model import Model, ModuleRunner
from workers.engine.native.decoder import NativeDecoder
from workers.engine.rows import RowBatch, SequenceRows
from workers.engine.support import UnsupportedModel
from workers.request import SamplingParams
from workers.tree import ANCHOR, TokenTree

LENGTH, PROMPT = zoo.LENGTH, zoo.PROMPT
DTYPES = ["float32", "bfloat16"]


def prefill(model: Model, pool: KVPool, tokens: list[int], sizes: list[int]):
    """A sequence with `tokens` in its cache, and the logits of every row."""
    kv, out = pool.sequence(), []
    assert kv.reserve(len(tokens))
    for size in sizes:
        chunk = tokens[kv.length : kv.length + size]
        out.append(model.forward(RowBatch([SequenceRows(kv, chunk, range(len(chunk)))])))
        kv.keep(range(len(chunk)))
    return kv, torch.cat(out)


def plain(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    """The prompt in chunks, then token by token, interleaved with another sequence."""
    pool = model.pool(1024)
    kv, logits = prefill(model, pool, prompt, [4, 1, len(prompt) - 5])
    other, _ = prefill(model, pool, prompt[::-1], [len(prompt)])
    tokens = [*prompt, sampling.draw(logits[-1], params, len(prompt))]
    while len(tokens) < len(prompt) + LENGTH:
        kv.reserve(len(tokens))
        other.reserve(other.length + 2)
        company = SequenceRows(other, [len(tokens) % zoo.VOCAB, 3])
        row = model.forward(RowBatch([company, SequenceRows(kv, tokens[-1:], [0])]))[0]
        kv.keep([0])
        other.keep(range(2))
        tokens.append(sampling.draw(row, params, len(tokens)))
    return tokens[len(prompt) :]


def speculated(
    model: Model, prompt: list[int], answer: list[int], params: SamplingParams
) -> list[int]:
    """The same by trees in which the true tokens hide among wrong ones."""
    rng = random.Random(0)
    kv, logits = prefill(model, model.pool(1024), prompt, [len(prompt)])
    tokens = [*prompt, sampling.draw(logits[-1], params, len(prompt))]
    accepted = 0
    while len(tokens) < len(prompt) + LENGTH:
        tree = _tree(answer[len(tokens) - len(prompt) :][:4], rng)
        parents = [ANCHOR, *(parent + 1 for parent in tree.parents)]
        rows = SequenceRows(kv, [tokens[-1], *tree.tokens], range(len(tree) + 1), parents)
        kv.reserve(kv.length + len(parents))
        logits = model.forward(RowBatch([rows]))
        verdict = verification.walk(
            tree,
            lambda node, logits=logits: sampling.draw(logits[node + 1], params, len(tokens)),
            lambda token: tokens.append(token) is None,
        )
        kv.keep([0, *(node + 1 for node in verdict.accepted)])
        accepted += len(verdict.accepted)
    assert accepted > LENGTH // 3
    return tokens[len(prompt) : len(prompt) + LENGTH]


def _tree(true: list[int], rng: random.Random) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    parent = ANCHOR
    for token in true:
        level = [token, (token + 1) % zoo.VOCAB, (token + 2) % zoo.VOCAB][: rng.randrange(1, 4)]
        rng.shuffle(level)
        first = len(tokens)
        tokens += level
        parents += [parent] * len(level)
        parent = first + level.index(token)
    return TokenTree(tuple(tokens), tuple(parents), (0.5,) * len(tokens))


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}])
@pytest.mark.parametrize("name", zoo.SERVED)
def test_answers_are_those_of_generate(name: str, sampled: dict[str, float]) -> None:
    folder, params = zoo.folder(name), SamplingParams(seed=3, **sampled)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    processors = LogitsProcessorList([] if params.greedy else [SharedNoise(params)])
    expected = reference.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=LENGTH,
        do_sample=False,
        logits_processor=processors,
        pad_token_id=1,
    )[0, len(PROMPT) :].tolist()
    assert len(set(expected)) >= LENGTH // 2
    model = load_model(folder, "float32")
    assert model.info.row_invariant
    assert plain(model, PROMPT, params) == expected
    assert speculated(model, PROMPT, expected, params) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", zoo.SERVED)
def test_trees_change_no_token(name: str, dtype: str) -> None:
    model = load_model(zoo.folder(name), dtype)
    assert model.info.row_invariant
    for seed in range(2):
        params = SamplingParams(temperature=float(seed), seed=seed)
        answer = plain(model, PROMPT, params)
        assert speculated(model, PROMPT, answer, params) == answer


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=zoo.REFUSED[name][1]):
        load_model(zoo.folder(name), "float32")


def test_longrope_limits_the_length() -> None:
    """Beyond it a long neighbour would pick other frequencies for everyone."""
    assert load_model(zoo.folder("phi3 longrope"), "float32").info.max_model_len == 96
    assert load_model(zoo.folder("phi3"), "float32").info.max_model_len == 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_a_row_has_the_same_bits_for_1_to_64_rows(name: str, dtype: str) -> None:
    model = load_model(zoo.folder(name), dtype)
    rng = random.Random(5)
    tokens = [rng.randrange(zoo.VOCAB) for _ in range(80)]
    pool = model.pool(16384)
    _, reference = prefill(model, pool, tokens, [len(tokens)])
    for context in (0, 1, 15, 16, 40):
        for rows in range(1, 65):
            if context + rows > len(tokens):
                continue
            sizes = [context, rows] if context else [rows]
            kv, logits = prefill(model, pool, tokens[: context + rows], sizes)
            kv.free()
            assert torch.equal(logits, reference[: context + rows]), (context, rows)
    # And beside neighbours of any number and length.
    for neighbours in (1, 3, 7, 20):
        batch, kept = [], []
        for _ in range(neighbours):
            length = rng.randrange(1, 12)
            kv = pool.sequence()
            kv.reserve(length)
            kept.append(kv)
            batch.append(SequenceRows(kv, [rng.randrange(zoo.VOCAB) for _ in range(length)], [0]))
        kv = pool.sequence()
        kv.reserve(24)
        place = rng.randrange(neighbours + 1)
        batch.insert(place, SequenceRows(kv, tokens[:24], range(24)))
        logits = model.forward(RowBatch(batch))
        assert torch.equal(logits[place : place + 24], reference[:24]), neighbours
        for sequence in (kv, *kept):
            sequence.free()


NATIVE = ["llama", "llama tied", "mistral window", "qwen2", "qwen2 window", "qwen3"]


@pytest.mark.parametrize("kind", ["last", "three"])
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_decoder_says_what_the_modules_say(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values, rounded at the same places; only sums over a row's squares have another order."""
    rng = random.Random(7)
    tokens = [rng.randrange(zoo.VOCAB) for _ in range(90)]
    made = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(NativeDecoder, "serves", lambda module, shape: False)
        model = load_model(zoo.folder(name), "bfloat16")
        assert isinstance(model.runner, NativeDecoder if native else ModuleRunner)
        model.keep_features(kind)
        kv, logits = prefill(model, model.pool(1024), tokens, [1, 40, 49])
        made.append((logits, kv.features[: len(tokens)].float()))
    for ours, theirs in zip(*made, strict=True):
        distance = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert float(distance.max()) < 0.02
    same = (made[0][0].argmax(1) == made[1][0].argmax(1)).float().mean()
    assert float(same) > 0.95


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_the_native_decoders_bits(threads: int) -> None:
    model = load_model(zoo.folder("llama"), "bfloat16")
    before, made = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            made.append(prefill(model, model.pool(1024), list(range(5, 95)), [3, 87])[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1])
