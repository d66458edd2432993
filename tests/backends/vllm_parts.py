"""A vLLM engine small enough for a test, started once: starting takes longer than all the tests together."""

import functools
import pickle
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig
from worker_settings import worker_settings

from rollart.backends.engines.vllm import VllmEngine, VllmEngineSettings
from rollart.backends.engines.vllm_core import VllmCore
from rollart.backends.models import build_model
from rollart.backends.stores.memory import MemoryStore
from rollart.backends.stores.shared import SharedMemoryStore
from rollart.backends.stores.tensors import pack
from rollart.conformance.engine import EngineHarness
from rollart.ports.weights import WeightStore
from rollart.types.tokens import Segment
from rollart.types.versions import Version
from rollart.types.weights import Manifest

VOCABULARY = 64
BLOCK_TOKENS = 32
MAX_CONTEXT = 512
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # so that the distribution is far from uniform
}


def model_folder(folder: Path) -> Path:
    """A config and a tokenizer in which every token is one letter; no weights, which come from a store."""
    folder.mkdir(parents=True)
    AutoConfig.for_model(**MODEL).save_pretrained(folder)
    letters = {chr(0x100 + token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(0x100)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


ARGUMENTS = {
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.2,
    "enforce_eager": True,
}


def settings(folder: Path, store: WeightStore | None, **changes: Any) -> dict[str, Any]:
    flat = {
        "model": str(folder),
        "store": store,
        "slots": 4,
        "max_context": MAX_CONTEXT,
        "progress_interval_s": 0.1,
        "vllm": ARGUMENTS,
    } | changes
    return worker_settings(VllmEngine, flat)


class SpareCore(VllmCore):
    """Outlives the engine that uses it."""

    def close(self) -> None:
        pass

    def really_close(self) -> None:
        super().close()


@functools.cache
def spare_core(folder: Path) -> SpareCore:
    return SpareCore(VllmEngineSettings.model_validate(settings(folder, None)).vllm_arguments())


def model(seed: int) -> Any:
    return build_model({"config": MODEL}, dtype="float32", device="cpu", seed=seed)


def publish(store: WeightStore, version: Version) -> Manifest:
    tensors = model(1000 * version.epoch + version.step).state_dict()
    manifest, buckets = pack(tensors, version=version, parent=None, bucket_bytes=1 << 15)
    store.publish(manifest, buckets)
    return manifest


def harness(folder: Path, store: WeightStore, **changes: Any) -> EngineHarness:
    options = settings(folder, store, **changes)
    return EngineHarness(
        build=lambda wake: VllmEngine(options, wake, start=lambda _settings: spare_core(folder)),
        publish=lambda version: publish(store, version),
        tokens=lambda count: Segment.of([(7 * index + 3) % VOCABULARY for index in range(count)]),
        virtual=False,
        corrupt=lambda manifest: corrupt(store, manifest.version),
        every_token=tuple(range(VOCABULARY)),
        long_turn=128,
        cache_block=BLOCK_TOKENS,
    )


def corrupt(store: WeightStore, version: Version) -> None:
    """Flips a byte where the store keeps it: reaches in, they have no fault of their own to offer."""
    if isinstance(store, MemoryStore):
        manifest, (first, *rest) = store._versions[version]
        store._versions[version] = (manifest, (bytes([first[0] ^ 1]) + first[1:], *rest))
        return
    assert isinstance(store, SharedMemoryStore)
    first = bytes(store.bucket(version, 0))
    for slot in store._folder.glob("slot-*"):
        slot.write_bytes(slot.read_bytes().replace(first, bytes([first[0] ^ 1]) + first[1:]))


def shared(root: Path) -> SharedMemoryStore:
    """As a process of its own would see it too."""
    store = SharedMemoryStore.create("weights", slot_bytes=1 << 21, slots=4, root=root)
    assert pickle.dumps(store)
    return store
