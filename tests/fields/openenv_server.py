# ruff: noqa: ARG002 - the arguments are those of OpenEnv
"""A server of the PyPI package openenv, run by an interpreter that has it: a guessing game, and an echo.

`python openenv_server.py ENVIRONMENT` prints its port, and serves until its stdin closes.
"""

import os
import random
import socket
import sys
import threading

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str = Field(...)


class Echoed(Observation):
    echoed_message: str = ""
    message_length: int = 0


class Echo(Environment):
    """That of the package's template, which repeats what it is told."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        return Echoed(echoed_message="ready", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        message = action.message
        if message == "raise":
            raise RuntimeError("told to")
        return Echoed(echoed_message=message, message_length=len(message), done=message == "bye", reward=0.1)

    @property
    def state(self):
        return State()


class Guess(Action):
    number: int = Field(..., ge=1, le=9)
    note: str = ""


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """Guess a number from 1 to 9 that the seed decides; three tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number, self.tries = random.Random(seed).randint(1, 9), 3
        return Hint(hint="guess from 1 to 9", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self.tries -= 1
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return Hint(hint=hint, done=right or not self.tries, reward=float(right))

    @property
    def state(self):
        return State()


SERVED = {"echo": (Echo, Say, Echoed), "guessing": (Guessing, Guess, Hint)}

if __name__ == "__main__":
    app = create_app(*SERVED[sys.argv[1]], env_name=sys.argv[1], max_concurrent_envs=int(sys.argv[2]))
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
