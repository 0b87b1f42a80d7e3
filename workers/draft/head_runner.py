"""An EAGLE head over the engine's cache: flat rows of many sessions in one pass."""

from collections.abc import Sequence
from typing import cast

import torch

from workers.draft.eagle import EagleHead
from workers.draft.features import as_tensor, blank
from workers.draft.native_head import NativeHead
from workers.engine import attention, linear
from workers.engine.features import feature_width
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.native.attention import NativeStep
from workers.engine.rows import RowBatch, SequenceRows
from workers.rpc.messages import Features


class HeadRunner:
    """Runs a head; attention reaches `window` positions back."""

    def __init__(self, head: EagleHead, dtype: torch.dtype, device: str, window: int) -> None:
        config = head.config
        self.ids = cast(torch.Tensor, head.vocabulary).cpu()
        self.feature_kind = config.features
        self.feature_width = feature_width(config.target, config.features)
        self.max_length = config.target.max_position_embeddings
        self._head = head.to(device).to(dtype)
        self._device = torch.device(device)
        self._window = window
        self._scale = config.head_dim**-0.5
        self._shape = KVShape(
            1, config.target.num_key_value_heads, config.head_dim, dtype, self._device
        )
        self._backend = attention.choose_backend(self._shape)
        self._native = None
        self._min_rows = linear.PLAIN_MIN_ROWS
        if NativeHead.serves(self._head, self._shape):
            self._native = NativeHead(self._head, self._shape, window, self._scale)
        elif linear.can_pack(dtype, self._device):
            linear.pack_linears(self._head)
            self._min_rows = linear.PACKED_MIN_ROWS

    def pool(self, num_slots: int) -> KVPool:
        """A cache for the head."""
        return KVPool(self._shape, self._backend, num_slots)

    def blank_features(self, count: int) -> Features:
        """Features of the first positions that say nothing."""
        return blank(count, self.feature_width, self._shape.dtype)

    def tensor(self, features: Features) -> torch.Tensor:
        """Features [rows, F] that came over the wire."""
        return as_tensor(features).to(self._device, self._shape.dtype)

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[SequenceRows], before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with what is before them: the target's features [T, F], or states of the head [T, H].

        Returns logits of the wanted rows, float32, and the states [T, H] of all.
        """
        batch = RowBatch(sequences)
        if self._native is not None:
            return self._native.run(batch, cast(NativeStep, self._backend.step(batch)), before)
        padding = max(0, self._min_rows - batch.num_rows)
        tokens = torch.tensor([batch.tokens() + [0] * padding], device=self._device)
        positions = torch.tensor([batch.positions() + [0] * padding], device=self._device)
        before = torch.cat([before, before.new_zeros(padding, before.shape[1])])[None]
        states = self._head.states(before)
        step = self._backend.step(batch)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return step.attend(0, query, key, value, self._scale, self._window, 0.0)

        made = self._head(tokens, states, positions, attend)[0]
        wanted = batch.wanted()
        if not wanted:
            return torch.empty(0, len(self.ids)), made[: batch.num_rows]
        rows = wanted + wanted[:1] * max(0, self._min_rows - len(wanted))
        logits = self._head.guess(made[rows])[: len(wanted)].float()
        return logits, made[: batch.num_rows]
