"""Environments of libraries by name: play one episode of each as a model would see it, then train on one of them.

    python examples/library_environments.py                       # Gymnasium, which rollart[train] has
    python examples/library_environments.py .venv-fields/bin/python   # and reasoning-gym, TextArena there

See docs/environments.md.
"""

import sys

import rollart
from rollart.app.compose import hosted
from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.sources import open_source

OWN = [rollart.Task("gym:FrozenLake-v1", environment_settings={"observe": "ansi"})]
ELSEWHERE = [
    ("reasoning_gym:letter_counting", {}),
    ("textarena:TicTacToe-v0", {"seat": 1}),
]


def show(task: rollart.Task) -> None:
    """The first observation of an episode."""
    source = open_source("shown", hosted(task), slots=1, codec=ByteCodec())
    try:
        environment = source.build()
        print(f"== {task.environment}\n{environment.reset(rollart.Prompt('1', 'shown', 1)).observation}\n")
    finally:
        source.close()


if __name__ == "__main__":
    python = sys.argv[1] if len(sys.argv) > 1 else ""
    tasks = OWN + [rollart.Task(name, python=python, environment_settings=kw) for name, kw in ELSEWHERE if python]
    for task in tasks:
        show(task)
    result = rollart.run(
        model=rollart.tiny_model(46),
        codec="rollart.backends.environments.codec:LetterCodec",
        steps=3,
        batch={"trajectories": 16, "group_size": 8},
        tasks={"lake": rollart.Task("gym:FrozenLake-v1", max_turns=6, max_turn_tokens=2, max_context=400)},
    )
    print(f"trained: {result.checkpoint}")
