"""Whatever is killed, nothing is left of a sandbox: no process, mount, folder or cgroup; and the loss is typed."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_parts import (
    groups,
    keeper_is_gone,
    kill,
    launchers,
    mounts,
    own_sandboxes,
    processes,
    public_folder,
    sandbox_folders,
    until,
)

from rollart.backends.sandboxes import bubblewrap
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandbox, BubblewrapSandboxes
from rollart.types.errors import SandboxFault, SandboxLost, SandboxUnavailable
from rollart.types.failures import FailureKind
from rollart.types.sandboxes import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_mb=64, disk_mb=8, files=200, processes=16))


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


def test_closing_leaves_nothing(folder: Path) -> None:
    with own_sandboxes(folder, warm=2) as sandboxes:
        made = [sandboxes.create(SPEC) for _ in range(3)]
        names = launchers(folder)
        made[0].exec(["sh", "-c", "sleep 1000 &"], keep_background=True)
        made[1].snapshot()
        keepers = [sandbox.process for sandbox in made]
        made[0].close()
        until(lambda: keeper_is_gone(keepers[0]), "the keeper of a closed sandbox is gone")
        assert processes(folder)
    assert processes(folder) == []
    assert list(folder.iterdir()) == []
    assert groups(names) == []
    assert all(keeper_is_gone(keeper) for keeper in keepers)


def test_mounts_are_in_no_namespace_but_the_launchers(folder: Path) -> None:
    with own_sandboxes(folder) as sandboxes:
        sandbox = sandboxes.create(SPEC)
        assert sandbox.exec(["true"]).ok
        assert mounts() == []


def test_sandboxes_killed_at_random_moments_are_replaced_and_leave_nothing(folder: Path) -> None:
    """Every killed one is an infrastructure failure and no result; every other one has its result."""
    draws = random.Random(7)
    with own_sandboxes(folder, warm=2) as sandboxes:
        lost, done = [], []

        def episodes(number: int) -> None:
            own = random.Random(number)
            for episode in range(12):
                sandbox = sandboxes.create(SPEC)
                to_kill = own.random() < 0.4
                killer = threading.Timer(own.uniform(0.0, 0.15), kill, [sandbox])
                try:
                    if to_kill:
                        killer.start()
                    sandbox.write_file("n", str(episode).encode())
                    # A killed one would sleep for ever, so it never has a result.
                    result = sandbox.exec(["sh", "-c", "sleep 1000" if to_kill else "cat n"], time_s=300.0)
                    assert result.stdout == str(episode).encode()
                    done.append(result)
                except SandboxFault as error:
                    lost.append((error, to_kill))
                finally:
                    killer.cancel()
                    sandbox.close()

        threads = [threading.Thread(target=episodes, args=(draws.randrange(1000),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(lost) + len(done) == 36
        assert lost
        assert all(to_kill and isinstance(error, SandboxLost) for error, to_kill in lost)
        assert {error.kind for error, _ in lost} == {FailureKind.WORKER_LOST}
        assert done
        names = launchers(folder)
        # Two are kept warm; all others are gone, while the launcher goes on.
        until(lambda: len(sandbox_folders(folder)) <= 2, "folders of the killed are gone")
        until(lambda: len({Path(path).name for path in groups(names)}) <= 2, "cgroups of the killed are gone")
    assert processes(folder) == []
    assert list(folder.iterdir()) == []
    assert groups(names) == []


def test_a_killed_supervisor_takes_its_sandbox_along(folder: Path) -> None:
    with own_sandboxes(folder) as sandboxes:
        sandbox = sandboxes.create(SPEC)
        keeper = sandbox.process
        os.kill(parent_of(parent_of(keeper)), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            sandbox.exec(["sleep", "1000"], time_s=300.0)
        until(lambda: keeper_is_gone(keeper), "the keeper is gone")
        names = launchers(folder)
        until(lambda: sandbox_folders(folder) == [], "the launcher has removed the folder")
        until(lambda: groups(names) == [], "the launcher has removed the cgroups")
        sandbox.reset()
        assert sandbox.exec(["true"]).ok


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def launcher_of(sandbox: BubblewrapSandbox) -> int:
    return parent_of(parent_of(parent_of(sandbox.process)))


def test_a_killed_launcher_is_replaced_with_all_its_sandboxes(folder: Path) -> None:
    with own_sandboxes(folder) as sandboxes:
        sandbox = sandboxes.create(SPEC)
        sandbox.write_file("kept", b"kept")
        snapshot = sandbox.snapshot()
        keeper, names = sandbox.process, launchers(folder)
        os.kill(launcher_of(sandbox), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            sandbox.exec(["sleep", "1000"], time_s=300.0)
        until(lambda: keeper_is_gone(keeper), "the keeper is gone")
        sandbox.reset(snapshot)
        assert sandbox.read_file("kept") == b"kept"
        until(lambda: groups(names) == [], "the cgroups of the killed launcher are gone")
        assert launchers(folder) != names
    assert list(folder.iterdir()) == []


WORKER = """
import sys
from pathlib import Path
from rollart.backends.sandboxes import bubblewrap
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.types.sandboxes import Limits, SandboxSpec
sandboxes = BubblewrapSandboxes(Path(sys.argv[1]), warm=1)
made = [sandboxes.create(SandboxSpec(limits=Limits(memory_mb=64, disk_mb=8))) for _ in range(2)]
made[0].exec(["sh", "-c", "sleep 1000 &"], keep_background=True)
made[0].snapshot()
print(*(sandbox.process for sandbox in made), flush=True)
made[1].exec(["sleep", "1000"], time_s=1000.0)
"""


def start_worker(folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    return worker, [int(word) for word in worker.stdout.readline().split()]


def test_a_killed_worker_leaves_no_process_and_the_next_removes_its_snapshots(folder: Path) -> None:
    with own_sandboxes(folder / "probe"):
        pass
    worker, keepers = start_worker(folder / "s")
    with worker:
        names = launchers(folder / "s")
        worker.kill()
    until(lambda: processes(folder / "s") == [], "all processes are gone")
    assert all(keeper_is_gone(keeper) for keeper in keepers)
    until(lambda: launchers(folder / "s") == [], "the launcher has removed its folder")
    assert groups(names) == []
    with own_sandboxes(folder / "s") as sandboxes:
        assert sandboxes.create(SPEC).exec(["true"]).ok
        assert len([path for path in (folder / "s").iterdir() if path.name.startswith("worker-")]) == 1


def test_when_everything_is_killed_at_once_the_next_launcher_removes_the_rest(folder: Path) -> None:
    with own_sandboxes(folder / "probe"):
        pass
    worker, keepers = start_worker(folder / "s")
    with worker:
        (name,) = launchers(folder / "s")
        # The launcher and its supervisors are stopped first, so that none of them can clean up.
        trees = processes(folder / "s")
        for process in trees:
            os.kill(process, signal.SIGSTOP)
        worker.kill()
        for process in trees:
            with contextlib.suppress(ProcessLookupError):  # it may die with its worker
                os.kill(process, signal.SIGKILL)
    until(lambda: processes(folder / "s") == [], "all processes are gone")
    until(lambda: all(keeper_is_gone(keeper) for keeper in keepers), "the keepers are gone")
    assert launchers(folder / "s") == [name]
    with own_sandboxes(folder / "s") as sandboxes:
        assert sandboxes.create(SPEC).exec(["true"]).ok
        assert name not in launchers(folder / "s")
        assert groups([name]) == []


def test_a_sandbox_that_is_ready_too_late_is_adopted(folder: Path) -> None:
    """Row 10: the deadline of `create` passes while the sandbox is being made."""
    with own_sandboxes(folder) as sandboxes:
        with pytest.raises(SandboxFault) as caught:
            sandboxes.create(SPEC, deadline_s=0.0)
        assert caught.value.kind is FailureKind.DEADLINE
        assert sandboxes.create(SPEC).exec(["true"]).ok
    assert list(folder.iterdir()) == []


def test_many_sandboxes_at_once(folder: Path) -> None:
    """Row 11: nobody fails because many ask at the same time."""
    made, results = [], []
    with own_sandboxes(folder, makers=4) as sandboxes:

        def use(number: int) -> None:
            sandbox = sandboxes.create(SPEC, deadline_s=300.0)
            made.append(sandbox)
            results.append(sandbox.exec(["echo", str(number)]).stdout.strip())

        threads = [threading.Thread(target=use, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(int, results)) == list(range(24))
        assert len({sandbox.name for sandbox in made}) == 24
        assert len(sandbox_folders(folder)) == 24
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_storm_of_creations(folder: Path) -> None:
    """Row 11 at the scale of a small machine: 1,000 at once, a few of which exist at the same time. None fails."""
    done: list[bytes] = []
    with own_sandboxes(folder, warm=2, makers=4) as sandboxes:

        def use(number: int) -> None:
            sandbox = sandboxes.create(SPEC, deadline_s=600.0)
            done.append(sandbox.exec(["echo", str(number)], time_s=300.0).stdout)
            sandbox.close()

        threads = [threading.Thread(target=use, args=(number,)) for number in range(1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(int, done)) == list(range(1000))
        until(lambda: len(sandbox_folders(folder)) <= 2, "only the warm ones are left")
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


def test_what_was_created_after_it_was_given_up_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 10: the launcher is stuck, every attempt times out, and then all of them are carried out."""
    with own_sandboxes(folder, makers=1) as sandboxes:
        first = sandboxes.create(SPEC)
        stuck = launcher_of(first)
        names = launchers(folder)
        os.kill(stuck, signal.SIGSTOP)
        monkeypatch.setattr(bubblewrap, "CREATE_S", 0.2)
        with pytest.raises(SandboxFault, match="did not answer within 0"):
            sandboxes.create(SPEC)
        monkeypatch.setattr(bubblewrap, "CREATE_S", 45.0)
        os.kill(stuck, signal.SIGCONT)
        assert sandboxes.create(SPEC).exec(["true"]).ok
        until(lambda: len(sandbox_folders(folder)) == 2, "those without a caller are removed")
        assert launchers(folder) == names
        assert first.exec(["true"]).ok
    assert processes(folder) == []
    assert list(folder.iterdir()) == []
    assert groups(names) == []


