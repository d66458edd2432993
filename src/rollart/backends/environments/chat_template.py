"""A checkpoint's chat template, rendered as by Hugging Face but without importing transformers, which takes seconds.

Templates are untrusted programs: they run in Jinja's sandbox, and only on probe messages, never on what users write.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollart.types.errors import RequestError


class NotRendered(Exception):
    """The conversation is one that the model does not take."""


class _Generation(Extension):
    """`{% generation %}`, with which transformers finds the answers; here its body is rendered as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - an attribute of jinja2's class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; no other file is read."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        config = Path(folder) / "tokenizer_config.json"
        self._about: Mapping[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = sandbox.from_string(self._text())
        except TemplateError as error:
            raise self._unusable(error) from error

    @property
    def end(self) -> str | None:
        """The tokenizer's end-of-sequence token."""
        return self._special("eos_token")

    def render(self, contents: Sequence[str]) -> str:
        """Render a conversation of alternating user and assistant messages, up to the next assistant turn."""
        roles = ("user", "assistant")
        try:
            return self.conversation([(roles[number % 2], text) for number, text in enumerate(contents)])
        except NotRendered as error:
            raise self._unusable(error) from error

    def conversation(self, messages: Sequence[tuple[str, str]]) -> str:
        """Render messages, as pairs of role and content, up to the next assistant turn; raises `NotRendered`."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                bos_token=self._special("bos_token") or "",
                eos_token=self.end or "",
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise NotRendered(str(error)) from error

    def dialogue(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], at: datetime.datetime
    ) -> str:
        """Render messages of any role, with tools, up to the next assistant turn; raises `NotRendered`."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                bos_token=self._special("bos_token") or "",
                eos_token=self.end or "",
                strftime_now=at.strftime,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise NotRendered(str(error)) from error

    @property
    def source(self) -> str:
        """The template itself."""
        return self._text()

    def _text(self) -> str:
        file = Path(self._folder) / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.is_file() else self._about.get("chat_template")
        if isinstance(text, list):  # several, by name
            text = next((each["template"] for each in text if each["name"] == "default"), None)
        if not text:
            raise RequestError(
                f"{self._folder!r} has no chat template; use an instruct checkpoint, or add chat_template.jinja"
            )
        return str(text)

    def _special(self, name: str) -> str | None:
        token = self._about.get(name)
        return token["content"] if isinstance(token, dict) else token

    def _unusable(self, error: Exception) -> RequestError:
        return RequestError(
            f"the chat template of {self._folder!r} cannot render a conversation between user and assistant: {error}. "
            "Give the checkpoint another chat_template.jinja."
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers, which unlike Jinja's escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    """Called by templates to reject a conversation."""
    raise TemplateError(message)
