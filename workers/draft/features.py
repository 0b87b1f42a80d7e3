"""Features of the target as they come over the wire."""

import torch

from workers.rpc.messages import Features


def as_tensor(features: Features) -> torch.Tensor:
    """Their values [rows, F], in the type that they were sent in, on CPU."""
    flat = torch.frombuffer(bytearray(features.data), dtype=getattr(torch, features.dtype))
    return flat.view(features.rows, features.width)


def blank(count: int, width: int, dtype: torch.dtype) -> Features:
    """Features of the first positions that say nothing."""
    data = bytes(count * width * dtype.itemsize)
    return Features(0, count, width, str(dtype).removeprefix("torch."), data)
