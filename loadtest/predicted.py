"""Predicted outputs beside plain decoding, through the front door: what a prediction is worth.

    python -m loadtest.predicted --prompts loadtest/prompts/six_kinds.jsonl --per-kind 2

The server's own plain answer to a prompt is the text that its prediction is made of: as it is, with one line
changed, or the answer to another prompt. One request at a time, each prompt with every prediction in turn,
so that a drift of the machine's speed hits all. Writes Markdown and JSON.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from tqdm import tqdm

from loadtest import report
from loadtest.prompts_file import read
from loadtest.server import running_server

PLAIN: Final = "plain"
NONE: Final = "no prediction"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: how long it took, and what came of its prediction."""

    text: str
    tokens: int
    seconds: float
    rounds: int
    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a kind of prediction, over all prompts."""

    prediction: str
    prompts: int
    tokens_per_s: float
    speedup: float
    least_speedup: float
    tokens_per_round: float
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    equal: int


def one_line_changed(text: str) -> str:
    """A text whose middle line has its words in reverse; of a single line, the middle sentence."""
    by = "\n" if text.count("\n") >= 2 else ". "
    lines = text.split(by)
    filled = [number for number, line in enumerate(lines) if len(line.split()) > 1]
    if filled:
        middle = filled[len(filled) // 2]
        lines[middle] = " ".join(reversed(lines[middle].split()))
    return by.join(lines)


PREDICTIONS: Final[dict[str, Callable[[str, str], str]]] = {
    "the answer itself": lambda own, other: own,
    "one line changed": lambda own, other: one_line_changed(own),
    "another answer": lambda own, other: other,
}
"""From the plain answer, and another prompt's, to what is predicted."""


def ask(client: httpx.Client, prompt: str, max_tokens: int, **more: Any) -> Sample:
    """One answer of the server."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    body["speculation"] = {**body.get("speculation", {}), "stats": True}
    started = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - started
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    answer = response.json()
    details = answer["usage"].get("completion_tokens_details") or {}
    return Sample(
        text=answer["choices"][0]["message"]["content"],
        tokens=answer["usage"]["completion_tokens"],
        seconds=seconds,
        rounds=answer["speculation"]["rounds"],
        accepted=details.get("accepted_prediction_tokens", 0),
        rejected=details.get("rejected_prediction_tokens", 0),
    )


def measure(base: str, prompts: Sequence[str], max_tokens: int) -> dict[str, list[Sample]]:
    """All prompts with all predictions, in an order that changes from prompt to prompt."""
    plain: dict[str, Any] = {"speculation": {"enabled": False}}
    samples: dict[str, list[Sample]] = {name: [] for name in (PLAIN, NONE, *PREDICTIONS)}
    with httpx.Client(base_url=base, timeout=600) as client:
        # Warm-up, and what the predictions are made of.
        own = [ask(client, prompt, max_tokens, **plain).text for prompt in prompts]
        for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
            bodies: dict[str, dict[str, Any]] = {PLAIN: plain, NONE: {}}
            for name, made in PREDICTIONS.items():
                content = made(own[number], own[number - 1])
                bodies[name] = {"prediction": {"type": "content", "content": content}}
            turn = number % len(bodies)
            for name in (*list(bodies)[turn:], *list(bodies)[:turn]):
                samples[name].append(ask(client, prompt, max_tokens, **bodies[name]))
    return samples


def rows_of(samples: dict[str, list[Sample]]) -> list[Row]:
    """The table."""
    made = []
    for name, answers in samples.items():
        pairs = list(zip(samples[PLAIN], answers, strict=True))
        speedups = [off.seconds / on.seconds for off, on in pairs]
        made.append(
            Row(
                prediction=name,
                prompts=len(answers),
                tokens_per_s=sum(s.tokens for s in answers) / sum(s.seconds for s in answers),
                speedup=statistics.median(speedups),
                least_speedup=min(speedups),
                tokens_per_round=sum(s.tokens - 1 for s in answers)
                / max(1, sum(s.rounds for s in answers)),
                accepted_prediction_tokens=sum(s.accepted for s in answers),
                rejected_prediction_tokens=sum(s.rejected for s in answers),
                equal=sum(off.text == on.text for off, on in pairs),
            )
        )
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table that docs/measurements.md shows."""
    lines = [
        "| prediction | tokens/s | speed-up (median) | least | tokens a round | accepted | rejected "
        "| equal answers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.prediction} | {row.tokens_per_s:.1f} | {row.speedup:.2f} "
            f"| {row.least_speedup:.2f} | {row.tokens_per_round:.2f} "
            f"| {row.accepted_prediction_tokens} | {row.rejected_prediction_tokens} "
            f"| {row.equal}/{row.prompts} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Predicted outputs beside plain decoding")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, help="prompts of each kind at most")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("out/predicted"))
    options = parser.parse_args(arguments)
    prompts = [prompt.text for prompt in read(options.prompts, options.per_kind)]
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server(options.url, options.config, options.out / "server.log") as base:
        rows = rows_of(measure(base, prompts, options.max_tokens))
    report.write(options.out, "predicted", markdown(rows), rows)
    return 0 if all(row.equal == row.prompts for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
