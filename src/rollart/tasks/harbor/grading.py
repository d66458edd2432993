"""Grading: tests run in a fresh sandbox, where nothing that the agent started is running.

    separate   declared artifacts ──► a sandbox made from the image of the verifier
    shared     all that was written ─► a sandbox made from that state, as Harbor's tests find it
                                        then /tests, tests/test.sh, /logs/verifier/reward.json or reward.txt

What grading may end in:

| the tests                                              | result |
|---|---|
| leave a finite number                                  | that reward |
| take longer than `verifier.timeout_sec`                | reward 0: what takes so long is the agent's code |
| leave no reward, and ran over memory, processes, disk  | reward 0, for the same reason |
| cannot begin: the files are too many, or nested too deeply to be copied | reward 0, for the same reason |
| leave none, an empty or another one                    | `EnvironmentFault`: no reward |

Harbor, too, has no reward for tests over their time, and counts such trials as 0 in its means. Without this rule an
agent could avoid a low reward by an endless loop.
"""

import json
import math
import shlex
import tempfile
from pathlib import Path
from typing import NamedTuple

from rollart.ports.sandbox import MAX_DOWNLOAD_BYTES, MAX_DOWNLOAD_FILES, Sandbox
from rollart.tasks.harbor.builds import DISK_MB, FILES, MEMORY_MB, PROCESSES, ROOT_USERS, Builds, Built
from rollart.tasks.harbor.folders import SHARED, HarborTask, Place
from rollart.types.errors import EnvironmentFault, SandboxFileError
from rollart.types.sandboxes import ExecResult, Limits, SandboxSpec

TESTS, LOGS = "/tests", "/logs/verifier"
REWARDS = (f"{LOGS}/reward.json", f"{LOGS}/reward.txt")
REWARD = "reward"
MAX_REWARD_BYTES = 2**16
OUTPUT_BYTES = 4000
SETUP_S = 60.0


class Grade(NamedTuple):
    """`about` says how the reward came about; `output` is the end of what the tests printed."""

    reward: float
    about: str
    output: bytes = b""


def spec_of(place: Place, built: Built, user: str | int | None) -> SandboxSpec:
    """The sandbox of a place; `user` in place of that of the image."""
    table = place.table
    limits = Limits(
        memory_mb=table.memory_mb or MEMORY_MB, disk_mb=table.storage_mb or DISK_MB, processes=PROCESSES, files=FILES
    )
    return SandboxSpec(
        base=place.image.base.folder,
        limits=limits,
        env=tuple((dict(built.env) | table.env).items()),
        workdir=table.workdir or built.workdir,
        root=str(built.user if user is None else user) in ROOT_USERS,
    )


def grade(task: HarborTask, agent: Sandbox, built: Built, builds: Builds) -> Grade:
    """Grade what the agent left; its sandbox is closed."""
    agent.exec(["/bin/true"])  # ends what runs in the background
    if task.mode == SHARED:
        return _shared(task, agent, built, builds)
    place, user = task.verifier, task.config.verifier.user
    for hook in task.collect:
        agent.exec(["/bin/sh", "-c", hook.command], time_s=hook.timeout_sec)
    with (
        tempfile.TemporaryDirectory(prefix="rollart-artifacts-") as kept,
        builds.lease(place.image, place.table.build_timeout_sec) as clean,
    ):
        artifacts = _collect(task, agent, built, Path(kept))
        agent.close()
        if artifacts is None:
            return Grade(0.0, "the artifacts are more than may be collected")
        sandbox = builds.sandboxes.create(spec_of(place, clean, user), snapshot=clean.snapshot)
        try:
            _place(sandbox, artifacts)
            return _tested(task, sandbox)
        finally:
            sandbox.close()


def _shared(task: HarborTask, agent: Sandbox, built: Built, builds: Builds) -> Grade:
    try:
        state = builds.snapshot(agent)
    except SandboxFileError as error:
        return Grade(0.0, f"its files cannot be graded: {error}")
    finally:
        agent.close()
    try:
        spec = spec_of(task.verifier, built, task.config.verifier.user)
        sandbox = builds.sandboxes.create(spec, snapshot=state, once=True)
        try:
            return _tested(task, sandbox)
        finally:
            sandbox.close()
    finally:
        builds.sandboxes.forget(state)


