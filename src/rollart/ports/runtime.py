"""The Runtime port: the only component that starts and stops workers.

Workers are given by a factory path (`package.module:callable`), so that another process can build them. Commands posted
in one pass of the event loop are sent together; events come back in batches.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollart.types.errors import RuntimeLost
from rollart.types.ids import WorkerId
from rollart.types.messages import Role, WorkerCommand, WorkerEvent, WorkerInfo
from rollart.types.placement import NOTHING, Needs, Node


class Listener(Protocol):
    """Observer of workers. Always called on the controller's event loop, never from inside a Runtime call."""

    def nodes_seen(self, nodes: Sequence[Node]) -> None:
        """The current nodes: called periodically, and soon after a change.

        Only from runtimes with several nodes.
        """
        ...

    def waits(self, worker: WorkerId, why: str) -> None:
        """No node has room for the worker; it is placed as soon as one has. Again when the reason changes.

        Only from runtimes with several nodes, and before `placed`.
        """
        ...

    def placed(self, worker: WorkerId, node: str, why: str) -> None:
        """The worker starts on this node; `why` says why it is not of the preferred kind. Once, before `joined`.

        Only from runtimes with several nodes.
        """
        ...

    def leaves(self, worker: WorkerId, why: str) -> None:
        """The worker should leave its node, because it drains or a better one has room: finish its work and `stop` it.

        Once per worker. Only from runtimes with several nodes, and between `placed` and `died`.
        """
        ...

    def joined(self, worker: WorkerId, info: WorkerInfo) -> None:
        """The worker is built and accepts commands. The first call for a worker, unless it dies before."""
        ...

    def events(self, worker: WorkerId, events: Sequence[WorkerEvent]) -> None:
        """Events in the order in which the worker returned them."""
        ...

    def died(self, worker: WorkerId, reason: str) -> None:
        """The worker died; the last call for it. Not called for a worker that was stopped."""
        ...

    def failed(self, error: RuntimeLost) -> None:
        """The runtime itself is lost, and every worker with it. The last call of all; no `died` follows."""
        ...


class Runtime(Protocol):
    """Host of workers. A worker that raises is dead; other workers are not affected.

    After `Listener.failed` every call but `close` has no effect.
    """

    def listen(self, listener: Listener) -> None:
        """Set the listener; once, before the first `spawn`."""
        ...

    def spawn(
        self,
        worker: WorkerId,
        role: Role,
        factory: str,
        settings: Mapping[str, Any],
        *,
        python: str = "",
        needs: Needs = NOTHING,
    ) -> None:
        """Start a worker; `joined` or `died` follows, the latter also for a bad factory path.

        `needs` is what it reserves of its node; a runtime without nodes to choose from reserves nothing.

        The id must be new: a used one raises `InvariantBroken`. `python` is the path of the interpreter to run it
        with, by default the controller's; a runtime whose workers are not processes raises `RequestError`.
        """
        ...

    def post(self, worker: WorkerId, commands: Sequence[WorkerCommand]) -> None:
        """Send commands, in order. No effect on a worker that is gone (`died` was or will be called)."""
        ...

    def stop(self, worker: WorkerId) -> None:
        """End a worker; the listener is not called for it any more. No effect on a worker that is gone."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...
