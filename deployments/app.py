"""The application graph: Coordinator → Target, Coordinator → Draft.

`build` is what `deployments.yaml` names. Models run in the workers' own processes; their classes are
imported there, so this module and the coordinator need no torch.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deployments import grpc as grpc_door
from deployments.config import AppConfig, CoordinatorThresholds, WorkerThresholds
from deployments.coordinator import Coordinator as Core
from deployments.lease import WorkerPool
from deployments.openai.routes import make_app
from protos import inference_pb2 as pb
from workers.checkpoint import head_features
from workers.rpc.connection import DRAFT, TARGET

logger = logging.getLogger(__name__)


def _core() -> Core:
    """The coordinator of the replica that handles the current request."""
    return serve.get_replica_context().servable_object.core  # type: ignore[no-any-return]


http_app = make_app(_core)


@serve.ingress(http_app)
class Coordinator:
    """HTTP and gRPC ingress; runs the rounds of the answers that come in here."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], target: DeploymentHandle, draft: DeploymentHandle | None
    ) -> None:
        peer_id = serve.get_replica_context().replica_id.unique_id
        targets = WorkerPool(TARGET, target, peer_id)
        drafts = None if draft is None else WorkerPool(DRAFT, draft, peer_id)
        self.core = Core(AppConfig.model_validate(config), targets, drafts)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new thresholds."""
        self.core.thresholds = CoordinatorThresholds.model_validate(user_config)

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


class WorkerReplica:
    """A replica that runs one worker: Serve leases its sessions, the data plane carries them."""

    _worker: Any = None

    async def lease(self) -> AsyncIterator[tuple[str, str]]:
        """Yield (address, lease id) once, then hold the lease until it ends."""
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
            await self._worker.stop()


class Target(WorkerReplica):
    """One target worker."""

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        from workers.target.config import TargetConfig
        from workers.target.server import TargetWorker

        drafters = drafter_configs(config.pop("drafters"))
        self._worker = TargetWorker(TargetConfig(**config, drafters=drafters))
        await self._worker.start()


class Draft(WorkerReplica):
    """One draft worker."""

    async def __init__(self, drafts: list[dict[str, Any]], target: str) -> None:  # type: ignore[misc]
        from workers.draft.config import DraftConfig
        from workers.draft.server import DraftWorker

        self._worker = DraftWorker(DraftConfig(drafter_configs(drafts), target))
        await self._worker.start()


def build(args: AppConfig) -> serve.Application:
    """The application of one config; options of a deployment can be overridden in the YAML file.

    A worker's calls are its sessions: those that run and as many that wait. The coordinator takes more
    calls than all of them, because waiting and fairness belong to the target's scheduler.
    """
    sessions = 2 * args.target.max_num_seqs
    target = _deployment(Target, sessions, max_queued_requests=sessions).bind(target_options(args))
    draft = None
    drafters = drafter_options(args, "draft")
    if drafters:
        draft = _deployment(Draft, 2 * sessions).bind(drafters, args.target.model)
    return _deployment(Coordinator, 8 * sessions).bind(args.model_dump(), target, draft)


def target_options(args: AppConfig) -> dict[str, Any]:
    """The options of TargetConfig, with those of the drafters beside the target."""
    return {
        **args.target.model_dump(),
        "model_id": args.model_id,
        "max_draft_tokens": args.target.drafted_rows,
        "features": _features(args),
        "drafters": drafter_options(args, "target"),
    }


def _features(args: AppConfig) -> str | None:
    """What the drafters read of the target, if any does."""
    kinds = {head_features(draft.model) for draft in args.drafts if draft.kind == "eagle"}
    if len(kinds) > 1:
        raise ValueError("drafts: EAGLE and EAGLE-3 heads cannot read one target at once")
    return kinds.pop() if kinds else None


def drafter_options(args: AppConfig, placement: str) -> list[dict[str, Any]]:
    """The options of the drafters at a place, as the worker's config has them, and their kind."""
    made = []
    for draft in args.drafts:
        options = draft.model_dump()
        if options.pop("placement") != placement:
            continue
        if "vocabulary" in options:
            options["shared_vocabulary"] = options.pop("vocabulary") == "shared"
        made.append(options)
    return made


def drafter_configs(drafts: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The configs of workers.draft.config for such options."""
    from workers.draft.config import EagleConfig, LookupConfig, ModelConfig

    configs = {config.kind: config for config in (LookupConfig, ModelConfig, EagleConfig)}
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
