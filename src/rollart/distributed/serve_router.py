"""The Serve deployment of a platform. Imports Serve, so it is imported late.

Serve's own router picks two replicas at random and waits if both are busy. With one call per replica at a time that
leaves free replicas idle while calls wait. This one looks at all of them: a call goes to any replica that is free.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from rollart.distributed import serve_platform

if TYPE_CHECKING:
    from rollart.distributed.serve_platform import PlatformSettings


class FreeReplicaRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve has no types
    """Any replica that is free, in the order in which calls came."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002 - all calls are alike
    ) -> list[list[RunningReplica]]:
        # Where none is known to be free, all are asked: what is known may be out of date.
        return [self.select_available_replicas(candidate_replicas) or candidate_replicas]


def deployment(factory: str, arguments: Mapping[str, Any], settings: "PlatformSettings") -> Any:
    """One object of the factory per replica, one call per replica at a time, from zero replicas on."""
    made = serve.deployment(
        serve_platform.Replica,
        name="function",
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": settings.cpus},
        graceful_shutdown_timeout_s=serve_platform.DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(
            request_router_class=FreeReplicaRouter,
            initial_backoff_s=serve_platform.BACKOFF_S,
            max_backoff_s=serve_platform.MAX_BACKOFF_S,
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=0,
            initial_replicas=0,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=1,
            upscale_delay_s=0,
            downscale_delay_s=settings.idle_s,
            metrics_interval_s=serve_platform.METRICS_S,
            look_back_period_s=serve_platform.LOOK_BACK_S,
        ),
    )
    return made.bind(factory, dict(arguments))
