"""First messages of a row: the system text, and a template with the row's fields in braces.

>>> from rollart.config.schema import TaskSettings
>>> text = PromptText(TaskSettings(prompts="x.jsonl", system="Be brief.", prompt="{question} Answer:"))
>>> [message["content"] for message in text.messages({"question": "1+1?"})]
['Be brief.', '1+1? Answer:']
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollart.config.suggest import did_you_mean
from rollart.config.tasks import TaskSettings
from rollart.types.chat import Message, problem_of
from rollart.types.errors import RequestError

FIELDS = ("prompt", "messages", "question", "problem", "text")
"""Fields that are shown to the model if there is no template: the first of them that a row has."""


class PromptText:
    """`RequestError`, where a template is wrong or a row does not fit it."""

    def __init__(self, settings: TaskSettings) -> None:
        self._system = settings.system
        given = settings.prompt
        messages: Sequence[Mapping[str, str]] = (
            [{"role": "user", "content": given}] if isinstance(given, str) else given
        )
        problem = problem_of(messages)
        if problem:
            raise RequestError(f"prompt: {problem}")
        self._messages = messages if given else ()
        self._parts = [list(_parsed(str(message["content"]))) for message in self._messages]

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row, the system text first."""
        if self._parts:
            found = [
                each
                for message, parts in zip(self._messages, self._parts, strict=True)
                for each in _filled(message, parts, row)
            ]
        else:
            found = _as_messages(_default(row), "user")
        if self._system and found[0]["role"] == "system":
            raise RequestError("it begins with a system message of its own; leave out `system`")
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *found]


def _parsed(text: str) -> Iterable[tuple[str, str]]:
    """Text, and the field that follows it."""
    try:
        for literal, field, form, conversion in string.Formatter().parse(text):
            if field is not None and (not field or form or conversion):
                raise RequestError(f"the prompt {text[:80]!r} has a field that is not {{name}}; write {{{{ for a brace")
            yield literal, field or ""
    except ValueError as error:
        raise RequestError(
            f"the prompt {text[:80]!r} cannot be read ({error}); write {{{{ and }}}} for braces"
        ) from error


def _filled(message: Mapping[str, str], parts: Sequence[tuple[str, str]], row: Mapping[str, Any]) -> list[Message]:
    if len(parts) == 1 and not parts[0][0] and parts[0][1]:
        return _as_messages(_field(row, parts[0][1]), message["role"])
    text = "".join(literal + (str(_field(row, field)) if field else "") for literal, field in parts)
    return [{"role": message["role"], "content": text}]


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise RequestError(f"has no field {name!r}{did_you_mean(name, row)}; it has {', '.join(map(str, row))}")
    return row[name]


def _default(row: Mapping[str, Any]) -> Any:
    for name in FIELDS:
        if name in row:
            return row[name]
    raise RequestError(
        f"has none of the fields {', '.join(FIELDS)}; name the one to show, such as prompt = "
        f'"{{{next(iter(row), "question")}}}"'
    )


def _as_messages(value: Any, role: str) -> list[Message]:
    """A value that is alone in its message: text, or a list of messages."""
    if isinstance(value, str | int | float):
        return [{"role": role, "content": str(value)}]
    problem = problem_of(value)
    if problem:
        raise RequestError(f"the field to show is neither text nor messages: {problem}")
    if value[-1]["role"] == "assistant":
        raise RequestError("its last message is the assistant's, so there is nothing to answer")
    return [dict(message) for message in value]
