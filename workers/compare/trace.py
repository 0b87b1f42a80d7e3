"""The trace of a comparison: a file of JSON lines, which everything that is reported is made of.

The first line is of the run: its `options`, and the `step_times` of the target as [rows, context, seconds].
Each answer is a line {"answer": …} behind those of its rounds, {"round": …}. A run that is broken off goes on
behind its last answer.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.pricing import StepTimes
from workers.tree import ANCHOR, TokenTree


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target behind `base_len` tokens.

    `tree` is all that was proposed, with the target's own estimates as scores; `selected` are the nodes of it
    that were verified, among them the first `accepted` of the `committed` tokens. `price` is of a row, in
    tokens; times are seconds: of the drafters' turn before the pass, of what else went by before it, and of
    the pass with its verification.
    """

    setting: str
    question: int
    turn: int
    base_len: int
    tree: TokenTree
    selected: tuple[int, ...]
    accepted: int
    committed: tuple[int, ...]
    price: float
    draft_s: float
    wait_s: float
    verify_s: float

    def tested(self) -> list[tuple[int, int | None, int]]:
        """Levels on the way of what was committed: (depth, rank of the right child, children verified).

        Depths and ranks begin with 1; the likeliest child has rank 1, None is none of them.
        """
        levels = []
        node = ANCHOR
        for depth, token in enumerate(self.committed, 1):
            children = [i for i in self.selected if self.tree.parents[i] == node]
            if not children:
                break
            children.sort(key=lambda i: (-self.tree.scores[i], i))
            ranks = [r for r, i in enumerate(children, 1) if self.tree.tokens[i] == token]
            levels.append((depth, ranks[0] if ranks else None, len(children)))
            if not ranks:
                break
            node = children[ranks[0] - 1]
        return levels


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn. `seconds` are of all of it, `prefill_s` those until its first token.

    `lengths` are the tokens that each pass after the prefill committed.
    """

    text: str
    prompt_len: int
    tokens: tuple[int, ...]
    reason: str
    seconds: float
    prefill_s: float
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """All turns of one question with one setting; `finished` is the time of day, in seconds since 1970."""

    setting: str
    question: int
    category: str
    turns: tuple[Turn, ...]
    finished: float

    @property
    def seconds(self) -> float:
        """Of all turns."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Of all turns."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def pace(self) -> float:
        """Seconds a token, the prompt's included."""
        return self.seconds / self.tokens

    @property
    def lengths(self) -> list[int]:
        """Of all turns."""
        return [length for turn in self.turns for length in turn.lengths]

    def same_as(self, other: "Answer") -> bool:
        """Whether tokens, text and reason to end are the same."""
        return [(t.tokens, t.text, t.reason) for t in self.turns] == [
            (t.tokens, t.text, t.reason) for t in other.turns
        ]


@dataclass(slots=True)
class Trace:
    """What a file holds, its last lines left out where they belong to no answer."""

    run: dict[str, Any]
    rounds: list[Round]
    answers: list[Answer]

    @property
    def times(self) -> StepTimes:
        """The target's table of step times."""
        return step_times(self.run)


def places(part: TokenTree, tree: TokenTree) -> tuple[int, ...]:
    """Which nodes of a tree those of a part of it are."""
    at = {ANCHOR: ANCHOR}
    for node, (token, parent) in enumerate(zip(part.tokens, part.parents, strict=True)):
        found = tree.child(at[parent], token)
        assert found is not None
        at[node] = found
    return tuple(at[node] for node in range(len(part)))


def depth_along(tree: TokenTree, tokens: Sequence[int]) -> int:
    """How many of the tokens are in the tree, one below the other."""
    node = ANCHOR
    for depth, token in enumerate(tokens):
        child = tree.child(node, token)
        if child is None:
            return depth
        node = child
    return len(tokens)


def step_times(run: Mapping[str, Any]) -> StepTimes:
    """The table of a trace's first line. Raises ValueError if there is none."""
    table = run.get("step_times")
    if not table:
        raise ValueError(
            'there is no table "step_times": [[rows, context, seconds], …] in the first line'
        )
    return StepTimes({(rows, context): seconds for rows, context, seconds in table})


def read(file: Path) -> Trace:
    """What the file holds. Raises ValueError if it is no trace."""
    lines = file.read_text().split("\n")
    try:
        trace = Trace(json.loads(lines[0]), [], [])
        trace.run["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is no trace of workers.compare: its first line has no options"
        ) from error
    pending: list[Round] = []
    # What has no end of line was being written when the run broke off.
    for line in lines[1:-1]:
        row = json.loads(line)
        if "round" in row:
            pending.append(_round(row["round"]))
        else:
            trace.rounds += pending
            pending = []
            trace.answers.append(_answer(row["answer"]))
    return trace


class TraceFile:
    """A trace that is being written; `trace` is what it holds."""

    def __init__(self, file: Path, trace: Trace) -> None:
        self.trace = trace
        self._file = file

    @classmethod
    def start(cls, file: Path, run: dict[str, Any]) -> "TraceFile":
        """A new one."""
        file.write_text(json.dumps(run) + "\n")
        return cls(file, Trace(run, [], []))

    @classmethod
    def resume(cls, file: Path, options: Mapping[str, Any]) -> "TraceFile":
        """One that is there. Raises ValueError if it has other options or is none."""
        trace = read(file)
        had = trace.run["options"]
        now = json.loads(json.dumps(options))
        other = [key for key in {**had, **now} if had.get(key) != now.get(key)]
        if other:
            said = "; ".join(f"{key}: {had.get(key)!r}, not {now.get(key)!r}" for key in other)
            raise ValueError(f"{file} is of another run ({said}): remove it, or take another --out")
        made = cls(file, trace)
        lines = [json.dumps(trace.run), *made._lines(trace.rounds, trace.answers)]
        beside = file.with_suffix(".tmp")
        beside.write_text("\n".join(lines) + "\n")
        os.replace(beside, file)
        return made

    def add(self, rounds: Sequence[Round], answer: Answer) -> None:
        """Keep an answer."""
        with self._file.open("a") as stream:
            stream.write("\n".join(self._lines(rounds, [answer])) + "\n")
        self.trace.rounds += rounds
        self.trace.answers.append(answer)

    @staticmethod
    def _lines(rounds: Sequence[Round], answers: Sequence[Answer]) -> list[str]:
        of: dict[tuple[str, int], list[Round]] = {}
        for round_ in rounds:
            of.setdefault((round_.setting, round_.question), []).append(round_)
        lines = []
        for answer in answers:
            for round_ in of.get((answer.setting, answer.question), []):
                lines.append(json.dumps({"round": asdict(round_)}))
            lines.append(json.dumps({"answer": asdict(answer)}))
        return lines


def _round(row: dict[str, Any]) -> Round:
    tree = TokenTree(**{key: tuple(values) for key, values in row.pop("tree").items()})
    return Round(tree=tree, **_tuples(row))


def _answer(row: dict[str, Any]) -> Answer:
    turns = tuple(Turn(**_tuples(turn)) for turn in row.pop("turns"))
    return Answer(turns=turns, **row)


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
