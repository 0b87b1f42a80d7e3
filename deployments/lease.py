"""Pools of workers: a lease from Ray Serve, and a connection to the worker that gave it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from workers.rpc.connection import Connection, WorkerKind
from workers.rpc.errors import NoCapacity, ServiceError, Unavailable
from workers.rpc.security import Security

logger = logging.getLogger(__name__)

ATTEMPT_SECONDS = 1.0
PAUSE_SECONDS = 0.1
LAST_WORDS_SECONDS = 1.0
STATUS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to one session on the worker at the other end of `connection`.

    `ended` is set when the worker, or the cluster for it, has ended the lease.
    """

    lease_id: str
    connection: Connection
    ended: asyncio.Event


class WorkerPool:
    """The workers behind one Serve deployment.

    Serve chooses the worker and counts the session; the data goes over one connection per worker.
    """

    def __init__(
        self, kind: WorkerKind, handle: DeploymentHandle, peer_id: str, security: Security
    ) -> None:
        self._kind = kind
        self._handle = handle.options(method_name="lease", stream=True, _by_reference=False)
        self._peer_id = peer_id
        self._security = security
        self._connections: dict[str, asyncio.Task[Connection]] = {}

    def connections(self) -> list[Connection]:
        """The live connections."""
        return [
            task.result()
            for task in self._connections.values()
            if task.done() and not _is_dead(task)
        ]

    async def replicas(self) -> tuple[str, dict[str, int]]:
        """What Serve says of the deployment: its status, and how many replicas are in which state.

        UNKNOWN if Serve does not say.
        """
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                status = await asyncio.to_thread(serve.status)
        except (RayError, TimeoutError):
            return "UNKNOWN", {}
        application = status.applications.get(self._handle.app_name)
        deployments = {} if application is None else application.deployments
        deployment = deployments.get(self._handle.deployment_name)
        if deployment is None:
            return "UNKNOWN", {}
        return deployment.status.value, deployment.replica_states

    @contextlib.asynccontextmanager
    async def lease(self, deadline: float | None = None, weights: str = "") -> AsyncIterator[Lease]:
        """Hold a lease for the length of the block, on a worker with this fingerprint of weights if given.

        Waits for a free worker until `deadline` on time.monotonic's clock, for ever if None. Raises
        NoCapacity if the pool's queue is full or the deadline passes while all workers are busy,
        Unavailable if it passes while none answers.
        """
        while True:
            calls = self._handle.remote()
            try:
                try:
                    async with asyncio.timeout(ATTEMPT_SECONDS):
                        address, lease_id = await anext(calls)
                    connection = await self._connection(address)
                    if weights not in ("", connection.info.weights_fingerprint):
                        raise Unavailable(f"{connection.info.worker_id} has other weights")
                except BackPressureError as error:
                    raise NoCapacity(
                        f"the {self._kind.name} pool's queue is full; try again later"
                    ) from error
                except (TimeoutError, DeploymentUnavailableError, RayError, ServiceError) as error:
                    if deadline is not None and time.monotonic() + PAUSE_SECONDS > deadline:
                        if isinstance(error, TimeoutError):
                            raise NoCapacity(
                                f"no {self._kind.name} worker became free in time; try again later"
                            ) from error
                        raise Unavailable(
                            f"no {self._kind.name} worker answers: {error}"
                        ) from error
                else:
                    ended = asyncio.Event()
                    watch = asyncio.create_task(_watch(calls, ended))
                    try:
                        yield Lease(lease_id, connection, ended)
                    finally:
                        watch.cancel()
                    return
            finally:
                # A call that has failed raises its error once more when it is cancelled.
                with contextlib.suppress(Exception):
                    calls.cancel()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _connection(self, address: str) -> Connection:
        """The connection to a worker; made once, by whoever needs it first."""
        self._connections = {a: t for a, t in self._connections.items() if not _is_dead(t)}
        if address not in self._connections:
            self._connections[address] = asyncio.create_task(
                Connection.connect(self._kind, address, self._peer_id, self._security)
            )
        return await asyncio.shield(self._connections[address])


async def tell_when_ended(lease: Lease, lost: Callable[[ServiceError], None]) -> None:
    """A lease that ends while its session goes on: the worker has forgotten it, or is no more."""
    await lease.ended.wait()
    # What the worker said last may still be on its way.
    await asyncio.sleep(LAST_WORDS_SECONDS)
    lost(Unavailable("the worker has ended the lease"))


async def _watch(calls: AsyncIterator[Any], ended: asyncio.Event) -> None:
    # A lease that ends by an error is over as well.
    with contextlib.suppress(Exception):
        async for _ in calls:
            pass
    ended.set()


def _is_dead(task: asyncio.Task[Connection]) -> bool:
    return task.done() and (
        task.cancelled() or task.exception() is not None or not task.result().alive
    )
