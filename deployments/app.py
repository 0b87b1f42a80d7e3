"""The application graph: Coordinator → Target, Coordinator → Draft.

`build` makes all three one application: what `deployments.yaml` names. `front`, `target` and `draft` make
them applications of their own, which are upgraded and scaled apart; the front finds the others by name.
Models run in the workers' own processes; their classes are imported there, so this module and the
coordinator need no torch.
"""

import asyncio
import contextlib
import logging
import tempfile
import typing
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments import grpc as grpc_door
from deployments.config import (
    AppConfig,
    CoordinatorThresholds,
    DataPlaneArgs,
    DraftAppConfig,
    DrafterArgs,
    FrontConfig,
    TargetAppConfig,
    WorkerThresholds,
)
from deployments.coordinator import REPORT_SECONDS, Workers
from deployments.coordinator import Coordinator as Core
from deployments.drafting import DraftPool
from deployments.exposition import exposition
from deployments.features import features_read
from deployments.keys import Key, Limits
from deployments.lease import WorkerPool
from deployments.metrics import CoordinatorMetrics, WorkerMetrics
from deployments.openai.routes import make_app
from protos import inference_pb2 as pb
from workers.rpc.connection import DRAFT, TARGET, WorkerKind
from workers.rpc.errors import Unavailable
from workers.rpc.security import Certificates, Security

logger = logging.getLogger(__name__)

LIMITS = "limits"
LIMITS_TRIES = 5
LIMITS_PAUSE_SECONDS = 0.2

FRONT_CALLS = 4096
"""Calls that a front holds at once: workers, whose places it does not know, queue and refuse."""


def _log_as_serve_does() -> None:
    """Our modules log to Serve's files, with the request's id, as JSON where `logging_config` says so."""
    for package in ("deployments", "workers"):
        logging.getLogger(package).parent = logging.getLogger("ray.serve")


def _core() -> Core:
    """The coordinator of the replica that handles the current request."""
    return serve.get_replica_context().servable_object.core  # type: ignore[no-any-return]


async def _exposition() -> str:
    """The metrics of the applications that this replica belongs to and asks."""
    return await exposition(serve.get_replica_context().servable_object.applications)


http_app = make_app(_core, _exposition)


