"""Environments: simulated, and text environments in the host."""

from collections.abc import Callable, Mapping
from typing import Any

from worker_settings import worker_settings

from harnesses.common import COUNTS, TASK, Count, profile, prompt
from rollart.backends.environments.host import EnvironmentHost
from rollart.conformance.environment import EnvironmentHarness
from rollart.ports.environment import TextStep
from rollart.sim.environment import SimEnvironments
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt


class Counter:
    """Takes four steps, counting up from the prompt's seed; fails in `fail`, if given."""

    def __init__(self, count: int, fail: str = "") -> None:
        self._count = COUNTS[count]
        self._fail = fail
        self._number = 0
        self._left = 4

    def reset(self, prompt: Prompt) -> TextStep:
        self._count.add()
        if self._fail == "reset":
            raise RuntimeError("no container left")
        self._number = prompt.seed
        return TextStep(f"count from {self._number}")

    def step(self, action: str) -> TextStep:
        self._count.add()
        if self._fail == "step":
            raise RuntimeError("the container is gone")
        self._number += len(action)
        self._left -= 1
        return TextStep(str(self._number), reward=0.25, done=self._left == 0, artifact=b"end")

    def close(self) -> None:
        pass


def counting(executed: Count, *, transcripts: bool = False, **settings: Any) -> Mapping[str, Any]:
    flat = {
        "task": TASK,
        "transcripts": transcripts,
        "environment": f"{Counter.__module__}:Counter",
        "slots": 3,
        "environment_settings": {"count": executed.number, **settings},
    }
    return worker_settings(EnvironmentHost, flat)


def hosted_environments() -> EnvironmentHarness:
    executed = Count()
    return EnvironmentHarness(
        build=lambda wake: EnvironmentHost(counting(executed), wake),
        prompt=prompt,
        action=lambda turn: Segment.of([65 + turn]),
        virtual=False,
        failing_reset=lambda wake: EnvironmentHost(counting(executed, fail="reset"), wake),
        failing_step=lambda wake: EnvironmentHost(counting(executed, fail="step"), wake),
        executed=lambda: executed.value,
        transcribing=lambda wake: EnvironmentHost(counting(executed, transcripts=True), wake),
    )


def simulated_environments() -> EnvironmentHarness:
    def settings(**changes: Any) -> Mapping[str, Any]:
        return {"task": TASK, "profile": profile(**changes), "slots": 3, "seed": 2}

    return EnvironmentHarness(
        build=lambda wake: SimEnvironments(settings(), wake),
        prompt=prompt,
        action=lambda turn: Segment(turn + 1, None),
        virtual=True,
        failing_reset=lambda wake: SimEnvironments(settings(reset_failure=1.0), wake),
        failing_step=lambda wake: SimEnvironments(settings(step_failure=1.0), wake),
    )


ENVIRONMENTS: dict[str, Callable[[], EnvironmentHarness]] = {
    "sim": simulated_environments,
    "host": hosted_environments,
}
