"""What adapters of libraries share: imports, names that do not exist, downloads, and the library's randomness."""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rollart.config.suggest import did_you_mean
from rollart.types.errors import RequestError

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Environment variables that keep Hugging Face libraries offline."""
FETCH = "Nothing is downloaded during a run; fetch it beforehand"
_NLTK = re.compile(r"nltk\.download\('([^']+)'\)")
_imports = threading.RLock()
_global_chance = threading.RLock()


def library(module: str, package: str) -> Any:
    """Import the module of a library, which `package` installs."""
    try:
        with _imports:
            return importlib.import_module(module)
    except ImportError as error:
        raise RequestError(
            f"{sys.executable} cannot import {module} ({error}); install {package} there, or set `python` of the task "
            "to an interpreter that has it"
        ) from error


def unknown(prefix: str, id: str, known: Iterable[str]) -> RequestError:
    """A name that the library does not have."""
    return RequestError(f"{prefix} has no environment {id!r}{did_you_mean(id, known)}")


class NeedsDownload(Exception):
    """The library wants to fetch something. The message is what."""


@contextmanager
def no_download(name: str, dataset: str = "") -> Iterator[None]:
    """Refuse what a library downloads while this is open, with the reason; what is already here is used.

    `dataset`: the one of the Hugging Face hub that it needs.
    """
    before = {key: os.environ.get(key) for key in OFFLINE}
    os.environ.update(OFFLINE)
    hub = f"the dataset {dataset} of the Hugging Face hub" if dataset else "something of the Hugging Face hub"
    try:
        yield
    except NeedsDownload as error:
        raise RequestError(f"{name} needs a download: {error}. {FETCH}") from error
    except LookupError as error:
        found = _NLTK.search(str(error))
        if found is None:
            raise
        raise RequestError(f"{name} needs a download: {nltk_data(found[1])}. {FETCH}") from error
    except ImportError as error:
        also = f" It also needs {hub}, which is a download. {FETCH}" if dataset else ""
        raise RequestError(f"{name} needs more packages: {error}; install them.{also}") from error
    except OSError as error:
        if not dataset:
            raise
        raise RequestError(f"{name} needs a download: {hub} ({error}). {FETCH}") from error
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def nltk_data(name: str) -> str:
    return f"nltk's data {name!r} ({sys.executable} -m nltk.downloader {name})"


class OwnChance:
    """Random state of one environment, for libraries that draw from the global generators of `random` and numpy.

    Without it, environments of one process would draw from each other's sequences, and a seed would not determine an
    episode. While one is open, others wait.
    """

    def __init__(self, seed: int = 0) -> None:
        self._state: Any = None
        self._numpy_state: Any = None
        self._seed = seed

    def seed(self, seed: int) -> None:
        """Start again."""
        self._state = self._numpy_state = None
        self._seed = seed

    @contextmanager
    def used(self) -> Iterator[None]:
        """Install this environment's random state for the calls of the library."""
        numpy = sys.modules.get("numpy")
        with _global_chance:
            before, numpy_before = random.getstate(), None if numpy is None else numpy.random.get_state()
            if self._state is None:
                random.seed(self._seed)
            else:
                random.setstate(self._state)
            if numpy is not None:
                if self._numpy_state is None:
                    numpy.random.seed(self._seed % 2**32)
                else:
                    numpy.random.set_state(self._numpy_state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(before)
                if numpy is not None:
                    self._numpy_state = numpy.random.get_state()
                    numpy.random.set_state(numpy_before)


@contextmanager
def no_nltk_download() -> Iterator[None]:
    """Refuse `nltk.download` of what is not here. Only while no other thread uses the library."""
    try:
        nltk: Any = importlib.import_module("nltk")
    except ImportError:  # then nothing calls it
        yield
        return

    def download(name: str = "", *_: Any, **__: Any) -> bool:
        for folder in ("corpora", "tokenizers", "taggers"):
            for place in (f"{folder}/{name}", f"{folder}/{name}.zip"):
                try:
                    nltk.data.find(place)
                except LookupError:
                    continue
                return True
        raise NeedsDownload(nltk_data(name))

    before, nltk.download = nltk.download, download
    try:
        yield
    finally:
        nltk.download = before
