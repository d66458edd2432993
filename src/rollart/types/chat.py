"""Chat messages: what an environment may show instead of text."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`role` (system, user, assistant or tool) and `content`; a tool's message has its `name`."""
ToolSchema = Mapping[str, Any]
"""Description of a tool as chat templates take it: `{"type": "function", "function": {"name", "description",
"parameters"}}`."""
ROLES = ("system", "user", "assistant", "tool")


def problem_of(messages: object) -> str:
    """Why these are not chat messages; empty if they are.

    >>> problem_of([{"role": "user", "content": "hi"}]), problem_of([{"role": "usr", "content": "hi"}])
    ('', "message 0 has the role 'usr'; there are system, user, assistant, tool")
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        return f"a {type(messages).__name__} is not a list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"message {number} is a {type(message).__name__}; write a dict with role and content"
        if message.get("role") not in ROLES:
            return f"message {number} has the role {message.get('role')!r}; there are {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {number} has no text as content"
    return ""


def readable(observation: str | Sequence[Message]) -> str:
    """Messages as text for people and reward functions; the content alone if there is only one, of the user.

    >>> print(readable([{"role": "tool", "name": "add", "content": "5"}]))
    [tool add]
    5
    """
    if isinstance(observation, str):
        return observation
    if len(observation) == 1 and observation[0]["role"] == "user":
        return str(observation[0]["content"])
    return "\n\n".join(f"[{_title(message)}]\n{message['content']}" for message in observation)


def plain(messages: Sequence[Message]) -> str:
    """Messages as text for models that know no roles: their contents, with names where several tools answer."""
    several = sum(message["role"] == "tool" for message in messages) > 1
    return "\n".join(
        f"{message['name']}: {message['content']}" if several and message.get("name") else str(message["content"])
        for message in messages
    )


def _title(message: Message) -> str:
    return f"{message['role']} {message['name']}" if message.get("name") else str(message["role"])
