"""Questions: one JSON object a line, in Spec-Bench's form or with a prompt of one turn."""

from dataclasses import dataclass
from pathlib import Path

from workers import json_lines


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, turn by turn."""

    id: int
    category: str
    turns: tuple[str, ...]


def read(path: Path, every: int = 1) -> list[Question]:
    """Every so many-th question of a file, beginning with the first.

    Lines are Spec-Bench's {"question_id", "category", "turns"}, or {"prompt"} with a "kind" or none; what has
    no id gets its line's number. Raises ValueError for others, and for ids that occur twice.
    """
    questions: dict[int, Question] = {}
    for number, row in json_lines.read(path):
        turns = row.get("turns") or ([row["prompt"]] if "prompt" in row else [])
        if not turns:
            raise ValueError(f"{path}:{number} has neither turns nor prompt")
        category = row.get("category", row.get("kind", "all"))
        question = Question(row.get("question_id", number), category, tuple(turns))
        if question.id in questions:
            raise ValueError(f"{path}:{number}: question {question.id} is there twice")
        questions[question.id] = question
    if not questions:
        raise ValueError(f"{path} has no questions")
    return list(questions.values())[::every]
