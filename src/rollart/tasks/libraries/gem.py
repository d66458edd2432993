"""`gem:ID`: an environment of GEM (gem-llm), such as `gem:game:GuessTheNumber-v0-easy`.

The game's own observations are shown, with what GEM asks for next; they are appended to the conversation, so none of
GEM's wrappers is needed. GEM draws from the global random generators: here each environment has its own state of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollart.ports.environment import TextStep
from rollart.tasks.libraries.support import OwnChance, library, no_download, no_nltk_download, unknown

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

PACKAGE = "gem-llm"


class Gem:
    """A `TextEnvironment`. `settings`: keywords of `gem.make`."""

    def __init__(self, id: str, settings: Mapping[str, Any] | None = None) -> None:
        gem = library("gem", PACKAGE)
        library("gem.utils.constants", PACKAGE)
        known = gem.envs.registration.ENV_REGISTRY
        if id not in known:
            raise unknown("gem", id, known)
        self._chance = OwnChance()
        dataset = known[id].kwargs.get("dataset_name", "")
        with self._chance.used(), no_nltk_download(), no_download(f"gem:{id}", dataset):
            self._environment = gem.make(id, **(settings or {}))
        self._no_text = gem.utils.constants.TERMINAL_STATE

    def reset(self, prompt: Prompt) -> TextStep:
        self._chance.seed(prompt.seed)
        with self._chance.used():
            observation, _ = self._environment.reset(seed=prompt.seed % 2**32)
        return TextStep(observation.strip())

    def step(self, action: str) -> TextStep:
        with self._chance.used():
            observation, reward, terminated, truncated, info = self._environment.step(action)
        done = bool(terminated or truncated)
        suffix = "" if done else str(info.get("suffix", ""))
        shown = "" if observation == self._no_text else str(observation)
        text = "\n".join(filter(None, (shown.strip(), suffix.strip())))
        return TextStep(text, float(reward), done, truncated=bool(truncated and not terminated))

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    def random_action(self, seed: int) -> str:
        """GEM's own random player, or a number where it has none."""
        chance = OwnChance(seed)
        try:
            with chance.used():
                return str(self._environment.sample_random_action())
        except NotImplementedError:
            return f"\\boxed{{{seed % 10}}}"
