"""What heads take from the model that they belong to: its embedding and its language-model head."""

from pathlib import Path

import torch
from safetensors import safe_open

from workers.checkpoint import CheckpointError


def embedding_and_head(target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and language-model head of a model folder, float32 [V, H]; raises CheckpointError."""
    embedding = tensors(target, "model.embed_tokens.").get("weight")
    if embedding is None:
        raise CheckpointError(f"{target} has no embed_tokens: heads fit Llama-shaped models")
    return embedding, tensors(target, "lm_head.").get("weight", embedding)


def tensors(target: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The float32 tensors of a model folder under a prefix, named without it."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] = content.get_tensor(name).float()
    return found
