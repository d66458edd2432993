"""Harbor tasks played in real sandboxes: builds, the agent's commands, grading."""

import threading
from collections.abc import Iterator
from pathlib import Path

import harbor_folders
import pytest
import sandbox_parts

from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.tool_environment import ToolCalling
from rollart.backends.sandboxes.bubblewrap import BubblewrapSandboxes
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep, ToolError
from rollart.tasks import sandboxes as shared
from rollart.tasks.harbor import builds as builds_module
from rollart.tasks.harbor.builds import Builds, shared_builds
from rollart.tasks.harbor.environment import Harbor, rows_of, tasks_of
from rollart.types.chat import readable
from rollart.types.errors import BuildFailed, EnvironmentFault, RequestError, SandboxLost, SnapshotsFull
from rollart.types.ids import PromptId
from rollart.types.sandboxes import SandboxSpec
from rollart.types.trajectory import Prompt

SOURCE = "harbor-tests"
MISSING = "mkdir -p /logs/verifier; {0}"


@pytest.fixture(scope="module", autouse=True)
def source() -> Iterator[BubblewrapSandboxes]:
    """The source that all tests of this file name."""
    with sandbox_parts.public_folder() as folder, sandbox_parts.own_sandboxes(folder) as made:
        shared._sources[SOURCE] = made
        yield made
        del shared._sources[SOURCE]
        builds_module._shared.pop(SOURCE, None)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harbor_folders.write_all(tmp_path_factory.mktemp("ten"))


def prompt_of(folder: Path, name: str) -> Prompt:
    (row,) = (row for row in rows_of(str(folder)) if row["name"] == name)
    return Prompt(PromptId(name), "harbor", 1, dict(row))


class Playing:
    """One episode of a task."""

    def __init__(self, folder: Path, name: str = "hello", **settings: object) -> None:
        tasks_of.cache_clear()
        self.harbor = Harbor(str(folder), sandboxes=SOURCE, **settings)  # type: ignore[arg-type]
        self.first = self.harbor.reset(prompt_of(folder, name))

    def __enter__(self) -> Harbor:
        return self.harbor

    def __exit__(self, *_: object) -> None:
        self.harbor.close()


def variant(tmp_path: Path, **files: str) -> Path:
    """The task `hello` with other files."""
    harbor_folders.write({**harbor_folders.TASKS["hello"], **files}, tmp_path / "hello")
    return tmp_path


def graded_by(tmp_path: Path, test: str, toml: str = harbor_folders.OFFLINE) -> Harbor:
    files = {"tests/test.sh": harbor_folders.script(test), "task.toml": toml}
    return Playing(variant(tmp_path, **files)).harbor


@pytest.mark.parametrize("name", sorted(harbor_folders.TASKS))
def test_the_oracle_earns_1_and_doing_nothing_0(ten: Path, name: str) -> None:
    with Playing(ten, name) as harbor:
        assert harbor.scripted_action()
        assert harbor.finish("").reward == 1.0
    with Playing(ten, name) as harbor:
        last = harbor.finish("done")
        assert (last.reward, last.done, last.truncated) == (0.0, True, False)


def test_the_agent_works_by_calls_in_its_models_format(ten: Path) -> None:
    harbor = Harbor(str(ten), sandboxes=SOURCE)
    episode = ToolCalling(harbor, TaskSettings(environment="harbor:x", max_turns=3), ByteCodec())
    first = episode.reset(prompt_of(ten, "hello"))
    assert "bash: COMMAND (string)." in readable(first.observation)
    assert readable(first.observation).endswith("Write hello to hello.txt.")
    assert "/app" in readable(episode.step("I look.\nbash: pwd\nbash: ls").observation)
    episode.step("bash: echo hello > hello.txt; sleep 1000 & ")
    last = episode.step("bash: cat hello.txt")  # the last turn: it is graded as it is
    assert (last.reward, last.done, last.truncated) == (1.0, True, True)
    assert last.calls[0].arguments == {"command": "cat hello.txt"}
    episode.close()


