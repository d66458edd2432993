"""Several rewards and rewards of groups: what is asked, when, of whom, and what is trained in the end.

Simulated functions (`sim.reward`): a reward is the sum of the turns' rewards, 1 for a solved episode and 0 otherwise;
one that sees the group gives how much that is above the mean of the group.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from audit import completed
from worlds import Commands, Events, Kill, Ran, Rule, run, world

from rollart.types.ids import GroupId, TrajectoryId, WorkerId
from rollart.types.journal import (
    BatchClaimed,
    EvalEnded,
    GroupEnded,
    GroupOpened,
    RewardArrived,
    RewardFailed,
    RewardGiven,
    RunStarted,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollart.types.messages import Scored, ScoreFailed, ScoreRequest, Train, WorkerEvent
from rollart.types.rewards import RewardRule
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose, TrainSample

BOTH = ('tasks.game.rewards=[{name="own"}, {name="best", weight=0.5}]', 'sim.tasks.game.group_rewards=["best"]')
"""A reward of its own, and half of one that compares the group."""
MODES = ("sync", "sync_plus", "one_off", "areal", "rollart")


def trained_samples(*assignments: str, rules: Sequence[Rule] = ()) -> tuple[Ran, list[TrainSample]]:
    samples: list[TrainSample] = []

    def keep(_: WorkerId, command: Train, __: int) -> Sequence[Train]:
        samples.extend(command.samples)
        return (command,)

    ran = run(world(*assignments), *rules, Commands("trainer", Train, keep))
    return ran, samples


def requests(*assignments: str, rules: Sequence[Rule] = ()) -> tuple[Ran, list[ScoreRequest]]:
    asked: list[ScoreRequest] = []

    def keep(_: WorkerId, command: ScoreRequest, __: int) -> Sequence[ScoreRequest]:
        asked.append(command)
        return (command,)

    return run(world(*assignments), *rules, Commands("reward", ScoreRequest, keep)), asked


def members_of(ran: Ran) -> dict[GroupId, list[TrajectoryId]]:
    members: defaultdict[GroupId, list[TrajectoryId]] = defaultdict(list)
    for started in ran.of(TrajectoryStarted):
        members[started.group].append(started.trajectory)
    return members


def group_of(ran: Ran) -> dict[TrajectoryId, GroupId]:
    return {started.trajectory: started.group for started in ran.of(TrajectoryStarted)}


def scripted(values: Sequence[float]) -> Rule:
    """The own rewards, by member: what the environment would have given is not looked at."""

    def answer(_: WorkerId, event: Scored, __: int) -> Sequence[Scored]:
        if event.key.startswith("t"):
            member = int(event.key.partition("/")[0][1:]) % len(values)
            return (Scored(event.key, (values[member],)),)
        return (Scored(event.key, tuple(10.0 * index for index in range(len(event.values)))),)

    return Events("reward", Scored, answer)


def test_hand_computed_rewards_and_advantages() -> None:
    """One group of four per batch. Own rewards 1, 0, 0, 1 by trajectory; of the group 0, 10, 20, 30 by member, halved.

    The rewards are 1, 5, 10 and 16 with a mean of 8; without a standard deviation the advantages are -7, -3, 2 and 8.
    """
    ran, samples = trained_samples(
        *BOTH,
        "batch.trajectories=4",
        "batch.extra_members=0",
        "mode=sync_plus",
        "steps=1",
        "algorithm.advantage=dr_grpo",
        rules=[scripted([1.0, 0.0, 0.0, 1.0])],
    )
    completed(ran)
    by_number = sorted(samples, key=lambda sample: sample.trajectory)
    assert [sample.reward for sample in by_number] == [1.0, 5.0, 10.0, 16.0]
    assert [{turn.advantage for turn in sample.turns} for sample in by_number] == [{-7.0}, {-3.0}, {2.0}, {8.0}]
    for sample in by_number:
        assert math.fsum(turn.reward for turn in sample.turns) == sample.reward


@pytest.mark.parametrize("mode", MODES)
def test_every_trained_member_was_compared_with_exactly_those_that_it_is_trained_with(mode: str) -> None:
    ran = run(world(f"mode={mode}", *BOTH, "batch.extra_members=2", "tasks.game.environments=24", "steps=6"))
    completed(ran)
    compared = {
        id: set(event.trajectories)
        for event in ran.of(RewardGiven)
        if event.name == "best"
        for id in event.trajectories
    }
    owner = group_of(ran)
    for claim in ran.of(BatchClaimed):
        for group in claim.groups:
            members = {id for id in claim.trajectories if owner[id] == group}
            assert all(compared[id] == members for id in members)


def test_the_reward_is_the_weighted_sum_and_every_part_is_given_once() -> None:
    ran = run(world(*BOTH, 'sim.tasks.game.part_rewards=["own"]'))
    completed(ran)
    given: Counter[tuple[str, TrajectoryId]] = Counter()
    values: dict[tuple[str, TrajectoryId], float] = {}
    for event in ran.of(RewardGiven):
        for id, value in zip(event.trajectories, event.values, strict=True):
            given[event.name, id] += 1
            values[event.name, id] = value
        for value, parts in zip(event.values, event.parts, strict=False):
            assert math.fsum(parts.values()) == value
    assert set(given.values()) == {1}
    for arrived in ran.of(RewardArrived):
        id = arrived.trajectory
        assert arrived.value == math.fsum([values["own", id], 0.5 * values["best", id]])
    (started,) = ran.of(RunStarted)
    own, best = (RewardRule("own"), RewardRule("best", 0.5, group=True))
    assert [(rule.name, rule.weight, rule.group) for rule in started.rewards["game"]] == [
        (rule.name, rule.weight, rule.group) for rule in (own, best)
    ]


def test_a_group_is_asked_for_once_when_its_last_promised_member_has_its_own_rewards() -> None:
    ran, asked = requests("mode=sync_plus", *BOTH, "batch.extra_members=0")
    completed(ran)
    of_groups = [request for request in asked if request.reward == "best"]
    assert len({request.key for request in of_groups}) == len(of_groups), "each once"
    members = members_of(ran)
    numbers = {started.trajectory: started.member for started in ran.of(TrajectoryStarted)}
    owner = group_of(ran)
    for request in of_groups:
        ids = [episode.trajectory for episode in request.episodes]
        assert sorted(ids) == members[owner[ids[0]]], "all of its members"
        assert [numbers[id] for id in ids] == sorted(numbers[id] for id in ids), "in the order of their numbers"


@pytest.mark.parametrize("mode", ["sync_plus", "rollart"])
def test_members_that_still_run_when_their_group_is_compared_are_redundant(mode: str) -> None:
    ran = run(world(f"mode={mode}", *BOTH, "batch.extra_members=2", "tasks.game.environments=24"))
    completed(ran)
    late = [end for end in ran.of(TrajectoryEnded) if end.cause == "its group is judged without it"]
    assert late
    assert {end.outcome for end in late} == {Outcome.REDUNDANT}
    assert all(end.reward is None for end in late)


class FailsGroups(Rule):
    """The first requests for a group's reward fail, for good or not."""

    def __init__(self, count: int, *, retry: bool) -> None:
        self.left = count
        self._retry = retry

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:  # noqa: ARG002
        if isinstance(event, Scored) and event.key.startswith("g") and self.left:
            self.left -= 1
            return ((0.0, ScoreFailed(event.key, "the judge is drunk", self._retry)),)
        return ((0.0, event),)


