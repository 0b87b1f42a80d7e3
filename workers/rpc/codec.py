"""Protobuf frames to our messages and back.

Decoding checks what the wire allows and we do not: sizes, ids, parents, finite numbers. A frame that
breaks a rule raises ProtocolError; nothing of it is used.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from protos import speculation_pb2 as pb
from workers import limits
from workers.request import Mode, SamplingParams, StopRules, Verification
from workers.rpc import messages as m
from workers.rpc.errors import FailedPrecondition, ProtocolError
from workers.tree import ANCHOR, Law, TokenTree

ANY_VOCABULARY: Final = 2**32

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]
Name = TypeVar("Name", bound=str)


class Codec:
    """One direction of one connection.

    `vocab_size` and `max_tree_nodes` are the limits that decoded ids and trees must keep.
    """

    def __init__(
        self,
        frame_type: Any,
        message_type: Any,
        fields: dict[str, type],
        vocab_size: int = ANY_VOCABULARY,
        max_tree_nodes: int = limits.MAX_TREE_NODES,
    ) -> None:
        self._frame_type = frame_type
        self._message_type = message_type
        self._field_of = {message: field for field, message in fields.items()}
        self._fields = fields
        self.vocab_size = vocab_size
        self.max_tree_nodes = max_tree_nodes

    def encode(self, items: Iterable[tuple[int, Any]]) -> Any:
        """One frame of (session, message) pairs."""
        encoded = []
        for session, message in items:
            field = self._field_of[type(message)]
            encoded.append(
                self._message_type(session=session, **{field: _ENCODERS[type(message)](message)})
            )
        return self._frame_type(messages=encoded)

    def decode(self, frame: Any) -> list[tuple[int, Any]]:
        """The (session, message) pairs of a frame; raises ProtocolError."""
        decoded = []
        for item in frame.messages:
            field = item.WhichOneof("body")
            if field is None:
                raise ProtocolError(f"session {item.session}: message without a known body")
            try:
                message = _DECODERS[self._fields[field]](getattr(item, field))
                self._check(message)
            except ValueError as error:
                raise ProtocolError(f"session {item.session}, {field}: {error}") from error
            decoded.append((item.session, message))
        return decoded

    def _check(self, message: Any) -> None:
        match message:
            case m.Propose(tree=tree) | m.Proposal(tree=tree):
                tree.check(self.vocab_size, self.max_tree_nodes)
            case m.OpenTarget(tokens=tokens, prediction=prediction):
                _check_tokens(tokens, self.vocab_size)
                _check_tokens(prediction, self.vocab_size)
            case m.OpenDraft(tokens=tokens):
                _check_tokens(tokens, self.vocab_size)
            case m.Commit(tokens=tokens):
                _check_tokens(tokens, self.vocab_size)
            case m.Committed(tokens=tokens, draft=draft):
                _check_tokens(tokens, self.vocab_size)
                if draft is not None:
                    draft.tree.check(self.vocab_size, self.max_tree_nodes)
                    _check_draft(draft, message)
            case _:
                pass


def to_target_codec(vocab_size: int = ANY_VOCABULARY, max_tree_nodes: int = 0) -> Codec:
    """Coordinator to target."""
    fields = {
        "open": m.OpenTarget,
        "propose": m.Propose,
        "features_wanted": m.FeaturesWanted,
        "asked": m.Asked,
        "close": m.Close,
    }
    return Codec(
        pb.ToTarget,
        pb.ToTargetMessage,
        fields,
        vocab_size,
        max_tree_nodes or limits.MAX_TREE_NODES,
    )


def from_target_codec(vocab_size: int = ANY_VOCABULARY) -> Codec:
    """Target to coordinator."""
    fields = {
        "committed": m.Committed,
        "prompt_logprobs": m.PromptLogprobs,
        "features": m.Features,
        "proposal": m.Proposal,
        "finished": m.Finished,
        "failed": m.Failed,
    }
    return Codec(pb.FromTarget, pb.FromTargetMessage, fields, vocab_size, limits.MAX_TREE_NODES)


def to_draft_codec(vocab_size: int = ANY_VOCABULARY) -> Codec:
    """Coordinator to draft worker."""
    fields = {
        "open": m.OpenDraft,
        "commit": m.Commit,
        "features": m.Features,
        "close": m.Close,
    }
    return Codec(pb.ToDraft, pb.ToDraftMessage, fields, vocab_size)


def from_draft_codec(vocab_size: int = ANY_VOCABULARY, max_tree_nodes: int = 0) -> Codec:
    """Draft worker to coordinator."""
    fields = {"proposal": m.Proposal, "failed": m.Failed}
    return Codec(
        pb.FromDraft,
        pb.FromDraftMessage,
        fields,
        vocab_size,
        max_tree_nodes or limits.MAX_TREE_NODES,
    )


def encode_info(info: m.WorkerInfo) -> pb.WorkerInfo:
    """The worker's side of the handshake."""
    return pb.WorkerInfo(
        protocol_version=limits.PROTOCOL_VERSION,
        worker_id=info.worker_id,
        process_id=info.process_id,
        host=info.host,
        model_id=info.model_id,
        weights_fingerprint=info.weights_fingerprint,
        vocabulary_fingerprint=info.vocabulary_fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_sessions=info.max_sessions,
        max_tree_nodes=info.max_tree_nodes,
        dtype=info.dtype,
        row_invariant=info.row_invariant,
        drafters=[
            pb.DrafterInfo(
                name=d.name,
                kind=d.kind,
                feature_width=d.feature_width,
                vocabulary_fingerprint=d.vocabulary_fingerprint,
                feature_window=d.feature_window,
            )
            for d in info.drafters
        ],
        feature_width=info.feature_width,
        obeys_priority=info.obeys_priority,
    )


