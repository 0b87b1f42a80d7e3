"""What /metrics shows, in Prometheus's terms."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.stats import Fault, RequestStats
from protos import speculation_pb2 as pb
from workers.rpc import messages as m

_NOW: Final = {
    "running_sessions",
    "waiting_sessions",
    "leases",
    "kv_slots",
    "kv_free_slots",
    "price",
    "drift",
}
"""Fields of WorkerStatus that are not counted since the start."""

_ANSWERS: Final = {
    "answers": "Answers that have ended, complete or not.",
    "rounds": "Passes of the target for answers, after the prefill.",
    "committed_tokens": "Tokens that rounds have committed.",
    "draft_tokens": "Drafted tokens that were verified.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "proposals": "Proposals of drafters that held something.",
    "hits": "Proposals that were known before the commit that they answer.",
}


@dataclass(frozen=True, slots=True)
class ConnectedWorker:
    """A worker: its introduction, "target" or "draft", what it does now, and messages to and from it."""

    info: m.WorkerInfo
    role: str
    status: pb.WorkerStatus
    sent: int
    received: int


class Metrics:
    """Counts the answers of a coordinator, by the drafters that they had."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"slipstream_{name}", text, ["drafter"], registry=self._registry)
            for name, text in _ANSWERS.items()
        }
        self._faults = Counter(
            "slipstream_faults",
            "Workers that answers have lost, and messages that came twice or left a gap.",
            ["kind"],
            registry=self._registry,
        )
        for kind in get_args(Fault):
            self._faults.labels(kind)
        self._workers = _Workers()
        self._registry.register(self._workers)
        ProcessCollector("slipstream_coordinator", registry=self._registry)

    def ended(self, stats: RequestStats) -> None:
        """An answer has ended."""
        for name, counter in self._counters.items():
            amount = 1 if name == "answers" else getattr(stats, name)
            counter.labels(stats.drafter or "none").inc(amount)
        for kind, count in stats.faults.items():
            self._faults.labels(kind).inc(count)

    def text(self, workers: Sequence[ConnectedWorker]) -> bytes:
        """All metrics in Prometheus's text format, with what the workers say now."""
        self._workers.connected = workers
        return generate_latest(self._registry)


class _Workers(Collector):
    """The fields of WorkerStatus, one metric each, labelled by worker; and messages."""

    def __init__(self) -> None:
        self.connected: Sequence[ConnectedWorker] = ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def _collect(self) -> Iterator[Metric]:
        for field in pb.WorkerStatus.DESCRIPTOR.fields:
            kind = GaugeMetricFamily if field.name in _NOW else CounterMetricFamily
            text = f"WorkerStatus.{field.name} of protos/speculation.proto."
            family = kind(f"slipstream_worker_{field.name}", text, labels=["worker", "role"])
            for worker in self.connected:
                labels = [worker.info.worker_id, worker.role]
                family.add_metric(labels, getattr(worker.status, field.name))
            yield family
        messages = CounterMetricFamily(
            "slipstream_messages",
            "Messages between this coordinator and a worker.",
            labels=["worker", "role", "direction"],
        )
        for worker in self.connected:
            labels = [worker.info.worker_id, worker.role]
            messages.add_metric([*labels, "sent"], worker.sent)
            messages.add_metric([*labels, "received"], worker.received)
        yield messages
