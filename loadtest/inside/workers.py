"""A target and a draft worker of a config in this process, and the way to them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from deployments.app import drafter_configs, drafter_options, target_options
from deployments.choice import Records
from deployments.config import AppConfig, CoordinatorThresholds
from deployments.drafting import DraftPool
from deployments.lease import PAUSE_SECONDS, Lease
from deployments.round import Generation, GenerationRequest
from deployments.stats import RequestStats
from loadtest.inside.faults import DelayedLink
from workers.draft.config import DraftConfig, LookupConfig
from workers.draft.drafter import Drafter
from workers.draft.server import DraftWorker
from workers.rpc.connection import DRAFT, TARGET, Connection, WorkerKind
from workers.rpc.errors import Unavailable
from workers.rpc.security import LOCAL, Security
from workers.target.config import TargetConfig
from workers.target.server import TargetWorker


class LocalPool:
    """Workers of one kind, leased in turn, as Ray Serve would lease them."""

    def __init__(
        self,
        kind: WorkerKind,
        *workers: TargetWorker | DraftWorker,
        via: Mapping[str, str] | None = None,
        security: Security = LOCAL,
    ) -> None:
        """`via` says where to connect instead of a worker's own address."""
        self.workers = workers
        self._turn = itertools.cycle(workers)
        self._kind = kind
        self._via = via or {}
        self._security = security
        self._connections: dict[str, Connection] = {}

    @contextlib.asynccontextmanager
    async def lease(self, deadline: float | None = None, weights: str = "") -> AsyncIterator[Lease]:
        """See deployments.lease.WorkerPool."""
        while True:
            worker = next(self._turn)
            holder = worker.leases.hold()
            lease_id = await anext(holder)
            ended = asyncio.Event()
            held = asyncio.create_task(_exhaust(holder, ended))
            try:
                try:
                    _check(worker)
                    connection = await self._connection(worker.address)
                    if weights not in ("", connection.info.weights_fingerprint):
                        raise Unavailable("the worker has other weights")
                except Unavailable:
                    if deadline is not None and time.monotonic() + PAUSE_SECONDS > deadline:
                        raise
                else:
                    yield Lease(lease_id, connection, ended)
                    return
            finally:
                held.cancel()
                # Not `await held`: whoever is cancelled here himself must notice.
                await asyncio.wait([held])
                await holder.aclose()
            await asyncio.sleep(PAUSE_SECONDS)

    @property
    def draft_pool(self) -> DraftPool:
        """These draft workers, as a coordinator uses them."""
        names = (drafter.name for drafter in self.workers[0].info.drafters)
        return DraftPool(self, frozenset(names))  # type: ignore[arg-type]

    def connections(self) -> list[Connection]:
        """See deployments.lease.WorkerPool."""
        return [connection for connection in self._connections.values() if connection.alive]

    async def replicas(self) -> tuple[str, dict[str, int]]:
        """See deployments.lease.WorkerPool."""
        return "HEALTHY", {"RUNNING": len(self.workers)}

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            await connection.close()

    async def _connection(self, address: str) -> Connection:
        known = self._connections.get(address)
        if known is None or not known.alive:
            via = self._via.get(address, address)
            known = await Connection.connect(self._kind, via, "inside", self._security)
            self._connections[address] = known
        return known


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
            [self._drafts.draft_pool],
            CoordinatorThresholds(max_patience_ms=1000.0),
            self._records,
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
        configs = drafter_configs(drafter_options(args.drafts, "draft"))
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
    via = {draft.address: await link.start()} if round_trip_s else {}
    drafts = LocalPool(DRAFT, draft, via=via)
    try:
        yield Inside(targets, drafts, target)
    finally:
        await targets.close()
        await drafts.close()
        if round_trip_s:
            await link.stop()
        await draft.stop()
        await target.stop()


def _check(worker: TargetWorker | DraftWorker) -> None:
    try:
        worker.check_health()
    except RuntimeError as error:
        raise Unavailable(str(error)) from error


async def _exhaust(holder: AsyncIterator[str], ended: asyncio.Event) -> None:
    async for _ in holder:
        pass
    ended.set()
