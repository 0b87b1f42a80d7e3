"""What a temperature does to drafters: comparisons that differ in it, in one table and one plot.

    python -m workers.compare.temperatures out/t0 out/t0.6 out/t1 --out out/temperatures

Each argument is the folder of a run of workers.compare. Settings that are in all of them are shown.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.compare.drafters import PLAIN
from workers.compare.statistics import ALL

Runs = Mapping[float, Mapping[str, Mapping[str, Any]]]
"""Rows of all questions, by temperature and setting."""


def read(folders: Sequence[Path]) -> Runs:
    """The rows of these runs, which must differ in their temperature alone, else it raises ValueError."""
    runs: dict[float, dict[str, Mapping[str, Any]]] = {}
    first: Mapping[str, Any] = {}
    for folder in folders:
        run = json.loads((folder / "compare.json").read_text())
        options = {name: run["options"][name] for name in ("target", "questions", "max_tokens")}
        first = first or options
        if options != first:
            raise ValueError(f"{folder}: {options}, but {folders[0]}: {first}")
        temperature = run["options"]["temperature"]
        if temperature in runs:
            raise ValueError(f"{folder}: there is a run at temperature {temperature} already")
        runs[temperature] = {row["setting"]: row for row in run["rows"] if row["category"] == ALL}
    return dict(sorted(runs.items()))


def common(runs: Runs) -> list[str]:
    """The settings that all runs have, but for plain decoding."""
    first = next(iter(runs.values()))
    return [s for s in first if s != PLAIN and all(s in rows for rows in runs.values())]


def markdown(runs: Runs) -> str:
    """A row a setting: speed-up with its interval, and τ, at each temperature."""
    lines = [
        f"| drafters | {' | '.join(f'{temperature:g}' for temperature in runs)} |",
        f"|---|{'---|' * len(runs)}",
    ]
    for setting in common(runs):
        cells = []
        for rows in runs.values():
            speed, tau = rows[setting]["speed_up"], rows[setting]["tau"]["median"]
            interval = f"{speed['low']:.2f} – {speed['high']:.2f}"
            cells.append(f"{speed['median']:.2f} ({interval}), τ {tau:.2f}")
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(runs: Runs, path: Path) -> None:
    """Speed-up over temperature, a line a setting. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    temperatures = list(runs)
    for setting in common(runs):
        values = [rows[setting]["speed_up"] for rows in runs.values()]
        errors = [
            [value["median"] - value["low"] for value in values],
            [value["high"] - value["median"] for value in values],
        ]
        medians = [value["median"] for value in values]
        axes.errorbar(temperatures, medians, yerr=errors, fmt="o-", capsize=3, label=setting)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("temperature")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_xticks(temperatures)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Comparisons at several temperatures")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of workers.compare")
    parser.add_argument("--out", type=Path, default=Path("out/temperatures"))
    options = parser.parse_args(arguments)
    try:
        runs = read(options.runs)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    table = markdown(runs)
    (options.out / "temperatures.md").write_text(table)
    plot(runs, options.out / "temperatures.png")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
