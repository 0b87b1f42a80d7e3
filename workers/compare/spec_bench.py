"""Answer files in Spec-Bench's format, which its scripts of speed and equality read."""

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workers.compare.trace import Answer


def row(answer: Answer, model: str) -> dict[str, Any]:
    """One question's line; steps are passes after the prefill, whose token is in `new_tokens` only."""
    model_id = f"{model}-{answer.setting}"
    return {
        "question_id": answer.question,
        "category": answer.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{model_id}/{answer.question}").hex,
        "model_id": model_id,
        "tstamp": answer.finished,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text for turn in answer.turns],
                "decoding_steps": [len(turn.lengths) for turn in answer.turns],
                "new_tokens": [len(turn.tokens) for turn in answer.turns],
                "wall_time": [turn.seconds for turn in answer.turns],
                "accept_lengths": answer.lengths,
            }
        ],
    }


def write(folder: Path, model: str, answers: Iterable[Answer]) -> None:
    """A file a setting, its questions in order: the scripts compare line by line."""
    folder.mkdir(exist_ok=True)
    lines: dict[str, list[str]] = {}
    for answer in sorted(answers, key=lambda answer: answer.question):
        lines.setdefault(answer.setting, []).append(json.dumps(row(answer, model)))
    for setting, rows in lines.items():
        (folder / f"{model}-{setting}.jsonl").write_text("\n".join(rows) + "\n")
