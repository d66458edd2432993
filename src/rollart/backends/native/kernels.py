"""Compile `kernels.cpp` for this machine on first use, and load it.

Compilation takes a few seconds, once: the library is cached in the user's cache folder under a name derived from
source, compiler and processor. Without a compiler only speed is lost: `native_kernels` logs a warning once and returns
None, and callers fall back to torch operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
MAX_HEAD_DIM = 512
"""Bounds the size of buffers on the stack."""
TILE = 8
"""Queries processed at once; scratch buffers hold their scores."""
ALIGN = 16
"""Positions are read in vectors; capacities are multiples of this."""
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    # errno and floating-point exceptions are never read. Infinities are used as values, so no -ffast-math.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *(f"-DMAX_HEAD_DIM={MAX_HEAD_DIM}", f"-DTILE={TILE}", f"-DALIGN={ALIGN}"),
)
OFF = "ROLLART_NATIVE"
"""Environment variable; 0 disables the kernels."""
COMPILE_S = 120.0
SCRATCH = "compile-"
"""Prefix of the folders in which compilations are under way."""


class CannotCompile(Exception):
    """The kernels cannot be compiled; the message is the reason."""


class Heads(ctypes.Structure):
    """`Heads` of `kernels.cpp`."""

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
    """The functions of `kernels.cpp`; None if they are unavailable here."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        library = ctypes.CDLL(str(compiled(cache_folder())))
    except (CannotCompile, OSError) as error:
        logger.warning("native kernels are unavailable, falling back to slower torch operations: %s", error)
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"


def compiled(folder: Path) -> Path:
    """The library in `folder`, compiled now if it is missing. Safe for concurrent processes."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise CannotCompile(f"no C++ compiler found ({', '.join(COMPILERS)}); install one, or set CXX")
    identity = "\n".join((SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor()))
    library = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        draft = Path(scratch) / library.name
        _compile([compiler, *FLAGS, str(SOURCE), "-o", str(draft)], scratch)
        os.replace(draft, library)
    return library


def _remove_abandoned(folder: Path) -> None:
    """Remove what compilations that were killed left behind."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > 2 * COMPILE_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _compile(command: list[str], scratch: str) -> None:
    """Run the compiler with its temporary files in `scratch`, so that nothing stays elsewhere if it is killed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_S,
            check=False,
            env={**os.environ, "TMPDIR": scratch},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(str(error)) from error
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise CannotCompile(f"{' '.join(command)}: {errors[0] if errors else f'exit {done.returncode}'}")


def _processor() -> str:
    """What `-march=native` means here: cache folders may be shared between different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
