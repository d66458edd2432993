"""Conformance of environment workers, which handle `Reset`, `Step` and `Close`.

An episode that cannot continue is `EnvironmentFailed`, typed and terminal; never silence, never a reward, and never a
blank environment that answers as if nothing had happened.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.conformance.drive import WorkerDrive
from rollart.ports.worker import Worker
from rollart.types.ids import TrajectoryId
from rollart.types.messages import Close, EnvironmentFailed, EnvironmentInfo, Observed, Reset, Step, WorkerEvent
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt
from rollart.types.transcript import unpack

SUITE = Suite["EnvironmentHarness", None]()
Answer = Observed | EnvironmentFailed


@dataclass(kw_only=True)
class EnvironmentHarness:
    """An environment worker with at least two slots, whose episodes take at least two steps."""

    build: Callable[[Callable[[], None]], Worker]
    prompt: Callable[[int], Prompt]
    action: Callable[[int], Segment]
    """The agent's action in a turn; any action that does not end the episode at once."""
    virtual: bool
    max_steps: int = 100
    """Maximum length of an episode."""
    failing_reset: Callable[[Callable[[], None]], Worker] | None = None
    """A worker whose environments fail in `reset`."""
    failing_step: Callable[[Callable[[], None]], Worker] | None = None
    """A worker whose environments fail in their first step."""
    executed: Callable[[], int] | None = None
    """Number of resets and steps that the environments themselves have executed, in all workers."""
    transcribing: Callable[[Callable[[], None]], Worker] | None = None
    """A worker that makes transcripts."""


class Host:
    """The controller's side of one environment worker."""

    def __init__(self, build: Callable[[Callable[[], None]], Worker], harness: EnvironmentHarness) -> None:
        self.harness = harness
        self.drive = WorkerDrive(build, virtual=harness.virtual)
        info = self.drive.info
        if not isinstance(info, EnvironmentInfo):
            raise ConformanceError(f"an environment worker joins with EnvironmentInfo, not with {info}")
        self.info: EnvironmentInfo = info

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *details: object) -> None:
        self.drive.__exit__(None, None, None)

    def reset(self, episode: int, slot: int = 0, prompt: int = 0) -> Observed:
        self.drive.send(reset(self.harness, episode, slot, prompt))
        return self.observed(episode, 0)

    def step(self, episode: int, turn: int) -> Observed:
        self.drive.send(step(self.harness, episode, turn))
        return self.observed(episode, turn)

    def answer(self, episode: int, turn: int) -> Answer:
        event = self.drive.until(lambda event: answers(event, episode, turn))
        assert isinstance(event, Observed | EnvironmentFailed)
        return event

    def answers(self, episode: int, turn: int) -> list[WorkerEvent]:
        return [event for event in self.drive.events if answers(event, episode, turn)]

    def observed(self, episode: int, turn: int) -> Observed:
        answer = self.answer(episode, turn)
        if not isinstance(answer, Observed):
            raise ConformanceError(f"a healthy environment answers with `Observed`, but gave {answer}")
        check(math.isfinite(answer.reward), f"a reward is a finite number, but was {answer.reward}")
        return answer

    def failed(self, episode: int, turn: int) -> EnvironmentFailed:
        """The command is answered by a failure, with a reason, and by nothing else."""
        answer = self.answer(episode, turn)
        self.drive.settle()
        given = self.answers(episode, turn)
        observed = [event for event in given if isinstance(event, Observed)]
        check(not observed, f"a failure is never an observation with a reward, but {observed} came")
        if not isinstance(answer, EnvironmentFailed):
            raise ConformanceError(f"a failure is `EnvironmentFailed`, but the answer was {answer}")
        check(answer.reason, "a failure has a reason")
        return answer


@SUITE.case
def a_reset_gives_the_first_observation(harness: EnvironmentHarness) -> None:
    """`Reset` is answered by turn 0 with tokens to start from; the episode is open."""
    with Host(harness.build, harness) as host:
        first = host.reset(1)
        check(first.observation.length > 0, "the first observation has tokens")
        check(not first.done, "an episode is not over before the agent acts")


