"""Import paths that belong to the user's project and to no interpreter: those that another interpreter may use too."""

import site
import sys
import sysconfig
from pathlib import Path


def project_paths() -> tuple[str, ...]:
    """Import paths of this interpreter, without its own packages and standard library."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(
        path
        for path in sys.path
        if not path.endswith(".zip") and not any(Path(path).absolute().is_relative_to(folder) for folder in own)
    )
