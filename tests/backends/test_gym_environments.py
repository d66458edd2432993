import asyncio
from pathlib import Path

import pytest
from parts import Driver, end_threads

from rollart.backends.environments.codec import END_OF_TURN, ByteCodec
from rollart.backends.environments.gym import GymEnvironment, as_text_environment, make_gym
from rollart.backends.environments.host import EnvironmentHost
from rollart.ports.environment import TextStep
from rollart.types.messages import Close, EnvironmentFailed, Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt, state_key

CLOSED = []


class Countdown:
    """A plain class in Gymnasium's form."""

    def reset(self, *, seed=None, options=None):
        self.left = seed
        return f"{self.left} left, {options}", {}

    def step(self, action):
        if action == "late":
            return "too late", 0.0, False, True, {}
        self.left -= int(action)
        return f"{self.left} left", float(self.left == 0), self.left <= 0, False, {}


class AsyncCountdown(Countdown):
    """The same with coroutines, and something of its own that needs one loop for the whole episode."""

    async def reset(self, *, seed=None, options=None):
        self.lock = asyncio.Event()
        self.background = asyncio.get_running_loop().create_task(self.lock.wait())
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        assert self.background.get_loop() is asyncio.get_running_loop()
        return super().step(action)

    async def close(self):
        CLOSED.append(self.background)


class AsyncText:
    """A `TextEnvironment` with coroutines."""

    async def reset(self, prompt):
        await asyncio.sleep(0)
        return TextStep(f"{prompt.seed} left, {prompt.data}")

    async def step(self, action):
        return TextStep(f"{3 - int(action)} left", float(action == "3"), done=action == "3")

    async def close(self):
        await asyncio.sleep(0)


class Stubborn(AsyncText):
    async def close(self):
        CLOSED.append(asyncio.get_running_loop())
        raise OSError("does not leave")


def host(environment, **settings):
    return Driver(EnvironmentHost, {"task": "t", "environment": environment, "slots": 1, **settings})


def one(driver, command):
    driver.send(command)
    (answer,) = driver.answers()
    return answer


def reset(driver, episode=1):
    return one(driver, Reset(episode, 0, Prompt("p", "t", 3, {"a": 1}), 0))


def step(driver, turn, text, episode=1):
    return one(driver, Step(episode, turn, Segment.of([*text.encode(), END_OF_TURN])))


@pytest.mark.parametrize("kind", ["Countdown", "AsyncCountdown", "AsyncText"])
def test_an_episode_of_each_form(kind):
    CLOSED.clear()
    driver, codec = host(f"{__name__}:{kind}"), ByteCodec()
    assert reset(driver).observation == Segment.of(codec.render("3 left, {'a': 1}", first=True))
    rendered = Segment.of(codec.render("2 left", first=False))
    assert step(driver, 1, "1") == Observed(1, 1, rendered, state=state_key(b"2 left"))
    last = step(driver, 2, "3" if kind == "AsyncText" else "2")
    assert (last.reward, last.done, last.truncated) == (1.0, True, False)
    driver.send(Close(1))
    driver.slice()
    assert isinstance(reset(driver, 2), Observed)
    driver.worker.close()
    end_threads("t")
    assert len(CLOSED) == (2 if kind == "AsyncCountdown" else 0)
    assert all(task.cancelled() for task in CLOSED)


@pytest.mark.parametrize("kind", ["Countdown", "AsyncCountdown"])
def test_what_it_raises_is_its_failure(kind):
    driver = host(f"{__name__}:{kind}")
    reset(driver)
    answer = step(driver, 1, "one")
    assert isinstance(answer, EnvironmentFailed)
    assert "ValueError" in answer.reason
    assert isinstance(reset(driver, 2), Observed)
    driver.worker.close()
    end_threads("t")


def test_the_loop_of_one_that_fails_to_close_is_ended():
    CLOSED.clear()
    driver = host(f"{__name__}:Stubborn")
    reset(driver)
    driver.worker.close()
    end_threads("t")
    assert [loop.is_closed() for loop in CLOSED] == [True]


def test_truncation_is_the_agents_result():
    environment = GymEnvironment(Countdown())
    environment.reset(Prompt("p", "t", 2))
    last = environment.step("late")
    assert (last.done, last.truncated) == (True, True)


def test_what_is_not_of_gymnasiums_form_is_named():
    class Old:
        def reset(self, seed, options):  # noqa: ARG002 - the form it should have
            return "hi"

        def step(self, action):
            return action, 0.0, True, {}

    environment = GymEnvironment(Old())
    with pytest.raises(TypeError, match=r"\(observation, info\)"):
        environment.reset(Prompt("p", "t", 1))
    with pytest.raises(TypeError, match="terminated"):
        environment.step("x")
    environment.close()


@pytest.mark.parametrize(
    ("info", "artifact"), [({"artifact": "ä"}, "ä".encode()), ({"artifact": b"x"}, b"x"), ({}, b"")]
)
def test_the_artifact_is_in_the_info(info, artifact):
    class Judged:
        def reset(self, seed, options):  # noqa: ARG002
            return "hi", {}

        def step(self, action):
            return action, 0.0, True, False, info

    assert GymEnvironment(Judged()).step("x").artifact == artifact


def test_the_example_of_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = [part.split("```")[0] for part in page.split("```python\n") if "class Capitals" in part]
    assert len(code.splitlines()) < 25
    names = {}
    exec(code, names)
    environment = GymEnvironment(names["Capitals"]())
    assert environment.reset(Prompt("p", "t", 1)).observation == "What is the capital of Japan?"
    assert environment.step("Kyoto") == TextStep("No. Try again.")
    assert environment.step("It is tokyo.") == TextStep("Right.", 1.0, done=True)


def test_one_of_gymnasium_itself():
    lake = make_gym("gymnasium:make", {"id": "FrozenLake-v1", "is_slippery": False}, "builtins:str", "builtins:int")
    assert lake.reset(Prompt("p", "t", 1)) == TextStep("0")
    lost = lake.step("south")
    assert "south" in lost.observation
    assert not lost.done
    answers = [lake.step(action) for action in "112212"]
    assert [answer.observation for answer in answers] == ["4", "8", "9", "10", "14", "15"]
    assert (answers[-1].reward, answers[-1].done) == (1.0, True)
    lake.close()


def test_an_environment_with_tools_is_not_played_by_another_interpreter():
    class Safe:
        tools = ()

        def reset(self, prompt):
            return prompt

    with pytest.raises(
        TypeError, match="Safe has no `step`; an environment with tools cannot be played by an interpre"
    ):
        as_text_environment(Safe())
