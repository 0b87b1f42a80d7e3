"""From a model folder to a model that was checked."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from workers.engine import selfcheck, support
from workers.engine.model import Model, ModelInfo
from workers.engine.tensor_parallel import Leader, Ranks, check_divides

logger = logging.getLogger(__name__)

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a config value; "auto" is the fastest half precision that the device has.

    Raises ValueError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    capabilities = torch.backends.cpu.get_cpu_capability()
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    logger.debug("cpu capability %s, fast bfloat16: %s", capabilities, fast)
    return torch.bfloat16 if fast else torch.float32


SAMPLING_DEFAULTS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def load_model(
    folder: Path, dtype: str = "auto", device: str = "cpu", ranks: Ranks | None = None
) -> Model:
    """Load a model folder in Hugging Face's format, safetensors only, and check it.

    With `ranks` every rank loads its part; those that do not lead are to follow then, before anything is
    checked. Raises UnsupportedModel for a model that cannot be served exactly, naming what stands in the way,
    and SelfCheckError if the engine would not compute what transformers does.
    """
    return wrap(load_module(folder, dtype, device, ranks), folder.name, ranks)


def load_module(folder: Path, dtype: str, device: str, ranks: Ranks | None = None) -> Any:
    """Transformers' own model, ready for inference; with `ranks` a rank's part of it."""
    on = torch.device(device)
    split: dict[str, Any] = {}
    if ranks is not None:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        check_divides(config, ranks.place.size)
        split = {"distributed_config": DistributedConfig(tp_size=ranks.place.size)}
    module: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=resolve_dtype(dtype, on), use_safetensors=True, **split
    )
    return module.to(on).eval().requires_grad_(False)


def wrap(module: Any, name: str, ranks: Ranks | None = None) -> Model:
    """Make a model of the engine from one of transformers', and check it; see `load_model`."""
    support.check_config(module)
    info = _describe(module)
    tokens = torch.tensor([selfcheck.sample_tokens(info.vocab_size)], device=module.device)
    with torch.inference_mode():
        stock = module(tokens, use_cache=False).logits[0].float()
    model = Model(module, info, support.examine(module, tokens))
    if ranks is not None:
        if not ranks.leads:
            return model
        model.backend = Leader(model.backend, ranks)
    model.info = replace(info, row_invariant=selfcheck.check_model(model, stock))
    logger.info(
        "loaded %s: %s on %s, attention %s, rows %s",
        name,
        info.dtype,
        module.device,
        model.backend.name,
        "bitwise invariant" if model.info.row_invariant else "equal up to rounding only",
    )
    return model


def _describe(module: Any) -> ModelInfo:
    config = module.config.get_text_config()
    eos: set[int] = set()
    for source in (module.config, module.generation_config):
        ids = getattr(source, "eos_token_id", None)
        eos |= set(ids if isinstance(ids, list) else [ids]) - {None}
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=support.max_positions(config),
        eos_token_ids=frozenset(eos),
        weights_fingerprint=_fingerprint(module),
        dtype=str(module.dtype).removeprefix("torch."),
        sampling_defaults=_sampling_defaults(module.generation_config),
    )


def _sampling_defaults(generation_config: Any) -> dict[str, float]:
    """What the model's makers recommend, of the parameters that requests can leave out."""
    given = generation_config.to_diff_dict()
    return {name: float(given[name]) for name in SAMPLING_DEFAULTS if given.get(name) is not None}


def _fingerprint(module: torch.nn.Module) -> str:
    """A hash over names, types and bytes of all weights: equal means the same tokens."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
