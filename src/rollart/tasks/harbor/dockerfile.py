"""The part of the Dockerfile language that can be built without Docker. The rest is refused by name and line.

>>> file = parse("FROM python:3.11-slim\\nWORKDIR /app\\nENV A=1 B='x y'\\nCOPY a.py b/ ./\\nRUN echo $A \\\\\\n  > c")
>>> file.image, [(step.line, step.name) for step in file.steps]
('python:3.11-slim', [(2, 'WORKDIR'), (3, 'ENV'), (4, 'COPY'), (5, 'RUN')])
>>> parse("FROM debian\\nEXPOSE 80")
Traceback (most recent call last):
    ...
rollart.tasks.harbor.dockerfile.DockerfileRefused: line 2: EXPOSE is not supported; FROM, RUN, COPY, WORKDIR, ENV and \
USER are
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rollart.config.suggest import did_you_mean
from rollart.types.errors import RequestError

SUPPORTED = ("FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER")
_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=\s*(\S+)", re.IGNORECASE)
_FLAG = re.compile(r"--[a-z]+(=\S*)?\s+")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]")
_VARIABLE = r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?:(?P<form>:[-+])(?P<word>[^}]*))?\})"
_WORD = re.compile(rf"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|{_VARIABLE}""")
_IN_QUOTES = re.compile(rf"""\\(?P<escaped>["\\$])|{_VARIABLE}""")
_PAIR = re.compile(r"""([A-Za-z_][\w.-]*)=((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\])*)(?:\s+|$)""")


class DockerfileRefused(RequestError):
    """A line cannot be built here; the message begins with its number."""


class Run(NamedTuple):
    """`command` is a program with its arguments."""

    line: int
    command: tuple[str, ...]
    name: str = "RUN"


class Copy(NamedTuple):
    line: int
    sources: tuple[str, ...]
    target: str
    name: str = "COPY"


class Workdir(NamedTuple):
    line: int
    path: str
    name: str = "WORKDIR"


class Env(NamedTuple):
    line: int
    values: tuple[tuple[str, str], ...]
    name: str = "ENV"


class User(NamedTuple):
    line: int
    user: str
    name: str = "USER"


Step = Run | Copy | Workdir | Env | User


class Dockerfile(NamedTuple):
    """`steps` follow FROM, in order. Variables in them are not expanded yet: see `expanded`."""

    image: str
    steps: tuple[Step, ...]


def parse(text: str) -> Dockerfile:
    image, steps = "", []
    for line, instruction in _instructions(text):
        name, *after = instruction.split(maxsplit=1)
        name, rest = name.upper(), "".join(after)
        if name not in SUPPORTED:
            guess = did_you_mean(name, SUPPORTED)
            raise _refused(line, f"{name} is not supported{guess}; FROM, RUN, COPY, WORKDIR, ENV and USER are")
        if not rest:
            raise _refused(line, f"{name} has no arguments")
        if (name == "FROM") == bool(image):
            raise _refused(
                line, "a second FROM (several stages) is not supported" if image else f"{name} stands before FROM"
            )
        if flag := _FLAG.match(rest):
            raise _refused(line, f"{name} {flag[0].split('=')[0].strip()} is not supported")
        if name == "FROM":
            image = _image(line, rest)
        else:
            steps.append(_step(line, name, rest))
    if not image:
        raise _refused(1, "there is no FROM")
    return Dockerfile(image, tuple(steps))


def expanded(text: str, env: Mapping[str, str]) -> str:
    """A word of an instruction without its quotes, with variables such as `$HOME`, `${A:-else}` and `${A:+then}`.

    >>> expanded(r"$A/${B:-b} ${A:+is} \\$A '$A'", {"A": "a"}), expanded('"$A b"', {"A": "a"})
    ('a/b is $A $A', 'a b')
    """

    def value(found: re.Match[str]) -> str:
        groups = found.groupdict()
        if groups.get("single") is not None:
            return str(groups["single"])
        if groups.get("double") is not None:
            return _IN_QUOTES.sub(value, groups["double"])
        if groups["escaped"] is not None:
            return str(groups["escaped"])
        known = env.get(groups["name"] or groups["braced"], "")
        match groups["form"]:
            case ":-":
                return known or expanded(groups["word"], env)
            case ":+":
                return expanded(groups["word"], env) if known else ""
        return known

    return _WORD.sub(value, text)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Instructions with the number of their first line: continued lines joined, comments and empty lines left out."""
    first, parts = 0, list[str]()
    directives = True
    for number, line in enumerate(text.splitlines(), 1):
        head = line.strip()
        if head.startswith("#"):
            found = _DIRECTIVE.fullmatch(head) if directives else None
            if found and found[1].lower() == "escape" and found[2] != "\\":
                raise _refused(number, "another escape character is not supported")
            continue
        directives = False
        if not head:
            continue
        first = first or number
        continued = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if continued else line.rstrip())
        if not continued:
            yield first, "".join(parts).strip()
            first, parts = 0, []
    if parts:
        yield first, "".join(parts).strip()


def _image(line: int, rest: str) -> str:
    words = rest.split()
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise _refused(line, f"FROM {rest!r} cannot be read; write FROM image, or FROM image AS name")
    if "$" in words[0]:
        raise _refused(line, "variables in FROM are not supported")
    return words[0]


def _step(line: int, name: str, rest: str) -> Step:
    if name in ("RUN", "COPY") and _HEREDOC.search(rest):
        raise _refused(line, f"{name} with a here-document is not supported")
    match name:
        case "RUN":
            return Run(line, _exec_form(line, rest) or ("/bin/sh", "-c", rest))
        case "COPY":
            words = _exec_form(line, rest) or tuple(rest.split())
            if len(words) < 2:
                raise _refused(line, "COPY needs a source and a target")
            return Copy(line, words[:-1], words[-1])
        case "WORKDIR":
            return Workdir(line, rest)
        case "ENV":
            return Env(line, _pairs(line, rest))
    return User(line, rest)


def _exec_form(line: int, rest: str) -> tuple[str, ...]:
    """The words of a JSON list; empty if it is not one."""
    if not rest.startswith("["):
        return ()
    try:
        words = json.loads(rest)
    except ValueError:
        return ()  # Docker reads it as text too
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise _refused(line, "a list in brackets has one or more texts")
    return tuple(words)


def _pairs(line: int, rest: str) -> tuple[tuple[str, str], ...]:
    """`A=1 B="x y"`, or the old form `A 1`."""
    name, *value = rest.split(maxsplit=1)
    if "=" not in name:
        if not value:
            raise _refused(line, f"ENV {rest!r} has no value")
        return ((name, value[0]),)
    found, place = [], 0
    while place < len(rest):
        pair = _PAIR.match(rest, place)
        if pair is None:
            raise _refused(line, f"ENV {rest[place:]!r} cannot be read; write NAME=value")
        found.append((pair[1], pair[2]))
        place = pair.end()
    return tuple(found)


def _refused(line: int, why: str) -> DockerfileRefused:
    return DockerfileRefused(f"line {line}: {why}")
