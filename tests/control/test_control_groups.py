"""Groups and prompts: redundancy, filters, failures, staleness, and what happens to a prompt afterwards."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from audit import completed
from worlds import SNAIL, Ran, Rule, run, two_tasks, world

from rollart.observe.report import make_report
from rollart.policy.groups import MAX_PROMPT_ATTEMPTS
from rollart.types.ids import PromptId, TrajectoryId, WorkerId
from rollart.types.journal import (
    BatchClaimed,
    GroupEnded,
    GroupOpened,
    RedundancyChanged,
    TrajectoryEnded,
    TrajectoryStarted,
    WeightsSynced,
)
from rollart.types.messages import EnvironmentFailed, Observed, Reset, WorkerCommand, WorkerEvent
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome


def group_outcomes(ran: Ran) -> Counter[GroupOutcome]:
    return Counter(event.outcome for event in ran.of(GroupEnded))


def outcomes(ran: Ran) -> Counter[Outcome]:
    return Counter(event.outcome for event in ran.of(TrajectoryEnded))


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "areal", "rollart"])
def test_extra_members_are_trained_if_they_finish_before_the_claim_and_redundant_otherwise(mode: str) -> None:
    ran = run(world(f"mode={mode}", "batch.extra_members=2", "tasks.game.environments=24"))
    completed(ran)
    group_of = {event.trajectory: event.group for event in ran.of(TrajectoryStarted)}
    results: defaultdict[int, list[TrajectoryId]] = defaultdict(list)
    for event in ran.events:
        if isinstance(event, TrajectoryEnded) and event.outcome in TRAINABLE:
            results[group_of[event.trajectory]].append(event.trajectory)
        elif isinstance(event, BatchClaimed):
            assert list(event.trajectories) == [id for group in event.groups for id in results[group]]
    sizes = Counter(len(results[group]) for claim in ran.of(BatchClaimed) for group in claim.groups)
    assert set(sizes) <= {4, 5, 6}
    if mode != "sync":  # rewards come after the last episode there, of all members at once
        assert outcomes(ran)[Outcome.REDUNDANT]
        assert sizes[4]


def test_extra_groups_are_redundant_and_their_prompts_come_again() -> None:
    ran = run(world("mode=sync_plus", "batch.extra_groups=1", "tasks.game.environments=24", "steps=6"))
    completed(ran)
    redundant = [event for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.REDUNDANT]
    assert redundant
    assert all(event.requeued for event in redundant)
    assert any(event.attempt for event in ran.of(GroupOpened))
    report = make_report(ran.events)
    assert report.wasted_tokens["redundant"] > 0


class BadPrompt(Rule):
    """Environments that are reset with one of these prompts fail."""

    def __init__(self, *prompts: str) -> None:
        self._bad = {PromptId(prompt) for prompt in prompts}
        self._episodes: set[TrajectoryId] = set()

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        if isinstance(command, Reset) and command.prompt.id in self._bad:
            self._episodes.add(command.episode)
        return super().command(worker, command)

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        if isinstance(event, Observed) and event.episode in self._episodes:
            return ((0.0, EnvironmentFailed(event.episode, event.turn, "the prompt breaks it")),)
        return super().event(worker, event)


@pytest.mark.parametrize("mode", ["sync", "one_off", "rollart"])
def test_a_prompt_whose_groups_fail_is_tried_a_few_times_and_set_aside(mode: str) -> None:
    ran = run(world(f"mode={mode}", "tasks.game.environments=60", "steps=20"), BadPrompt("game-1"))
    completed(ran)
    bad = {event.group: event.attempt for event in ran.of(GroupOpened) if event.prompt == "game-1"}
    ends = [event for event in ran.of(GroupEnded) if event.group in bad]
    assert [event.outcome for event in ends] == [GroupOutcome.FAILED] * MAX_PROMPT_ATTEMPTS
    assert [event.requeued for event in ends] == [True] * (MAX_PROMPT_ATTEMPTS - 1) + [False]
    members = [event.member for event in ran.of(TrajectoryStarted) if event.group in bad]
    assert len(members) == len(set(members)), "a replacement is a new sample, never the same failure again"


def test_an_agent_without_room_for_a_token_is_nothing_to_train_and_no_crash() -> None:
    """Prompts as long as the context: truncated before the first turn, so the group has no token."""
    ran = run(
        world(
            "tasks.game.max_context=300", 'sim.tasks.game.prompt_tokens={kind="uniform", low=100, high=500}', "steps=6"
        )
    )
    completed(ran)
    tokenless = [end for end in ran.of(TrajectoryEnded) if end.outcome is Outcome.TRUNCATED and not end.turns]
    assert tokenless
    assert group_outcomes(ran)[GroupOutcome.FILTERED]


def test_limits_of_the_agent_are_a_result() -> None:
    ran = run(world("tasks.game.max_turns=2"))
    completed(ran)
    assert outcomes(ran)[Outcome.TRUNCATED]
    assert all(end.reward is not None for end in ran.of(TrajectoryEnded) if end.outcome is Outcome.TRUNCATED)


SLOW_MEMBERS = (
    "mode=rollart",
    "steps=10",
    "pools.wide.engines=4",
    'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.03, tail=3.0}',
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0, 1])
def test_a_slow_member_does_not_cost_the_others(alpha: int, seed: int) -> None:
    """Its group is trained without it, or with one that replaced it."""
    ran = run(world(*SLOW_MEMBERS, f"alpha={alpha}", f"seed={seed}", "tasks.game.environments=32", "steps=40"))
    completed(ran)
    ended = group_outcomes(ran)
    assert ended[GroupOutcome.STALE] <= 0.02 * ended[GroupOutcome.TRAINED]
    assert all(not claim.masked for claim in ran.of(BatchClaimed))


@pytest.mark.parametrize("seed", range(3))
def test_a_late_member_is_replaced_in_time(seed: int) -> None:
    """With steps of two seconds, one that hangs for thirty would miss the bound."""
    slow = (f"sim.hardware.snail={SNAIL}", 'sim.trainer.hardware="snail"', "steps=15", "tasks.game.environments=32")
    hang = 'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.03, tail=30.0}'
    ran = run(world(*SLOW_MEMBERS, *slow, hang, "alpha=1", f"seed={seed}", "batch.extra_members=0"))
    completed(ran)
    replaced = [end for end in ran.of(TrajectoryEnded) if end.cause.startswith("replaced")]
    assert replaced
    assert all(end.outcome is Outcome.STALE for end in replaced)
    assert group_outcomes(ran)[GroupOutcome.STALE] == 0
    sizes = sizes_of_groups(ran)
    assert sizes[4] > 5 * sizes[3], "most groups are whole in time"


def sizes_of_groups(ran: Ran) -> Counter[int]:
    group_of = {event.trajectory: event.group for event in ran.of(TrajectoryStarted)}
    members = Counter(group_of[id] for claim in ran.of(BatchClaimed) for id in claim.trajectories)
    return Counter(members.values())


def test_a_group_at_its_last_chance_is_trained_with_the_results_it_has() -> None:
    settings = (*SLOW_MEMBERS, "alpha=0", "tasks.game.environments=32", "batch.extra_members=0", "steps=30")
    sizes = sizes_of_groups(run(world(*settings)))
    assert set(sizes) <= {2, 3, 4}
    assert sizes[3]
    assert sizes[4] > sizes[3] + sizes[2]
    whole = run(world(*settings, "batch.min_group_size=4"))
    completed(whole)
    assert set(sizes_of_groups(whole)) == {4}


ALL_OR_NOTHING = ("batch.min_group_size=4", "batch.extra_members=0", 'tasks.game.stale="mask"')
"""Without any of what prevents it, groups become stale."""


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_became_stale_goes_first_and_then_gets_a_bound_of_its_own(seed: int) -> None:
    slow = 'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.06, tail=3.0}'
    settings = (*SLOW_MEMBERS, slow, "alpha=1", f"seed={seed}", "tasks.game.environments=32", *ALL_OR_NOTHING)
    ran = run(world(*settings, "tasks.game.stale_retries=1", "tasks.game.late_alpha=20", "steps=20"))
    completed(ran)  # the audit checks precedence, the number of losses and both bounds
    stale = [event.group for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.STALE]
    assert stale
    tickets = {event.group: event.ticket for event in ran.of(GroupOpened)}
    own = {event.ticket for event in ran.of(GroupOpened) if event.alpha == 20}
    assert own == {tickets[group] for group in stale} & {event.ticket for event in ran.of(GroupOpened) if event.attempt}
    trained = [event.group for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.TRAINED]
    assert own & {tickets[group] for group in trained}


def test_a_prompt_that_exceeds_its_own_bound_is_given_up_with_a_cause() -> None:
    hang = 'sim.tasks.game.step_s={kind="uniform", low=0.01, high=0.1, tail_share=0.1, tail=8.0}'
    settings = (*SLOW_MEMBERS, hang, "alpha=1", "tasks.game.environments=32", *ALL_OR_NOTHING)
    ran = run(world(*settings, "tasks.game.stale_retries=0", "tasks.game.late_alpha=1", "steps=20"))
    completed(ran)
    failed = [event for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.FAILED]
    assert failed
    assert {event.cause for event in failed} == {"past the staleness bound of its own, 1"}
    assert not any(event.requeued for event in failed)


def test_redundancy_sizes_itself() -> None:
    """None where nothing straggles or fails; some where members go missing; never above the limit."""
    calm = run(world("mode=rollart", "steps=20", "tasks.game.environments=32"))
    completed(calm)
    assert calm.of(RedundancyChanged) == []
    settings = ("mode=rollart", "steps=40", "tasks.game.environments=32", "sim.tasks.game.step_failure=0.02")
    rough = run(world(*settings))
    completed(rough)
    assert {event.extra for event in rough.of(RedundancyChanged)} == {1}
    more = run(world(*settings, "sim.tasks.game.step_failure=0.08", "batch.max_extra_members=3"))
    completed(more)
    assert max(event.extra for event in more.of(RedundancyChanged)) > 1
    off = run(world(*settings, "batch.extra_members=0"))
    assert off.of(RedundancyChanged) == []
    assert max(sizes_of_groups(off)) == 4


def test_a_task_may_have_a_bound_of_its_own() -> None:
    """Its groups are admitted further ahead, and only they may be older."""
    ran = run(two_tasks("mode=rollart", "alpha=0", "tasks.math.alpha=2", "steps=12", "tasks.math.environments=32"))
    completed(ran)
    task_of = {event.group: event.task for event in ran.of(GroupOpened)}
    oldest: defaultdict[str, int] = defaultdict(int)
    for claim in ran.of(BatchClaimed):
        for group, staleness in zip(claim.groups, claim.staleness, strict=True):
            oldest[task_of[group]] = max(oldest[task_of[group]], staleness)
    assert oldest["game"] == 0
    assert 0 < oldest["math"] <= 2


def test_masked_members_stay_in_the_group_and_are_not_trained() -> None:
    masked: list[TrajectoryId] = []
    ahead = ("tasks.game.environments=5", "batch.extra_groups=1", "alpha=0")
    for seed in range(4):
        settings = (*SLOW_MEMBERS, *ahead, f"seed={seed}", 'tasks.game.stale="mask"')
        ran = run(world(*settings))
        completed(ran)  # the audit recomputes who has to be masked, and the staleness of the others
        here = [id for claim in ran.of(BatchClaimed) for id in claim.masked]
        masked += here
        report = make_report(ran.events)
        sampled = {end.trajectory: end.sampled for end in ran.of(TrajectoryEnded)}
        assert report.wasted_tokens.get("masked", 0) == sum(sampled[id] for id in here)
        claimed = [id for claim in ran.of(BatchClaimed) for id in claim.trajectories]
        assert report.trained_tokens == sum(sampled[id] for id in claimed) - sum(sampled[id] for id in here)
        group_of = {event.trajectory: event.group for event in ran.of(TrajectoryStarted)}
        ended = {event.group for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.STALE}
        stopped = {group_of[end.trajectory] for end in ran.of(TrajectoryEnded) if end.outcome is Outcome.STALE}
        assert stopped <= ended, "masked members finish, unless too many of their group are masked"
    assert masked


@pytest.mark.parametrize("progress_s", [0.05, 5.0])
@pytest.mark.parametrize("seed", [1, 6, 15, 17, 18, 20])
def test_a_member_that_is_not_kept_does_not_age_its_group(seed: int, progress_s: float) -> None:
    """With extra members, one past the bound may still be in its first turn when the group is complete."""
    ran = run(
        world(
            "mode=rollart",
            "steps=10",
            "alpha=0",
            f"seed={seed}",
            "pools.wide.engines=4",
            'tasks.game.stale="mask"',
            "batch.extra_members=2",
            "batch.extra_groups=2",
            "tasks.game.environments=5",
            "tasks.game.max_turn_tokens=1000",
            'sim.tasks.game.answer_tokens={kind="constant", value=30, tail_share=0.06, tail=400}',
            f"sim.engine.progress_interval_s={progress_s}",
        )
    )
    completed(ran)
    group_of = {start.trajectory: start.group for start in ran.of(TrajectoryStarted)}
    kept: defaultdict[int, list[int]] = defaultdict(list)
    served = 0
    for event in ran.events:
        match event:
            case TrajectoryEnded() if event.outcome in TRAINABLE and event.first is not None:
                kept[group_of[event.trajectory]].append(event.first.step)
            case WeightsSynced():
                served = event.version.step
            case GroupEnded() if event.outcome is GroupOutcome.STALE:
                in_time = [first for first in kept[event.group] if served - first <= 0]
                assert len(in_time) < 2, "enough could have been trained"
            case _:
                pass
