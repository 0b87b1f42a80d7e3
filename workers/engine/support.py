"""What the engine can serve exactly, found out by asking the model itself.

A model is run once with an attention function that only looks: which layers call it, with what
shapes and arguments. What cannot be served exactly is refused by name, before anything is served.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AttentionInterface

from workers.engine.kv_cache import KVShape

PROBE: Final = "slipstream-probe"

# Arguments of attention functions that say nothing about what is attended to.
_HARMLESS: Final = {
    "dropout",
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "is_causal",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
_ROPE_BY_CALL: Final = ("dynamic", "yarn_dynamic")
_SERVED_LAYERS: Final = ("full_attention", "sliding_attention")


class UnsupportedModel(ValueError):
    """The engine cannot serve this model exactly; the message names what stands in the way."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call, as the model made it."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    scale: float
    unknown: tuple[str, ...]
    masked: bool


@dataclass(frozen=True, slots=True)
class Examined:
    """What a model asks of attention: what a cache slot holds, and each layer's window (0: none).

    `scale` is what scores are multiplied by, None if layers differ or anything is done to scores besides.
    """

    kv_shape: KVShape
    windows: tuple[int, ...]
    scale: float | None


def examine(module: Any, tokens: torch.Tensor) -> Examined:
    """Run the model once over `tokens` [1, T] and see what it asks of attention.

    Raises UnsupportedModel. `check_config` comes first. Leaves the model with the probe as its attention.
    """
    config = module.config.get_text_config()
    set_attention(module, PROBE)
    calls: list[AttentionCall] = []
    with torch.inference_mode():
        try:
            module(tokens, use_cache=False, attention_calls=calls)
        except TypeError as error:
            raise UnsupportedModel(
                f"{_name(config)} takes no attention arguments: {error}"
            ) from error
    _check_calls(config, calls)
    first = calls[0]
    scales = {call.scale for call in calls}
    plain = len(scales) == 1 and not any(call.softcap for call in calls)
    return Examined(
        KVShape(len(calls), first.kv_heads, first.head_dim, module.dtype, module.device),
        tuple(call.window or 0 for call in sorted(calls, key=lambda call: call.layer)),
        scales.pop() if plain else None,
    )


def max_positions(config: Any) -> int:
    """Tokens of prompt and answer together at most.

    LongRoPE picks its frequencies by the longest sequence of a call, so a neighbour would change a
    row: such a model is served up to the length where it always picks the same ones.
    """
    longest = int(config.max_position_embeddings)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            longest = min(longest, int(original or config.original_max_position_embeddings))
    return longest


def set_attention(module: Any, name: str) -> None:
    """Make the model call the attention function of this name."""
    module.set_attn_implementation(name)


def check_config(module: Any) -> None:
    """Raise UnsupportedModel for what the configuration alone gives away."""
    config = module.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{_name(config)} has an encoder: only decoder-only models are served"
        )
    for rope in _ropes(config):
        if rope.get("rope_type") in _ROPE_BY_CALL:
            raise UnsupportedModel(
                f"{_name(config)} has {rope['rope_type']} RoPE: its frequencies depend on the longest "
                "sequence of a call, so a neighbour would change an answer"
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _SERVED_LAYERS:
            raise UnsupportedModel(f"{_name(config)} has {kind} layers")
    if getattr(config, "alibi", False):
        raise UnsupportedModel(f"{_name(config)} has ALiBi position biases")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedModel(
            f"{_name(config)} with reorder_and_upcast_attn has attention of its own"
        )
    if not getattr(module, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{_name(config)} does not let its attention be replaced (no attention backends)"
        )


def _check_calls(config: Any, calls: list[AttentionCall]) -> None:
    layers = config.num_hidden_layers
    if sorted(call.layer for call in calls) != list(range(layers)):
        raise UnsupportedModel(
            f"{_name(config)} has {layers} layers, but {len(calls)} of them attend (recurrent layers, "
            "or attention of its own)"
        )
    types = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if windowed and types is None and not any(call.window for call in calls):
        types = ["sliding_attention"] * layers
    for call in calls:
        if call.unknown:
            raise UnsupportedModel(
                f"{_name(config)} gives attention the argument {call.unknown[0]} "
                f"(layer {call.layer}), which this engine does not know"
                + (": attention sinks" if "s_aux" in call.unknown else "")
            )
        if call.masked:
            raise UnsupportedModel(f"{_name(config)} masks attention in a way of its own (ALiBi?)")
        if types is not None and (types[call.layer] == "sliding_attention") != bool(call.window):
            raise UnsupportedModel(
                f"{_name(config)} says layer {call.layer} is {types[call.layer]}, but gives attention "
                f"the window {call.window}: its window exists in the mask only"
            )
        if call.value_dim != call.head_dim or (call.kv_heads, call.head_dim) != (
            calls[0].kv_heads,
            calls[0].head_dim,
        ):
            raise UnsupportedModel(
                f"{_name(config)} has keys and values of different shapes (layer {call.layer})"
            )


def _probe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_calls: list[AttentionCall],
    **others: Any,
) -> tuple[torch.Tensor, None]:
    unknown = sorted(
        name for name, given in others.items() if given is not None and name not in _HARMLESS
    )
    attention_calls.append(
        AttentionCall(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            window=sliding_window,
            softcap=softcap,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            unknown=tuple(unknown),
            masked=attention_mask is not None,
        )
    )
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(PROBE, _probe)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a config: one set, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or ([given] if given else [])


def _name(config: Any) -> str:
    return f"a model of type {config.model_type!r}"
