"""Prompt files: one JSON object a line, in our form or in Spec-Bench's."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Spec-Bench names the eight topics of MT-bench; together they are its subtask of conversations.
_MT_BENCH: Final = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
]
_SUBTASK: Final = {
    **dict.fromkeys(_MT_BENCH, "conversation"),
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and the kind of task it is; `category` is finer where Spec-Bench's is."""

    kind: str
    text: str
    category: str


def read(path: Path, per_kind: int | None = None) -> list[Prompt]:
    """The prompts of a file, the first `per_kind` of each kind; first turns only.

    Lines are {"kind", "prompt"} (or "question", or "instruction") or Spec-Bench's {"category", "turns"}.
    Raises ValueError for others.
    """
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    # Only "\n" ends a line: JSON may hold U+2028 and the like as they are.
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        plain = next((name for name in ("prompt", "question", "instruction") if name in row), None)
        if plain is not None:
            kind = category = row.get("kind", "all")
            text = row[plain]
        elif "turns" in row:
            category = row.get("category", "all")
            kind, text = _SUBTASK.get(category, category), row["turns"][0]
        else:
            raise ValueError(f"{path}:{number} has neither prompt nor turns")
        counts[kind] = counts.get(kind, 0) + 1
        if per_kind is None or counts[kind] <= per_kind:
            prompts.append(Prompt(kind, text, category))
    return prompts