def test_what_commands_ran_into_is_said(tmp_path: Path) -> None:
    toml = f"{harbor_folders.OFFLINE}memory_mb = 64\nstorage_mb = 8\n"
    with Playing(variant(tmp_path, **{"task.toml": toml})) as harbor:
        assert harbor.bash("echo out; echo error >&2; exit 3") == "out\nerror\n[exit code 3]"
        assert harbor.bash("true") == "[no output]"
        assert harbor.bash("kill -9 $$") == "[ended by signal 9]"
        assert "over the limit of memory" in harbor.bash("x=$(yes | head -c 400M)")
        assert "the disk is full" in harbor.bash("cat /dev/zero > zeros")
        with pytest.raises(ToolError, match="at most 160 KB fit"):
            harbor.bash("x" * 200_000)


def test_the_agents_time_is_that_of_its_commands(tmp_path: Path) -> None:
    toml = f"[agent]\ntimeout_sec = 1.0\n{harbor_folders.OFFLINE}"
    with Playing(variant(tmp_path, **{"task.toml": toml}), command_s=0.6) as harbor:
        assert "over its time limit" in harbor.bash("sleep 1000")
        assert "over its time limit" in harbor.bash("sleep 1000")
        with pytest.raises(ToolError, match="the time for commands is used up"):
            harbor.bash("true")
        assert harbor.finish("").reward == 0.0


def test_equal_builds_are_made_once(tmp_path: Path) -> None:
    """One builder works, and all other callers wait for it."""
    dockerfile = f"{harbor_folders.FROM}\nWORKDIR /app\nRUN echo built-once > hello.txt && sleep 0.3"
    for name in ("one", "two", "three"):
        harbor_folders.write(
            {**harbor_folders.TASKS["hello"], "environment/Dockerfile": dockerfile}, tmp_path / name
        )  # their texts differ in nothing but the name
    builds = shared_builds(SOURCE)
    before = builds.count
    all_there = threading.Barrier(6)
    said: list[str] = []

    def play(name: str) -> None:
        all_there.wait(60)
        with Playing(tmp_path, name) as harbor:
            said.append(harbor.bash("cat hello.txt"))

    threads = [threading.Thread(target=play, args=(name,)) for name in ("one", "two", "three") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert said == ["built-once"] * 6
    assert builds.count - before == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN echo no; exit 3", "line 2: RUN echo no; exit 3 ended with exit code 3: no"),
        ("RUN wget -T 1 -t 1 http://example.invalid", "; builds have no network: "),
        ("COPY missing /app/", "line 2: COPY there is no missing in environment"),
        ("COPY ../x /app/", "is outside of environment"),
        ("COPY Dockerfile Dockerfile app", "to a target that does not end with /"),
        ("WORKDIR /etc/x", "line 2: WORKDIR ended with exit code 1"),
    ],
)
def test_builds_fail_with_the_line(tmp_path: Path, line: str, said: str) -> None:
    folder = variant(tmp_path, **{"environment/Dockerfile": f"{harbor_folders.FROM}\n{line}"})
    before = shared_builds(SOURCE).count
    for _ in range(2):
        with pytest.raises(BuildFailed, match="hello/environment/Dockerfile, line 2: ") as failed:
            Playing(folder)
        assert said in str(failed.value)
    assert shared_builds(SOURCE).count == before + 1  # it would fail again


def test_a_build_has_its_time(tmp_path: Path) -> None:
    toml = f"{harbor_folders.OFFLINE}build_timeout_sec = 0.5\n"
    files = {"environment/Dockerfile": f"{harbor_folders.FROM}\nRUN sleep 1000", "task.toml": toml}
    with pytest.raises(BuildFailed, match="over its limit of time"):
        Playing(variant(tmp_path, **files))


