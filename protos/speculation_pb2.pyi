from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verification(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COUPLED: _ClassVar[Verification]
    REJECTION: _ClassVar[Verification]
    BLOCK: _ClassVar[Verification]
    TYPICAL: _ClassVar[Verification]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    SEQUENTIAL: _ClassVar[Mode]
    PIPELINED: _ClassVar[Mode]
    MULTIBRANCH: _ClassVar[Mode]
COUPLED: Verification
REJECTION: Verification
BLOCK: Verification
TYPICAL: Verification
MODE_UNSPECIFIED: Mode
SEQUENTIAL: Mode
PIPELINED: Mode
MULTIBRANCH: Mode

class ToTarget(_message.Message):
    __slots__ = ("hello", "messages")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    messages: _containers.RepeatedCompositeFieldContainer[ToTargetMessage]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ToTargetMessage, _Mapping]]] = ...) -> None: ...

class ToTargetMessage(_message.Message):
    __slots__ = ("session", "open", "propose", "close", "features_wanted", "asked")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_WANTED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    session: int
    open: OpenTarget
    propose: Propose
    close: Close
    features_wanted: FeaturesWanted
    asked: Asked
    def __init__(self, session: _Optional[int] = ..., open: _Optional[_Union[OpenTarget, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., features_wanted: _Optional[_Union[FeaturesWanted, _Mapping]] = ..., asked: _Optional[_Union[Asked, _Mapping]] = ...) -> None: ...

class FromTarget(_message.Message):
    __slots__ = ("info", "messages")
    INFO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    messages: _containers.RepeatedCompositeFieldContainer[FromTargetMessage]
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[FromTargetMessage, _Mapping]]] = ...) -> None: ...

class FromTargetMessage(_message.Message):
    __slots__ = ("session", "committed", "prompt_logprobs", "features", "proposal", "finished", "failed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    session: int
    committed: Committed
    prompt_logprobs: PromptLogprobs
    features: Features
    proposal: Proposal
    finished: Finished
    failed: Failed
    def __init__(self, session: _Optional[int] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class ToDraft(_message.Message):
    __slots__ = ("hello", "messages")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    messages: _containers.RepeatedCompositeFieldContainer[ToDraftMessage]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ToDraftMessage, _Mapping]]] = ...) -> None: ...

class ToDraftMessage(_message.Message):
    __slots__ = ("session", "open", "commit", "close", "features")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    session: int
    open: OpenDraft
    commit: Commit
    close: Close
    features: Features
    def __init__(self, session: _Optional[int] = ..., open: _Optional[_Union[OpenDraft, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class FromDraft(_message.Message):
    __slots__ = ("info", "messages")
    INFO_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    messages: _containers.RepeatedCompositeFieldContainer[FromDraftMessage]
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[FromDraftMessage, _Mapping]]] = ...) -> None: ...

