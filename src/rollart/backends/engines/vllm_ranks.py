"""Code inside vLLM's worker processes, one per rank of an engine: staging and loading of weights.

vLLM mixes `Rank` into its worker class (`worker_extension_cls`) and calls its methods by name. A version is pulled in a
thread, because a worker call blocks the steps of the whole engine.

Invariants: a rank loads only a version whose buckets it has all verified by the digests of the `Stage` command, and
whose tensors are exactly those of the model.
"""

import atexit
import functools
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.backends.engines.staging import Staging, Tensors
from rollart.ports.weights import WeightStore
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest

ORPHAN_EXIT_S = 3.0
"""Grace period of an engine core whose owner is gone."""


class Rank:
    """Mixin of vLLM's worker; all names that it adds start with `rollart_`."""

    rollart_versions: "dict[Version, _Fetching]"
    rollart_wanted: Mapping[str, torch.Tensor]
    model_config: Any  # attributes of vLLM's worker
    reload_weights: Any

    def rollart_open(self, owner: int) -> None:
        """Reset staging. `owner` is the process that started vLLM."""
        self.rollart_versions = {}
        _skip_finalization()
        _end_with(owner)
        # Not in the pulling thread: building a model sets torch's default dtype, which is process-wide.
        self.rollart_wanted = checkpoint_tensors(self.model_config.model)

    def rollart_stage(self, manifest: bytes, store: bytes) -> None:
        """Start to pull a manifest's version from a store, both serialised by the engine that owns this process."""
        whole = msgspec.json.decode(manifest, type=Manifest)
        self.rollart_versions[whole.version] = _Fetching(whole, pickle.loads(store), self.rollart_wanted)

    def rollart_staged(self, epoch: int, step: int) -> str | None:
        """State of a version: None while it is pulled, "" when it is here and verified, else the failure."""
        return self.rollart_versions[Version(epoch, step)].answer

    def rollart_load(self, epoch: int, step: int) -> None:
        """Serve a staged version from the next step on; it and older ones are no longer staged."""
        version = Version(epoch, step)
        tensors = self.rollart_versions[version].take()
        self.rollart_versions = {other: kept for other, kept in self.rollart_versions.items() if other > version}
        self.reload_weights(weights_iterator=iter(tensors.items()))


def _skip_finalization() -> None:
    """Exit this process without Python's final garbage collections, which walk all of torch and vLLM for seconds.

    vLLM has released everything by then. Only in a process that vLLM started.
    """
    if multiprocessing.parent_process() is not None:
        atexit.unregister(os._exit)
        atexit.register(os._exit, 0)


@functools.cache
def _end_with(owner: int) -> None:
    """End vLLM when its owner is gone, however it ended: otherwise the engine core would stay forever."""
    core = _engine_core(owner)
    if core is not None:
        descriptor = os.pidfd_open(owner)
        threading.Thread(target=_outlive, args=(descriptor, core), name=f"outlive-{owner}", daemon=True).start()


def _engine_core(owner: int) -> int | None:
    """Pid of the engine core, a child of the owner: this process or its parent. None on another machine."""
    if os.getppid() == owner:
        return os.getpid()
    with suppress(OSError):
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        if int(stat.rpartition(")")[2].split()[1]) == owner:
            return os.getppid()
    return None


def _outlive(descriptor: int, core: int) -> None:
    select.select([descriptor], [], [])  # readable once the process is gone
    os.kill(core, signal.SIGTERM)
    time.sleep(ORPHAN_EXIT_S)
    os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class _Fetching:
    """One version being pulled, in its own thread."""

    def __init__(self, manifest: Manifest, store: WeightStore, wanted: Mapping[str, torch.Tensor]) -> None:
        self.answer: str | None = None
        self._version = manifest.version
        self._staging: Staging[Tensors] = Staging(store, wanted, adapters=False)
        self._staging.begin(manifest)
        threading.Thread(target=self._fetch, name=f"stage-{manifest.version}", daemon=True).start()

    def _fetch(self) -> None:
        result: Staged | StageFailed | None = None
        while result is None:
            result = self._staging.slice()
        self.answer = result.reason if isinstance(result, StageFailed) else ""

    def take(self) -> Tensors:
        return self._staging.take(self._version)


def checkpoint_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint of this model, by the names under which a trainer publishes them, without memory."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return dict(model.state_dict())