@SUITE.case
def a_step_answers_its_turn(harness: EnvironmentHarness) -> None:
    """Each `Step` is answered once, with its turn, until one is `done`; then `Close` frees the slot for another."""
    with Host(harness.build, harness) as host:
        host.reset(1)
        turn = play(host, 1)
        host.drive.settle()
        for asked in range(turn + 1):
            check(
                len(host.answers(1, asked)) == 1, f"one answer per turn, but turn {asked} got {host.answers(1, asked)}"
            )
        host.drive.send(Close(TrajectoryId(1)))
        host.reset(2)
        play(host, 2)


@SUITE.case
def a_duplicate_command_is_executed_once(harness: EnvironmentHarness) -> None:
    """A repeated `Reset` or `Step`, at once or later, is executed once and gets the same answer."""
    before = harness.executed() if harness.executed is not None else 0
    with Host(harness.build, harness) as host:
        duplicates: tuple[Reset | Step, ...] = (reset(harness, 1, 0, 0), step(harness, 1, 1))
        for turn, command in enumerate(duplicates):
            host.drive.send(command, command)
            host.observed(1, turn)
            host.drive.settle()
            host.drive.send(command)
            host.drive.settle()
        host.step(1, 2)
        host.drive.send(*duplicates)
        host.drive.settle()
        for turn in (0, 1, 2):
            given = host.answers(1, turn)
            check(all(answer == given[0] for answer in given), f"a turn has one answer, but turn {turn} got {given}")
        if harness.executed is not None:
            count = harness.executed() - before
            check(count == 3, f"one reset and two steps are executed once each, but the environment saw {count}")


@SUITE.case
def slots_are_independent(harness: EnvironmentHarness) -> None:
    """Every slot that `info` promises holds its own episode; closing one does not affect the others."""
    with Host(harness.build, harness) as host:
        check(host.info.slots >= 2, "the harness has a worker with at least two slots")
        episodes = list(range(1, host.info.slots + 1))
        host.drive.send(*[reset(harness, episode, episode - 1, episode) for episode in episodes])
        for episode in episodes:
            host.observed(episode, 0)
        host.drive.send(Close(TrajectoryId(1)))
        host.drive.send(*[step(harness, episode, 1) for episode in episodes[1:]])
        for episode in episodes[1:]:
            host.observed(episode, 1)


@SUITE.case
def an_ended_episode_has_its_transcript(harness: EnvironmentHarness) -> None:
    """Only the last observation of an episode comes with a transcript, and only if one is wanted: of this prompt and
    member, with a turn per step and the rewards that were observed."""
    with Host(harness.build, harness) as host:
        host.reset(1)
        play(host, 1)
        check(not any(observed.transcript for observed in seen(host)), "no transcript is made if none is wanted")
    if harness.transcribing is None:
        raise NotApplicable("the harness has no worker that makes transcripts")
    with Host(harness.transcribing, harness) as host:
        host.reset(2, prompt=3)
        turns = play(host, 2)
        *before, last = seen(host)
        check(not any(observed.transcript for observed in before), "only the last observation has a transcript")
        try:
            transcript = unpack(last.transcript)
        except ValueError as error:
            raise ConformanceError(f"the last observation has a packed transcript, but: {error}") from error
        given = (transcript.trajectory, transcript.prompt_id, transcript.member, len(transcript.turns))
        expected = (2, harness.prompt(3).id, 0, turns)
        check(given == expected, f"trajectory, prompt, member and turns are {expected}, but were {given}")
        earned = [turn.reward for turn in transcript.turns]
        observed = [each.reward for each in seen(host)[1:]]
        check(earned == observed, f"its turns earned {observed}, but the transcript has {earned}")


@SUITE.case
def an_unknown_slot_fails(harness: EnvironmentHarness) -> None:
    """A `Reset` into a slot beyond those of `info` is `EnvironmentFailed`; the worker stays usable."""
    with Host(harness.build, harness) as host:
        host.drive.send(reset(harness, 1, host.info.slots, 0))
        host.failed(1, 0)
        host.reset(2)


@SUITE.case
def an_episode_can_be_abandoned(harness: EnvironmentHarness) -> None:
    """`Close` in the middle of an episode, or before its reset was answered, frees the slot; repeating it is
    harmless."""
    with Host(harness.build, harness) as host:
        host.reset(1)
        host.step(1, 1)
        host.drive.send(Close(TrajectoryId(1)), Close(TrajectoryId(1)), Close(TrajectoryId(99)))
        host.drive.send(reset(harness, 2, 0, 1), Close(TrajectoryId(2)))
        host.reset(3)
        host.step(3, 1)


