"""Environments of libraries, by name, with the real packages in an interpreter of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from field_parts import field_python

from rollart.app.compose import check_real, hosted
from rollart.app.environment_check import check_environment
from rollart.backends.environments.codec import ByteCodec
from rollart.backends.environments.interpreter import RemoteEnvironment, RemoteFailure
from rollart.backends.environments.sources import EnvironmentSource, open_source
from rollart.config.load import check
from rollart.config.schema import RunConfig
from rollart.config.tasks import TaskSettings
from rollart.types.errors import ConfigError, RequestError
from rollart.types.trajectory import Prompt

SERVER = Path(__file__).parent / "openenv_server.py"


def config(environment: str, python: str = "", **settings: Any) -> RunConfig:
    task = {"environment": environment, "python": python, "max_turns": 12, **settings}
    model = {"config": {"model_type": "qwen3", "vocab_size": 300}}
    return check(RunConfig, {"tasks": {"t": task}, "pools": {"local": {}}, "model": model})


@contextmanager
def opened(environment: str, venv: str = "", **settings: Any) -> Iterator[EnvironmentSource]:
    python = field_python(venv) if venv else ""
    task = TaskSettings(environment=environment, python=python, environment_settings=settings)
    source = open_source("t", hosted(task), 4, ByteCodec())
    try:
        yield source
    finally:
        source.close()


def prompt(seed: int, **data: Any) -> Prompt:
    return Prompt(f"p{seed}", "t", seed, data)


@contextmanager
def openenv_server(name: str, sessions: int = 64) -> Iterator[str]:
    """A real server; yields its host and port."""
    command = [field_python("openenv"), str(SERVER), name, str(sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            lines = iter(server.stdout.readline, "")
            yield f"127.0.0.1:{next(line.strip() for line in lines if line.strip().isdigit())}"
        finally:
            server.stdin.close()


CHECKED = [
    ("", "gym:CartPole-v1", {}),
    ("", "gym:Blackjack-v1", {}),
    ("fields", "gym:FrozenLake-v1", {"observe": "ansi"}),
    ("fields", "gym:minigrid:MiniGrid-Empty-5x5-v0", {}),
    ("gem", "gem:game:GuessTheNumber-v0-easy", {}),
    ("gem", "gem:game:Mastermind-v0-easy", {}),
    ("gem", "gem:rg:letter_counting", {}),
    ("fields", "textarena:TicTacToe-v0", {"seat": 1}),
    ("fields", "textarena:GuessTheNumber-v0", {}),
    ("fields", "textarena:KuhnPoker-v0", {}),
    ("fields", "reasoning_gym:letter_counting", {"instructions": "Answer with a number."}),
    ("fields", "reasoning_gym:basic_arithmetic", {"settings": {"max_terms": 3}, "answer_tag": "answer"}),
]


QUICK = ("gym:CartPole-v1", "gem:game:Mastermind-v0-easy", "textarena:TicTacToe-v0", "reasoning_gym:letter_counting")
"""Checked in `make test` too."""


@pytest.mark.parametrize(
    ("venv", "environment", "settings"),
    [pytest.param(*each, id=each[1], marks=() if each[1] in QUICK else pytest.mark.long) for each in CHECKED],
)
def test_they_pass_the_check(venv: str, environment: str, settings: dict[str, Any]) -> None:
    python = field_python(venv) if venv else ""
    found = check_environment(config(environment, python, environment_settings=settings), "t", episodes=4)
    assert found.problems == ()
    if environment.startswith("reasoning_gym"):
        assert found.players["scripted"].mean_reward == 1.0


@pytest.mark.parametrize("name", ["echo", "guessing"])
def test_a_real_openenv_server_passes_the_check(name: str) -> None:
    with openenv_server(name) as address:
        found = check_environment(config(f"openenv:http://{address}"), "t", episodes=4)
    assert found.problems == ()
    assert found.players["random"].episodes == 4


# --- names


@pytest.mark.parametrize(
    ("venv", "environment", "settings", "reason"),
    [
        ("", "gym:FrozenLak-v1", {}, "gym has no environment 'FrozenLak-v1' (did you mean FrozenLake-v1?)"),
        ("", "gym:CartPole-v1", {"actions": ["left"]}, "`actions` names 1 actions; its space is Discrete(2)"),
        ("gem", "gem:game:GuessTheNumber-v0-eas", {}, "did you mean game:GuessTheNumber-v0-easy?"),
        ("fields", "textarena:TicTacTo-v0", {}, "did you mean TicTacToe-v0?"),
        ("fields", "reasoning_gym:leter_counting", {}, "did you mean letter_counting?"),
        ("fields", "reasoning_gym:letter_counting", {"settings": {"max_word": 2}}, "did you mean max_words?"),
        ("fields", "textarena:Wordle-v0", {}, "textarena:Wordle-v0 needs a download: nltk's data"),
        ("gem", "gem:game:Hangman-v0-easy", {}, "gem:game:Hangman-v0-easy needs a download: nltk's data 'words'"),
        ("gem", "gem:math:GSM8K", {}, "the dataset axon-rl/GSM-8k of the Hugging Face hub, which is a download"),
        ("fields", "gem:game:GuessTheNumber-v0-easy", {}, "install gem-llm there, or set `python` of the task"),
    ],
)
def test_what_is_refused_says_why(venv: str, environment: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as refused, opened(environment, venv, **settings) as source:
        source.build()
    assert reason in str(refused.value)


def test_a_run_is_refused_by_the_key() -> None:
    with pytest.raises(ConfigError, match=r"gym has no environment 'CartPole-v9'") as refused:
        check_real(config("gym:CartPole-v9"))
    assert refused.value.path == "tasks.t.environment"
    with pytest.raises(ConfigError, match=r"needs packages|cannot import textarena") as refused:
        check_real(config("textarena:TicTacToe-v0"))
    assert refused.value.path == "tasks.t.environment"
    check_real(config("gym:CartPole-v1"))


def test_a_prefix_may_be_misspelt() -> None:
    with pytest.raises(ConfigError, match=r"did you mean reasoning_gym:\?"):
        check_real(config("reasoning-gym:letter_counting"))


# --- libraries


def test_an_agent_that_plays_second_sees_the_first_move() -> None:
    with opened("textarena:TicTacToe-v0", "fields", seat=1) as source:
        first = source.build().reset(prompt(5))
    assert "You are Player 1" in first.observation  # type: ignore[union-attr]
    assert "[Player 0] [" in first.observation  # type: ignore[union-attr]


def test_an_opponent_may_be_a_function(tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text("def corner(seen):\n    return '[0]' if '[0]' in seen else '[8]'\n")
    with opened("textarena:TicTacToe-v0", "fields", opponent=f"{tmp_path}/players.py:corner") as source:
        game = source.build()
        game.reset(prompt(5))
        seen = game.step("[4]")
    assert "[Player 1] [0]" in seen.observation  # type: ignore[union-attr]


def test_an_invalid_move_of_an_opponent_is_no_merit(tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text("def lost(seen):\n    return '[77]'\n")
    with opened("textarena:TicTacToe-v0", "fields", opponent=f"{tmp_path}/players.py:lost") as source:
        game = source.build()
        game.reset(prompt(5))
        with pytest.raises(RemoteFailure, match="made an invalid move"):
            game.step("[4]")


def test_games_do_not_disturb_each_other_or_the_process() -> None:
    """These libraries draw from the global generators."""
    with opened("gem:game:GuessTheNumber-v0-hard", "gem") as source:

        def played(others: int) -> list[Any]:
            game = source.build()
            steps = [game.reset(prompt(3))]
            for guess in (25, 12, 37):
                for other in range(others):
                    source.build().reset(prompt(100 + other))
                steps.append(game.step(f"\\boxed{{{guess}}}"))
            return steps

        assert played(0) == played(3)


def test_held_out_questions_differ_by_content() -> None:
    """Of a dataset with few distinct questions, other seeds draw the same ones."""
    few = {"settings": {"min_words": 1, "max_words": 1}}
    with opened("reasoning_gym:letter_counting", "fields", **few) as source:

        def questions(held_out: bool) -> set[str]:
            made = (source.build().reset(prompt(seed, held_out=held_out)) for seed in range(40))
            return {step.observation for step in made}  # type: ignore[union-attr]

        assert not questions(held_out=True) & questions(held_out=False)


def test_an_openenv_server_judges_actions() -> None:
    with openenv_server("guessing") as address, opened(f"openenv:{address}") as source:
        game = source.build()
        game.reset(prompt(1))
        assert game.step("seven").observation == "'seven' is not a number."  # type: ignore[union-attr]
        invalid = game.step("77")
        assert invalid.observation.startswith("Invalid message")  # type: ignore[union-attr]
        game.close()


def test_an_openenv_server_that_is_full_or_gone_is_a_failure() -> None:
    with openenv_server("echo", sessions=1) as address, opened(f"openenv:{address}") as source:
        one, other = source.build(), source.build()
        one.reset(prompt(1))
        with pytest.raises(Exception, match="raise max_concurrent_envs of the server"):
            other.reset(prompt(2))
        one.close()
    with opened(f"openenv:{address}") as source, pytest.raises(Exception, match=r"does it run\?|no connection"):
        source.build().reset(prompt(1))


def test_adapters_work_in_this_process_too() -> None:
    with opened("gym:CartPole-v1") as source:
        cart = source.build()
        assert not isinstance(cart, RemoteEnvironment)
        assert "Answer with one of: left, right." in cart.reset(prompt(1)).observation  # type: ignore[union-attr]
        assert "gymnasium" in sys.modules


@pytest.mark.parametrize("venv", ["", pytest.param("fields", marks=pytest.mark.long)])
def test_the_example(venv: str, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "library_environments.py"
    command = [sys.executable, str(example), *([str(field_python(venv))] if venv else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    names = ["gym:FrozenLake-v1", *(["reasoning_gym:letter_counting", "textarena:TicTacToe-v0"] if venv else [])]
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")] == [f"== {name}" for name in names]
    assert "\ntrained: runs/" in done.stdout
