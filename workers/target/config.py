"""Configuration of a target worker; names and meanings as vLLM's where it has them.

Defaults belong to the edge, where users write (deployments/config.py).
"""

from dataclasses import dataclass
from typing import Literal

from workers.draft.config import DrafterConfig


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One target worker.

    `model` is a reference as in `workers.checkpoint`. `max_model_len` 0 takes the model's own.
    `num_gpu_blocks_override` sets the KV cache's size in blocks of 16 tokens; 0 sizes it by memory.
    `tensor_parallel_size` ranks each hold a part of the model, on a device of their own.
    `num_threads` are torch's; 0 leaves torch's default. `features` are what drafters read, if any does.
    `chat_template` is a file with one in place of the model's own, `tool_call_parser` how it writes calls of
    tools. `drafters` run beside the target, in its process.
    """

    model: str
    model_id: str
    dtype: str
    device: str
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    scheduling_policy: Literal["fcfs", "priority"]
    max_draft_tokens: int
    gpu_memory_utilization: float
    num_gpu_blocks_override: int
    num_threads: int
    features: Literal["last", "three"] | None
    chat_template: str | None
    tool_call_parser: Literal["hermes"] | None
    drafters: tuple[DrafterConfig, ...]