class FromDraftMessage(_message.Message):
    __slots__ = ("session", "proposal", "failed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    session: int
    proposal: Proposal
    failed: Failed
    def __init__(self, session: _Optional[int] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "peer_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., peer_id: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "process_id", "host", "model_id", "weights_fingerprint", "vocabulary_fingerprint", "vocab_size", "max_model_len", "max_sessions", "max_tree_nodes", "dtype", "row_invariant", "drafters", "feature_width", "obeys_priority")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    OBEYS_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    process_id: int
    host: str
    model_id: str
    weights_fingerprint: str
    vocabulary_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_sessions: int
    max_tree_nodes: int
    dtype: str
    row_invariant: bool
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterInfo]
    feature_width: int
    obeys_priority: bool
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., process_id: _Optional[int] = ..., host: _Optional[str] = ..., model_id: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_tree_nodes: _Optional[int] = ..., dtype: _Optional[str] = ..., row_invariant: _Optional[bool] = ..., drafters: _Optional[_Iterable[_Union[DrafterInfo, _Mapping]]] = ..., feature_width: _Optional[int] = ..., obeys_priority: _Optional[bool] = ...) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("name", "kind", "feature_width", "vocabulary_fingerprint", "feature_window")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    feature_width: int
    vocabulary_fingerprint: str
    feature_window: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., feature_width: _Optional[int] = ..., vocabulary_fingerprint: _Optional[str] = ..., feature_window: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tokenizer(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens", "sampling_defaults", "tool_call_parser")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SamplingDefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    sampling_defaults: _containers.ScalarMap[str, float]
    tool_call_parser: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., sampling_defaults: _Optional[_Mapping[str, float]] = ..., tool_call_parser: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("running_sessions", "waiting_sessions", "leases", "kv_slots", "kv_free_slots", "preemptions", "resumed", "steps", "rows", "shared_steps", "proposals_used", "proposals_rebased", "proposals_dropped", "tokens_committed", "tokens_drafted", "tokens_accepted", "nodes_priced_out", "waits", "wait_ns", "step_ns", "price", "rate", "waits_in_vain", "drift", "proposals", "hits", "proposals_again", "draft_ns", "growth_ns", "online_updates", "online_reverts", "online_compared", "online_right", "online_right_before", "prefix_queries", "prefix_hits")
    RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_USED_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_REBASED_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NODES_PRICED_OUT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_VAIN_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_NS_FIELD_NUMBER: _ClassVar[int]
    ONLINE_UPDATES_FIELD_NUMBER: _ClassVar[int]
    ONLINE_REVERTS_FIELD_NUMBER: _ClassVar[int]
    ONLINE_COMPARED_FIELD_NUMBER: _ClassVar[int]
    ONLINE_RIGHT_FIELD_NUMBER: _ClassVar[int]
    ONLINE_RIGHT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    running_sessions: int
    waiting_sessions: int
    leases: int
    kv_slots: int
    kv_free_slots: int
    preemptions: int
    resumed: int
    steps: int
    rows: int
    shared_steps: int
    proposals_used: int
    proposals_rebased: int
    proposals_dropped: int
    tokens_committed: int
    tokens_drafted: int
    tokens_accepted: int
    nodes_priced_out: int
    waits: int
    wait_ns: int
    step_ns: int
    price: float
    rate: float
    waits_in_vain: int
    drift: float
    proposals: int
    hits: int
    proposals_again: int
    draft_ns: int
    growth_ns: int
    online_updates: int
    online_reverts: int
    online_compared: int
    online_right: int
    online_right_before: int
    prefix_queries: int
    prefix_hits: int
    def __init__(self, running_sessions: _Optional[int] = ..., waiting_sessions: _Optional[int] = ..., leases: _Optional[int] = ..., kv_slots: _Optional[int] = ..., kv_free_slots: _Optional[int] = ..., preemptions: _Optional[int] = ..., resumed: _Optional[int] = ..., steps: _Optional[int] = ..., rows: _Optional[int] = ..., shared_steps: _Optional[int] = ..., proposals_used: _Optional[int] = ..., proposals_rebased: _Optional[int] = ..., proposals_dropped: _Optional[int] = ..., tokens_committed: _Optional[int] = ..., tokens_drafted: _Optional[int] = ..., tokens_accepted: _Optional[int] = ..., nodes_priced_out: _Optional[int] = ..., waits: _Optional[int] = ..., wait_ns: _Optional[int] = ..., step_ns: _Optional[int] = ..., price: _Optional[float] = ..., rate: _Optional[float] = ..., waits_in_vain: _Optional[int] = ..., drift: _Optional[float] = ..., proposals: _Optional[int] = ..., hits: _Optional[int] = ..., proposals_again: _Optional[int] = ..., draft_ns: _Optional[int] = ..., growth_ns: _Optional[int] = ..., online_updates: _Optional[int] = ..., online_reverts: _Optional[int] = ..., online_compared: _Optional[int] = ..., online_right: _Optional[int] = ..., online_right_before: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ...) -> None: ...

class Tree(_message.Message):
    __slots__ = ("tokens", "parents", "scores", "laws")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LAWS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    laws: _containers.RepeatedCompositeFieldContainer[SparseLaw]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., laws: _Optional[_Iterable[_Union[SparseLaw, _Mapping]]] = ...) -> None: ...

