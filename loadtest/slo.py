"""The highest rate of requests at which the server keeps its limits, with speculation on and off.

    python -m loadtest.slo --slo-ttft-ms 500 --slo-tpot-ms 40

Requests come as a Poisson process (loadtest/locustfile.py), the same for on and off. A rate holds if no
request fails and the 99th percentiles of the time to first token and the time per output token are within
the limits. It is doubled or halved until one holds and another does not, then the gap is halved until
they are within --precision. On and off take turns. What was measured is kept in the output folder: a run that
was broken off goes on where it was, and other limits use what they can. Writes Markdown, JSON and a plot.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tqdm import tqdm

from loadtest import report
from loadtest.goodput import Limits
from loadtest.kept import Kept
from loadtest.server import running_server

OFF, ON = "off", "on"
LOCUSTFILE: Final = Path(__file__).with_name("locustfile.py")
FARTHEST: Final = 64
"""The search ends where the rate is so many times the one it began with, or its inverse."""


@dataclass(frozen=True, slots=True)
class Run:
    """Arrivals at one rate, requests a second; times in milliseconds, None where there was none."""

    setting: str
    rate: float
    answered: int
    failed: int
    ttft_p99: float | None
    tpot_p99: float | None
    lag_p99: float | None
    tokens_per_s: float

    def holds(self, limits: Limits) -> bool:
        """Whether the limits were kept."""
        return not self.failed and limits.hold(self.ttft_p99, self.tpot_p99)


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest rate that held and the lowest above it that did not; None where none was found."""

    held: float | None
    broken: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what was found for a setting; the times are those of the rate that held."""

    setting: str
    held: float | None
    broken: float | None
    answered: int
    ttft_p99: float | None
    tpot_p99: float | None
    tokens_per_s: float | None


def search(start: float, precision: float) -> Generator[float, bool, Bracket]:
    """Yields rates to try, and is sent whether they held, until broken / held <= `precision`."""
    held: float | None = None
    broken: float | None = None
    rate = start
    while True:
        if (yield rate):
            held = rate
        else:
            broken = rate
        if held is None:
            rate = rate / 2
        elif broken is None:
            rate = rate * 2
        elif broken / held <= precision:
            return Bracket(held, broken)
        else:
            # The middle of ratios. Three places: a run is found again by its rate.
            rate = float(f"{math.sqrt(held * broken):.3g}")
            if rate in (held, broken):
                return Bracket(held, broken)
        if not start / FARTHEST <= rate <= start * FARTHEST:
            return Bracket(held, broken)


def search_in_turn(
    settings: Sequence[str],
    start: float,
    precision: float,
    holds: Callable[[str, float], bool],
) -> dict[str, Bracket]:
    """A search for each setting, a rate of each in turn, so that a drift of the machine's speed hits all."""
    searches = {setting: search(start, precision) for setting in settings}
    rates = {setting: next(steps) for setting, steps in searches.items()}
    found: dict[str, Bracket] = {}
    while rates:
        for setting, rate in list(rates.items()):
            try:
                rates[setting] = searches[setting].send(holds(setting, rate))
            except StopIteration as stop:
                found[setting] = stop.value
                del rates[setting]
    return found


def measure(base: str, setting: str, rate: float, options: argparse.Namespace) -> Run:
    """Arrivals at one rate. Raises RuntimeError with the end of Locust's log if it could not run."""
    name = f"{setting}-{rate:g}"
    folder = options.out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "HttpStreamUser"),
        *("--headless", "--only-summary", "--host", base, "--html", str(folder / f"{name}.html")),
        *("--rate", str(rate), "--run-time", f"{options.seconds}s", "--speculation", setting),
        *("--prompts", str(options.prompts), "--mix", options.mix),
        *("--max-tokens", str(options.max_tokens), "--temperature", str(options.temperature)),
        # A rate that is too high is a result, not an error.
        *("--exit-code-on-error", "0"),
    ]
    log = folder / f"{name}.log"
    with log.open("w") as stream:
        code = subprocess.run(command, stdout=stream, stderr=stream, check=False).returncode
    if code:
        raise RuntimeError(f"locust ended with {code} ({log}):\n{log.read_text()[-3000:]}")
    row = json.loads((folder / f"{name}.json").read_text())["rows"][0]
    kept = ("answered", "failed", "ttft_p99", "tpot_p99", "lag_p99", "tokens_per_s")
    return Run(setting, rate, **{key: row[key] for key in kept})


