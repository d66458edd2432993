"""Reward dispatch under load: a worker gets what it can answer at once, and a deadline is for the answer alone."""

from collections import Counter
from collections.abc import Sequence

from audit import completed
from worlds import Commands, Events, Kill, Ran, run, world

from rollart.types.ids import WorkerId
from rollart.types.journal import PoolTime, RewardArrived, TrajectoryEnded
from rollart.types.messages import Scored, ScoreRequest
from rollart.types.trajectory import Outcome

ONE_SLOT = ("sim.reward.slots=1", "sim.tasks.game.reward_s=0.5", "deadlines.reward_s=1")


def outcomes(ran: Ran) -> Counter[Outcome]:
    return Counter(end.outcome for end in ran.of(TrajectoryEnded))


def test_the_wait_in_the_queue_does_not_count_against_the_deadline_of_an_answer() -> None:
    """32 questions at once for one slot: the last answer comes after all the time that five attempts would have."""
    ran = run(world("mode=sync", *ONE_SLOT, "batch.trajectories=32"))
    completed(ran)
    assert outcomes(ran) == {Outcome.COMPLETED: 4 * 32}


def test_a_worker_holds_no_more_questions_than_it_has_slots() -> None:
    held: Counter[WorkerId] = Counter()
    most = 0

    def asked(worker: WorkerId, command: ScoreRequest, _: int) -> Sequence[ScoreRequest]:
        nonlocal most
        held[worker] += 1
        most = max(most, held[worker])
        return (command,)

    def answered(worker: WorkerId, event: Scored, _: int) -> Sequence[Scored]:
        held[worker] -= 1
        return (event,)

    settings = ("mode=sync_plus", "reward_workers=2", "sim.reward.slots=2", "sim.tasks.game.reward_s=0.5")
    ran = run(world(*settings), Commands("reward", ScoreRequest, asked), Events("reward", Scored, answered))
    completed(ran)
    assert most == 2


def test_the_reward_pool_is_never_busier_than_it_is_large() -> None:
    ran = run(world("mode=sync_plus", "sim.reward.serverless=false", *ONE_SLOT, "batch.extra_members=1"))
    completed(ran)
    before = 0.0
    for event in ran.of(PoolTime):
        if event.pool == "reward":
            assert sum(event.seconds.values()) <= event.at - before + 1e-6
            before = event.at


def test_questions_wait_for_a_worker_that_is_restarted() -> None:
    ran = run(world("mode=sync", *ONE_SLOT), Kill("reward/0", 3.0))
    completed(ran)
    assert outcomes(ran) == {Outcome.COMPLETED: 4 * 8}
    assert len({arrived.trajectory for arrived in ran.of(RewardArrived)}) == 4 * 8
