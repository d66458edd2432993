"""The tree at the top of `types.errors` is the tree of its classes."""

import inspect
import re

from rollart.types import errors
from rollart.types.errors import ConfigError

TREE_LINE = re.compile(r"^ {4}([│ ├└─]*)([A-Z]\w+)")


def drawn() -> dict[str, str]:
    """Every error of the docstring with its parent."""
    parents: dict[str, str] = {}
    branch: list[str] = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        match = TREE_LINE.match(line)
        if match is not None:
            depth = len(match[1]) // 4
            branch = [*branch[: depth + 1], match[2]]
            parents[match[2]] = branch[-2]
    return parents


def defined() -> dict[str, str]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {name: cls.__base__.__name__ for name, cls in classes if cls.__module__ == errors.__name__ and cls.__base__}


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    assert drawn() == defined()
    assert len(drawn()) > 10


def test_every_error_says_what_it_is() -> None:
    for name in defined():
        assert getattr(errors, name).__doc__, name


def test_a_config_error_names_its_key() -> None:
    error = ConfigError("tasks.maze.share", "is missing")
    assert (str(error), error.path, error.problem) == ("tasks.maze.share: is missing", "tasks.maze.share", "is missing")
    assert str(ConfigError("", "no such file")) == "no such file"
