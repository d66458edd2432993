"""Environments: simulated, and text environments in the host."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from other_python import other_python
from worker_settings import worker_settings

from harnesses import remote_counter
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


def remote_environments() -> EnvironmentHarness:
    """In an interpreter of its own, which has nothing but the standard library."""
    folder = Path(tempfile.mkdtemp(prefix="rollart-remote-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    python, executed = other_python(folder, packages=False), folder / "executed"
    executed.touch()

    def host(wake: Callable[[], None], *, transcripts: bool = False, **settings: Any) -> EnvironmentHost:
        flat = {
            "task": TASK,
            "transcripts": transcripts,
            "environment": f"{remote_counter.__file__}:Counter",
            "python": python,
            "slots": 3,
            "environment_settings": {"count": str(executed), **settings},
        }
        return EnvironmentHost(worker_settings(EnvironmentHost, flat), wake)

    return EnvironmentHarness(
        build=host,
        prompt=prompt,
        action=lambda turn: Segment.of([65 + turn]),
        virtual=False,
        failing_reset=partial(host, fail="reset"),
        failing_step=partial(host, fail="step"),
        executed=lambda: executed.stat().st_size,
        transcribing=partial(host, transcripts=True),
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
    "interpreter": remote_environments,
}
