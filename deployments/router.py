"""Routes sessions to near workers: off unless a deployment's `request_router_config` names it.

request_router_config:
  request_router_class: deployments.router:NearRouter
  request_router_kwargs: {penalty: 4}
"""

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)


class NearRouter(FIFOMixin, LocalityMixin, RequestRouter):  # type: ignore[misc]
    """Prefers replicas on the caller's node: one elsewhere counts as if it held `penalty` sessions more."""

    def initialize_state(self, penalty: int) -> None:
        """See RequestRouter."""
        self._penalty = penalty

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All candidates, one after the other, the cheapest first; full ones are passed over."""

        def cost(replica: RunningReplica) -> int:
            sessions = self.replica_queue_len_cache.get(replica.replica_id) or 0
            far = bool(replica.node_id != self._self_node_id)
            return int(sessions) + self._penalty * far

        return [[replica] for replica in sorted(candidate_replicas, key=cost)]
