"""Results of a run of rollart in `rollart bench trl`, from its folder."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollart.app.run_folder import JOURNAL
from rollart.app.running import CPU, read_config
from rollart.backends.environments.inject import hangs
from rollart.bench.trl import Played
from rollart.config.injection import Injection
from rollart.observe.journal import read_journal
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, TrajectoryId


def played_in(folder: Path, warm_up: int, injection: Injection) -> Played:
    """Results of a finished run."""
    config = read_config(folder)
    spent_s = msgspec.json.decode((folder / CPU).read_bytes(), type=dict[str, float])
    trained = config.steps * config.batch.trajectories
    cpu_ms = {role: 1e3 * seconds / trained for role, seconds in spent_s.items()}
    return played_here(read_journal(folder / JOURNAL), warm_up, injection, cpu_ms)


def played_here(
    events: Iterable[j.JournalEvent], warm_up: int, injection: Injection, cpu_ms: dict[str, float]
) -> Played:
    """Results from the journal of a run, for trajectories trained after the warm-up."""
    ended_at: list[float] = []
    trained: list[ClaimId] = []
    members: dict[ClaimId, tuple[TrajectoryId, ...]] = {}
    ends: dict[TrajectoryId, j.TrajectoryEnded] = {}
    started: dict[TrajectoryId, j.TrajectoryStarted] = {}
    tickets: dict[GroupId, int] = {}
    seeds: dict[int, int] = {}
    for event in events:
        match event:
            case j.PromptTaken():
                seeds[event.ticket] = event.prompt.seed
            case j.GroupOpened():
                tickets[event.group] = event.ticket
            case j.TrajectoryStarted():
                started[event.trajectory] = event
            case j.TrajectoryEnded():
                ends[event.trajectory] = event
            case j.BatchClaimed():
                members[event.claim] = event.trajectories
            case j.StepTrained():
                ended_at.append(event.at)
                trained.append(event.claim)

    def hung(trajectory: TrajectoryId) -> bool:
        start = started[trajectory]
        seed = seeds[tickets[start.group]]
        return any(hangs(injection, seed, start.member, turn) for turn in range(ends[trajectory].turns + 1))

    counted = [trajectory for claim in trained[warm_up:] for trajectory in members[claim]]
    return Played(
        trajectories=len(counted),
        seconds=ended_at[-1] - ended_at[warm_up - 1],
        turns=sum(ends[each].turns for each in counted) / len(counted),
        tokens=sum(ends[each].sampled for each in counted) / len(counted),
        hung=sum(map(hung, counted)) / len(counted),
        cpu_ms=cpu_ms,
    )
