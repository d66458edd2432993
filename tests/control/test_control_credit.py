"""Rewards become advantages: by hand for small batches, and in what a trainer is sent in a run."""

import math
from collections.abc import Sequence

import pytest
from audit import completed, sound
from own_algorithms import HERE
from worlds import Ran, Rule, run, two_tasks, world

from rollart.algo.advantage import dr_grpo, gigpo, grpo, reinforce_plus_plus, rloo
from rollart.config.algorithm import AdvantageKind, AlgorithmSettings
from rollart.control.credit import NO_SIGNAL, has_no_signal, keeps_states, samples
from rollart.observe.report import make_report
from rollart.ports.algorithm import advantage_of
from rollart.types.errors import AdvantageFailed, ShareUnfilled
from rollart.types.ids import GroupId, PromptId, TrajectoryId, WorkerId
from rollart.types.journal import GroupEnded, GroupOpened, RunEnded, ShareRedistributed, TrajectoryEnded, TurnEnded
from rollart.types.messages import Observed, Train, WorkerCommand, WorkerEvent
from rollart.types.trajectory import GroupOutcome, Prompt, Purpose, Trajectory
from rollart.types.versions import Version


def trajectory(
    id: int, rewards: Sequence[float], *, final: float | None = None, states: str = "", masked: bool = False
) -> Trajectory:
    """Turns that earned these, with ten times their number in tokens."""
    made = Trajectory(
        id=TrajectoryId(id),
        group=GroupId(id // 10),
        member=id % 10,
        attempt=0,
        task="maze",
        purpose=Purpose.TRAIN,
        prompt=Prompt(PromptId("p"), "maze", 1),
        keeps_states=bool(states),
    )
    for number, reward in enumerate(rewards, 1):
        made.turn_rewards.append(reward)
        made.turn_tokens.append(10 * number)
        made.turns += 1
    for state in states:
        assert made.states is not None
        made.states.append(state.encode())
    made.reward = math.fsum(rewards) if final is None else final
    made.masked = masked
    return made


def advantages(kind: str, *groups: Sequence[Trajectory], **settings: object) -> list[list[float]]:
    made = samples(advantage_of(AlgorithmSettings.model_validate({"advantage": kind, **settings})), groups)
    return [[turn.advantage for turn in sample.turns] for sample in made]


# --- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "function"), [("grpo", grpo), ("dr_grpo", dr_grpo), ("rloo", rloo)])
def test_every_turn_of_a_trajectory_has_the_advantage_of_its_group(kind, function) -> None:  # type: ignore[no-untyped-def]
    first = [trajectory(10, [0.0, 1.0]), trajectory(11, [0.5]), trajectory(12, [0.0, 0.0, 0.0], masked=True)]
    second = [trajectory(20, [3.0]), trajectory(21, [])]
    one, other = function([1.0, 0.5, 0.0]), function([3.0, 0.0])
    assert advantages(kind, first, second) == [[one[0]] * 2, [one[1]], [one[2]] * 3, [other[0]], []]


@pytest.mark.parametrize("group_baseline", [None, False, True])
def test_reinforce_plus_plus_compares_with_the_whole_batch(group_baseline: bool | None) -> None:
    first = [trajectory(10, [1.0]), trajectory(11, [0.0], masked=True)]
    second = [trajectory(20, [5.0]), trajectory(21, [4.0, 0.0])]
    expected = reinforce_plus_plus([[1.0, 0.0], [5.0, 4.0]], group_baseline=bool(group_baseline))
    found = advantages("reinforce_plus_plus", first, second, group_baseline=group_baseline)
    assert found == [[expected[0][0]], [expected[0][1]], [expected[1][0]], [expected[1][1]] * 2]
    assert found != advantages("reinforce_plus_plus", first)[:2] + advantages("reinforce_plus_plus", second)


def test_gigpo_compares_turns_that_start_in_the_same_state() -> None:
    group = [
        trajectory(10, [0.0, 0.0, 1.0], states="abcx"),  # the last state is one that no turn started in
        trajectory(11, [0.0, 0.0], states="ab"),
        trajectory(12, [0.5], states="a", masked=True),
    ]
    rewards = [[0.0, 0.0, 1.0], [0.0, 0.0], [0.5]]
    assert advantages("gigpo", group) == gigpo([["a", "b", "c"], ["a", "b"], ["a"]], rewards)
    settings = {"step_weight": 0.5, "discount": 0.5, "normalise": False}
    expected = gigpo([["a", "b", "c"], ["a", "b"], ["a"]], rewards, step_weight=0.5, discount=0.5, normalise=False)
    assert advantages("gigpo", group, **settings) == expected
    assert expected[0][0] != expected[0][1]


def test_states_are_kept_where_they_are_needed_and_nowhere_else() -> None:
    assert [kind for kind in AdvantageKind if keeps_states(AlgorithmSettings(advantage=kind))] == [AdvantageKind.GIGPO]
    assert keeps_states(AlgorithmSettings(advantage="mine.py:ranked"))
    with pytest.raises(AdvantageFailed, match="0 states and 1 rewards"):
        advantages("gigpo", [trajectory(10, [1.0])])


def test_gae_leaves_advantages_to_the_trainer_and_sends_rewards() -> None:
    (made,) = samples(advantage_of(AlgorithmSettings(advantage="gae")), [[trajectory(10, [0.25, 0.5], final=2.0)]])
    assert [(turn.tokens, turn.advantage, turn.reward) for turn in made.turns] == [(10, 0.0, 0.25), (20, 0.0, 1.75)]
    assert made.reward == 2.0


def test_rewards_of_turns_add_up_to_the_reward() -> None:
    """What the reward function makes of an episode counts; the environment says when it was earned."""
    for final, last in ((0.75, 0.5), (1.0, 0.75), (-1.0, -1.25)):
        (made,) = samples(advantage_of(AlgorithmSettings()), [[trajectory(10, [0.25, 0.5], final=final)]])
        assert [turn.reward for turn in made.turns] == [0.25, last]
    (nothing,) = samples(advantage_of(AlgorithmSettings()), [[trajectory(10, [], final=1.0)]])
    assert (nothing.turns, nothing.reward) == ((), 1.0)


def test_a_group_without_variance_has_no_signal() -> None:
    equal = [trajectory(10, [1.0]), trajectory(11, [0.0, 1.0])]
    assert has_no_signal(equal) == NO_SIGNAL
    assert has_no_signal([*equal, trajectory(12, [0.0], masked=True)]) is None, "masked members are in the baseline"


# --- in a run -------------------------------------------------------------------------------------------------------


class Batches(Rule):
    """Keeps what the trainer is sent."""

    def __init__(self) -> None:
        self.sent: dict[Version, Train] = {}

    def command(self, worker: WorkerId, command: WorkerCommand) -> Sequence[WorkerCommand]:
        if isinstance(command, Train):
            self.sent[command.version] = command
        return super().command(worker, command)


@pytest.mark.parametrize("kind", AdvantageKind)
def test_the_trainer_gets_what_the_config_asks_for(kind: AdvantageKind) -> None:
    batches = Batches()
    ran = run(world("mode=rollart", f"algorithm.advantage={kind.value}"), batches)
    completed(ran)
    assert len(batches.sent) == 4
    lengths: dict[TrajectoryId, list[int]] = {}
    for event in ran.of(TurnEnded):
        lengths.setdefault(event.trajectory, []).append(event.sampled)
    rewards = {event.trajectory: event.reward for event in ran.of(TrajectoryEnded)}
    for train in batches.sent.values():
        groups: dict[GroupId, list[float]] = {}
        for sample in train.samples:
            groups.setdefault(sample.group, []).append(rewards[sample.trajectory])
            assert [turn.tokens for turn in sample.turns] == lengths[sample.trajectory]
            assert math.fsum(turn.reward for turn in sample.turns) == pytest.approx(sample.reward)
        expected = {
            AdvantageKind.GRPO: [a for group in groups.values() for a in grpo(group)],
            AdvantageKind.DR_GRPO: [a for group in groups.values() for a in dr_grpo(group)],
            AdvantageKind.RLOO: [a for group in groups.values() for a in rloo(group)],
            AdvantageKind.REINFORCE_PLUS_PLUS: [
                a for group in reinforce_plus_plus(list(groups.values())) for a in group
            ],
            # Nobody comes to a state of a simulated environment twice, so turns have no advantage of their own.
            AdvantageKind.GIGPO: [a for group in groups.values() for a in grpo(group)],
            AdvantageKind.GAE: [0.0] * len(train.samples),
        }[kind]
        for sample, advantage in zip(train.samples, expected, strict=True):
            assert [turn.advantage for turn in sample.turns] == pytest.approx([advantage] * len(sample.turns))


def test_an_advantage_of_ones_own_is_called_in_a_run() -> None:
    sent = []
    for advantage in ("grpo", f"{HERE}same_as_grpo"):
        batches = Batches()
        completed(run(world("mode=rollart", f"algorithm.advantage={advantage}"), batches))
        sent.append([[sample.turns for sample in train.samples] for train in batches.sent.values()])
    assert sent[0] == sent[1]


def test_an_advantage_that_fails_in_a_run_ends_it_by_name() -> None:
    ran = run(world(f"algorithm.advantage={HERE}not_a_number"))
    sound(ran)
    assert isinstance(ran.error, AdvantageFailed)
    assert "not_a_number returned nan for trajectory" in str(ran.error)


class Rooms(Rule):
    """Environments that name their state: every turn starts in one of two rooms, in turn."""

    def event(self, worker: WorkerId, event: WorkerEvent) -> Sequence[tuple[float, WorkerEvent]]:
        if isinstance(event, Observed):
            room = b"red" if event.turn % 2 else b"blue"
            reward = float(event.done)
            event = Observed(event.episode, event.turn, event.observation, reward, event.done, state=room)
        return super().event(worker, event)


def test_environments_may_name_their_states() -> None:
    batches = Batches()
    ran = run(world("mode=rollart", "algorithm.advantage=gigpo", "algorithm.discount=0.5"), batches, Rooms())
    completed(ran)
    several = [sample for train in batches.sent.values() for sample in train.samples if len(sample.turns) > 2]
    assert any(len({turn.advantage for turn in sample.turns}) > 1 for sample in several)
    for train in batches.sent.values():
        for group in {sample.group for sample in train.samples}:
            members = [sample for sample in train.samples if sample.group == group]
            states = [["blue" if turn % 2 == 0 else "red" for turn in range(len(each.turns))] for each in members]
            expected = gigpo(states, [[turn.reward for turn in each.turns] for each in members], discount=0.5)
            for member, turns in zip(members, expected, strict=True):
                assert [turn.advantage for turn in member.turns] == pytest.approx(turns)


# --- dynamic sampling -----------------------------------------------------------------------------------------------


def filtered(ran: Ran) -> list[GroupEnded]:
    return [event for event in ran.of(GroupEnded) if event.outcome is GroupOutcome.FILTERED]


@pytest.mark.parametrize("mode", ["sync", "sync_plus", "one_off", "areal", "rollart"])
def test_groups_without_signal_are_filtered_and_others_are_sampled(mode: str) -> None:
    batches = Batches()
    often = "sim.tasks.game.success=0.8"
    ran = run(world(f"mode={mode}", "algorithm.filter_zero_variance=true", often), batches)
    completed(ran)
    ends = filtered(ran)
    assert ends
    assert all(end.cause == NO_SIGNAL and not end.requeued for end in ends)
    tickets = {event.group: event.ticket for event in ran.of(GroupOpened)}
    spent = {tickets[end.group] for end in ends}
    assert all(list(tickets.values()).count(ticket) == 1 for ticket in spent), "its prompt is not asked again"
    for train in batches.sent.values():
        groups: dict[GroupId, set[float]] = {}
        for sample in train.samples:
            groups.setdefault(sample.group, set()).add(sample.reward)
        assert all(len(rewards) > 1 for rewards in groups.values())
    report = make_report(ran.events)
    assert report.filtered == {NO_SIGNAL: len(ends)}
    assert report.group_outcomes["filtered"] == len(ends)
    assert report.wasted_tokens["filtered"] > 0
    plain = make_report(run(world(f"mode={mode}", often)).events)
    assert plain.filtered == {}


def test_a_task_that_is_solved_has_its_share_redistributed() -> None:
    ran = run(
        two_tasks(
            "mode=rollart",
            "algorithm.filter_zero_variance=true",
            "sim.tasks.math.success=1.0",
            "tasks.math.share_deadline_s=3",
        )
    )
    completed(ran)
    assert ran.of(ShareRedistributed)
    assert all(event.missing == {"math": 1} for event in ran.of(ShareRedistributed))


@pytest.mark.parametrize("limit", [0.0, 0.5, 2.0])
def test_groups_without_signal_fill_a_share_once_the_limit_is_reached(limit: float) -> None:
    """A solved task neither holds up a batch nor loses its share."""
    settings = ("algorithm.filter_zero_variance=true", f"algorithm.filter_limit={limit}", "sim.tasks.game.success=1.0")
    batches = Batches()
    ran = run(world("mode=sync_plus", *settings), batches)
    completed(ran)
    assert not ran.of(ShareRedistributed)
    (groups,) = {len({sample.group for sample in train.samples}) for train in batches.sent.values()}
    assert len(filtered(ran)) == len(batches.sent) * limit * groups


def test_a_run_whose_tasks_are_all_solved_ends_in_time() -> None:
    """There is nothing left to learn: within the deadline of a share the run stops and says so."""
    ran = run(
        world(
            "mode=sync_plus",
            "algorithm.filter_zero_variance=true",
            "sim.tasks.game.success=1.0",
            "tasks.game.share_deadline_s=20",
        )
    )
    sound(ran)
    assert isinstance(ran.error, ShareUnfilled)
    (end,) = ran.of(RunEnded)
    assert end.at < 25
    assert len(filtered(ran)) > 4
