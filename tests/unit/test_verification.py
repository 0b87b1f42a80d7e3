"""The walk, and the proof that broken walks would be noticed."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.unit.test_sampling import SIGNIFICANCE, chi_square, exact_law
from workers import sampling, verification
from workers.request import SamplingParams
from workers.tree import ANCHOR, TokenTree

VOCAB = 16
LENGTH = 6
TOKENS = SamplingParams(temperature=0.7, top_p=0.9)

Model = Callable[[tuple[int, ...]], torch.Tensor]


def model(prefix: tuple[int, ...]) -> torch.Tensor:
    """Logits that depend on the last two tokens."""
    seed = hash(prefix[-2:]) % 2**31
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def draft(prefix: tuple[int, ...], rng: random.Random) -> TokenTree:
    """Two likely children at each of three levels; they know nothing of the target's noise."""
    tokens, parents, scores = [], [], []
    level: list[tuple[int, tuple[int, ...]]] = [(ANCHOR, prefix)]
    for _ in range(3):
        below = []
        for node, path in level:
            for token in model(path).topk(4).indices.tolist()[rng.randrange(3) :][:2]:
                tokens.append(token)
                parents.append(node)
                scores.append(0.5)
                below.append((len(tokens) - 1, (*path, token)))
        level = below[:3]
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


def plain(params: SamplingParams, length: int = LENGTH) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(sampling.draw(model(tuple(tokens)), params, len(tokens)))
    return tokens


def speculated(walk: Callable, params: SamplingParams, length: int = LENGTH) -> list[int]:
    """Tokens made by rounds of a walk."""
    rng = random.Random(params.seed)
    tokens: list[int] = []
    rounds = 0
    while len(tokens) < length:
        rounds += 1
        walk(draft(tuple(tokens), rng), tokens, params, rounds, length)
    return tokens[:length]


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ANCHOR:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def real(tree: TokenTree, tokens: list[int], params: SamplingParams, rounds: int, length: int):
    base = tuple(tokens)

    def target_token(node: int) -> int:
        return sampling.draw(model(base + path_of(tree, node)), params, len(tokens))

    def commit(token: int) -> bool:
        tokens.append(token)
        return len(tokens) < length

    return verification.walk(tree, target_token, commit)


def one_draw_per_row(tree, tokens, params, rounds, length) -> None:
    """Trap: rows that share a prefix get a chance each, as if they were different places."""
    base = tuple(tokens)
    node = ANCHOR
    while True:
        row = model(base + path_of(tree, node))
        children = [n for n, parent in enumerate(tree.parents) if parent == node]
        step = None
        for child in children:
            token = sampling.draw(row, params, len(tokens) + 1000 * (child + 1))
            if token == tree.tokens[child]:
                step = child
                break
        if step is None:
            tokens.append(sampling.draw(row, params, len(tokens)))
            return
        tokens.append(tree.tokens[step])
        node = step


def _variant(tree, tokens, params, length, choose) -> None:
    base = tuple(tokens)

    def commit(token: int) -> bool:
        tokens.append(token)
        return len(tokens) < length

    def target_token(node: int) -> int:
        return choose(model(base + path_of(tree, node)), node, len(tokens))

    verification.walk(tree, target_token, commit)


def unprocessed_bonus(tree, tokens, params, rounds, length) -> None:
    """Trap: the token after a fully accepted path is drawn from the raw law."""
    raw = SamplingParams(temperature=1.0, seed=params.seed)
    _variant(
        tree,
        tokens,
        params,
        length,
        lambda row, node, position: sampling.draw(
            row, params if tree.has_children(node) else raw, position
        ),
    )


def greedy_root(tree, tokens, params, rounds, length) -> None:
    """Trap: the first token of a round is the likeliest one."""
    _variant(
        tree,
        tokens,
        params,
        length,
        lambda row, node, position: (
            int(row.argmax()) if node == ANCHOR else sampling.draw(row, params, position)
        ),
    )


