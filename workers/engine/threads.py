"""How many threads a thread's own work may take."""

import threading

import torch

_lock = threading.Lock()
_default = torch.get_num_threads()


def use_threads(count: int) -> None:
    """Give the calling thread's steps so many threads, whatever others have; 0 is torch's default."""
    # Torch keeps a number for the process, and a thread takes it over when it first asks.
    with _lock:
        torch.set_num_threads(count or _default)
        torch.get_num_threads()
