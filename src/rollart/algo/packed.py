"""Action tokens of a micro-batch without padding: 1-D tensors with one entry per token, and its sequence index.

    sequence    0  0  0  1  1  2  2  2  2          sequences = 3
    logprobs    ·  ·  ·  ·  ·  ·  ·  ·  ·          only tokens that the policy sampled: no prompt, no observation

Totals cover the whole optimiser batch, over all micro-batches and ranks. Losses and gradients of micro-batches
therefore sum to those of the undivided batch, as long as no sequence is split.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Action tokens of a micro-batch. Sequences 0 to `sequences` − 1 are complete and have at least one token each."""

    logprobs: torch.Tensor
    """log π_θ, with gradient."""
    behaviour: torch.Tensor
    """log π_b of whichever version sampled the token, as reported by the engine."""
    advantages: torch.Tensor
    sequence: torch.Tensor
    """int64 sequence index, from 0; need not be sorted."""
    sequences: int
    total_tokens: float
    """Divisor of a mean over tokens. Dr. GRPO passes a constant here: sequences × longest answer."""
    total_sequences: float
    proximal: torch.Tensor | None = None
    """log π_prox: of the weights before the first update on this batch, recomputed by the trainer. None: use π_b."""
    reference: torch.Tensor | None = None
    """log π_ref: of the frozen policy that the KL penalty refers to."""
    entropy: torch.Tensor | None = None
    """H(π_θ) at the sampled token, with gradient."""

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        if len(shape) != 1:
            raise ValueError(f"logprobs must be 1-D, one number per action token, not of shape {tuple(shape)}")
        for name in ("behaviour", "advantages", "sequence", "proximal", "reference", "entropy"):
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}: one per action token")
            if tensor.requires_grad and name != "entropy":
                raise ValueError(f"{name} is a constant of the loss and must not carry a gradient; detach it")
        if self.sequence.dtype != torch.int64:
            raise ValueError(f"sequence must be int64, not {self.sequence.dtype}")
        if not (self.total_tokens > 0 and self.total_sequences > 0):
            raise ValueError(f"totals must be positive, not {self.total_tokens:g} and {self.total_sequences:g}")


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor, sequences: int) -> torch.Tensor:
    """(sequences,): sum over the tokens of each sequence."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_lengths(values: torch.Tensor, sequence: torch.Tensor, sequences: int) -> torch.Tensor:
    """(sequences,): number of tokens of each sequence, in the dtype of `values`."""
    return sequence_sums(torch.ones_like(values), sequence, sequences)
