"""K5: every sampling parameter against the exact law, and noise that is the same everywhere."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests import tiny
from workers import sampling
from workers.engine.loading import load_model
from workers.engine.native import sampling as native_sampling
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams

GOLDEN_KEYS = [16294208416658607535, 16862271597737200315, 3869620978057419061]
GOLDEN_HASHES = [4004178104, 3673605089, 1005266805, 2949224177]

VOCAB = 32
SAMPLES = 20_000
SIGNIFICANCE = 1e-4


def logits(seed: int = 1) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def exact_law(row: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The law as transformers' own processors define it."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    processed = processors(torch.zeros(1, 1, dtype=torch.long), row[None])
    return processed.softmax(-1)[0].double().numpy()


LAWS = {
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 1.5": {"temperature": 1.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "tiny top_p keeps one": {"top_p": 0.01},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of counts under a law; 0 if something impossible was drawn."""
    if counts[law == 0].any():
        return 0.0
    law = law / law.sum()
    # Rare tokens share a cell, so that every cell expects enough for the test to hold.
    rare = law * counts.sum() < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(law[~rare], law[rare].sum()) * counts.sum()
    keep = expected > 0
    if keep.sum() < 2:
        return 1.0
    return float(stats.chisquare(observed[keep], expected[keep]).pvalue)


@pytest.mark.parametrize("parameters", LAWS.values(), ids=LAWS.keys())
def test_draws_follow_the_exact_law(parameters: dict[str, float]) -> None:
    row = logits()
    law = exact_law(row, SamplingParams(**parameters))
    params = SamplingParams(seed=7, **parameters)
    drawn = [sampling.draw(row, params, position) for position in range(SAMPLES)]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert chi_square(counts, law) > SIGNIFICANCE


@pytest.mark.parametrize("parameters", LAWS.values(), ids=LAWS.keys())
def test_the_engine_draws_from_the_law_of_transformers_logits(
    parameters: dict[str, float],
) -> None:
    folder, prompt = tiny.small_vocabulary(), [3, 1, 4, 1, 5, 9, 2, 6]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        law = exact_law(
            reference(torch.tensor([prompt])).logits[0, -1], SamplingParams(**parameters)
        )
    model = load_model(folder, "float32")
    kv = model.pool(64).sequence()
    kv.reserve(16)
    row = model.forward(RowBatch([SequenceRows(kv, prompt, [len(prompt) - 1])]))[0]
    drawn = [
        sampling.draw(row, SamplingParams(seed=seed, **parameters), len(prompt))
        for seed in range(SAMPLES)
    ]
    assert chi_square(np.bincount(drawn, minlength=VOCAB), law) > SIGNIFICANCE


def test_the_chi_square_can_fail() -> None:
    row = logits()
    drawn = [sampling.draw(row, SamplingParams(seed=7), p) for p in range(SAMPLES)]
    counts = np.bincount(drawn, minlength=VOCAB)
    wrong = exact_law(row, SamplingParams(temperature=1.05))
    assert chi_square(counts, wrong) < SIGNIFICANCE


def test_draws_of_neighbouring_positions_seeds_and_choices_are_independent() -> None:
    row = logits() / 2
    for other in (
        lambda p: sampling.draw(row, SamplingParams(seed=7), p + 1),
        lambda p: sampling.draw(row, SamplingParams(seed=8), p),
        lambda p: sampling.draw(row, SamplingParams(seed=7, choice=1), p),
    ):
        pairs = np.zeros((VOCAB, VOCAB))
        for position in range(SAMPLES):
            pairs[sampling.draw(row, SamplingParams(seed=7), position), other(position)] += 1
        law = exact_law(row, SamplingParams())
        assert chi_square(pairs.ravel(), np.outer(law, law).ravel()) > SIGNIFICANCE


def test_noise_is_a_golden_function() -> None:
    """Integers must never change: a seed given today gives the same answer tomorrow."""
    assert sampling.noise_key(0, 0, 0) == GOLDEN_KEYS[0]
    assert sampling.noise_key(42, 1, 7) == GOLDEN_KEYS[1]
    assert sampling.noise_key(-1, 0, 2**20) == GOLDEN_KEYS[2]
    ids = torch.tensor([0, 1, 2, 49151])
    assert sampling.hash32(GOLDEN_KEYS[1], ids).tolist() == GOLDEN_HASHES
    assert sampling.hash32(2**64 - 1, torch.arange(1000)).unique().numel() == 1000