def _collect(task: HarborTask, agent: Sandbox, built: Built, kept: Path) -> list[tuple[str, Path]] | None:
    """Artifacts that are there, as path in the sandbox and copy; None if they are too many or too large."""
    found = []
    paths = [*task.artifacts, *([task.agent.table.workdir or built.workdir] if task.with_workdir else [])]
    for number, path in enumerate(paths):
        copy = kept / str(number)
        try:
            if agent.exec(["/usr/bin/test", "-d", path]).ok:
                agent.download(path, copy, max_bytes=MAX_DOWNLOAD_BYTES, max_files=MAX_DOWNLOAD_FILES)
            elif agent.exec(["/usr/bin/test", "-f", path]).ok:
                copy.write_bytes(agent.read_file(path, max_bytes=MAX_DOWNLOAD_BYTES))
                copy.chmod(0o755 if agent.exec(["/usr/bin/test", "-x", path]).ok else 0o644)
            else:
                continue
        except SandboxFileError:
            return None
        found.append((path, copy))
    return found


def _place(sandbox: Sandbox, artifacts: list[tuple[str, Path]]) -> None:
    """Put artifacts where they were; folders replace those of the image."""
    for path, copy in artifacts:
        if copy.is_dir():
            quoted = shlex.quote(path)
            _done(sandbox, f"mkdir -p {quoted} && find {quoted} -mindepth 1 -delete")
            sandbox.upload(copy, path)
        else:
            sandbox.write_file(path, copy.read_bytes(), executable=bool(copy.stat().st_mode & 0o100))


def _tested(task: HarborTask, sandbox: Sandbox) -> Grade:
    config = task.config.verifier
    _done(
        sandbox, f"test -d /logs && test ! -L /logs || rm -rf /logs; rm -rf {LOGS}; mkdir -p {LOGS}; chmod 777 {LOGS}"
    )
    if not task.own_tests:
        _done(sandbox, f"rm -rf {TESTS}")
        sandbox.upload(task.folder / "tests", TESTS)
        _done(sandbox, f"chmod +x {TESTS}/test.sh")
    command = ["/bin/bash", "-c", f"exec 2>&1; {TESTS}/test.sh"]
    result = sandbox.exec(command, env=config.env, time_s=config.timeout_sec)
    output = result.stdout[-OUTPUT_BYTES:]
    if result.timed_out:
        return Grade(0.0, f"the tests took longer than {config.timeout_sec:g} s", output)
    reward = _reward(task, sandbox, result)
    if reward is None:
        return Grade(0.0, f"the tests left no reward, over the limit of {', '.join(result.exceeded)}", output)
    return Grade(reward, "by the tests", output)


def _reward(task: HarborTask, sandbox: Sandbox, result: ExecResult) -> float | None:
    """The reward that the tests left; None if they did not because of a limit."""
    for path in REWARDS:
        try:
            content = sandbox.read_file(path, max_bytes=MAX_REWARD_BYTES)
        except SandboxFileError:
            continue
        try:
            return _number(content, path)
        except ValueError as error:
            raise _fault(task, f"{path} {error}", result) from error
    if set(result.exceeded) - {"output"}:
        return None
    raise _fault(task, f"the tests left neither {REWARDS[0]} nor {REWARDS[1]}", result)


def _number(content: bytes, path: str) -> float:
    if not content.strip():
        raise ValueError("is empty")
    try:
        value: object = json.loads(content) if path.endswith(".json") else float(content)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if isinstance(value, dict):
        if REWARD not in value and len(value) != 1:
            raise ValueError(f"has several rewards, and none of them is called {REWARD!r}")
        value = value.get(REWARD, next(iter(value.values()), None))
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"is no finite number: {content[:80]!r}")
    return number


def _fault(task: HarborTask, why: str, result: ExecResult) -> EnvironmentFault:
    ended = f"exit code {result.exit_code}" if result.exit_code is not None else f"signal {result.signal}"
    output = result.stdout.decode(errors="replace").strip()[-500:]
    return EnvironmentFault(f"Harbor task {task.name}: {why} ({ended}); the tests printed: {output or 'nothing'}")


def _done(sandbox: Sandbox, script: str) -> None:
    result = sandbox.exec(["/bin/sh", "-c", script], cwd="/", time_s=SETUP_S)
    if not result.ok:
        output = (result.stdout + result.stderr).decode(errors="replace").strip()[-300:]
        raise EnvironmentFault(f"a sandbox for grading could not be prepared: {output}")
