"""Every metric of our own: defined here, recorded once, through Ray's metrics.

Ray adds the labels application, deployment and replica and exports each as `ray_<name>` on every node, where
Prometheus finds it; `/metrics` shows the same values (exposition.py).
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.stats import RequestStats
from protos import speculation_pb2 as pb
from workers.rpc.connection import Connection

_SECONDS: Final = [
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03),
    *(
        0.04,
        0.05,
        0.06,
        0.08,
        0.1,
        0.15,
        0.2,
        0.3,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        10.0,
        30.0,
        60.0,
        120.0,
    ),
]
"""Fine below ten milliseconds, where a token of a drafted answer is."""

_LENGTHS: Final = [1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0]
_ROWS: Final = [
    1.0,
    2.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    96.0,
    128.0,
    256.0,
    512.0,
]

_ANSWERS: Final = {
    "spec_decode_num_drafts": ("drafts", "Rounds that verified a draft."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Drafted tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that were accepted."),
    "rounds": ("rounds", "Passes of the target for answers, after the prefill."),
    "committed_tokens": ("committed_tokens", "Tokens that rounds have committed."),
    "proposals": ("proposals", "Proposals of drafters that held something."),
    "hits": ("hits", "Proposals that were known before the commit that they answer."),
}
"""Counters over answers: the field of RequestStats, and what it says. The first have vLLM's names."""

_TIMES: Final = {
    "queue_seconds": ("queue_s", "From a request's arrival to its place on a target."),
    "time_to_first_token_seconds": (
        "first_token_s",
        "From a request's arrival to its first token.",
    ),
    "time_per_output_token_seconds": (
        "token_s",
        "From an answer's first token to its last, by the tokens between.",
    ),
    "request_seconds": ("request_s", "From a request's arrival to the end of its answer."),
}

GAUGES: Final = {
    "running_sessions",
    "waiting_sessions",
    "leases",
    "kv_slots",
    "kv_free_slots",
    "price",
    "rate",
    "drift",
}
"""Fields of WorkerStatus that are not counted since the start."""


class CoordinatorMetrics:
    """What a coordinator's answers took and did, by model and by the drafters that they had."""

    def __init__(self) -> None:
        labels = ("model", "drafter")
        self._counters = {
            field: Counter(f"slipstream_{name}", text, labels)
            for name, (field, text) in _ANSWERS.items()
        }
        self._times = {
            field: Histogram(f"slipstream_{name}", text, _SECONDS, labels)
            for name, (field, text) in _TIMES.items()
        }
        self._answers = Counter(
            "slipstream_answers",
            "Answers that have ended: stop, length, abort if the client left, or the code of an error.",
            (*labels, "finish_reason"),
        )
        self._per_position = Counter(
            "slipstream_spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their position in the draft.",
            (*labels, "position"),
        )
        self._length = Histogram(
            "slipstream_accepted_length",
            "Tokens that a round committed in the mean of an answer, the target's own included.",
            _LENGTHS,
            labels,
        )
        self._faults = Counter(
            "slipstream_faults",
            "Workers that answers have lost, and messages that came twice or left a gap.",
            ("model", "kind"),
        )
        self._messages = Counter(
            "slipstream_messages",
            "Messages between this coordinator and workers; several share a frame.",
            ("role", "direction"),
        )
        self._cpu = Counter("slipstream_coordinator_cpu_seconds", "Processor time of this process.")
        self._cpu_seen = 0.0
        self._seen: WeakKeyDictionary[Connection, tuple[int, int]] = WeakKeyDictionary()

    def record(self, connections: Iterable[Connection]) -> None:
        """What has gone over connections since the last call, and the processor's time."""
        cpu = time.process_time()
        self._cpu.inc(cpu - self._cpu_seen)
        self._cpu_seen = cpu
        for connection in connections:
            before = self._seen.get(connection, (0, 0))
            self._seen[connection] = now = connection.messages
            for direction, count, counted in zip(("sent", "received"), now, before, strict=True):
                if count > counted:
                    labels = {"role": connection.kind.name, "direction": direction}
                    self._messages.inc(count - counted, labels)

    def ended(self, model_id: str, stats: RequestStats) -> None:
        """An answer has ended."""
        labels = {"model": model_id, "drafter": stats.drafter or "none"}
        self._answers.inc(1, {**labels, "finish_reason": stats.finish_reason})
        for field, counter in self._counters.items():
            if amount := getattr(stats, field):
                counter.inc(amount, labels)
        for position, accepted in enumerate(stats.accepted_by_depth):
            if accepted:
                self._per_position.inc(accepted, {**labels, "position": str(position)})
        for field, histogram in self._times.items():
            seconds = getattr(stats, field)
            if seconds is not None:
                histogram.observe(seconds, labels)
        if stats.rounds:
            self._length.observe(stats.mean_accepted_length, labels)
        for kind, count in stats.faults.items():
            self._faults.inc(count, {"model": model_id, "kind": kind})


class WorkerMetrics:
    """What a worker says of itself: the fields of WorkerStatus, one metric each, and the target's steps."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._families: dict[str, Counter | Gauge] = {
            field.name: (Gauge if field.name in GAUGES else Counter)(
                f"slipstream_worker_{field.name}",
                f"WorkerStatus.{field.name} of protos/speculation.proto.",
            )
            for field in pb.WorkerStatus.DESCRIPTOR.fields
        }
        self._step_seconds = Histogram(
            "slipstream_worker_step_seconds", "How long a pass of the model took.", _SECONDS
        )
        self._step_rows = Histogram("slipstream_worker_step_rows", "Rows of a pass.", _ROWS)

    def record(self, status: pb.WorkerStatus, steps: Sequence[tuple[float, int]]) -> None:
        """What has changed since the last call; `steps` are (seconds, rows) of those since."""
        for name, family in self._families.items():
            value = getattr(status, name)
            if isinstance(family, Gauge):
                family.set(value)
            elif value > self._before.get(name, 0):
                family.inc(value - self._before.get(name, 0))
                self._before[name] = value
        for seconds, rows in steps:
            self._step_seconds.observe(seconds)
            self._step_rows.observe(rows)
