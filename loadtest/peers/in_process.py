"""Engines in process, side by side: tokens/s on the same prompts, alone and so many at once.

    python -m loadtest.peers engines --prompts loadtest/prompts/six_kinds.jsonl

Every rival runs in an environment of its own under the output folder, made at the first run (--pip-flags are
passed to pip). All engines are loaded; all but the one that is asked are stopped by a signal, so nothing else
runs. They take turns, prompt by prompt. What was measured is kept: a run that was broken off goes on where it
was. Writes Markdown, JSON and a plot.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from loadtest import report
from loadtest.kept import Kept
from loadtest.peers.rivals import (
    OURS,
    PROGRAMS,
    add_options,
    add_questions,
    even_config,
    interpreter,
    ours,
    questions,
)
from loadtest.prompts_file import Prompt

REFERENCE: Final = "transformers"
BASE: Final = "vLLM"
ANSWERS: Final = "engines.jsonl"


@dataclass(frozen=True, slots=True)
class Engine:
    """One row: a program of the programs folder, its arguments, and the environment; "" is ours."""

    name: str
    program: str
    arguments: tuple[str, ...]
    environment: str = ""
    batches: bool = True


def engines(config: Path, folder: str) -> list[Engine]:
    """All of them."""
    return [
        Engine("slipstream, plain", OURS, (str(config), "off")),
        Engine("slipstream", OURS, (str(config),)),
        Engine(REFERENCE, "transformers_engine", (folder,), batches=False),
        Engine("transformers, prompt lookup", "transformers_engine", (folder, "10"), batches=False),
        Engine(BASE, "vllm_engine", (folder,), "vllm"),
        Engine("vLLM, n-gram", "vllm_engine", (folder, "5"), "vllm"),
    ]


class Running:
    """An engine's process. It runs only while it is asked."""

    def __init__(self, engine: Engine, python: Path, log: Path) -> None:
        self.engine = engine
        target = ["-m", f"loadtest.peers.programs.{OURS}"]
        if engine.program != OURS:
            target = [str(PROGRAMS / f"{engine.program}.py")]
        self.argv = [str(python), *target, *engine.arguments]
        self._log = log.open("w")
        self._process = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.about = self._read()
        self._signal(signal.SIGSTOP)

    def ask(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = False,
    ) -> dict[str, Any]:
        """Its answer to prompts, side by side. Raises RuntimeError if it is gone."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            asked = {
                "prompts": prompts,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
            }
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            return self._read()
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.engine.name} has ended; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass(frozen=True, slots=True)
class Sample:
    """One question to one engine."""

    engine: str
    at_once: int
    block: int
    seconds: float
    tokens: tuple[list[int], ...]
    rounds: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table; `over` are speeds over vLLM's plain decoding, block by block."""

    engine: str
    kind: str
    at_once: int
    tokens_per_s: float
    over: float
    low: float
    high: float
    mean_accepted_length: float
    drafted_per_round: float
    equal: int
    answers: int


@contextlib.contextmanager
def all_running(
    chosen: Sequence[Engine], folder: Path, pip_flags: str
) -> Iterator[dict[str, Running]]:
    """Every engine, loaded one after the other."""
    running: dict[str, Running] = {}
    try:
        for engine in tqdm(chosen, desc="loading", unit="engine"):
            python = interpreter(engine.environment, folder / "envs", pip_flags)
            log = folder / f"{engine.name.replace(', ', '-').replace(' ', '-')}.log"
            running[engine.name] = Running(engine, python, log)
        yield running
    finally:
        for each in running.values():
            each.stop()


def measure(
    running: dict[str, Running],
    blocks: dict[int, list[list[list[int]]]],
    kept: Kept[Sample],
    most: int,
) -> None:
    """Every block of prompts to every engine, in an order that changes from block to block."""
    done = {(sample.engine, sample.at_once, sample.block) for sample in kept.items}
    for each in running.values():
        each.ask(blocks[1][0], 16)  # warm-up
    names = list(running)
    plan = [(n, number) for n, each in blocks.items() for number in range(len(each))]
    for at_once, number in tqdm(plan, unit="block"):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            wanted = at_once == 1 or running[name].engine.batches
            if not wanted or (name, at_once, number) in done:
                continue
            answer = running[name].ask(blocks[at_once][number], most)
            kept.add(Sample(name, at_once, number, **{**answer, "tokens": tuple(answer["tokens"])}))


