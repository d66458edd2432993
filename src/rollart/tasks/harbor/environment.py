"""`harbor:PATH`: Harbor's tasks, played in sandboxes without Docker.

    rollart.Task("harbor:tasks/", max_turns=20, step_deadline_s=700)

A prompt is a task folder. The agent sees its instruction and works with the tool `bash`, in a sandbox that starts from
the build of its Dockerfile. An answer that calls no tool submits the work; then a second, fresh sandbox grades it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollart.ports.environment import TextStep, ToolError
from rollart.ports.sandbox import Sandbox
from rollart.tasks.harbor import folders
from rollart.tasks.harbor.builds import Built, shared_builds
from rollart.tasks.harbor.folders import SEPARATE, SHARED, HarborTask
from rollart.tasks.harbor.grading import grade, spec_of
from rollart.tasks.sandboxes import BUBBLEWRAP, Lease
from rollart.types.chat import Message
from rollart.types.errors import EnvironmentFault, RequestError
from rollart.types.sandboxes import ExecResult
from rollart.types.trajectory import Prompt

FOLDER, DIGEST = "task_folder", "digest"
"""Keys of a prompt's data."""
SYSTEM = "You work on a Linux machine without network, by calling tools. When the task is done, answer without a call."
COMMAND_S = 30.0
ORACLE_S = 600.0
"""Limit of a solution whose task declares no limit for the agent."""
SUBMITTED = "The task is done."
OVER = {
    "time": "killed after {seconds:.0f} s: over its time limit",
    "memory": "a process was killed: over the limit of memory",
    "processes": "a process could not be started: over the limit of processes",
    "disk": "the disk is full",
}
_CALLS = ("pwd", "echo done", "cat /etc/hostname", "false", "no-such-program", "")


@lru_cache(maxsize=8)
def tasks_of(
    path: str, roots: tuple[tuple[str, str], ...] = (), offline: bool = False, environment_mode: str = SHARED
) -> Mapping[str, HarborTask]:
    """The tasks of a folder by name; `RequestError` names the first that cannot be played."""
    found = folders.find(Path(path))
    return {
        name: folders.read(folder, roots=dict(roots), offline=offline, undeclared_mode=environment_mode)
        for name, folder in found.items()
    }


def rows_of(path: str) -> list[dict[str, str]]:
    """A row for each task folder: the content alone decides on which side of the split it is."""
    return [
        {"id": name, "name": name, FOLDER: name, DIGEST: folders.digest_of(folder)}
        for name, folder in folders.find(Path(path)).items()
    ]