def test_a_group_whose_reward_fails_for_good_loses_its_members_and_starts_others() -> None:
    ran = run(world("mode=sync_plus", *BOTH, "batch.extra_members=0"), FailsGroups(2, retry=False))
    completed(ran)
    failed = [end for end in ran.of(TrajectoryEnded) if end.outcome is Outcome.REWARD_FAILED]
    assert len(failed) == 2 * 4
    assert all(end.reward is None for end in failed), "never 0"
    owner = group_of(ran)
    outcomes = {event.group: event.outcome for event in ran.of(GroupEnded)}
    assert {outcomes[owner[end.trajectory]] for end in failed} == {GroupOutcome.TRAINED}, "with other members"
    assert len(ran.of(RewardFailed)) == 2


def test_a_group_whose_reward_fails_at_every_attempt_is_given_up() -> None:
    """As with any other failure: after more than twice its size, and two, of them."""
    one_group = ("mode=sync", "batch.trajectories=4", "batch.extra_members=0")
    ran = run(world(*one_group, *BOTH), FailsGroups(3, retry=False))
    completed(ran)
    (failed,) = [event for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.FAILED]
    assert "the judge is drunk" in failed.cause
    assert failed.requeued


def test_a_retried_group_reward_is_counted_once() -> None:
    ran, asked = requests("mode=sync_plus", *BOTH, rules=[FailsGroups(3, retry=True)])
    completed(ran)
    assert Counter(end.outcome for end in ran.of(TrajectoryEnded))[Outcome.REWARD_FAILED] == 0
    repeated = [key for key, count in Counter(request.key for request in asked).items() if count > 1]
    assert repeated
    first, again = ([request for request in asked if request.key == repeated[0]])[:2]
    assert first == again, "the same transcripts"


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_reward_worker_loses_no_transcript(mode: str) -> None:
    ran = run(world(f"mode={mode}", *BOTH, "sim.tasks.game.reward_s=0.5"), Kill("reward/0", 1.2))
    completed(ran)
    assert ran.killed
    assert Outcome.REWARD_FAILED not in {end.outcome for end in ran.of(TrajectoryEnded)}


DEFAULTED = (
    'tasks.game.rewards=[{name="own"}, {name="style", weight=2, default=0.25}, {name="best", default=-1}]',
    'sim.tasks.game.group_rewards=["best"]',
)


