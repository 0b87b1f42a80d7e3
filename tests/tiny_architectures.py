"""A tiny random model of every architecture that is served, and of those that are refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as t

from workers.cache import cache_dir

VOCAB = 160
PROMPT = [5, 17, 99, 3, 42, 17, 8, 120, 77, 5, 17, 64, 31]
LENGTH = 40
WINDOW = 8
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_WIDE = {**_BASE, "head_dim": 24}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1] * 4,
    "long_factor": [2.0, 2.5] * 4,
    "original_max_position_embeddings": 96,
}

SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**_BASE),
    "llama tied": lambda: t.LlamaConfig(**_BASE, tie_word_embeddings=True, attention_bias=True),
    "qwen2": lambda: t.Qwen2Config(**_BASE),
    "qwen2 window": lambda: t.Qwen2Config(
        **_BASE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: t.Qwen3Config(**_WIDE),
    "mistral window": lambda: t.MistralConfig(**_BASE, sliding_window=WINDOW),
    "gemma2": lambda: t.Gemma2Config(
        **_WIDE,
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: t.Gemma3TextConfig(
        **{**_WIDE, "num_hidden_layers": 6},
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
    ),
    "phi3": lambda: t.Phi3Config(**_BASE),
    "phi3 longrope": lambda: t.Phi3Config(
        **_BASE, original_max_position_embeddings=96, rope_parameters=_LONGROPE
    ),
    "olmo2": lambda: t.Olmo2Config(**_BASE),
    "gpt_neox": lambda: t.GPTNeoXConfig(
        **{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}
    ),
    "gpt2": lambda: t.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "smollm3": lambda: t.SmolLM3Config(**_BASE),
    "mixtral": lambda: t.MixtralConfig(**_BASE, num_local_experts=4),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**_WIDE, **_MOE, num_experts=8),
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "window only in the mask": (
        lambda: t.Qwen2MoeConfig(
            **_BASE,
            **_MOE,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            num_experts=4,
            shared_expert_intermediate_size=48,
        ),
        "in the mask only",
    ),
    "attention sinks": (
        lambda: t.GptOssConfig(**_WIDE, num_local_experts=4, sliding_window=WINDOW),
        "attention sinks",
    ),
    "dynamic RoPE": (
        lambda: t.LlamaConfig(
            **_BASE,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        "dynamic RoPE",
    ),
    "recurrent layers": (
        lambda: t.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2),
        "linear_attention",
    ),
    "ALiBi": (
        lambda: t.FalconConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=True,
        ),
        "ALiBi",
    ),
    "attention of its own": (
        lambda: t.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4),
        "attention be replaced",
    ),
    "chunked attention": (
        lambda: t.Llama4TextConfig(
            **_WIDE, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=96
        ),
        "chunked_attention",
    ),
    "an upcast path of its own": (
        lambda: t.GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, reorder_and_upcast_attn=True
        ),
        "reorder_and_upcast_attn",
    ),
}


@cache
def folder(name: str) -> Path:
    """A saved random model; those that are served have greedy answers that wander."""
    config = SERVED[name]() if name in SERVED else REFUSED[name][0]()
    path = cache_dir("tests") / f"architecture-v4-{name.replace(' ', '-')}"
    if not (path / "config.json").exists():
        for seed in range(200):
            model = _random(config, seed)
            if name not in SERVED or _wanders(model):
                break
        else:
            raise RuntimeError(f"no random {name} has answers that wander")
        model.save_pretrained(path)
    return path


def _random(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    scale = (0.1, 0.18, 0.3, 0.5)[seed % 4]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.normal_(0, scale)
    model.generation_config.eos_token_id = None
    return model


def _wanders(model: Any) -> bool:
    answer = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=1
    )
    return len(set(answer[0, len(PROMPT) :].tolist())) >= LENGTH // 2
