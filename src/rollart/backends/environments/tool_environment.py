"""Adapter from a `ToolEnvironment` to a `TextEnvironment`: it reads the calls in an answer and makes them.

    answer ─► calls? ─ no ─► finish(answer): over
                │ yes
                └► each in order ─► tool messages; at the last turn, finish("") as well: over, truncated

No call of an answer is begun once `tool_timeout_s` or half of `step_deadline_s` has passed, so that many calls are no
way out of losing: their step ends within its deadline.
An agent that is out of turns is judged by what it did: its last calls are made and the episode is finished for it.
"""

from collections.abc import Sequence
from time import monotonic

from rollart.backends.environments.codec import Codec
from rollart.backends.environments.tool_calls import Call, Malformed
from rollart.backends.environments.tool_dialect import ToolDialect, message, recorded, unknown
from rollart.backends.environments.tools import FunctionTool, shortened
from rollart.config.tasks import TaskSettings
from rollart.ports.environment import TextStep, ToolEnvironment, ToolError
from rollart.types.chat import Message
from rollart.types.trajectory import Prompt

DONE = "done"
"""Final answer of the random player."""


class ToolCalling:
    """A `TextEnvironment`: one episode of an environment with tools, for the model of a codec."""

    def __init__(self, environment: ToolEnvironment, settings: TaskSettings, codec: Codec | None) -> None:
        self._environment = environment
        self._settings = settings
        self._dialect = ToolDialect(settings.tool_format, codec)
        tools = [FunctionTool(function, settings.tool_timeout_s) for function in environment.tools]
        self._tools = {tool.schema["function"]["name"]: tool for tool in tools}
        self._schemas = [tool.schema for tool in tools]
        self._turns = 0
        self._begin_s = min(settings.tool_timeout_s, settings.step_deadline_s / 2)

    def reset(self, prompt: Prompt) -> TextStep:
        first = self._environment.reset(prompt)
        self._turns = 0
        messages = self._dialect.introduced(_as_messages(first), self._schemas)
        return first._replace(observation=messages, tools=self._dialect.offered(self._schemas))

    def step(self, action: str) -> TextStep:
        self._turns += 1
        calls = self._dialect.calls(action, self._schemas)
        if not calls:
            return self._environment.finish(action)._replace(done=True)
        began = monotonic()
        results = [self._result(call, began) for call in calls]
        made = tuple(recorded(call, error) for call, (_, error) in zip(calls, results, strict=True))
        messages = [message(call, text, self._tools) for call, (text, _) in zip(calls, results, strict=True)]
        if self._turns < self._settings.max_turns:
            return TextStep(messages, calls=made)
        last = self._environment.finish("")
        return last._replace(observation=[*messages, *_as_messages(last)], done=True, truncated=True, calls=made)

    def close(self) -> None:
        self._environment.close()

    def random_action(self, seed: int) -> str | None:
        """For `rollart env check`: a random call of the environment, as the model would write it."""
        known = getattr(self._environment, "random_call", None)
        if known is None:
            return None
        call = known(seed)
        return DONE if call is None else self._dialect.written(Call(*call))

    def scripted_action(self) -> str | None:
        """For `rollart env check`: the environment's own good answer."""
        known = getattr(self._environment, "scripted_action", None)
        answer: str | None = None if known is None else known()
        return answer

    def _result(self, call: Call | Malformed, began: float) -> tuple[str, str]:
        """The text for the model, and the error if there is no result."""
        most = self._settings.tool_result_chars
        try:
            if monotonic() - began > self._begin_s:
                raise ToolError(f"not made: those before it took more than {self._begin_s:g} s; make fewer at once")
            if isinstance(call, Malformed):
                raise ToolError(call.reason)
            if call.name not in self._tools:
                raise unknown(call.name, self._tools)
            return shortened(self._tools[call.name].call_here(call.arguments), most), ""
        except ToolError as error:
            text = shortened(f"Error: {error}", most)
            return text, text.removeprefix("Error: ")


def _as_messages(step: TextStep) -> Sequence[Message]:
    said = step.observation
    return [{"role": "user", "content": said}] if isinstance(said, str) else said
