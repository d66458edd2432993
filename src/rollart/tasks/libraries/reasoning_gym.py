"""`reasoning_gym:DATASET`: one question per episode, one answer, scored by the dataset.

    rollart.Task("reasoning_gym:letter_counting", environment_settings={"settings": {"max_words": 6}})

Every prompt is a question of its own, drawn from its seed, and held-out questions differ from those of training by
content. An answer that the scorer fails on, although it accepts the reference answer, is wrong: its reward is 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from rollart.config.suggest import did_you_mean
from rollart.ports.environment import TextStep
from rollart.tasks import split
from rollart.tasks.libraries.support import OwnChance, library, no_download, unknown
from rollart.types.errors import EnvironmentFault, RequestError

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

PACKAGE = "reasoning-gym"
PER_PROMPT = ("seed", "size")
"""Dataset settings that the prompt determines; they cannot be configured."""
RIGHT, WRONG = "Right.", "Wrong."


class ReasoningGym:
    """A `TextEnvironment`.

    `settings`: those of the dataset. `instructions` follow the question. `answer_tag`: the answer is what stands
    between `<tag>` and `</tag>`, the last of them; by default the whole text, without blanks around it.
    """

    def __init__(
        self,
        id: str,
        settings: Mapping[str, Any] | None = None,
        instructions: str = "",
        answer_tag: str = "",
    ) -> None:
        self._library = library("reasoning_gym", PACKAGE)
        self._id = id
        self._settings = dict(settings or {})
        known = self._library.factory.DATASETS
        if id not in known:
            raise unknown("reasoning_gym", id, known)
        self._instructions = instructions
        self._tag = re.escape(answer_tag)
        self._chance = OwnChance()
        self._entry: Any = None
        self._dataset: Any = None
        self._check_settings(known[id][1])

    def reset(self, prompt: Prompt) -> TextStep:
        self._chance.seed(prompt.seed)
        drawn: dict[str, tuple[Any, Any]] = {}

        def question(seed: int) -> str:
            dataset = self._made(seed)
            entry = dataset[0]
            drawn[entry["question"]] = (dataset, entry)
            return str(entry["question"])

        with self._chance.used():
            text = split.draw(prompt, question)
        self._dataset, self._entry = drawn[text]
        return TextStep(f"{text}\n\n{self._instructions}" if self._instructions else text)

    def step(self, action: str) -> TextStep:
        if self._entry is None:
            raise EnvironmentFault("step before reset: there is no question yet")
        with self._chance.used():
            reward = self._score(self._extracted(action))
        return TextStep(RIGHT if reward >= 1 else WRONG, reward, done=True)

    def close(self) -> None:
        self._entry = self._dataset = None

    def random_action(self, seed: int) -> str:
        """A number, which most datasets ask for."""
        return self._wrapped(str(seed % 20))

    def scripted_action(self) -> str | None:
        """The reference answer, if the dataset has one."""
        answer = self._entry["answer"]
        return None if answer is None else self._wrapped(str(answer))

    def _made(self, seed: int) -> Any:
        with no_download(f"reasoning_gym:{self._id}"):
            return self._library.create_dataset(self._id, seed=seed, size=1, **self._settings)

    def _score(self, answer: str) -> float:
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception as error:
            reference = self._entry["answer"]
            if reference is None or not _scores(self._dataset, reference, self._entry):
                raise EnvironmentFault(f"the scorer of {self._id} failed: {type(error).__name__}: {error}") from error
            return 0.0

    def _extracted(self, text: str) -> str:
        if not self._tag:
            return text.strip()
        found = re.findall(rf"<{self._tag}>(.*?)</{self._tag}>", text, re.DOTALL)
        return str(found[-1]).strip() if found else ""

    def _wrapped(self, answer: str) -> str:
        return f"<{self._tag}>{answer}</{self._tag}>" if self._tag else answer

    def _check_settings(self, config: Any) -> None:
        fields = _fields(config)
        for name in self._settings:
            if name in PER_PROMPT:
                raise RequestError(
                    f"reasoning_gym:{self._id}: {name!r} is the prompt's; set `prompts` of the task instead"
                )
            if name not in fields:
                raise RequestError(
                    f"reasoning_gym:{self._id} has no setting {name!r}{did_you_mean(name, fields)}; it has "
                    f"{', '.join(sorted(fields.difference(PER_PROMPT)))}"
                )


@cache
def _fields(config: Any) -> frozenset[str]:
    return frozenset(getattr(config, "__dataclass_fields__", {}))


def _scores(dataset: Any, answer: Any, entry: Any) -> bool:
    try:
        return float(dataset.score_answer(answer, entry)) > 0
    except Exception:  # noqa: BLE001 - the library's code, which is being judged
        return False
