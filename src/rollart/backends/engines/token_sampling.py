"""Sampling of tokens from logits: one draw per token, from the request's seed and the token's position.

The draw is a hash of (seed, position), and selects a token by the cumulative probabilities. So samples depend on
weights, context, seed and position, never on the rest of the batch, and a turn that continues on another engine draws
what it would have drawn here. (With torch, logits differ in their last bits with the height of the matrices; a draw
within such a bit of a boundary may go either way.)

Invariants: the log-probability is that of the full softmax at the request's temperature (at 0, greedy, at 1), whatever
`top_p` and `top_k` exclude.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollart.backends.native.kernels import native_kernels
from rollart.types.messages import Sampling
from rollart.types.tokens import LOGPROB, TOKEN

BLOCK_TOKENS = 64
"""Block size of cumulative sums: over blocks, then within one; less work and rounding than over a whole row."""


class Sampled(NamedTuple):
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def draws(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position), the same in every process.

    >>> draws([7, 7, 8], [0, 1, 0]).round(3).tolist()
    [0.504, 0.779, 0.057]
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    mixed = _mix(_mix(key) ^ _mix(~np.array(positions, dtype=np.uint64)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bijection of 64-bit numbers in which every input bit affects half of the output."""
    values = values + np.uint64(0x9E37_79B9_7F4A_7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


@torch.inference_mode()
def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Sampled:
    """Sample a token per row of `logits` (float32, overwritten); `positions` are those of the new tokens."""
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits /= torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    drawn = torch.from_numpy(draws([sampling.seed for sampling in samplings], positions)).to(logits.device)
    greedy = [row for row, sampling in enumerate(samplings) if not sampling.temperature]
    cut = [row for row, sampling in enumerate(samplings) if sampling.temperature and _cuts(sampling)]
    others = greedy + cut
    if not others:
        return _sampled(*_draw(logits, drawn))
    plain = sorted(set(range(len(samplings))).difference(others))
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), device=logits.device)
    if plain:
        tokens[plain], logprobs[plain] = _draw(logits[plain], drawn[plain])
    if greedy:
        tokens[greedy] = logits[greedy].argmax(dim=-1)
    if cut:
        masses = torch.softmax(logits[cut], dim=-1)
        tokens[cut] = _inverse_of_cut(masses, drawn[cut], [samplings[row] for row in cut])
    logprobs[others] = torch.log_softmax(logits[others], dim=-1).gather(-1, tokens[others, None]).squeeze(-1)
    return _sampled(tokens, logprobs)


def _sampled(tokens: torch.Tensor, logprobs: torch.Tensor) -> Sampled:
    return Sampled(tokens.cpu().numpy().astype(TOKEN), logprobs.cpu().numpy().astype(LOGPROB))


def _draw(logits: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens from the full softmax, and their log-probabilities."""
    kernels = native_kernels() if logits.device.type == "cpu" and logits.is_contiguous() else None
    if kernels is None:
        probabilities = torch.softmax(logits, dim=-1)
        tokens = _inverse(probabilities, drawn)
        return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log_()
    rows, vocabulary = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    out = tokens.data_ptr(), logprobs.data_ptr()
    kernels.sample(logits.data_ptr(), drawn.data_ptr(), rows, vocabulary, *out)
    return tokens, logprobs


def _cuts(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1.0


def _inverse(probabilities: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Index of each draw in the cumulative probabilities of its row."""
    rows, vocabulary = probabilities.shape
    if vocabulary % BLOCK_TOKENS:
        probabilities = torch.nn.functional.pad(probabilities, (0, -vocabulary % BLOCK_TOKENS))
    blocks = probabilities.view(rows, -1, BLOCK_TOKENS)
    block, inside = _fall(blocks.sum(-1), drawn)
    chosen = blocks[torch.arange(rows, device=blocks.device), block]
    token, _ = _fall(chosen, inside)
    return block * BLOCK_TOKENS + token


def _fall(masses: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the mass in its row that a draw falls into, never one of mass 0, and how far into it, as a share."""
    ends = masses.double().cumsum(-1)
    target = drawn[:, None] * ends[:, -1:]
    index = (ends <= target).sum(-1, keepdim=True).clamp_(max=masses.shape[-1] - 1)
    mass = masses.gather(-1, index).double()
    if not mass.all():
        # Rounding put a draw close to 1 past the end: it belongs to the last mass that is not 0.
        last = masses.shape[-1] - 1 - (masses.flip(-1) > 0).int().argmax(-1, keepdim=True)
        index = torch.minimum(index, last)
        mass = masses.gather(-1, index).double()
    share = (target - (ends.gather(-1, index) - mass)) / mass
    return index.squeeze(-1), share.squeeze(-1).clamp_(0.0, 1.0)


def _inverse_of_cut(probabilities: torch.Tensor, drawn: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The same among the most likely tokens only: first the `top_k`, then the share `top_p` of their probability."""
    masses, order = probabilities.double().sort(dim=-1, descending=True, stable=True)
    vocabulary = masses.shape[-1]
    limits = torch.tensor([sampling.top_k or vocabulary for sampling in samplings], device=masses.device)
    shares = torch.tensor([sampling.top_p for sampling in samplings], dtype=masses.dtype, device=masses.device)
    masses = masses.masked_fill(torch.arange(vocabulary, device=masses.device) >= limits[:, None], 0.0)
    before = masses.cumsum(-1) - masses
    kept = before < shares[:, None] * masses.sum(-1, keepdim=True)
    kept[:, 0] = True
    index, _ = _fall(masses.masked_fill(~kept, 0.0), drawn)
    return order.gather(-1, index[:, None]).squeeze(-1)