def test_a_reward_that_fails_has_its_default_and_it_shows() -> None:
    def refuse(_: WorkerId, event: Scored, number: int) -> Sequence[Scored | ScoreFailed]:
        if event.key.endswith(("/style", "/best")) and number % 3 == 0:
            return (ScoreFailed(event.key, "no style", retry=False),)
        return (event,)

    ran = run(world("mode=sync_plus", *DEFAULTED), Events("reward", Scored, refuse))
    completed(ran)
    defaulted = {
        (event.name, id): value
        for event in ran.of(RewardGiven)
        if event.defaulted
        for id, value in zip(event.trajectories, event.values, strict=True)
    }
    failed = {(event.name, id) for event in ran.of(RewardFailed) for id in event.trajectories}
    assert {name for name, _ in defaulted} == {"style", "best"}
    assert set(defaulted) == failed
    assert all(value == (0.25 if name == "style" else -1.0) for (name, _), value in defaulted.items())
    given = {
        (event.name, id): value
        for event in ran.of(RewardGiven)
        for id, value in zip(event.trajectories, event.values, strict=True)
    }
    for arrived in ran.of(RewardArrived):
        own, style, best = (given[name, arrived.trajectory] for name in ("own", "style", "best"))
        assert arrived.value == math.fsum([own, 2 * style, best])


def test_a_reward_without_a_default_fails_its_trajectory_and_asks_for_no_other() -> None:
    def refuse(_: WorkerId, event: Scored, __: int) -> Sequence[Scored | ScoreFailed]:
        return (ScoreFailed(event.key, "no", retry=False),) if event.key == "t2/own" else (event,)

    ran = run(world("mode=sync_plus", *DEFAULTED), Events("reward", Scored, refuse))
    completed(ran)
    (end,) = [end for end in ran.of(TrajectoryEnded) if end.trajectory == 2]
    assert (end.outcome, end.reward) == (Outcome.REWARD_FAILED, None)
    assert 2 not in [id for event in ran.of(RewardGiven) if event.name == "best" for id in event.trajectories]


@pytest.mark.parametrize("bad", [(1.0,), (1.0, 2.0, 3.0, math.inf), (1.0, 2.0, 3.0, True), (1.0,) * 5])
def test_an_answer_that_does_not_fit_its_group_is_no_reward(bad: tuple[float, ...]) -> None:
    once = [True]

    def wrong(_: WorkerId, event: Scored, __: int) -> Sequence[Scored]:
        if event.key.startswith("g") and once:
            once.pop()
            return (Scored(event.key, bad),)
        return (event,)

    ran = run(world("mode=sync_plus", *BOTH, "batch.extra_members=0"), Events("reward", Scored, wrong))
    completed(ran)
    assert Counter(end.outcome for end in ran.of(TrajectoryEnded))[Outcome.REWARD_FAILED] == 4


def test_a_held_out_episode_is_compared_with_itself_alone() -> None:
    ran = run(world(*BOTH, "eval_every=2", "tasks.game.eval_episodes=3"))
    completed(ran)
    held_out = {event.group for event in ran.of(GroupOpened) if event.purpose is Purpose.EVAL}
    owner = group_of(ran)
    alone = [
        event for event in ran.of(RewardGiven) if event.name == "best" and owner[event.trajectories[0]] in held_out
    ]
    assert alone
    assert all(event.values == (0.0,) for event in alone)
    assert all(event.scored == event.episodes for event in ran.of(EvalEnded))


def test_groups_at_their_last_chance_are_compared_before_the_claim_and_may_be_short() -> None:
    """With members that hang, whole groups are late: at their last chance those that have finished are compared."""
    slow = 'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.03, tail=3.0}'
    ran = run(world("mode=rollart", *BOTH, "steps=12", "pools.wide.engines=4", slow, "batch.replace_late=false"))
    completed(ran)
    owner = group_of(ran)
    sizes = Counter(
        Counter(owner[id] for id in claim.trajectories)[group]
        for claim in ran.of(BatchClaimed)
        for group in claim.groups
    )
    assert set(sizes) <= {2, 3, 4, 5}
    assert sizes[2] + sizes[3]


@pytest.mark.parametrize("mode", MODES)
def test_filtered_groups_are_those_without_a_difference_in_the_sum(mode: str) -> None:
    ran = run(world(f"mode={mode}", *BOTH, "algorithm.filter_zero_variance=true"))
    completed(ran)
    rewards = {end.trajectory: end.reward for end in ran.of(TrajectoryEnded) if end.outcome in TRAINABLE}
    members = members_of(ran)
    for event in ran.of(GroupEnded):
        values = {rewards[id] for id in members[event.group] if id in rewards}
        if event.outcome is GroupOutcome.TRAINED:
            assert len(values) > 1
        elif event.outcome is GroupOutcome.FILTERED:
            assert len(values) == 1
