"""The real command in a process of its own, and a task small enough to train in seconds."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

COMMAND = (sys.executable, "-c", "from rollart.cli.main import main; main()")

CONFIG = """
name = "small"
steps = 2
checkpoint_every = 1

[batch]
trajectories = 8
group_size = 4

[tasks.maze]
environment = "maze.py:Maze"
environments = 8
max_turns = 3
max_turn_tokens = 4
max_context = 200

[pools.local]

[model.config]
model_type = "qwen3"
vocab_size = 260
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 256
"""
MAZE = """
class Maze:
    def reset(self, *, seed=None, options=None):
        return f"maze {seed}", {}

    def step(self, action):
        return "next", len(action) / 4, not action.isascii(), False, {}


def judged(t):
    return float(len(t.final_text))
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def rollart(*words: str | Path, cwd: Path, timeout_s: float = 250.0, **variables: str) -> Done:
    command = [*COMMAND, *map(str, words)]
    env = {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def small_task(folder: Path, maze: str = MAZE) -> None:
    """`config.toml` and the environment that it names."""
    (folder / "config.toml").write_text(CONFIG)
    (folder / "maze.py").write_text(maze)
