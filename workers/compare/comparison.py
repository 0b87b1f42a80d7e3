"""A comparison from its first question to its last: settings take turns, and what is done is kept."""

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from workers.compare.questions import Question
from workers.compare.run import Bench, Options
from workers.compare.trace import Trace, TraceFile

_TRACE: Final = "trace.jsonl"


def compare(options: Options, asked: Sequence[Question], folder: Path) -> Trace:
    """The trace of all questions with all settings: what the folder has of it, and what was left to do.

    Raises Broken if an answer came to no end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _TRACE
    said = _identity(options, asked)
    kept = TraceFile.resume(file, said) if file.exists() else None
    done = {(a.setting, a.question) for a in kept.trace.answers} if kept is not None else set()
    left = [
        (setting, question)
        for number, question in enumerate(asked)
        for setting in _in_turn(list(options.settings), number)
        if (setting, question.id) not in done
    ]
    if kept is not None and not left:
        return kept.trace
    bench = Bench(options, asked, None if kept is None else kept.trace.times)
    try:
        for setting in options.settings:
            bench.warm_up(setting, asked[0])
        if kept is None:
            table = [[*at, seconds] for at, seconds in bench.times.measured.items()]
            run = {"options": said, "step_times": table, "row_invariant": bench.row_invariant}
            kept = TraceFile.start(file, {**run, **_provenance()})
        total = len(done) + len(left)
        for setting, question in tqdm(left, initial=len(done), total=total, unit="answer"):
            kept.add(*bench.answer(setting, question))
    finally:
        bench.close()
    return kept.trace


def _in_turn(settings: Sequence[str], number: int) -> list[str]:
    """Another one is the first with each question: what the machine does meanwhile hits all alike."""
    first = number % len(settings)
    return [*settings[first:], *settings[:first]]


def _identity(options: Options, asked: Sequence[Question]) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that was broken off."""
    return {
        **asdict(options),
        "drafters": [{"kind": config.kind, **asdict(config)} for config in options.drafters],
        "questions": hashlib.sha256(repr(asked).encode()).hexdigest()[:16],
    }


def _provenance() -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
