"""Table of the built-in tasks: environment, limits, scripted baselines, and teachers for a cold start."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rollart.ports.environment import TextEnvironment
from rollart.tasks import arithmetic, frozenlake, game, sokoban
from rollart.tasks.prompts import SeedPrompts
from rollart.tasks.python_math import environment as python_math
from rollart.tasks.python_math import scripts as calculators
from rollart.tasks.repair import choose as repair
from rollart.tasks.scripts import Script, Transcript, mean_reward, play
from rollart.tasks.shop import environment as shop
from rollart.tasks.shop import scripts as customers
from rollart.types.trajectory import Prompt

TRANSCRIPT_SEEDS = 2_000_000
"""First seed used for transcripts."""


class BuiltIn(NamedTuple):
    """A task that comes with the package."""

    build: type[TextEnvironment]
    max_turns: int
    max_turn_tokens: int
    """In tokens of the small tokenizer."""
    texts: tuple[str, ...]
    """All text of the environment except numbers and maps: the vocabulary of the small tokenizer."""
    teachers: tuple[Script, ...]
    """Scripts that a cold start imitates, one drawn per episode: good and bad ones, never an expert. The resulting
    policy mixes both behaviours, and RL has to learn which of them pays."""
    baselines: Mapping[str, Script]
    """From worst to best."""
    for_scripts: Callable[..., TextEnvironment] | None = None
    """Makes the environment that scripts play, if they need less than an agent does; `build` by default."""

    def scripted(self, **settings: Any) -> TextEnvironment:
        """An environment for scripts; what they see and earn is the same in both."""
        return (self.for_scripts or self.build)(**settings)

    @property
    def factory(self) -> str:
        return f"{self.build.__module__}:{self.build.__name__}"


BUILT_IN: Mapping[str, BuiltIn] = {
    "frozenlake": BuiltIn(
        build=frozenlake.FrozenLake,
        max_turns=12,
        max_turn_tokens=4,
        texts=frozenlake.TEXTS,
        teachers=(frozenlake.around_holes,) * 2 + (frozenlake.any_move,) * 3,
        baselines={
            "any move": frozenlake.any_move,
            "best blind path": frozenlake.blind_path,
            "around holes": frozenlake.around_holes,
            "shortest way": frozenlake.shortest_way,
        },
    ),
    "math": BuiltIn(
        build=arithmetic.Arithmetic,
        max_turns=5,
        max_turn_tokens=12,
        texts=arithmetic.TEXTS,
        teachers=(arithmetic.hasty,),
        baselines={"any answer": arithmetic.any_answer, "with the calculator": arithmetic.with_calculator},
    ),
    "game": BuiltIn(
        build=game.GuessTheNumber,
        max_turns=6,
        max_turn_tokens=4,
        texts=game.TEXTS,
        teachers=(game.a_third_up, game.any_number),
        baselines={
            "any number": game.any_number,
            "within bounds": game.within_bounds,
            "halving": game.halving,
        },
    ),
    "shop": BuiltIn(
        build=shop.Shop,
        max_turns=8,
        max_turn_tokens=12,
        texts=shop.TEXTS,
        teachers=(customers.hasty, customers.hasty, customers.careful),
        baselines={
            "anything": customers.anything,
            "first result": customers.first_result,
            "hasty": customers.hasty,
            "careful": customers.careful,
            "thorough": customers.thorough,
        },
    ),
    "sokoban": BuiltIn(
        build=sokoban.Sokoban,
        max_turns=20,
        max_turn_tokens=4,
        texts=sokoban.TEXTS,
        teachers=(sokoban.careless_solver, sokoban.careless_solver, sokoban.open_move),
        baselines={
            "any move": sokoban.any_move,
            "open move": sokoban.open_move,
            "greedy": sokoban.greedy,
            "solver": sokoban.solver,
        },
    ),
    "repair": BuiltIn(
        build=repair.ChooseRepair,
        max_turns=6,
        max_turn_tokens=6,
        texts=repair.TEXTS,
        teachers=(repair.any_candidate, repair.one_try, repair.until_it_passes),
        baselines={
            "any candidate": repair.any_candidate,
            "one try": repair.one_try,
            "until it passes": repair.until_it_passes,
        },
    ),
    "python_math": BuiltIn(
        build=python_math.PythonMath,
        max_turns=4,
        max_turn_tokens=16,
        texts=python_math.TEXTS,
        teachers=(calculators.careless,),
        baselines={
            "any answer": calculators.any_answer,
            "in the head": calculators.in_the_head,
            "careless": calculators.careless,
            "with Python": calculators.with_python,
        },
        for_scripts=calculators.trusted_environment,
    ),
}


def transcripts(name: str, count: int, *, seed: int = 0) -> list[Transcript]:
    """Episodes played by a task's teachers, on training content only."""
    task = BUILT_IN[name]
    prompts = SeedPrompts(name, TRANSCRIPT_SEEDS, count, shuffle_seed=seed, held_out=False)
    environment = task.scripted()
    chance = random.Random(f"{seed}/{name}")
    return [
        play(environment, prompts.next(), chance.choice(task.teachers), max_turns=task.max_turns, seed=seed)
        for _ in range(count)
    ]


def baselines(factory: str, prompts: Sequence[Prompt], *, max_turns: int, **settings: Any) -> dict[str, float]:
    """Mean reward of each script, worst script first; empty unless the factory is a built-in task."""
    for task in BUILT_IN.values():
        if task.factory == factory:
            return {
                name: mean_reward(task.scripted(**settings), prompts, script, max_turns=max_turns)
                for name, script in task.baselines.items()
            }
    return {}
