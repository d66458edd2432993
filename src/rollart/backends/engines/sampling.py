"""One chunk of a turn by `transformers`' own `generate`: the sampling oracle for comparing other engines.

Invariants: a chunk depends only on the weights, its context and the request's seed, never on other samples of the
process; its log-probabilities are those of a training forward pass at the same temperature.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.models import seeded, token_logprobs
from rollart.types.messages import Sampling
from rollart.types.tokens import LOGPROB, TOKEN


class Chunk(NamedTuple):
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def sample_chunk(model: Any, context: NDArray[np.int32], sampling: Sampling, limit: int) -> Chunk:
    """Sample up to `limit` tokens after `context`, fewer if a stop token is sampled, which is then the last."""
    device = model.device
    inputs = torch.from_numpy(context.astype(np.int64)).unsqueeze(0).to(device)
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode(), seeded(seed_at(sampling.seed, context.size), device):
        out = model.generate(
            inputs,
            # Explicit, because `generate` would otherwise infer it from the padding token.
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=limit,
            eos_token_id=list(sampling.stop_tokens) or None,
            pad_token_id=0,  # unused: there is one sequence
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        tokens = out.sequences[0, context.size :]
        logprobs = token_logprobs(torch.cat(out.logits), tokens, sampling.temperature)
    return Chunk(tokens.cpu().numpy().astype(TOKEN), logprobs.cpu().numpy().astype(LOGPROB))


def seed_at(seed: int, position: int) -> int:
    """Seed for tokens from `position` on: different for every position, the same on every engine."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
