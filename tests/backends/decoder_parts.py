"""A decoder with memory of its own, driven by hand, and the models it is compared with."""

from typing import Any

import numpy as np
import torch

from rollart.backends.engines.checkpoint_config import read_shape
from rollart.backends.engines.decoder import Decoder
from rollart.backends.engines.kv import KvArena
from rollart.backends.engines.planning import Work, plan_step
from rollart.backends.engines.weights import prepare_now
from rollart.backends.models import build_model

VOCABULARY = 300
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CPU = torch.device("cpu")


def hub_model(config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Any:
    """A model of transformers whose norms and biases are not those of a fresh one, which hide mistakes."""
    model = build_model({"config": config}, dtype=dtype, device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def hub_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float()


class Bench:
    """One decoder and its KV; `feed` computes some tokens of some sequences."""

    def __init__(self, config: dict[str, Any], model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.shape = read_shape({"config": config})
        self.dtype = dtype
        self.decoder = Decoder(self.shape, dtype=dtype, device=CPU, max_context=64)
        self.kv = KvArena(self.shape, budget_bytes=1 << 20, dtype=dtype, device=CPU)
        self.blocks: dict[int, Any] = {}
        self.done: dict[int, int] = {}
        self.load(model)

    def load(self, model: Any) -> None:
        self.weights = prepare_now(model.state_dict(), self.shape, dtype=self.dtype, device=CPU)

    def feed(self, parts: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
        """The next tokens of each sequence; the logits after the last of them."""
        work = []
        for name, tokens in parts.items():
            if name not in self.blocks:
                self.blocks[name], self.done[name] = self.kv.allocate(64), 0
            work.append(Work(self.blocks[name], self.done[name], tokens.astype(np.int32), True))
            self.done[name] += len(tokens)
        plan, owners = plan_step(work, CPU)
        logits = self.decoder.forward(self.weights, self.kv, plan)
        names = list(parts)
        return {names[owner]: logits[row] for row, owner in enumerate(owners)}

    def drop(self, name: int) -> None:
        self.kv.release(self.blocks.pop(name))
        del self.done[name]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())
