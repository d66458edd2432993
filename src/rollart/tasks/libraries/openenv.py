"""`openenv:URL`: an environment behind an OpenEnv server, over its WebSocket; the package openenv is not needed.

    rollart.Task("openenv:http://127.0.0.1:8000")

Every episode has a connection of its own, which the server gives an environment. What an answer becomes is taken from
the server's schema: the text of its only required field, or else a JSON object. An action that the server finds invalid
gets its message as the observation, and uses up a turn. What breaks on the way is a failure of the environment.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import SplitResult, urlsplit
from urllib.request import urlopen

from rollart.config.suggest import did_you_mean
from rollart.ports.environment import TextStep
from rollart.tasks.libraries.websocket import WebSocket
from rollart.types.errors import EnvironmentFault, RequestError

if TYPE_CHECKING:  # where environments have an interpreter of their own, there is no msgspec
    from rollart.types.trajectory import Prompt

TIMEOUT_S = 600.0
"""Limit of one message; the deadlines of the task are usually shorter."""
SCHEMA_TIMEOUT_S = 20.0
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
BESIDES = ("metadata", "done", "reward")
"""Fields of actions and observations that are OpenEnv's own."""
INVALID = "VALIDATION_ERROR"
FULL = "CAPACITY_REACHED"
MORE_ROOM = "lower `environments` of the task, or raise max_concurrent_envs of the server"


class OpenEnv:
    """A `TextEnvironment`.

    `action_field`: the field of an action that is the agent's text; empty = by the schema. `observation_field`: the
    field that the agent sees; empty = all. `instructions` come first. `options`: further arguments of a reset.
    """

    def __init__(
        self,
        id: str,
        action_field: str = "",
        observation_field: str = "",
        instructions: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        self._url = server_url(id)
        self._action_field = action_field
        self._observation_field = observation_field
        self._instructions = instructions
        self._options = dict(options or {})
        self._connection: WebSocket | None = None
        self._schema: dict[str, Any] = {}

    def reset(self, prompt: Prompt) -> TextStep:
        self.close()
        self._schema = action_schema(self._http("/schema"))
        if self._action_field and self._action_field not in self._schema.get("properties", {}):
            fields = self._schema.get("properties", {})
            raise RequestError(
                f"{self._url.netloc}: an action has no field {self._action_field!r}"
                f"{did_you_mean(self._action_field, fields)}; it has {', '.join(fields)}"
            )
        try:
            self._connection = WebSocket(self._url, TIMEOUT_S)
        except OSError as error:
            raise EnvironmentFault(f"no connection to {self._url.geturl()}: {error}") from error
        data = {key: value for key, value in prompt.data.items() if key != "held_out"}
        answer = self._ask("reset", {"seed": prompt.seed, **self._options, **data})
        parts = (self._instructions, self._how_to_act(), self._text(answer))
        return TextStep("\n\n".join(filter(None, parts)))

    def step(self, action: str) -> TextStep:
        try:
            data = self._parsed(action)
        except ValueError as error:
            return TextStep(str(error))
        answer = self._ask("step", data)
        if answer["type"] == "error":
            return TextStep(_complaint(answer["data"]))
        outer = answer["data"]
        return TextStep(self._text(answer), float(outer.get("reward") or 0.0), done=bool(outer.get("done")))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """Stop waiting for the server. Called by another thread."""
        connection = self._connection
        if connection is not None:
            connection.abort()

    def random_action(self, seed: int) -> str:
        chance = random.Random(seed)
        if self._field():
            kind = self._schema["properties"][self._field()]
            return str(sample(kind, chance))
        return json.dumps(sample(self._schema, chance))

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            raise EnvironmentFault("step before reset: there is no connection yet")
        try:
            self._connection.send(json.dumps({"type": kind, "data": data}))
            answer: dict[str, Any] = json.loads(self._connection.receive())
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{self._url.geturl()}: {error}") from error
        if answer.get("type") == "observation":
            return answer
        problem = answer.get("data") or {}
        code, message = problem.get("code"), problem.get("message")
        if kind == "step" and code == INVALID:
            return answer
        remedy = (
            "; lower `environments` of the task, or raise max_concurrent_envs of the server" if code == FULL else ""
        )
        raise EnvironmentFault(f"{self._url.netloc} answered a {kind} with {code}: {message}{remedy}")

    def _field(self) -> str:
        """The field that takes the agent's text; empty if an answer is a JSON object."""
        if self._action_field:
            return self._action_field
        properties = _own(self._schema.get("properties", {}))
        required = [name for name in self._schema.get("required", ()) if name in properties] or list(properties)
        one = required[0] if len(required) == 1 else ""
        return one if one and properties[one].get("type") in ("string", "integer", "number") else ""

    def _parsed(self, text: str) -> dict[str, Any]:
        field = self._field()
        if field:
            kind = self._schema["properties"][field].get("type")
            try:
                return {field: {"integer": int, "number": float}.get(kind, str)(text)}
            except ValueError:
                raise ValueError(f"{text.strip()[:100]!r} is not a number.") from None
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"This is not a JSON object ({error}). {self._how_to_act()}") from None
        if not isinstance(found, dict):
            raise ValueError(f"This is JSON but not an object. {self._how_to_act()}")
        return found

    def _how_to_act(self) -> str:
        if self._field():
            return ""
        fields = {name: field.get("type", "any") for name, field in _own(self._schema.get("properties", {})).items()}
        return f"Answer with a JSON object of these fields: {json.dumps(fields)}"

    def _text(self, answer: dict[str, Any]) -> str:
        observation = answer["data"].get("observation", {})
        if not isinstance(observation, dict):
            return str(observation)
        if self._observation_field:
            if self._observation_field not in observation:
                near = did_you_mean(self._observation_field, observation)
                raise EnvironmentFault(f"an observation has no field {self._observation_field!r}{near}")
            return _plain(observation[self._observation_field])
        own = _own(observation)
        if len(own) == 1:
            return _plain(next(iter(own.values())))
        return "\n".join(f"{name}: {_plain(value)}" for name, value in own.items())

    def _http(self, path: str) -> str:
        scheme = "https" if self._url.scheme == "wss" else "http"
        base = self._url.path[: -len("/ws")]
        return f"{scheme}://{self._url.netloc}{base}{path}"


