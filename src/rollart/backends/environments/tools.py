"""Tools that are Python: a schema from the signature and the docstring, arguments checked, time and size bounded.

What a call may end in, and whose result it is:

| the call                                                | the model sees             | the trajectory |
|---|---|---|
| is malformed, or its arguments do not fit the schema    | what is wrong              | goes on |
| raises an exception                                     | its type and message       | goes on |
| takes longer than `tool_timeout_s`                      | that it took too long      | goes on |
| returns more than `tool_result_chars`                   | beginning and end          | goes on |
| raises `ConnectionError` or `rollart.EnvironmentFault`  |                            | ends as `env_failed` |

The model chose the call, so what the call leads to is the model's result. A tool that failed through no fault of the
model (a service is down) says so by one of the two exceptions of the last line, and the trajectory gets no reward.
"""

import asyncio
import functools
import inspect
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from rollart.ports.environment import ToolError
from rollart.types.chat import ToolSchema
from rollart.types.errors import EnvironmentFault, RequestError

logger = logging.getLogger(__name__)

MOST_HANGING = 256
"""Maximum number of threads of a process whose tool call timed out and has not returned."""
_guard = threading.Lock()
_left: set[threading.Thread] = set()
"""These threads."""
_logged: set[str] = set()
"""Names of tools whose first error was logged; tools are built anew in every episode."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class Tool(Protocol):
    """Something that a model may call."""

    @property
    def schema(self) -> ToolSchema: ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text, or `ToolError`; anything else that it raises is a failure of the environment."""
        ...


class FunctionTool:
    """A function or a bound method."""

    def __init__(self, function: Callable[..., Any], timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._model, self.schema = _described(_plain_function(function))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        name = self.schema["function"]["name"]
        given = self.checked(arguments)
        try:
            async with asyncio.timeout(self._timeout_s):
                return as_text(await _called(functools.partial(self._function, **given), f"tool {name}"))
        except TimeoutError as error:
            raise ToolError(f"no answer within {self._timeout_s:g} s") from error
        except (ConnectionError, EnvironmentFault, ToolError):
            raise
        except (Exception, SystemExit) as error:
            if name not in _logged:
                _logged.add(name)
                logger.warning(
                    "the tool %s raised an error, which the model gets; others are not logged", name, exc_info=error
                )
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def call_here(self, arguments: Mapping[str, Any]) -> str:
        """In the caller's thread and time, for tools that are part of an environment; raises what the function does."""
        return as_text(self._function(**self.checked(arguments)))

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted to the types of the parameters; `ToolError` if they do not fit."""
        try:
            found = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(_explained(error)) from error
        except RecursionError as error:
            raise ToolError("the arguments are nested too deeply") from error
        return {field: getattr(found, field) for field in type(found).model_fields}


async def _called(function: Callable[[], Any], name: str) -> Any:
    """Call a function in a thread of its own, or await it. A thread that hangs is left behind."""
    target = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(target):
        return await function()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    if len(_left) >= MOST_HANGING:
        raise EnvironmentFault(f"{MOST_HANGING} calls of tools hang in this worker; the next would be of {name}")
    returned = False

    def work() -> None:
        nonlocal returned
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 - handed to the caller
            error = raised
        with _guard:
            returned = True
            _left.discard(threading.current_thread())
        try:
            loop.call_soon_threadsafe(_settle, answer, result, error)
        except RuntimeError:
            logger.debug("%s answered after its episode was over", name)

    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the limit of threads of this machine
        raise EnvironmentFault(f"{name}: {error}") from error
    try:
        result = await answer
    except asyncio.CancelledError:
        with _guard:
            if not returned:
                _left.add(thread)
        raise
    return await result if inspect.isawaitable(result) else result


def _settle(answer: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        # A StopIteration cannot be raised in a future, and a SystemExit would end the loop.
        fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
        answer.set_exception(error if fits else ToolError(f"{type(error).__name__}: {error}"))


def as_text(result: Any) -> str:
    """The result of a tool as the model sees it: text as it is, anything else as JSON."""
    if result is None:
        return ""
    text = result if isinstance(result, str) else _json(result)
    return text.encode(errors="replace").decode()  # halves of characters are no text


def _json(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except TypeError:  # models, dataclasses, dates, arrays
        return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)


def shortened(text: str, limit: int) -> str:
    """Beginning and end of a result that is too long.

    >>> shortened("a" * 500 + "b" * 500, 300)[120:180]
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa … [700 characters left out] …'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters left out] … {text[len(text) - half :]}"


# --- schemas --------------------------------------------------------------------------------------------------------


def methods_of(tool: type) -> list[str]:
    """Public methods of a class, which are its tools. `close` is called at the end of an episode instead."""
    names = [name for name, value in inspect.getmembers(tool, callable) if not name.startswith("_") and name != "close"]
    if not names:
        raise RequestError(f"the tool class {tool.__name__} has no public method")
    return names


def schemas_of(target: Callable[..., Any]) -> list[ToolSchema]:
    """Schemas of a function, or of the methods of a class."""
    if inspect.isclass(target):
        return [_described(_without_self(getattr(target, name), target))[1] for name in methods_of(target)]
    return [_described(_plain_function(target))[1]]


class _Signature:
    """Name, documentation and parameters of a function."""

    def __init__(self, function: Callable[..., Any], *, skip: int = 0, owner: str = "") -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.where = f"{owner}.{self.name}" if owner else self.name
        self.about = inspect.getdoc(function) or ""
        try:
            self.parameters = list(inspect.signature(function).parameters.values())[skip:]
            self.hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError, ValueError) as error:
            raise RequestError(f"the signature of the tool {self.where} cannot be read: {error}") from error


