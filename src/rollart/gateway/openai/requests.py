"""Requests of the OpenAI API, parsed and checked: `/v1/chat/completions` and `/v1/completions`.

Invariants: a body is either refused with an `ApiError` that names the field, or all of it is honoured. Fields that
change the answer and are not supported are refused by name, unless they ask for what happens anyway; fields without
influence on the answer (`user`, `metadata`, …) are ignored; unknown ones are refused, as OpenAI does. `null` is the
same as absent. Of a message only its role and its content count: clients send answers back with all their fields, which
are ignored, except for calls of tools, which are refused.

>>> parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": "."}').messages
(('user', 'Hi'),)
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rollart.gateway.openai.errors import ApiError, invalid

MAX_CHOICES = 128
MAX_MESSAGES = 2048
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 128
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-6
"""Lower temperatures are greedy: logits divided by them overflow."""
LARGEST_SEED = 2**63
LARGEST_TOKEN = 2**31
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles, and what they are called in chat templates."""

Message = tuple[str, str]
"""Role and content."""
Prompt = str | tuple[int, ...]
"""Text, or token ids."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints have in common, with OpenAI's defaults."""

    model: str
    max_tokens: int | None
    """None = as many as fit into the context."""
    temperature: float
    top_p: float
    top_k: int
    """An extension: sample from this many of the most likely tokens; 0 = all."""
    seed: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool


class ChatRequest(msgspec.Struct, frozen=True):
    options: Options
    messages: tuple[Message, ...]


class CompletionRequest(msgspec.Struct, frozen=True):
    options: Options
    prompts: tuple[Prompt, ...]


def parse_chat(body: bytes) -> ChatRequest:
    """Parse the body of `/v1/chat/completions`."""
    given = _decode(body, _ChatBody)
    if given.max_tokens is not None and given.max_completion_tokens is not None:
        raise invalid("Give max_tokens or max_completion_tokens, not both.", param="max_tokens")
    if given.top_logprobs:
        raise _only_sampled("top_logprobs")
    limit = "max_tokens" if given.max_completion_tokens is None else "max_completion_tokens"
    options = _options(given, getattr(given, limit), 1, logprobs=bool(given.logprobs), limit=limit)
    if not 0 < len(given.messages) <= MAX_MESSAGES:
        raise invalid(f"messages must have 1 to {MAX_MESSAGES} items.", param="messages")
    return ChatRequest(options, tuple(_message(number, each) for number, each in enumerate(given.messages)))


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse the body of `/v1/completions`."""
    given = _decode(body, _CompletionBody)
    if given.logprobs:
        raise _only_sampled("logprobs")
    prompts = _prompts(given.prompt)
    return CompletionRequest(_options(given, given.max_tokens, len(prompts), logprobs=given.logprobs == 0), prompts)


# --- bodies as they are sent ----------------------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    # Refused unless neutral (`_NEUTRAL`); so are those of the classes below.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    # Without influence on the answer.
    user: Any = None


class _ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    # Without influence on the answer.
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None


class _CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    best_of: Any = None
    echo: Any = None
    suffix: Any = None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not supported, and their values that ask for nothing; `null` is always one."""

B = TypeVar("B", bound=_Body)
_AT = re.compile(r" - at `\$\.?(.*)`$")
_NAMED = re.compile(r"(required|unknown) field `(.*?)`")


def _decode(body: bytes, kind: type[B]) -> B:
    try:
        given = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise invalid("The body is nested too deeply.") from error
    for name, neutral in _NEUTRAL.items():
        value = getattr(given, name, None)
        if value is not None and value not in neutral:
            raise invalid(f"{name} is not supported by this server. Omit it.", param=name, code="unsupported_parameter")
    return given


