"""What `deployments.yaml` says under `applications[].args` and `deployments[].user_config`."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers import limits
from workers.grammar import GRAMMAR
from workers.prediction import PREDICTION
from workers.request import DEFAULT_MODE, Mode
from workers.rpc.security import LOOPBACK


class Strict(BaseModel):
    """Unknown keys are an error: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetArgs(Strict):
    """The model that answers. Names and meanings are vLLM's where it has them."""

    model: str = Field(
        description="package://module/file.gguf, a local path, or a hub id such as org/name",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks that each hold a part of the model, on a device of their own of one machine",
    )
    max_model_len: int = Field(0, ge=0, description="0 takes the model's own")
    max_num_seqs: int = Field(256, ge=1, description="answers that run at once on one replica")
    max_num_batched_tokens: int = Field(2048, ge=16, description="rows of one step at most")
    enable_prefix_caching: bool = Field(True, description="reuse what equal prompts computed")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="who of those that wait is next; priority obeys the requests' priority"
    )
    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_TREE_NODES,
        description="drafted rows of one answer in one step; left out: 8 on CPU, 32 on GPU",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="fraction of the free memory that the KV cache may take"
    )
    num_gpu_blocks_override: int = Field(
        0, ge=0, description="size of the KV cache in blocks of 16 tokens; 0 sizes it by memory"
    )
    num_threads: int = Field(
        0,
        ge=0,
        description="torch's threads on CPU; 0 leaves the default, which Ray sets to num_cpus",
    )
    chat_template: str | None = Field(
        None, min_length=1, description="file of a Jinja template; left out: the model's own"
    )
    tool_call_parser: Literal["hermes"] | None = Field(
        None,
        description="how the template has the model write calls of tools; left out: there are no tools",
    )

    @property
    def drafted_rows(self) -> int:
        """`max_draft_tokens`, or the default of the device."""
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        return 8 if self.device == "cpu" else 32


class Named(Strict):
    """What every drafter has."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="what requests call it")
    placement: Literal["draft", "target"] = Field(
        "draft", description="on the draft workers, or beside the target, taking turns with it"
    )


class LookupArgs(Named):
    """Prompt lookup: needs no model."""

    kind: Literal["lookup"]


class LearningArgs(Named):
    """What drafters have that can learn from the answers that are served."""

    learn: bool = Field(
        False,
        description="draft from earlier answers, too: those to the same API key; without keys, all of them",
    )
    history_tokens: int = Field(
        131072, ge=1024, description="tokens of answers that are kept at most, of all keys together"
    )


class SuffixArgs(LearningArgs):
    """Suffix decoding: what most often followed in prompt and answer; needs no model."""

    kind: Literal["suffix"]


class DatastoreArgs(LearningArgs):
    """Retrieval from a datastore that `python -m workers.datastore build` has made."""

    kind: Literal["datastore"]
    folder: str = Field(min_length=1, description="of the datastore, on every draft worker")


class CacheArgs(Named):
    """What drafters with a cache have."""

    num_slots: int = Field(65536, ge=1024, description="tokens that its cache holds")


class TreeArgs(CacheArgs):
    """How the trees of a drafter that runs layers grow."""

    width: int = Field(4, ge=1, le=64, description="nodes of an answer that are expanded at once")
    steps: int = Field(4, ge=0, le=32, description="passes of the draft for one proposal")
    floor: float = Field(0.05, ge=0, le=1, description="likelihood below which a node stays a leaf")


class LoadedArgs(Named):
    """What drafters with a model have."""

    model: str = Field(
        min_length=1, description="a model reference, or a folder of trained weights"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    num_threads: int = Field(
        0, ge=0, description="as the target's, whose threads it shares where it is beside it"
    )

    @model_validator(mode="after")
    def _threads_are_its_own(self) -> Self:
        if self.num_threads and self.placement == "target":
            raise ValueError(
                f"drafts: {self.name} takes turns with the target, on its threads: set the target's "
                f"num_threads, and leave out num_threads {self.num_threads} here"
            )
        return self


class GrowingArgs(LoadedArgs, TreeArgs):
    """What drafters with a model of their own have whose trees grow pass by pass."""


class ModelArgs(GrowingArgs):
    """A draft model with a cache of its own: a model, or one that `distill` has cut from the target."""

    kind: Literal["model"]
    vocabulary: Literal["same", "shared"] = Field(
        "same", description="shared: the draft has another tokenizer; what both have is drafted"
    )
    online: bool = Field(
        False,
        description="learn from all answers that it hears of, in a process beside the draft worker",
    )

    @model_validator(mode="after")
    def _can_learn(self) -> Self:
        if self.online and self.placement == "target":
            raise ValueError(
                f"drafts: {self.name} learns beside a draft worker, not beside a target: leave out "
                "online, or placement: target"
            )
        if self.online and self.vocabulary == "shared":
            raise ValueError(
                f"drafts: {self.name} cannot learn from tokens of another tokenizer: leave out online, or "
                "vocabulary: shared"
            )
        return self


class EagleArgs(GrowingArgs):
    """An EAGLE head on the target's features: one that `eagle` has trained, or a published one."""

    kind: Literal["eagle"]
    window: int = Field(512, ge=16, description="positions back that it attends to")


