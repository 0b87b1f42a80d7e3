"""What a comparison would have verified under another price, or on a machine with other step times.

    python -m workers.compare.replay out/compare/trace.jsonl --price 0.2
    python -m workers.compare.replay out/compare/trace.jsonl --step-times other.json

Every round is taken as it was: the committed tokens before it, what was proposed, and what the answer went on
with, which no draft changes. (Settings with other rules of verification, whose texts depend on drafts, are
left out.) From that follows which nodes would have been verified, and which of them accepted. With a price
those likelier than it are verified, else as many as pay best by the table: `step_times` in the first line of
a trace, or of a file of your own. Seconds are what the table says of a pass, and the drafters' turn and the
wait as they were. Drafters are not asked again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.compare.trace import Round, Trace, depth_along, read, step_times
from workers.pricing import StepTimes, best_cut
from workers.tree import TokenTree

Choose = Callable[[Round], TokenTree]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums over rounds; `seconds` by a table of step times."""

    rounds: int
    verified: int
    accepted: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """What is to be expected."""
        return self.tokens / self.seconds


def by_price(price: float, max_nodes: int) -> Choose:
    """The nodes that are likelier than a price, `max_nodes` at most."""

    def choose(round_: Round) -> TokenTree:
        worth = sum(score > price for score in round_.tree.scores)
        return round_.tree.cut(min(worth, max_nodes), len(round_.tree))

    return choose


def by_times(times: StepTimes, max_nodes: int) -> Choose:
    """As many nodes as a step of these times verifies alone, `max_nodes` at most."""

    def choose(round_: Round) -> TokenTree:
        scores = sorted(round_.tree.scores, reverse=True)[:max_nodes]
        cut = best_cut(scores, 1, 1, round_.base_len, times)
        return round_.tree.cut(cut.nodes, len(round_.tree))

    return choose


def as_it_was(round_: Round) -> TokenTree:
    """The nodes that were verified."""
    at = {node: place for place, node in enumerate(round_.selected)}
    tree = round_.tree
    return TokenTree(
        tuple(tree.tokens[node] for node in round_.selected),
        tuple(at.get(tree.parents[node], -1) for node in round_.selected),
        tuple(tree.scores[node] for node in round_.selected),
    )


def replay(
    rounds: Iterable[Round],
    answers: Mapping[tuple[str, int, int], tuple[int, Sequence[int]]],
    choose: Choose,
    times: StepTimes,
) -> Replayed:
    """Rounds with other nodes verified.

    `answers` are (length of the prompt, tokens) by setting, question and turn.
    """
    number = verified = accepted = tokens = 0
    seconds = 0.0
    for round_ in rounds:
        prompt_len, answer = answers[round_.setting, round_.question, round_.turn]
        rest = answer[round_.base_len - prompt_len :]
        tree = choose(round_)
        right = depth_along(tree, rest)
        number += 1
        verified += len(tree)
        accepted += right
        tokens += min(right + 1, len(rest))
        seconds += times(1 + len(tree), round_.base_len) + round_.draft_s + round_.wait_s
    return Replayed(number, verified, accepted, tokens, seconds)


def table(trace: Trace, choose: Choose, times: StepTimes) -> str:
    """Each setting as it was and as it would have been, in Markdown."""
    answers = {
        (answer.setting, answer.question, number): (turn.prompt_len, turn.tokens)
        for answer in trace.answers
        for number, turn in enumerate(answer.turns)
    }
    lines = [
        "| setting | passes | verified a pass | would be | accepted a pass | would be "
        "| tokens a pass | would be | tokens/s, measured | by the table | would be |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rules = trace.run["options"]["settings"]
    for setting in dict.fromkeys(round_.setting for round_ in trace.rounds):
        if rules[setting]["verification"] != "coupled":
            continue
        rounds = [round_ for round_ in trace.rounds if round_.setting == setting]
        was = replay(rounds, answers, as_it_was, times)
        now = replay(rounds, answers, choose, times)
        took = sum(r.draft_s + r.wait_s + r.verify_s for r in rounds)
        cells = [setting, str(was.rounds)]
        for before, after in (
            (was.verified, now.verified),
            (was.accepted, now.accepted),
            (was.tokens, now.tokens),
        ):
            cells += [f"{before / was.rounds:.2f}", f"{after / was.rounds:.2f}"]
        cells += [f"{x:.1f}" for x in (was.tokens / took, was.tokens_per_s, now.tokens_per_s)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="A comparison under another price")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--price", type=float, help="of a row, in tokens: 0 to 1")
    parser.add_argument(
        "--step-times",
        type=Path,
        help='another trace, or a file of {"step_times": [[rows, context, s], …]}',
    )
    options = parser.parse_args(arguments)
    if options.price is None and options.step_times is None:
        parser.error("say under which --price, or with which --step-times")
    try:
        trace = read(options.trace)
        times = trace.times
        if options.step_times is not None:
            times = step_times(json.loads(options.step_times.read_text().split("\n")[0]))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    most = trace.run["options"]["max_draft_tokens"]
    choose = by_times(times, most) if options.price is None else by_price(options.price, most)
    print(table(trace, choose, times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