class SparseLaw(_message.Message):
    __slots__ = ("node", "token_ids", "probabilities")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    node: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, node: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "bias_values")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "strings", "token_ids", "min_tokens", "ignore_eos", "include_stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    include_stop: bool
    def __init__(self, max_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("first_position", "rows", "width", "dtype", "data")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    rows: int
    width: int
    dtype: str
    data: bytes
    def __init__(self, first_position: _Optional[int] = ..., rows: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class OpenTarget(_message.Message):
    __slots__ = ("lease_id", "tokens", "prompt_len", "sampling", "stopping", "logprobs", "key_id", "patience_ms", "show_special_tokens", "prompt_logprobs", "priority", "drafters", "max_nodes", "chain", "mode", "insists", "verification", "traceparent", "prediction", "max_predicted", "grammar", "show_drafts")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    INSISTS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    MAX_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SHOW_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    sampling: Sampling
    stopping: Stopping
    logprobs: int
    key_id: str
    patience_ms: float
    show_special_tokens: bool
    prompt_logprobs: int
    priority: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_nodes: int
    chain: bool
    mode: Mode
    insists: bool
    verification: Verification
    traceparent: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    max_predicted: int
    grammar: str
    show_drafts: bool
    def __init__(self, lease_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., logprobs: _Optional[int] = ..., key_id: _Optional[str] = ..., patience_ms: _Optional[float] = ..., show_special_tokens: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., max_nodes: _Optional[int] = ..., chain: _Optional[bool] = ..., mode: _Optional[_Union[Mode, str]] = ..., insists: _Optional[bool] = ..., verification: _Optional[_Union[Verification, str]] = ..., traceparent: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., max_predicted: _Optional[int] = ..., grammar: _Optional[str] = ..., show_drafts: _Optional[bool] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("base_len", "tree", "drafter")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    tree: Tree
    drafter: str
    def __init__(self, base_len: _Optional[int] = ..., tree: _Optional[_Union[Tree, _Mapping]] = ..., drafter: _Optional[str] = ...) -> None: ...

class FeaturesWanted(_message.Message):
    __slots__ = ("first_position",)
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    def __init__(self, first_position: _Optional[int] = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("beside", "elsewhere")
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    beside: _containers.RepeatedScalarFieldContainer[str]
    elsewhere: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, beside: _Optional[_Iterable[str]] = ..., elsewhere: _Optional[_Iterable[str]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Committed(_message.Message):
    __slots__ = ("base_len", "tokens", "accepted", "drafted", "tested", "logprobs", "text", "price", "timings", "features", "pace", "resting", "draft")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    drafted: int
    tested: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    text: str
    price: float
    timings: TargetTimings
    features: Features
    pace: float
    resting: bool
    draft: Draft
    def __init__(self, base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., drafted: _Optional[int] = ..., tested: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., text: _Optional[str] = ..., price: _Optional[float] = ..., timings: _Optional[_Union[TargetTimings, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., pace: _Optional[float] = ..., resting: _Optional[bool] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("tree", "sources", "accepted")
    TREE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    tree: Tree
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tree: _Optional[_Union[Tree, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("drafter", "nodes")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TargetTimings(_message.Message):
    __slots__ = ("wait_ns", "step_ns", "step_rows")
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    wait_ns: int
    step_ns: int
    step_rows: int
    def __init__(self, wait_ns: _Optional[int] = ..., step_ns: _Optional[int] = ..., step_rows: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token", "length")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finished.Reason]
        STOP: _ClassVar[Finished.Reason]
        LENGTH: _ClassVar[Finished.Reason]
    REASON_UNSPECIFIED: Finished.Reason
    STOP: Finished.Reason
    LENGTH: Finished.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    reason: Finished.Reason
    stop_string: str
    stop_token: int
    length: int
    def __init__(self, reason: _Optional[_Union[Finished.Reason, str]] = ..., stop_string: _Optional[str] = ..., stop_token: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "drafter")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    drafter: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., drafter: _Optional[str] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("lease_id", "tokens", "sampling", "drafters", "max_nodes", "chain", "max_len", "mode", "drawn", "traceparent", "key_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_nodes: int
    chain: bool
    max_len: int
    mode: Mode
    drawn: bool
    traceparent: str
    key_id: str
    def __init__(self, lease_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., drafters: _Optional[_Iterable[str]] = ..., max_nodes: _Optional[int] = ..., chain: _Optional[bool] = ..., max_len: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., drawn: _Optional[bool] = ..., traceparent: _Optional[str] = ..., key_id: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("base_len", "tokens", "price", "pace", "features", "asked", "quiet")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    price: float
    pace: float
    features: _containers.RepeatedCompositeFieldContainer[Features]
    asked: _containers.RepeatedScalarFieldContainer[str]
    quiet: bool
    def __init__(self, base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., price: _Optional[float] = ..., pace: _Optional[float] = ..., features: _Optional[_Iterable[_Union[Features, _Mapping]]] = ..., asked: _Optional[_Iterable[str]] = ..., quiet: _Optional[bool] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("base_len", "tree", "drafter", "hit", "timings", "again")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    tree: Tree
    drafter: str
    hit: bool
    timings: DraftTimings
    again: bool
    def __init__(self, base_len: _Optional[int] = ..., tree: _Optional[_Union[Tree, _Mapping]] = ..., drafter: _Optional[str] = ..., hit: _Optional[bool] = ..., timings: _Optional[_Union[DraftTimings, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class DraftTimings(_message.Message):
    __slots__ = ("wait_ns", "draft_ns")
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    wait_ns: int
    draft_ns: int
    def __init__(self, wait_ns: _Optional[int] = ..., draft_ns: _Optional[int] = ...) -> None: ...