def decode_info(info: pb.WorkerInfo) -> m.WorkerInfo:
    """Raises FailedPrecondition if the worker speaks another version of the protocol."""
    check_version(info.protocol_version)
    return m.WorkerInfo(
        worker_id=info.worker_id,
        process_id=info.process_id,
        host=info.host,
        max_sessions=info.max_sessions,
        max_tree_nodes=info.max_tree_nodes,
        model_id=info.model_id,
        weights_fingerprint=info.weights_fingerprint,
        vocabulary_fingerprint=info.vocabulary_fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        row_invariant=info.row_invariant,
        drafters=tuple(
            m.DrafterInfo(
                d.name, d.kind, d.feature_width, d.vocabulary_fingerprint, d.feature_window
            )
            for d in info.drafters
        ),
        feature_width=info.feature_width,
        obeys_priority=info.obeys_priority,
    )


def check_version(version: int) -> None:
    """Raise FailedPrecondition unless the peer speaks our version of the protocol."""
    if version != limits.PROTOCOL_VERSION:
        raise FailedPrecondition(
            f"peer speaks protocol version {version}, this process {limits.PROTOCOL_VERSION}; "
            "run the same release of Slipstream on both"
        )


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if len(tokens) > limits.MAX_SEQUENCE_TOKENS:
        raise ValueError(f"{len(tokens)} tokens; at most {limits.MAX_SEQUENCE_TOKENS}")
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise ValueError(f"token id {largest}; ids are below {vocab_size}")


def _check_draft(draft: m.Draft, committed: m.Committed) -> None:
    tree, path = draft.tree, draft.accepted
    nodes = range(len(tree))
    for drafter, proposed in draft.sources.items():
        if len(proposed) > len(nodes) or not all(node in nodes for node in proposed):
            raise ValueError(f"drafter {drafter!r} has nodes that a tree of {len(nodes)} has not")
    if (len(nodes), len(path)) != (committed.drafted, committed.accepted):
        raise ValueError(
            f"{len(path)} of {len(nodes)} nodes are accepted, but {committed.accepted} of "
            f"{committed.drafted} are said to be"
        )
    held = [(tree.parents[node], tree.tokens[node]) for node in path if node in nodes]
    if held != list(zip((ANCHOR, *path[:-1]), committed.tokens[: len(path)], strict=False)):
        raise ValueError(f"the nodes {path} are no path of the committed tokens")


def _encode_tree(tree: TokenTree) -> pb.Tree:
    # Siblings share a law.
    laws = dict(zip(tree.parents, tree.laws, strict=False))
    return pb.Tree(
        tokens=tree.tokens,
        parents=tree.parents,
        scores=tree.scores,
        laws=[
            pb.SparseLaw(node=node, token_ids=law.ids, probabilities=law.probabilities)
            for node, law in laws.items()
        ],
    )


