"""The queue before the reward workers: slots are never overbooked, the oldest question goes first, nothing is lost."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollart.policy.reward_queue import RewardQueue
from rollart.types.ids import WorkerId

A, B = WorkerId("reward/a"), WorkerId("reward/b")


def queue(**slots: int) -> RewardQueue:
    made = RewardQueue()
    for name, count in slots.items():
        assert made.join(WorkerId(f"reward/{name}"), count, ()) == []
    return made


def test_a_question_goes_to_the_least_loaded_worker() -> None:
    made = queue(a=2, b=4)
    assert [made.ask(key, "maze") for key in "uvwxyz"] == [A, B, B, A, B, B]


def test_a_worker_holds_no_more_than_its_slots() -> None:
    made = queue(a=2)
    assert [made.ask(key, "maze") for key in "xyz"] == [A, A, None]
    assert made.free(A, "y") == "z"
    assert made.free(A, "x") is None


def test_the_oldest_question_gets_the_next_slot_whatever_its_task() -> None:
    made = queue(a=1)
    made.ask("running", "maze")
    for key, task in (("first", "math"), ("second", "maze"), ("third", "math")):
        assert made.ask(key, task) is None
    assert [made.free(A, key) for key in ("running", "first", "second", "third")] == ["first", "second", "third", None]


def test_a_retried_question_keeps_its_age() -> None:
    made = queue(a=1)
    assert made.ask("old", "maze") == A
    assert made.ask("young", "maze") is None
    assert made.free(A, "old") == "young"
    assert made.ask("younger", "maze") is None
    assert made.ask("old", "maze") is None
    assert made.free(A, "young") == "old"


def test_a_forgotten_question_leaves_the_queue_and_keeps_its_slot() -> None:
    made = queue(a=1)
    for key in ("running", "unwanted", "wanted"):
        made.ask(key, "maze")
    made.forget("unwanted")
    made.forget("running")
    assert made.ask("later", "maze") is None, "the worker still computes a cancelled request"
    assert made.free(A, "running") == "wanted"


def test_a_worker_scores_its_own_rewards_only() -> None:
    made = RewardQueue()
    made.join(A, 1, ("maze",))
    assert made.ask("sum", "math") is None
    assert made.ask("walk", "maze") == A
    assert made.free(A, "walk") is None
    assert made.join(B, 1, ("math", "maze")) == ["sum"]


def test_a_worker_that_joins_gets_what_waits() -> None:
    made = queue()
    assert [made.ask(key, "maze") for key in "xyz"] == [None, None, None]
    assert made.join(A, 2, ()) == ["x", "y"]
    assert made.free(A, "x") == "z"


def test_a_worker_that_leaves_gives_its_questions_back() -> None:
    made = queue(a=2, b=1)
    for key in "xyz":
        made.ask(key, "maze")
    assert made.leave(A) == ["x", "z"]
    assert made.ask("x", "maze") is None
    assert made.free(B, "y") == "x"
    assert made.leave(A) == []


def test_an_answer_that_comes_twice_frees_one_slot() -> None:
    made = queue(a=1)
    for key in "xyz":
        made.ask(key, "maze")
    assert made.free(A, "x") == "y"
    assert made.free(A, "x") is None
    assert made.free(B, "y") is None, "not the worker that holds it"
    assert made.ask("w", "maze") is None


def test_questions_that_are_settled_leave_nothing_behind() -> None:
    made = queue(a=1)
    for index in range(100):
        made.ask(f"q{index}", "maze")
    for index in range(100):
        assert made.free(A, f"q{index}") == (f"q{index + 1}" if index < 99 else None)
        made.forget(f"q{index}")
    assert (made._ages, made._waiting, made._heaps) == ({}, {}, {"maze": []})


TASKS = ("maze", "math", "code")


class Queues(RuleBasedStateMachine):
    """Against a model that searches through everything."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RewardQueue()
        self.workers: dict[WorkerId, tuple[int, tuple[str, ...]]] = {}
        self.held: dict[WorkerId, list[str]] = {}
        self.tasks: dict[str, str] = {}
        self.waiting: list[str] = []
        """By age."""
        self.asked = 0
        self.joined = 0

    def able(self, worker: WorkerId, task: str) -> bool:
        tasks = self.workers[worker][1]
        return not tasks or task in tasks

    def expected(self, worker: WorkerId) -> str | None:
        """What the model gives to a worker with a free slot."""
        if len(self.held[worker]) >= self.workers[worker][0]:
            return None
        return next((key for key in self.waiting if self.able(worker, self.tasks[key])), None)

    def given(self, worker: WorkerId, key: str) -> None:
        self.waiting.remove(key)
        self.held[worker].append(key)

    @rule(slots=st.integers(1, 3), rewards=st.lists(st.sampled_from(TASKS), unique=True))
    def join(self, slots: int, rewards: list[str]) -> None:
        worker = WorkerId(f"reward/{self.joined}")
        self.joined += 1
        self.workers[worker], self.held[worker] = (slots, tuple(rewards)), []
        for key in self.queue.join(worker, slots, rewards):
            assert key == self.expected(worker)
            self.given(worker, key)
        assert self.expected(worker) is None

    @rule(task=st.sampled_from(TASKS))
    def ask(self, task: str) -> None:
        key = f"q{self.asked:04}"
        self.asked += 1
        self.put(key, task)

    def put(self, key: str, task: str) -> None:
        self.tasks[key] = task
        worker = self.queue.ask(key, task)
        if worker is None:
            self.waiting = sorted([*self.waiting, key])
            return
        assert self.able(worker, task)
        loads = {w: len(self.held[w]) / self.workers[w][0] for w in self.workers if self.able(w, task)}
        assert loads[worker] == min(loads.values()) < 1.0
        self.held[worker].append(key)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), retry=st.booleans())
    def free(self, data: Any, retry: bool) -> None:
        worker = data.draw(st.sampled_from([worker for worker, keys in self.held.items() if keys]))
        key = data.draw(st.sampled_from(self.held[worker]))
        self.held[worker].remove(key)
        expected = self.expected(worker)
        assert self.queue.free(worker, key) == expected
        if expected is not None:
            self.given(worker, expected)
        if retry and key in self.tasks:
            self.put(key, self.tasks[key])

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.tasks)))
        del self.tasks[key]
        self.queue.forget(key)
        if key in self.waiting:
            self.waiting.remove(key)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        assert self.queue.leave(worker) == self.held.pop(worker)
        del self.workers[worker]

    @invariant()
    def slots_are_never_overbooked_and_nothing_waits_for_a_free_one(self) -> None:
        for worker, (slots, _) in self.workers.items():
            assert len(self.held[worker]) <= slots
            assert self.expected(worker) is None


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
