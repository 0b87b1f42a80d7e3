"""A target and a draft worker of a config in this process, and the way to them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from deployments.app import drafter_configs, drafter_options, target_options
from deployments.choice import Records
from deployments.config import AppConfig
from deployments.lease import Lease
from deployments.round import Generation, GenerationRequest
from deployments.stats import RequestStats
from workers.draft.config import DraftConfig, LookupConfig
from workers.draft.drafter import Drafter
from workers.draft.server import DraftWorker
from workers.rpc.connection import DRAFT, TARGET, Connection, WorkerKind
from workers.target.config import TargetConfig
from workers.target.server import TargetWorker


class DelayedLink:
    """A TCP proxy that delivers every byte `seconds` after it was sent, in both directions."""

    def __init__(self, address: str, seconds: float) -> None:
        host, port = address.rsplit(":", 1)
        self._peer = (host, int(port))
        self._seconds = seconds
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; the address to connect to instead."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close it."""
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._peer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                # Order is kept: the loop runs callbacks of equal delay in the order they were made.
                loop.call_later(self._seconds, sink.write, data)
        loop.call_later(self._seconds, sink.close)


class LocalPool:
    """One worker, leased as Ray Serve would lease it."""

    def __init__(
        self, kind: WorkerKind, worker: TargetWorker | DraftWorker, address: str = ""
    ) -> None:
        """`address` is where to connect instead of the worker's own."""
        self.worker = worker
        self._kind = kind
        self._address = address
        self._connection: Connection | None = None

    @contextlib.asynccontextmanager
    async def lease(self, deadline: float | None = None) -> AsyncIterator[Lease]:
        """See deployments.lease.WorkerPool."""
        holder = self.worker.leases.hold()
        lease_id = await anext(holder)
        held = asyncio.create_task(_exhaust(holder))
        try:
            if self._connection is None or not self._connection.alive:
                address = self._address or self.worker.address
                self._connection = await Connection.connect(self._kind, address, "inside")
            yield Lease(lease_id, self._connection)
        finally:
            held.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await held

    def connections(self) -> list[Connection]:
        """See deployments.lease.WorkerPool."""
        connection = self._connection
        return [connection] if connection is not None and connection.alive else []

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: the seconds to its first token, and from there to its last."""

    tokens: list[int]
    first_s: float
    rest_s: float
    stats: RequestStats


class Inside:
    """Generations of the workers here."""

    def __init__(self, targets: LocalPool, drafts: LocalPool, target: TargetWorker) -> None:
        self.target = target
        self._targets = targets
        self._drafts = drafts
        self._records = Records()

    async def answer(self, request: GenerationRequest) -> Answered:
        """One answer."""
        generation = Generation(
            request,
            self._targets,  # type: ignore[arg-type]
            self._drafts,  # type: ignore[arg-type]
            max_patience_ms=1000.0,
            records=self._records,
            ended=lambda stats: None,
        )
        tokens: list[int] = []
        asked, began = time.perf_counter(), 0.0
        async for piece in generation.pieces():
            if not tokens:
                began = time.perf_counter()
            tokens += piece.tokens
        return Answered(tokens, began - asked, time.perf_counter() - began, generation.stats)


def app_config(path: Path) -> AppConfig:
    """The arguments of the first application of a config file."""
    return AppConfig.model_validate(yaml.safe_load(path.read_text())["applications"][0]["args"])


@contextlib.asynccontextmanager
async def workers(
    config: Path, drafters: Mapping[str, Drafter] | None = None, round_trip_s: float = 0.0
) -> AsyncIterator[Inside]:
    """The workers of a config; or its target, and these drafters on a draft worker that is so far away."""
    args = app_config(config)
    options = target_options(args)
    if drafters is None:
        configs = drafter_configs(drafter_options(args, "draft"))
        options["drafters"] = drafter_configs(options["drafters"])
    else:
        configs = tuple(LookupConfig(name) for name in drafters)
        options["drafters"] = ()
        # What would be elsewhere has processors of its own there: it is left one here.
        options["num_threads"] = 1
        if not any(drafter.feature_window for drafter in drafters.values()):
            options["features"] = None
    target = TargetWorker(TargetConfig(**options))
    draft = DraftWorker(DraftConfig(configs, args.target.model), drafters)
    await target.start()
    await draft.start()
    link = DelayedLink(draft.address, round_trip_s / 2)
    targets = LocalPool(TARGET, target)
    drafts = LocalPool(DRAFT, draft, await link.start() if round_trip_s else "")
    try:
        yield Inside(targets, drafts, target)
    finally:
        await targets.close()
        await drafts.close()
        if round_trip_s:
            await link.stop()
        await draft.stop()
        await target.stop()


async def _exhaust(holder: AsyncIterator[str]) -> None:
    async for _ in holder:
        pass