def rows_of(found: Mapping[str, Bracket], runs: Sequence[Run]) -> list[Row]:
    """The table."""
    by_rate = {(run.setting, run.rate): run for run in runs}
    rows = []
    for setting, bracket in found.items():
        run = None if bracket.held is None else by_rate[setting, bracket.held]
        rows.append(
            Row(
                setting,
                bracket.held,
                bracket.broken,
                run.answered if run else 0,
                run.ttft_p99 if run else None,
                run.tpot_p99 if run else None,
                run.tokens_per_s if run else None,
            )
        )
    return rows


def markdown(rows: Sequence[Row], runs: Sequence[Run], limits: Limits) -> str:
    """What was found, and every rate that was tried."""
    lines = [
        "| speculation | highest rate that holds, requests/s | lowest that does not "
        "| requests | p99 TTFT, ms | p99 TPOT, ms | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.setting} | {_number(row.held)} | {_number(row.broken)} | {row.answered} "
            f"| {_number(row.ttft_p99)} | {_number(row.tpot_p99)} | {_number(row.tokens_per_s)} |"
        )
    lines += [
        "",
        "| speculation | rate, requests/s | answered | failed | p99 TTFT, ms | p99 TPOT, ms "
        "| sent late p99, ms | tokens/s | holds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: (run.setting, run.rate)):
        lines.append(
            f"| {run.setting} | {run.rate:g} | {run.answered} | {run.failed} "
            f"| {_number(run.ttft_p99)} | {_number(run.tpot_p99)} | {_number(run.lag_p99)} "
            f"| {_number(run.tokens_per_s)} | {'yes' if run.holds(limits) else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def plot(rows: Sequence[Row], runs: Sequence[Run], limits: Limits, path: Path) -> None:
    """Both percentiles by rate, with the limits and the rates that were found."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name, limit in (
        (left, "ttft_p99", limits.ttft_ms),
        (right, "tpot_p99", limits.tpot_ms),
    ):
        for place, row in enumerate(rows):
            mine = sorted((r for r in runs if r.setting == row.setting), key=lambda run: run.rate)
            seen = [(r.rate, getattr(r, name)) for r in mine if getattr(r, name) is not None]
            colour = f"C{place}"
            axes.plot(*zip(*seen, strict=True), marker="o", color=colour, label=row.setting)
            if row.held is not None:
                axes.axvline(row.held, color=colour, linestyle="--", linewidth=0.8)
        axes.axhline(limit, color="black", linestyle=":", linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel("requests/s (dashed: the highest that holds)")
        axes.set_ylabel(f"p99 {name[:4].upper()}, ms (dotted: the limit)")
        axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="The highest rate that keeps the limits")
    parser.add_argument("--slo-ttft-ms", type=float, required=True, help="limit of the p99")
    parser.add_argument("--slo-tpot-ms", type=float, required=True, help="limit of the p99")
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--mix", default="", help="weights by category, as for Locust")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=int, default=60, help="of arrivals at each rate")
    parser.add_argument("--start", type=float, default=1.0, help="the first rate, requests/s")
    parser.add_argument("--precision", type=float, default=1.1, help="of the rate found, a ratio")
    parser.add_argument("--out", type=Path, default=Path("out/slo"))
    options = parser.parse_args(arguments)
    if options.start <= 0 or options.precision <= 1:
        parser.error("--start must be above 0 and --precision above 1")
    limits = Limits(options.slo_ttft_ms, options.slo_tpot_ms)
    options.out.mkdir(parents=True, exist_ok=True)
    identity = {
        "prompts": options.prompts.name,
        "mix": options.mix,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seconds": options.seconds,
    }
    kept = Kept(options.out / "runs.jsonl", Run, identity)
    done = {(run.setting, run.rate): run for run in kept.items}
    with (
        running_server(options.url, options.config, options.out / "server.log") as base,
        tqdm(unit="run") as bar,
    ):
        # Warm-up, and the same prompts into the prefix cache.
        bar.set_description_str("warm-up")
        measure(base, ON, options.start, options)

        def holds(setting: str, rate: float) -> bool:
            bar.set_description_str(f"{setting}, {rate:g}/s")
            if (setting, rate) not in done:
                done[setting, rate] = measure(base, setting, rate, options)
                kept.add(done[setting, rate])
            bar.update()
            return done[setting, rate].holds(limits)

        found = search_in_turn((OFF, ON), options.start, options.precision, holds)
    runs = list(done.values())
    rows = rows_of(found, runs)
    plot(rows, runs, limits, options.out / "slo.png")
    table = markdown(rows, runs, limits)
    report.write(
        options.out,
        "slo",
        table,
        rows,
        limits=asdict(limits),
        runs=[asdict(run) for run in runs],
    )
    return 0 if all(row.held is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
