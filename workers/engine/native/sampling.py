"""Drawing tokens on CPU through the native library."""

import ctypes

import torch

from workers.engine.native.library import available, library
from workers.request import SamplingParams


def serves(logits: torch.Tensor) -> bool:
    """Whether a row of logits can be drawn from here."""
    return (
        logits.is_cpu and logits.dtype is torch.float32 and logits.is_contiguous() and available()
    )


def top_children(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    params: SamplingParams,
    key: int,
    softness: float,
    count: int,
) -> tuple[list[int], list[float]]:
    """The likeliest children by logits float32 [V] with the noise of `ids` int32 [V], best first.

    Returns their places in the row and their probabilities among all, at temperature `softness`.
    """
    places, probabilities = (ctypes.c_int64 * count)(), (ctypes.c_float * count)()
    call = library().top_children
    call.restype = ctypes.c_int64
    found: int = call(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_void_p(None if ids is None else ids.data_ptr()),
        ctypes.c_int64(len(logits)),
        ctypes.c_float(params.temperature),
        ctypes.c_int64(params.top_k),
        ctypes.c_float(params.top_p),
        ctypes.c_float(params.min_p),
        ctypes.c_uint64(key),
        ctypes.c_float(softness),
        ctypes.c_int64(count),
        places,
        probabilities,
    )
    if found < 0:
        raise MemoryError(f"ranking {len(logits)} tokens: no memory")
    return places[:found], probabilities[:found]


def draw_token(logits: torch.Tensor, params: SamplingParams, key: int) -> int | None:
    """The drawn token of float32 [V] under a noise key; None if the row holds no usable numbers."""
    call = library().draw_token
    call.restype = ctypes.c_int64
    token: int = call(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(len(logits)),
        ctypes.c_float(params.temperature),
        ctypes.c_int64(params.top_k),
        ctypes.c_float(params.top_p),
        ctypes.c_float(params.min_p),
        ctypes.c_uint64(key),
    )
    if token == -2:
        raise MemoryError(f"drawing from {len(logits)} tokens: no memory")
    return None if token < 0 else token
