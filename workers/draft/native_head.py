"""EAGLE heads in bfloat16 on CPU: a whole pass in one call of the native library.

The vocabulary's weights are bytes: they are most of what a pass reads, and a draft may be inexact.
"""

import ctypes

import torch

from workers.draft.eagle import EagleHead
from workers.engine.kv_cache import KVShape
from workers.engine.native.attention import NativeAttention, NativeStep
from workers.engine.native.decoder import Decoder, Layer, Packer
from workers.engine.native.library import library
from workers.engine.native.linear import PackedBytes, PackedWeight
from workers.engine.rows import RowBatch


class _Eagle(ctypes.Structure):
    _fields_ = (
        ("state_norm", ctypes.c_void_p),
        ("project", ctypes.c_void_p),
        ("project_bias", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("head_scales", ctypes.c_void_p),
        ("head_sums", ctypes.c_void_p),
    )


class NativeHead:
    """Runs a head; `window` is how many positions back it attends."""

    def __init__(self, head: EagleHead, shape: KVShape, window: int, scale: float) -> None:
        config = head.config
        target = config.target
        self._library = library()
        self._packer = packer = Packer()
        self._vocab = config.vocab_size
        layers = (Layer * 1)()
        packer.layer(layers[0], head.layer, window)
        packer.keep(layers)
        cosine, sine = packer.rope(head.rotary_emb, target.max_position_embeddings)
        three = config.version == "eagle3"
        self._model = Decoder(
            layers=1,
            hidden=target.hidden_size,
            intermediate=target.intermediate_size,
            heads=target.num_attention_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab=self._vocab,
            eps=target.rms_norm_eps,
            scale=scale,
            embedding=packer.address(head.embed_tokens.weight),
            cosine=cosine,
            sine=sine,
            norm=packer.address(head.norm.weight) if three else None,
            weights=ctypes.addressof(layers),
        )
        vocabulary = packer.keep(PackedBytes(head.lm_head.weight))
        self._head = _Eagle(
            head=vocabulary.data, head_scales=vocabulary.scales, head_sums=vocabulary.sums
        )
        if three:
            self._head.state_norm = packer.address(head.layer.hidden_norm.weight)
        project = packer.weight(head.fc.weight, head.fc.bias)
        self._head.project, self._head.project_bias = project.data, project.bias

    @staticmethod
    def serves(head: EagleHead, shape: KVShape) -> bool:
        """Whether a head, and its cache, are of the kind."""
        target = head.config.target
        return (
            NativeAttention.serves(shape)
            and PackedWeight.serves(head.lm_head.weight)
            and target.hidden_size % 4 == 0
            and target.hidden_act == "silu"
            and target.intermediate_size % 2 == 0
            and not getattr(target, "mlp_bias", False)
        )

    def run(
        self, batch: RowBatch, step: NativeStep, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See HeadRunner.run."""
        rows, wanted = batch.num_rows, batch.wanted()
        before = before.contiguous()
        projected = before.shape[1] == self._model.hidden
        states = before.clone() if projected else before.new_empty(rows, self._model.hidden)
        logits = torch.empty(len(wanted), self._vocab)
        failed = self._library.eagle_step(
            ctypes.byref(self._model),
            ctypes.byref(self._head),
            step.sequences,
            len(step.sequences),
            rows,
            (ctypes.c_int64 * rows)(*batch.tokens()),
            (ctypes.c_int64 * rows)(*batch.positions()),
            ctypes.c_void_p(None if projected else before.data_ptr()),
            ctypes.c_void_p(states.data_ptr()),
            (ctypes.c_int64 * len(wanted))(*wanted),
            len(wanted),
            ctypes.c_void_p(logits.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"a pass of {rows} rows: no memory for what is between its parts")
        return logits, states