def server_url(id: str) -> SplitResult:
    """The WebSocket of a server.

    >>> server_url("127.0.0.1:8000").geturl(), server_url("https://envs.example/echo/").geturl()
    ('ws://127.0.0.1:8000/ws', 'wss://envs.example/echo/ws')
    """
    url = urlsplit(id if "://" in id else f"http://{id}")
    if url.scheme not in SCHEMES or not url.hostname:
        raise RequestError(f"openenv:{id} names no server; write openenv:http://HOST:PORT")
    path = url.path.rstrip("/")
    return url._replace(scheme=SCHEMES[url.scheme], path=path if path.endswith("/ws") else f"{path}/ws")


@lru_cache(maxsize=64)
def action_schema(url: str) -> dict[str, Any]:
    """JSON schema of an action, from the server."""
    try:
        with urlopen(url, timeout=SCHEMA_TIMEOUT_S) as answer:
            schema = json.loads(answer.read())
    except (URLError, OSError, ValueError) as error:
        raise EnvironmentFault(f"no schema at {url}: {error}. Is it an OpenEnv server, and does it run?") from error
    found: dict[str, Any] = schema.get("action", {})
    return found


def sample(schema: dict[str, Any], chance: random.Random) -> Any:
    """Something that a schema may accept."""
    if schema.get("enum"):
        return chance.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return chance.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 9)))
        case "number":
            return chance.uniform(schema.get("minimum", 0.0), schema.get("maximum", 1.0))
        case "boolean":
            return chance.random() < 0.5
        case "array":
            return []
        case "object":
            required = schema.get("required", ())
            return {
                name: sample(each, chance) for name, each in schema.get("properties", {}).items() if name in required
            }
    return chance.choice(("hello", "look", "yes", "1", "go north"))


def _complaint(problem: dict[str, Any]) -> str:
    """What the server says about an invalid action."""
    errors = problem.get("errors")
    details = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in errors or ()]
    return f"{problem.get('message')}: {'; '.join(details)}" if details else str(problem.get("message"))


def _own(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in BESIDES}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
