"""What a reward function needs to run elsewhere, found from its imports without running anything.

    my_rewards.py ──► modules beside it          copied
                  ──► rollart modules            copied, with those that they import in turn
                  ──► installed packages         pinned in requirements.txt

Imports inside of functions count too. Names of `import rollart` count by use: `rollart.Transcript` needs its module,
not the whole package. What is imported by a computed name, and data files of single modules, cannot be found.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import rollart
from rollart.ports.factory import settings_of
from rollart.types.errors import RequestError

OWN = "rollart"
_HOMES: dict[str, str] = {name: home for home, names in rollart._HOMES.items() for name in names}


class Needs(NamedTuple):
    """Files to copy, by their place in the package, and requirements to pin."""

    files: dict[str, Path]
    requirements: tuple[str, ...]


def needs_of(function: str, roots: Iterable[str]) -> Needs:
    """Needs of the function with this factory path, and of the rollart modules `roots`."""
    place, _, name = function.rpartition(":")
    search = _Search()
    for root in roots:
        search.add_own(root)
    if place.endswith(".toml"):
        search.add_file(Path(place).resolve(), Path(place).name, Path(place).resolve().parent)
        table, place = place, settings_of(Path(place), name)[0].rpartition(":")[0]
        if place.endswith(".py") and Path(place).name != place:
            raise RequestError(f"{table}: a package has {place} beside the table; move both into one folder")
    if place.endswith(".py"):
        file = Path(place)
        search.add_file(file.resolve(), file.name, file.resolve().parent)
    else:
        search.add_name(place, Path.cwd(), f"function {place}")
    return Needs(search.files, tuple(sorted(search.requirements)))


class _Search:
    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.requirements: set[str] = set()
        self._distributions = metadata.packages_distributions()

    def add_file(self, file: Path, place: str, folder: Path) -> None:
        """A file that goes to `place`; `folder` is where its imports are looked for first."""
        if place in self.files:
            return
        self.files[place] = file
        if file.suffix == ".py":
            for name in _imports(file, place):
                self.add_name(name, folder, place)

    def add_name(self, name: str, folder: Path, importer: str) -> None:
        """A module by its absolute name; it may be a name inside of a module too."""
        top = name.partition(".")[0]
        if top == OWN:
            self.add_own(name)
        elif top in sys.stdlib_module_names or top == "__future__":
            return
        elif (folder / f"{top}.py").is_file():
            self.add_file(folder / f"{top}.py", f"{top}.py", folder)
        elif (folder / top / "__init__.py").is_file():
            self._add_package(folder / top, folder)
        else:
            self._add_installed(top, importer)

    def add_own(self, name: str) -> None:
        """A module of rollart, its parents, and what it imports."""
        parts = name.split(".")
        root = Path(rollart.__file__).parents[1]
        for length in range(1, len(parts) + 1):
            base = root.joinpath(*parts[:length])
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            if not file.is_file():
                if length == 2 and parts[1] in _HOMES:
                    self.add_own(f"{OWN}.{_HOMES[parts[1]]}")
                return  # a name inside of the module
            place = file.relative_to(root).as_posix()
            if place not in self.files:
                self.files[place] = file
                # The top resolves its names when they are used.
                for imported in _imports(file, place) if length > 1 else ():
                    self.add_name(imported, root, place)

    def _add_package(self, package: Path, folder: Path) -> None:
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                self.add_file(file, file.relative_to(folder).as_posix(), folder)

    def _add_installed(self, top: str, importer: str) -> None:
        # Several where they share a namespace package.
        distributions = [each for each in self._distributions.get(top, ()) if not _is_editable(each)]
        if distributions:
            self.requirements |= {f"{each}=={metadata.version(each)}" for each in distributions}
            return
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            raise RequestError(
                f"{importer} imports {top!r}, which is neither beside it nor installed: install it, or do not import it"
            )
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            self._add_package(origin.parent, origin.parents[1])
        else:
            self.add_file(origin, origin.name, origin.parent)


def _is_editable(distribution: str) -> bool:
    return '"editable": true' in (metadata.distribution(distribution).read_text("direct_url.json") or "")


def _imports(file: Path, place: str) -> Iterator[str]:
    """Absolute names that a file imports, and `rollart.NAME` for what it uses of the top."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read ({error}); fix it") from error
    package = list(Path(place).parent.parts)
    for node in _running_code(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == OWN:
            yield f"{OWN}.{node.attr}"


def _running_code(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += node.orelse
            continue
        yield node
        stack += list(ast.iter_child_nodes(node))
