"""An environment that does what its prompt or its actions say, for an interpreter of its own."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

from rollart import TextStep


class Obedient:
    """Its actions are orders."""

    def __init__(self, notes=""):
        self.notes = notes

    def reset(self, prompt):
        if prompt.data.get("die"):
            os._exit(3)
        return TextStep(f"yours {prompt.seed}")

    def step(self, action):
        order, _, argument = action.partition(" ")
        match order:
            case "die":
                sys.stderr.write("out of luck\n")
                os._exit(7)
            case "hang":
                self.note("hangs")
                threading.Event().wait()
            case "hang-in-c":  # holds the interpreter's lock
                import ctypes

                ctypes.PyDLL(None).pause()
            case "spawn":
                child = subprocess.Popen(["sleep", "1000"])
                return TextStep(str(child.pid))
            case "print":
                print("noise " * 1000)  # noqa: T201
                subprocess.run(["echo", "more noise"], check=True)
            case "pid":
                return TextStep(str(os.getpid()))
            case "surrogate":
                return TextStep("\ud800")
            case "number":
                return 5
            case "wrong":
                raise TypeError("wrong")
            case "done":
                return TextStep("bye ä€", 1.0, True, artifact=b"\x00\xff", state="end")
        return TextStep(argument)

    def close(self):
        self.note("closed")

    def note(self, line):
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write(line + "\n")


class Slow:
    """Asynchronous, with a task that outlives its calls."""

    async def reset(self, prompt):  # noqa: ARG002
        self.ticks = 0
        self.task = asyncio.ensure_future(self.tick())
        return TextStep("hello")

    async def tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0)

    async def step(self, action):  # noqa: ARG002
        before = self.ticks
        await asyncio.sleep(0.01)
        return TextStep("ticking" if self.ticks > before else "dead")

    async def close(self):
        print("closed")  # noqa: T201
