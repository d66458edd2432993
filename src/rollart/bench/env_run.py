"""The measurement of `rollart bench env`."""

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator

from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.host import EnvironmentHost
from rollart.backends.environments.interpreter import Interpreter
from rollart.bench.light_environment import Light
from rollart.config.tasks import TaskSettings
from rollart.types.errors import RunError
from rollart.types.ids import PromptId, TrajectoryId
from rollart.types.messages import Observed, Reset, Step
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

PER_WORKER = 64
PATIENCE_S = 600.0
ACTION = "go left"
US = 1e6


def measure(environments: int, turns: int) -> dict[str, float]:
    """Microseconds of CPU per step."""
    own = own_us(environments * turns)
    inside = _Workers(environments, turns, "").cpu_us()
    beside = _Workers(environments, turns, sys.executable).cpu_us()
    return {
        "own_us": own,
        "worker_us": inside,
        "hosting_us": inside - own,
        "interpreter_us": beside,
        "interpreter_adds_us": beside - inside,
    }


def own_us(steps: int) -> float:
    """CPU time of a step of the environment alone."""
    light = Light()
    light.reset(seed=1)
    began_s = time.process_time()
    for _ in range(steps):
        light.step(ACTION)
    return (time.process_time() - began_s) / steps * US


class _Workers:
    """Environment workers in this process, each driven by a thread, as by the inline runtime."""

    def __init__(self, environments: int, turns: int, python: str) -> None:
        self._turns = turns
        self._wakes: list[threading.Event] = []
        self._workers: list[EnvironmentHost] = []
        self._sizes = [min(PER_WORKER, environments - first) for first in range(0, environments, PER_WORKER)]
        task = TaskSettings(environment=f"{Light.__module__}:{Light.__name__}", python=python)
        for slots in self._sizes:
            wake = threading.Event()
            self._wakes.append(wake)
            self._workers.append(EnvironmentHost({"task": "light", "settings": task, "slots": slots}, wake.set))
        self._problems: list[str] = []

    def cpu_us(self) -> float:
        """CPU time of all their steps, without what starting and ending takes."""
        ready = threading.Barrier(len(self._workers) + 1)
        ended = threading.Barrier(len(self._workers) + 1)
        for index in range(len(self._workers)):
            threading.Thread(target=self._drive, args=(index, ready, ended), daemon=True).start()
        try:
            ready.wait(PATIENCE_S)
            began_s = self._cpu_s()
            ended.wait(PATIENCE_S)
            spent_s = self._cpu_s() - began_s
        except threading.BrokenBarrierError:
            raise RunError(f"the environments did not answer: {'; '.join(self._problems) or 'no reason'}") from None
        finally:
            for worker in self._workers:
                worker.close()
        return spent_s / (sum(self._sizes) * self._turns) * US

    def _cpu_s(self) -> float:
        """CPU seconds of this process and of the interpreters that it started."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime + sum(cpu_of(pid) for pid in self._pids())

    def _pids(self) -> Iterator[int]:
        for worker in self._workers:
            if isinstance(worker.source, Interpreter):
                yield worker.source.pid

    def _drive(self, index: int, ready: threading.Barrier, ended: threading.Barrier) -> None:
        worker, wake, slots = self._workers[index], self._wakes[index], self._sizes[index]
        action = Segment.of([*ACTION.encode(), *ByteCodec.stop_tokens])
        prompts = [Prompt(PromptId(str(slot)), "light", slot) for slot in range(slots)]
        worker.post([Reset(TrajectoryId(slot), slot, prompts[slot], 0) for slot in range(slots)])
        left = dict.fromkeys(range(slots), self._turns + 1)
        started = False
        while left:
            wake.clear()  # before the worker looks, so that no answer is missed
            steps = []
            for event in worker.advance(0.0).events:
                if not isinstance(event, Observed):
                    self._problems.append(str(event))
                    ready.abort()
                    ended.abort()
                    return
                left[event.episode] -= 1
                if not left[event.episode]:
                    del left[event.episode]
                elif started:
                    steps.append(Step(event.episode, event.turn + 1, action))
            if not started and all(turns == self._turns for turns in left.values()):
                ready.wait(PATIENCE_S)
                started = True
                steps = [Step(TrajectoryId(slot), 1, action) for slot in range(slots)]
            if steps:
                worker.post(steps)
            elif left:
                wake.wait(PATIENCE_S)
        ended.wait(PATIENCE_S)


def cpu_of(pid: int) -> float:
    """CPU seconds of another process so far."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