def _plain_function(function: Callable[..., Any]) -> _Signature:
    return _Signature(function)


def _without_self(method: Callable[..., Any], owner: type) -> _Signature:
    static = isinstance(inspect.getattr_static(owner, method.__name__), staticmethod | classmethod)
    return _Signature(method, skip=0 if static else 1, owner=owner.__name__)


def _described(signature: _Signature) -> tuple[type[BaseModel], ToolSchema]:
    if not NAME.fullmatch(signature.name):
        raise RequestError(f"a tool cannot have the name {signature.name!r}; give it as a function with a name (def)")
    summary, arguments = docstring_parts(signature.about)
    fields: dict[str, Any] = {}
    for parameter in signature.parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise RequestError(f"the tool {signature.where} takes {parameter}; parameters of tools have names")
        if parameter.name not in signature.hints:
            raise RequestError(f"the parameter {parameter.name!r} of the tool {signature.where} has no type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        # A description of None would hide that of an annotation.
        about: dict[str, Any] = {"description": arguments[parameter.name]} if parameter.name in arguments else {}
        fields[parameter.name] = (signature.hints[parameter.name], Field(default, **about))
    try:
        model: type[BaseModel] = create_model(
            signature.name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        parameters = _untitled(model.model_json_schema())
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"the parameters of the tool {signature.where} have no JSON schema: {reason}") from error
    parameters.pop("additionalProperties", None)
    parameters.pop("description", None)
    parameters.setdefault("properties", {})
    function = {"name": signature.name, "description": summary, "parameters": parameters}
    return model, {"type": "function", "function": function}


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """The description of a Google-style docstring, and that of each argument.

    >>> docstring_parts("Search.\\n\\nArgs:\\n    query: Words to\\n        look for.\\n    most (int): How many.")
    ('Search.', {'query': 'Words to look for.', 'most': 'How many.'})
    """
    summary: list[str] = []
    arguments: dict[str, str] = {}
    section, name, depth = "", "", None
    for line in text.splitlines():
        head = line.strip()
        if re.fullmatch(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):", head):
            section, name, depth = head.rstrip(":"), "", None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and head:
            indent = len(line) - len(line.lstrip())
            depth = indent if depth is None else depth
            found = re.match(r"\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", head)
            if found and indent <= depth:
                name = found[1]
                arguments[name] = found[2]
            elif name:
                arguments[name] = f"{arguments[name]} {head}".strip()
    return "\n".join(summary).strip(), arguments


def _untitled(schema: Any) -> Any:
    """The schema without the titles that pydantic adds, which only cost tokens."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(each) for name, each in value.items()} if key == "properties" else _untitled(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _explained(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg'][:1].lower()}{each['msg'][1:]}"
        for each in error.errors(include_url=False)[:5]
    ]
    return "; ".join(problems)


def names_of(schemas: Sequence[ToolSchema]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]