@serve.ingress(http_app)
class Coordinator:
    """HTTP and gRPC ingress; runs the rounds of the answers that come in here."""

    async def __init__(  # type: ignore[misc]
        self, models: list[dict[str, Any]], data_plane: dict[str, Any]
    ) -> None:
        """Serve models; handles are given, or names of applications."""
        _log_as_serve_does()
        security = _security(data_plane)
        peer_id = serve.get_replica_context().replica_id.unique_id
        self.applications = {serve.get_replica_context().app_name}
        pools: dict[tuple[str, str], WorkerPool] = {}

        def pool(kind: WorkerKind, deployment: str, found: DeploymentHandle | str) -> WorkerPool:
            # Models that share an application share its connections.
            key = (deployment, found if isinstance(found, str) else deployment)
            if key not in pools:
                if isinstance(found, str):
                    self.applications.add(found)
                    found = serve.get_deployment_handle(deployment, found)
                pools[key] = WorkerPool(kind, found, peer_id, security)
            return pools[key]

        self.core = Core(
            [
                Workers(
                    model["model_id"],
                    pool(TARGET, "Target", model["target"]),
                    tuple(
                        DraftPool(pool(DRAFT, "Draft", handle), frozenset(drafters))
                        for handle, drafters in model["drafts"]
                    ),
                )
                for model in models
            ],
            _SharedLimits(),
            CoordinatorMetrics(),
        )
        self._reporting = asyncio.create_task(self.core.report())

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new thresholds."""
        self.core.reconfigure(CoordinatorThresholds.model_validate(user_config))

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See inference.proto."""
        async with contextlib.aclosing(
            grpc_door.generate(self.core, request, grpc_context)
        ) as responses:
            async for response in responses:
                yield response

    async def Info(
        self, request: pb.InfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.InfoResponse:
        """See inference.proto."""
        return await grpc_door.info(self.core, request, grpc_context)


class _SharedLimits:
    """The one actor that counts the answers of all coordinators; see Counts."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def enter(self, coordinator: str, key: Key, answers: int) -> str:
        """Raises Unavailable if the limits cannot be looked up: nobody enters without them."""
        return str(await self._call("enter", coordinator, key, answers))

    async def leave(self, coordinator: str, key_id: str, answers: int) -> None:
        await self._call("leave", coordinator, key_id, answers)

    async def report(self, coordinator: str, running: Mapping[str, int]) -> None:
        await self._call("report", coordinator, running)

    async def _call(self, name: str, *arguments: Any) -> Any:
        for _ in range(LIMITS_TRIES):
            try:
                # Serve replaces an actor that dies: its handle must be looked up anew then.
                self._actor = self._actor or serve.get_deployment_actor(LIMITS)
                return await getattr(self._actor, name).remote(*arguments)
            except (RayError, ValueError):
                self._actor = None
                await asyncio.sleep(LIMITS_PAUSE_SECONDS)
        raise Unavailable("the limits of API keys cannot be looked up now; try again later")


class WorkerReplica:
    """A replica that runs one worker: Serve leases its sessions, the data plane carries them."""

    _worker: Any = None

    async def _serve(self, worker: Any) -> None:
        """Start the worker, and report what it does."""
        await worker.start()
        self._worker = worker
        self._reporting = asyncio.create_task(self._report(WorkerMetrics()))

    async def _report(self, metrics: WorkerMetrics) -> None:
        while True:
            metrics.record(self._worker.status(), self._steps())
            await asyncio.sleep(REPORT_SECONDS)

    def _steps(self) -> Sequence[tuple[float, int]]:
        return ()

    async def lease(self) -> AsyncIterator[tuple[str, str]]:
        """Yield (address, lease id) once, then hold the lease until it ends. Raises if the worker is ill."""
        self._worker.check_health()
        async with contextlib.aclosing(self._worker.leases.hold()) as leases:
            async for lease_id in leases:
                yield self._worker.address, lease_id

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Reload the weights of drafters. Weights that do not load leave the old ones in place."""
        weights = WorkerThresholds.model_validate(user_config).weights
        try:
            await self._worker.reload(weights)
        except (ValueError, OSError) as error:
            # A replica that raises here is replaced, for ever: an answer without new weights is better.
            logger.error("the old weights stay: %s", error)

    def check_health(self) -> None:
        """Raise if the worker cannot work any more."""
        self._worker.check_health()

    async def __del__(self) -> None:
        if self._worker is not None:
            self._reporting.cancel()
            await self._worker.stop()


class Target(WorkerReplica):
    """One target worker."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], data_plane: dict[str, Any]
    ) -> None:
        from workers.target.config import TargetConfig
        from workers.target.server import TargetWorker

        _log_as_serve_does()
        drafters = drafter_configs(config.pop("drafters"))
        target = TargetConfig(**config, drafters=drafters)
        self._ranks = _Ranks(target)
        await self._serve(
            TargetWorker(target, ranks_meet_in=self._ranks.folder, security=_security(data_plane))
        )

    def _steps(self) -> Sequence[tuple[float, int]]:
        return self._worker.recent_steps()  # type: ignore[no-any-return]

    def check_health(self) -> None:
        """Raise if the worker cannot work any more."""
        self._ranks.check()
        super().check_health()


class _Ranks:
    """The ranks of a target other than its own process: actors of the same group on the same machine.

    They end with the replica that owns them.
    """

    def __init__(self, config: Any) -> None:
        self.folder: Path | None = None
        self._running: dict[Any, int] = {}
        if config.tensor_parallel_size == 1:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-ranks-"))
        group = ray.util.get_current_placement_group()
        for rank in range(1, config.tensor_parallel_size):
            bundle = dict(group.bundle_specs[rank])
            actor = _Rank.options(  # type: ignore[attr-defined]
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                resources=bundle,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            ).remote()
            self._running[actor.follow.remote(config, rank, self.folder)] = rank

    def check(self) -> None:
        """Raise RuntimeError if one has ended."""
        ended, _ = ray.wait(list(self._running), timeout=0) if self._running else ([], [])
        for task in ended:
            raise RuntimeError(f"rank {self._running[task]} of the model has ended")


@ray.remote
class _Rank:
    """A rank other than 0 of a target's model."""

    def follow(self, config: Any, rank: int, folder: Path) -> None:
        """Take part until rank 0 ends."""
        from workers.target.ranks import follow

        follow(config, rank, folder)


class Draft(WorkerReplica):
    """One draft worker."""

    async def __init__(  # type: ignore[misc]
        self, drafts: list[dict[str, Any]], target: str, data_plane: dict[str, Any]
    ) -> None:
        from workers.draft.config import DraftConfig
        from workers.draft.server import DraftWorker

        _log_as_serve_does()
        config = DraftConfig(drafter_configs(drafts), target)
        await self._serve(DraftWorker(config, security=_security(data_plane)))


def build(args: AppConfig) -> serve.Application:
    """The application of one config; options of a deployment can be overridden in the YAML file."""
    drafts = []
    drafters = drafter_options(args.drafts, "draft")
    if drafters:
        sessions = 4 * args.target.max_num_seqs
        bound = _draft(drafters, args.target.model, sessions, args.data_plane)
        drafts.append((bound, [drafter["name"] for drafter in drafters]))
    model = {"model_id": args.model_id, "target": _target(args), "drafts": drafts}
    # More calls than all that it sends on: waiting and fairness belong to the target's scheduler.
    return _coordinator(16 * args.target.max_num_seqs, [model], args.data_plane)


def front(args: FrontConfig) -> serve.Application:
    """A coordinator before applications of targets and draft workers, which it finds by their names."""
    models = [
        {
            "model_id": model.model_id,
            "target": model.target,
            "drafts": [(pool.app, list(pool.drafters)) for pool in model.drafts],
        }
        for model in args.models
    ]
    return _coordinator(FRONT_CALLS, models, args.data_plane)


def target(args: TargetAppConfig) -> serve.Application:
    """Targets of one model, and the drafters beside them."""
    return _target(args)


def draft(args: DraftAppConfig) -> serve.Application:
    """Draft workers."""
    drafters = drafter_options(args.drafts, "draft")
    return _draft(drafters, args.target, args.max_sessions, args.data_plane)


def _coordinator(
    calls: int, models: list[dict[str, Any]], data_plane: DataPlaneArgs
) -> serve.Application:
    limits = DeploymentActorConfig(
        name=LIMITS, actor_class=ray.remote(Limits), actor_options={"num_cpus": 0}
    )
    deployment = _deployment(Coordinator, calls, deployment_actors=[limits])
    return deployment.bind(models, data_plane.model_dump())


def _target(args: AppConfig) -> serve.Application:
    """A worker's calls are its sessions: those that run, and as many that wait."""
    sessions = 2 * args.target.max_num_seqs
    options = {"max_queued_requests": sessions, **_on(args.target.device)}
    if args.target.tensor_parallel_size > 1:
        # A bundle for each rank, on one machine; the first is the replica's own.
        bundle = {"CPU": 1.0} if args.target.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}
        options["placement_group_bundles"] = [bundle] * args.target.tensor_parallel_size
        options["placement_group_strategy"] = "STRICT_PACK"
    return _deployment(Target, sessions, **options).bind(
        target_options(args), args.data_plane.model_dump()
    )


