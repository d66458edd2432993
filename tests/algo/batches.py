"""Packed batches for the tests: made by hand, drawn, and cut into micro-batches."""

from dataclasses import replace

import torch

from rollart.algo.packed import PackedBatch

FIELDS = ("logprobs", "behaviour", "advantages", "proximal", "reference", "entropy")


def packed(lengths, *, seed=0, spread=0.3, per_token=False, **given):
    """A float64 batch of sequences of these lengths, its log-probabilities `spread` apart."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    tokens = len(sequence)

    def noise():
        return torch.randn(tokens, generator=generator, dtype=torch.float64)

    base = -noise().abs() - 0.5
    advantages = noise() if per_token else noise()[: len(lengths)][sequence]
    fields = {
        "logprobs": base,
        "behaviour": base + spread * noise(),
        "proximal": base + spread * noise(),
        "reference": base + spread * noise(),
        "entropy": noise().abs(),
        "advantages": advantages,
    } | {name: None if value is None else torch.as_tensor(value).double() for name, value in given.items()}
    fields["logprobs"] = fields["logprobs"].detach().clone().requires_grad_()
    return PackedBatch(
        sequence=sequence,
        sequences=len(lengths),
        total_tokens=tokens,
        total_sequences=len(lengths),
        **fields,
    )


def cut(batch, keep):
    """The micro-batch of these sequences; the totals stay those of the batch."""
    chosen = torch.isin(batch.sequence, torch.tensor(keep))
    _, sequence = torch.unique(batch.sequence[chosen], return_inverse=True)
    parts = {name: getattr(batch, name) for name in FIELDS}
    return replace(
        batch,
        sequence=sequence,
        sequences=len(keep),
        **{name: None if tensor is None else tensor[chosen] for name, tensor in parts.items()},
    )


def gradient(loss, batch):
    return torch.autograd.grad(loss, batch.logprobs, retain_graph=True)[0]