@SUITE.case
def a_reset_is_fresh(harness: EnvironmentHarness) -> None:
    """`Reset` into a slot with an open episode starts a fresh one; the old episode is over, not continued blank."""
    with Host(harness.build, harness) as host:
        fresh = host.reset(1, slot=1)
        host.reset(2, slot=0, prompt=1)
        host.step(2, 1)
        again = host.reset(3, slot=0)
        check(
            again.observation == fresh.observation,
            "a reset gives a fresh environment, but its first observation depends on the previous episode",
        )
        host.drive.send(step(harness, 2, 2))
        host.failed(2, 2)
        host.step(3, 1)


@SUITE.case
def the_prompt_determines_the_first_observation(harness: EnvironmentHarness) -> None:
    """The same prompt gives the same first observation, in every slot and every worker."""
    seen = []
    for slot in (0, 1):
        with Host(harness.build, harness) as host:
            seen.append(host.reset(1 + slot, slot=slot, prompt=3).observation)
    check(seen[0] == seen[1], "the same prompt gives the same first observation, but two workers differ")


@SUITE.case
def an_unknown_episode_fails(harness: EnvironmentHarness) -> None:
    """A `Step` of an unknown episode, as after a silent restart, is `EnvironmentFailed`: terminal and typed."""
    with Host(harness.build, harness) as host:
        host.drive.send(step(harness, 7, 3))
        host.failed(7, 3)
        host.reset(8)


@SUITE.case
def a_closed_episode_fails(harness: EnvironmentHarness) -> None:
    """A `Step` after `Close` is `EnvironmentFailed`: the environment is gone."""
    with Host(harness.build, harness) as host:
        host.reset(1)
        host.drive.send(Close(TrajectoryId(1)))
        host.drive.send(step(harness, 1, 1))
        host.failed(1, 1)


@SUITE.case
def a_failing_reset_is_reported(harness: EnvironmentHarness) -> None:
    """An environment that fails in `reset` is `EnvironmentFailed` for turn 0, and the slot is free for the next."""
    if harness.failing_reset is None:
        raise NotApplicable("the harness has no environment that fails in reset")
    with Host(harness.failing_reset, harness) as host:
        for episode in (1, 2):
            host.drive.send(reset(harness, episode, 0, episode))
            host.failed(episode, 0)
            host.drive.send(Close(TrajectoryId(episode)))


@SUITE.case
def a_failing_step_is_reported(harness: EnvironmentHarness) -> None:
    """An environment that fails in `step` is `EnvironmentFailed` for that turn, terminally; other slots continue."""
    if harness.failing_step is None:
        raise NotApplicable("the harness has no environment that fails in step")
    with Host(harness.failing_step, harness) as host:
        host.reset(1, slot=0)
        host.reset(2, slot=1)
        host.drive.send(step(harness, 1, 1))
        host.failed(1, 1)
        host.drive.send(step(harness, 1, 2))
        host.failed(1, 2)
        host.reset(3, slot=0)
        check(not host.answers(2, 1), "a failing environment does not affect others")
        host.drive.send(step(harness, 2, 1))
        host.failed(2, 1)


def reset(harness: EnvironmentHarness, episode: int, slot: int, prompt: int) -> Reset:
    return Reset(episode=TrajectoryId(episode), slot=slot, prompt=harness.prompt(prompt), member=0)


def step(harness: EnvironmentHarness, episode: int, turn: int) -> Step:
    return Step(episode=TrajectoryId(episode), turn=turn, action=harness.action(turn))


def seen(host: Host) -> list[Observed]:
    """All observations so far, in order."""
    return [event for event in host.drive.events if isinstance(event, Observed)]


def play(host: Host, episode: int) -> int:
    """Act until the episode is over; returns the last turn."""
    for turn in range(1, host.harness.max_steps + 1):
        observed = host.step(episode, turn)
        if observed.done:
            return turn
        check(observed.observation.length > 0, "the agent needs an observation to answer, but it is empty")
    raise ConformanceError(f"an episode ends within {host.harness.max_steps} steps, but this one did not")


def answers(event: WorkerEvent, episode: int, turn: int) -> bool:
    return isinstance(event, Observed | EnvironmentFailed) and event.episode == episode and event.turn == turn


CASES: tuple[Case[EnvironmentHarness, None], ...] = SUITE.cases()
