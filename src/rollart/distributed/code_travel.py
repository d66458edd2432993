"""The user's code on the nodes of a cluster: what travels, and how a worker there finds it.

Nodes share no disk. Ray takes one folder to every node that runs a worker, as the working directory of its processes:
the folder that the command runs in, or that of the script if it lies elsewhere. `.gitignore` and `.rayignore` are
honoured. Packages on the import path outside of that folder travel one by one; installed packages do not: nodes need
them installed, as they need rollart.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ray._private.runtime_env import packaging

from rollart.ports.import_paths import project_paths
from rollart.types.errors import RequestError

MAX_BYTES = 128 * 2**20
EXCLUDED = ["runs/", ".venv*/", "*.safetensors", "__pycache__/", "session_2*/"]
"""Never code, and often large. The last is Ray's own: it packs the code there, and must not pack the package itself."""
OWN = "rollart"


class Code(NamedTuple):
    """What travels to the nodes."""

    folder: Path
    """It becomes the working directory of workers."""
    import_path: tuple[str, ...]
    """Import path of the controller inside of that folder, relative to it."""
    modules: tuple[str, ...]
    """Packages and modules of the import path outside of it."""

    def runtime_env(self) -> dict[str, Any]:
        """For `ray.init`. Refuses a folder that is too large: Ray would pack it first, and fill the disk with it."""
        excludes = excluded(self.folder, Path(tempfile.gettempdir()))
        check_size(self.folder, excludes)
        code: dict[str, Any] = {"working_dir": str(self.folder), "excludes": excludes}
        return code | ({"py_modules": list(self.modules)} if self.modules else {})


def own_code(cwd: Path, script: str, paths: tuple[str, ...]) -> Code:
    """Code of a controller that was started in `cwd`, with this script (empty if there is none) and import path.

    >>> own_code(Path("/home/me/project"), "/home/me/project/train.py", ("/home/me/project/lib",))[:2]
    (PosixPath('/home/me/project'), ('lib',))
    """
    folder = cwd
    if script and not Path(script).is_relative_to(cwd):
        folder = Path(script).parent
    inside = [Path(path) for path in paths if Path(path).is_relative_to(folder)]
    outside = [Path(path) for path in paths if not Path(path).is_relative_to(folder) and Path(path).is_dir()]
    modules = [str(module) for path in outside for module in sorted(path.iterdir()) if _is_module(module)]
    return Code(folder, tuple(str(path.relative_to(folder)) for path in inside), tuple(modules))


def excluded(folder: Path, temporary: Path) -> list[str]:
    """What does not travel. Refuses a folder of temporary files, to which others write while it is packed.

    >>> excluded(Path("/home/me"), Path("/home/me/tmp"))[-1]
    '/tmp/'
    """
    if temporary == folder or folder == Path("/"):
        raise RequestError(
            f"{folder} would travel to the nodes, as the folder of your code, but it is the folder of temporary files; "
            "start from the folder of your project"
        )
    inside = [f"/{temporary.relative_to(folder)}/"] if temporary.is_relative_to(folder) else []
    return [*EXCLUDED, *inside]


def check_size(folder: Path, excludes: list[str], limit_bytes: int = MAX_BYTES) -> None:
    """Refuse a folder with more than this, without what Ray leaves out."""
    sizes: Counter[str] = Counter()

    def add(file: Path) -> None:
        if file.is_file():
            sizes[file.relative_to(folder).parts[0]] += file.stat().st_size
            if sizes.total() > limit_bytes:
                raise RequestError(
                    f"{folder} would travel to the nodes, as the folder of your code, and has more than "
                    f"{limit_bytes // 2**20} MB, most of it in {sizes.most_common(1)[0][0]}; start from the folder of "
                    "your project, or list data in its .rayignore"
                )

    packaging._dir_travel(folder, [packaging._get_excludes(folder, excludes)], add, include_gitignore=True)


def code_of_this_process() -> Code:
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    # The entry point of an installed command is no code of the user.
    script = "" if Path(main).parent == Path(sys.executable).parent or not main.endswith(".py") else main
    own = Path(__file__).parents[1]
    script = "" if script and Path(script).absolute().is_relative_to(own) else script
    paths = tuple(str(Path(path).absolute()) for path in project_paths() if Path(path).absolute() != own.parent)
    return own_code(Path.cwd(), str(Path(script).absolute()) if script else "", paths)


def _is_module(path: Path) -> bool:
    if path.name == OWN or not path.stem.isidentifier():
        return False
    return (path / "__init__.py").is_file() if path.is_dir() else path.suffix == ".py"
