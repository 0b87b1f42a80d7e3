"""What `deployments.yaml` says under `applications[].args` and `deployments[].user_config`."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers import limits
from workers.request import DEFAULT_MODE, Mode


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


class GrowingArgs(Named):
    """What drafters with a model have: how their trees grow."""

    model: str = Field(
        min_length=1, description="a model reference, or a folder of trained weights"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    width: int = Field(4, ge=1, le=64, description="nodes of an answer that are expanded at once")
    steps: int = Field(4, ge=0, le=32, description="passes of the draft for one proposal")
    floor: float = Field(0.05, ge=0, le=1, description="likelihood below which a node stays a leaf")
    num_slots: int = Field(65536, ge=1024, description="tokens that its cache holds")
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


class ModelArgs(GrowingArgs):
    """A draft model with a cache of its own: a model, or one that `distill` has cut from the target."""

    kind: Literal["model"]
    vocabulary: Literal["same", "shared"] = Field(
        "same", description="shared: the draft has another tokenizer; what both have is drafted"
    )


class EagleArgs(GrowingArgs):
    """An EAGLE head on the target's features: one that `eagle` has trained, or a published one."""

    kind: Literal["eagle"]
    window: int = Field(512, ge=16, description="positions back that it attends to")


DrafterArgs = Annotated[LookupArgs | ModelArgs | EagleArgs, Field(discriminator="kind")]


class AppConfig(Strict):
    """One served model and its drafters.

    Ray puts a hash of these into every deployment's version: a change restarts them. What may change
    while they run belongs to `user_config`.
    """

    model_id: str = Field(min_length=1, description="the name that clients use")
    target: TargetArgs
    drafts: tuple[DrafterArgs, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> "AppConfig":
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError(f"drafts: names must differ, got {', '.join(names)}")
        if "auto" in names:
            raise ValueError('drafts: the name "auto" is taken: it leaves the choice to the server')
        return self


class WorkerThresholds(Strict):
    """`user_config` of Draft, and of Target for the drafters beside it: changed without a restart."""

    weights: dict[str, str] = Field(
        default_factory=dict,
        description="references of weights by drafter, in place of its `model`",
    )


class CoordinatorThresholds(Strict):
    """`user_config` of the Coordinator: changed without a restart."""

    request_limit_s: float = Field(600.0, gt=0, description="seconds until an answer is given up")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="size of an HTTP body at most")
    mode: Mode = Field(
        DEFAULT_MODE,
        description="what drafters on draft workers do while the target verifies, where a request "
        "does not say",
    )
    max_patience_ms: float = Field(
        50.0, ge=0, description="how long a target may ever wait for a draft worker's proposal"
    )