def test_noise_is_gumbel_and_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = sampling.gumbel_noise(sampling.noise_key(3, 0, 0), torch.arange(200_000))
    assert stats.kstest(noise.numpy()[:20_000], "gumbel_r").pvalue > SIGNIFICANCE
    ends = torch.tensor([0, 2**32 - 1])
    monkeypatch.setattr(sampling, "hash32", lambda key, ids: ends)
    low, high = sampling.gumbel_noise(0, ends).tolist()[::-1]
    assert math.isfinite(low)
    assert low < -2.8
    assert high == pytest.approx(33 * math.log(2), rel=1e-6)


def test_filters_keep_ties_so_that_no_sort_decides() -> None:
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0])
    ids, _ = sampling.survivors(row, SamplingParams(top_k=1))
    assert ids.tolist() == [1, 3]
    ids, _ = sampling.survivors(row, SamplingParams(top_k=3))
    assert ids.tolist() == [1, 2, 3, 4]
    ids, _ = sampling.survivors(row, SamplingParams(top_p=0.2))
    assert ids.tolist() == [1, 3]


def test_top_p_that_needs_most_of_a_large_vocabulary() -> None:
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 0.01
    for top_p in (0.1, 0.9, 0.999):
        ids, _ = sampling.survivors(row, SamplingParams(top_p=top_p))
        assert len(ids) == pytest.approx(50_000 * top_p, rel=0.02)


@pytest.mark.parametrize("vocab_size", [17, 32, 1000, 49152])
@pytest.mark.parametrize("parameters", LAWS.values(), ids=LAWS.keys())
def test_the_native_draw_is_the_reference_draw(
    parameters: dict[str, float], vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for seed in range(30):
        row = torch.randn(vocab_size, generator=generator) * 3
        params = SamplingParams(seed=seed, **parameters)
        key = sampling.noise_key(seed, 0, 1)
        assert native_sampling.serves(row)
        expected = sampling._draw_token(row, params, key)
        assert native_sampling.draw_token(row, params, key) == expected


def test_native_draw_of_ties_and_masked_rows() -> None:
    for vocab_size in (5, 16, 40):
        row = torch.full((vocab_size,), -torch.inf)
        row[3] = 0.0
        for seed in range(20):
            assert sampling.draw(row, SamplingParams(seed=seed), 0) == 3
        row = torch.zeros(vocab_size)
        ids = {sampling.draw(row, SamplingParams(seed=seed, top_k=1), 0) for seed in range(200)}
        assert len(ids) == vocab_size or vocab_size == 40


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sampling.draw(torch.tensor([1.0, 2.0, 2.0]), SamplingParams(temperature=0), 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_unusable_rows_are_an_error(temperature: float, bad: float) -> None:
    with pytest.raises(ValueError, match="position 3"):
        sampling.draw(torch.full((8,), bad), SamplingParams(temperature=temperature), 3)


def test_logprobs_are_of_the_raw_law() -> None:
    row = logits()
    logprob, top, rank = sampling.top_logprobs(row, 4, 3)
    reference = row.log_softmax(0)
    assert logprob == pytest.approx(float(reference[4]))
    assert [token for token, _ in top] == reference.topk(3).indices.tolist()
    assert rank == 1 + int((row > row[4]).sum())
    assert sampling.top_logprobs(row, 4, 0) == (logprob, (), rank)
    best = int(row.argmax())
    assert sampling.top_logprobs(row, best, 0)[2] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", ((3, float("inf")),)),
        ("logit_bias", ((3, float("nan")),)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("vocab_size", [17, 300, 16384])
@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, *LAWS.values()], ids=str)
def test_the_native_ranking_is_the_reference_ranking(
    parameters: dict[str, float], vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for seed in range(20):
        row = torch.randn(vocab_size, generator=generator) * 3
        ids = None
        if seed % 2:
            ids = torch.randperm(50_000, generator=generator)[:vocab_size].to(torch.int32)
        params, key = SamplingParams(seed=seed, **parameters), sampling.noise_key(seed, 0, 3)
        softness = 0.7 + seed / 10
        places, made = native_sampling.top_children(row, ids, params, key, softness, 8)
        expected, reference = sampling._rank_children(row, ids, params, key, softness, 8)
        assert places == expected
        assert made == pytest.approx(reference, rel=1e-4, abs=1e-6)


def test_a_draft_that_has_the_targets_law_ranks_its_token_first() -> None:
    row = logits()
    for seed in range(200):
        params = SamplingParams(seed=seed, top_p=0.9)
        ranked, _ = sampling.rank_children(row, None, params, 5, 1.0, 3)
        assert ranked[0] == sampling.draw(row, params, 5)
