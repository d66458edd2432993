"""`kernels.cpp`, compiled for this machine at its first use and loaded.

Some seconds, once: what was compiled is kept in the user's cache folder, under a name that tells source, compiler
and processor apart. Without a compiler nothing is lost but speed: `native_kernels` says so once and gives None, and
whoever asked does it with operations of torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
MAX_HEAD_DIM = 512
"""Of what is on the stack."""
TILE = 8
"""Queries that are attended with at once; there is room for their scores."""
ALIGN = 16
"""Positions are read some at a time; capacities are multiples of this."""
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    # Nobody looks at errno or at floating-point exceptions. Infinities mean what they say, so no -ffast-math.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *(f"-DMAX_HEAD_DIM={MAX_HEAD_DIM}", f"-DTILE={TILE}", f"-DALIGN={ALIGN}"),
)
OFF = "ROLLART_NATIVE"
"""Set to 0, it makes everybody do without."""
COMPILE_S = 120.0


class CannotCompile(Exception):
    """With the reason."""


class Heads(ctypes.Structure):
    """As in `kernels.cpp`."""

    _fields_ = (("kv_heads", ctypes.c_int64), ("group", ctypes.c_int64), ("dim", ctypes.c_int64))


_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_HEADS = ctypes.POINTER(Heads)
_ARGUMENTS: dict[str, list[Any]] = {
    "lay_panels": [_POINTER, _NUMBER, _NUMBER, _POINTER],
    "multiply": [_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _POINTER],
    "attend": [_HEADS, _POINTER, _NUMBER, *[_POINTER] * 5],
    "place": [_HEADS, _POINTER, _NUMBER, *[_POINTER] * 3, _FLOAT, _POINTER, _FLOAT, *[_POINTER] * 3],
    "copy_block": [_HEADS, *[_NUMBER] * 8, _POINTER, _POINTER],
    "rms_norm": [_POINTER, _POINTER, _FLOAT, _NUMBER, _NUMBER, _POINTER],
    "gated": [_POINTER, _NUMBER, _NUMBER, _POINTER],
    "sample": [_POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "packed_attend": [_HEADS, _POINTER, _NUMBER, _NUMBER, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 4],
    "packed_attend_back": [_HEADS, _POINTER, _NUMBER, _NUMBER, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 9],
    "rms_norm_shares": [_POINTER, _POINTER, _FLOAT, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "rms_norm_back": [*[_POINTER] * 4, _NUMBER, _NUMBER, _POINTER, _POINTER],
    "turn": [*[_POINTER] * 3, _FLOAT, *[_NUMBER] * 3, _POINTER],
    "gated_pair": [_POINTER, _POINTER, _NUMBER, _POINTER],
    "gated_pair_back": [*[_POINTER] * 3, _NUMBER, _POINTER, _POINTER],
}


@cache
def native_kernels() -> ctypes.CDLL | None:
    """The functions of `kernels.cpp`; None if they cannot be had here."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        library = ctypes.CDLL(str(compiled(cache_folder())))
    except (CannotCompile, OSError) as error:
        logger.warning("no native kernels, torch does their work, more slowly: %s", error)
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"


def compiled(folder: Path) -> Path:
    """The library in `folder`, made now if it is not there. Several processes may do so at the same time."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise CannotCompile(f"there is no C++ compiler ({', '.join(COMPILERS)}); install one, or name one in CXX")
    told = "\n".join((SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor()))
    library = folder / f"kernels-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        draft = Path(beside) / library.name
        _compile([compiler, *FLAGS, str(SOURCE), "-o", str(draft)])
        os.replace(draft, library)
    return library


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(str(error)) from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CannotCompile(f"{' '.join(command)}: {said[0] if said else f'exit {done.returncode}'}")


def _processor() -> str:
    """What `-march=native` means here: folders are shared between machines that are not alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
