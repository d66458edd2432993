"""Judge: a language model behind an OpenAI-compatible endpoint gives the reward. No code, a table of a TOML file:

    [helpful]                                # judges.toml; a task uses it as `reward = "judges.toml:helpful"`
    factory = "rollart.backends.rewards.judge:Judge"
    base_url = "http://127.0.0.1:8000/v1"    # `rollart serve`, vLLM, or a provider
    model = "my-judge"
    secret = "ROLLART_API_KEY"
    rubric = "10: answers the question and explains why. 0: does neither."
    scores = ["score"]
    lowest = 0
    highest = 10

Invariants: a missing, unreadable or impossible score fails the reward for good and is never 0; only the answer of the
judge is searched for scores. Outages are retried, within limits.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from rollart.backends.rewards.judge_client import ChatClient
from rollart.backends.rewards.judge_texts import TEMPLATE, fill, names_in, parse_json, parse_pattern
from rollart.config.base import Strict
from rollart.config.suggest import did_you_mean
from rollart.ports.reward_call import BadReward
from rollart.types.errors import RequestError
from rollart.types.transcript import Transcript

KNOWN = (
    "rubric",
    "scores",
    "lowest",
    "highest",
    "example",
    "conversation",
    "final_text",
    "final_observation",
    "task",
    "earned",
)
"""What templates may name, besides `prompt.FIELD`."""


class JudgeSettings(Strict):
    base_url: str
    """Root of the API, such as `http://127.0.0.1:8000/v1`."""
    model: str
    secret: str = ""
    """Name of the environment variable with the key of the API; empty: it needs none."""
    rubric: str = ""
    """What makes a good answer; part of the default template."""
    template: str = TEMPLATE
    """What the judge is asked. `{{rubric}}`, `{{conversation}}`, `{{final_text}}`, `{{prompt.FIELD}}` and others."""
    system: str = ""
    """System message; none by default."""
    scores: Annotated[tuple[str, ...], Field(min_length=1)] = ("score",)
    """Names of the scores of a judgement. Several become named parts; the reward is their mean."""
    lowest: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    highest: Annotated[float, Field(allow_inf_nan=False)] = 10.0
    """Range of every score; the reward is scaled to 0…1."""
    parse: Literal["json", "pattern"] = "json"
    """`json`: the last JSON object in the answer that has all scores; `pattern`: a regular expression."""
    pattern: str = ""
    """Regular expression with a group per score, by its name, or one group; its last match counts."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    options: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, such as `response_format`."""
    max_characters: Annotated[int, Field(ge=100)] = 20_000
    """Limit for the conversation and for each other text; the middle of a longer one is left out, and marked."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Limit of one request."""
    attempts: Annotated[int, Field(ge=1)] = 4
    """Requests for one judgement, while the endpoint is busy (429), fails (5xx) or is out of reach."""


class Judge:
    """A reward function made from settings; thread-safe."""

    def __init__(self, **settings: Any) -> None:
        try:
            chosen = JudgeSettings.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            near = did_you_mean(key, JudgeSettings.model_fields) if first["type"] == "extra_forbidden" else ""
            raise RequestError(f"judge: {key}: {first['msg'].lower()}{near}") from error
        _check(chosen)
        self._settings = chosen
        self._pattern = re.compile(chosen.pattern)
        self._client = ChatClient(chosen.base_url, chosen.secret, chosen.timeout_s, chosen.attempts)

    def __call__(self, t: Transcript) -> float | dict[str, float]:
        judgement = self._client.ask(self._request(t))
        scores = self._scores(judgement)
        scaled = {name: self._scaled(name, value, judgement) for name, value in scores.items()}
        if len(scaled) == 1:
            return next(iter(scaled.values()))
        return {name: value / len(scaled) for name, value in scaled.items()}

    def _request(self, t: Transcript) -> dict[str, Any]:
        chosen = self._settings
        text = fill(chosen.template, t, self._values(), chosen.max_characters)
        system = [{"role": "system", "content": chosen.system}] if chosen.system else []
        return {
            "model": chosen.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": chosen.temperature,
            "max_tokens": chosen.max_tokens,
            **chosen.options,
        }

    def _values(self) -> Mapping[str, str]:
        chosen = self._settings
        return {
            "rubric": chosen.rubric,
            "scores": ", ".join(f'"{name}"' for name in chosen.scores),
            "lowest": f"{chosen.lowest:g}",
            "highest": f"{chosen.highest:g}",
            "example": json.dumps(dict.fromkeys(chosen.scores, chosen.lowest)),
        }

    def _scores(self, judgement: str) -> Mapping[str, float]:
        if self._settings.parse == "json":
            found = parse_json(judgement, self._settings.scores)
        else:
            found = parse_pattern(judgement, self._pattern, self._settings.scores)
        if found is None:
            raise malformed("has no " + " and ".join(self._settings.scores), judgement)
        return found

    def _scaled(self, name: str, value: float, judgement: str) -> float:
        lowest, highest = self._settings.lowest, self._settings.highest
        if not lowest <= value <= highest:
            raise malformed(f"has {name} {value:g}, which is not within {lowest:g} and {highest:g}", judgement)
        return (value - lowest) / (highest - lowest)


def malformed(why: str, judgement: str) -> BadReward:
    """The failure of a judgement that is not what was asked for."""
    shown = judgement if len(judgement) <= 200 else f"… {judgement[-200:]}"
    return BadReward(f"malformed judgement: it {why}: {shown!r}")


def _check(chosen: JudgeSettings) -> None:
    if not chosen.lowest < chosen.highest:
        raise RequestError(f"judge: highest ({chosen.highest:g}) must be more than lowest ({chosen.lowest:g})")
    for name in names_in(chosen.template):
        if name not in KNOWN and not name.startswith("prompt."):
            raise RequestError(f"judge: template: there is no {{{{{name}}}}}{did_you_mean(name, KNOWN)}")
    if (chosen.parse == "pattern") != bool(chosen.pattern):
        raise RequestError('judge: parse = "pattern" and a pattern go together; give both or none')
    if chosen.pattern and chosen.template == TEMPLATE:
        raise RequestError("judge: the default template asks for JSON; give a `template` that asks for the pattern")
    try:
        groups = re.compile(chosen.pattern)
    except re.error as error:
        raise RequestError(f"judge: pattern: {error}") from error
    by_name = set(chosen.scores) <= set(groups.groupindex)
    if chosen.pattern and not by_name and (len(chosen.scores), groups.groups) != (1, 1):
        names = ", ".join(f"(?P<{name}>…)" for name in chosen.scores)
        raise RequestError(f"judge: pattern must have one group, or a group per score: {names}")
