"""Prompts that wait: in order, those with losses first."""

from rollart.policy.tickets import TicketQueue
from rollart.types.ids import PromptId
from rollart.types.trajectory import Prompt, Ticket


def ticket(number: int, task: str = "maze", losses: int = 0) -> Ticket:
    return Ticket(number, Prompt(PromptId(str(number)), task, number), losses=losses)


def drain(queue: TicketQueue, task: str = "maze") -> list[int]:
    taken = []
    while (found := queue.take(task)) is not None:
        taken.append(found.number)
    return taken


def test_tickets_with_losses_go_first_each_in_the_order_of_their_arrival() -> None:
    queue = TicketQueue(["maze", "math"])
    for number, losses in ((1, 0), (2, 1), (3, 0), (4, 2)):
        queue.put(ticket(number, losses=losses))
    assert drain(queue) == [2, 4, 1, 3]
    assert queue.take("maze") is None


def test_tasks_have_queues_of_their_own() -> None:
    queue = TicketQueue(["maze", "math"])
    queue.put(ticket(1))
    queue.put(ticket(2, "math", losses=1))
    assert drain(queue) == [1]
    assert drain(queue, "math") == [2]


def test_a_cleared_queue_is_empty() -> None:
    queue = TicketQueue(["maze"])
    queue.put(ticket(1))
    queue.put(ticket(2, losses=1))
    queue.clear()
    assert drain(queue) == []
