"""Groups and prompts: redundancy, filters, failures, staleness, and what happens to a prompt afterwards."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from audit import completed
from worlds import Ran, Rule, run, world

from rollart.observe.report import make_report
from rollart.policy.groups import MAX_PROMPT_ATTEMPTS
from rollart.types.ids import PromptId, TrajectoryId, WorkerId
from rollart.types.journal import (
    BatchClaimed,
    GroupEnded,
    GroupOpened,
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


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "rollart"])
def test_extra_members_are_redundant_once_the_group_is_complete(mode: str) -> None:
    ran = run(world(f"mode={mode}", "batch.extra_members=2", "tasks.game.environments=24"))
    completed(ran)
    assert outcomes(ran)[Outcome.REDUNDANT]
    group_of = {event.trajectory: event.group for event in ran.of(TrajectoryStarted)}
    first: defaultdict[int, list[TrajectoryId]] = defaultdict(list)
    for end in ran.of(TrajectoryEnded):
        if end.outcome in TRAINABLE:
            first[group_of[end.trajectory]].append(end.trajectory)
    for claim in ran.of(BatchClaimed):
        for group in claim.groups:
            kept = [id for id in claim.trajectories if group_of[id] == group]
            assert sorted(kept) == sorted(first[group][:4]), "the first to finish are kept"


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
def test_groups_past_the_bound_end_as_stale_and_their_prompts_come_again(alpha: int, seed: int) -> None:
    ran = run(world(*SLOW_MEMBERS, f"alpha={alpha}", f"seed={seed}", "tasks.game.environments=32"))
    completed(ran)
    stale = [event for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.STALE]
    assert all(event.requeued for event in stale)
    if alpha:
        assert stale
        assert outcomes(ran)[Outcome.STALE]
    assert all(not claim.masked for claim in ran.of(BatchClaimed))


def test_masked_members_stay_in_the_group_and_are_not_trained() -> None:
    masked: list[TrajectoryId] = []
    for seed in range(8):
        settings = (*SLOW_MEMBERS, "alpha=1", f"seed={seed}", 'tasks.game.stale="mask"', "tasks.game.environments=6")
        ran = run(world(*settings))
        completed(ran)  # the audit recomputes who has to be masked, and the staleness of the others
        here = [id for claim in ran.of(BatchClaimed) for id in claim.masked]
        masked += here
        report = make_report(ran.events)
        sampled = {end.trajectory: end.sampled for end in ran.of(TrajectoryEnded)}
        assert report.wasted_tokens.get("masked", 0) == sum(sampled[id] for id in here)
        claimed = [id for claim in ran.of(BatchClaimed) for id in claim.trajectories]
        assert report.trained_tokens == sum(sampled[id] for id in claimed) - sum(sampled[id] for id in here)
        assert outcomes(ran)[Outcome.STALE] == 0, "masked members finish"
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
                assert all(served - first > 0 for first in kept[event.group]), "somebody could have been trained"
            case _:
                pass