def test_a_folder_that_the_user_of_sandboxes_cannot_reach_is_refused(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs sandboxes as another user")
    folder.chmod(0o700)
    with BubblewrapSandboxes(folder / "s", warm=0) as sandboxes, pytest.raises(SandboxUnavailable, match="o\\+x"):
        sandboxes.create(SPEC)
    folder.chmod(0o755)


def test_a_closed_source_creates_nothing(folder: Path) -> None:
    with own_sandboxes(folder) as sandboxes:
        sandboxes.close()
    with pytest.raises(SandboxFault, match="closed"):
        sandboxes.create(SPEC)


def test_a_folder_that_cannot_be_made_is_a_fault(folder: Path) -> None:
    (folder / "file").touch()
    with BubblewrapSandboxes(folder / "file" / "s", warm=0) as sandboxes, pytest.raises(SandboxFault, match="file"):
        sandboxes.create(SPEC)


@pytest.mark.parametrize("room", [0, 1])
def test_a_launcher_without_room_for_files_fails_one_creation(folder: Path, room: int) -> None:
    """With room for one it receives the order, and fails after it has started a supervisor."""
    with own_sandboxes(folder) as sandboxes:
        first = sandboxes.create(SPEC)
        launcher = launcher_of(first)
        limits = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
        lowest_free = next(number for number in range(1000) if not Path(f"/proc/{launcher}/fd/{number}").is_symlink())
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (lowest_free + room, limits[1]))
        with pytest.raises(SandboxFault):
            sandboxes.create(SPEC)
        assert first.exec(["true"]).ok
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, limits)
        assert sandboxes.create(SPEC).exec(["true"]).ok
        assert launcher_of(first) == launcher
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


