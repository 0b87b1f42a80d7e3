"""Draft models that are cut from their target: some of its layers, healed.

A checkpoint holds what training changed and nothing of the target's own: which layers were kept, low-rank
updates of their matrices, their norms, and the draft vocabulary. At load it is applied to the target's
weights, so it is small enough to keep in a repository.

Files of a checkpoint folder: `draft.json` (see `CutConfig`) and `draft.safetensors` with

    vocabulary                      int32 [Vd]   ids of the target that the draft can guess
    <parameter>.down, <parameter>.up             low-rank update: weight + up @ down
    <parameter>                                  replaces the target's
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from workers import checkpoint
from workers.checkpoint import DRAFT_CONFIG, CheckpointError, describe
from workers.engine.loading import load_module, resolve_dtype, wrap
from workers.engine.model import Model
from workers.vocabulary import vocabulary_fingerprint

WEIGHTS_FILE: Final = "draft.safetensors"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class CutConfig:
    """What `draft.json` says: `base` is the target's reference, `layers` are its layers in order."""

    base: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CutModel:
    """A loaded cut draft."""

    model: Model
    ids: torch.Tensor
    vocabulary_fingerprint: str


def is_cut(folder: Path) -> bool:
    """Whether a folder holds a cut draft."""
    return (folder / DRAFT_CONFIG).is_file()


def read_config(folder: Path) -> CutConfig:
    """The config of a cut draft; raises CheckpointError if it is none that can be read."""
    content = describe(folder / DRAFT_CONFIG, FORMAT, "base", "layers")
    return CutConfig(content["base"], tuple(content["layers"]))


def cut_module(base: Any, layers: tuple[int, ...]) -> Any:
    """Reduce one of transformers' models to some of its layers, in place."""
    kept = [base.model.layers[layer] for layer in layers]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    base.model.layers = torch.nn.ModuleList(kept)
    base.config.num_hidden_layers = len(kept)
    types = getattr(base.config, "layer_types", None)
    if types is not None:
        base.config.layer_types = [types[layer] for layer in layers]
    return base


def reduce_head(module: Any, vocabulary: torch.Tensor) -> None:
    """Let a model guess in a part of its vocabulary; what it reads stays whole."""
    head = module.lm_head
    weight = head.weight.detach()[vocabulary.long()].clone()
    reduced = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None)
    reduced.weight = torch.nn.Parameter(weight, requires_grad=False)
    if head.bias is not None:
        reduced.bias = torch.nn.Parameter(head.bias.detach()[vocabulary.long()].clone())
    module.lm_head = reduced.to(weight.dtype)
    module.config.tie_word_embeddings = False


def save_cut(folder: Path, config: CutConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **asdict(config)}
    (folder / DRAFT_CONFIG).write_text(json.dumps(content, indent=1) + "\n")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS_FILE)


def wrap_cut(folder: Path, module: Any, vocabulary: torch.Tensor) -> CutModel:
    """Make what `load_cut_module` has loaded a model of the engine."""
    base_folder = checkpoint.resolve(read_config(folder).base)
    tokenizer = AutoTokenizer.from_pretrained(base_folder).backend_tokenizer
    return CutModel(wrap(module, folder.name), vocabulary.cpu(), vocabulary_fingerprint(tokenizer))


def load_cut_module(folder: Path, dtype: str, device: str) -> tuple[Any, torch.Tensor]:
    """A cut draft as one of transformers' models, and its vocabulary; raises CheckpointError."""
    config = read_config(folder)
    # Updates are applied in float32: rounded once, not twice.
    base = load_module(checkpoint.resolve(config.base), "float32", device)
    module = cut_module(base, config.layers)
    tensors = load_file(folder / WEIGHTS_FILE, device=device)
    vocabulary = tensors.pop("vocabulary")
    reduce_head(module, vocabulary)
    _apply(module, tensors)
    return module.to(resolve_dtype(dtype, torch.device(device))), vocabulary


def _apply(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        target, _, part = name.rpartition(".")
        if part == "down":
            continue
        if part == "up":
            change = tensor.float() @ tensors[f"{target}.down"].float()
            parameters[target].data += change
        elif name in parameters:
            parameters[name].data.copy_(tensor)
        else:
            raise CheckpointError(f"the draft has weights for {name}, which its target has not")