class MedusaArgs(LoadedArgs):
    """Medusa heads on the target's last state: those that `medusa` has trained, or published ones."""

    kind: Literal["medusa"]


class MaskArgs(LoadedArgs, CacheArgs):
    """Layers of the target and masks, which guess several tokens in one pass: as `mask` trains them."""

    kind: Literal["mask"]


class CustomArgs(Named):
    """A drafter of your own package, which is installed where the worker runs (docs/custom-drafter.md)."""

    kind: Literal["custom"]
    factory: str = Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="package.module:function, called with the target's reference and the options",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory"
    )


class LayerSkipArgs(TreeArgs):
    """The target itself without some of its layers: Self-Speculative Decoding, and SWIFT with `online`."""

    kind: Literal["layer_skip"]
    placement: Literal["target"] = Field(
        "target", description="beside the target, whose layers it runs"
    )
    skip: tuple[Annotated[int, Field(ge=0)], ...] | str | None = Field(
        None,
        description="the layers to leave out, from 0, or a file of `python -m workers.training skip_search`; "
        "left out: every second inner layer",
    )
    online: bool = Field(
        False, description="try other layers on answers that end, and take what guesses better"
    )


class EarlyExitArgs(TreeArgs):
    """The first layers of the target, and its head or a trained adapter behind them (Kangaroo)."""

    kind: Literal["early_exit"]
    placement: Literal["target"] = Field(
        "target", description="beside the target, whose layers it runs"
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="folder of an adapter that `python -m workers.training early_exit` has trained",
    )
    layers: int | None = Field(
        None, ge=1, description="how many layers run where there is no adapter, which knows itself"
    )

    @model_validator(mode="after")
    def _exits_somewhere(self) -> Self:
        if (self.model is None) == (self.layers is None):
            raise ValueError(
                f"drafts: {self.name} needs either model, a trained adapter, or layers, behind which the "
                "target's own norm and head stand"
            )
        return self


class JacobiArgs(Named):
    """Parallel decoding: the passes of the target itself refine a block of guesses."""

    kind: Literal["jacobi"]
    placement: Literal["target"] = Field(
        "target", description="beside the target, whose rows it reads"
    )
    block: int = Field(8, ge=1, le=64, description="guesses of an answer that are kept ahead")


class LookaheadArgs(Named):
    """Lookahead decoding: n-grams that the target's own passes make beside the answer, and verify."""

    kind: Literal["lookahead"]
    placement: Literal["target"] = Field(
        "target", description="beside the target, whose rows it reads"
    )
    window: int = Field(4, ge=1, le=32, description="columns of the window")
    ngram: int = Field(
        3, ge=2, le=8, description="tokens of an n-gram; the window has one level less"
    )
    guesses: int = Field(4, ge=1, le=32, description="n-grams that are verified at once")


DrafterArgs = Annotated[
    LookupArgs
    | SuffixArgs
    | DatastoreArgs
    | ModelArgs
    | EagleArgs
    | LayerSkipArgs
    | EarlyExitArgs
    | JacobiArgs
    | LookaheadArgs
    | MedusaArgs
    | MaskArgs
    | CustomArgs,
    Field(discriminator="kind"),
]


class DataPlaneArgs(Strict):
    """The ports between our processes: who may reach them, and how."""

    host: str = Field(
        LOOPBACK,
        description="address that workers listen on; node: the address of their node. Anything but loopback "
        "needs token_file or tls_folder",
    )
    token_file: str | None = Field(None, description="file with a token that all processes share")
    tls_folder: str | None = Field(
        None, description="folder with tls.crt, tls.key and ca.crt: both sides show certificates"
    )
    tls_name: str = Field("slipstream", description="the name that certificates are made out to")

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.host not in (LOOPBACK, "::1", "localhost") and not (
            self.token_file or self.tls_folder
        ):
            raise ValueError(
                f"data_plane: on {self.host}, others than this machine can reach the workers: set token_file "
                "or tls_folder"
            )
        return self