def test_builds_keep_to_the_disk_quota(tmp_path: Path) -> None:
    """Builds that no episode uses make room; one that is in use stays."""
    for number in range(4):
        dockerfile = f"{harbor_folders.FROM}\nRUN head -c 900k /dev/zero > /srv/zeros && echo {number} > /srv/number"
        files = {**harbor_folders.TASKS["hello"], "environment/Dockerfile": dockerfile}
        harbor_folders.write(files, tmp_path / str(number))
    tasks = tasks_of(str(tmp_path))
    with sandbox_parts.public_folder() as folder, BubblewrapSandboxes(folder, warm=0, snapshot_mb=2) as small:
        builds = Builds(small)
        with builds.lease(tasks["0"].agent.image, 60) as used:
            for number in (1, 2, 3):
                with builds.lease(tasks[str(number)].agent.image, 60):
                    pass
            assert builds.count == 4
            with builds.lease(tasks["3"].agent.image, 60) as kept:
                with pytest.raises(SnapshotsFull), builds.lease(tasks["1"].agent.image, 60):
                    pass
                assert small.create(SandboxSpec(workdir="/"), snapshot=kept.snapshot).read_file("/srv/number") == b"3\n"
            assert small.create(SandboxSpec(workdir="/"), snapshot=used.snapshot).read_file("/srv/number") == b"0\n"
            with builds.lease(tasks["1"].agent.image, 60):  # that of 3 makes room
                assert builds.count == 6


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", 0.25),
        ("echo ' -2 ' > /logs/verifier/reward.txt", -2.0),
        ("echo 1 > /logs/verifier/reward.txt; echo 0.5 > /logs/verifier/reward.json", 0.5),
        ("echo '{\"passed\": 0.75}' > /logs/verifier/reward.json", 0.75),
        ('echo \'{"reward": true, "other": 0}\' > /logs/verifier/reward.json', 1.0),
    ],
)
def test_rewards(tmp_path: Path, test: str, reward: float) -> None:
    harbor = graded_by(tmp_path, test)
    assert harbor.finish("").reward == reward
    harbor.close()


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("echo nothing", r"left neither .* \(exit code 0\); the tests printed: nothing"),
        ("exit 5", r"\(exit code 5\)"),
        ("kill -9 $$", "left neither"),
        ("> /logs/verifier/reward.txt", "reward.txt is empty"),
        ("echo nan > /logs/verifier/reward.txt", "is no finite number"),
        ("echo 1e999 > /logs/verifier/reward.json", "is no finite number"),
        ("echo passed > /logs/verifier/reward.txt", "could not convert"),
        ("echo '{}' > /logs/verifier/reward.json", "has several rewards"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "has several rewards"),
        ("echo '\"1\"' > /logs/verifier/reward.json", "is no finite number"),
        ("printf 1%0400d 0 > /logs/verifier/reward.json", "is no finite number"),
        ("head -c 60000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json", "is nested too deeply"),
    ],
)
def test_without_a_finite_reward_there_is_none(tmp_path: Path, test: str, said: str) -> None:
    harbor = graded_by(tmp_path, test)
    with pytest.raises(EnvironmentFault, match=said):
        harbor.finish("")
    harbor.close()


def test_tests_over_their_time_are_the_agents_result(tmp_path: Path) -> None:
    toml = f"[verifier]\ntimeout_sec = 0.5\n{harbor_folders.OFFLINE}"
    harbor = graded_by(tmp_path, "echo 1 > /logs/verifier/reward.txt; sleep 1000", toml)
    last = harbor.finish("")
    assert (last.reward, last.observation) == (0.0, "Reward 0, the tests took longer than 0.5 s.")
    harbor.close()


def test_tests_that_a_limit_ended_are_the_agents_result(tmp_path: Path) -> None:
    toml = f"{harbor_folders.OFFLINE}storage_mb = 4\n"
    last = graded_by(tmp_path, "cat /dev/zero > /srv/zeros; exit 1", toml).finish("")
    assert (last.reward, last.observation) == (0.0, "Reward 0, the tests left no reward, over the limit of disk.")


def test_a_shared_state_has_no_processes_and_no_planted_tests(tmp_path: Path) -> None:
    test = (
        "[ -e /tests/planted ] && exit\nsleep 0.3\nif [ -e /app/alive ] && [ $(ls /proc | grep -c '^[0-9]') -lt 9 ]\n"
    )
    test += "then before=$(cat /app/alive); sleep 0.5; [ $before = $(cat /app/alive) ] && echo 1; fi "
    test += "> /logs/verifier/reward.txt"
    harbor = graded_by(tmp_path, test)
    harbor.bash("while true; do date +%N > /app/alive; sleep 0.05; done &")
    harbor.bash("mkdir -p /tests /logs/verifier; echo 5 > /logs/verifier/reward.json; touch /tests/planted")
    harbor.bash("while [ ! -e /app/alive ]; do sleep 0.05; done")
    harbor.bash("while true; do date +%N > /app/alive; sleep 0.05; done &")
    assert harbor.finish("").reward == 1.0
    harbor.close()


def test_folders_that_cannot_be_copied_are_the_agents_result(tmp_path: Path) -> None:
    """Else nesting them would be a way out of a low reward."""
    toml = f'artifacts = ["/app"]\n[verifier]\nenvironment_mode = "MODE"\n{harbor_folders.OFFLINE}'
    for mode in ("shared", "separate"):
        harbor = graded_by(tmp_path, "echo 1 > /logs/verifier/reward.txt", toml.replace("MODE", mode))
        assert harbor.bash("mkdir -p $(printf 'd/%.0s' $(seq 300))") == "[no output]"
        assert harbor.finish("").reward == 0.0
        harbor.close()


