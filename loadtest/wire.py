"""A wire between two network interfaces on which frames come late, or not at all."""

import contextlib
import heapq
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

_EVERY_PROTOCOL: Final = socket.htons(3)
_VNET_HDR: Final = 15
_LONGEST_FRAME: Final = 1 << 17


@dataclass(slots=True)
class Carried:
    """What a wire did with the frames that it was given."""

    frames: int = 0
    lost: int = 0


@contextlib.contextmanager
def wire(ends: tuple[str, str], delay_s: float, loss: float, seed: int) -> Iterator[Carried]:
    """Carry frames between two interfaces, for the length of the block, in both directions.

    Each arrives `delay_s` seconds late; a share of `loss` of them never does. Needs root.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_open(name)) for name in ends]
        stop = threading.Event()
        carried = Carried()
        rng = random.Random(seed)
        arguments = (sockets, delay_s, loss, rng, carried, stop)
        thread = threading.Thread(target=_carry, args=arguments, daemon=True)
        thread.start()
        try:
            yield carried
        finally:
            stop.set()
            thread.join()


def _open(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _EVERY_PROTOCOL)
    # Frames longer than the wire's own limit and checksums to be made come with a header that says so.
    opened.setsockopt(263, _VNET_HDR, 1)
    opened.bind((interface, 0))
    opened.setblocking(False)
    return opened


def _carry(
    ends: list[socket.socket],
    delay_s: float,
    loss: float,
    rng: random.Random,
    carried: Carried,
    stop: threading.Event,
) -> None:
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    other: dict[Any, socket.socket] = dict(zip(ends, reversed(ends), strict=True))
    while not stop.is_set():
        rest = min(waiting[0][0] - time.monotonic(), 0.1) if waiting else 0.1
        for end in select.select(ends, (), (), max(rest, 0))[0]:
            data, address = end.recvfrom(_LONGEST_FRAME)
            if address[2] == socket.PACKET_OUTGOING:
                continue
            carried.frames += 1
            if rng.random() < loss:
                carried.lost += 1
            else:
                # The count keeps frames of one instant in their order.
                due = (time.monotonic() + delay_s, carried.frames, other[end], data)
                heapq.heappush(waiting, due)
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, data = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                end.send(data)
