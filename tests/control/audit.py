"""An independent audit of a journal: the rules of the design, recomputed from events alone.

Nothing here trusts a number that the control plane computed if it can be derived from simpler events: staleness comes
from first versions, batches from the groups' members, tokens from turns.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from worlds import Ran, Tap

from rollart.config.modes import MODES, Mode
from rollart.types import journal as j
from rollart.types.ids import ClaimId, GroupId, PromptId, RequestId, TrajectoryId, WorkerId
from rollart.types.messages import Add, Observed, Progress, Role, TurnDone
from rollart.types.trajectory import TRAINABLE, GroupOutcome, Outcome, Purpose
from rollart.types.versions import Version

FAILED = {Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED}


def audit(events: Sequence[j.JournalEvent], killed: Iterable[WorkerId] = ()) -> list[str]:
    """Every violation as a line; none in a sound journal."""
    book = Book(events)
    book.frame()
    book.conservation()
    book.claims()
    book.versions()
    book.tokens()
    book.prompts()
    book.engine_time()
    for worker in killed:
        if worker not in book.died:
            book.wrong(f"{worker} was killed and the journal does not say so")
    return book.problems


class Book:
    """The events of a journal by what they are about."""

    def __init__(self, events: Sequence[j.JournalEvent]) -> None:
        self.events = events
        self.problems: list[str] = []
        self.run = next((event for event in events if isinstance(event, j.RunStarted)), None)
        self.groups: dict[GroupId, j.GroupOpened] = {}
        self.group_ends: defaultdict[GroupId, list[j.GroupEnded]] = defaultdict(list)
        self.started: dict[TrajectoryId, j.TrajectoryStarted] = {}
        self.ends: defaultdict[TrajectoryId, list[j.TrajectoryEnded]] = defaultdict(list)
        self.turns: defaultdict[TrajectoryId, list[j.TurnEnded]] = defaultdict(list)
        self.claimed: dict[ClaimId, j.BatchClaimed] = {}
        self.claim_ends: defaultdict[ClaimId, list[j.StepTrained | j.ClaimReturned]] = defaultdict(list)
        self.redistributed: dict[int, list[j.ShareRedistributed]] = defaultdict(list)
        self.died: dict[WorkerId, j.WorkerDied] = {}
        for event in events:
            self.sort(event)

    def wrong(self, line: str) -> None:
        self.problems.append(line)

    def sort(self, event: j.JournalEvent) -> None:
        match event:
            case j.GroupOpened():
                self.once(event.group in self.groups, f"group {event.group} was opened twice")
                self.groups[event.group] = event
            case j.GroupEnded():
                self.group_ends[event.group].append(event)
            case j.TrajectoryStarted():
                self.once(event.trajectory in self.started, f"trajectory {event.trajectory} was started twice")
                self.once(event.group not in self.groups, f"trajectory {event.trajectory} without an open group")
                self.started[event.trajectory] = event
            case j.TrajectoryEnded():
                self.once(event.trajectory not in self.started, f"{event.trajectory} ended before it started")
                self.ends[event.trajectory].append(event)
            case j.TurnEnded():
                self.once(bool(self.ends[event.trajectory]), f"a turn of {event.trajectory} after its end")
                self.turns[event.trajectory].append(event)
            case j.BatchClaimed():
                self.once(event.claim in self.claimed, f"claim {event.claim} was made twice")
                self.claimed[event.claim] = event
            case j.StepTrained() | j.ClaimReturned():
                self.once(event.claim not in self.claimed, f"claim {event.claim} ended before it was made")
                self.claim_ends[event.claim].append(event)
            case j.ShareRedistributed():
                self.redistributed[event.step].append(event)
            case j.WorkerDied():
                self.once(event.worker in self.died, f"{event.worker} died twice")
                self.died[event.worker] = event
            case _:
                pass

    def once(self, broken: bool, line: str) -> None:
        if broken:
            self.wrong(line)

    # The rules.

    def frame(self) -> None:
        if self.run is None or self.events[0] is not self.run:
            self.wrong("the journal does not begin with RunStarted")
        if not isinstance(self.events[-1], j.RunEnded):
            self.wrong(f"the journal ends with {type(self.events[-1]).__name__}")
        if sum(isinstance(event, j.RunEnded) for event in self.events) != 1:
            self.wrong("there is not exactly one RunEnded")
        for before, after in zip(self.events, self.events[1:], strict=False):
            if after.at < before.at:
                self.wrong(f"time went back from {before.at} to {after.at} at {after}")

    def conservation(self) -> None:
        for id in self.started:
            if len(self.ends[id]) != 1:
                self.wrong(f"trajectory {id} has {len(self.ends[id])} ends")
        for id, group in self.groups.items():
            ends = self.group_ends[id]
            if len(ends) != 1:
                self.wrong(f"group {id} has {len(ends)} ends: {ends}")
            elif group.purpose is Purpose.EVAL and ends[0].outcome is GroupOutcome.TRAINED:
                self.wrong(f"evaluation group {id} was trained")
        for id, ends in self.ends.items():
            for end in ends:
                if end.outcome in FAILED and end.reward is not None:
                    self.wrong(f"trajectory {id} failed ({end.outcome.value}) and has a reward")
                if end.outcome in TRAINABLE and (end.reward is None or not math.isfinite(end.reward)):
                    self.wrong(f"trajectory {id} has a result and the reward {end.reward}")

    def claims(self) -> None:
        run = self.run
        assert run is not None
        trained: Counter[TrajectoryId] = Counter()
        in_trained_claims: set[GroupId] = set()
        step = 0
        for id, claim in self.claimed.items():
            ends = self.claim_ends[id]
            if len(ends) != 1:
                self.wrong(f"claim {id} has {len(ends)} ends")
            self.composition(run, claim)
            self.staleness(run, claim)
            if isinstance(ends[0], j.StepTrained):
                step += 1
                trained.update(claim.trajectories)
                in_trained_claims.update(claim.groups)
                if ends[0].version.step != step:
                    self.wrong(f"claim {id} made {ends[0].version}, the {step}th step")
        for trajectory, times in trained.items():
            if times != 1:
                self.wrong(f"trajectory {trajectory} was trained {times} times")
        for group, ends in self.group_ends.items():
            for end in ends:
                if (end.outcome is GroupOutcome.TRAINED) != (group in in_trained_claims):
                    self.wrong(f"group {group} ended as {end.outcome.value}, in a trained claim or not")
        last = self.events[-1]
        if isinstance(last, j.RunEnded) and last.steps != step:
            self.wrong(f"the run says {last.steps} steps, the journal {step}")

    def composition(self, run: j.RunStarted, claim: j.BatchClaimed) -> None:
        need = Counter(run.groups_per_batch)
        for change in self.redistributed[claim.step]:
            need.subtract(change.missing)
            need.update(change.filled_by)
        have = Counter(self.groups[group].task for group in claim.groups)
        if +need != have:
            self.wrong(f"claim {claim.claim} holds {dict(have)}, wanted {dict(+need)}")
        members = Counter(self.started[id].group for id in claim.trajectories)
        if set(members) != set(claim.groups) or set(members.values()) != {run.group_size}:
            self.wrong(f"claim {claim.claim} does not hold whole groups: {dict(members)}")
        if len(set(claim.trajectories)) != len(claim.trajectories):
            self.wrong(f"claim {claim.claim} holds a trajectory twice")
        for id in claim.trajectories:
            outcomes = [end.outcome for end in self.ends[id]]
            if not all(outcome in TRAINABLE for outcome in outcomes):
                self.wrong(f"claim {claim.claim} holds trajectory {id}, which ended as {outcomes}")
            if self.groups[self.started[id].group].purpose is Purpose.EVAL:
                self.wrong(f"claim {claim.claim} holds the evaluation {id}")

    def staleness(self, run: j.RunStarted, claim: j.BatchClaimed) -> None:
        bounded = MODES[Mode(run.mode)].check_every_turn
        for id in claim.trajectories:
            end = self.ends[id][0]
            if end.masked and id not in claim.masked:
                self.wrong(f"claim {claim.claim} does not name {id} as masked")
            if id in claim.masked and (end.first is None or claim.served.step - end.first.step <= run.alpha):
                self.wrong(f"claim {claim.claim} masks {id} of {end.first} at {claim.served}")
        for group, recorded, lag in zip(claim.groups, claim.staleness, claim.lag, strict=True):
            firsts = [
                end.first
                for id in claim.trajectories
                if self.started[id].group == group and id not in claim.masked
                if (end := self.ends[id][0]).first is not None
            ]
            if not firsts:
                self.wrong(f"group {group} in claim {claim.claim} has nothing to train")
                continue
            oldest = min(first for first in firsts if first is not None)
            if recorded != claim.served.step - oldest.step or lag != claim.trained.step - oldest.step:
                self.wrong(f"group {group}: staleness {recorded}, lag {lag}, from {oldest} at {claim.served}")
            if recorded < 0 or (bounded and recorded > run.alpha):
                self.wrong(f"group {group} was claimed at staleness {recorded}, alpha is {run.alpha}")

    def versions(self) -> None:
        published: set[Version] = set()
        updated: defaultdict[WorkerId, list[Version]] = defaultdict(list)
        placed: defaultdict[TrajectoryId, list[WorkerId]] = defaultdict(list)
        last: dict[TrajectoryId, Version] = {}
        newest: Version | None = None
        for event in self.events:
            match event:
                case j.VersionPublished():
                    if newest is not None and event.version <= newest:
                        self.wrong(f"{event.version} was published after {newest}")
                    newest = event.version
                    published.add(event.version)
                case j.EngineUpdated():
                    if event.version not in published:
                        self.wrong(f"{event.worker} serves {event.version}, which was never published")
                    if updated[event.worker] and event.version < updated[event.worker][-1]:
                        self.wrong(f"{event.worker} went back to {event.version}")
                    updated[event.worker].append(event.version)
                case j.Placed():
                    if not updated[event.engine]:
                        self.wrong(f"{event.engine} got trajectory {event.trajectory} before it had weights")
                    elif event.trajectory in last and updated[event.engine][-1] < last[event.trajectory]:
                        self.wrong(f"trajectory {event.trajectory} moved to {event.engine}, older than its last token")
                    placed[event.trajectory].append(event.engine)
                case j.TurnEnded():
                    self.turn_versions(event, updated, placed[event.trajectory], last)
                case _:
                    pass

    def turn_versions(
        self,
        turn: j.TurnEnded,
        updated: dict[WorkerId, list[Version]],
        engines: list[WorkerId],
        last: dict[TrajectoryId, Version],
    ) -> None:
        id = turn.trajectory
        seen = {version for engine in engines for version in updated[engine]}
        for version, _ in turn.versions:
            if id in last and version < last[id]:
                self.wrong(f"trajectory {id} went back from {last[id]} to {version}")
            if version not in seen:
                self.wrong(f"a token of {id} carries {version}, which none of {engines} served")
            last[id] = version
        if not engines or turn.engine != engines[-1]:
            self.wrong(f"a turn of {id} ended at {turn.engine}, placed at {engines}")
        elif turn.versions and turn.versions[-1][0] not in updated[turn.engine]:
            self.wrong(f"{turn.engine} gave {id} a token of {turn.versions[-1][0]}, which it never served")

    def tokens(self) -> None:
        for id, ends in self.ends.items():
            turns, end = self.turns[id], ends[0]
            if sum(turn.sampled for turn in turns) != end.sampled:
                self.wrong(f"trajectory {id}: turns of {[t.sampled for t in turns]} tokens, {end.sampled} at the end")
            if [turn.turn for turn in turns] != list(range(1, end.turns + 1)):
                self.wrong(f"trajectory {id}: turns {[turn.turn for turn in turns]}, {end.turns} at the end")
            for turn in turns:
                if sum(length for _, length in turn.versions) != turn.sampled:
                    self.wrong(f"trajectory {id}: the versions of turn {turn.turn} do not cover its tokens")
            versions = [version for turn in turns for version, _ in turn.versions]
            if (end.first, end.last) != ((versions[0], versions[-1]) if versions else (None, None)):
                self.wrong(f"trajectory {id}: versions {versions}, said to be {end.first} to {end.last}")

    def prompts(self) -> None:
        """Prompts are opened in the order of their source; again only after a recorded requeue, one attempt on."""
        taken: defaultdict[str, list[PromptId]] = defaultdict(list)
        opened: defaultdict[str, list[PromptId]] = defaultdict(list)
        waiting: Counter[tuple[str, PromptId, int]] = Counter()
        for event in self.events:
            match event:
                case j.CursorMoved():
                    self.once(event.prompt in taken[event.task], f"prompt {event.prompt} came twice from its source")
                    taken[event.task].append(event.prompt)
                case j.GroupOpened() if event.purpose is Purpose.TRAIN:
                    key = (event.task, event.prompt, event.attempt)
                    if event.attempt == 0:
                        opened[event.task].append(event.prompt)
                    elif waiting[key]:
                        waiting[key] -= 1
                    else:
                        self.wrong(f"prompt {event.prompt} was repeated without a requeue (attempt {event.attempt})")
                case j.GroupEnded() if event.requeued:
                    group = self.groups[event.group]
                    waiting[(group.task, group.prompt, group.attempt + 1)] += 1
                case _:
                    pass
        for task, prompts in taken.items():
            if prompts != opened[task]:
                self.wrong(f"prompts of {task}: {prompts} were taken, {opened[task]} opened")

    def engine_time(self) -> None:
        """The causes of a pool of engines add up to the time that they were there."""
        pool_of = {e.worker: e.pool for e in self.events if isinstance(e, j.WorkerSpawned) if e.role is Role.ENGINE}
        there: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, j.WorkerJoined) and event.worker in pool_of:
                died = self.died.get(event.worker)
                there[pool_of[event.worker]] += (died or self.events[-1]).at - event.at  # type: ignore[assignment]
        told: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, j.PoolTime) and event.pool in there:
                told[event.pool] += sum(event.seconds.values())  # type: ignore[assignment]
        for pool, seconds in there.items():
            if not math.isclose(seconds, told[pool], rel_tol=1e-9, abs_tol=1e-6):
                self.wrong(f"the engines of {pool} were there for {seconds} s, {told[pool]} s are accounted for")


def lengths_add_up(tap: Tap) -> list[str]:
    """Whether every request named exactly the tokens that the trajectory had by then, as told to the controller.

    `tap` stands next to the controller: it saw what arrived and what was sent.
    """
    problems: list[str] = []
    known: Counter[TrajectoryId] = Counter()
    session_of: dict[RequestId, TrajectoryId] = {}
    for _, _, message in tap.both:
        match message:
            case Observed():
                known[message.episode] += message.observation.length
            case Progress():
                for request, generated in message.parts:
                    known[session_of[request]] += generated.tokens.length
            case TurnDone():
                known[session_of[message.request]] += message.generated.tokens.length
            case Add():
                session_of[message.request] = message.session
                if message.prefix_length + message.new.length != known[message.session]:
                    problems.append(f"{message.session} has {known[message.session]} tokens, was sent as {message}")
            case _:
                pass
    return problems


def sound(ran: Ran) -> None:
    """The journal keeps every rule, and the run left nothing behind."""
    assert audit(ran.events, ran.killed) == []
    assert ran.complaints == []
    assert ran.tasks_left == []


def completed(ran: Ran) -> None:
    """Sound, and all steps were done."""
    sound(ran)
    assert ran.error is None
    assert ran.events[-1].reason == ""  # type: ignore[union-attr]
