"""Harbor's task folders: found, read, and refused if they ask for what cannot be had here.

    tasks/hello/
      task.toml  instruction.md
      environment/Dockerfile …     what the agent's sandbox is built from
      solution/solve.sh …          only for the oracle
      tests/test.sh …              only for grading

The digest of a task covers all its files: it decides whether the task is held out, and a worker that finds other files
than the run was started with refuses to play them.
"""

import hashlib
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rollart.config.load import check
from rollart.tasks.harbor.dockerfile import Dockerfile, parse
from rollart.tasks.harbor.images import Base, base_of
from rollart.tasks.harbor.schema import CollectTable, EnvironmentTable, TaskToml
from rollart.tasks.harbor.support import refusals
from rollart.types.errors import RequestError

TASK = "task.toml"
SHARED, SEPARATE = "shared", "separate"
PUBLISHED = "/logs/artifacts"
"""Harbor's own folder for artifacts, collected from every task."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


class Image(NamedTuple):
    """A Dockerfile with the folder that it copies from, and the digest of both."""

    file: Dockerfile
    context: Path
    base: Base
    digest: str


class Place(NamedTuple):
    """Where commands of the agent or of the tests run."""

    image: Image
    table: EnvironmentTable


class HarborTask(NamedTuple):
    """One task that can be played here. `own_tests`: the image of the verifier has /tests."""

    name: str
    folder: Path
    digest: str
    instruction: str
    config: TaskToml
    agent: Place
    verifier: Place
    own_tests: bool
    mode: str
    artifacts: tuple[str, ...]
    """Paths that a separate grading sandbox gets, besides the working directory if `with_workdir`."""
    with_workdir: bool
    collect: tuple[CollectTable, ...]

    @property
    def grading_s(self) -> float:
        """Limit of grading: of the tests, and of the commands before them."""
        return self.config.verifier.timeout_sec + sum(hook.timeout_sec for hook in self.collect)

    @property
    def has_solution(self) -> bool:
        return (self.folder / "solution" / "solve.sh").is_file()


def find(path: Path) -> dict[str, Path]:
    """Task folders by name: the folder itself if it is one, or those directly in it."""
    if not path.is_dir():
        raise RequestError(f"{path} is no folder; give one with Harbor tasks")
    if (path / TASK).is_file():
        return {path.resolve().name: path}
    found = {folder.name: folder for folder in sorted(path.iterdir()) if (folder / TASK).is_file()}
    if not found:
        raise RequestError(f"{path} has no task of Harbor: neither it nor a folder in it has a {TASK}")
    return found


def digest_of(folder: Path) -> str:
    """Digest of names, contents and executable bits of all files below."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix().encode()
        if path.is_symlink():
            kind, content = b"l", str(path.readlink()).encode()
        elif path.is_file():
            kind, content = (b"x" if path.stat().st_mode & stat.S_IXUSR else b"f"), path.read_bytes()
        else:
            kind, content = b"d", b""
        digest.update(b"%s/%d/%d/%s%s" % (kind, len(name), len(content), name, content))
    return digest.hexdigest()


def read(folder: Path, *, roots: Mapping[str, str], offline: bool = False, undeclared_mode: str = SHARED) -> HarborTask:
    """The task of a folder; `RequestError` with every reason if it cannot be played here."""
    try:
        config = check(TaskToml, tomllib.loads((folder / TASK).read_text(encoding="utf-8")))
        problems = list(refusals(config, folder, offline=offline))
        problems += _missing(folder)
        if problems:
            raise RequestError("; ".join(problems))
        agent = Place(_image(folder, "environment", config.environment, roots), config.environment)
        declared = config.verifier.environment_mode or (SEPARATE if config.verifier.environment else None)
        mode = declared or undeclared_mode
        verifier, own_tests = (agent, False) if mode == SHARED else _verifier(folder, config, agent, roots)
        if not own_tests and not (folder / "tests" / "test.sh").is_file():
            raise RequestError("tests/test.sh is missing")
        instruction = _without_canary((folder / "instruction.md").read_text(encoding="utf-8"))
    except (RequestError, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(f"Harbor task {folder.name}: {error}") from error
    artifacts = [PUBLISHED, *(artifact.source.rstrip("/") for artifact in config.artifacts)]
    return HarborTask(
        name=folder.resolve().name,
        folder=folder,
        digest=digest_of(folder),
        instruction=instruction,
        config=config,
        agent=agent,
        verifier=verifier,
        own_tests=own_tests,
        mode=mode,
        artifacts=tuple(dict.fromkeys(artifacts)),
        with_workdir=declared is None and mode == SEPARATE,
        collect=config.verifier.collect if mode == SEPARATE else (),
    )


def _missing(folder: Path) -> Iterator[str]:
    if not (folder / "instruction.md").is_file():
        yield "instruction.md is missing"
    for name in ("environment", "tests", "solution"):
        for path in sorted((folder / name).rglob("*")) if (folder / name).is_dir() else ():
            if path.is_symlink() and not path.resolve().is_relative_to((folder / name).resolve()):
                yield f"{path.relative_to(folder)} is a link that leaves {name}"


def _verifier(folder: Path, config: TaskToml, agent: Place, roots: Mapping[str, str]) -> tuple[Place, bool]:
    """Where separate tests run, and whether /tests is part of it."""
    table = config.verifier.environment or config.environment
    own = config.verifier.environment is not None and config.verifier.environment.docker_image
    if own or (folder / "tests" / "Dockerfile").is_file():
        return Place(_image(folder, "tests", table if own else EnvironmentTable(), roots), table), True
    return Place(agent.image, table), False


def _image(folder: Path, name: str, table: EnvironmentTable, roots: Mapping[str, str]) -> Image:
    context = folder / name
    try:
        if table.docker_image:
            file = parse(f"FROM {table.docker_image}")
            content = ""
        else:
            file = parse((context / "Dockerfile").read_text(encoding="utf-8"))
            content = digest_of(context)
        base = base_of(file.image, roots)
    except FileNotFoundError:
        raise RequestError(f"{name}/Dockerfile is missing") from None
    except RequestError as error:
        where = f"{name}.docker_image" if table.docker_image else f"{name}/Dockerfile"
        raise RequestError(f"{where}, {error}") from error
    digest = hashlib.blake2b(f"{file}/{base}/{content}".encode(), digest_size=16).hexdigest()
    return Image(file, context, base, digest)


def _without_canary(text: str) -> str:
    """Instructions without the marks of benchmarks at their beginning, which agents do not see in Harbor either."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)
