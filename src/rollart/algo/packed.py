"""The action tokens of a micro-batch, without padding: one number per token in 1-D tensors, and whose token it is.

    sequence    0  0  0  1  1  2  2  2  2          sequences = 3
    logprobs    ·  ·  ·  ·  ·  ·  ·  ·  ·          only tokens that the policy sampled: no prompt, no observation

Totals are those of the whole optimiser batch, over micro-batches and ranks. Losses and gradients of its micro-batches
therefore add up to those of the batch in one piece, however it is cut, as long as no sequence is cut.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """See the module. Every sequence from 0 to `sequences` − 1 has at least one token, all of its tokens here."""

    logprobs: torch.Tensor
    """log π_θ, with the gradient."""
    behaviour: torch.Tensor
    """log π_b: of the policy that sampled the token, whichever version that was, as the engine reported it."""
    advantages: torch.Tensor
    sequence: torch.Tensor
    """int64, from 0; need not be sorted."""
    sequences: int
    total_tokens: float
    """What a mean over tokens divides by. Dr. GRPO gives sequences × longest answer here: a constant."""
    total_sequences: float
    proximal: torch.Tensor | None = None
    """log π_prox: of the weights before the first update on this batch, recomputed by the trainer. None = take π_b."""
    reference: torch.Tensor | None = None
    """log π_ref: of the frozen policy that the KL penalty holds to."""
    entropy: torch.Tensor | None = None
    """H(π_θ) where the token was sampled, with the gradient."""

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
    """(sequences,): the sum of every sequence's tokens."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_lengths(values: torch.Tensor, sequence: torch.Tensor, sequences: int) -> torch.Tensor:
    """(sequences,): tokens of every sequence, in the type of `values`."""
    return sequence_sums(torch.ones_like(values), sequence, sequences)
