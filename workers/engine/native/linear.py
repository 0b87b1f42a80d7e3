"""Linear layers over packed bfloat16 weights, on CPU through the native library."""

import ctypes

import torch

from workers.engine.native.library import available, library

_LANES = 16


class PackedWeight:
    """A weight [out, in] and its bias in the library's layout; what `data` and `bias` point to lives as long.

    A row's bits do not depend on how many rows share a call.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._library = library()
        self.out_features, self.in_features = weight.shape
        blocks = -(-self.out_features // _LANES)
        self._packed = torch.empty(blocks * _LANES * self.in_features, dtype=torch.bfloat16)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        dense = weight.detach().contiguous()
        self._library.pack_bfloat16(
            ctypes.c_void_p(dense.data_ptr()),
            ctypes.c_int64(self.out_features),
            ctypes.c_int64(self.in_features),
            ctypes.c_void_p(self._packed.data_ptr()),
        )

    @staticmethod
    def serves(weight: torch.Tensor) -> bool:
        """Whether a weight can be packed: bfloat16 on a CPU that multiplies it, an even number of inputs."""
        return (
            weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and weight.shape[1] % 2 == 0
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
            and available()
        )

    @property
    def data(self) -> int:
        """Address of the packed weight."""
        return self._packed.data_ptr()

    @property
    def bias(self) -> int | None:
        """Address of the bias, float32 [out]; None without one."""
        return None if self._bias is None else self._bias.data_ptr()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, in] to [R, out], bfloat16; each output is rounded once."""
        rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features, dtype=torch.bfloat16)
        failed = self._library.linear_bfloat16(
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int64(rows.shape[0]),
            ctypes.c_int64(self.in_features),
            ctypes.c_void_p(self.data),
            ctypes.c_void_p(self.bias),
            ctypes.c_int64(self.out_features),
            ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"a linear layer over {rows.shape[0]} rows: no memory")
        return out


class PackedBytes:
    """A weight [out, in] as bytes, for drafts: exact to about a half in 127 of each output's largest.

    `in` is a multiple of 4. What the addresses point to lives as long as this.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        outputs, inputs = weight.shape
        dense = weight.detach().float()
        scales = (dense.abs().amax(dim=1) / 127).clamp(min=1e-30)
        small = (dense / scales[:, None]).round().to(torch.int8)
        blocks = -(-outputs // _LANES)
        padded = torch.zeros(blocks * _LANES, inputs, dtype=torch.int8)
        padded[:outputs] = small
        self._scales = scales.contiguous()
        self._sums = small.sum(dim=1, dtype=torch.int32).contiguous()
        self._packed = padded.view(blocks, _LANES, inputs // 4, 4).permute(0, 2, 1, 3).contiguous()

    @property
    def data(self) -> int:
        """Address of the packed bytes."""
        return self._packed.data_ptr()

    @property
    def scales(self) -> int:
        """Address of the outputs' scales, float32."""
        return self._scales.data_ptr()

    @property
    def sums(self) -> int:
        """Address of the sums of each output's bytes, int32."""
        return self._sums.data_ptr()
