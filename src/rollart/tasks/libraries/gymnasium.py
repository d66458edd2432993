"""`gym:ID`: any environment of Gymnasium whose spaces have a text (`spaces`).

    rollart.Task("gym:FrozenLake-v1", environment_settings={"settings": {"is_slippery": False}})

The first observation has the instructions. An invalid answer gets an observation with the reason, and uses up a turn.
Where Gymnasium truncates an episode, that is the agent's result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollart.ports.environment import TextStep
from rollart.ports.factory import load
from rollart.tasks.libraries import spaces
from rollart.tasks.libraries.support import library, unknown
from rollart.types.errors import RequestError

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

PACKAGE = "gymnasium"
ANSI = "ansi"
NAMED_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "nothing", "right"),
    "Acrobot": ("left", "nothing", "right"),
    "LunarLander": ("nothing", "left engine", "main engine", "right engine"),
    "MiniGrid": ("left", "right", "forward", "pick up", "drop", "toggle", "done"),
}
"""Names of discrete actions, which Gymnasium has only in its documentation, by the beginning of the id."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """A `TextEnvironment`.

    `settings`: keywords of `gymnasium.make`. `instructions`: in place of the default first lines; may be empty.
    `actions`: names of discrete actions. `observe`: `observation`, or `ansi` for the environment's own picture in text.
    `render_text` and `parse_action`: factory paths of functions in place of the default ones.
    """

    def __init__(
        self,
        id: str,
        settings: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        actions: Sequence[str] | None = None,
        observe: str = "observation",
        render_text: str = "",
        parse_action: str = "",
    ) -> None:
        gymnasium = library("gymnasium", PACKAGE)
        if observe not in ("observation", ANSI):
            raise RequestError(f"observe is {observe!r}; it is 'observation' or {ANSI!r}")
        keywords = dict(settings or {})
        if observe == ANSI:
            keywords["render_mode"] = ANSI
        self._id = id
        self._environment = _made(gymnasium, id, keywords)
        self._ansi = observe == ANSI
        self._names = tuple(actions if actions is not None else _names_of(id))
        self._render: Callable[[Any], str] | None = load(render_text) if render_text else None
        self._parse: Callable[[str], Any] | None = load(parse_action) if parse_action else None
        self._check()
        self._instructions = self._default_instructions() if instructions is None else instructions

    def reset(self, prompt: Prompt) -> TextStep:
        options = {key: value for key, value in prompt.data.items() if key != "held_out"}
        observation, _ = self._environment.reset(seed=prompt.seed, options=options or None)
        return TextStep("\n\n".join(filter(None, (self._instructions, self._text(observation)))))

    def step(self, action: str) -> TextStep:
        try:
            parse = self._parse or (lambda text: spaces.parse(self._environment.action_space, text, self._names))
            parsed = parse(action)
        except ValueError as error:
            return TextStep(str(error))
        observation, reward, terminated, truncated, _ = self._environment.step(parsed)
        return TextStep(
            self._text(observation),
            float(reward),
            done=bool(terminated or truncated),
            truncated=bool(truncated and not terminated),
        )

    def close(self) -> None:
        self._environment.close()

    def random_action(self, seed: int) -> str:
        """An answer, for a random player; without a function that writes actions there is none if they are parsed by
        one of the user's."""
        space = self._environment.action_space
        if self._parse is not None:
            return str(seed)
        space.seed(seed)
        return spaces.written(space, space.sample(), self._names)

    def _text(self, observation: Any) -> str:
        if self._render is not None:
            return self._render(observation)
        if self._ansi:
            return _COLOUR.sub("", str(self._environment.render())).strip("\n")
        return spaces.shown(self._environment.observation_space, observation)

    def _check(self) -> None:
        try:
            if self._render is None and not self._ansi:
                spaces.check_shown(self._environment.observation_space)
            if self._parse is None:
                spaces.check_played(self._environment.action_space)
        except RequestError as error:
            self._environment.close()
            raise RequestError(f"gym:{self._id}: {error}") from error
        space = self._environment.action_space
        if self._names and (spaces.kind(space) != "Discrete" or len(self._names) != space.n):
            raise RequestError(f"gym:{self._id}: `actions` names {len(self._names)} actions; its space is {space}")

    def _default_instructions(self) -> str:
        name = self._id.rpartition(":")[2].rpartition("/")[2]
        act = "" if self._parse else f" {spaces.how_to_act(self._environment.action_space, self._names)}"
        return f"You act in {name}.{act}"


def _made(gymnasium: Any, id: str, keywords: Mapping[str, Any]) -> Any:
    registry = list(gymnasium.registry)
    error = gymnasium.error
    try:
        return gymnasium.make(id, **keywords)
    except (error.NameNotFound, error.NamespaceNotFound, error.VersionNotFound, error.UnregisteredEnv) as missing:
        raise unknown("gym", id, registry) from missing
    except (error.DependencyNotInstalled, ModuleNotFoundError) as missing:
        raise RequestError(f"gym:{id}: {missing}") from missing


def _names_of(id: str) -> tuple[str, ...]:
    name = id.rpartition(":")[2].rpartition("/")[2]
    return next((names for prefix, names in NAMED_ACTIONS.items() if name.startswith(prefix)), ())
