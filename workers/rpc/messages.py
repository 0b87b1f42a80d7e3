"""Our side of the messages in protos/speculation.proto; the fields are explained there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from workers.request import DEFAULT_MODE, Mode, SamplingParams, StopRules, Verification
from workers.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One drafter of a draft worker."""

    name: str
    kind: str
    feature_width: int = 0
    vocabulary_fingerprint: str = ""
    feature_window: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """How a worker introduces itself."""

    worker_id: str
    process_id: int
    host: str
    max_tree_nodes: int
    max_sessions: int = 0
    model_id: str = ""
    weights_fingerprint: str = ""
    vocabulary_fingerprint: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    dtype: str = ""
    row_invariant: bool = False
    drafters: tuple[DrafterInfo, ...] = ()
    feature_width: int = 0
    obeys_priority: bool = False

    @property
    def feature_bytes_per_token(self) -> int:
        """What a committed token costs on the wire where a drafter elsewhere reads features."""
        return self.feature_width * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Starts a session on a target; `drafters` are those beside it that draft for the answer.

    `prediction` is what its caller expects it to be; a step verifies up to `max_predicted` nodes then.
    """

    lease_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParams
    stopping: StopRules
    logprobs: int | None = None
    key_id: str = ""
    patience_ms: float = 0.0
    show_special_tokens: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0
    drafters: tuple[str, ...] = ()
    max_nodes: int = 0
    chain: bool = False
    mode: Mode = DEFAULT_MODE
    insists: bool = False
    verification: Verification = "coupled"
    traceparent: str = ""
    prediction: tuple[int, ...] = ()
    max_predicted: int = 0
    grammar: str = ""
    show_drafts: bool = False


@dataclass(frozen=True, slots=True)
class Propose:
    """A drafter's tree for the target to verify."""

    drafter: str
    base_len: int
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class FeaturesWanted:
    """Asks the target for features from a position on, or with None for no more of them."""

    first_position: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Tells a target who answers commits: those beside it from the next one on, and those elsewhere."""

    beside: frozenset[str]
    elsewhere: frozenset[str]


@dataclass(frozen=True, slots=True)
class Close:
    """Ends a session."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the target, row-major; row k belongs to position first_position + k."""

    first_position: int
    rows: int
    width: int
    dtype: str
    data: bytes

    @property
    def end(self) -> int:
        """The position after the last row's."""
        return self.first_position + self.rows

    def since(self, position: int) -> "Features":
        """Those from a position on, one of these rows' own."""
        skipped = position - self.first_position
        row_bytes = len(self.data) // self.rows
        return replace(
            self,
            first_position=position,
            rows=self.rows - skipped,
            data=self.data[skipped * row_bytes :],
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a part of the prompt."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TargetTimings:
    """Where the time of a step went."""

    wait_ns: int = 0
    step_ns: int = 0
    step_rows: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """The tree that a pass verified: the nodes that each drafter proposed, and those that were accepted."""

    tree: TokenTree
    sources: Mapping[str, tuple[int, ...]]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that became part of the answer."""

    base_len: int
    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    tested: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    timings: TargetTimings = TargetTimings()
    features: Features | None = None
    price: float = 0.0
    pace: float = 0.0
    resting: bool = False
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; `reason` is "stop" or "length", `length` counts prompt and answer."""

    reason: str
    length: int
    stop_string: str = ""
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A session ended with an error, or one of its drafters did; `code` names a gRPC status code."""

    code: str
    message: str
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Starts a session on a draft worker, or beside a target; `prediction` never leaves its process."""

    lease_id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    drafters: tuple[str, ...]
    max_nodes: int
    chain: bool
    max_len: int
    mode: Mode = DEFAULT_MODE
    drawn: bool = False
    traceparent: str = ""
    key_id: str = ""
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """What the rows of a step say, those of rejected nodes, too. Stays in the target's process.

    `tree` hung under `base_len` tokens. `choices[0]` is the target's token behind the last of them, and
    `choices[i + 1]` the one that it would take behind node i, by the noise of its position; None where the
    row holds no usable numbers.
    """

    base_len: int
    tree: TokenTree
    choices: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Tells the drafters what became part of the answer.

    `asked` are those that are to propose, None for all; the others only take note. A node is worth
    verifying if it is likelier than `price`; a second costs the answer `pace` tokens. `verified` is for
    drafters beside the target that read it.
    """

    base_len: int
    tokens: tuple[int, ...]
    features: tuple[Features, ...] = ()
    asked: frozenset[str] | None = None
    price: float = 0.0
    pace: float = 0.0
    verified: Verified | None = None

    def asks(self, drafter: str) -> bool:
        """Whether a drafter is to propose."""
        return self.asked is None or drafter in self.asked

    def followed_by(self, later: "Commit") -> "Commit":
        """Both in one message; the later one must start where this one ends."""
        if later.base_len != self.base_len + len(self.tokens):
            raise ValueError(
                f"commit at {later.base_len} does not follow {len(self.tokens)} tokens "
                f"at {self.base_len}"
            )
        # Features alone ask nobody.
        last = later if later.tokens else self
        return Commit(
            self.base_len,
            self.tokens + later.tokens,
            self.features + later.features,
            last.asked,
            last.price,
            last.pace,
            last.verified,
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree that a drafter proposes; `again` because it has grown since it was proposed first."""

    base_len: int
    tree: TokenTree
    drafter: str
    hit: bool = False
    wait_ns: int = 0
    draft_ns: int = 0
    again: bool = False


ToTargetMessage = OpenTarget | Propose | FeaturesWanted | Asked | Close
FromTargetMessage = Committed | PromptLogprobs | Features | Proposal | Finished | Failed
ToDraftMessage = OpenDraft | Commit | Features | Close
FromDraftMessage = Proposal | Failed
