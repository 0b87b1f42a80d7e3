"""Decoders of Llama's shape in bfloat16 on CPU: a whole step in one call of the native library."""

import copy
import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from workers.checkpoint import FeatureKind
from workers.engine.features import entered_layers
from workers.engine.kv_cache import KVShape
from workers.engine.native.attention import NativeAttention, NativeStep
from workers.engine.native.library import library
from workers.engine.native.linear import PackedWeight
from workers.engine.parts import Ending
from workers.engine.rows import RowBatch

_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")


class Layer(ctypes.Structure):
    """decoder.c's layer_weights."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("out_bias", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class Decoder(ctypes.Structure):
    """decoder.c's decoder."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


class _Taps(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("entered", ctypes.c_int32 * 3),
    )


class Packer:
    """Makes what the library's structures point to, and keeps it for as long as it lives itself."""

    def __init__(self) -> None:
        self._alive: list[Any] = []

    @property
    def packed(self) -> list[PackedWeight]:
        """The weights that were packed."""
        return [part for part in self._alive if isinstance(part, PackedWeight)]

    def keep(self, part: Any) -> Any:
        """Let something live."""
        self._alive.append(part)
        return part

    def weight(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        """A packed weight."""
        packed: PackedWeight = self.keep(PackedWeight(weight, bias))
        return packed

    def address(self, tensor: torch.Tensor) -> int:
        """The address of a dense copy of a tensor, or of itself."""
        dense: torch.Tensor = self.keep(tensor.detach().contiguous())
        return dense.data_ptr()

    def layer(self, entry: Layer, layer: Any, window: int) -> None:
        """Pack a layer whose parts have the names of Llama's."""
        attention, mlp = layer.self_attn, layer.mlp
        joined = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None
        if joined[0].bias is not None:
            bias = torch.cat([part.bias for part in joined])
        qkv = self.weight(torch.cat([part.weight for part in joined]), bias)
        out = self.weight(attention.o_proj.weight, attention.o_proj.bias)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        if hasattr(layer, "input_layernorm"):
            entry.input_norm = self.address(layer.input_layernorm.weight)
        entry.post_norm = self.address(layer.post_attention_layernorm.weight)
        if hasattr(attention, "q_norm"):
            entry.query_norm = self.address(attention.q_norm.weight)
            entry.key_norm = self.address(attention.k_norm.weight)
        entry.qkv, entry.qkv_bias = qkv.data, qkv.bias
        entry.out, entry.out_bias = out.data, out.bias
        entry.gate_up = self.weight(gate_up).data
        entry.down = self.weight(mlp.down_proj.weight).data
        entry.window = window

    def rope(self, rotary: Any, max_len: int) -> tuple[int, int]:
        """Addresses of the cosines and sines of all positions, bfloat16 [positions, head dim]."""
        positions = torch.arange(max_len)[None]
        cosine, sine = rotary(torch.empty(0, dtype=torch.bfloat16), positions)
        return self.address(cosine[0]), self.address(sine[0])


class NativeDecoder:
    """Runs the step of a model whose every layer is Llama's, one of `_TYPES`."""

    def __init__(self, module: Any, windows: tuple[int, ...], scale: float, max_len: int) -> None:
        """Pack one of transformers' modules; `windows` and `scale` are what its layers give attention."""
        config = module.config.get_text_config()
        self._library = library()
        self._packer = packer = Packer()
        self.vocab_size = module.lm_head.weight.shape[0]
        self._hidden = config.hidden_size
        self._num_layers = len(module.model.layers)
        self._taps = _Taps(None, 0)
        self._layers = layers = (Layer * self._num_layers)()
        for entry, layer, window in zip(layers, module.model.layers, windows, strict=True):
            packer.layer(entry, layer, window)
        attention = module.model.layers[0].self_attn
        cosine, sine = packer.rope(module.model.rotary_emb, max_len)
        self._model = Decoder(
            layers=self._num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=attention.q_proj.weight.shape[0] // attention.head_dim,
            kv_heads=attention.k_proj.weight.shape[0] // attention.head_dim,
            head_dim=attention.head_dim,
            vocab=self.vocab_size,
            eps=config.rms_norm_eps,
            scale=scale,
            embedding=packer.address(module.model.embed_tokens.weight),
            cosine=cosine,
            sine=sine,
            norm=packer.address(module.model.norm.weight),
            head=packer.weight(module.lm_head.weight).data,
            weights=ctypes.addressof(layers),
        )

    @staticmethod
    def serves(module: Any, shape: KVShape) -> bool:
        """Whether a model, and its cache, are of the kind."""
        config = module.config.get_text_config()
        return (
            config.model_type in _TYPES
            and NativeAttention.serves(shape)
            and PackedWeight.serves(module.lm_head.weight)
            and config.hidden_act == "silu"
            and config.intermediate_size % 2 == 0
            and not getattr(config, "mlp_bias", False)
            and module.lm_head.bias is None
        )

    @property
    def linears(self) -> list[Any]:
        """See Runner."""
        return list(self._packer.packed)

    def keep_features(self, kind: FeatureKind) -> int:
        """Return features of every row from now on; the width of a row's."""
        if kind == "last":
            self._taps = _Taps(None, self._hidden)
        else:
            entered = (ctypes.c_int32 * 3)(*entered_layers(self._num_layers))
            self._taps = _Taps(None, 3 * self._hidden, entered)
        return int(self._taps.width)

    def part(self, layers: Sequence[int], ending: Ending | None) -> "NativeDecoder":
        """See Model.part."""
        part = copy.copy(self)
        part._packer = Packer()
        # What its structures point to is the whole's.
        part._packer.keep(self)
        part._num_layers = len(layers) + (ending is not None)
        part._layers = (Layer * part._num_layers)(*(self._layers[layer] for layer in layers))
        part._model = Decoder.from_buffer_copy(self._model)
        part._model.layers = part._num_layers
        part._model.weights = ctypes.addressof(part._layers)
        part._taps = _Taps(None, 0)
        if ending is not None:
            window = self._layers[self._num_layers - 1].window
            part._packer.layer(part._layers[len(layers)], ending.layer, window)
            part._model.norm = part._packer.address(ending.norm.weight)
        return part

    def run(self, batch: RowBatch, step: NativeStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [wanted rows, vocabulary], float32, and the features of all rows, if they are kept."""
        rows, wanted = batch.num_rows, batch.wanted()
        logits = torch.empty(len(wanted), self.vocab_size)
        features = None
        if self._taps.width:
            features = torch.empty(rows, self._taps.width, dtype=torch.bfloat16)
            self._taps.to = features.data_ptr()
        failed = self._library.decoder_step(
            ctypes.byref(self._model),
            step.sequences,
            len(step.sequences),
            rows,
            (ctypes.c_int64 * rows)(*batch.tokens()),
            (ctypes.c_int64 * rows)(*batch.positions()),
            (ctypes.c_int64 * len(wanted))(*wanted),
            len(wanted),
            ctypes.byref(self._taps),
            ctypes.c_void_p(logits.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"a step of {rows} rows: no memory for what is between its layers")
        return logits, features
