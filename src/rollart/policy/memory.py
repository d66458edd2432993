"""Memory of an engine and of a trainer rank, as explicit arithmetic.

    P parameters (one layer: P_l), L layers, H hidden width, I width of the MLP, V vocabulary, b bytes of the dtype,
    r ranks of the trainer, g GPUs of an engine, t tokens per pass (`token_budget`, `prefill_tokens`)

    trainer, per rank                          engine, per GPU
    weights       4 · P / r                    weights          b · P / g
    gradients     4 · P / r                    next version     b · P / g      staged beside the one in service
    optimiser     8 · P / r                    KV               kv_mib / g     torch; vLLM takes what is left
    copy          b · P / r       published    activations      b · t · (10 H + 3 I)
    gathered      2 · b · P_l     if r > 1     logits           4 · slots · V
    activations   b · t · L · (10 H + 3 I); with gradient checkpointing b · t · (L · H + 10 H + 3 I)
    logits        8 · t · V

With LoRA, gradients and optimiser are those of the factors. The figures of activations are estimates for attention that
keeps no matrix of scores; everything else is exact up to buckets and the memory of the framework itself.

    >>> model = ModelSize(parameters=8_000_000, layers=4, hidden=256, intermediate=1024, vocabulary=512, kv_bytes=4096)
    >>> model.layer_parameters
    1967232
    >>> total([Part("weights", 32, "4 · P / r"), Part("logits", 8, "8 · t · V")])
    40
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rollart.config.pools import PoolSettings
from rollart.config.schema import RunConfig

BYTES = {"float32": 4, "bfloat16": 2}


class ModelSize(msgspec.Struct, frozen=True, gc=False):
    """Dimensions of a decoder-only model that determine its costs."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_bytes: int
    """Key and value of one token, at two bytes per number."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, if all but the embeddings are in layers."""
        return max(0, self.parameters - self.vocabulary * self.hidden) // self.layers

    @property
    def width(self) -> int:
        """Number of activations per token and layer."""
        return 10 * self.hidden + 3 * self.intermediate


class Part(NamedTuple):
    """A part of the memory of a worker."""

    name: str
    nbytes: int
    formula: str


def total(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)


def trainer_memory(model: ModelSize, config: RunConfig, ranks: int) -> list[Part]:
    """Memory of one rank."""
    trainer, size = config.trainer, BYTES[config.trainer.dtype]
    trained, formula = model.parameters, "P"
    if trainer.lora is not None:
        # Two factors per linear layer: about 14 H · rank numbers in a layer of attention and MLP.
        trained, formula = 14 * model.hidden * trainer.lora.rank * model.layers, "P_lora"
    tokens, width = trainer.token_budget, model.width
    if trainer.gradient_checkpointing:
        kept, kept_formula = model.layers * model.hidden + width, "b · t · (L · H + 10 H + 3 I)"
    else:
        kept, kept_formula = model.layers * width, "b · t · L · (10 H + 3 I)"
    parts = [
        Part("weights", math.ceil(4 * model.parameters / ranks), "4 · P / r"),
        Part("gradients", math.ceil(4 * trained / ranks), f"4 · {formula} / r"),
        Part("optimiser", math.ceil(8 * trained / ranks), f"8 · {formula} / r"),
        Part("published copy", math.ceil(size * trained / ranks), f"b · {formula} / r"),
        Part("activations", size * tokens * kept, kept_formula),
        Part("logits", 8 * tokens * model.vocabulary, "8 · t · V"),
    ]
    if ranks > 1:
        parts.insert(4, Part("gathered layers", 2 * size * model.layer_parameters, "2 · b · P_l"))
    return parts


def engine_memory(model: ModelSize, pool: PoolSettings) -> list[Part]:
    """Memory of an engine, per GPU or on CPUs. vLLM's KV cache is left out, since it takes what remains."""
    gpus, size = max(1, pool.ranks), BYTES[pool.dtype]
    weights = math.ceil(size * model.parameters / gpus)
    parts = [
        Part("weights", weights, "b · P / g"),
        Part("next version", weights, "b · P / g"),
        Part("activations", size * pool.prefill_tokens * model.width, "b · t · (10 H + 3 I)"),
        Part("logits", 4 * pool.slots * model.vocabulary, "4 · slots · V"),
    ]
    if pool.engine == "torch":
        parts.insert(2, Part("KV", math.ceil(pool.kv_mib * 2**20 / gpus), "kv_mib / g"))
    return parts