def _wrong_field(problem: str) -> ApiError:
    """The error for a field of the wrong type, from msgspec's description."""
    named, place = _NAMED.search(problem), _AT.search(problem)
    where = place[1] if place else ""
    if named is None:
        text = _AT.sub("", problem)
        return invalid(f"{where or 'The body'}: {text}.", param=where or None, code="invalid_type")
    name = f"{where}.{named[2]}" if where else named[2]
    if named[1] == "unknown":
        message = f"Unrecognized request argument supplied: {name[:100]}"
        return invalid(message, param=name[:100], code="unknown_parameter")
    return invalid(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def _only_sampled(name: str) -> ApiError:
    message = f"{name} must be 0: only the log-probability of the sampled token is known."
    return invalid(message, param=name, code="unsupported_value")


# --- checks ---------------------------------------------------------------------------------------------------------


def _options(
    given: _Body, max_tokens: int | None, prompts: int, *, logprobs: bool, limit: str = "max_tokens"
) -> Options:
    """`limit` is the name of the field that `max_tokens` is from."""
    n = 1 if given.n is None else given.n
    temperature = 1.0 if given.temperature is None else given.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        temperature = 0.0
    top_p = 1.0 if given.top_p is None else given.top_p
    top_k = given.top_k or 0
    _check(0 < n * prompts <= MAX_CHOICES, "n", f"must be 1 to {MAX_CHOICES}, for all prompts together")
    _check(max_tokens is None or max_tokens > 0, limit, "must be at least 1")
    _check(0 <= temperature <= MAX_TEMPERATURE, "temperature", f"must be 0 to {MAX_TEMPERATURE:g}")
    _check(0 < top_p <= 1, "top_p", "must be above 0 and at most 1")
    _check(0 <= top_k < LARGEST_TOKEN, "top_k", "must be a number of tokens, or 0 for all")
    _check(-LARGEST_SEED <= (given.seed or 0) < LARGEST_SEED, "seed", "must be a 64-bit integer")
    _check(given.stream_options is None or bool(given.stream), "stream_options", "is only allowed with stream")
    return Options(
        model=given.model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=given.seed,
        n=n,
        stop=_stops(given.stop),
        stream=bool(given.stream),
        include_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        logprobs=logprobs,
    )


def _check(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise invalid(f"{name} {rule}.", param=name, code="invalid_value")


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    _check(len(stops) <= MAX_STOPS, "stop", f"must have at most {MAX_STOPS} strings")
    fits = all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    _check(fits, "stop", f"must have strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _message(number: int, given: _Message) -> Message:
    where = f"messages[{number}]"
    role = ROLES.get(given.role)
    if role is None:
        rule = f"must be one of {', '.join(ROLES)}; others are not supported by this server"
        raise invalid(f"{where}.role {rule}.", param=f"{where}.role", code="invalid_value")
    for name in ("tool_calls", "function_call"):
        if getattr(given, name):
            param = f"{where}.{name}"
            raise invalid(f"{param}: tools are not supported by this server.", param=param, code="unsupported_value")
    return role, _content(f"{where}.content", given.content)


def _content(where: str, content: str | list[_Part] | None) -> str:
    if content is None:
        raise invalid(f"{where} is missing.", param=where, code="missing_required_parameter")
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            param = f"{where}[{number}].type"
            message = f"{param} must be 'text', and the part must have one; others are not supported by this server."
            raise invalid(message, param=param, code="unsupported_value")
    return "".join(part.text or "" for part in content)


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """One prompt, or several: a list of numbers is one."""
    if isinstance(given, str):
        return (given,)
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return (_ids(ids),)
    if ids or not given or len({type(each) for each in given}) > 1:
        raise invalid("prompt must be a text, a list of token ids, or a list of either.", param="prompt")
    return tuple(each if isinstance(each, str) else _ids(each) for each in given if not isinstance(each, int))


def _ids(given: list[int]) -> tuple[int, ...]:
    _check(all(0 <= each < LARGEST_TOKEN for each in given), "prompt", "has token ids that no model has")
    return tuple(given)
