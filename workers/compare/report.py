"""What a comparison leaves behind: a table, the numbers, a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.compare.drafters import PLAIN
from workers.compare.statistics import ALL, Estimate, Row


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| category | setting | questions | tokens/s | speed-up (95 %) | τ (95 %) | τ, all passes "
        "| drafted a pass | accepted by depth | by rank | draft, ms | wait, ms | verify, ms | equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.category,
            row.setting,
            str(row.questions),
            f"{row.tokens_per_s:.1f}",
            _estimate(row.speed_up),
            _estimate(row.tau),
            f"{row.tokens_per_pass:.2f}",
            f"{row.drafted:.1f}",
            _shares(row.by_depth),
            _shares(row.by_rank),
            f"{row.draft_ms:.2f}",
            f"{row.wait_ms:.2f}",
            f"{row.verify_ms:.2f}",
            f"{row.equal}/{row.questions}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _estimate(value: Estimate) -> str:
    return f"{value.median:.2f} ({value.low:.2f} – {value.high:.2f})"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Speed-up and τ with their intervals, by category, a colour a setting.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    categories = list(dict.fromkeys(row.category for row in rows))
    settings = [s for s in dict.fromkeys(row.setting for row in rows) if s != PLAIN]
    height = max(3.5, 1 + 0.09 * len(categories) * (len(settings) + 2))
    figure = Figure(figsize=(10, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, what, label in (
        (left, "speed_up", "speed-up over plain decoding"),
        (right, "tau", "τ, tokens a pass"),
    ):
        for number, setting in enumerate(settings):
            mine = [row for row in rows if row.setting == setting]
            places = [categories.index(row.category) + 0.8 * number / len(settings) for row in mine]
            values = [getattr(row, what) for row in mine]
            errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
            style = {"color": colormaps["tab20"](number % 20), "fmt": "o", "ms": 4, "capsize": 2}
            medians = [v.median for v in values]
            axes.errorbar(medians, places, xerr=errors, label=setting, **style)
        for border in range(1, len(categories)):
            axes.axhline(border - 0.1, color="lightgrey", linewidth=0.6)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
    left.set_yticks([place + 0.4 for place in range(len(categories))], categories)
    left.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def write(folder: Path, run: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write compare.md, .json and .png, and print the rows of all questions and what was written."""
    (folder / "compare.md").write_text(markdown(rows))
    result = {**run, "rows": [asdict(row) for row in rows]}
    (folder / "compare.json").write_text(json.dumps(result, indent=1))
    print(markdown([row for row in rows if row.category == ALL]))
    try:
        plot(rows, folder / "compare.png")
    except ImportError:
        print("no plot: matplotlib is not installed (python -m pip install matplotlib)")
    print("written: " + ", ".join(str(path) for path in sorted(folder.glob("*"))))
