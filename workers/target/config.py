"""Configuration of a target worker; names and meanings as vLLM's where it has them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One target worker.

    `model` is a reference as in `workers.checkpoint`. `max_model_len` 0 takes the model's own.
    `num_gpu_blocks_override` sets the KV cache's size in blocks of 16 tokens; 0 sizes it by memory.
    `num_threads` are torch's; 0 leaves torch's default.
    """

    model: str
    model_id: str
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_draft_tokens: int = 8
    gpu_memory_utilization: float = 0.5
    num_gpu_blocks_override: int = 0
    num_threads: int = 0
