"""Tool calls in the text of an answer, in the format that the model was trained with.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes; any number of them
    llama    {"name": "add", "parameters": {"a": 1}}                            Llama 3; several with ; between them
    plain    add: {"a": 1}   or   search: capital of Peru                       a line each; for models without a format

Invariant: an answer either calls tools, or is final. What looks like a call and cannot be read is `Malformed`, which
becomes an observation; it is never taken for a final answer. Calls within thoughts are not calls.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollart.types.chat import ToolSchema

THOUGHT, THOUGHT_END = "<think>", "</think>"
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"
_PLAIN = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*:")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_decoder = json.JSONDecoder()


class Call(NamedTuple):
    """A call that could be read. Whether the tool exists and takes these arguments is not checked yet."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(NamedTuple):
    """A call that could not be read, with the reason for the model."""

    reason: str
    name: str = ""


def parse(format: str, text: str, tools: Sequence[ToolSchema]) -> list[Call | Malformed]:
    """The calls of an answer, in order; none if it is final.

    >>> parse("hermes", 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [])
    [Call(name='add', arguments={'a': 1})]
    >>> parse("llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "now"}', [])
    [Call(name='add', arguments={'a': 1}), Call(name='now', arguments={})]
    >>> parse("hermes", "It is 3.", [])
    []
    """
    _, ended, text = text.rpartition(THOUGHT_END)
    if not ended and text.lstrip().startswith(THOUGHT):
        return []
    match format:
        case "hermes":
            return list(_hermes(text))
        case "llama":
            return list(_llama(text))
        case _:
            return list(_plain(text, {each["function"]["name"].lower(): each["function"] for each in tools}))


def _hermes(text: str) -> Iterator[Call | Malformed]:
    for found in _HERMES.finditer(text):
        if found[2] != "</tool_call>":
            yield Malformed("the tool call is not closed with </tool_call>")
            continue
        try:
            yield _call(_loads(found[1]))
        except ValueError as error:
            yield Malformed(f"the text between <tool_call> and </tool_call> is not JSON: {error}")


def _llama(text: str) -> Iterator[Call | Malformed]:
    text = text.strip()
    tagged = text.startswith(_LLAMA_TAG)
    text = text.removeprefix(_LLAMA_TAG).strip()
    if not text.startswith(("{", "[")):
        return
    place = 0
    while place < len(text):
        try:
            value, place = _decoder.raw_decode(text, place)
            value = _without_surrogates(value, text)
        except (ValueError, RecursionError) as error:
            if tagged or place or '"name"' in text:
                yield Malformed(f"the tool call is not JSON: {error}")
            return
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) and "name" in each for each in values):
            return  # JSON as an answer
        yield from map(_call, values)
        while place < len(text) and text[place] in "; ,\t\r\n":
            place += 1


def _plain(text: str, tools: Mapping[str, Any]) -> Iterator[Call | Malformed]:
    for line in text.splitlines():
        if line.lstrip().startswith("{") and '"name"' in line:
            try:
                yield _call(_loads(line))
            except ValueError as error:
                yield Malformed(f"the line {line.strip()[:80]!r} is not JSON: {error}")
            continue
        found = _PLAIN.match(line)
        tool = tools.get(found[1].lower()) if found else None
        if found and tool is not None:
            yield _line(tool, line[found.end() :].strip())


def _line(tool: Mapping[str, Any], rest: str) -> Call | Malformed:
    """`NAME: ARGUMENTS`, with a JSON object, or with the text of the only parameter."""
    name, parameters = tool["name"], list(tool["parameters"].get("properties", {}))
    if not rest and not parameters:
        return Call(name, {})
    if rest.startswith("{"):
        try:
            found = _loads(rest)
        except ValueError as error:
            return Malformed(f"the arguments are not JSON: {error}", name)
        return Call(name, found) if isinstance(found, dict) else Malformed("the arguments are not an object", name)
    if len(parameters) == 1 and rest:
        return Call(name, {parameters[0]: _typed(rest, tool["parameters"]["properties"][parameters[0]])})
    wanted = "{" + ", ".join(f'"{each}": …' for each in parameters) + "}"
    return Malformed(f"write {name}: {wanted}", name)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """An argument that is not text, from JSON; what is not JSON stays text, and the tool refuses it."""
    if schema.get("type") not in ("integer", "number", "boolean", "array"):
        return text
    try:
        return _loads(text)
    except ValueError:
        return text


def _loads(text: str) -> Any:
    try:
        return _without_surrogates(json.loads(text), text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _without_surrogates(value: Any, text: str) -> Any:
    """JSON may name halves of characters, which no text may contain. `text` is what the value was read from."""
    if not _SURROGATE.search(text):
        return value
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(whole)


def _call(value: Any) -> Call | Malformed:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed('a tool call is an object with "name" and "arguments"')
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments)
        except ValueError as error:
            return Malformed(f"the arguments are not JSON: {error}", value["name"])
    if not isinstance(arguments, dict):
        return Malformed("the arguments are not an object", value["name"])
    return Call(value["name"], arguments)


def written(format: str, call: Call) -> str:
    """A call as a model would write it, for scripted players.

    >>> written("plain", Call("bash", {"command": "ls"}))
    'bash: {"command": "ls"}'
    """
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if format == "plain":
        return f"{call.name}: {arguments}"
    key = "parameters" if format == "llama" else "arguments"
    text = f'{{"name": {json.dumps(call.name)}, "{key}": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>" if format == "hermes" else text


def instructions(format: str, tools: Sequence[ToolSchema]) -> str:
    """Description of the tools for the system message, where the chat template has none.

    >>> add = {"name": "add", "description": "Add.", "parameters": {"properties": {"a": {"type": "integer"}}}}
    >>> print(instructions("plain", [{"type": "function", "function": add}]))
    Tools, a line each to call them:
    add: A (integer). Add.
    """
    if format != "plain":
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = {
            "hermes": '<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>',
            "llama": '{"name": NAME, "parameters": {…}}',
        }[format]
        return f"You may call these functions:\n{described}\nTo call one, answer with:\n{example}"
    lines = []
    for function in (tool["function"] for tool in tools):
        parameters = function["parameters"].get("properties", {})
        if len(parameters) == 1:
            ((name, about),) = parameters.items()
            arguments = f" {name.upper()} ({about.get('type', 'any')})"
        else:
            given = ", ".join(f'"{name}": {about.get("type", "any")}' for name, about in parameters.items())
            arguments = f" {{{given}}}" if parameters else ""
        lines.append(f"{function['name']}:{arguments}. {function.get('description', '')}".rstrip())
    return "\n".join(["Tools, a line each to call them:", *lines])
