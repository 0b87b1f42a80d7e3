"""The KV cache and the attention backends: against a plain formula, and bit for bit among themselves."""

import random
from itertools import pairwise

import pytest
import torch

from workers.engine.attention import TorchAttention
from workers.engine.kv_cache import KVPool, KVSequence, KVShape
from workers.engine.native.attention import NativeAttention
from workers.engine.rows import RowBatch, SequenceRows

LAYERS = 2
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(4, 2, 16), (9, 3, 64), (8, 8, 80), (6, 1, 24), (14, 2, 128)]


def make_pool(backend, kv_heads: int, dim: int, dtype: torch.dtype, slots: int = 4096) -> KVPool:
    return KVPool(KVShape(LAYERS, kv_heads, dim, dtype, torch.device("cpu")), backend, slots)


class Rows:
    """Queries, keys and values of every (sequence, position, token) that a test may feed."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self._shape = (2 * kv_heads + heads, dim)
        self._heads, self._kv_heads, self._dtype = heads, kv_heads, dtype

    def of(self, layer: int, identities: list[tuple[int, int, int]]):
        rows = []
        for identity in identities:
            seed = hash((layer, *identity)) % 2**31
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(self._shape, generator=generator).to(self._dtype))
        flat = torch.stack(rows, dim=1)[None]  # [1, heads + 2 kv heads, rows, dim]
        query, rest = flat[:, : self._heads], flat[:, self._heads :]
        return query, rest[:, : self._kv_heads], rest[:, self._kv_heads :]


def feed(backend, pool_rows: Rows, batch: list[tuple[SequenceRows, int]], **options):
    """Run all layers over the rows of (sequence rows, sequence number); [layer][rows, heads, dim]."""
    step = backend.step(RowBatch([rows for rows, _ in batch]))
    identities = [
        (number, rows.kv.length + depth, token)
        for rows, number in batch
        for depth, token in zip(rows.depths(), rows.tokens, strict=True)
    ]
    out = []
    for layer in range(LAYERS):
        q, k, v = pool_rows.of(layer, identities)
        arguments = {"scale": 0.3, "window": 0, "softcap": 0.0, **options}
        out.append(step.attend(layer, q, k, v, **arguments)[0])
    return out


def plain(rows: Rows, layer: int, number: int, tokens: list[int], **options) -> torch.Tensor:
    """Attention of the last of `tokens` over all of them, from the formula, in float64."""
    identities = [(number, position, token) for position, token in enumerate(tokens)]
    q, k, v = (x[0].double() for x in rows.of(layer, identities))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("hd,hnd->hn", q[:, -1], k) * 0.3
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if window := options.get("window"):
        scores[:, : max(0, len(tokens) - window)] = -torch.inf
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), v)


BACKENDS = {"native": NativeAttention, "torch": TorchAttention}
OPTIONS = {"full": {}, "window": {"window": 7}, "softcap": {"softcap": 1.5}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_rows_attend_to_their_own_past_only(backend, shape, dtype, options) -> None:
    heads, kv_heads, dim = shape
    backend, rows = backend(), Rows(heads, kv_heads, dim, dtype)
    pool = make_pool(backend, kv_heads, dim, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    committed = {0: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], 1: [2, 7]}
    sequences = {number: pool.sequence() for number in committed}
    for number, kv in sequences.items():
        assert kv.reserve(64)
        feed(backend, rows, [(SequenceRows(kv, committed[number]), number)], **options)
        kv.keep(range(len(committed[number])))
    # A tree of depth 3 with siblings in sequence 0, a chunk in sequence 1, in one step.
    tree = SequenceRows(sequences[0], [8, 4, 6, 2, 6, 4], parents=[-1, 0, 0, 2, 2, 3])
    paths = [[8], [8, 4], [8, 6], [8, 6, 2], [8, 6, 6], [8, 6, 2, 4]]
    chunk = SequenceRows(sequences[1], [1, 8, 2])
    out = feed(backend, rows, [(tree, 0), (chunk, 1)], **options)
    expected = [(0, committed[0] + path) for path in paths]
    expected += [(1, committed[1] + [1, 8, 2][: i + 1]) for i in range(3)]
    for layer in range(LAYERS):
        for row, (number, tokens) in enumerate(expected):
            want = plain(rows, layer, number, tokens, **options)
            torch.testing.assert_close(
                out[layer][row].double(), want, atol=tolerance, rtol=tolerance
            )
    # Keep the path 8 6 2 4: rows 0, 2, 3, 5 move together, and the next row sees them in order.
    sequences[0].keep([0, 2, 3, 5])
    after = feed(backend, rows, [(SequenceRows(sequences[0], [1]), 0)], **options)
    want = plain(rows, 1, 0, [*committed[0], 8, 6, 2, 4, 1], **options)
    torch.testing.assert_close(after[1][0].double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape, dtype, options) -> None:
    """Alone, in chunks of any size, in a tree, beside others, after growth: the same bits."""
    heads, kv_heads, dim = shape
    backend, rows = NativeAttention(), Rows(heads, kv_heads, dim, dtype)
    rng = random.Random(0)
    tokens = [rng.randrange(50) for _ in range(150)]

    def run(cuts: list[int], company: bool) -> list[torch.Tensor]:
        pool = make_pool(backend, kv_heads, dim, dtype)
        kv, other = pool.sequence(), pool.sequence()
        out: list[torch.Tensor] = []
        for start, end in pairwise([0, *cuts, len(tokens)]):
            batch = [(SequenceRows(kv, tokens[start:end]), 0)]
            kv.reserve(end)
            if company:
                extra = [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
                other.reserve(other.length + len(extra))
                batch.insert(rng.randrange(2), (SequenceRows(other, extra), 1))
            made = feed(backend, rows, batch, **options)[1]
            first = 0 if batch[0][1] == 0 else len(batch[0][0].tokens)
            out += list(made[first : first + end - start])
            for sequence, _ in batch:
                sequence.kv.keep(range(len(sequence.tokens)))
        return out

    reference = run(list(range(1, len(tokens))), company=False)
    for cuts in ([], [1], [16, 32, 100], [149], sorted(rng.sample(range(1, 150), 20))):
        for company in (False, True):
            made = run(cuts, company)
            assert all(torch.equal(a, b) for a, b in zip(made, reference, strict=True)), cuts

    for base in (1, 14, 15, 16, 17, 63, 100):
        pool = make_pool(backend, kv_heads, dim, dtype)
        kv = pool.sequence()
        kv.reserve(base + 16)
        feed(backend, rows, [(SequenceRows(kv, tokens[:base]), 0)], **options)
        kv.keep(range(base))
        # The true path is hidden among wrong siblings at every depth.
        true = tokens[base : base + 5]
        wrong = [(token + 1) % 50 for token in true]
        tree = [true[0], wrong[1], true[1], true[2], wrong[2], wrong[3], true[3], true[4]]
        parents = [-1, 0, 0, 2, 2, 3, 3, 6]
        made = feed(backend, rows, [(SequenceRows(kv, tree, parents=parents), 0)], **options)[1]
        for depth, row in enumerate([0, 2, 3, 6, 7]):
            assert torch.equal(made[row], reference[base + depth]), (base, depth)
        kv.keep([0, 2, 3, 6, 7])
        rest = tokens[base + 5 : base + 12]
        kv.reserve(base + 12)
        made = feed(backend, rows, [(SequenceRows(kv, rest), 0)], **options)[1]
        for offset, row in enumerate(made):
            assert torch.equal(row, reference[base + 5 + offset])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_tree_can_grow_over_several_steps(backend, dtype) -> None:
    rows, backend = Rows(6, 3, 32, dtype), backend()
    pool = make_pool(backend, 3, 32, dtype)
    once, grown = pool.sequence(), pool.sequence()
    tokens, parents = [4, 9, 7, 7, 1, 2], [-1, -1, 0, 1, 3, 2]
    for kv in (once, grown):
        kv.reserve(40)
        feed(backend, rows, [(SequenceRows(kv, [3] * 20), 0)])
        kv.keep(range(20))
    whole = feed(backend, rows, [(SequenceRows(once, tokens, parents=parents), 0)])
    made: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    for start, end in ((0, 2), (2, 3), (3, 6)):
        # The cache may have to move while the tree grows: its rows move along.
        grown.reserve(100 + 200 * start)
        part = SequenceRows(grown, tokens[start:end], parents=parents[:end], first=start)
        for layer, out in enumerate(feed(backend, rows, [(part, 0)])):
            made[layer] += list(out)
    for layer in range(LAYERS):
        for a, b in zip(whole[layer], made[layer], strict=True):
            assert torch.equal(a, b) or not backend.row_invariant
            torch.testing.assert_close(a, b)


def test_threads_do_not_change_bits() -> None:
    rows, backend = Rows(9, 3, 64, torch.bfloat16), NativeAttention()
    outs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kv = make_pool(backend, 3, 64, torch.bfloat16).sequence()
            kv.reserve(100)
            outs.append(feed(backend, rows, [(SequenceRows(kv, list(range(100))), 0)])[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_pool_counts_slots_and_refuses_what_does_not_fit(backend) -> None:
    pool = make_pool(backend(), 2, 16, torch.float32, slots=256)
    a, b = pool.sequence(), pool.sequence()
    assert a.reserve(100)
    assert not b.reserve(200)
    assert b.capacity == 0
    assert b.reserve(20)
    a.length = 100
    pool.check_integrity()
    assert not a.reserve(250)
    assert a.capacity >= 100
    b.free()
    assert a.reserve(250)
    pool.check_integrity()
    a.free()
    assert pool.free_slots == pool.num_slots == 256
    pool.check_integrity()


def test_integrity_check_finds_a_lost_slot() -> None:
    pool = make_pool(TorchAttention(), 2, 16, torch.float32, slots=256)
    kv: KVSequence = pool.sequence()
    kv.reserve(10)
    pool.free_slots -= 16
    with pytest.raises(RuntimeError, match="held"):
        pool.check_integrity()
