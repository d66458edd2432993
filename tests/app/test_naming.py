"""What can be named so that a worker finds it, and what is refused before anything starts."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.app.naming import factory_path
from rollart.ports.factory import load
from rollart.tasks.frozenlake import FrozenLake
from rollart.types.errors import RequestError


class Outer:
    class Inner:
        pass

    def method(self) -> None:
        pass


def shadowed() -> None:
    pass


original = shadowed


def shadowed() -> None:  # type: ignore[no-redef]
    pass


def test_classes_and_functions_of_modules() -> None:
    assert factory_path(FrozenLake) == "rollart.tasks.frozenlake:FrozenLake"
    assert factory_path(Outer.Inner) == f"{__name__}:Outer.Inner"
    assert factory_path(json.dumps) == "json:dumps"
    assert factory_path("any.path:At_all") == "any.path:At_all"


class Local:
    @staticmethod
    def make() -> type:
        class Hidden:
            pass

        return Hidden


@pytest.mark.parametrize(
    "target",
    [lambda: None, Local.make(), functools.partial(print), Outer(), 3, original],
    ids=["lambda", "local class", "partial", "instance", "number", "shadowed"],
)
def test_what_has_no_name_for_others_is_refused(target: object) -> None:
    with pytest.raises(RequestError, match="at the top level of a file"):
        factory_path(target)  # type: ignore[arg-type]


BODY = """
from rollart.app.naming import factory_path

class Maze:
    pass

if __name__ == "__main__":
    print(factory_path(Maze))
"""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=250, check=False)


def test_a_script_is_named_by_its_file_and_a_module_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(BODY)
    (tmp_path / "folder" / "script").write_text(BODY)
    assert run("folder/script.py", cwd=tmp_path).stdout == f"{tmp_path}/folder/script.py:Maze\n"
    assert run("-m", "folder.script", cwd=tmp_path).stdout == "folder.script:Maze\n"
    assert "a name that ends in .py" in run("folder/script", cwd=tmp_path).stderr
    assert run("-c", BODY, cwd=tmp_path).stdout == "__main__:Maze\n", "there is no file: only this process has it"


def test_what_only_a_session_has_is_not_found_elsewhere() -> None:
    with pytest.raises(RequestError, match="define it in this one first"):
        load("__main__:NeverDefined")
