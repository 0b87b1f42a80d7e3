"""Configuration of a target worker; names and meanings as vLLM's where it has them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One target worker.

    `model` is a reference as in `workers.checkpoint`. `max_model_len` 0 takes the model's own.
    `num_threads` are torch's; 0 leaves torch's default.
    """

    model: str
    model_id: str
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_draft_tokens: int = 8
    gpu_memory_utilization: float = 0.5
    num_threads: int = 0