def noise_by_round(tree, tokens, params, rounds, length) -> None:
    """Trap: the noise belongs to the round, so a position that is tried again is drawn again."""
    _variant(
        tree,
        tokens,
        params,
        length,
        lambda row, node, position: sampling.draw(row, params, position + 100 * rounds),
    )


def confident_drafts_pass(tree, tokens, params, rounds, length) -> None:
    """Trap: a drafted token that the target finds likely enough is taken without a draw."""
    base = tuple(tokens)
    node = ANCHOR
    while len(tokens) < length:
        row = model(base + path_of(tree, node))
        children = [n for n, parent in enumerate(tree.parents) if parent == node]
        likely = [n for n in children if row.softmax(0)[tree.tokens[n]] > 0.3]
        if not likely:
            tokens.append(sampling.draw(row, params, len(tokens)))
            return
        tokens.append(tree.tokens[likely[0]])
        node = likely[0]


def goes_on_after_a_miss(tree, tokens, params, rounds, length) -> None:
    """Trap: a rejected token is replaced, but what was drafted after it is kept."""
    base = tuple(tokens)
    node, taken = ANCHOR, []
    while True:
        row = model(base + path_of(tree, node))
        token = sampling.draw(row, params, len(tokens))
        tokens.append(token)
        taken.append(token)
        children = [n for n, parent in enumerate(tree.parents) if parent == node]
        if not children or len(tokens) >= length:
            return
        node = tree.child(node, token) if tree.child(node, token) is not None else children[0]


BROKEN = [
    one_draw_per_row,
    unprocessed_bonus,
    greedy_root,
    noise_by_round,
    confident_drafts_pass,
    goes_on_after_a_miss,
]


def mismatches(walk: Callable, runs: int = 60) -> int:
    found = 0
    for seed in range(runs):
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=seed)
        found += speculated(walk, params) != plain(params)
    return found


def test_the_walk_commits_what_plain_decoding_does() -> None:
    assert mismatches(real) == 0


@pytest.mark.parametrize("walk", BROKEN, ids=lambda walk: walk.__name__)
def test_a_broken_walk_is_noticed_by_equality(walk: Callable) -> None:
    assert mismatches(walk) > 0


def second_tokens(walk: Callable) -> np.ndarray:
    counts = np.zeros(VOCAB)
    for seed in range(4000):
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=seed)
        counts[speculated(walk, params, 3)[1]] += 1
    return counts


def second_token_law() -> np.ndarray:
    """The exact law of the second token, by enumeration over the first."""
    first = exact_law(model(()), TOKENS)
    return sum(p * exact_law(model((token,)), TOKENS) for token, p in enumerate(first) if p > 0)


def test_the_walk_keeps_the_law() -> None:
    assert chi_square(second_tokens(real), second_token_law()) > SIGNIFICANCE


@pytest.mark.parametrize(
    "walk", [one_draw_per_row, greedy_root, confident_drafts_pass], ids=lambda walk: walk.__name__
)
def test_a_walk_that_breaks_the_law_is_noticed_by_it(walk: Callable) -> None:
    assert chi_square(second_tokens(walk), second_token_law()) < SIGNIFICANCE


def test_verdict_counts() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, -1, 1, 2), (0.9, 0.8, 0.7, 0.6))

    def run(target: list[int], end: int = 99) -> tuple[verification.Verdict, list[int]]:
        done: list[int] = []

        def commit(token: int) -> bool:
            done.append(token)
            return len(done) < end

        return verification.walk(tree, lambda node: target[len(done)], commit), done

    verdict, done = run([2, 3, 4, 9])
    assert verdict == verification.Verdict((2, 3, 4, 9), (1, 2, 3), 3)
    assert done == [2, 3, 4, 9]
    assert run([5])[0] == verification.Verdict((5,), (), 1)
    assert run([1, 7])[0] == verification.Verdict((1, 7), (0,), 1)
    # An accepted token that ends the answer is followed by no bonus.
    assert run([2, 3], end=2)[0] == verification.Verdict((2, 3), (1, 2), 2)