def test_layers_of_a_forgotten_snapshot_go_with_its_last_sandbox(folder: Path) -> None:
    with own_sandboxes(folder) as sandboxes:
        first, second = sandboxes.create(SPEC), sandboxes.create(SPEC)
        (kept,) = (path for path in folder.iterdir() if path.name.startswith("worker-"))
        before = sorted(path.name for path in kept.iterdir())
        snapshot = first.snapshot()
        first.reset(snapshot)
        second.reset(snapshot)
        sandboxes.forget(snapshot)
        first.close()
        assert snapshot in [path.name for path in kept.iterdir()]
        second.reset()
        assert sorted(path.name for path in kept.iterdir()) == before


def test_what_a_callback_raises_is_not_left_to_the_next_call(folder: Path) -> None:
    """The answer of the first command would be taken for that of the second."""

    def fails(*_: object) -> None:
        raise ValueError("a callback failed")

    with own_sandboxes(folder) as sandboxes:
        sandbox = sandboxes.create(SPEC)
        with pytest.raises(ValueError, match="a callback failed"):
            sandbox.exec(["echo", "first"], on_output=fails)
        with pytest.raises(SandboxLost):
            sandbox.exec(["false"])
        sandbox.reset()
        assert sandbox.exec(["false"]).exit_code == 1


def test_snapshots_have_a_quota(folder: Path) -> None:
    with BubblewrapSandboxes(folder, warm=0, snapshot_mb=3) as small, own_sandboxes(folder / "probe"):
        sandbox = small.create(SPEC)
        sandbox.write_file("two", bytes(2 * 2**20))
        first = sandbox.snapshot()
        with pytest.raises(SandboxFault, match="forget some"):
            sandbox.snapshot()
        small.forget(first)
        sandbox.reset(sandbox.snapshot())
        assert len(sandbox.read_file("two")) == 2 * 2**20


def test_a_killed_sandbox_is_never_the_result_of_its_command(folder: Path) -> None:
    """The kernel kills commands first, and the keeper is seen to have ended only after that."""
    with own_sandboxes(folder) as sandboxes:
        for _ in range(25):
            sandbox = sandboxes.create(SPEC)
            kill(sandbox)
            with pytest.raises(SandboxLost):
                sandbox.exec(["sleep", "1000"])
            sandbox.close()
