"""EAGLE heads: one decoder layer that continues the target's own hidden states.

A row stands for a token and the state before it: the target's, or for drafted tokens the head's own. The
row's output is the state that is expected at the token, and the head's guesses what follows.

EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858) read the state behind the target's last norm and guess with the
target's head; EAGLE-3 (arXiv 2503.01840) reads the states that enter three layers, has norms and a head of
its own. Legend: T rows, H hidden, F width of the target's features, V draft vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from workers.checkpoint import HEAD_CONFIG, CheckpointError, FeatureKind, describe
from workers.draft.target_weights import embedding_and_head, tensors

WEIGHTS_FILE: Final = "eagle.safetensors"
FORMAT: Final = 1

Version = Literal["eagle", "eagle3"]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head; `target` is the configuration of the model that it belongs to."""

    version: Version
    target: Any
    vocab_size: int
    fc_bias: bool = True

    @property
    def features(self) -> FeatureKind:
        """What it reads of the target."""
        return "last" if self.version == "eagle" else "three"

    @property
    def head_dim(self) -> int:
        """Values of one attention head."""
        config = self.target
        return int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )


class EagleAttention(nn.Module):
    """Attention of the head's layer, over whatever `attend` attends to."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        target, dim = config.target, config.head_dim
        self._heads, self._kv_heads, self._dim = (
            target.num_attention_heads,
            target.num_key_value_heads,
            dim,
        )
        self.q_proj = nn.Linear(width, self._heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self._kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, self._kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self._heads * dim, target.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope: Any, attend: Attend) -> torch.Tensor:
        """Rows [B, T, width] to [B, T, H]; queries, keys and values reach `attend` as [B, heads, T, dim]."""
        shape = (*x.shape[:2], -1, self._dim)
        query = self.q_proj(x).view(shape).transpose(1, 2)
        key = self.k_proj(x).view(shape).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rope)
        attended = attend(query, key, value)  # [B, T, heads, dim]
        out: torch.Tensor = self.o_proj(attended.reshape(*x.shape[:2], -1))
        return out


class EagleLayer(nn.Module):
    """The decoder layer. EAGLE-1's has no norm before its attention; EAGLE-3's reads both its inputs."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.target.hidden_size, config.target.rms_norm_eps
        self._three = config.version == "eagle3"
        self.self_attn = EagleAttention(config, 2 * hidden if self._three else hidden)
        if self._three:
            self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
            self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.mlp = LlamaMLP(config.target)

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, rope: Any, attend: Attend
    ) -> torch.Tensor:
        x = states
        if self._three:
            x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(x, rope, attend)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class EagleHead(nn.Module):
    """A head with the target's embedding; `forward` gives states and guesses."""

    def __init__(
        self, config: HeadConfig, embedding: torch.Tensor, vocabulary: torch.Tensor
    ) -> None:
        super().__init__()
        hidden = config.target.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.register_buffer("vocabulary", vocabulary.to(torch.int32))
        self.rotary_emb = LlamaRotaryEmbedding(config.target)
        self.layer = EagleLayer(config)
        if config.version == "eagle":
            self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        else:
            self.fc = nn.Linear(3 * hidden, hidden, bias=False)
            self.norm = LlamaRMSNorm(hidden, eps=config.target.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def states(self, before: torch.Tensor) -> torch.Tensor:
        """States [..., H] of the target's features [..., F], or of what are states already."""
        if before.shape[-1] == self.config.target.hidden_size:
            return before
        projected: torch.Tensor = self.fc(before)
        return projected

    def forward(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Tokens [B, T] and the states before them [B, T, H] to the states expected at them, [B, T, H]."""
        embedded = self.embed_tokens(tokens).to(states.dtype)
        rope = self.rotary_emb(embedded, positions)
        if self.config.version == "eagle":
            states = self.fc(torch.cat([embedded, states], dim=-1))
        out: torch.Tensor = self.layer(embedded, states, rope, attend)
        return out

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] over the draft vocabulary."""
        if self.config.version == "eagle3":
            states = self.norm(states)
        logits: torch.Tensor = self.lm_head(states)
        return logits


def load_head(folder: Path, target: Path) -> EagleHead:
    """A head in float32, from our own checkpoint or a published one; raises CheckpointError.

    `target` is the folder of the model that it belongs to: embedding and, where the head has none of its
    own, the language-model head come from there.
    """
    weights, version = _read(folder)
    config = AutoConfig.from_pretrained(target).get_text_config()
    embedding, target_head = embedding_and_head(target)
    vocabulary = _vocabulary(weights, config.vocab_size)
    weights.setdefault("lm_head.weight", target_head[vocabulary.long()])
    made = HeadConfig(version, config, len(vocabulary), fc_bias="fc.bias" in weights)
    head = EagleHead(made, embedding, vocabulary).float()
    missing, unexpected = head.load_state_dict(weights, strict=False)
    wanted = [name for name in missing if not name.startswith(("embed_tokens", "vocabulary"))]
    if wanted or unexpected:
        raise CheckpointError(
            f"{folder} is no {version} head for {target.name}: missing {wanted}, unknown {unexpected}"
        )
    return head.eval().requires_grad_(False)


def new_head(version: Version, target: Path, vocabulary: torch.Tensor) -> EagleHead:
    """An untrained head in float32 that begins as the target's last layer; embedding and head are frozen."""
    config = AutoConfig.from_pretrained(target).get_text_config()
    embedding, target_head = embedding_and_head(target)
    head = EagleHead(HeadConfig(version, config, len(vocabulary)), embedding, vocabulary)
    frozen = target_head[vocabulary.long()].to(torch.bfloat16)
    head.lm_head.weight = nn.Parameter(frozen, requires_grad=False)
    _begin_as(head, tensors(target, f"model.layers.{config.num_hidden_layers - 1}."), config)
    if version == "eagle3":
        head.norm.load_state_dict(tensors(target, "model.norm."))
    return head


def save_head(folder: Path, head: EagleHead, target: str) -> None:
    """Write a checkpoint of a head that `new_head` made: bfloat16, without what the target has."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "version": head.config.version, "target": target}
    (folder / HEAD_CONFIG).write_text(json.dumps(content, indent=1) + "\n")
    kept = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
        if not name.startswith(("embed_tokens", "lm_head"))
    }
    save_file({name: t.contiguous().cpu() for name, t in kept.items()}, folder / WEIGHTS_FILE)


def _begin_as(head: EagleHead, layer: dict[str, torch.Tensor], config: Any) -> None:
    """Begin as one of the target's layers, as far as the shapes allow it."""
    hidden = config.hidden_size
    with torch.no_grad():
        nn.init.normal_(head.fc.weight, std=0.01)
        # The deepest state goes through as it is.
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
    if head.config.version == "eagle":
        # States behind the last norm are of another size than those between layers: the layer begins without
        # influence.
        nn.init.zeros_(head.fc.bias)
        nn.init.zeros_(head.layer.self_attn.o_proj.weight)
        nn.init.zeros_(head.layer.mlp.down_proj.weight)
        return
    norm = layer.pop("input_layernorm.weight")
    # The layer reads the token beside the state.
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"]
        layer[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(weight), weight], 1)
    head.layer.load_state_dict(layer | {"hidden_norm.weight": norm, "input_layernorm.weight": norm})


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], Version]:
    """The weights of a checkpoint under our names, and its version."""
    if (folder / HEAD_CONFIG).is_file():
        content = describe(folder / HEAD_CONFIG, FORMAT, "version")
        return load_file(folder / WEIGHTS_FILE), content["version"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no safetensors; convert the checkpoint (pickled weights are not loaded)"
        )
    published: dict[str, torch.Tensor] = {}
    for file in files:
        published |= load_file(file)
    published = {name.removeprefix("model."): tensor for name, tensor in published.items()}
    version: Version = (
        "eagle3" if any(name.startswith("midlayer.") for name in published) else "eagle"
    )
    layer = "midlayer." if version == "eagle3" else "layers.0."
    renamed = {}
    for name, tensor in published.items():
        if name.startswith("embed_tokens") or name in ("t2d",):
            continue
        renamed[name.replace(layer, "layer.", 1) if name.startswith(layer) else name] = (
            tensor.float()
        )
    return renamed, version


def _vocabulary(weights: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    """The target's id of every column of the head; published heads store distances (`d2t`)."""
    if "vocabulary" in weights:
        return weights.pop("vocabulary")
    if "d2t" in weights:
        distances = weights.pop("d2t").long()
        return torch.arange(len(distances)) + distances
    return torch.arange(vocab_size)
