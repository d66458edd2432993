"""`rollart env check` finds what is wrong with an environment."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_cli import rollart

from rollart.app.environment_check import check_environment
from rollart.config.load import check
from rollart.config.schema import RunConfig

GOOD = """
import random

class Game:
    def reset(self, *, seed=None, options=None):
        self.chance, self.left = random.Random(seed), 3
        return f"guess {self.chance.random():.3f}", {}

    def step(self, action):
        self.left -= 1
        return f"left {self.left}", 0.5 * len(action) % 2, not self.left, False, {}

    def close(self):
        pass
"""
BROKEN = {
    "draw all from the seed": GOOD.replace("random.Random(seed)", "random"),
    "environments must not share state": GOOD.replace("self.left", "Game.left").replace(
        "Game.left -= 1", "__import__('time').sleep(0.01); Game.left -= 1"
    ),
    "deserves an observation": GOOD.replace("self.left -= 1", "self.left -= 1; assert '[' not in action"),
    "an observation is empty": GOOD.replace('f"left {self.left}"', '""'),
    "close raised ValueError: no": GOOD.replace("        pass", "        raise ValueError('no')"),
    "open files are left behind by every episode": GOOD.replace(
        "def close(self):", "def close(self):\n        import os; os.dup(0)"
    ),
    "threads are left behind by every episode": GOOD.replace(
        "def close(self):",
        "def close(self):\n        import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
    ),
    "memory grows by": GOOD.replace(
        "def close(self):", "kept = []\n    def close(self):\n        Game.kept.append(b'x' * 2**23)"
    ),
    "reset did not return within 2 s": GOOD.replace(
        "def reset(",
        "def reset(self, *, seed=None, **_):\n        __import__('threading').Event().wait()\n    def unused(",
    ),
    "it must be a finite number": GOOD.replace("0.5 * len(action) % 2", "float('nan')"),
}


def checked(folder: Path, source: str, **settings: Any) -> Any:
    (folder / "game.py").write_text(source)
    task = {"environment": f"{folder}/game.py:Game", "max_turns": 3, "step_deadline_s": 2.0, **settings}
    config = check(RunConfig, {"tasks": {"t": task}, "pools": {"local": {}}})
    return check_environment(config, "t", episodes=4)


def test_a_good_environment_passes(tmp_path: Path) -> None:
    found = checked(tmp_path, GOOD)
    assert found.problems == ()
    assert found.notes == ("there is no scripted player; name one to see whether the task can be solved",)
    player = found.players["random"]
    assert (player.episodes, player.mean_turns, player.ended) == (4, 3.0, 1.0)
    assert [line.speaker for line in found.episode] == ["environment", "agent"] * 3 + ["environment"]
    assert found.sizes.first_observation == len("guess 0.123")


@pytest.mark.parametrize("problem", BROKEN)
def test_each_problem_is_found(tmp_path: Path, problem: str) -> None:
    found = checked(tmp_path, BROKEN[problem])
    assert not found.passed
    assert any(problem in sentence for sentence in found.problems), found.problems


def test_the_command_prints_an_episode_and_its_exit_code_is_1(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GOOD)
    done = rollart("env", "check", "game.py:Game", "--episodes", "4", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["problems"] == []
    (tmp_path / "game.py").write_text(BROKEN["deserves an observation"])
    done = rollart("env", "check", "game.py:Game", "--episodes", "4", cwd=tmp_path)
    assert done.code == 1
    assert "problem: the answer" in done.out
    assert "[agent]" in done.out
    unknown = rollart("env", "check", "gym:CartPol-v1", cwd=tmp_path)
    assert unknown.code in (1, 2)
    assert "did you mean CartPole-v1?" in unknown.out + unknown.err
