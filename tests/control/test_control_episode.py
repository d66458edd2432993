"""One episode: who ends it, and what of it becomes part of the sequence that is trained."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from audit import completed
from worlds import Commands, Events, run, world

from rollart.types.ids import TrajectoryId, WorkerId
from rollart.types.journal import TrajectoryEnded
from rollart.types.messages import Observed, ScoreRequest, Step, Train
from rollart.types.tokens import Segment
from rollart.types.trajectory import Outcome, TrainSample, Trajectory

NAMED = ('tasks.game.rewards=[{name="one"}, {name="other"}]',)
"""Rewards that read the transcript."""


def test_an_episode_ends_after_its_last_turn_and_the_environment_is_not_asked_again() -> None:
    steps: defaultdict[TrajectoryId, int] = defaultdict(int)

    def count(_: WorkerId, command: Step, __: int) -> Sequence[Step]:
        steps[command.episode] += 1
        return (command,)

    ran = run(world("tasks.game.max_turns=2"), Commands("environment", Step, count))
    completed(ran)
    truncated = [end for end in ran.of(TrajectoryEnded) if end.outcome is Outcome.TRUNCATED]
    assert truncated
    for end in truncated:
        assert end.turns == steps[end.trajectory] == 2


def test_the_reward_of_a_truncated_episode_sees_its_last_transcript() -> None:
    def drawn(_: WorkerId, event: Observed, __: int) -> Sequence[Observed]:
        return (msgspec.structs.replace(event, transcript=f"after turn {event.turn}".encode()),)

    transcripts: dict[TrajectoryId, bytes] = {}

    def keep(_: WorkerId, command: ScoreRequest, __: int) -> Sequence[ScoreRequest]:
        for episode in command.episodes:
            transcripts[episode.trajectory] = episode.transcript
        return (command,)

    rules = Events("environment", Observed, drawn), Commands("reward", ScoreRequest, keep)
    ran = run(world("tasks.game.max_turns=2", *NAMED), *rules)
    completed(ran)
    for end in ran.of(TrajectoryEnded):
        if end.reward is not None:
            assert transcripts[end.trajectory] == f"after turn {end.turns}".encode()


def test_what_is_shown_after_the_last_action_is_kept_only_where_a_value_is_asked_for() -> None:
    def farewell(_: WorkerId, event: Observed, __: int) -> Sequence[Observed]:
        return (msgspec.structs.replace(event, observation=Segment(7, None)),) if event.done else (event,)

    trained: list[TrainSample] = []

    def keep(_: WorkerId, command: Train, __: int) -> Sequence[Train]:
        trained.extend(command.samples)
        return (command,)

    shown: dict[TrajectoryId, int] = {}

    def look(trajectory: Trajectory, _: str) -> None:
        shown[trajectory.id] = trajectory.last_observation.length

    rules = Events("environment", Observed, farewell), Commands("trainer", Train, keep)
    ran = run(world("tasks.game.max_turns=3"), *rules, ended=look)
    completed(ran)
    assert {sample.truncated for sample in trained} == {False, True}
    for sample in trained:
        (sequence,) = sample.sequences
        if sample.truncated:
            assert sequence.length > sequence.turn_length, "the state that it was left in"
            assert shown[sample.trajectory] == 0
        else:
            assert sequence.length == sequence.turn_length, "nothing after the last action"
            assert shown[sample.trajectory] == 7, "but there to be read when the trajectory ended"
