"""What runs inside vLLM's worker processes, one of which hosts each rank of an engine: staging and loading of weights.

vLLM mixes `Rank` into its worker class (`worker_extension_cls`) and calls its methods by name. A version is fetched in
a thread, because a call of a worker holds up the steps of the whole engine.

What holds: a rank loads only a version of which it has verified every bucket by the digests of the `Stage` command,
and whose tensors are exactly those of the model.
"""

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.backends.engines.staging import Staging, Tensors
from rollart.ports.weights import WeightStore
from rollart.types.errors import InvariantBroken
from rollart.types.messages import Staged, StageFailed
from rollart.types.versions import Version
from rollart.types.weights import Manifest


class Rank:
    """Mixed into vLLM's worker; the names of all that it adds start with `rollart_`."""

    rollart_versions: "dict[Version, _Fetching]"
    rollart_wanted: Mapping[str, torch.Tensor]
    model_config: Any  # vLLM's own, of the worker
    reload_weights: Any

    def rollart_open(self) -> None:
        """Be ready to stage; what was staged before is forgotten."""
        self.rollart_versions = {}
        # Here and not in the thread that fetches: building a model sets torch's default dtype, which is everybody's.
        self.rollart_wanted = checkpoint_tensors(self.model_config.model)

    def rollart_stage(self, manifest: bytes, store: bytes) -> None:
        """Start to fetch the version of a manifest from a store, pickled by the engine that owns this process."""
        whole = msgspec.json.decode(manifest, type=Manifest)
        self.rollart_versions[whole.version] = _Fetching(whole, pickle.loads(store), self.rollart_wanted)

    def rollart_staged(self, epoch: int, step: int) -> str | None:
        """What became of a version: None while it is fetched, "" when it is here and verified, else what failed."""
        return self.rollart_versions[Version(epoch, step)].answer

    def rollart_load(self, epoch: int, step: int) -> None:
        """Serve a staged version from the next step on; it and those before it are no longer staged."""
        version = Version(epoch, step)
        tensors = self.rollart_versions[version].take()
        self.rollart_versions = {other: kept for other, kept in self.rollart_versions.items() if other > version}
        self.reload_weights(weights_iterator=iter(tensors.items()))


class _Fetching:
    """One version on its way, in a thread of its own."""

    def __init__(self, manifest: Manifest, store: WeightStore, wanted: Mapping[str, torch.Tensor]) -> None:
        self.answer: str | None = None
        self._version = manifest.version
        self._staging: Staging[Tensors] = Staging(store, wanted, adapters=False)
        self._staging.begin(manifest)
        threading.Thread(target=self._fetch, name=f"stage-{manifest.version}", daemon=True).start()

    def _fetch(self) -> None:
        said: Staged | StageFailed | None = None
        while said is None:
            said = self._staging.slice()
        self.answer = said.reason if isinstance(said, StageFailed) else ""

    def take(self) -> Tensors:
        tensors = self._staging.take(self._version)
        if tensors is None:
            raise InvariantBroken(f"{self._version} is to be loaded but not staged; this is a bug of rollart")
        return tensors


def checkpoint_tensors(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of this model, by the names under which a trainer publishes them; without memory."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return dict(model.state_dict())