def _decode_tree(tree: pb.Tree) -> TokenTree:
    laws = {law.node: Law(tuple(law.token_ids), tuple(law.probabilities)) for law in tree.laws}
    if laws and laws.keys() != set(tree.parents):
        raise ValueError(
            f"laws of the nodes {sorted(laws)}, but nodes hang under {set(tree.parents)}"
        )
    return TokenTree(
        tuple(tree.tokens),
        tuple(tree.parents),
        tuple(tree.scores),
        tuple(laws[parent] for parent in tree.parents) if laws else (),
    )


def _encode_sampling(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed & (2**64 - 1),
        choice=sampling.choice,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_ids=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
    )


def _decode_sampling(sampling: pb.Sampling) -> SamplingParams:
    seed = sampling.seed
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed - 2**64 if seed >= 2**63 else seed,
        choice=sampling.choice,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(zip(sampling.bias_ids, sampling.bias_values, strict=True)),
    )


def _encode_open_target(message: m.OpenTarget) -> pb.OpenTarget:
    return pb.OpenTarget(
        lease_id=message.lease_id,
        tokens=message.tokens,
        prompt_len=message.prompt_len,
        sampling=_encode_sampling(message.sampling),
        stopping=pb.Stopping(
            max_tokens=message.stopping.max_tokens,
            strings=message.stopping.strings,
            token_ids=sorted(message.stopping.token_ids),
            min_tokens=message.stopping.min_tokens,
            ignore_eos=message.stopping.ignore_eos,
            include_stop=message.stopping.include_stop,
        ),
        logprobs=message.logprobs,
        key_id=message.key_id,
        patience_ms=message.patience_ms,
        show_special_tokens=message.show_special_tokens,
        prompt_logprobs=message.prompt_logprobs,
        priority=message.priority,
        drafters=message.drafters,
        max_nodes=message.max_nodes,
        chain=message.chain,
        mode=message.mode.upper(),
        insists=message.insists,
        verification=message.verification.upper(),
        traceparent=message.traceparent,
        prediction=message.prediction,
        max_predicted=message.max_predicted,
        grammar=message.grammar,
        show_drafts=message.show_drafts,
    )


def _decode_open_target(message: pb.OpenTarget) -> m.OpenTarget:
    if not 1 <= message.prompt_len <= len(message.tokens):
        raise ValueError(f"prompt_len {message.prompt_len} of {len(message.tokens)} tokens")
    if max(message.logprobs, message.prompt_logprobs) > limits.MAX_TOP_LOGPROBS:
        raise ValueError(f"more than {limits.MAX_TOP_LOGPROBS} log-probabilities per token")
    if len(message.grammar) > limits.MAX_GRAMMAR_CHARS:
        raise ValueError(f"a grammar of {len(message.grammar)} characters")
    return m.OpenTarget(
        lease_id=message.lease_id,
        tokens=tuple(message.tokens),
        prompt_len=message.prompt_len,
        sampling=_decode_sampling(message.sampling),
        stopping=StopRules(
            max_tokens=message.stopping.max_tokens,
            strings=tuple(message.stopping.strings),
            token_ids=frozenset(message.stopping.token_ids),
            min_tokens=message.stopping.min_tokens,
            ignore_eos=message.stopping.ignore_eos,
            include_stop=message.stopping.include_stop,
        ),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        key_id=_decode_key_id(message.key_id),
        patience_ms=_finite(message.patience_ms),
        show_special_tokens=message.show_special_tokens,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority,
        drafters=tuple(message.drafters),
        max_nodes=min(message.max_nodes, limits.MAX_TREE_NODES),
        chain=message.chain,
        mode=_named(message.mode, _MODES, "mode"),
        insists=message.insists,
        verification=_named(message.verification, _VERIFICATIONS, "verification"),
        traceparent=_decode_traceparent(message.traceparent),
        prediction=tuple(message.prediction),
        max_predicted=min(message.max_predicted, limits.MAX_PREDICTED_NODES),
        grammar=message.grammar,
        show_drafts=message.show_drafts,
    )


