"""Adapters behind the first layers of a target: one layer like its last, and a norm.

As in Kangaroo (arXiv 2404.18911) the target's own head guesses behind them. A checkpoint is a folder with
`exit.json` (`format`, `target`, `layers`) and `exit.safetensors` (`layer.*`, `norm.*`, bfloat16).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from workers.checkpoint import EXIT_CONFIG, CheckpointError, describe
from workers.engine import attention, linear
from workers.engine.model import Model, ModuleRunner
from workers.engine.parts import Ending

WEIGHTS_FILE: Final = "exit.safetensors"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """What stands behind the first `layers` of a target."""

    layers: int
    ending: Ending


def save(folder: Path, layers: int, target: str, layer: Any, norm: Any) -> None:
    """Write an adapter's checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "target": target, "layers": layers}
    (folder / EXIT_CONFIG).write_text(json.dumps(content, indent=1) + "\n")
    tensors = {
        f"{part}.{name}": tensor.detach().to(torch.bfloat16).contiguous().cpu()
        for part, module in (("layer", layer), ("norm", norm))
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_FILE)


def load(folder: Path, target: Path, host: Model) -> Adapter:
    """An adapter for a target, in its dtype and on its device; raises CheckpointError.

    `target` is the folder of the model that is loaded as `host`.
    """
    layers = int(describe(folder / EXIT_CONFIG, FORMAT, "layers")["layers"])
    tensors = load_file(folder / WEIGHTS_FILE)
    config = AutoConfig.from_pretrained(target).get_text_config()
    count = config.num_hidden_layers
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[-1:]
    # Only the shapes of one layer are made: its weights are in the checkpoint.
    with torch.device("meta"):
        shell: Any = AutoModelForCausalLM.from_config(config, dtype=host.kv_shape.dtype)
    shell.set_attn_implementation(attention.IMPLEMENTATION)
    layer, norm = shell.base_model.layers[0], shell.base_model.norm
    for part, module in (("layer", layer), ("norm", norm)):
        own = {
            name.removeprefix(f"{part}."): tensor.to(host.device, host.kv_shape.dtype)
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.")
        }
        try:
            module.load_state_dict(own, assign=True)
        except RuntimeError as error:
            raise CheckpointError(f"{folder} is no adapter for {target.name}: {error}") from error
    layer.self_attn.layer_idx = count
    for module in (layer, norm):
        module.eval().requires_grad_(False)
    if isinstance(host.runner, ModuleRunner) and linear.can_pack(host.kv_shape.dtype, host.device):
        linear.pack_linears(layer)
    return Adapter(layers, Ending(layer, norm))