def test_separate_grading_gets_artifacts_only(tmp_path: Path) -> None:
    """The oracle of `separate-file` plants files that its tests look for; links do not carry others along."""
    folder = harbor_folders.write(harbor_folders.TASKS["separate-folder"], tmp_path / "separate-folder").parent
    with Playing(folder, "separate-folder") as harbor:
        harbor.bash("rm out/old; mkdir -p secret out/a; echo 5 > secret/five; ln -s ../../secret/five out/a/five")
        assert harbor.finish("").reward == 0.0
    with Playing(folder, "separate-folder") as harbor:
        assert harbor.bash("cd out && seq 11000 | xargs touch") == "[no output]"
        assert "more than may be collected" in str(harbor.finish("").observation)


def test_undeclared_tasks_may_be_graded_separately(tmp_path: Path) -> None:
    files = {"tests/test.sh": harbor_folders.script("ls /app /srv | tr '\\n' ' ' > /tmp/x; "
             "if grep -q mine /tmp/x && ! grep -q planted /tmp/x; then echo 1; else echo 0; fi "
             "> /logs/verifier/reward.txt")}  # fmt: skip
    for mode, reward in (("separate", 1.0), ("shared", 0.0)):
        with Playing(variant(tmp_path, **files), environment_mode=mode) as harbor:
            harbor.bash("touch mine /srv/planted")
            assert harbor.finish("").reward == reward


def test_the_whole_machine_cannot_be_carried_over(tmp_path: Path) -> None:
    folder = variant(tmp_path, **{"environment/Dockerfile": harbor_folders.FROM})
    with pytest.raises(RequestError, match="its working directory is /"):
        Playing(folder, environment_mode="separate")


def test_artifacts_may_be_large_files(tmp_path: Path) -> None:
    toml = f'artifacts = ["/app/large"]\n[verifier]\nenvironment_mode = "separate"\n{harbor_folders.OFFLINE}'
    harbor = graded_by(tmp_path, "stat -c %s /app/large > /logs/verifier/reward.txt", toml)
    harbor.bash("head -c 20M /dev/zero > large")
    assert harbor.finish("").reward == 20 * 2**20
    harbor.close()


def test_a_killed_sandbox_is_a_failure_and_is_replaced(ten: Path) -> None:
    playing = Playing(ten)
    assert playing.harbor._sandbox is not None
    sandbox_parts.kill(playing.harbor._sandbox)
    with pytest.raises(SandboxLost):
        playing.harbor.bash("sleep 1000")
    playing.harbor.reset(prompt_of(ten, "hello"))
    assert playing.harbor.bash("echo hello > hello.txt") == "[no output]"
    assert playing.harbor.finish("").reward == 1.0
    playing.harbor.close()


def test_files_that_changed_are_not_played(tmp_path: Path) -> None:
    prompt = prompt_of(variant(tmp_path), "hello")
    tasks_of.cache_clear()
    harbor = Harbor(str(tmp_path), sandboxes=SOURCE)
    (tmp_path / "hello" / "instruction.md").write_text("Something else.")
    with pytest.raises(RequestError, match="are not those that the run was started with"):
        harbor.reset(prompt)
    with pytest.raises(RequestError, match="there is no task folder 'other'"):
        harbor.reset(Prompt(PromptId("1"), "harbor", 1, {"task_folder": "other"}))
    with pytest.raises(EnvironmentFault, match="has not begun"):
        harbor.finish("")


def test_nothing_is_left(ten: Path) -> None:
    tasks_of.cache_clear()
    with sandbox_parts.public_folder() as folder, sandbox_parts.own_sandboxes(folder) as made:
        shared._sources["harbor-left"] = made
        lease = Harbor.open_shared(id=str(ten), sandboxes="harbor-left")
        harbor = Harbor(str(ten), sandboxes="harbor-left")
        harbor.reset(prompt_of(ten, "hello"))
        harbor.bash("sleep 1000 &")
        assert isinstance(harbor.finish(""), TextStep)
        harbor.close()
        assert any(folder.rglob("*"))
        lease.close()
        assert "harbor-left" not in shared._sources
        assert not [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
