"""The shop, Sokoban and repair keep the promises of the Environment port, in the host that runs them."""

from collections.abc import Callable
from itertools import count

import pytest
from sandbox_parts import usable
from worker_settings import worker_settings

from rollart.backends.environments.host import EnvironmentHost
from rollart.conformance.case import Case, NotApplicable
from rollart.conformance.environment import CASES, EnvironmentHarness
from rollart.tasks.repair.choose import ChooseRepair
from rollart.tasks.repair.editing import EditRepair
from rollart.tasks.sandboxes import shared_sandboxes
from rollart.tasks.shop.catalogue import LEVELS, catalogue
from rollart.tasks.shop.environment import Shop
from rollart.tasks.sokoban import Sokoban
from rollart.types.ids import PromptId
from rollart.types.tokens import Segment
from rollart.types.trajectory import Prompt

TASK = "conformance"


def prompt(seed: int) -> Prompt:
    return Prompt(id=PromptId(str(seed)), task=TASK, seed=seed)


def to_the_left(turn: int) -> str:  # noqa: ARG001 - the same at every turn
    return "L"


def long_puzzles(number: int) -> Prompt:
    """The prompts with which a player who always goes left runs out of moves."""
    environment = Sokoban()
    found = count()
    for seed in count():
        environment.reset(prompt(seed))
        turns = next(turn for turn in count(1) if environment.step(to_the_left(turn)).done)
        if turns == 20 and next(found) == number:
            return prompt(seed)
    raise AssertionError


def shopping(turn: int) -> str:
    first = catalogue(1).search("mug")[: LEVELS[1].per_page][0].id
    return ("search[mug]", f"click[{first}]", "click[back]", f"click[{first}]", "click[buy]")[(turn - 1) % 5]


def repairing(turn: int) -> str:
    return "take B" if turn == 4 else "try A"


def editing(turn: int) -> str:
    return "Done." if turn == 4 else "list_files:"


ENVIRONMENTS: dict[type, tuple[Callable[[int], Prompt], Callable[[int], str]]] = {
    Shop: (prompt, shopping),
    Sokoban: (long_puzzles, to_the_left),
    ChooseRepair: (prompt, repairing),
    EditRepair: (prompt, editing),
}


def harness(environment: type) -> EnvironmentHarness:
    prompts, action = ENVIRONMENTS[environment]
    flat = {"task": TASK, "environment": f"{environment.__module__}:{environment.__name__}", "slots": 3}

    def build(transcripts: bool) -> Callable[[Callable[[], None]], EnvironmentHost]:
        return lambda wake: EnvironmentHost(
            worker_settings(EnvironmentHost, {**flat, "transcripts": transcripts}), wake
        )

    return EnvironmentHarness(
        build=build(transcripts=False),
        prompt=prompts,
        action=lambda turn: Segment.of(list(action(turn).encode())),
        virtual=False,
        transcribing=build(transcripts=True),
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conforms(case: Case[EnvironmentHarness, None], environment: type) -> None:
    if environment is EditRepair:
        usable(shared_sandboxes())
    try:
        case.run(harness(environment))
    except NotApplicable as reason:
        pytest.skip(str(reason))
