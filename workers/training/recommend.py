"""Which drafting method to take for a target, and why.

The order is that of measurements by third parties on Spec-Bench (Xia et al., arXiv 2401.07851, and its
leaderboard); what a temperature leaves of it, and what has no place there, is by our own (docs/drafters.md).
It is guidance: a comparison on prompts of one's own takes its place.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import yaml

from workers.compare.drafters import DEFAULTS, PLAIN, Setting, said
from workers.compare.statistics import Row
from workers.draft import skips
from workers.draft.config import DrafterConfig
from workers.training.sizes import Memory, Sizes, first_and_last

Placement = Literal["draft", "target"]

LEAST_TOKENS: Final = 4096
"""Of answers in the making: with room for fewer a drafter sits out most of the time."""
MOST_TOKENS: Final = 65536
_UNITS: Final = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_WITHOUT_MODEL: Final = ("suffix", "lookup")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What there is: bytes of memory for drafts, whether they may be trained, where they run."""

    memory: int
    training: bool
    temperature: float
    placement: Placement


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft for a target.

    `speed_up` over plain decoding is at temperature 0: the leaderboard's for 7 billion parameters where it
    has the method (Spec-Bench, April 2025, mean of two GPUs), else a cautious reading of what is published
    and of docs/drafters.md. `kept` is the share of it at temperature 1, as there of tokens a pass. `training`
    is the command of workers.training that must come first, `missing` why there is none for this target.
    """

    name: str
    kind: str
    why: str
    memory: Memory
    speed_up: float
    kept: float
    options: Mapping[str, Any] = field(default_factory=dict)
    training: str = ""
    missing: str = ""

    def expected(self, temperature: float) -> float:
        """The speed-up at a temperature: what methods are ordered by."""
        return self.speed_up * (1 - (1 - self.kept) * min(1.0, temperature))


@dataclass(frozen=True, slots=True)
class Choice:
    """A method that fits, with memory for so many tokens of answers, and what the config says of it."""

    method: Method
    tokens: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    """Methods that fit, the best first, and why the others do not."""

    ranked: tuple[Choice, ...]
    left_out: Mapping[str, str]


def parse_bytes(text: str) -> int:
    """Bytes, as in 300000000, 512MiB or 2 GB; raises ValueError for anything else."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    unit = matched and _UNITS.get(matched[2] if matched[2] != "B" else "")
    if matched is None or unit is None or not float(matched[1]):
        raise ValueError(
            f"--memory {text}: give bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        )
    return int(float(matched[1]) * unit)


def methods(sizes: Sizes, target: str, placement: Placement) -> list[Method]:
    """All methods, as they are for a target."""
    beside = placement == "target"
    count = sizes.layers
    third = first_and_last(count, min(count, max(2, count // 3)))
    few = first_and_last(count, min(count, max(2, count * 4 // 30)))
    early, late = max(1, count // 5), min(count - 1, 4 * count // 5)
    skip = skips.every_second(count)
    passes = (
        "" if beside else "it reads the target's own passes, and so runs beside the target only"
    )
    own = "" if beside else "it runs the target's own layers, and so beside the target only"
    whole = "" if count > 1 else "this target has no layers that can be left out"
    loading = f"while it loads, the whole target in float32 takes {size(sizes.loading_bytes)}"
    states = f"{size(sizes.feature_bytes)} of states a token"
    turns = (
        "its passes take turns with the target's here, so it pays more on a worker of its own"
        if beside
        else "only token ids cross the network, and its passes run beside the target's"
    )
    nothing = Memory()
    return [
        Method(
            name="eagle",
            kind="eagle",
            why="the fastest of the survey on most tasks and at every temperature: one layer, which goes on "
            "from the target's own states; "
            + (f"the target keeps {states}" if beside else f"{states} cross the network"),
            memory=sizes.eagle() if sizes.heads_fit else nothing,
            speed_up=2.07,
            kept=0.93,
            options={"model": "eagle"},
            training=f"eagle --target {target} --corpus text.npz --out eagle --learning-rate 2e-3",
            missing="" if sizes.heads_fit else "EAGLE heads are trained for targets like Llama",
        ),
        Method(
            name="model",
            kind="model",
            why=f"some of the target's layers as a draft model: {turns}; {loading}",
            memory=nothing if whole else sizes.cut(third),
            speed_up=1.1 if beside else 1.65,
            kept=0.93,
            options={"model": "draft"},
            training=f"distill --target {target} --corpus text.npz --out draft --layers {_listed(third)} "
            "--learning-rate 1.5e-3",
            missing=whole,
        ),
        Method(
            name="medusa",
            kind="medusa",
            why="small heads on the target's last state guess several tokens at once: trained in minutes, "
            "and less often right than EAGLE, because none sees the guess before it",
            memory=sizes.medusa(4, 1) if sizes.embeds else nothing,
            speed_up=1.58,
            kept=0.98,
            options={"model": "medusa"},
            training=f"medusa --target {target} --corpus text.npz --out medusa --learning-rate 2e-3",
            missing="" if sizes.embeds else "Medusa heads fit targets like Llama",
        ),
        Method(
            name="mask",
            kind="mask",
            why="some of the target's layers and mask tokens guess several tokens in one pass, from token "
            f"ids alone; {loading}",
            memory=nothing if whole else sizes.cut(few),
            speed_up=1.5,
            kept=1.01,
            options={"model": "masks"},
            training=f"mask --target {target} --corpus text.npz --out masks --layers {_listed(few)} "
            "--learning-rate 1.5e-3",
            missing=whole,
        ),
        Method(
            name="early_exit",
            kind="early_exit",
            why=f"the target's first {early} layers, and a trained one behind them: no second model, but "
            "each guess runs those layers and the whole head",
            memory=nothing if whole else sizes.part(early, adapter=True),
            speed_up=1.4,
            kept=0.95,
            options={"model": "exit"},
            training=f"early_exit --target {target} --corpus text.npz --out exit --exit {early} "
            "--learning-rate 1e-3",
            missing=own or whole,
        ),
        Method(
            name="suffix",
            kind="suffix",
            why="no model: what most often followed the last tokens before; fast where answers repeat their "
            "prompt (summaries, code that is edited), of little use elsewhere and at high temperatures",
            memory=Memory(per_token=450),
            speed_up=1.66,
            kept=0.69,
        ),
        Method(
            name="lookup",
            kind="lookup",
            why="no model: what followed the last tokens the last time; fast and slow where suffix is",
            memory=Memory(per_token=120),
            speed_up=1.65,
            kept=0.69,
        ),
        Method(
            name="plain_exit",
            kind="early_exit",
            why=f"the target's first {late} layers, with its own norm and head behind them: nothing to "
            "train, and hardly cheaper than a step",
            memory=nothing if whole else sizes.part(late, adapter=False),
            speed_up=1.1,
            kept=1.05,
            options={"layers": late},
            missing=own or whole,
        ),
        Method(
            name="layer_skip",
            kind="layer_skip",
            why="the target without some of its layers: nothing to train, and worth it for many layers, once "
            "`skip_search` has found which (the survey: 1.4 to 1.7 times with 13 to 70 billion parameters)",
            memory=nothing if whole else sizes.part(count - len(skip), adapter=False),
            speed_up=1.2,
            kept=0.78,
            missing=own or whole or ("" if skip else f"of {count} layers none can be left out"),
        ),
        Method(
            name="lookahead",
            kind="lookahead",
            why="n-grams that the target's own passes make beside the answer: nothing to train, no weights; "
            "for large targets and few answers at once, with `max_draft_tokens: 16` for all of its rows",
            memory=nothing,
            speed_up=1.24,
            kept=0.95,
            missing=passes,
        ),
        Method(
            name="jacobi",
            kind="jacobi",
            why="guesses that the target's own passes refine: nothing to train, no weights; worth it only "
            "where more rows cost almost nothing (the survey: 1.0 to 1.1 times)",
            memory=nothing,
            speed_up=1.03,
            kept=1.05,
            missing=passes,
        ),
        Method(
            name="datastore",
            kind="datastore",
            why="what followed the last tokens in texts of yours",
            memory=nothing,
            speed_up=1.38,
            kept=0.85,
            missing="it needs texts like your answers first (python -m workers.datastore build)",
        ),
    ]


def advise(known: Sequence[Method], wishes: Wishes) -> Advice:
    """The methods that fit, ordered for a temperature, and why the others do not."""
    ranked, left_out = [], {}
    for method in sorted(known, key=lambda m: -m.expected(wishes.temperature)):
        weights, per_token = method.memory.weights, method.memory.per_token
        tokens = MOST_TOKENS
        if per_token:
            tokens = min(tokens, max(0, wishes.memory - weights) // per_token // 16 * 16)
        if method.missing:
            left_out[method.name] = method.missing
        elif method.training and not wishes.training:
            left_out[method.name] = "it has to be trained first, which is not allowed"
        elif weights > wishes.memory or tokens < LEAST_TOKENS:
            left_out[method.name] = (
                f"it does not fit into {size(wishes.memory)}: {size(weights)} of weights, and "
                f"{size(LEAST_TOKENS * per_token)} for {LEAST_TOKENS:,} tokens of answers"
            )
        else:
            ranked.append(Choice(method, tokens, _config(method, tokens, wishes.placement)))
    return Advice(tuple(ranked), left_out)


def heading(sizes: Sizes, target: str, wishes: Wishes) -> str:
    """What advice is for."""
    training = "training allowed" if wishes.training else "no training"
    place = "beside the target" if wishes.placement == "target" else "on workers of their own"
    return (
        f"{target}: {sizes.layers} layers, hidden size {sizes.hidden}, {sizes.vocabulary:,} tokens, "
        f"{sizes.dtype}\ndrafters {place}: {size(wishes.memory)}, {training}, "
        f"temperature {wishes.temperature:g}\n"
    )


def text(advice: Advice, target: str) -> str:
    """The advice as it is printed; what stands behind the last empty line is YAML."""
    lines = []
    for place, choice in enumerate(advice.ranked, 1):
        method = choice.method
        needs = "needs training" if method.training else "as it is"
        lines += [f"{place:2}. {method.name} ({needs}; {_memory(choice)})", f"    {method.why}"]
    if advice.left_out:
        lines += ["", "left out:"]
        lines += [f"  - {name}: {why}" for name, why in advice.left_out.items()]
    lines += ["", "This order is guidance, nothing was measured: --measure does, on your prompts."]
    best = advice.ranked[:1]
    training = [choice.method.training for choice in best if choice.method.training]
    lines.append("")
    if training:
        lines += [
            "# To train first (docs/training.md):",
            f"# python -m workers.training data --target {target} --out text.npz",
            *(f"# python -m workers.training {command}" for command in training),
        ]
    # Lookup beside a model costs next to nothing, and "auto" takes whichever pays, or both.
    modelled = any(choice.method.name not in _WITHOUT_MODEL for choice in best)
    beside = [choice for choice in advice.ranked if modelled and choice.method.name == "lookup"]
    return "\n".join([*lines, drafts(choice.config for choice in (*best, *beside))])


def measured(
    rows: Sequence[Row],
    settings: Mapping[str, Setting],
    configs: Sequence[DrafterConfig],
    advice: Advice,
    placement: Placement,
) -> str:
    """The same of what was measured: a comparison's rows of all questions, and what could not be compared."""
    by_speed = sorted(rows, key=lambda row: -row.speed_up.median)
    lines = [f"measured beside the target, on {rows[0].questions} prompts:"]
    for place, row in enumerate(by_speed, 1):
        speed = row.speed_up
        told = f"{speed.median:.2f} times plain decoding ({speed.low:.2f} – {speed.high:.2f})"
        if row.setting == PLAIN:
            told = "no drafts"
        elif speed.low <= 1 <= speed.high:
            told += ", which may be no difference"
        if row.equal < row.questions:
            told += f"; only {row.equal} of {row.questions} answers are plain decoding's"
        lines.append(f"{place:2}. {row.setting}: {told}")
    unmeasured = [choice.method for choice in advice.ranked if choice.method.training]
    if unmeasured:
        lines += ["", "guidance only, because it has to be trained first:"]
        lines += [f"  - {method.name}: {method.why}" for method in unmeasured]
    by_name = {config.name: config for config in configs}
    names = settings[by_speed[0].setting].drafters
    beside = {"placement": "target"} if placement == "target" else {}
    return "\n".join([*lines, "", drafts({**said(by_name[name]), **beside} for name in names)])


def drafts(configs: Iterable[Mapping[str, Any]]) -> str:
    """Lines of a server's config, a drafter each."""
    lines = [
        yaml.safe_dump(dict(config), default_flow_style=True, sort_keys=False, width=10**6).strip()
        for config in configs
    ]
    return "\n".join(["drafts:", *(f"  - {line}" for line in lines)]) if lines else "drafts: []"


def size(count: int) -> str:
    """Bytes in a unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def _config(method: Method, tokens: int, placement: Placement) -> dict[str, Any]:
    made = {"name": method.name, "kind": method.kind, **method.options}
    if "num_slots" in DEFAULTS[method.kind] and tokens < MOST_TOKENS:
        made["num_slots"] = tokens
    return {**made, "placement": placement} if placement == "target" else made


def _memory(choice: Choice) -> str:
    weights, per_token = choice.method.memory.weights, choice.method.memory.per_token
    parts = [f"{size(weights)} of weights"] if weights else []
    if per_token:
        parts.append(f"{size(choice.tokens * per_token)} for {choice.tokens:,} tokens of answers")
    return " and ".join(parts) or "next to no memory"


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
