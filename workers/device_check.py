"""Whether a device serves well: exactness of tree rows, what steps cost beside reading the weights, and what
drafts gain and lose by load.

    python -m workers.device_check --device cuda
    python -m workers.device_check --device cuda --model FOLDER --draft FOLDER

Needs torch and transformers, no Ray. Without --model it makes a random Llama of 7 billion parameters on the
device (--shape tiny: a small one, to try the check itself). The last line says go or no go.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from workers import load_check
from workers.engine.benchmark import prefilled
from workers.engine.loading import load_model, resolve_dtype, wrap
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.target.measure import measure_step_times
from workers.tree import ANCHOR

SHAPES: Final = {
    "7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
CONTEXT: Final = 100
ROWS: Final = (1, 8, 32)
SEQUENCES: Final = (1, 64)
REPEATS: Final = 20
MOST_OVER_LIMIT: Final = 3.0
"""Times the read of the weights that a step of one row may take to be called good."""
LOADS: Final = (1, 4, 16, 64)
LEAST_OVER_PLAIN: Final = 0.95
"""Under no load may drafting cost more than the rest of this."""
MOST_OVER_ONE_ROW: Final = 1.5
"""Times a step of one row that a step of eight may take for trees to pay."""


def random_model(shape: str, dtype: str, device: str) -> Model:
    """A Llama of a shape with random weights."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=False)
    on = torch.device(device)
    with on:
        module: Any = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, on))
    return wrap(module.eval().requires_grad_(False), f"random Llama {shape}")


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a call, after a warm-up."""
    times = []
    for repeat in range(REPEATS + 3):
        _synchronise(device)
        started = time.perf_counter()
        call()
        _synchronise(device)
        if repeat >= 3:
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_ms(model: Model, rows: int, sequences: int) -> float:
    """A step: so many rows, siblings under an anchor, for each of so many sequences."""
    parents = [ANCHOR, *[0] * (rows - 1)]
    caches = prefilled(model, CONTEXT, sequences)
    for kv in caches:
        kv.reserve(CONTEXT + rows)
    tokens = list(range(5, 5 + rows))

    def run() -> None:
        model.forward(RowBatch([SequenceRows(kv, tokens, range(rows), parents) for kv in caches]))

    return timed(run, model.device)


def read_ms(weights: int, device: torch.device) -> float:
    """Reading so many bytes, by the speed at which the device copies (a copy reads and writes)."""
    size = min(weights, 1 << 30)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), device) / 2 * weights / size


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Whether a device serves well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--model", type=Path, help="a model folder, instead of a random one")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of the recorded drafts")
    parser.add_argument("--nodes", type=int, default=7, help="drafted rows of an answer at most")
    parser.add_argument("--draft", type=Path, help="a draft model's folder, timed beside it")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch {torch.__version__} finds no CUDA device")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"device: {name}, torch {torch.__version__}")
    # Raises where rows of chunks, of company or of trees are not what transformers says.
    if options.model is not None:
        model = load_model(options.model, options.dtype, options.device)
    else:
        model = random_model(options.shape, options.dtype, options.device)
    print(
        f"exact: rows as transformers' forward, {model.info.dtype}, attention {model.backend.name}"
    )
    print(f"row invariant, bit for bit: {'yes' if model.info.row_invariant else 'no'}")
    module = getattr(model.runner, "module", None)
    weights = sum(p.numel() * p.element_size() for p in module.parameters()) if module else 0
    limit = read_ms(weights, device) if weights else 0.0
    times = {(rows, n): step_ms(model, rows, n) for n in SEQUENCES for rows in ROWS}
    print("| rows | sequences | step, ms | over reading the weights |\n|---|---|---|---|")
    for (rows, sequences), ms in times.items():
        over = f"{ms / limit:.2f}" if limit else ""
        print(f"| {rows} | {sequences} | {ms:.2f} | {over} |")
    if options.draft is not None:
        draft = load_model(options.draft, options.dtype, options.device)
        print(f"a pass of the draft, 1 row: {step_ms(draft, 1, 1):.2f} ms")
    pool = model.pool(4096)
    step_times = measure_step_times(model, pool, 2048)
    loads = load_check.measure(model, step_times, LOADS, options.acceptance, options.nodes)
    print(
        f"with drafts that are right with probability {options.acceptance:g}, up to {options.nodes} rows:\n"
        "| at once | plain, tokens/s | drafted | over plain |\n|---|---|---|---|"
    )
    for load in loads:
        gain = load.drafted / load.plain
        print(f"| {load.at_once} | {load.plain:.1f} | {load.drafted:.1f} | {gain:.2f} |")
    slow = limit and times[1, 1] > MOST_OVER_LIMIT * limit
    dear = times[8, 1] > MOST_OVER_ONE_ROW * times[1, 1]
    losing = [load.at_once for load in loads if load.drafted < LEAST_OVER_PLAIN * load.plain]
    reasons = [
        *(["a step takes much longer than reading the weights"] if slow else []),
        *(["eight rows cost much more than one: trees would not pay"] if dear else []),
        *([f"drafts lose at {', '.join(map(str, losing))} at once"] if losing else []),
    ]
    print("go" if not reasons else "no go: " + "; ".join(reasons))
    return 0 if not reasons else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