def _encode_logprobs(entries: Sequence[m.TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=entry.logprob,
            top_ids=[token for token, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
            rank=entry.rank,
        )
        for entry in entries
    ]


def _decode_logprobs(entries: Iterable[pb.TokenLogprobs]) -> tuple[m.TokenLogprobs, ...]:
    return tuple(
        m.TokenLogprobs(
            entry.logprob,
            tuple(zip(entry.top_ids, entry.top_logprobs, strict=True)),
            entry.rank,
        )
        for entry in entries
    )


def _encode_committed(message: m.Committed) -> pb.Committed:
    return pb.Committed(
        base_len=message.base_len,
        tokens=message.tokens,
        accepted=message.accepted,
        drafted=message.drafted,
        tested=message.tested,
        logprobs=_encode_logprobs(message.logprobs),
        text=message.text,
        timings=pb.TargetTimings(
            wait_ns=message.timings.wait_ns,
            step_ns=message.timings.step_ns,
            step_rows=message.timings.step_rows,
        ),
        features=None if message.features is None else _encode_features(message.features),
        price=message.price,
        pace=message.pace,
        resting=message.resting,
        draft=None if message.draft is None else _encode_draft(message.draft),
    )


def _decode_committed(message: pb.Committed) -> m.Committed:
    return m.Committed(
        base_len=message.base_len,
        tokens=tuple(message.tokens),
        accepted=message.accepted,
        drafted=message.drafted,
        tested=message.tested,
        text=message.text,
        logprobs=_decode_logprobs(message.logprobs),
        timings=m.TargetTimings(
            message.timings.wait_ns, message.timings.step_ns, message.timings.step_rows
        ),
        features=_decode_features(message.features) if message.HasField("features") else None,
        price=_finite(message.price),
        pace=_finite(message.pace),
        resting=message.resting,
        draft=_decode_draft(message.draft) if message.HasField("draft") else None,
    )


def _encode_draft(draft: m.Draft) -> pb.Draft:
    return pb.Draft(
        tree=_encode_tree(draft.tree),
        sources=[pb.Source(drafter=name, nodes=nodes) for name, nodes in draft.sources.items()],
        accepted=draft.accepted,
    )


def _decode_draft(draft: pb.Draft) -> m.Draft:
    return m.Draft(
        _decode_tree(draft.tree),
        {source.drafter: tuple(source.nodes) for source in draft.sources},
        tuple(draft.accepted),
    )


def _encode_features(features: m.Features) -> pb.Features:
    return pb.Features(
        first_position=features.first_position,
        rows=features.rows,
        width=features.width,
        dtype=features.dtype,
        data=features.data,
    )


def _decode_features(features: pb.Features) -> m.Features:
    size = _DTYPE_BYTES.get(features.dtype)
    if size is None or features.rows * features.width * size != len(features.data):
        raise ValueError(
            f"features of {features.rows} x {features.width} {features.dtype!r} values in "
            f"{len(features.data)} bytes"
        )
    return m.Features(
        features.first_position, features.rows, features.width, features.dtype, features.data
    )


def _encode_finished(message: m.Finished) -> pb.Finished:
    return pb.Finished(
        reason=message.reason.upper(),
        stop_string=message.stop_string,
        stop_token=message.stop_token,
        length=message.length,
    )


def _decode_finished(message: pb.Finished) -> m.Finished:
    if message.reason == pb.Finished.REASON_UNSPECIFIED:
        raise ValueError("finished without a reason")
    return m.Finished(
        pb.Finished.Reason.Name(message.reason).lower(),
        message.length,
        message.stop_string,
        message.stop_token if message.HasField("stop_token") else None,
    )


def _encode_open_draft(message: m.OpenDraft) -> pb.OpenDraft:
    return pb.OpenDraft(
        lease_id=message.lease_id,
        tokens=message.tokens,
        sampling=_encode_sampling(message.sampling),
        drafters=message.drafters,
        max_nodes=message.max_nodes,
        chain=message.chain,
        max_len=message.max_len,
        mode=message.mode.upper(),
        drawn=message.drawn,
        traceparent=message.traceparent,
        key_id=message.key_id,
    )


def _decode_open_draft(message: pb.OpenDraft) -> m.OpenDraft:
    return m.OpenDraft(
        lease_id=message.lease_id,
        tokens=tuple(message.tokens),
        sampling=_decode_sampling(message.sampling),
        drafters=tuple(message.drafters),
        max_nodes=min(message.max_nodes, limits.MAX_TREE_NODES),
        chain=message.chain,
        max_len=message.max_len,
        mode=_named(message.mode, _MODES, "mode"),
        drawn=message.drawn,
        traceparent=_decode_traceparent(message.traceparent),
        key_id=_decode_key_id(message.key_id),
    )


def _decode_traceparent(text: str) -> str:
    if len(text) > limits.MAX_TRACEPARENT_CHARS:
        raise ValueError(f"a traceparent of {len(text)} characters")
    return text


def _decode_key_id(text: str) -> str:
    if len(text) > limits.MAX_KEY_ID_CHARS:
        raise ValueError(f"a key id of {len(text)} characters")
    return text


def _named(number: int, names: Mapping[int, Name], what: str) -> Name:
    if number not in names:
        raise ValueError(f"{what} {number} is none of {sorted(names)}")
    return names[number]


def _encode_proposal(message: m.Proposal) -> pb.Proposal:
    return pb.Proposal(
        base_len=message.base_len,
        tree=_encode_tree(message.tree),
        drafter=message.drafter,
        hit=message.hit,
        timings=pb.DraftTimings(wait_ns=message.wait_ns, draft_ns=message.draft_ns),
        again=message.again,
    )


def _decode_proposal(message: pb.Proposal) -> m.Proposal:
    return m.Proposal(
        base_len=message.base_len,
        tree=_decode_tree(message.tree),
        drafter=message.drafter,
        hit=message.hit,
        wait_ns=message.timings.wait_ns,
        draft_ns=message.timings.draft_ns,
        again=message.again,
    )


def _finite(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} is not a finite, non-negative number")
    return value


_MODES: Final[dict[int, Mode]] = {
    pb.SEQUENTIAL: "sequential",
    pb.PIPELINED: "pipelined",
    pb.MULTIBRANCH: "multibranch",
}
_VERIFICATIONS: Final[dict[int, Verification]] = {
    pb.COUPLED: "coupled",
    pb.REJECTION: "rejection",
    pb.BLOCK: "block",
    pb.TYPICAL: "typical",
}

_ENCODERS: Final[dict[type, Encoder]] = {
    m.OpenTarget: _encode_open_target,
    m.Propose: lambda x: pb.Propose(
        drafter=x.drafter, base_len=x.base_len, tree=_encode_tree(x.tree)
    ),
    m.Close: lambda x: pb.Close(),
    m.Committed: _encode_committed,
    m.PromptLogprobs: lambda x: pb.PromptLogprobs(
        first_position=x.first_position, logprobs=_encode_logprobs(x.logprobs)
    ),
    m.Finished: _encode_finished,
    m.Failed: lambda x: pb.Failed(code=x.code, message=x.message, drafter=x.drafter),
    m.OpenDraft: _encode_open_draft,
    m.Commit: lambda x: pb.Commit(
        base_len=x.base_len,
        tokens=x.tokens,
        features=map(_encode_features, x.features),
        asked=sorted(x.asked or ()),
        quiet=x.asked is not None and not x.asked,
        price=x.price,
        pace=x.pace,
    ),
    m.Features: _encode_features,
    m.FeaturesWanted: lambda x: pb.FeaturesWanted(first_position=x.first_position),
    m.Asked: lambda x: pb.Asked(beside=sorted(x.beside), elsewhere=sorted(x.elsewhere)),
    m.Proposal: _encode_proposal,
}

_DECODERS: Final[dict[type, Decoder]] = {
    m.OpenTarget: _decode_open_target,
    m.Propose: lambda x: m.Propose(x.drafter, x.base_len, _decode_tree(x.tree)),
    m.Close: lambda x: m.Close(),
    m.Committed: _decode_committed,
    m.PromptLogprobs: lambda x: m.PromptLogprobs(x.first_position, _decode_logprobs(x.logprobs)),
    m.Finished: _decode_finished,
    m.Failed: lambda x: m.Failed(x.code, x.message, x.drafter),
    m.OpenDraft: _decode_open_draft,
    m.Commit: lambda x: m.Commit(
        x.base_len,
        tuple(x.tokens),
        tuple(map(_decode_features, x.features)),
        frozenset(x.asked) if x.asked or x.quiet else None,
        _finite(x.price),
        _finite(x.pace),
    ),
    m.Features: _decode_features,
    m.FeaturesWanted: lambda x: m.FeaturesWanted(
        x.first_position if x.HasField("first_position") else None
    ),
    m.Asked: lambda x: m.Asked(frozenset(x.beside), frozenset(x.elsewhere)),
    m.Proposal: _decode_proposal,
}