class Application(Strict):
    """What every application has."""

    data_plane: DataPlaneArgs = DataPlaneArgs()


class AppConfig(Application):
    """One served model and its drafters, in one application.

    Ray puts a hash of these into every deployment's version: a change restarts them. What may change
    while they run belongs to `user_config`.
    """

    model_id: str = Field(min_length=1, description="the name that clients use")
    target: TargetArgs
    drafts: tuple[DrafterArgs, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _check_names([draft.name for draft in self.drafts])
        return self

    @model_validator(mode="after")
    def _layers_are_whole(self) -> Self:
        ranks = self.target.tensor_parallel_size
        for draft in self.drafts:
            if isinstance(draft, LayerSkipArgs | EarlyExitArgs) and ranks > 1:
                raise ValueError(
                    f"drafts: {draft.name} drafts with the target's own layers, which a tensor_parallel_size "
                    f"of {ranks} splits: leave it out, or take a drafter with a model of its own"
                )
        return self


class TargetAppConfig(AppConfig):
    """Targets as an application of their own, with the drafters beside them."""

    @model_validator(mode="after")
    def _drafters_are_beside(self) -> Self:
        for draft in self.drafts:
            if draft.placement != "target":
                raise ValueError(
                    f"drafts: {draft.name} has placement {draft.placement}: draft workers are an "
                    "application of their own (deployments.app:draft)"
                )
        return self


class DraftAppConfig(Application):
    """Draft workers as an application of their own."""

    target: str = Field(
        min_length=1,
        description="the model that they draft for, a reference as the target's `model`",
    )
    drafts: tuple[DrafterArgs, ...] = Field(min_length=1)
    max_sessions: int = Field(64, ge=1, description="answers that a worker drafts for at once")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _check_names([draft.name for draft in self.drafts])
        for draft in self.drafts:
            if draft.placement != "draft":
                raise ValueError(
                    f"drafts: {draft.name} has placement target: it belongs to the target's application"
                )
        return self


class DraftPoolArgs(Strict):
    """An application of draft workers, as a front uses it."""

    app: str = Field(min_length=1, description="name of the application")
    drafters: tuple[str, ...] = Field(min_length=1, description="those of its drafters to use")


class ServedModelArgs(Strict):
    """A model of a front."""

    model_id: str = Field(min_length=1, description="the name that clients use")
    target: str = Field(min_length=1, description="name of its targets' application")
    drafts: tuple[DraftPoolArgs, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _check_names([name for pool in self.drafts for name in pool.drafters])
        return self


class FrontConfig(Application):
    """A front before applications of targets and draft workers: one model or several."""

    models: tuple[ServedModelArgs, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        ids = [model.model_id for model in self.models]
        if len(set(ids)) < len(ids):
            raise ValueError(f"models: model_id must differ, got {', '.join(ids)}")
        return self


_TAKEN: Final = {
    "auto": "it leaves the choice to the server",
    PREDICTION: "it drafts from the prediction of a request",
    GRAMMAR: "statistics call structures so",
}


def _check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"drafts: names must differ, got {', '.join(names)}")
    for name, meaning in _TAKEN.items():
        if name in names:
            raise ValueError(f'drafts: the name "{name}" is taken: {meaning}')


class WorkerThresholds(Strict):
    """`user_config` of Draft, and of Target for the drafters beside it: changed without a restart."""

    weights: dict[str, str] = Field(
        default_factory=dict,
        description="references of weights by drafter, in place of its `model`",
    )


class CoordinatorThresholds(Strict):
    """`user_config` of the Coordinator: changed without a restart."""

    request_limit_s: float = Field(600.0, gt=0, description="seconds until an answer is given up")
    failover_wait_s: float = Field(
        30.0,
        ge=0,
        description="seconds that an answer whose target is lost waits for another with the same weights",
    )
    api_keys_file: str | None = Field(
        None,
        description="file of the keys that callers must have (deployments/keys.py); read at each change "
        "of user_config",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="size of an HTTP body at most")
    allowed_origins: tuple[str, ...] = Field(
        (),
        description='origins whose web pages may call, such as "https://chat.example.org"; "*": all (CORS)',
    )
    mode: Mode = Field(
        DEFAULT_MODE,
        description="what drafters on draft workers do while the target verifies, where a request "
        "does not say",
    )
    max_patience_ms: float = Field(
        50.0, ge=0, description="how long a target may ever wait for a draft worker's proposal"
    )
