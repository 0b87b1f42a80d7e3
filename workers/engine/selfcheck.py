"""What the engine checks at load, on the device that it has, before it serves anything.

Our rows against transformers' own forward, and a row in different company against itself.
"""

import torch

from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows

LENGTH = 24
# Relative distance of a row's logits: float32 differs by rounding only, half precision by its own step.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


class SelfCheckError(RuntimeError):
    """The engine does not compute what the model says; it must not serve it."""


def sample_tokens(vocab_size: int) -> list[int]:
    """Token ids that differ from each other, spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab_size for i in range(LENGTH)]


def check_model(model: Model, stock_logits: torch.Tensor) -> bool:
    """Compare with transformers' logits for `sample_tokens`, [LENGTH, V]; is a row's every bit its own?

    Raises SelfCheckError if a prompt in chunks, beside another, or with a tree, is not what the stock
    forward gives. Returns whether all of these were equal bit for bit.
    """
    tokens = sample_tokens(model.info.vocab_size)
    ways = {
        "whole": _in_chunks(model, tokens, [LENGTH]),
        "one by one": _in_chunks(model, tokens, [1] * LENGTH),
        "in chunks": _in_chunks(model, tokens, [5, 1, 7, LENGTH - 13]),
        "beside another": _beside_another(model, tokens),
        "as a tree": _as_tree(model, tokens),
    }
    tolerance = TOLERANCE[model.info.dtype]
    for way, logits in ways.items():
        rows = (logits - stock_logits).norm(dim=1) / stock_logits.norm(dim=1)
        # In half precision a router of experts may choose otherwise in some rows: half of them decide.
        distance = float(rows.max() if model.info.dtype == "float32" else rows.median())
        if not distance <= tolerance:
            raise SelfCheckError(
                f"this model cannot be served exactly: {way}, its logits are {distance:.2g} away from "
                f"transformers' own (at most {tolerance:.2g} is rounding)"
            )
    return all(torch.equal(logits, ways["whole"]) for logits in ways.values())


def _in_chunks(model: Model, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    kv = model.pool(2 * LENGTH).sequence()
    kv.reserve(LENGTH)
    out = []
    for size in sizes:
        rows = SequenceRows(kv, tokens[kv.length : kv.length + size], range(size))
        out.append(model.forward(RowBatch([rows])))
        kv.keep(range(size))
    return torch.cat(out)


def _beside_another(model: Model, tokens: list[int]) -> torch.Tensor:
    pool = model.pool(8 * LENGTH)
    kv, other = pool.sequence(), pool.sequence()
    kv.reserve(LENGTH)
    other.reserve(2 * LENGTH)
    out = []
    for start in range(0, LENGTH, 8):
        rows = SequenceRows(kv, tokens[start : start + 8], range(8))
        company = SequenceRows(other, tokens[::-1][: start + 3])
        batch = [company, rows] if start % 16 else [rows, company]
        out.append(model.forward(RowBatch(batch)))
        kv.keep(range(8))
        other.keep(range(start + 3))
    return torch.cat(out)


def _as_tree(model: Model, tokens: list[int]) -> torch.Tensor:
    """Every second token hides behind a wrong sibling."""
    kv = model.pool(4 * LENGTH).sequence()
    kv.reserve(2 * LENGTH)
    out = []
    for start in range(0, LENGTH, 4):
        anchor, first, second, third = tokens[start : start + 4]
        wrong = tokens[(start + 9) % LENGTH]
        rows = [anchor, first, wrong, second, wrong, third]
        parents = [-1, 0, 1, 1, 3, 3]
        true = [0, 1, 3, 5]
        out.append(model.forward(RowBatch([SequenceRows(kv, rows, true, parents)])))
        kv.keep(true)
    return torch.cat(out)
