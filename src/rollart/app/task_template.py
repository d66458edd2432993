"""`rollart init task`: a package with a task of one's own that trains as it is written.

Invariant: existing files are never overwritten.
"""

import keyword
import sys
from pathlib import Path

from rollart.types.errors import RequestError

ENVIRONMENT = '''"""__TITLE__: say the letter that is asked for; two tries.

The interface is Gymnasium's, on text: `reset` returns (observation, info), `step` returns (observation, reward,
terminated, truncated, info). An exception means that the environment is broken, never that the agent was wrong.
"""

import random

LETTERS = "ABCD"
TRIES = 2


class __CLASS__:
    """An object per episode. What an episode is about depends on the seed alone."""

    def reset(self, *, seed=None, options=None):
        self.letter = random.Random(seed).choice(LETTERS)
        self.left = TRIES
        return f"SAY {self.letter}", {}

    def step(self, action):
        self.left -= 1
        right = action.strip().upper()[:1] == self.letter
        observation = "RIGHT" if right else f"NO. SAY {self.letter}"
        reward = 1.0 if right and self.left == TRIES - 1 else 0.5 if right else 0.0
        return observation, reward, right or not self.left, False, {}


def scripted(observations, chance):
    """A player that knows the answer: rollart env check config.toml --script __NAME__.py:scripted"""
    return observations[-1][-1]
'''
TEST = '''"""Run with: pytest"""

from __NAME__ import LETTERS, TRIES, __CLASS__


def test_a_seed_decides_the_episode():
    assert __CLASS__().reset(seed=5) == __CLASS__().reset(seed=5)
    assert len({__CLASS__().reset(seed=seed)[0] for seed in range(200)}) == len(LETTERS)


def test_the_right_letter_pays():
    environment = __CLASS__()
    observation, _ = environment.reset(seed=5)
    assert environment.step(observation[-1]) == ("RIGHT", 1.0, True, False, {})


def test_only_the_first_letter_counts():
    environment = __CLASS__()
    observation, _ = environment.reset(seed=5)
    assert environment.step(f" {observation[-1]}, please")[0] == "RIGHT"


def test_every_answer_gets_an_observation():
    environment = __CLASS__()
    environment.reset(seed=5)
    for answer in ("", "?" * 100)[:TRIES]:
        observation, reward, ended, truncated, _ = environment.step(answer)
        assert observation
        assert (reward, truncated) == (0.0, False)
    assert ended
'''
CONFIG = """# rollart train config.toml --runtime inline
name = "__NAME__"
steps = 30
eval_every = 10
checkpoint_every = 10
codec = "rollart.backends.environments.codec:LetterCodec"  # capital letters; remove it for a model with a tokenizer

[batch]
trajectories = 64
group_size = 8

[tasks.__NAME__]
environment = "__NAME__.py:__CLASS__"
environments = 32
max_turns = 2
max_turn_tokens = 1
max_context = 64
eval_episodes = 16
hold_out = "seed"  # there are too few letters to hold any out

[pools.local]

[trainer]
learning_rate = 3e-3

# A small model from scratch, which has to find the letters by chance. In place of this table, for a real one:
# model = "path/to/a/checkpoint/folder"
[model.config]
model_type = "qwen3"
vocab_size = 46
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 32
max_position_embeddings = 128
tie_word_embeddings = true
"""
README = """# __NAME__

A task for [rollart](https://pypi.org/project/rollart/): say the letter that is asked for. Replace it by your own.

| file | is |
|---|---|
| `__NAME__.py` | the environment, and a scripted player |
| `test___NAME__.py` | its tests |
| `config.toml` | a run that trains a small model on it |

```
pytest                                                          # test the environment
rollart env check config.toml --script __NAME__.py:scripted     # play it, and see what a model sees
rollart train config.toml --runtime inline                      # train; without --runtime, in processes
rollart report runs/__NAME__-1                                  # what happened
```

To change the task, write `reset` and `step`, run the check again, and set `max_turns`, `max_turn_tokens` and `model` in
`config.toml`. If its packages cannot be installed beside rollart, name an interpreter that has them:
`python = "path/to/python"` in `[tasks.__NAME__]`.
"""
FILES = {
    "__NAME__.py": ENVIRONMENT,
    "test___NAME__.py": TEST,
    "config.toml": CONFIG,
    "README.md": README,
}


def write_task(name: str, parent: Path) -> list[Path]:
    """Write the package into a new folder of that name; returns its files."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise RequestError(
            f"{name!r} cannot be the name of a task: use lower-case letters, digits and _, as for a module"
        )
    if name in sys.stdlib_module_names:
        raise RequestError(f"{name!r} is a module of Python, which the task would hide; use another name")
    folder = parent / name
    if folder.exists():
        raise RequestError(f"{folder} exists; name another task, existing files are not overwritten")
    names = {"__NAME__": name, "__CLASS__": _class_of(name), "__TITLE__": name.replace("_", " ").capitalize()}
    written = []
    folder.mkdir(parents=True)
    for file, text in FILES.items():
        path = folder / _filled(file, names)
        path.write_text(_filled(text, names), encoding="utf-8")
        written.append(path)
    return written


def _class_of(name: str) -> str:
    """
    >>> _class_of("word_ladder")
    'WordLadder'
    """
    return "".join(part.capitalize() for part in name.split("_")) or "Task"


def _filled(text: str, names: dict[str, str]) -> str:
    for mark, value in names.items():
        text = text.replace(mark, value)
    return text