def summarise(
    samples: Sequence[Sample], name: str, kind: str, at_once: int, numbers: Sequence[int]
) -> Row | None:
    """One line: an engine on some blocks."""

    def of(engine: str) -> dict[int, Sample]:
        return {
            s.block: s
            for s in samples
            if s.engine == engine and s.at_once == at_once and s.block in numbers
        }

    mine, base, reference = of(name), of(BASE), of(REFERENCE)
    if not mine:
        return None

    def speed(sample: Sample) -> float:
        return sum(map(len, sample.tokens)) / sample.seconds

    over = sorted(speed(mine[n]) / speed(base[n]) for n in mine if n in base) or [0.0]
    tokens = sum(len(answer) for sample in mine.values() for answer in sample.tokens)
    rounds = max(1, sum(sample.rounds for sample in mine.values()))
    return Row(
        name,
        kind,
        at_once,
        tokens / sum(sample.seconds for sample in mine.values()),
        statistics.median(over),
        over[len(over) // 4],
        over[-1 - len(over) // 4],
        (tokens - sum(len(sample.tokens) for sample in mine.values())) / rounds,
        sum(sample.drafted for sample in mine.values()) / rounds,
        sum(mine[n].tokens == reference[n].tokens for n in mine if n in reference),
        sum(n in reference for n in mine),
    )


def markdown(rows: Sequence[Row]) -> str:
    """One table."""
    lines = [
        f"| task | at once | engine | tokens/s | over {BASE} (quartiles) | τ | drafted a round "
        "| as `generate` says |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = f"{row.equal}/{row.answers}" if row.answers else ""
        lines.append(
            f"| {row.kind} | {row.at_once} | {row.engine} | {row.tokens_per_s:.1f} "
            f"| {row.over:.2f} ({row.low:.2f} – {row.high:.2f}) "
            f"| {row.mean_accepted_length:.2f} | {row.drafted_per_round:.1f} | {equal} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Alone by task, and all tasks by requests at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.engine for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.at_once == 1))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        alone = [row for row in rows if row.engine == name and row.at_once == 1]
        at = [kinds.index(row.kind) + (place - (len(names) - 1) / 2) * width for row in alone]
        left.bar(at, [row.tokens_per_s for row in alone], width, label=name)
        many = [row for row in rows if row.engine == name and row.kind == "all"]
        right.plot([r.at_once for r in many], [r.tokens_per_s for r in many], marker="o")
    left.set_xticks(
        range(len(kinds)),
        [kind.replace(" ", "\n", 1).replace("-", "-\n") for kind in kinds],
        fontsize=7,
    )
    left.set_ylabel("tokens/s, one at a time")
    left.legend(fontsize=7)
    right.set_xscale("log", base=2)
    right.set_xlabel("prompts at once")
    right.set_ylabel("tokens/s")
    figure.savefig(path, dpi=120)


def table_of(
    samples: Sequence[Sample],
    names: Sequence[str],
    prompts: Sequence[Prompt],
    blocks: dict[int, list[list[list[int]]]],
) -> list[Row]:
    """All lines."""
    rows = []
    kinds = ["all", *dict.fromkeys(prompt.kind for prompt in prompts)]
    for kind in kinds:
        numbers = [n for n, prompt in enumerate(prompts) if kind in ("all", prompt.kind)]
        rows += [summarise(samples, name, kind, 1, numbers) for name in names]
    for at_once in blocks:
        if at_once > 1:
            numbers = list(range(len(blocks[at_once])))
            rows += [summarise(samples, name, "all", at_once, numbers) for name in names]
    return [row for row in rows if row is not None]


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Engines in process, side by side")
    add_options(parser)
    add_questions(parser)
    parser.add_argument("--at-once", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--only", nargs="+", help="names of engines")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    config = even_config(options.config, options.out / "slipstream.yaml")
    prompts, ids, identity = questions(config, options)
    chosen = [
        engine
        for engine in engines(config, ours("--folder", str(config)))
        if not options.only or engine.name in options.only
    ]
    blocks = {1: [[tokens] for tokens in ids]}
    for at_once in options.at_once:
        cycled = [ids[n % len(ids)] for n in range(max(at_once, len(ids) // at_once * at_once))]
        blocks[at_once] = [
            cycled[n : n + at_once] for n in range(0, len(cycled) - at_once + 1, at_once)
        ]
    kept = Kept(options.out / ANSWERS, Sample, identity)
    with all_running(chosen, options.out, options.pip_flags) as running:
        measure(running, blocks, kept, options.max_tokens)
        about = {name: {"argv": each.argv, **each.about} for name, each in running.items()}
    rows = table_of(kept.items, [engine.name for engine in chosen], prompts, blocks)
    plot(rows, options.out / "engines.png")
    report.write(options.out, "engines", markdown(rows), rows, engines=about)
    return 0