class Harbor:
    """A `ToolEnvironment`.

    `roots`: folders with root file systems, by patterns of image names. `offline`: also play tasks that ask for a
    network, without it. `environment_mode`: of tasks that declare none; `separate` grades nothing but their artifacts
    and working directory. `system`: the system message, may be empty. `command_s`: limit of one command of the agent.
    `sandboxes`: factory of their source, which has to have snapshots.
    """

    def __init__(
        self,
        id: str,
        roots: Mapping[str, str] | None = None,
        offline: bool = False,
        environment_mode: str = SHARED,
        system: str = SYSTEM,
        command_s: float = COMMAND_S,
        sandboxes: str = BUBBLEWRAP,
    ) -> None:
        if environment_mode not in (SHARED, SEPARATE):
            raise RequestError(f"environment_mode is {environment_mode!r}; it is {SHARED!r} or {SEPARATE!r}")
        self.tasks = tasks_of(id, tuple(sorted((roots or {}).items())), offline, environment_mode)
        self._system = system
        self._source = sandboxes
        self._open = ExitStack()
        self._task: HarborTask | None = None
        self._built: Built | None = None
        self._sandbox: Sandbox | None = None
        self._command_s = command_s
        self._used_s = 0.0

    @staticmethod
    def open_shared(*, sandboxes: str = BUBBLEWRAP, **settings: Any) -> Lease:  # noqa: ARG004 - of the environments
        """The source of sandboxes, with all builds, while a worker has environments."""
        return Lease(sandboxes)

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        return (self.bash,)

    @property
    def _left_s(self) -> float:
        """Rest of the agent's time, which is that of its commands: waiting for engines does not count."""
        limit = None if self._task is None else self._task.config.agent.timeout_sec
        return float("inf") if limit is None else limit - self._used_s

    def reset(self, prompt: Prompt) -> TextStep:
        self.close()
        self._used_s = 0.0
        self._task = task = self._task_of(prompt)
        builds = shared_builds(self._source)
        place = task.agent
        self._built = self._open.enter_context(builds.lease(place.image, place.table.build_timeout_sec))
        spec = spec_of(place, self._built, task.config.agent.user)
        if task.with_workdir and spec.workdir == "/":
            raise RequestError(
                f"Harbor task {task.name}: its working directory is /, which cannot be graded separately; declare "
                "environment_mode and artifacts in its task.toml"
            )
        self._sandbox = builds.sandboxes.create(spec, snapshot=self._built.snapshot)
        self._open.callback(self._sandbox.close)
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return TextStep([*system, {"role": "user", "content": task.instruction}])

    def bash(self, command: str) -> str:
        """Run a command with bash, in the working directory; returns what it prints.

        Args:
            command: The command. Each starts in the working directory again; what it leaves in the background runs on.
        """
        if self._left_s <= 0:
            raise ToolError("the time for commands is used up; answer without a call")
        try:
            result = self._begun()[1].exec(
                ["/bin/bash", "-c", 'exec /bin/bash -c "$0" 2>&1', command],
                time_s=min(self._command_s, self._left_s),
                keep_background=True,
            )
        except ValueError as error:
            raise ToolError(str(error)) from error
        self._used_s += result.seconds
        return _shown(result)

    def finish(self, answer: str) -> TextStep:  # noqa: ARG002 - the work counts, not what is said of it
        task, sandbox = self._begun()
        assert self._built is not None
        graded = grade(task, sandbox, self._built, shared_builds(self._source))
        return TextStep(f"Reward {graded.reward:g}, {graded.about}.", graded.reward, done=True, artifact=graded.output)

    def close(self) -> None:
        opened, self._open = self._open, ExitStack()
        self._sandbox = self._built = self._task = None
        opened.close()

    # --- for `rollart env check`

    def random_call(self, seed: int) -> tuple[str, dict[str, str]] | None:
        """A harmless command, or none: then the episode ends."""
        command = _CALLS[seed % len(_CALLS)]
        return ("bash", {"command": command}) if command else None

    def scripted_action(self) -> str | None:
        """Solve the task by its `solution/solve.sh`, as Harbor's oracle does; None if it has none."""
        task, sandbox = self._begun()
        if not task.has_solution:
            return None
        config = task.config
        sandbox.upload(task.folder / "solution", "/solution")
        sandbox.exec(["/bin/chmod", "+x", "/solution/solve.sh"])
        sandbox.exec(
            ["/bin/bash", "-c", "/solution/solve.sh"],
            env={"DEBIAN_FRONTEND": "noninteractive"} | config.solution.env,
            time_s=config.agent.timeout_sec or ORACLE_S,
            keep_background=True,
        )
        return SUBMITTED

    def _begun(self) -> tuple[HarborTask, Sandbox]:
        if self._task is None or self._sandbox is None:
            raise EnvironmentFault("the episode has not begun")
        return self._task, self._sandbox

    def _task_of(self, prompt: Prompt) -> HarborTask:
        name = prompt.data.get(FOLDER)
        task = self.tasks.get(str(name))
        if task is None:
            raise RequestError(f"prompt {prompt.id}: there is no task folder {name!r}; leave `prompts` to the task")
        digest = folders.digest_of(task.folder)
        if digest != task.digest or digest != prompt.data.get(DIGEST, digest):
            raise RequestError(f"the files of {task.folder} are not those that the run was started with")
        return task


def _shown(result: ExecResult) -> str:
    """Output of a command, with what else there is to know."""
    text = result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace")
    notes = [OVER[limit].format(seconds=result.seconds) for limit in result.exceeded if limit in OVER]
    if not notes and result.exit_code:
        notes = [f"exit code {result.exit_code}"]
    elif not notes and result.signal is not None:
        notes = [f"ended by signal {result.signal}"]
    lines = [text.rstrip("\n"), *(f"[{note}]" for note in notes)]
    return "\n".join(line for line in lines if line) or "[no output]"
