"""A virtual environment that has the packages of this one, made in a moment."""

import site
import venv
from pathlib import Path


def other_python(folder: Path, *, packages: bool = True) -> str:
    """The interpreter of a new environment in `folder`."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    if packages:
        (own,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (own / "those_of_the_tests.pth").write_text("\n".join(lines) + "\n")
    return str(folder / "bin" / "python")
