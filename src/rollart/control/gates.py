"""The gates of mode `sync`: a barrier at every turn, and one before the rewards of a batch."""

import asyncio

from rollart.control.context import Context
from rollart.policy.barrier import TurnBarrier
from rollart.types.errors import EngineFault, RewardFault
from rollart.types.ids import TrajectoryId


class BarrierGate:
    """Barrier: the turns of a batch are taken together."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._barrier: TurnBarrier[TrajectoryId] = TurnBarrier()
        self._waiting: dict[TrajectoryId, asyncio.Future[None]] = {}

    def join(self, trajectory: TrajectoryId) -> None:
        self._barrier.join(trajectory)

    def arrive(self, trajectory: TrajectoryId) -> "asyncio.Future[None] | None":
        """Future that resolves when the barrier opens; None if the trajectory was the last to arrive."""
        future = self._waiting[trajectory] = self._context.loop.create_future()
        self._release(self._barrier.arrive(trajectory))
        return None if future.done() else future

    def leave(self, trajectory: TrajectoryId) -> None:
        self._waiting.pop(trajectory, None)
        self._release(self._barrier.leave(trajectory))

    async def wait(self, future: "asyncio.Future[None]", name: str) -> None:
        """Wait at the barrier. The other trajectories have their own deadlines; this one is a last resort."""
        tasks = self._context.config.tasks.values()
        limit_s = self._context.config.deadlines.turn_s + 2 * max(task.reset_deadline_s for task in tasks)
        await self._context.waits.wait(future, "the batch", f"{name} at the barrier", limit_s, "it ends", EngineFault)

    def _release(self, released: list[TrajectoryId]) -> None:
        for trajectory in released:
            future = self._waiting.pop(trajectory)
            if not future.done():
                future.set_result(None)
        self._context.accounts.at_barrier = self._barrier.waiting
        self._context.accounts.changed(self._context.now())


class RewardGate:
    """Gate: rewards are requested when the last episode of the batch is over."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: dict[TrajectoryId, asyncio.Future[None]] = {}

    def arrive(self, trajectory: TrajectoryId) -> "asyncio.Future[None]":
        future = self._waiting[trajectory] = self._context.loop.create_future()
        return future

    async def wait(self, future: "asyncio.Future[None]", name: str) -> None:
        """Wait for the gate. Running episodes have their own deadlines; this one is a last resort."""
        tasks = self._context.config.tasks.values()
        limit_s = max(task.share_deadline_s for task in tasks) + self._context.config.deadlines.turn_s
        await self._context.waits.wait(
            future, "the batch", f"{name}, for the end of rollout", limit_s, "it ends as reward_failed", RewardFault
        )

    def open(self) -> None:
        """Open the gate: all episodes of the batch have ended."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)
