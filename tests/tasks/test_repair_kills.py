"""Episodes of repair whose sandboxes are killed from outside: all are `env_failed`, replaced, and leave nothing."""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from sandbox_parts import (
    groups,
    kill,
    launchers,
    mounts,
    own_sandboxes,
    processes,
    public_folder,
    sandbox_folders,
    until,
)
from worker_settings import worker_settings

from rollart.backends.environments.codec import END_OF_TURN, ByteCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandbox, BubblewrapSandboxes
from rollart.tasks.repair.players import nothing, oracle
from rollart.tasks.sandboxes import Lease, shared_sandboxes
from rollart.tasks.scripts import Script
from rollart.types.errors import SandboxFault
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import EnvironmentFailed, Observed, Reset, Step
from rollart.types.sandboxes import ExecResult, SandboxSpec
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

T = TypeVar("T")
SLOTS = 4
CALLS = 5
"""Least number of calls that an episode makes to each of its sandboxes."""
LATEST_S = 0.02
PLAYERS: Sequence[Script] = (oracle, nothing)
_folder: list[Path] = []


def started(process: int) -> str:
    """When a process was started; empty if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Killed:
    """One sandbox, of which the keeper is killed by SIGKILL at a random moment during or after one of its calls."""

    def __init__(self, sandbox: BubblewrapSandbox, chance: random.Random, share: float) -> None:
        self._sandbox = sandbox
        self._keeper = sandbox.process, started(sandbox.process)
        self._lock = threading.Lock()
        self._closed = False
        self._calls_left = chance.randint(1, CALLS) if chance.random() < share else 0
        self._killer = threading.Timer(chance.uniform(0.0, LATEST_S), self._kill)
        self.killed = self.lost = False

    @property
    def gone(self) -> bool:
        """Whether its keeper is; the process id may be that of another process by now."""
        process, since = self._keeper
        return started(process) != since

    def _kill(self) -> None:
        with self._lock:
            if not self._closed:  # its process id may be that of another process by then
                self.killed = True
                kill(self._sandbox)

    def _call(self, call: Callable[[], T]) -> T:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._killer.start()
        try:
            return call()
        except SandboxFault:
            self.lost = True
            raise

    def exec(self, command: Sequence[str], *, stdin: bytes = b"", time_s: float | None = None) -> ExecResult:
        return self._call(lambda: self._sandbox.exec(command, stdin=stdin, time_s=time_s))

    def read_file(self, path: str, *, max_bytes: int) -> bytes:
        return self._call(lambda: self._sandbox.read_file(path, max_bytes=max_bytes))

    def write_file(self, path: str, content: bytes) -> None:
        self._call(lambda: self._sandbox.write_file(path, content))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._killer.cancel()
        self._sandbox.close()


class KilledSandboxes:
    """A source of which some sandboxes are killed."""

    def __init__(self, share: float) -> None:
        self.source = BubblewrapSandboxes(_folder[-1], warm=2)
        self.made: list[Killed] = []
        self._share = share
        self._chance = random.Random(26)

    def create(self, spec: SandboxSpec) -> Killed:
        made = self.source.create(spec)
        self.made.append(Killed(made, self._chance, self._share))
        return self.made[-1]

    def close(self) -> None:
        self.source.close()


def many() -> KilledSandboxes:
    return KilledSandboxes(0.3)


def some() -> KilledSandboxes:
    return KilledSandboxes(0.05)


class Tally(NamedTuple):
    """Of a number of episodes."""

    rewards: Mapping[int, float]
    """By the number of the prompt."""
    failed: Sequence[str]
    """Reasons of the attempts that ended as `env_failed`."""


def player(seed: int) -> Script:
    return PLAYERS[seed % 2]


def play(count: int, factory: str) -> Tally:
    """That many episodes in a host, each repeated until it has a result."""
    flat = {
        "task": "repair", "environment": "rollart.tasks.repair.editing:EditRepair", "slots": SLOTS,
        "environment_settings": {"level": 2, "sandboxes": factory},
    }  # fmt: skip
    awake = threading.Event()
    host = EnvironmentHost(worker_settings(EnvironmentHost, flat), awake.set)
    prompts = iter([Prompt(PromptId(str(seed)), "repair", seed, {}) for seed in range(count)])
    numbers = iter(range(1, 100 * count))
    playing: dict[TrajectoryId, tuple[int, Prompt, list[str]]] = {}
    rewards: dict[int, float] = {}
    failed: list[str] = []

    def begin(slot: int, prompt: Prompt | None) -> None:
        if prompt is not None:
            episode = TrajectoryId(next(numbers))
            playing[episode] = (slot, prompt, [])
            host.post([Reset(episode, slot, prompt, 0)])

    for slot in range(SLOTS):
        begin(slot, next(prompts, None))
    while playing:
        events = host.advance(0.0).events
        if not events:
            assert awake.wait(300)
            awake.clear()
        for event in events:
            assert isinstance(event, Observed | EnvironmentFailed)
            slot, prompt, observations = playing[event.episode]
            if isinstance(event, EnvironmentFailed):
                failed.append(event.reason)
                assert not event.permanent
                del playing[event.episode]
                begin(slot, prompt)
            elif event.done:
                rewards[prompt.seed] = event.reward
                del playing[event.episode]
                begin(slot, next(prompts, None))
            else:
                observations.append(ByteCodec().text(event.observation.ids().tolist()))
                said = player(prompt.seed)(observations, random.Random(0))
                host.post([Step(event.episode, event.turn + 1, Segment.of([*said.encode(), END_OF_TURN]))])
    host.close()
    return Tally(rewards, failed)


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        with own_sandboxes(made / "probe"):
            pass
        _folder.append(made / "sandboxes")
        yield made / "sandboxes"


def check(count: int, factory: str, folder: Path) -> None:
    lease = Lease(factory)  # so that the source outlives the worker, and can be looked at
    tally = play(count, factory)
    source = shared_sandboxes(factory)
    assert isinstance(source, KilledSandboxes)
    killed = [each for each in source.made if each.killed]
    lost = [each for each in source.made if each.lost]
    assert killed
    assert lost
    assert set(lost) <= set(killed), "what was not killed is not lost"
    assert len(tally.failed) == len(lost), "every loss is a failure of the environment, and nothing else is one"
    assert all("SandboxLost" in reason for reason in tally.failed)
    assert tally.rewards == {seed: float(player(seed) is oracle) for seed in range(count)}, "all are replaced"
    sys.stdout.write(
        f"{count} episodes, {len(source.made)} sandboxes, {len(killed)} killed: {len(lost)} lost and replaced, "
        f"{len(killed) - len(lost)} after their last call\n"
    )
    names = launchers(folder)
    until(lambda: len(sandbox_folders(folder)) <= 2, "two sandboxes are kept warm, the folders of others are gone")
    until(lambda: len({Path(path).name for path in groups(names)}) <= 2, "and so are their cgroups")
    until(lambda: all(each.gone for each in source.made), "and their processes")
    assert mounts() == []
    lease.close()
    assert processes(folder) == []
    assert list(folder.iterdir()) == []
    assert groups(names) == []


def test_killed_sandboxes_are_replaced_and_leave_nothing(folder: Path) -> None:
    check(10, f"{__name__}:many", folder)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_episodes_with_killed_sandboxes(folder: Path) -> None:
    check(1000, f"{__name__}:some", folder)
