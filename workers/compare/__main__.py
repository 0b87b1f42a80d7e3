r"""Compares drafters with plain decoding and with each other, in one process: no Ray, no network.

    python -m workers.compare --target REFERENCE --drafter lookup --drafter my_package:make \
        --drafter '{name: head, kind: eagle, model: PATH}' --drafter head+lookup --prompts questions.jsonl

Drafters run beside the target, as with `placement: target`, under the same price and budget as in a server.
Settings take turns, question by question, with the same seeds, and so make the same text: it is checked,
and the exit status is 1 where it is another one. (Texts of other rules of --verification are their own.)
A run that is broken off goes on where it was. In --out: compare.md, .json and .png; trace.jsonl, every round
(workers.compare.replay); spec_bench/, answer files.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.compare import drafters, questions, report, spec_bench, statistics
from workers.compare.comparison import compare
from workers.compare.drafters import PLAIN
from workers.compare.run import Broken, Options
from workers.compare.trace import Trace
from workers.request import DRAWN


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    given = _parser().parse_args(arguments)
    try:
        asked = questions.read(given.prompts, given.every)
        _check_rules(given)
        settings, configs = drafters.parse(given.drafter, given.verification)
        options = Options(
            target=given.target,
            dtype=given.dtype,
            device=given.device,
            num_threads=given.num_threads,
            max_draft_tokens=given.max_draft_tokens,
            max_tokens=given.max_tokens,
            temperature=given.temperature,
            seed=given.seed,
            chain=given.chain,
            settings=settings,
            drafters=configs,
        )
        trace = compare(options, asked, given.out)
    except (OSError, ValueError, Broken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = Path(given.target).name.removesuffix(".gguf")
    spec_bench.write(given.out / "spec_bench", model, trace.answers)
    report.write(given.out, trace.run, statistics.rows(trace))
    return _judge(trace)


def _judge(trace: Trace) -> int:
    """1, and which, if answers differ from plain decoding's."""
    plain = {answer.question: answer for answer in trace.answers if answer.setting == PLAIN}
    other = [
        f"question {answer.question}, {answer.setting}"
        for answer in trace.answers
        if not answer.same_as(plain[answer.question])
        and trace.run["options"]["settings"][answer.setting]["verification"] == "coupled"
    ]
    if not other:
        return 0
    print(f"error: other answers than plain decoding's: {'; '.join(other)}", file=sys.stderr)
    if not trace.run["row_invariant"]:
        print(
            "on this device a row depends on its company in the last bits: ties may fall otherwise",
            file=sys.stderr,
        )
    return 1


def _check_rules(given: argparse.Namespace) -> None:
    if given.temperature == 0.0 and given.verification != ["coupled"]:
        raise ValueError("at temperature 0 all rules are the same: give a --temperature")
    if "block" in given.verification and not given.chain:
        raise ValueError("--verification block tests chains: add --chain")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.compare",
        description="Drafters against plain decoding and each other",
    )
    parser.add_argument(
        "--target", required=True, help="a model reference, as in a server's config"
    )
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        help="a kind, package.module:function, {kind: …, …} as in a server's config, or a set A+B; repeat it",
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines, Spec-Bench's or {prompt}"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="take every so many-th question: 4 of Spec-Bench are 20 of each subtask",
    )
    parser.add_argument("--out", type=Path, default=Path("out/compare"))
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument(
        "--max-draft-tokens", type=int, default=8, help="drafted rows of a pass at most"
    )
    parser.add_argument("--chain", action="store_true", help="draft chains, no trees")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--verification",
        choices=["coupled", *sorted(DRAWN)],
        nargs="+",
        default=["coupled"],
        help="every drafter with each of these rules; all but coupled make texts of their own",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--device", default="cpu", help="of the target")
    parser.add_argument("--num-threads", type=int, default=0, help="torch's; 0 leaves its default")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
