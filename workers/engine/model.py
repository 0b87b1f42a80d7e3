"""A causal language model, run over flat rows."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from workers.engine import attention, linear
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.rows import RowBatch

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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model once it is loaded."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    weights_fingerprint: str
    dtype: str


class Model:
    """A model on one device.

    Made by `load`. `forward` takes the rows of any number of sequences, puts their keys and values into
    their caches, and returns the logits that they want.
    """

    def __init__(self, module: Any, device: torch.device, info: ModelInfo) -> None:
        config = module.config.get_text_config()
        self.info = info
        self.device = device
        self._module = module
        self.kv_shape = KVShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=module.dtype,
            device=device,
        )
        self.backend = attention.choose_backend(self.kv_shape)
        packed = linear.can_pack(module.dtype, device)
        self._min_rows = linear.PACKED_MIN_ROWS if packed else linear.PLAIN_MIN_ROWS
        module.set_attn_implementation(attention.IMPLEMENTATION)
        if packed:
            linear.pack_linears(module)

    @classmethod
    def load(cls, folder: Path, dtype: str = "auto", device: str = "cpu") -> "Model":
        """Load a model folder in Hugging Face's format, safetensors only."""
        on = torch.device(device)
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=resolve_dtype(dtype, on), use_safetensors=True
        )
        module = module.to(on).eval().requires_grad_(False)
        return cls(module, on, _describe(module))

    def pool(self, num_slots: int) -> KVPool:
        """A KV cache of this many slots for this model."""
        return KVPool(self.kv_shape, self.backend, num_slots)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> torch.Tensor:
        """Run a step: logits [wanted rows, vocabulary], float32.

        The caches must have room for the rows; the rows are not committed (see KVSequence.keep).
        """
        # Padding keeps every matrix product at a size from which on a row's bits do not depend on
        # the number of rows. Padding rows belong to no sequence and attend to nothing.
        padding = [0] * max(0, self._min_rows - batch.num_rows)
        tokens = torch.tensor([batch.tokens() + padding], device=self.device)
        positions = torch.tensor([batch.positions() + padding], device=self.device)
        wanted = batch.wanted()
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            "use_cache": False,
            "attention_step": self.backend.step(batch),
        }
        if not wanted:
            self._module.base_model(**arguments)
            return torch.empty(0, self.info.vocab_size)
        rows = wanted + wanted[:1] * max(0, self._min_rows - len(wanted))
        kept = torch.tensor(rows, device=self.device)
        logits = self._module(**arguments, logits_to_keep=kept).logits
        return logits[0, : len(wanted)].float()  # type: ignore[no-any-return]


def _describe(module: Any) -> ModelInfo:
    config = module.config.get_text_config()
    eos: set[int] = set()
    for source in (module.config, module.generation_config):
        ids = getattr(source, "eos_token_id", None)
        eos |= set(ids if isinstance(ids, list) else [ids]) - {None}
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=frozenset(eos),
        weights_fingerprint=_fingerprint(module),
        dtype=str(module.dtype).removeprefix("torch."),
    )


def _fingerprint(module: torch.nn.Module) -> str:
    """A hash over names, types and bytes of all weights: equal means the same tokens."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