def _draft(
    drafters: list[dict[str, Any]], target: str, sessions: int, data_plane: DataPlaneArgs
) -> serve.Application:
    devices = (drafter.get("device", "cpu") for drafter in drafters)
    options = _on(next((device for device in devices if device != "cpu"), "cpu"))
    return _deployment(Draft, sessions, **options).bind(drafters, target, data_plane.model_dump())


def _on(device: str) -> dict[str, Any]:
    """What a replica asks Ray for: without it Ray hides all GPUs."""
    return {} if device == "cpu" else {"ray_actor_options": {"num_gpus": 1}}


def _security(data_plane: dict[str, Any]) -> Security:
    """What the processes of a data plane show each other; files are read where the process runs."""
    args = DataPlaneArgs.model_validate(data_plane)
    host = ray.util.get_node_ip_address() if args.host == "node" else args.host
    token = Path(args.token_file).read_text().strip() if args.token_file else ""
    if args.token_file and not token:
        raise ValueError(f"data_plane.token_file: {args.token_file} is empty")
    certificates = None
    if args.tls_folder:
        folder = Path(args.tls_folder)
        files = ("tls.crt", "tls.key", "ca.crt")
        certificate, key, authority = (folder.joinpath(file).read_bytes() for file in files)
        certificates = Certificates(certificate, key, authority, args.tls_name)
    return Security(host, token, certificates)


def target_options(args: AppConfig) -> dict[str, Any]:
    """The options of TargetConfig, with those of the drafters beside the target."""
    return {
        **args.target.model_dump(),
        "model_id": args.model_id,
        "max_draft_tokens": args.target.drafted_rows,
        "features": features_read(args.drafts),
        "drafters": drafter_options(args.drafts, "target"),
    }


def drafter_options(drafts: Sequence[DrafterArgs], placement: str) -> list[dict[str, Any]]:
    """The options of the drafters at a place, as the worker's config has them, and their kind."""
    made = []
    for draft in drafts:
        options = draft.model_dump()
        if options.pop("placement") != placement:
            continue
        if "vocabulary" in options:
            options["shared_vocabulary"] = options.pop("vocabulary") == "shared"
        made.append(options)
    return made


def drafter_configs(drafts: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The configs of workers.draft.config for such options."""
    from workers.draft.config import DrafterConfig

    configs = {config.kind: config for config in typing.get_args(DrafterConfig)}
    return tuple(
        configs[draft["kind"]](**{k: v for k, v in draft.items() if k != "kind"})
        for draft in drafts
    )


def _deployment(replica: type, max_ongoing_requests: int, **options: Any) -> Any:
    return serve.deployment(
        replica,
        max_ongoing_requests=max_ongoing_requests,
        health_check_period_s=2,
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=CoordinatorThresholds().request_limit_s,
        request_router_config=RequestRouterConfig(initial_backoff_s=0.01, max_backoff_s=0.05),
        **options,
    )
