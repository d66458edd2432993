"""Prompts that wait for another group, by task: those that were lost to the staleness bound go first."""

from collections import deque
from collections.abc import Iterable

from rollart.types.trajectory import Ticket


class TicketQueue:
    """FIFO queues of tickets by task; tickets with losses take precedence."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._queues: dict[str, tuple[deque[Ticket], deque[Ticket]]] = {task: (deque(), deque()) for task in tasks}

    def clear(self) -> None:
        for queues in self._queues.values():
            for queue in queues:
                queue.clear()

    def put(self, ticket: Ticket) -> None:
        lost, others = self._queues[ticket.prompt.task]
        (lost if ticket.losses else others).append(ticket)

    def take(self, task: str) -> Ticket | None:
        """The next one, if any waits."""
        return next((queue.popleft() for queue in self._queues[task] if queue), None)
